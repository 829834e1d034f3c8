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
"""The calls after which we believe that a function does without a reading; one that cannot be read so is enough."""


class BadBatch(TypeError):
    """What ``handle_batch`` returned is not a list of answers."""


def check(function: Any, module: str) -> None:
    """:raises TypeError: *function*, the ``handle_batch`` of *module*, cannot be one"""
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{module}.py: {NAME}() is async, which is not supported: write def {NAME}")
    if inspect.isgeneratorfunction(function):
        raise TypeError(f"{module}.py: {NAME}() is a generator, and a batch cannot stream: return a list")


class BatchHandler:
    """
    The author's ``handle_batch``, and how it reads bodies, by what it has done so far. By their media type: a function
    may take JSON or an image.
    """

    def __init__(self, handle_batch: HandleBatch) -> None:
        self._handle_batch = handle_batch
        self._reads: dict[bytes, tuple[int, int]] = {}
        """By media type: the readings that it has asked for (`author.JSON`), and how many calls have ended."""
        self._always = 0
        """Readings in which each body is tried: a batch has met one that could not be read so."""

    def run(self, events: Sequence[Event], contexts: Sequence[Context]) -> Iterator[dict[int, Result]]:
        """
        Run calls, and yield what each is answered, by its place: for those of one ``handle_batch`` as soon as they have
        run. A call whose body cannot be read as the function reads it runs by itself, after the others.
        """
        types = [each.content_type.partition(b";")[0] for each in events]
        left = list(range(len(events)))
        while left:
            places = [each for each in left if events[each].read_ahead(self._readings(types[each]))] or left[:1]
            yield self._run(events, contexts, types, places)  # in no variable: tracebacks refer to this frame
            left = sorted({*left} - {*places})

    def one(self, event: Event, context: Context) -> HandlerAnswer:
        """A ``handle``, which gives the call to ``handle_batch`` by itself."""
        (found,) = next(self.run([event], [context])).values()
        if isinstance(found, HandlerAnswer):
            return found
        try:
            if isinstance(found, KeyboardInterrupt):  # it would end the worker
                raise RuntimeError(f"{NAME}() returned a KeyboardInterrupt in place of an answer")
            raise found
        finally:
            del found  # its traceback refers to this frame

    def _run(
        self, events: Sequence[Event], contexts: Sequence[Context], types: Sequence[bytes], places: list[int]
    ) -> dict[int, Result]:
        """Run the calls at *places* together, and return what they are answered."""
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
            if exc.event is not None:
                self._always |= exc.event.asked
            broken = RuntimeError(f"the call may have run in part, with one whose body cannot be read ({exc})")
            return {each: exc if events[each] is exc.event else broken for each in places}
        finally:
            for each in places:
                self._learn(types[each], events[each], ended=ended)
        return dict(zip(places, map(_result, answers), strict=True))

    def _readings(self, media_type: bytes) -> int:
        """Return how a body is tried before it runs with others; if that is not known yet, in each way."""
        asked, ended = self._reads.get(media_type, (0, 0))
        return self._always | (asked if ended >= _ENOUGH else JSON | TEXT)

    def _learn(self, media_type: bytes, event: Event, *, ended: bool) -> None:
        """The function has run with *event*. *ended*: it did not raise, so it has read what it reads."""
        if len(self._reads) > _MOST_TYPES:
            self._reads.clear()  # callers can make up any number of them
        asked, calls = self._reads.get(media_type, (0, 0))
        asked |= event.asked
        if ended:
            calls += _ENOUGH if event.unreadable & ~asked else 1
        self._reads[media_type] = asked, calls


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
        return TypeError(
            f"an answer of {NAME}() cannot stream: return its whole body, or write handle() without batches"
        )
    return answer
