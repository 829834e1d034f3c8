"""The calls of one worker, where a batch went ahead of the one that runs."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from tests.unit.gpu_manager.world import Transport

from gpufaas_core.messages import Event, Grant
from gpufaas_core.model import CallId, DeviceId, FunctionId, Need, Part
from gpufaas_core.wire.heads import AnswerHead, AnswersHead, CallHead
from gpufaas_core.wire.kinds import Kind
from gpufaas_core.wire.prefix import encode_frame
from gpufaas_functions.begun import no_counts
from gpufaas_gpu_manager.call_watch import LOOK_S
from gpufaas_gpu_manager.exchange import Exchange
from gpufaas_gpu_manager.node_call import ABANDON, ABANDONED, AHEAD
from gpufaas_gpu_manager.timers import Timers
from gpufaas_gpu_manager.worker_calls import WorkerCalls
from gpufaas_gpu_manager.worker_connection import WorkerConnection

DEVICE = DeviceId("n/cpu:0")
GRACE_S = 0.05


class Rig:
    """A ready worker with one slot, and calls that come in batches of two."""

    def __init__(self) -> None:
        self.killed: list[str] = []
        self.reported: list[Event] = []
        spec = SimpleNamespace(
            kind="model", image="", need=Need(100, batch_max=2), name="f", namespace="ns", digest="d", profiled="d"
        )
        device = SimpleNamespace(
            id=DEVICE, unled=(), source=SimpleNamespace(enforced=False, device=SimpleNamespace(kind="cpu"))
        )
        worker: Any = SimpleNamespace(
            spec=spec,
            timers=Timers(),
            device=device,
            kill=self.killed.append,
            takes_calls=True,
            outgrown=False,
            serves=True,
            loop=asyncio.get_running_loop(),
            pid=None,
            replaced=False,
        )
        host: Any = SimpleNamespace(
            settings=SimpleNamespace(abort_grace_s=GRACE_S), report=self.reported.append, over=lambda _: None,
            measured={},
        )  # fmt: skip
        self.calls = worker.calls = WorkerCalls(worker, host)
        self.counts = no_counts(1)
        self.connection = WorkerConnection(worker, self.counts)
        self.connection.connection_made(cast(Any, Transport()))
        self.calls.on_slots(self.connection.slots, self.connection.wire)

    def batch(self, number: int) -> list[Exchange]:
        names = tuple(CallId(f"{number}{each}") for each in "ab")
        grant = Grant(1, number, names, FunctionId("f"), "d", (Part(DEVICE, 1),), False)
        self.calls.waiting.expect(number, 2)
        exchanges = [
            Exchange(grant.of(each), self.calls, asyncio.get_running_loop(), 0.0) for each in names
        ]  # fmt: skip
        for each in exchanges:
            each.arrive(CallHead(each.grant.call, "POST", "/", b"", []), b"")
            self.calls.exchanges[each.grant.call] = each
            self.calls.come(each)
        return exchanges

    def abandon(self, *exchanges: Exchange) -> None:
        for each in exchanges:
            each.step(ABANDON)
            self.calls.watch.begin()

    def answer(self, *places: int) -> None:
        """The worker has answered calls of its batch."""
        head = AnswersHead([(place, 0, AnswerHead(200, [], 0.01)) for place in places])
        self.connection.data_received(encode_frame(Kind.ANSWERS, head))


async def test_a_batch_that_was_abandoned_before_it_began_is_watched_from_its_begin() -> None:
    rig = Rig()
    first, ahead = rig.batch(1), rig.batch(2)
    assert {each.state for each in ahead} == {AHEAD}

    rig.abandon(*ahead)
    await asyncio.sleep(2 * LOOK_S)
    assert rig.killed == [], "it has not begun"
    rig.answer(0, 1)
    assert all(each.finished for each in first)
    assert {each.state for each in ahead} == {ABANDONED}
    async with asyncio.timeout(20):
        while not rig.killed:
            await asyncio.sleep(GRACE_S)

    assert rig.killed == [f"a call that nobody waits for ran on for {LOOK_S:g} s"], "which is the shortest grace"
