"""
Several calls in one ``handle_batch``: what each of them is answered.

``handle_batch(model, events, contexts)`` returns one answer for each event, in their order: what ``handle`` may return,
but for a generator, or an exception, with which this call alone fails. An exception that it raises is that of every
call. A body that is no JSON (`BadBody`) concerns one call: the others run again without it.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from gpufaas_functions.author import BadBody, Context, Event, HandlerAnswer, to_answer

NAME: Final = "handle_batch"

HandleBatch: TypeAlias = Callable[[list[Event], list[Context]], Any]
"""The author's function, with the model."""

Result: TypeAlias = HandlerAnswer | BaseException
"""What comes of one call: its answer, or what it fails with."""


class BadBatch(TypeError):
    """What ``handle_batch`` returned is no list of answers."""


def check(function: Any, module: str) -> None:
    """:raises TypeError: *function*, the ``handle_batch`` of *module*, cannot be one"""
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{module}.py: {NAME}() is async, which is not supported: write def {NAME}")
    if inspect.isgeneratorfunction(function):
        raise TypeError(f"{module}.py: {NAME}() is a generator, and a batch cannot stream: return a list")


def run_batch(handle_batch: HandleBatch, events: Sequence[Event], contexts: Sequence[Context]) -> list[Result]:
    """Return what each of the calls is answered."""
    found: dict[int, Result] = {}
    left = list(range(len(events)))
    while left:
        try:
            returned = handle_batch([events[each] for each in left], [contexts[each] for each in left])
            answers = _checked(returned, len(left))
        except KeyboardInterrupt:
            raise
        except BadBody as exc:
            at = next((each for each in left if events[each] is exc.event), None)
            if at is not None:
                found[at] = exc
                left.remove(at)
                continue
            found.update(dict.fromkeys(left, exc))
        except BaseException as exc:
            found.update(dict.fromkeys(left, exc))
        else:
            found.update(zip(left, map(_result, answers), strict=True))
        break
    return [found[each] for each in range(len(events))]


def one_by_one(handle_batch: HandleBatch) -> Callable[[Event, Context], Any]:
    """Return a ``handle`` that gives each call to *handle_batch* by itself."""

    def handle(event: Event, context: Context) -> Any:
        (answer,) = _checked(handle_batch([event], [context]), 1)
        if isinstance(answer, KeyboardInterrupt):  # raised, it would end the worker
            raise RuntimeError(f"{NAME}() returned a KeyboardInterrupt in place of an answer")
        if isinstance(answer, BaseException):
            raise answer
        if hasattr(_body_of(answer), "__next__"):
            raise _cannot_stream()
        return answer

    return handle


def _checked(returned: Any, calls: int) -> list[Any]:
    if not isinstance(returned, (list, tuple)):
        kind = type(returned).__name__
        raise BadBatch(f"{NAME}() returned {kind}, not a list: return one answer for each of its {calls} events")
    if len(returned) != calls:
        raise BadBatch(f"{NAME}() returned {len(returned)} answers for {calls} events: return one for each")
    return list(returned)


def _result(value: Any) -> Result:
    """Return the answer of one call, or why it has none."""
    if isinstance(value, BaseException):
        return value
    try:
        answer = to_answer(value)
    except Exception as exc:
        return exc
    if answer.body is None:
        return _cannot_stream()
    return answer


def _body_of(value: Any) -> Any:
    return value.get("body") if type(value) is dict else value


def _cannot_stream() -> TypeError:
    return TypeError(f"an answer of {NAME}() cannot stream: return its whole body, or write handle() without batches")
