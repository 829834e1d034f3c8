"""Calls over TCP: a node in a process of its own, and the gateway's end here."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace
from tests.etcd_process import free_port
from tests.waiting import LIMIT_S, eventually

from gpufaas_cluster import control, remote_nodes
from gpufaas_cluster.call_heads import BODY_WINDOW
from gpufaas_cluster.connection import Identity, NotReached, TurnedAway, connect
from gpufaas_cluster.control import SILENCE_S
from gpufaas_cluster.remote_exchange import BUFFER, RemoteExchange
from gpufaas_cluster.remote_nodes import RemoteNodes
from gpufaas_cluster.remote_workers import RemoteLogs, RemoteWorkers
from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.errors import CallCancelled, GrantRefused, InvalidSpec, StorageFailed, WorkerCrashed
from gpufaas_core.logs import LogQuery
from gpufaas_core.messages import Grant
from gpufaas_core.model import CallId, Device, DeviceId, FunctionId, Need, NodeId, NodeView, Part
from gpufaas_core.units import MiB
from gpufaas_core.wire import credit
from gpufaas_core.wire.bodies import FILE, INLINE, STREAM
from gpufaas_core.wire.heads import AnswerHead, CallHead
from gpufaas_gpu_manager.devices import open_devices

TOKEN = "a token of this cluster"
NODE_PROCESS = Path(__file__).with_name("node_process.py")
ECHO = "def handle(event, context): return event.body"
STREAMED_ECHO = "def handle(event, context): return event.stream()"
MODEL = """
    import os
    def load(device): return None
    def handle(model, event, context): return {"pid": os.getpid(), "size": len(event.body)}
"""
GATED = """
    import os, time
    def handle(event, context):
        path = event.text
        open(path + ".reached", "w").close()
        while not os.path.exists(path):
            time.sleep(0.005)
        return "done"
"""
GATED_MODEL = "def load(device): return None\n" + textwrap.dedent(GATED).replace(
    "(event, context)", "(m, event, context)"
)


class NodeProcess:
    """One node, and what it said."""

    def __init__(self, root: Path, name: str, port: int = 0) -> None:
        self.root = root
        self.name = name
        self.port = port or free_port()
        self.facts: list[tuple[str, Any]] = []
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._opened = asyncio.Event()

    async def start(self) -> "NodeProcess":
        self._opened.clear()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, str(NODE_PROCESS), self.name, str(self.root), str(self.port), TOKEN, "400MiB",
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        self._reader = asyncio.get_running_loop().create_task(self._read())
        async with asyncio.timeout(LIMIT_S):
            await self._opened.wait()
        return self

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            said = json.loads(line)
            if said["what"] == "open":
                self.port = said["value"]
                self._opened.set()
            else:
                self.facts.append((said["what"], said["value"]))

    @property
    def view(self) -> NodeView:
        return NodeView(
            NodeId(self.name), f"127.0.0.1:{self.port}",
            [each.device for each in open_devices(["cpu:0=400MiB"], NodeId(self.name))],
        )  # fmt: skip

    def of(self, kind: str) -> list[Any]:
        return [value for what, value in self.facts if what == kind]

    @property
    def ends(self) -> dict[str, bool]:
        """The calls that it has reported as finished, and whether they ended well."""
        return {each["call"]: each["ok"] for each in self.of("Finished")}

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def memory(self) -> int:
        return int(psutil.Process(self.pid).memory_info().rss)

    async def ended(self) -> None:
        assert self._process is not None
        async with asyncio.timeout(LIMIT_S):
            await self._process.wait()

    async def kill(self) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        tree = psutil.Process(self.pid).children(recursive=True)
        self.signal(signal.SIGKILL)
        for each in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        await self._process.wait()


class Rig:
    """Nodes, a gateway's end, and a hand that grants grants."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        # A machine that is busy may hold up a node for longer than a gateway allows it.
        patch.setattr(control, "SILENCE_S", LIMIT_S)
        patch.setattr(remote_nodes, "DIAL_S", LIMIT_S)
        self.root = root
        self.me = Identity("gateway", "g1", "boot", TOKEN.encode())
        self.unreachable: list[tuple[Grant, str]] = []
        self.nodes = RemoteNodes(self.me, lambda grant, reason: self.unreachable.append((grant, reason)))
        self.workers = RemoteWorkers(self.nodes)
        self.logs = RemoteLogs(self.nodes)
        self.processes: list[NodeProcess] = []
        self.number = 0

    async def node(self, name: str = "n") -> NodeProcess:
        process = await NodeProcess(self.root, name).start()
        self.processes.append(process)
        self.show()
        return process

    def show(self) -> None:
        self.nodes.set_nodes([each.view for each in self.processes])

    async def linked(self, name: str = "n") -> None:
        def there() -> bool:
            node = self.nodes.get(name)
            return node is not None and node.linked and node.small.connection is not None

        await eventually(there)

    async def function(
        self, name: str, source: str, kind: str = "http", slots: int = 8, node: str = "n", need: Need | None = None
    ) -> FunctionId:
        """Deploy *source* and load it on *node*."""
        (self.root / name / "function").mkdir(parents=True, exist_ok=True)
        (self.root / name / "function" / "handler.py").write_text(textwrap.dedent(source))
        (self.root / name / "kind").write_text(kind)
        spec = self.spec(name, kind, slots, need)
        remote = self.nodes.get(node)
        assert remote is not None
        await remote.ask("define", spec)
        return spec.function

    def spec(self, name: str, kind: str = "http", slots: int = 8, need: Need | None = None) -> WorkerSpec:
        need = need or (Need() if kind == "model" else Need(0, slots=slots))
        return WorkerSpec(FunctionId(f"{name}.ns@1"), name, "ns", name, kind, need)  # type: ignore[arg-type]

    def grant(self, function: FunctionId, *, cold: bool = False, node: str = "n", number: int | None = None) -> Grant:
        self.number += 1
        return Grant(
            1, self.number if number is None else number, (CallId(f"c{self.number}"),), function,
            function.partition(".")[0], (Part(DeviceId(f"{node}/cpu:0"), 48 * MiB),), cold,
        )  # fmt: skip

    def begin(
        self, function: FunctionId, body: bytes = b"", mode: int = INLINE, file: str = "", grant: Grant | None = None,
        **how: Any,
    ) -> RemoteExchange:  # fmt: skip
        grant = grant or self.grant(function, **how)
        return self.nodes.call(grant, CallHead(grant.call, "POST", "/", b"", [], mode, file), body)

    async def call(self, function: FunctionId, body: bytes = b"", **how: Any) -> bytes:
        return (await whole(self.begin(function, body, **how)))[1]

    async def gated(self, function: FunctionId, name: str, **how: Any) -> RemoteExchange:
        """Begin a call that ends when the file *name* is there; return it once its handler runs."""
        exchange = self.begin(function, str(self.root / name).encode(), **how)
        await eventually((self.root / f"{name}.reached").exists)
        return exchange

    def open_gate(self, name: str) -> None:
        (self.root / name).touch()


async def give_up(exchange: RemoteExchange) -> None:
    """The caller goes away; return when the node knows."""
    exchange.fail(CallCancelled("the caller went away"))
    await eventually(lambda: exchange._over)


async def whole(exchange: RemoteExchange) -> tuple[AnswerHead, bytes]:
    async with asyncio.timeout(LIMIT_S):
        head, first, done = await exchange.answer()
        pieces = [first]
        while not done and (piece := await exchange.chunk()) is not None:
            pieces.append(piece)
    return head, b"".join(pieces)


@pytest.fixture(params=["small", pytest.param("large", marks=pytest.mark.long)])
async def rig(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    """*large*: calls go beside those whose bodies are large."""
    if request.param == "large":
        monkeypatch.setattr("gpufaas_cluster.remote_exchange._BRIEF", -1)
    rig = Rig(tmp_path, monkeypatch)
    await rig.node()
    await rig.linked()
    yield rig
    await rig.nodes.close()
    for process in rig.processes:
        await process.kill()


in_order = pytest.mark.parametrize("rig", ["small"], indirect=True)
"""The node gets calls in the order in which they begin: on one connection."""


def connections(process: NodeProcess) -> int:
    """How many connections its call server has, the link included."""
    return sum(
        each.status == "ESTABLISHED" and each.laddr.port == process.port
        for each in psutil.Process(process.pid).net_connections("tcp")
    )


# --- calls ---


async def test_a_call_is_answered_and_the_next_one_uses_the_same_connection(rig: Rig) -> None:
    function = await rig.function("echo", ECHO)

    first = rig.begin(function, b"one", cold=True)
    head, body = await whole(first)
    await rig.linked()
    before = connections(rig.processes[0])
    bodies = [await rig.call(function, str(number).encode()) for number in range(20)]

    assert (head.status, body) == (200, b"one")
    assert first.load_s > 0
    assert [name for name, _ in first.phases] == ["room", "process", "read", "init"]
    assert bodies == [str(number).encode() for number in range(20)]
    assert connections(rig.processes[0]) == before


async def test_many_calls_at_once_stay_apart(rig: Rig) -> None:
    function = await rig.function("echo", ECHO, slots=16)
    await rig.call(function, cold=True)

    bodies = await asyncio.gather(*(rig.call(function, b"%d" % number * 1000) for number in range(200)))

    assert bodies == [b"%d" % number * 1000 for number in range(200)]


async def test_large_answers_come_whole_however_their_worker_gives_them(rig: Rig) -> None:
    """At first in pieces, then in memory that its node shares with it."""
    function = await rig.function("large", "def handle(event, context): return event.body * 300_000", slots=2)
    await rig.call(function, b"0123456789", cold=True)

    for number in range(10, 18):
        body = str(number).encode() * 5
        head, said = await whole(rig.begin(function, body))
        assert (head.status, said == body * 300_000) == (200, True)
    bodies = await asyncio.gather(*(rig.call(function, b"%d" % number) for number in (1, 2)))
    assert bodies == [b"1" * 300_000, b"2" * 300_000]


async def test_a_large_body_goes_through_a_file_of_the_nodes_own_which_is_then_removed(rig: Rig) -> None:
    function = await rig.function("sized", MODEL, "model", 1)
    file = rig.root / "body"
    file.write_bytes(os.urandom(10 * MiB))

    answer = json.loads(await rig.call(function, mode=FILE, file=str(file), cold=True))

    assert answer["size"] == 10 * MiB
    assert list((rig.root / "spool-n").iterdir()) == []


async def test_a_body_that_streams_comes_back_as_it_goes_in_bounded_memory(rig: Rig) -> None:
    function = await rig.function("stream", STREAMED_ECHO)
    await rig.call(function, cold=True)
    before = rig.processes[0].memory()
    exchange = rig.begin(function, b"first", STREAM)
    piece = b"x" * 65536
    received = 0

    async def send() -> None:
        for _ in range(1600):
            await exchange.send_body(piece)
        await exchange.end_body()

    sending = asyncio.get_running_loop().create_task(send())
    _, first, _ = await exchange.answer()
    received = len(first)
    most = 0
    while (chunk := await exchange.chunk()) is not None:
        received += len(chunk)
        most = max(most, rig.processes[0].memory())
    await sending

    assert received == len(b"first") + 1600 * 65536
    assert most - before < 30 * MiB


async def test_a_reader_who_stops_holds_the_worker_and_not_our_memory(rig: Rig) -> None:
    source = "def handle(event, context): return (b'x' * 65536 for _ in range(2000))"
    function = await rig.function("wordy", source)
    await rig.call(await rig.function("other", ECHO), cold=True)
    before = rig.processes[0].memory(), psutil.Process().memory_info().rss

    exchange = rig.begin(function, cold=True)
    _, first, _ = await exchange.answer()
    await eventually(lambda: exchange.unread > BUFFER)
    await rig.call(FunctionId("other.ns@1"))
    assert psutil.Process().memory_info().rss - before[1] < 30 * MiB
    size, most = len(first), rig.processes[0].memory()
    while (chunk := await exchange.chunk()) is not None:
        size += len(chunk)
        most = max(most, rig.processes[0].memory())
    assert size == 2000 * 65536
    assert most - before[0] < 30 * MiB


async def test_a_worker_that_does_not_read_holds_the_sender(rig: Rig) -> None:
    function = await rig.function("gated", GATED.replace("event.text", f"{str(rig.root / 'gate')!r}"))
    await rig.call(await rig.function("echo", ECHO), cold=True)
    exchange = rig.begin(function, b"", STREAM, cold=True)
    sent = 0

    async def send() -> None:
        nonlocal sent
        while sent < 8 * MiB:
            await exchange.send_body(b"x" * 65536)
            sent += 65536

    sending = asyncio.get_running_loop().create_task(send())
    await eventually((rig.root / "gate.reached").exists)
    await eventually(lambda: sent >= BODY_WINDOW)  # what the node and the worker take
    await rig.call(FunctionId("echo.ns@1"))
    assert sent <= BODY_WINDOW + credit.WINDOW + 2 * 65536
    await give_up(exchange)  # which does not wait behind the body
    await asyncio.wait_for(sending, LIMIT_S)
    rig.open_gate("gate")
    await eventually(lambda: rig.processes[0].ends.get(exchange.grant.call) is False)


async def test_a_caller_who_hangs_up_ends_his_call_and_the_connection_serves_the_next(rig: Rig) -> None:
    endless = "import itertools\ndef load(d): return 1\ndef handle(m, e, c): return (str(n) for n in itertools.count())"
    function = await rig.function("endless", endless, "model", 1)
    exchange = rig.begin(function, cold=True)
    await exchange.answer()
    await exchange.chunk()
    before = connections(rig.processes[0])

    await give_up(exchange)
    await eventually(lambda: rig.processes[0].ends == {exchange.grant.call: False})

    again = rig.begin(function)
    await again.answer()
    assert connections(rig.processes[0]) == before
    again.fail(CallCancelled("the caller went away"))


async def test_errors_come_with_their_class_and_words(rig: Rig) -> None:
    function = await rig.function(
        "dies", "import os, sys\ndef handle(event, context):\n    print('last words', flush=True)\n    os._exit(3)"
    )

    with pytest.raises(WorkerCrashed, match=r"(?s)exit status 3.*last words"):
        await rig.call(function, cold=True)


# --- refusals ---


async def test_a_grant_that_the_node_refuses_is_refused_here(rig: Rig) -> None:
    function = await rig.function("echo", ECHO)

    with pytest.raises(GrantRefused):
        await rig.call(function)  # a hit, and there is no worker
    await eventually(lambda: [each["call"] for each in rig.processes[0].of("NodeRefused")] == ["c1"])
    assert await rig.call(function, b"next", cold=True) == b"next"


async def test_a_piece_of_a_body_is_not_lost_with_a_refused_grant(rig: Rig) -> None:
    function = await rig.function("stream", STREAMED_ECHO)
    exchange = rig.begin(function, b"", STREAM)

    with pytest.raises(GrantRefused):
        await exchange.send_body(b"piece")
    with pytest.raises(GrantRefused):
        await exchange.answer()


@in_order
async def test_without_a_scheduler_only_a_ready_worker_is_called_and_one_call_at_a_time(rig: Rig) -> None:
    functions = [await rig.function(name, GATED_MODEL, "model", 1) for name in ("one", "two")]

    with pytest.raises(GrantRefused):
        await rig.call(functions[0], cold=True, number=-1)
    for each in functions:
        rig.open_gate(f"warm-{each}")
        await (await rig.gated(each, f"warm-{each}", cold=True)).answer()

    running = await rig.gated(functions[0], "first", number=-1)
    waiting = rig.begin(functions[1], str(rig.root / "second").encode(), number=-1)
    given_up = rig.begin(functions[1], str(rig.root / "third").encode(), number=-1)
    given_up.fail(CallCancelled("the caller went away"))
    last = rig.begin(functions[0], str(rig.root / "fourth").encode(), number=-1)
    await rig.call(await rig.function("echo", ECHO), cold=True)  # by now the node has all of them
    assert not (rig.root / "second.reached").exists()

    rig.open_gate("first")
    assert (await whole(running))[1] == b"done"
    await eventually((rig.root / "second.reached").exists)
    assert not (rig.root / "fourth.reached").exists()
    rig.open_gate("second")
    rig.open_gate("fourth")
    assert (await whole(waiting))[1] == b"done"
    assert (await whole(last))[1] == b"done"
    assert not (rig.root / "third.reached").exists()


@in_order
async def test_without_a_scheduler_calls_run_beside_others_as_far_as_the_compute_goes(rig: Rig) -> None:
    needs = {"one": Need(40, "spatial"), "two": Need(60, "spatial"), "three": Need(1, "spatial")}
    functions = [await rig.function(name, GATED_MODEL, "model", 1, need=need) for name, need in needs.items()]
    for each in functions:
        rig.open_gate(f"warm-{each}")
        await (await rig.gated(each, f"warm-{each}", cold=True)).answer()

    running = [
        await rig.gated(each, name, number=-1) for each, name in zip(functions[:2], ("first", "second"), strict=True)
    ]
    waiting = rig.begin(functions[2], str(rig.root / "third").encode(), number=-1)
    again = rig.begin(functions[0], str(rig.root / "again").encode(), number=-1)
    await rig.call(await rig.function("echo", ECHO), cold=True)  # by now the node has all of them
    assert not (rig.root / "third.reached").exists()

    rig.open_gate("second")
    assert (await whole(running[1]))[1] == b"done"
    await eventually((rig.root / "third.reached").exists)
    assert not (rig.root / "again.reached").exists()  # its copy runs one call at a time
    for gate in ("first", "third", "again"):
        rig.open_gate(gate)
    assert [(await whole(each))[1] for each in (running[0], waiting, again)] == [b"done"] * 3


@in_order
async def test_without_a_scheduler_calls_take_the_slots_of_a_copy_that_runs(rig: Rig) -> None:
    function = await rig.function("two", GATED_MODEL, "model", 1, need=Need(slots=2))
    other = await rig.function("other", GATED_MODEL, "model", 1)
    for each in (function, other):
        rig.open_gate(f"warm-{each}")
        await (await rig.gated(each, f"warm-{each}", cold=True)).answer()

    running = [await rig.gated(function, name, number=-1) for name in ("first", "second")]
    waiting = rig.begin(other, str(rig.root / "third").encode(), number=-1)
    rig.open_gate("first")
    assert (await whole(running[0]))[1] == b"done"
    await rig.call(await rig.function("echo", ECHO), cold=True)
    assert not (rig.root / "third.reached").exists(), "the device is held until the last of them has ended"

    rig.open_gate("second")
    rig.open_gate("third")
    assert [(await whole(each))[1] for each in (running[1], waiting)] == [b"done"] * 2


@in_order
async def test_a_share_that_a_copy_holds_is_not_free_for_calls_without_a_scheduler(rig: Rig) -> None:
    held = await rig.function("held", GATED_MODEL, "model", 1, need=Need(30, "share"))
    large = await rig.function("large", GATED_MODEL, "model", 1, need=Need(71, "spatial"))
    small = await rig.function("small", GATED_MODEL, "model", 1, need=Need(70, "spatial"))
    for each in (held, large, small):
        rig.open_gate(f"warm-{each}")
        await (await rig.gated(each, f"warm-{each}", cold=True)).answer()

    beside = [await rig.gated(each, f"gate-{each}", number=-1) for each in (held, small)]
    for each in (held, small):
        rig.open_gate(f"gate-{each}")
    assert [(await whole(each))[1] for each in beside] == [b"done"] * 2

    never = rig.begin(large, str(rig.root / "never").encode(), number=-1)
    await rig.call(await rig.function("echo", ECHO), cold=True)
    assert not (rig.root / "never.reached").exists()
    never.fail(CallCancelled("the caller went away"))


async def test_the_calls_of_one_grant_come_one_by_one(rig: Rig) -> None:
    function = await rig.function("gated", GATED, slots=2)
    grant = replace(rig.grant(function, cold=True), calls=(CallId("a"), CallId("b")))

    both = [await rig.gated(function, call, grant=grant.of(call)) for call in grant.calls]
    for call in grant.calls:
        rig.open_gate(call)

    assert [(await whole(each))[1] for each in both] == [b"done"] * 2
    await eventually(lambda: sorted(each["call"] for each in rig.processes[0].of("Finished")) == ["a", "b"])
    assert len(rig.processes[0].of("Loaded")) == 1


async def test_a_node_that_is_not_there_takes_nothing_and_the_scheduler_is_told(rig: Rig) -> None:
    port = rig.processes[0].port
    function = await rig.function("echo", ECHO)
    rig.nodes.set_nodes([NodeView(NodeId("gone"), "127.0.0.1:1", [Device(DeviceId("gone/cpu:0"), "cpu", 1)])])

    for node in ("gone", "never"):
        with pytest.raises(GrantRefused, match=node):
            await rig.call(function, node=node)

    assert port
    told = [(grant.call, grant.device) for grant, _ in rig.unreachable]
    assert told == [("c1", "gone/cpu:0"), ("c2", "never/cpu:0")]


async def test_who_has_another_token_is_turned_away(rig: Rig) -> None:
    stranger = Identity("gateway", "g2", "boot", b"another token")

    with pytest.raises(TurnedAway, match="--token-file"):
        await connect(f"127.0.0.1:{rig.processes[0].port}", stranger, LIMIT_S)


async def test_a_disk_that_is_full_is_said(rig: Rig) -> None:
    function = await rig.function("sized", MODEL, "model", 1)
    (rig.root / "spool-n").rmdir()
    file = rig.root / "body"
    file.write_bytes(b"x" * 2 * MiB)

    with pytest.raises(StorageFailed, match="spool-n on node n"):
        await rig.call(function, mode=FILE, file=str(file), cold=True)

    (rig.root / "spool-n").mkdir()
    assert json.loads(await rig.call(function, mode=FILE, file=str(file)))["size"] == 2 * MiB


# --- nodes that fail ---


async def test_a_node_that_is_killed_fails_its_calls_at_once_and_is_found_again(rig: Rig) -> None:
    process = rig.processes[0]
    await rig.linked()
    function = await rig.function("gated", GATED)
    exchange = await rig.gated(function, "gate", cold=True)

    await process.kill()
    with pytest.raises(WorkerCrashed, match="node n was lost"):
        await asyncio.wait_for(exchange.answer(), LIMIT_S)
    await eventually(lambda: not rig.nodes.nodes[0].linked)
    with pytest.raises(GrantRefused):
        await rig.call(function)

    await process.start()
    await rig.linked()
    assert await rig.call(await rig.function("echo", ECHO), b"back", cold=True) == b"back"


async def test_a_node_that_is_frozen_fails_its_calls_and_no_others(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen, _ = rig.processes[0], await rig.node("other")
    for name in ("n", "other"):
        await rig.linked(name)
    function = await rig.function("gated", GATED)
    echo = await rig.function("echo", ECHO, node="other")
    running = await rig.gated(function, "gate", cold=True)
    rig.open_gate("other")
    await whole(await rig.gated(function, "other"))  # its connection is kept
    await rig.call(echo, cold=True, node="other")

    monkeypatch.setattr(control, "SILENCE_S", SILENCE_S)
    frozen.signal(signal.SIGSTOP)
    try:
        sent_to_frozen = rig.begin(function, str(rig.root / "other").encode())
        assert await rig.call(echo, b"on", node="other") == b"on"
        for each in (running, sent_to_frozen):
            with pytest.raises(WorkerCrashed, match=r"node n was lost.*nothing was heard"):
                await asyncio.wait_for(each.answer(), LIMIT_S)
        with pytest.raises(GrantRefused):
            await rig.call(function)
        assert await rig.call(echo, b"on", node="other") == b"on"
    finally:
        frozen.signal(signal.SIGCONT)
        monkeypatch.setattr(control, "SILENCE_S", LIMIT_S)
    await rig.linked()  # the node gave up the calls of the link before
    rig.open_gate("gate")
    await eventually(lambda: running.grant.call in frozen.ends)
    assert frozen.ends[running.grant.call] is False, "it lost its caller"
    assert await rig.call(await rig.function("back", ECHO), b"back", cold=True) == b"back"


async def test_a_node_that_left_serves_what_it_has(rig: Rig) -> None:
    function = await rig.function("gated", GATED)
    exchange = await rig.gated(function, "gate", cold=True)

    rig.nodes.set_nodes([])
    with pytest.raises(GrantRefused):
        await rig.call(function)
    rig.open_gate("gate")

    assert (await whole(exchange))[1] == b"done"
    await eventually(lambda: connections(rig.processes[0]) == 0)


async def test_any_number_of_streams_at_once_is_on_one_connection(rig: Rig) -> None:
    function = await rig.function("gated", GATED, slots=8)
    gate = str(rig.root / "gate").encode()
    running = []
    for number in range(8):
        running.append(rig.begin(function, gate, STREAM, cold=not number))
        await running[-1].end_body()  # the node has it
    assert connections(rig.processes[0]) == 3, "the link, and two for calls"
    rig.open_gate("gate")

    assert [(await whole(each))[1] for each in running] == [b"done"] * 8


# --- questions ---


async def test_a_function_is_defined_and_checked_on_a_node_that_fits(rig: Rig) -> None:
    (rig.root / "bad" / "function").mkdir(parents=True)
    (rig.root / "bad" / "function" / "handler.py").write_text("import nothing_of_that_name")
    (rig.root / "bad" / "kind").write_text("http")

    manifest = await rig.workers.define(rig.spec("bad"))
    with pytest.raises(InvalidSpec, match="nothing_of_that_name"):
        await rig.workers.check(rig.spec("bad"))
    await rig.workers.forget(FunctionId("bad.ns@1"))

    assert manifest.kind == "http"
    assert [each.id for each in rig.workers.devices()] == ["n/cpu:0"]


async def test_use_and_logs_are_those_of_all_nodes(rig: Rig) -> None:
    await rig.node("other")
    prints = "def handle(event, context):\n    print(event.text, flush=True)\n    return 'ok'"
    function = await rig.function("prints", prints)
    await rig.function("prints", prints, node="other")
    assert await rig.workers.usage_of(function) is None
    for number, node in enumerate(("n", "other", "n", "other")):
        await rig.call(function, b"line %d" % number, cold=number < 2, node=node)
        await eventually(lambda: _texts_in(rig.root) == number + 1)  # noqa: B023 - now

    used = await rig.workers.usage_of(function)
    lines = await asyncio.to_thread(rig.logs.query, LogQuery("prints", "ns"))
    tail = await asyncio.to_thread(rig.logs.query, LogQuery("prints", "ns", tail=2))

    assert used is not None
    assert used[1] > MiB
    assert [each.text for each in lines] == ["line 0", "line 1", "line 2", "line 3"]
    assert [each.text for each in tail] == ["line 2", "line 3"]
    assert await asyncio.to_thread(rig.logs.known, "prints", "ns")
    assert not await asyncio.to_thread(rig.logs.known, "silent", "ns")
    await asyncio.to_thread(rig.logs.drop, "prints", "ns")
    assert await asyncio.to_thread(rig.logs.query, LogQuery("prints", "ns")) == []


def _texts_in(root: Path) -> int:
    return sum(len(file.read_text().splitlines()) for file in root.glob("logs-*/prints.ns.jsonl"))


async def test_logs_are_followed_over_a_restart_of_the_node(rig: Rig) -> None:
    await rig.linked()
    prints = "def handle(event, context):\n    print(event.text, flush=True)\n    return 'ok'"
    function = await rig.function("prints", prints)
    await rig.call(function, b"before", cold=True)
    await eventually(lambda: _texts_in(rig.root) == 1)
    lines = rig.logs.follow(LogQuery("prints", "ns"))
    async with asyncio.timeout(LIMIT_S):
        first = await anext(lines)
        await rig.call(function, b"while")
        second = await anext(lines)
        await rig.processes[0].kill()
        await rig.processes[0].start()
        await rig.linked()
        await rig.function("prints", prints)
        await rig.call(function, b"after", cold=True)
        third = await anext(lines)
        rig.logs.end_followers()
        rest = [each async for each in lines]

    assert [first.text, second.text, third.text] == ["before", "while", "after"]
    assert rest == []


async def test_a_question_to_a_node_that_is_gone_is_not_waited_for(rig: Rig) -> None:
    await rig.linked()
    node = rig.nodes.nodes[0]
    await rig.processes[0].kill()

    with pytest.raises(NotReached):
        await asyncio.wait_for(node.ask("usage", "f"), LIMIT_S)
