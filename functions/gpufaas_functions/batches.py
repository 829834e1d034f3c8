"""
Several calls in one ``handle_batch``: what each of them is answered.

``handle_batch(model, events, contexts)`` returns one answer for each event, in their order: what ``handle`` may return,
but for a generator, or an exception, with which this call alone fails. An exception that it raises is that of every
call. A body that cannot be read (`BadBody`) concerns its call only: bodies are read before the calls run,
since a function that has run in part cannot run again.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
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

    __slots__ = ("asked", "ended", "tried")

    def __init__(self) -> None:
        self.asked = 0
        self.ended = 0
        """So many calls have ended."""
        self.tried = JSON | TEXT
        """A body is tried so before it runs with others. The function does without the rest: many calls have, or one
        whose body cannot be read so."""

    def learn(self, event: Event, *, ended: bool) -> None:
        """The function has run with *event*. *ended*: it did not raise, so it has read what it reads."""
        self.asked |= event.asked
        if ended:
            self.ended += 1
            self.tried = self.tried & ~event.unreadable if self.ended < _ENOUGH else 0
        self.tried |= self.asked


class BatchHandler:
    """
    The author's ``handle_batch``, and how it reads bodies, by what it has done so far. By their media type: a function
    may take JSON or an image.
    """

    def __init__(self, handle_batch: HandleBatch, *, idempotent: bool = False) -> None:
        """:param idempotent: calls may run again"""
        self._handle_batch = handle_batch
        self._idempotent = idempotent
        self._reads: dict[bytes, _Reads] = {}
        """By media type."""
        self._always = 0
        """Readings in which each body is tried: a batch has met one that could not be read so."""

    def run(self, events: Sequence[Event], contexts: Sequence[Context]) -> Iterator[dict[int, Result]]:
        """
        Run calls, and yield what each is answered, by its place: for those of one ``handle_batch`` as soon as they have
        run. A call whose body cannot be read as the function reads it runs by itself, after the others.
        """
        reads = list(map(self._reads_of, events))
        left = list(range(len(events)))
        while left:
            places = [each for each in left if self._can_read(events[each], reads[each])] or left[:1]
            yield (found := self._run(events, contexts, reads, places))
            left = [each for each in left if each not in found]

    def one(self, event: Event, context: Context) -> Any:
        """A ``handle``, which gives the call to ``handle_batch`` by itself."""
        reads, ended = self._reads_of(event), False
        self._can_read(event, reads)
        try:
            (answer,) = _checked(self._handle_batch([event], [context]), 1)
            ended = True
        finally:
            reads.learn(event, ended=ended)
        if isinstance(answer, KeyboardInterrupt):  # raised, it would end the worker
            raise RuntimeError(f"{NAME}() returned a KeyboardInterrupt in place of an answer")
        if isinstance(answer, BaseException):
            raise answer
        if hasattr(_body_of(answer), "__next__"):
            raise _cannot_stream()
        return answer

    def _run(
        self, events: Sequence[Event], contexts: Sequence[Context], reads: Sequence[_Reads], places: list[int]
    ) -> dict[int, Result]:
        """Run the calls at *places* together, and return what they are answered; those that it leaves out run again."""
        ended = False
        try:
            returned = self._handle_batch([events[each] for each in places], [contexts[each] for each in places])
            answers = _checked(returned, len(places))
            ended = True
        except KeyboardInterrupt:
            raise
        except BaseException as exc:
            if not isinstance(exc, BadBody) or len(places) == 1:
                return dict.fromkeys(places, exc)
            bad: dict[int, Result] = {each: exc for each in places if events[each] is exc.event}
            for each in bad:
                self._always |= events[each].asked
            if bad and self._idempotent:
                return bad
            return dict.fromkeys(places, BrokenBatch(f"{_BROKEN} ({exc})")) | bad
        finally:
            for each in places:
                reads[each].learn(events[each], ended=ended)
        return dict(zip(places, map(_result, answers), strict=True))

    def _reads_of(self, event: Event) -> _Reads:
        media_type = _media_type(event.content_type)
        if (found := self._reads.get(media_type)) is None:
            if len(self._reads) >= _MOST_TYPES:
                self._reads.clear()  # callers can make up any number of them
            found = self._reads[media_type] = _Reads()
        return found

    def _can_read(self, event: Event, reads: _Reads) -> bool:
        """Read the body of *event* ahead, as the function does; if that is not known yet, in each way."""
        try:
            return event.read_ahead(reads.tried | self._always)
        except Exception:
            return True  # there is no room for it, say: the function will meet that


@lru_cache(_MOST_TYPES)
def _media_type(content_type: bytes) -> bytes:
    return content_type.partition(b";")[0].strip().lower()


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
