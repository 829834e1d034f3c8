"""Serves batches: each call of one comes on a socket of its own, and is answered there."""

import sys
import time
from collections.abc import Sequence

from gpufaas_core.frames import CHUNK_BYTES
from gpufaas_functions import call_lines
from gpufaas_functions.answers import answer_of, event_of, failure
from gpufaas_functions.author import HandlerAnswer
from gpufaas_functions.batches import HandleBatch, run_batch
from gpufaas_functions.memory import is_out_of_memory
from gpufaas_functions.slot_server import SlotServer


class BatchServer:
    """The batches of one slot, in its thread."""

    def __init__(self, slot: SlotServer, seats: Sequence[SlotServer], handle_batch: HandleBatch) -> None:
        """:param seats: where the further calls of a batch come"""
        self._places = (slot, *seats)
        self._handle_batch = handle_batch

    def serve(self, size: int) -> None:
        """Answer a batch of *size* calls. What is printed meanwhile belongs to none of them."""
        places = self._places[:size]
        calls = [(place, *place.next_call()) for place in places]
        events = [event_of(head, body) for place, head, body in calls]
        contexts = [place.context(head) for place, head, _ in calls]
        began = time.perf_counter()
        results = run_batch(self._handle_batch, events, contexts)
        run_s = time.perf_counter() - began
        large = []
        shown: dict[int, str] = {}
        for (place, head, _), result in zip(calls, results, strict=True):
            failed = isinstance(result, BaseException)
            out_of_memory = isinstance(result, BaseException) and is_out_of_memory(result)
            answer = _failure(place, head.call, result, shown) if isinstance(result, BaseException) else result
            assert answer.body is not None
            if len(answer.body) > CHUNK_BYTES:
                large.append((place, answer, head.method))
                continue
            place.send_whole(answer, head.method, run_s, out_of_memory=out_of_memory, failed=failed)
        for place, answer, method in large:  # after the others: their callers may read slowly
            place.stream_answer(answer, began, None, method)
        places[0].say_growth()


def _failure(place: SlotServer, call: str, exc: BaseException, shown: dict[int, str]) -> HandlerAnswer:
    """Return the answer of a *call* that failed. The traceback of an exception that several have is logged once."""
    call_lines.begin(call, alone=False)
    try:
        first = shown.setdefault(id(exc), call)
        if first == call:
            return failure(exc, place.memory)
        print(f"{type(exc).__name__} in one batch with call {first}, which has the traceback", file=sys.stderr)
        return answer_of(exc)
    finally:
        call_lines.end(call, alone=False)
