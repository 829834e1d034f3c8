"""
In place of the author's functions while a profile is taken (docs/adr/0072): each call runs a batch of equal calls, and
is answered what was measured of it (`gpufaas_core.taken.Measured`).
"""

import json
import math
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from gpufaas_core.model import Seconds
from gpufaas_core.taken import HEADER, PEAK, TRACE, Measured
from gpufaas_functions.answers import Handle, Memory
from gpufaas_functions.author import BadBody, Context, Event, HandlerAnswer, to_answer
from gpufaas_functions.batches import BatchHandler
from gpufaas_functions.coroutines import called, is_async
from gpufaas_functions.emulated import EmulatedHandler

_SAMPLES: Final = (("sample.json", b"application/json"), ("sample.bin", b"application/octet-stream"))


def metered(handle: Handle, together: BatchHandler | None, memory: Memory, bundle: str, handler: object) -> Handle:
    """Return what runs in place of *handle*, with the model; *handler* is the author's module."""
    made = _Metered(handle, together, memory, bundle, handler if isinstance(handler, EmulatedHandler) else None)
    return made.wait if is_async(handle) else made


class _Metered:
    def __init__(
        self, handle: Handle, together: BatchHandler | None, memory: Memory, bundle: str,
        emulated: EmulatedHandler | None,
    ) -> None:  # fmt: skip
        self._handle, self._together, self._memory, self._emulated = handle, together, memory, emulated
        samples = ((Path(bundle, "function", name), media_type) for name, media_type in _SAMPLES)
        self._sample = next(((each.read_bytes(), kind) for each, kind in samples if each.is_file()), None)

    def __call__(self, event: Event, context: Context) -> dict[str, Any]:
        size, _, more = event.headers[HEADER.decode()].partition(" ")
        events = [self._event(event) for _ in range(int(size))]

        def run() -> None:
            if len(events) == 1 or self._together is None:
                _check(to_answer(self._handle(events[0], context)))
            else:
                for results in self._together.run(events, [context] * len(events)):
                    for each in results.values():
                        _check(each)
            self._memory.synchronize()

        return self._answer(more, *(_traced(run) if more == TRACE else _timed(run)))

    async def wait(self, event: Event, context: Context) -> dict[str, Any]:
        """Run as an ``async def handle``."""
        began, cpu = time.perf_counter(), time.process_time()
        answer, pieces = await called(self._handle, self._event(event), context)
        async for _ in pieces or _nothing():
            pass
        _check(answer)
        more = event.headers[HEADER.decode()].partition(" ")[2]
        return self._answer(more, time.perf_counter() - began, time.process_time() - cpu)

    def _event(self, event: Event) -> Event:
        body, media_type = event.body, event.content_type
        if not body and self._sample is not None:
            body, media_type = self._sample
        elif not body and self._emulated is None:
            raise BadBody(
                "there is no sample input: give --input FILE, or add sample.json or sample.bin beside handler.py, and "
                "deploy again"
            )
        return Event("POST", "/", b"", [(b"content-type", media_type)], body)

    def _answer(self, more: str, wall_s: Seconds, cpu_s: Seconds, *traced: Any) -> dict[str, Any]:
        peak = max(self._memory.loaded(), self._memory.peak()) if more == PEAK else 0
        uses = None if self._emulated is None else self._emulated.used
        measured = Measured(wall_s, cpu_s, len(os.sched_getaffinity(0)), peak, uses, *traced)
        return {"body": msgspec.json.encode(measured)}


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield


def _check(result: HandlerAnswer | BaseException) -> None:
    """:raises BadBody: the function does not take the input; other errors are its own"""
    if isinstance(result, BaseException):
        raise result
    for _ in result.chunks or ():
        pass
    if result.status >= 400:
        said = (result.body or b"")[:200].decode("utf-8", "replace").strip()
        raise BadBody(f"the function answers this input with {result.status}: {said}")


def _timed(run: Callable[[], None]) -> tuple[Seconds, Seconds]:
    began, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - began, time.process_time() - cpu


def _traced(run: Callable[[], None]) -> tuple[Any, ...]:
    """Run under torch's profiler, and return kernels and GPU as `Measured` has them, too; it takes longer."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        took = _timed(run)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        trace.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_bytes())["traceEvents"]
    kernels = [
        (each["ts"] / 1e6, (each["ts"] + each["dur"]) / 1e6, math.prod(each["args"]["grid"]),
         math.prod(each["args"]["block"]), int(each["args"].get("registers per thread", 0)),
         int(each["args"].get("shared memory", 0)))
        for each in events
        if each.get("cat") == "kernel"
    ]  # fmt: skip
    of = torch.cuda.get_device_properties(0)
    gpu = of.multi_processor_count, of.shared_memory_per_multiprocessor, of.max_threads_per_multi_processor
    return *took, kernels, gpu
