"""
Several calls in one ``handle_batch``: what each of them is answered.

``handle_batch(model, events, contexts)`` returns one answer for each event, in their order: what ``handle`` may return,
but for a generator, or an exception, with which this call alone fails. An exception that it raises is that of every
call. A body that cannot be read (`BadBody`) concerns its call only: bodies are read before the calls run,
since a function that has run in part cannot run again.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeAlias

from gpufaas_functions.author import JSON, TEXT, BadBody, Context, Event, HandlerAnswer, to_answer

NAME: Final = "handle_batch"

HandleBatch: TypeAlias = Callable[[list[Event], list[Context]], Any]
"""The author's function, with the model."""

Result: TypeAlias = HandlerAnswer | BaseException
"""What comes of one call: its answer, or what it fails with."""
_MOST_TYPES: Final = 64
_ENOUGH: Final = 16
_BROKEN: Final = (
    "the call ran together with one whose body cannot be read, and may have run in part: it does not run again without "
    "the annotation gpufaas.idempotent"
)


class BadBatch(TypeError):
    """What ``handle_batch`` returned is no list of answers."""


class BrokenBatch(RuntimeError):
    """``handle_batch`` ended since it could not read the body of another call."""


def check(function: Any, module: str) -> None:
    """:raises TypeError: *function*, the ``handle_batch`` of *module*, cannot be one"""
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{module}.py: {NAME}() is async, which is not supported: write def {NAME}")
    if inspect.isgeneratorfunction(function):
        raise TypeError(f"{module}.py: {NAME}() is a generator, and a batch cannot stream: return a list")


class _Reads:
    """How the function has read bodies of one media type (readings: `author.JSON`)."""

    __slots__ = ("asked", "ended", "unused")

    def __init__(self) -> None:
        self.asked = 0
        self.ended = 0
        """So many calls have ended."""
        self.unused = 0
        """It does without these: many calls have, or one whose body cannot be read so."""

    @property
    def tried(self) -> int:
        """The readings in which a body is tried before it runs with others."""
        return (JSON | TEXT) & ~self.unused


_UNKNOWN: Final = _Reads()


class BatchHandler:
    """
    The author's ``handle_batch``, and how it reads bodies, by what it has done so far. By their media type: a function
    may take JSON or an image.
    """

    def __init__(self, handle_batch: HandleBatch, *, idempotent: bool = False) -> None:
        """:param idempotent: calls may run again"""
        self._handle_batch = handle_batch
        self._idempotent = idempotent
        self._reads: dict[str, _Reads] = {}
        """By media type."""
        self._always = 0
        """Readings in which each body is tried: a batch has met one that could not be read so."""

    def run(self, events: Sequence[Event], contexts: Sequence[Context]) -> Iterator[dict[int, Result]]:
        """
        Run calls, and yield what each is answered, by its place: for those of one ``handle_batch`` as soon as they have
        run. A call whose body cannot be read as the function reads it runs by itself, after the others.
        """
        left = list(range(len(events)))
        while left:
            places = [each for each in left if self._can_read(events[each])] or left[:1]
            yield (found := self._run(events, contexts, places))
            left = [each for each in left if each not in found]

    def one(self, event: Event, context: Context) -> Any:
        """A ``handle``, which gives the call to ``handle_batch`` by itself."""
        self._can_read(event)
        ended = False
        try:
            (answer,) = _checked(self._handle_batch([event], [context]), 1)
            ended = True
        finally:
            self._learn((event,), ended=ended)
        if isinstance(answer, KeyboardInterrupt):  # raised, it would end the worker
            raise RuntimeError(f"{NAME}() returned a KeyboardInterrupt in place of an answer")
        if isinstance(answer, BaseException):
            raise answer
        if hasattr(_body_of(answer), "__next__"):
            raise _cannot_stream()
        return answer

    def _run(self, events: Sequence[Event], contexts: Sequence[Context], places: list[int]) -> dict[int, Result]:
        """Run the calls at *places* together, and return what they are answered; those that it leaves out run again."""
        ran = [events[each] for each in places]
        try:
            answers = _checked(self._handle_batch([*ran], [contexts[each] for each in places]), len(places))
        except KeyboardInterrupt:
            raise
        except BaseException as exc:
            self._learn(ran, ended=False)
            if not isinstance(exc, BadBody) or len(places) == 1:
                return dict.fromkeys(places, exc)
            bad: dict[int, Result] = {each: exc for each in places if events[each] is exc.event}
            for each in bad:
                self._always |= events[each].asked
            if bad and self._idempotent:
                return bad
            return dict.fromkeys(places, BrokenBatch(f"{_BROKEN} ({exc})")) | bad
        self._learn(ran, ended=True)
        return dict(zip(places, map(_result, answers), strict=True))

    def _can_read(self, event: Event) -> bool:
        """Read the body of *event* ahead, as the function does; if that is not known yet, in each way."""
        try:
            return event.read_ahead(self._reads.get(_media_type(event), _UNKNOWN).tried | self._always)
        except Exception:
            return True  # there is no room for it, say: the function will meet that

    def _learn(self, events: Sequence[Event], *, ended: bool) -> None:
        """The function has run with *events*. *ended*: it did not raise, so it has read what it reads."""
        for each in events:
            reads = self._reads.get(media_type := _media_type(each))
            if reads is None:
                if len(self._reads) >= _MOST_TYPES:
                    self._reads.clear()  # callers can make up any number of them
                reads = self._reads[media_type] = _Reads()
            reads.asked |= each.asked
            if ended:
                reads.ended += 1
                reads.unused |= JSON | TEXT if reads.ended >= _ENOUGH else each.unreadable
                reads.unused &= ~reads.asked


def _media_type(event: Event) -> str:
    return event.headers.get("content-type", "").partition(";")[0].strip().lower()


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
