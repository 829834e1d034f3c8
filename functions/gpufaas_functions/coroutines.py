"""What an ``async def handle`` returns, and how it is awaited. Used in workers (`async_server`) and in containers."""

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final, TypeAlias

from gpufaas_functions.answers import check_length
from gpufaas_functions.author import Context, Event, HandlerAnswer, keyed, piece_of, to_answer

Pieces: TypeAlias = AsyncIterator[Any]
"""The pieces of an answer that streams, as the author's generator yields them."""
_NONE: Final = object()


def is_async(function: Any) -> bool:
    """Whether *function* is an ``async def``, with or without ``yield``, or an object that is called as one."""
    called = getattr(function, "__call__", None)  # noqa: B004 - it may be asynchronous where the object is not
    return any(inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each) for each in (function, called))


async def called(
    handle: Callable[[Event, Context], Any], event: Event, context: Context
) -> tuple[HandlerAnswer, Pieces | None]:
    """
    Call the author's *handle*. Return its answer, and the pieces of its body if that streams.

    :raises TypeError: the answer cannot be sent; other errors are the author's
    """
    value = handle(event, context)
    value = keyed(await value if inspect.isawaitable(value) else value)
    body = value.get("body") if isinstance(value, dict) else value
    if hasattr(body, "__next__"):
        raise TypeError(
            "an async handler returned a generator, which would keep its other calls waiting: stream with an async "
            "generator (async def with yield)"
        )
    if not hasattr(body, "__anext__"):
        return to_answer(value), None
    nothing: Iterator[bytes] = iter(())
    return to_answer({**value, "body": nothing} if isinstance(value, dict) else nothing), body


async def aopened(answer: HandlerAnswer, pieces: Pieces, length: int) -> bytes:
    """Do what `answers.opened` does: return the first of *pieces*. Without any, the answer is whole."""
    try:
        each = await anext(pieces, _NONE)
        first = b"" if each is _NONE else piece_of(each)
        check_length(length, len(first), is_over=each is _NONE)
    except BaseException:
        await closed(pieces)
        raise
    if each is _NONE:
        answer.body = b""
    return first


async def closed(pieces: Pieces) -> None:
    """Close *pieces*, whatever that raises: the answer is over."""
    close = getattr(pieces, "aclose", None)
    if close is not None:
        with contextlib.suppress(Exception, asyncio.CancelledError):
            await close()
