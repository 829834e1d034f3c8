"""A call behind the one that its worker runs, on real processes: it runs at most once, or is taken back."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace
from tests.integration.conftest import Platform
from tests.integration.test_node import DEVICE, Rig
from tests.waiting import LIMIT_S, eventually, until

from gpufaas_core.errors import GrantRefused, OutOfMemory, WorkerCrashed
from gpufaas_core.messages import Abort, Finished, Grant, NodeRefused
from gpufaas_core.model import FunctionId
from gpufaas_core.wire.bodies import STREAM
from gpufaas_core.wire.heads import CallHead
from gpufaas_gpu_manager import taking_back
from gpufaas_gpu_manager.exchange import Exchange
from gpufaas_gpu_manager.worker_slot import WorkerSlot

NOTED = """
    import os, time

    def load(device):
        return bytearray(20 * 1024 * 1024)

    def handle(model, event, context):
        '''The body: what to do, and a directory. A file there says that the call has begun.'''
        do, _, home = event.text.partition(" ")
        with open(os.path.join(home, context.call_id), "a") as file:
            file.write("begun ")
        if do == "stream":
            return endless(home)
        if do == "gate":
            until = time.monotonic() + 60
            while not os.path.exists(os.path.join(home, "gate")) and time.monotonic() < until:
                time.sleep(0.002)
        if do == "exit":
            os._exit(3)
        if do == "memory":
            bytearray(10**12)
        return context.call_id

    def endless(home):
        while not os.path.exists(os.path.join(home, "gate")):
            yield b"more"
            time.sleep(0.002)
"""


class Ahead(Rig):
    """A node with a worker of a function that notes what it begins."""

    def __init__(self, root: Path, home: Path) -> None:
        super().__init__(root)
        self.home = home
        self.name = FunctionId("")

    async def open(self) -> None:
        self.name = await self.function("noted", NOTED)
        await self.call(self.grant(self.name, cold=True), self.body("warm"))

    def body(self, do: str) -> bytes:
        return f"{do} {self.home}".encode()

    def begin(self, do: str = "", ahead_s: float = 0.0, mode: int = 0) -> Exchange:
        grant = replace(self.grant(self.name), ahead_s=ahead_s)
        return self.node.grants.call(grant, CallHead(grant.call, "POST", "/", b"", [], mode), self.body(do))

    async def running(self, do: str = "gate") -> Exchange:
        """Begin a call, and return it once it has begun."""
        exchange = self.begin(do)
        await eventually(lambda: self.begun(exchange.grant))
        return exchange

    def begun(self, grant: Grant) -> bool:
        return (self.home / grant.call).exists()

    def times(self, exchange: Exchange) -> int:
        """How often its handler has begun."""
        path = self.home / exchange.grant.call
        return path.read_text().count("begun") if path.exists() else 0

    def gate(self) -> None:
        (self.home / "gate").touch()

    @property
    def slot(self) -> WorkerSlot:
        (worker,) = self.node.workers()
        (slot,) = worker.run._connection.slots  # type: ignore[attr-defined]
        return slot  # type: ignore[no-any-return]

    def worker_has_come_to(self, number: int) -> None:
        """
        Wait, without the node learning of anything, until the worker has begun or dropped what came as *number*.
        """
        until(lambda: self.slot._counts.begun[0] >= number, "the worker goes on")

    def recall(self, exchange: Exchange) -> None:
        grant = exchange.grant
        self.node.execute(Abort(grant.call, DEVICE, True, "another device is free", grant.number, True))

    def refusals(self) -> list[str]:
        return [each.call for each in self.facts if isinstance(each, NodeRefused)]

    def ends(self) -> dict[str, bool]:
        return {each.call: each.ok for each in self.facts if isinstance(each, Finished)}


async def answered(exchange: Exchange) -> tuple[int, bytes]:
    async with asyncio.timeout(LIMIT_S):
        head, first, whole = await exchange.answer()
        pieces = [first]
        while not whole and (piece := await exchange.chunk()) is not None:
            pieces.append(piece)
    return head.status, b"".join(pieces)


@pytest.fixture
async def rig(tmp_path: Path, warm_fork_servers: None) -> AsyncIterator[Ahead]:  # noqa: ARG001
    (tmp_path / "calls").mkdir()
    rig = Ahead(tmp_path / "bundles", tmp_path / "calls")
    await rig.node.start()
    await rig.open()
    yield rig
    rig.gate()
    await rig.node.close()


@pytest.mark.parametrize("body_comes", [False, True])
async def test_a_call_whose_body_has_not_come_is_taken_back(rig: Ahead, body_comes: bool) -> None:
    running = await rig.running()
    grant = replace(rig.grant(rig.name), ahead_s=LIMIT_S)
    opened = rig.node.grants.open_for_body(grant) if body_comes else rig.node.grants.open(grant)
    assert opened

    rig.node.execute(Abort(grant.call, DEVICE, True, "another device is free", grant.number, True))

    assert rig.refusals() == [grant.call]
    late = rig.node.grants.call(grant, CallHead(grant.call, "POST", "/", b"", []), rig.body(""))
    with pytest.raises(GrantRefused):
        await answered(late)
    rig.gate()
    assert await answered(running) == (200, running.grant.call.encode())
    assert rig.times(late) == 0
    assert rig.refusals() == [grant.call], "once"


async def test_a_call_goes_ahead_and_is_served_after_the_one_that_runs(rig: Ahead) -> None:
    first = await rig.running()
    ahead = rig.begin(ahead_s=LIMIT_S)
    assert ahead.slot is first.slot, "the worker has it"
    assert not rig.begun(ahead.grant)

    rig.gate()

    for each in (first, ahead):
        assert await answered(each) == (200, each.grant.call.encode())
    assert [rig.times(each) for each in (first, ahead)] == [1, 1]
    assert rig.refusals() == []


async def test_a_call_is_given_back_if_the_one_before_takes_too_long_and_the_worker_serves_others_then(
    rig: Ahead,
) -> None:
    first = await rig.running()
    ahead = rig.begin(ahead_s=0.01)

    with pytest.raises(GrantRefused):
        await answered(ahead)
    assert rig.refusals() == [ahead.grant.call]
    rig.gate()
    assert (await answered(first))[0] == 200
    for _ in range(3):
        following, behind = rig.begin("gate"), rig.begin(ahead_s=LIMIT_S)
        assert [(await answered(each))[0] for each in (following, behind)] == [200, 200]
    assert rig.times(ahead) == 0, "its worker has dropped it"


async def test_of_a_stream_without_an_end_the_call_behind_it_is_given_back(rig: Ahead) -> None:
    first = await rig.running("stream")
    ahead = rig.begin(ahead_s=0.01)

    with pytest.raises(GrantRefused):
        await answered(ahead)
    rig.node.execute(Abort(first.grant.call, DEVICE))
    await eventually(lambda: first.grant.call in rig.ends())
    assert await answered(rig.begin()) == (200, f"c{rig.number}".encode())
    assert rig.times(ahead) == 0


async def test_the_caller_of_a_stream_leaves_and_the_call_behind_it_is_served(rig: Ahead) -> None:
    first = await rig.running("stream")
    ahead = rig.begin(ahead_s=LIMIT_S)

    rig.node.execute(Abort(first.grant.call, DEVICE))

    assert await answered(ahead) == (200, ahead.grant.call.encode())
    assert rig.ends()[first.grant.call] is False
    assert (rig.times(first), rig.times(ahead)) == (1, 1)


async def test_the_caller_of_the_call_behind_a_stream_leaves_and_the_stream_goes_on(rig: Ahead) -> None:
    first = await rig.running("stream")
    ahead = rig.begin(ahead_s=LIMIT_S)

    rig.node.execute(Abort(ahead.grant.call, DEVICE))

    await eventually(lambda: ahead.grant.call in rig.ends())
    assert rig.ends() == {"c1": True, ahead.grant.call: False}
    rig.gate()
    status, said = await answered(first)
    assert (status, said.replace(b"more", b"")) == (200, b"")
    assert await answered(rig.begin()) == (200, f"c{rig.number}".encode())
    assert rig.times(ahead) == 0


async def test_what_the_worker_begins_before_it_is_marked_runs(rig: Ahead) -> None:
    first = await rig.running()
    ahead = rig.begin(ahead_s=LIMIT_S)
    number = rig.slot._counts.begun[0] + 1
    await asyncio.sleep(0)  # it is sent
    rig.gate()
    rig.worker_has_come_to(number)
    until(lambda: rig.begun(ahead.grant), "its handler runs")

    rig.recall(ahead)  # the node does not know of that yet

    for each in (first, ahead):
        assert await answered(each) == (200, each.grant.call.encode())
    assert (rig.refusals(), rig.times(ahead)) == ([], 1)
    assert (await answered(rig.begin()))[0] == 200


async def test_what_is_marked_before_the_worker_begins_it_is_dropped_and_refused(rig: Ahead) -> None:
    first = await rig.running()
    ahead = rig.begin(ahead_s=LIMIT_S)
    number = rig.slot._counts.begun[0] + 1
    await asyncio.sleep(0)  # it is sent

    rig.recall(ahead)
    rig.gate()
    rig.worker_has_come_to(number)  # so the node sees afterwards that it was counted

    assert (await answered(first))[0] == 200
    with pytest.raises(GrantRefused):
        await answered(ahead)
    assert (rig.refusals(), rig.times(ahead)) == ([ahead.grant.call], 0)
    assert (await answered(rig.begin()))[0] == 200


async def test_what_the_worker_has_not_come_to_is_taken_back_though_it_was_not_told_to_drop_it(rig: Ahead) -> None:
    await rig.running()
    ahead = rig.begin(ahead_s=LIMIT_S)

    rig.recall(ahead)

    with pytest.raises(GrantRefused):
        await answered(ahead)
    rig.recall(ahead)  # late
    assert rig.refusals() == [ahead.grant.call]


async def test_a_call_that_was_abandoned_as_it_began_is_not_run_or_is_told_so(rig: Ahead) -> None:
    first = await rig.running()
    ahead = rig.begin("stream", ahead_s=LIMIT_S)
    await asyncio.sleep(0)
    rig.node.execute(Abort(ahead.grant.call, DEVICE))
    rig.gate()
    rig.worker_has_come_to(rig.slot.turns.now.number + 1)

    assert (await answered(first))[0] == 200
    await eventually(lambda: ahead.grant.call in rig.ends())
    assert rig.ends()[ahead.grant.call] is False
    assert (await answered(rig.begin()))[0] == 200
    assert rig.times(ahead) == 0


@pytest.mark.parametrize("how", ["killed", "exits"])
async def test_a_worker_that_dies_costs_the_call_that_runs_and_not_the_one_behind_it(rig: Ahead, how: str) -> None:
    (worker,) = rig.node.workers()
    first = await rig.running()
    if how == "exits":
        rig.gate()
        await answered(first)
        first = rig.begin("exit")
    ahead = rig.begin(ahead_s=LIMIT_S)
    if how == "killed":
        worker.run.kill()

    with pytest.raises(WorkerCrashed):
        await answered(first)
    with pytest.raises(GrantRefused):
        await answered(ahead)
    assert rig.refusals() == [ahead.grant.call]
    assert rig.times(ahead) == 0


async def test_the_call_behind_one_that_runs_out_of_memory_is_served(rig: Ahead) -> None:
    gated = await rig.running()
    first = rig.begin("memory", ahead_s=LIMIT_S)
    rig.gate()
    assert (await answered(gated))[0] == 200
    ahead = rig.begin(ahead_s=LIMIT_S)

    with pytest.raises(OutOfMemory):
        await answered(first)
    assert await answered(ahead) == (200, ahead.grant.call.encode())


async def test_where_nothing_can_be_taken_back_a_call_waits_at_its_node(rig: Ahead) -> None:
    first = await rig.running("stream")
    streams = rig.begin(ahead_s=LIMIT_S, mode=STREAM)
    assert streams.slot is None, "pieces of its body come yet"
    rig.recall(streams)
    with pytest.raises(GrantRefused):
        await answered(streams)

    late = rig.begin(ahead_s=0.01, mode=STREAM)
    with pytest.raises(GrantRefused):
        await answered(late)
    assert rig.refusals() == [streams.grant.call, late.grant.call]
    rig.gate()
    assert (await answered(first))[0] == 200


async def test_calls_go_ahead_of_each_other_and_come_back_at_any_time(
    rig: Ahead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of many calls runs once, or is refused and does not run."""
    monkeypatch.setattr(taking_back, "GRACE_S", 0.001)

    async def serves(exchange: Exchange) -> bool:
        try:
            return (await answered(exchange))[0] == 200
        except GrantRefused:
            return False

    calls: list[tuple[Exchange, asyncio.Task[bool]]] = []

    def begin(do: str = "", ahead_s: float = 0.0) -> tuple[Exchange, asyncio.Task[bool]]:
        exchange = rig.begin(do, ahead_s)
        calls.append((exchange, asyncio.create_task(serves(exchange))))
        return calls[-1]

    runs, behind = begin("gate"), begin(ahead_s=LIMIT_S)
    rig.recall(behind[0])
    assert not await behind[1]
    rig.gate()
    for number in range(400):
        following = begin(ahead_s=LIMIT_S)
        if number % 2:
            await asyncio.sleep(0)
        if number % 3:
            time.sleep(0.0002 * (number % 5))  # the worker goes on meanwhile, and the node does not
        if number % 7:
            rig.recall(following[0])
        await runs[1]
        runs = begin() if following[1].done() and not following[1].result() else following

    served = [await each for _, each in calls]
    assert served[:2] == [True, False], "the one with the gate, and the one behind it"
    assert [rig.times(each) for each, _ in calls] == [int(each) for each in served]
    assert len(rig.refusals()) == served.count(False)


# --- the whole platform ---


def short(platform: Platform, home: Path, **annotations: str) -> str:
    """Deploy the function, and let the platform learn that its calls are short; return its path."""
    path = platform.deploy("short", f"{NOTED}\n    # {home}", **annotations)
    for number in range(30):
        assert platform.call(path, f" {home}".encode(), headers={"x-call-id": f"warm-{number}"}).status_code == 200
    return path


def calls_at(platform: Platform) -> int:
    status = platform.status()
    return sum(status["running"].values()) + sum(status["queued"].values())


def runs(home: Path) -> dict[str, int]:
    """How often each call has begun."""
    files = [each for each in home.iterdir() if each.is_file() and each.name != "gate"]
    return {each.name: each.read_text().count("begun") for each in files}


def test_many_callers_of_one_device_each_get_their_own_answer_once(platform: Platform, open_path: Path) -> None:
    path = short(platform, open_path)

    def call(number: int) -> "Future[httpx.Response]":
        return platform.begin(path, f" {open_path}".encode(), headers={"x-call-id": f"own-{number}"})

    answers = [each.result() for each in [call(number) for number in range(200)]]

    assert [(each.status_code, each.text) for each in answers] == [(200, f"own-{number}") for number in range(200)]
    assert {call: times for call, times in runs(open_path).items() if times != 1} == {}
    until(platform.is_idle, "nothing is left")


def test_calls_behind_an_answer_without_an_end_are_served_by_another_device(
    make_platform: Callable[..., Platform], open_path: Path
) -> None:
    platform = make_platform("--device", "cpu:0=200MiB", "--device", "cpu:1=200MiB").start()
    path = short(platform, open_path, **{"com.openfaas.scale.min": "2"})
    until(lambda: platform.residents() == ["short"] * 2, "both devices have a copy")
    with platform.http.stream("POST", path, content=f"stream {open_path}".encode()) as endless:
        pieces = endless.iter_raw()
        assert next(pieces).startswith(b"more")
        ids = [f"behind-{number}" for number in range(40)]
        answers = [platform.begin(path, f" {open_path}".encode(), headers={"x-call-id": each}) for each in ids]

        assert [each.result().text for each in answers] == ids
        assert next(pieces).startswith(b"more"), "it goes on"
        (open_path / "gate").touch()
    assert set(runs(open_path).values()) == {1}


def test_an_update_of_the_function_and_callers_who_leave_cost_no_other_call(
    platform: Platform, open_path: Path
) -> None:
    path = short(platform, open_path)
    first = platform.begin(path, f"gate {open_path}".encode(), headers={"x-call-id": "first"})
    until((open_path / "first").exists, "it runs")
    behind = [
        platform.begin(path, f" {open_path}".encode(), headers={"x-call-id": f"behind-{number}"}) for number in range(3)
    ]
    leaves = platform.socket()
    leaves.sendall(b"POST /function/short HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
    until(lambda: calls_at(platform) == 5, "all are there")
    leaves.close()
    platform.deploy("short", f"{NOTED}\n    # another revision of {open_path}")
    (open_path / "gate").touch()

    assert [each.result().text for each in [first, *behind]] == ["first", "behind-0", "behind-1", "behind-2"]
    assert set(runs(open_path).values()) == {1}
    until(platform.is_idle, "nothing is left")
