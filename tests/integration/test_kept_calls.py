"""Calls by a grant that their gateway keeps, at a node of its own process: which ends the node reports, and how."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.test_call_server import Rig, give_up, whole
from tests.waiting import eventually

from gpufaas_cluster import control, kept_grants
from gpufaas_cluster.call_connection import CallLane
from gpufaas_cluster.call_heads import NodeCallHead
from gpufaas_cluster.placed_call import PlacedCall
from gpufaas_cluster.remote_exchange import RemoteExchange
from gpufaas_cluster.remote_nodes import RemoteNodes
from gpufaas_cluster.remote_scheduler import RemoteScheduler
from gpufaas_core.errors import GrantRefused, WorkerCrashed
from gpufaas_core.messages import Grant
from gpufaas_core.model import CallId, FunctionId
from gpufaas_core.wire.bodies import INLINE, STREAM
from gpufaas_core.wire.heads import CallHead
from gpufaas_core.wire.kinds import Kind

SOURCE = """
    import os, time
    def handle(event, context):
        what, _, path = event.text.partition(" ")
        if what == "fails":
            raise ValueError(what)
        if what == "large":
            return b"x" * 300_000
        if what == "streams":
            return (b"a piece" for _ in range(3))
        if what == "dies":
            print("last words", flush=True)
            os._exit(3)
        if what == "waits":
            open(path + ".reached", "w").close()
            while not os.path.exists(path):
                time.sleep(0.005)
        return event.body
"""
LONG = 3600.0


class Keeper:
    """A gateway's end that keeps one grant."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.rig = Rig(root, patch)
        self.gateway = RemoteScheduler(self.rig.me)
        self.rig.nodes = RemoteNodes(self.rig.me, lambda *_: None, self.gateway.may_keep)
        self.function = FunctionId("")
        self.calls = 0

    async def start(self) -> "Keeper":
        await self.rig.node()
        await self.rig.linked()
        self.function = await self.rig.function("said", SOURCE)
        await self.rig.call(self.function, b"warm", cold=True)
        await eventually(lambda: self.ends)
        self.grant = self.granted()
        return self

    def granted(self) -> Grant:
        grant = self.rig.grant(self.function)
        self.gateway.place(grant.call, self.function, LONG)
        self.gateway.heard(control.Granted(grant, LONG))
        self.last = grant.call
        return grant

    @property
    def ends(self) -> list[dict[str, Any]]:
        """What the node reported of calls that ended."""
        return self.rig.processes[0].of("Finished")

    @property
    def state(self) -> PlacedCall:
        found = self.gateway.may_keep(self.grant)
        assert found is not None
        return found

    def begin(self, body: bytes, mode: int = INLINE) -> RemoteExchange:
        """Begin the next call by the grant."""
        self.calls += 1
        call = CallId(f"call-{self.calls}")
        if self.calls > 1:
            assert self.gateway.place(call, self.function, LONG) is self.grant
            self.last = call
        return self.rig.nodes.call(self.grant, CallHead(call, "POST", "/", b"", [], mode), body)

    async def call(self, body: bytes) -> bytes:
        """Run a call that ends well."""
        answer = (await whole(self.begin(body)))[1]
        assert self.state.answered
        self.gateway.over(self.last)
        return answer

    async def reported(self) -> dict[str, Any]:
        """Return the end of the grant that the node has reported."""
        await eventually(lambda: [each for each in self.ends if each["call"] == self.grant.call])
        (end,) = [each for each in self.ends if each["call"] == self.grant.call]
        assert isinstance(end, dict)
        return end


@pytest.fixture
async def keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Keeper]:
    monkeypatch.setattr(kept_grants, "_TICK_S", LONG)  # nothing is given back, however long a call takes
    keeper = Keeper(tmp_path, monkeypatch)
    try:
        yield await keeper.start()
    finally:
        await keeper.rig.nodes.close()
        for process in keeper.rig.processes:
            await process.kill()


async def test_calls_run_one_after_another_by_one_grant_and_the_node_reports_none(keeper: Keeper) -> None:
    bodies = [await keeper.call(b"%d" % number) for number in range(5)]
    other = keeper.rig.grant(keeper.function)
    await keeper.rig.call(keeper.function, b"by another", grant=other)

    await eventually(lambda: len(keeper.ends) == 2)
    assert bodies == [b"%d" % number for number in range(5)]
    assert [each["call"] for each in keeper.ends] == ["c1", other.call], "of the kept one it has said nothing until now"
    assert keeper.state.calls == 5
    assert keeper.state.service_s > 0.0


@pytest.mark.parametrize(("what", "ok"), [(b"fails", False), (b"large", True), (b"streams", True)])
async def test_other_ends_are_reported_with_the_calls_before(keeper: Keeper, what: bytes, ok: bool) -> None:
    """A failure; and answers that a slow caller would read for long, while nobody else has the slot."""
    for _ in range(3):
        await keeper.call(b"x")

    await whole(keeper.begin(what))

    end = await keeper.reported()
    assert (end["ok"], end["further"]) == (ok, 3)
    assert not keeper.state.answered


async def test_a_first_call_whose_end_is_reported_has_none_before_it(keeper: Keeper) -> None:
    await whole(keeper.begin(b"fails"))

    assert (await keeper.reported())["further"] == 0


async def test_a_body_that_streams_takes_a_kept_grant_too_and_its_end_is_reported(keeper: Keeper) -> None:
    await keeper.call(b"x")
    exchange = keeper.begin(b"", STREAM)
    await exchange.send_body(b"in pieces")
    await exchange.end_body()

    assert (await whole(exchange))[1] == b"in pieces"
    end = await keeper.reported()
    assert (end["ok"], end["further"]) == (True, 1)


async def test_a_caller_that_leaves_ends_the_grant(keeper: Keeper) -> None:
    await keeper.call(b"x")
    gate = keeper.rig.root / "gate"
    exchange = keeper.begin(f"waits {gate}".encode())
    await eventually((keeper.rig.root / "gate.reached").exists)

    await give_up(exchange)
    gate.touch()

    end = await keeper.reported()
    assert (end["ok"], end["further"]) == (False, 1)


async def test_a_worker_that_dies_says_the_last_words_of_that_call_and_takes_no_other(keeper: Keeper) -> None:
    await keeper.call(b"x")
    with pytest.raises(WorkerCrashed, match=r"(?s)exit status 3.*last words"):
        await whole(keeper.begin(b"dies"))
    await eventually(lambda: keeper.rig.processes[0].of("WorkerExited"))

    keeper.grant = keeper.granted()
    with pytest.raises(GrantRefused):
        await whole(keeper.rig.nodes.call(keeper.grant, CallHead(CallId("late"), "POST", "/", b"", []), b""))
    assert not keeper.state.answered


class Stray:
    """A call by the grant of the last call of its lane, which had none before."""

    gone = False

    def __init__(self, *, brief: bool) -> None:
        self.lost = ""
        self.brief = brief

    def sent_on(self, lane: CallLane) -> None:
        head = CallHead("stray", "POST", "/", b"", [])
        lane.send(Kind.CALL, NodeCallHead(None, head, 2))

    def not_sent(self, reason: str) -> None:
        raise AssertionError(reason)

    def on_frame(self, kind: int, header: bytes, body: bytes) -> None:
        raise AssertionError((kind, header, body))

    def go_on(self) -> None: ...

    def on_lost(self, reason: str) -> None:
        self.lost = reason


@pytest.mark.parametrize("brief", [False, True])
async def test_a_call_by_a_grant_that_never_came_ends_its_connection_and_nothing_else(
    keeper: Keeper, brief: bool
) -> None:
    await keeper.rig.call(keeper.function, b"by a grant that is not kept")
    stray, node = Stray(brief=brief), keeper.rig.nodes.get("n")
    assert node is not None

    node.begin(stray)
    await eventually(lambda: stray.lost)

    assert [await keeper.call(b"%d" % number) for number in range(3)] == [b"0", b"1", b"2"]
