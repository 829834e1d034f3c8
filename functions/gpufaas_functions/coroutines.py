"""What an ``async def handle`` returns, and how it is awaited. Used in workers (`async_server`) and in containers."""

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeAlias

from gpufaas_functions.author import Context, Event, HandlerAnswer, keyed, piece_of, to_answer

Pieces: TypeAlias = AsyncIterator[Any]
"""The pieces of an answer that streams, as the author's generator yields them."""


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


async def aopened(answer: HandlerAnswer, pieces: Pieces, length: int, *, rests: bool) -> Pieces | None:
    """Do what `answers.opened` does: make the first of *pieces*, and return all as bytes; None: the answer is whole."""
    pieces = _checked(pieces, length, rests=rests)
    if await anext(pieces, None) is not None:
        return pieces
    answer.body = b""
    return None


async def _checked(pieces: Pieces, length: int, *, rests: bool) -> AsyncIterator[bytes]:
    """
    Yield nothing once the first of *pieces* is made, then *pieces* as bytes, and close them.

    :param length: their bytes in all; -1: any number
    :param rests: let other tasks run after each piece
    :raises ValueError: they have more bytes, or fewer
    """
    left, begun = length, False
    try:
        async for each in pieces:
            piece = piece_of(each)
            left -= len(piece)
            if length >= 0 > left:
                raise ValueError(f"the answer is longer than its Content-Length, {length}")
            if not begun:
                begun = True
                yield b""
            yield piece
            # A generator that never waits would stop the other calls, and not see that its caller is gone.
            if rests:
                await asyncio.sleep(0)
        if length >= 0 and left:
            raise ValueError(f"the answer ended {left} bytes before its Content-Length, {length}")
    finally:
        await closed(pieces)


async def closed(pieces: Pieces) -> None:
    """Close *pieces*, whatever that raises: the answer is over."""
    close = getattr(pieces, "aclose", None)
    if close is not None:
        with contextlib.suppress(Exception, asyncio.CancelledError):
            await close()
