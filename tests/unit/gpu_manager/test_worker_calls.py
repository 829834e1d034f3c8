"""The calls of one worker, where a batch went ahead of the one that runs."""

import asyncio
from types import SimpleNamespace
from typing import Any

from gpufaas_core.messages import Event, Grant
from gpufaas_core.model import CallId, DeviceId, FunctionId, Need, Part
from gpufaas_core.wire.heads import CallHead
from gpufaas_gpu_manager import exchange_state as states
from gpufaas_gpu_manager.call_watch import LOOK_S
from gpufaas_gpu_manager.exchange import Exchange
from gpufaas_gpu_manager.timers import Timers
from gpufaas_gpu_manager.worker_calls import WorkerCalls

DEVICE = DeviceId("n/cpu:0")
GRACE_S = 0.05


class Slot:
    marked = unbegun = False

    def begin_batch(self, calls: int) -> None: ...

    def begin(self, *_: object) -> None: ...

    def cancel(self, _: Exchange) -> None: ...


class Rig:
    """A ready worker with one slot, and calls that come in batches of two."""

    def __init__(self) -> None:
        self.killed: list[str] = []
        self.reported: list[Event] = []
        spec = SimpleNamespace(
            kind="model", image="", need=Need(100, batch_max=2), name="f", namespace="ns", digest="d", profiled="d"
        )
        device = SimpleNamespace(id=DEVICE, source=SimpleNamespace(enforced=False, device=SimpleNamespace(kind="cpu")))
        worker: Any = SimpleNamespace(
            spec=spec,
            timers=Timers(),
            device=device,
            kill=self.killed.append,
            takes_calls=True,
            outgrown=False,
            serves=True,
            pid=None,
            replaced=False,
        )
        host: Any = SimpleNamespace(
            settings=SimpleNamespace(abort_grace_s=GRACE_S), report=self.reported.append, over=self._over, measured={}
        )
        self.slot: Any = Slot()
        self.worker = worker
        self.calls = WorkerCalls(worker, host)
        self.calls.on_slots([self.slot], ahead=True)

    def _over(self, exchange: Exchange) -> None:
        exchange.state = states.END[exchange.state]

    def batch(self, number: int) -> list[Exchange]:
        names = tuple(CallId(f"{number}{each}") for each in "ab")
        grant = Grant(1, number, names, FunctionId("f"), "d", (Part(DEVICE, 1),), False)
        self.calls.batches.expect(number, 2)
        exchanges = [
            Exchange(grant.of(each), self.worker, asyncio.get_running_loop(), 0.0) for each in names
        ]  # fmt: skip
        for each in exchanges:
            each.arrive(CallHead(each.grant.call, "POST", "/", b"", []), b"")
            self.calls.exchanges[each.grant.call] = each
            self.calls.batches.arrived(each)
        return exchanges

    def abandon(self, *exchanges: Exchange) -> None:
        for each in exchanges:
            each.state = states.ABANDON[each.state]
            self.calls.watch.begin()

    def answer(self, *exchanges: Exchange) -> None:
        for each in exchanges:
            self.calls.on_done(self.slot, each, 0.01, 0, False, True)


async def test_a_batch_that_was_abandoned_before_it_began_is_watched_from_its_begin() -> None:
    rig = Rig()
    first, ahead = rig.batch(1), rig.batch(2)
    assert {each.state for each in ahead} == {states.UNSENT}

    rig.abandon(*ahead)
    await asyncio.sleep(2 * LOOK_S)
    assert rig.killed == [], "it has not begun"
    rig.answer(*first)
    assert {each.state for each in ahead} == {states.ABANDONED}
    async with asyncio.timeout(20):
        while not rig.killed:
            await asyncio.sleep(GRACE_S)

    assert rig.killed == [f"a call that nobody waits for ran on for {LOOK_S:g} s"], "which is the shortest grace"
