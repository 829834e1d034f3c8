"""The calls of one worker with one slot: what goes ahead of what runs, and what is placed again."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from tests.unit.gpu_manager.world import Transport
from tests.waiting import LIMIT_S, eventually

from gpufaas_core.errors import GrantRefused
from gpufaas_core.messages import Event, Grant
from gpufaas_core.model import CallId, DeviceId, FunctionId, Need, Part
from gpufaas_core.wire.heads import AnswerHead, AnswersHead, CallHead
from gpufaas_core.wire.kinds import Kind
from gpufaas_core.wire.prefix import encode_frame
from gpufaas_functions.begun import no_counts
from gpufaas_gpu_manager.call_watch import LOOK_S
from gpufaas_gpu_manager.exchange import Exchange
from gpufaas_gpu_manager.node_call import ABANDON, ABANDONED, AHEAD, RUNNING
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

    def call(self, number: int, *, ahead_s: float = 0.0) -> Exchange:
        grant = Grant(1, number, (CallId(f"c{number}"),), FunctionId("f"), "d", (Part(DEVICE, 1),), False,
                      ahead_s=ahead_s)  # fmt: skip
        exchange = Exchange(grant, self.calls, asyncio.get_running_loop(), 0.0)
        exchange.arrive(CallHead(grant.call, "POST", "/", b"", []), b"")
        self.calls.exchanges[grant.call] = exchange
        self.calls.come(exchange)
        return exchange

    def said(self) -> list[tuple[str, str]]:
        """What the scheduler was told, and of which call; forget it."""
        told, self.reported[:] = [(type(each).__name__, each.call) for each in self.reported], []  # type: ignore[union-attr]
        return told

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

    def say(self, kind: int, head: Any) -> None:
        """The worker says that."""
        self.connection.data_received(encode_frame(kind, head))

    def answer(self, *places: int) -> None:
        """The worker has answered calls of its batch."""
        head = AnswersHead([(place, 0, AnswerHead(200, [], 0.01)) for place in places])
        self.say(Kind.ANSWERS, head)


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


OK = AnswerHead(200, [], 0.01)


async def test_a_slot_is_free_with_the_last_answer_of_its_batch() -> None:
    rig = Rig()
    rig.batch(1)
    waits = rig.call(2)

    rig.answer(0)
    assert (waits.slot, rig.calls.free) == (None, [])
    rig.answer(1)

    assert waits.slot is rig.connection.slots[0]
    assert rig.said() == [("Finished", "1a"), ("Finished", "1b")]

    rig.say(Kind.ANSWER, OK)
    rig.batch(3)
    rig.answer(1, 0)
    assert rig.calls.free == rig.connection.slots, "once"


async def test_a_call_ahead_begins_when_what_ran_before_it_is_answered() -> None:
    rig = Rig()
    rig.call(1)
    ahead = rig.call(2, ahead_s=LIMIT_S)
    assert (ahead.state, [*rig.calls.bound()]) == (AHEAD, [rig.calls.exchanges[CallId("c1")]])

    rig.say(Kind.ANSWER, OK)

    assert (ahead.state, [*rig.calls.bound()]) == (RUNNING, [ahead])
    rig.say(Kind.ANSWER, OK)
    assert rig.said() == [("Finished", "c1"), ("Finished", "c2")]
    assert rig.calls.free == rig.connection.slots


async def test_a_call_ahead_is_placed_again_if_what_runs_before_it_is_late() -> None:
    rig = Rig()
    runs, ahead = rig.call(1), rig.call(2, ahead_s=0.001)
    rig.counts.begun[0] = 1

    await eventually(lambda: ahead.finished)

    assert isinstance(ahead.error, GrantRefused)
    assert rig.said() == [("NodeRefused", "c2")]
    assert (runs.finished, rig.calls.free) == (False, [])


async def test_a_call_ahead_that_the_worker_has_begun_is_not_given_back() -> None:
    rig = Rig()
    rig.call(1)
    ahead = rig.call(2, ahead_s=LIMIT_S)
    rig.counts.begun[0] = 2  # and the answer of the first is on its way

    rig.calls.take_back(ahead, "another device is free")
    rig.say(Kind.ANSWER, OK)
    rig.say(Kind.ANSWER, OK)

    assert rig.said() == [("Finished", "c1"), ("Finished", "c2")]


async def test_what_the_policy_has_stopped_is_refused_when_its_worker_has_let_go() -> None:
    rig = Rig()
    runs = rig.call(1)
    runs.step(ABANDON)
    runs.stopped = "another one needs the device"
    rig.calls.cancel(runs)
    assert rig.said() == []

    rig.say(Kind.ANSWER, OK)

    assert rig.said() == [("NodeRefused", "c1")]
    assert str(runs.error).endswith("another one needs the device")


async def test_all_that_a_silent_worker_has_not_begun_is_placed_again_and_its_slot_is_free_for_later() -> None:
    rig = Rig()
    runs, ahead, waits = rig.call(1), rig.call(2, ahead_s=LIMIT_S), rig.call(3)

    rig.calls.back.take_all_back("it is silent")
    assert rig.said() == [("NodeRefused", "c3")], "which the worker never had"
    await eventually(lambda: runs.finished)

    assert rig.said() == [("NodeRefused", "c1"), ("NodeRefused", "c2")]
    assert [type(each.error) for each in (runs, ahead, waits)] == [GrantRefused] * 3
    assert rig.calls.free == rig.connection.slots
