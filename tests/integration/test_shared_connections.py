"""Small calls share a connection from gateway to node, and no slow reader of an answer holds up the others."""

import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.integration.test_call_server import ECHO, GATED, Rig, connections, whole
from tests.waiting import eventually

from gpufaas_cluster import remote_nodes
from gpufaas_cluster.call_connection import CallConnection
from gpufaas_cluster.connection import Link, NotReached, connect
from gpufaas_cluster.remote_exchange import RemoteExchange
from gpufaas_core.errors import CallCancelled, GrantRefused, WorkerCrashed
from gpufaas_core.model import FunctionId
from gpufaas_core.units import MiB
from gpufaas_core.wire.bodies import STREAM


@pytest.fixture
async def few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path, monkeypatch)
    await rig.node()
    await rig.linked()
    yield rig
    await rig.nodes.close()
    await rig.processes[0].kill()


async def stopped(exchange: RemoteExchange) -> None:
    """Return when its node may send no more of the answer, or has sent all: so much waits here that is not read."""
    lane = exchange._lane
    await eventually(lambda: exchange.end is not None or (lane is not None and lane._window._left <= 0))


def small(rig: Rig) -> CallConnection:
    """The connection of small calls."""
    node = rig.nodes.get("n")
    assert node is not None
    assert node.small.connection is not None
    return node.small.connection


async def test_readers_who_stop_hold_up_no_others_on_their_connection(few: Rig) -> None:
    """A stream, and an answer that its worker gave whole: so much of each waits here, the rest at the node."""
    wordy = await few.function("wordy", "def handle(event, context): return (b'x' * 65536 for _ in range(1000))")
    large = await few.function("large", "def handle(event, context): return b'y' * 30_000_000")
    echo = await few.function("echo", ECHO)
    await few.call(echo, cold=True)
    before = psutil.Process().memory_info().rss
    at_node = connections(few.processes[0])

    slow = [few.begin(wordy, cold=True), few.begin(wordy), few.begin(large, cold=True)]
    sizes = [len((await each.answer())[1]) for each in slow]
    assert small(few).running == 3
    for each in slow:
        await stopped(each)
    for number in range(50):
        assert await few.call(echo, b"%d" % number) == b"%d" % number

    assert connections(few.processes[0]) == at_node
    assert psutil.Process().memory_info().rss - before < 15 * MiB
    for at, exchange in enumerate(slow):
        while (piece := await exchange.chunk()) is not None:
            sizes[at] += len(piece)
    assert sizes == [65_536_000, 65_536_000, 30_000_000]
    assert small(few).running == 0


async def test_small_pieces_for_a_reader_who_stops_are_counted_with_what_they_cost(few: Rig) -> None:
    source = """
        import time
        def handle(event, context):
            for number in range(20_000):
                yield b"x"
                if number % 50 == 0:
                    time.sleep(0.0001)  # the node would join them
    """
    function = await few.function("bytewise", source)
    echo = await few.function("echo", ECHO)
    await few.call(echo, cold=True)
    slow = few.begin(function, cold=True)
    size = len((await slow.answer())[1])
    await stopped(slow)
    await few.call(echo)

    assert 0 < slow.unread < 512 * 1024
    while (piece := await slow.chunk()) is not None:
        size += len(piece)
    assert size == 20_000


async def test_a_caller_who_leaves_before_the_end_of_his_answer_leaves_a_connection_that_serves_the_next(
    few: Rig,
) -> None:
    wordy = await few.function("wordy", "def handle(event, context): return (b'x' * 65536 for _ in range(1000))")
    large = await few.function("large", "def handle(event, context): return b'y' * 3_000_000")
    for function in (wordy, large):
        await whole(few.begin(function, cold=True))
    for number in range(20):
        exchange = few.begin((wordy, large)[number % 2])
        await exchange.answer()
        exchange.fail(CallCancelled("the caller went away"))

    await eventually(lambda: small(few).running == 0)

    assert len(await few.call(large)) == 3_000_000
    assert connections(few.processes[0]) <= 3, "the link, the shared one, and one by which the functions were defined"


async def test_a_node_that_stops_sends_the_rest_of_an_answer_first(few: Rig) -> None:
    function = await few.function("large", "def handle(event, context): return b'y' * 3_000_000")
    await few.call(function, cold=True)
    size = ended = 0
    while not ended:  # some calls after the first, its worker has memory in which it gives it whole
        before = len(few.processes[0].of("Finished"))
        slow = few.begin(function)
        size = len((await slow.answer())[1])
        await stopped(slow)
        with contextlib.suppress(AssertionError):
            await eventually(lambda: len(few.processes[0].of("Finished")) > before, timeout_s=1.0)  # noqa: B023
        ended = len(few.processes[0].of("Finished")) - before
        if not ended:
            while await slow.chunk() is not None:
                pass
            await eventually(lambda: len(few.processes[0].of("Finished")) > before)  # noqa: B023

    few.processes[0].signal(signal.SIGTERM)
    refused = ""
    while not refused:
        try:
            await few.call(function)
        except GrantRefused as exc:
            refused = str(exc)
    assert refused == "node n stops"
    while (piece := await slow.chunk()) is not None:
        size += len(piece)

    assert size == 3_000_000
    await few.processes[0].ended()


async def test_large_bodies_are_not_on_the_connection_of_small_calls(few: Rig) -> None:
    sized = await few.function("sized", "def handle(event, context): return str(len(event.body))")
    gated = await few.function("gated", GATED)
    gate = str(few.root / "gate").encode()
    streams = few.begin(gated, gate, STREAM, cold=True)
    await streams.end_body()
    assert small(few).running == 0

    assert await few.call(sized, b"x" * 200_000, cold=True) == b"200000"
    assert [*small(few).lanes] == [], "none was needed yet"
    assert await few.call(sized, b"x") == b"1"
    assert [*small(few).lanes] == [0]
    few.open_gate("gate")
    assert (await whole(streams))[1] == b"done"


async def test_a_connection_that_breaks_ends_the_calls_on_it_and_is_made_again(few: Rig) -> None:
    function = await few.function("gated", GATED)
    running = [await few.gated(function, f"gate{number}", cold=not number) for number in (0, 1)]
    streams = few.begin(function, str(few.root / "gate").encode(), STREAM)
    await streams.end_body()
    small(few)._transport.abort()  # type: ignore[union-attr]

    for each in running:
        with pytest.raises(WorkerCrashed, match="node n was lost during the call"):
            await each.answer()
    for gate in ("gate0", "gate1", "gate"):
        few.open_gate(gate)
    assert await few.call(function, str(few.root / "gate").encode()) == b"done"
    assert (await whole(streams))[1] == b"done", "it is on the other connection"


async def test_a_connection_that_cannot_be_had_refuses_the_calls_that_want_it_and_is_tried_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connected(*given: Any) -> Link:
        if isinstance(given[-1], CallConnection) and len(tried) < 3:
            tried.append(given)
            raise NotReached("it has no file descriptors left")
        return await connect(*given)

    tried: list[Any] = []
    monkeypatch.setattr(remote_nodes, "connect", connected)
    rig = Rig(tmp_path, monkeypatch)
    await rig.node()
    try:
        await eventually(lambda: len(tried) == 1)  # with the link
        for _ in range(2):
            with pytest.raises(GrantRefused, match="it has no file descriptors left"):
                await rig.call(FunctionId("echo.ns@1"))
        assert await rig.call(await rig.function("echo", ECHO), b"there", cold=True) == b"there"
    finally:
        await rig.nodes.close()
        await rig.processes[0].kill()
