"""What stands around an exchange in tests: the transport of its worker's connection, and the worker itself."""

import asyncio
from typing import Any

from gpufaas_core.errors import OutOfMemory
from gpufaas_core.messages import Grant
from gpufaas_core.model import CallId, DeviceId, FunctionId, Part
from gpufaas_core.wire.heads import FailedHead, ReadyHead
from gpufaas_gpu_manager.exchange import Exchange


class Transport:
    def __init__(self) -> None:
        self.written = b""
        self.writes = 0
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written += data
        self.writes += 1

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Owner:
    """The worker: keeps what it was told."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.done: list[tuple[float, int, bool]] = []
        self.measured: list[int] = []
        self.on_measured = lambda *sizes: self.measured.append(sizes[0])
        self.calls = self.parking = self.worker = self.back = self.memory = self
        self.last_words = self.run = self.timers = self
        self.death_known_s = 0.0
        self.ready_head = None
        self.broken = ""
        self.spoken: list[ReadyHead | FailedHead] = []
        self.drops = 0
        self.closed = 0
        self.on_ready = self.on_failed = self.spoken.append
        self.caller_first = False

    def on_done(self, _: Any, __: Any, run_s: float, peak: int, *oom_ok_last: bool) -> None:
        self.done.append((run_s, peak, oom_ok_last[1]))

    def ran_out(self, said: bytes) -> OutOfMemory:
        return OutOfMemory(said.decode())

    def kill(self, reason: str) -> None:
        assert not self.broken, "told once"
        self.broken = reason

    def on_lost(self) -> None: ...

    def on_follows(self, exchanges: list[Exchange]) -> None:
        for each in exchanges:
            each.follow(1.0)

    def dropped(self, *_: Any) -> None:
        self.drops += 1

    def later(self, name: str, *_: Any) -> None:
        self.closed += name == "closed"

    def cancel(self, exchange: Any) -> None:
        exchange.slot.cancel(exchange)


def grant(call: str) -> Grant:
    return Grant(1, 1, (CallId(call),), FunctionId("f"), "d", (Part(DeviceId("n/cpu:0"), 1),), False)


def exchange_of(call: str, owner: Any) -> Exchange:
    return Exchange(grant(call), owner, asyncio.get_running_loop(), 0.0)
