"""
The handler of a worker on an emulated device: it computes nothing, takes as long as its function would, and says so.

A load sleeps. How long a call takes depends on what runs beside it, which the node knows: the worker asks over a
socket, one for each slot, and the answer comes when the time is over (gpufaas_gpu_manager.emulation).
"""

import json
import queue
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from gpufaas_core.units import format_bytes
from gpufaas_functions.memory import CpuMemory

ASK: Final = struct.Struct("<dI")
"""What a worker sends: when the call began, on the clock `time.monotonic`, which all processes share; and its size."""


class Emulated(msgspec.Struct, frozen=True):
    """What a worker on an emulated device is told."""

    device: str
    kind: str
    load_s: float
    begun: float
    """When its load began, on the clock `time.monotonic`: forking and importing are part of a load."""
    occupation: int
    """The memory that its function truly needs, in bytes."""
    memory: int
    """Its reservation, in bytes."""


class EmulatedHandler:
    """In place of the author's module."""

    def __init__(self, about: Emulated, function: str, clocks: Sequence[socket.socket]) -> None:
        self._about = about
        self._function = function
        self._clocks: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        for each in clocks:
            self._clocks.put(each)
        self.used = 0
        """Per cent of the device's compute that the calls used which ended last."""

    def load(self, device: str) -> None:  # noqa: ARG002 - as authors write it
        """:raises MemoryError: the reservation is too small; after as much of the load as has room in it"""
        about = self._about
        fits = min(1.0, about.memory / max(1, about.occupation))
        time.sleep(max(0.0, about.begun + about.load_s * fits - time.monotonic()))
        if fits < 1.0:
            raise MemoryError(
                f"out of memory on emulated device {about.device}: {self._function} needs "
                f"{format_bytes(about.occupation)} there"
            )

    def handle(self, *_: Any) -> dict[str, Any]:
        """Answer one call; the arguments are those of the author's function."""
        return self._answers(1)[0]

    def handle_batch(self, _model: None, events: Sequence[Any], _contexts: Sequence[Any]) -> list[dict[str, Any]]:
        """Answer several calls that run together."""
        return self._answers(len(events))

    def _answers(self, calls: int) -> list[dict[str, Any]]:
        """Return when *calls* calls that run together are served."""
        clock = self._clocks.get()
        try:
            clock.sendall(ASK.pack(time.monotonic(), calls))
            if not (used := clock.recv(1)):
                raise ConnectionAbortedError(f"emulated device {self._about.device} is gone")
        finally:
            self._clocks.put(clock)
        self.used = used[0]
        body = {"emulated": True, "function": self._function, "device": self._about.device, "kind": self._about.kind}
        answer = {"statusCode": 200, "headers": {"content-type": "application/json"}, "body": json.dumps(body)}
        return [answer] * calls


class EmulatedMemory(CpuMemory):
    """Occupation of a worker on an emulated device: what its function needs there. All else is as on a CPU device."""

    def __init__(self, about: Emulated) -> None:
        super().__init__()
        self._occupation = about.occupation

    def loaded(self) -> int:
        return self._occupation

    def grown(self) -> int:
        if self._called:
            return 0
        self._called = True
        return self._occupation
