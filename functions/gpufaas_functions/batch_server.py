"""Serves batches: the calls of one come together, and small answers go together."""

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, TypeAlias

from gpufaas_core.model import Bytes, Seconds
from gpufaas_core.wire.bodies import CHUNK_BYTES
from gpufaas_core.wire.heads import AnswerHead, AnswersHead, CallHead
from gpufaas_core.wire.kinds import Kind
from gpufaas_core.wire.prefix import encode_frame
from gpufaas_functions import call_lines
from gpufaas_functions.answers import Memory, answer_of, event_of, failure, whole_head
from gpufaas_functions.author import HandlerAnswer
from gpufaas_functions.batches import BatchHandler, Result
from gpufaas_functions.connection import Absent, CallBody
from gpufaas_functions.memory import is_out_of_memory
from gpufaas_functions.slot_server import SlotServer, no_room

_FRAMING: Final = 64
"""Bytes of a head, or of one of its headers, beside names and values, at most."""
_Small: TypeAlias = "tuple[int, AnswerHead, bytes | memoryview]"
"""An answer for ANSWERS: the place of its call, head and body."""


class BatchServer:
    """The batches of one slot."""

    def __init__(self, slot: SlotServer, handler: BatchHandler) -> None:
        self._slot = slot
        self._handler = handler

    def serve(self, calls: list[tuple[CallHead, CallBody]]) -> None:
        """Answer a batch of *calls*. What is printed meanwhile belongs to none of them."""
        slot, size = self._slot, len(calls)
        heads = [head for head, _ in calls]
        events = [event_of(head, body) for head, body in calls if not isinstance(body, Absent)]
        calls.clear()
        began = time.perf_counter()
        if len(events) < size:
            events.clear()
            self._answer(dict.fromkeys(range(size), no_room()), heads, began)
            return
        contexts = [slot.context(head) for head in heads]
        large: dict[int, HandlerAnswer] = {}
        for results in self._handler.run(events, contexts):
            large |= self._answer(results, heads, began)
        for place in sorted(large):  # after the others: their callers may read slowly
            slot.begin_answer(place)
            slot.stream_answer(large.pop(place), began)

    def _answer(self, results: Mapping[int, Result], heads: list[CallHead], began: Seconds) -> dict[int, HandlerAnswer]:
        """Send *results*, by the place of their call, and return those that are too large."""
        slot, memory, run_s = self._slot, self._slot.memory, time.perf_counter() - began
        small: list[_Small] = []
        large: dict[int, HandlerAnswer] = {}
        shown: dict[int, str] = {}
        for place, result in results.items():
            head = heads[place]
            failed = isinstance(result, BaseException)
            out_of_memory = isinstance(result, BaseException) and is_out_of_memory(result)
            answer = _failure(memory, head.call, result, shown) if isinstance(result, BaseException) else result
            assert answer.body is not None
            if len(answer.body) > CHUNK_BYTES:
                large[place] = answer
                continue
            peak = memory.grown() if out_of_memory else 0
            small.append((place, whole_head(answer, head.method, run_s, peak, out_of_memory, failed), answer.body))
        for frame in _frames(small, slot.index):
            slot.out.send(frame)
        return large


def _frames(answers: Iterable[_Small], slot: int) -> Iterator[bytes]:
    """Yield ANSWERS with all of *answers*, in as few frames as their sizes allow."""
    taken: list[_Small] = []
    size = 0
    for each in answers:
        _, head, body = each
        one = _FRAMING + len(body) + sum(_FRAMING + len(name) + len(value) for name, value in head.headers)
        if taken and size + one > CHUNK_BYTES:
            yield _frame(taken, slot)
            taken, size = [], 0
        taken.append(each)
        size += one
    if taken:
        yield _frame(taken, slot)


def _frame(answers: list[_Small], slot: int) -> bytes:
    heads: list[tuple[int, Bytes, AnswerHead]] = [(place, len(body), head) for place, head, body in answers]
    return encode_frame(Kind.ANSWERS, AnswersHead(heads), b"".join([body for _, _, body in answers]), slot)


def _failure(memory: Memory, call: str, exc: BaseException, shown: dict[int, str]) -> HandlerAnswer:
    """Return the answer of a *call* that failed. The traceback of an exception that several have is logged once."""
    call_lines.begin(call, alone=False)
    try:
        first = shown.setdefault(id(exc), call)
        if first == call:
            return failure(exc, memory)
        print(f"{type(exc).__name__} in one batch with call {first}, which has the traceback", file=sys.stderr)
        return answer_of(exc)
    finally:
        call_lines.end(call, alone=False)
