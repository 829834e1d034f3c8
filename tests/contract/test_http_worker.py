"""The contract of every worker that speaks HTTP: a program, a container, or a pod of Kubernetes."""

import asyncio
import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import psutil
import pytest
from kubernetes_server import KubernetesServer
from tests.waiting import LIMIT_S, eventually

from gpufaas_cache_manager.host_tier import HostTier
from gpufaas_core.bundle import Manifest, WorkerSpec
from gpufaas_core.errors import GpufaasError, InvalidSpec, LoadFailed, OutOfMemory, WorkerCrashed
from gpufaas_core.logs import Printed
from gpufaas_core.messages import CopyFailed, Event, Finished, Grant, Loaded, WorkerExited
from gpufaas_core.model import CallId, DeviceId, FunctionId, Need, NodeId, Part
from gpufaas_core.origin import GATEWAY_NAMES
from gpufaas_core.units import MiB
from gpufaas_core.wire.bodies import FILE, INLINE, STREAM, UPGRADE
from gpufaas_core.wire.heads import AnswerHead, CallHead
from gpufaas_gpu_manager import http_slots
from gpufaas_gpu_manager.devices import open_devices
from gpufaas_gpu_manager.exchange import Exchange
from gpufaas_gpu_manager.host_cache import HostCache
from gpufaas_gpu_manager.launch.containers import Containers
from gpufaas_gpu_manager.launch.kubernetes import Pods, WorkerPod
from gpufaas_gpu_manager.launch.kubernetes_api import Access
from gpufaas_gpu_manager.node import Node
from gpufaas_gpu_manager.settings import NodeSettings
from gpufaas_gpu_manager.supervisor import ContainerEngine
from gpufaas_gpu_manager.worker import Worker
from gpufaas_gpu_manager.worker_state import WorkerState

DEVICE = DeviceId("n/cpu:0")
pytestmark = pytest.mark.usefixtures("warm_fork_servers")
GATEWAY = "http://localhost:8000"
"""Of the cluster that the node is of."""
SERVER = Path(__file__).parent.parent / "images" / "server.py"
Headers = list[tuple[bytes, bytes]]


class Lines:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def extend(self, function: str, instance: str, printed: Iterable[Printed]) -> None:  # noqa: ARG002 - the port's
        self.lines.extend(each.text for each in printed)


class Programs:
    """The process launcher: bundles that hold the test server."""

    kind = "process"

    def __init__(self, root: Path) -> None:
        self._root = root

    def spec(self, name: str, **asked: object) -> WorkerSpec:
        (self._root / name / "function").mkdir(parents=True)
        shutil.copy(SERVER, self._root / name / "function" / "server.py")
        return WorkerSpec(FunctionId(f"{name}.ns@1"), name, "ns", name, "server", Need(0, slots=8), **asked)  # type: ignore[arg-type]

    def install(self, digest: str) -> Path:
        return self._root / digest

    def compiled(self, digest: str) -> Path:
        return self._root / "compiled" / digest

    def pid_of(self, worker: Worker) -> int | None:
        return worker.pid

    def manifest(self, digest: str) -> Manifest:  # noqa: ARG002 - the port's
        return Manifest(kind="server", template="test", command=("python", "server.py"))


class Images(Programs):
    """The Docker launcher: the same server in an image that is made from nothing."""

    kind = "docker"

    def __init__(self, root: Path, image: str) -> None:
        super().__init__(root)
        self._image = image

    def spec(self, name: str, **asked: object) -> WorkerSpec:
        function = FunctionId(f"{name}.ns@1")
        return WorkerSpec(function, name, "ns", "", "server", Need(0, slots=8), image=self._image, **asked)  # type: ignore[arg-type]


class PodImages(Images):
    """The Kubernetes launcher: an API server that runs the server of an image as a process."""

    kind = "kubernetes"

    def __init__(self, root: Path, server: KubernetesServer) -> None:
        super().__init__(root, "test:1")
        self.server = server

    def pid_of(self, worker: Worker) -> int | None:
        assert isinstance(worker.run, WorkerPod)
        return self.server.pid_of(worker.run.name)


class Rig:
    def __init__(self, launcher: Programs, settings: NodeSettings, containers: ContainerEngine | None) -> None:
        self.launcher = launcher
        self.logs = Lines()
        self.facts: list[Event] = []
        devices = open_devices(["cpu:0=400MiB"], NodeId("n"))
        self.node = Node(
            devices,
            launcher,
            self.logs,
            self.facts.append,
            settings=settings,
            containers=containers,
            host_cache=HostCache(HostTier(0)),
        )
        self.number = 0

    async def function(self, name: str = "server", **asked: object) -> FunctionId:
        spec = self.launcher.spec(name, **asked)
        await self.node.functions.define(spec)
        return spec.function

    def grant(self, function: FunctionId, cold: bool = False, memory: int = 128 * MiB) -> Grant:
        self.number += 1
        name = function.partition(".")[0]
        return Grant(1, self.number, (CallId(f"c{self.number}"),), function, name, (Part(DEVICE, memory),), cold)

    def begin(
        self, grant: Grant, path: str = "/echo", body: bytes = b"", method: str = "POST",
        headers: Headers | None = None, mode: int = INLINE, file: str = "",
    ) -> Exchange:  # fmt: skip
        path, _, query = path.partition("?")
        head = CallHead(grant.call, method, path, query.encode(), headers or [], mode, file)
        return self.node.grants.call(grant, head, body)

    async def call(
        self, function: FunctionId, path: str = "/echo", body: bytes = b"", *, cold: bool = False, **more: object
    ) -> tuple[AnswerHead, bytes]:
        return await whole(self.begin(self.grant(function, cold), path, body, **more))  # type: ignore[arg-type]

    def facts_of(self, kind: type) -> list[Event]:
        return [each for each in self.facts if isinstance(each, kind)]

    async def json(self, function: FunctionId, path: str, **more: object) -> dict[str, object]:
        return json.loads((await self.call(function, path, **more))[1])  # type: ignore[no-any-return]


async def whole(exchange: Exchange) -> tuple[AnswerHead, bytes]:
    async with asyncio.timeout(LIMIT_S):
        head, first, done = await exchange.answer()
        pieces = [first]
        while not done and (piece := await exchange.chunk()) is not None:
            pieces.append(piece)
    return head, b"".join(pieces)


@pytest.fixture(params=["process", "docker", pytest.param("kubernetes", marks=pytest.mark.long)])
async def launcher(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Programs]:
    if request.param == "kubernetes":
        server = KubernetesServer({"test:1": [sys.executable, "-u", str(SERVER)]})
        await server.start()
        yield PodImages(tmp_path, server)
        assert server.pods() == []  # the platform leaves none behind
        await server.close()
    elif request.param == "docker":
        yield Images(tmp_path, request.getfixturevalue("test_image"))
    else:
        yield Programs(tmp_path)


@pytest.fixture
async def rig(launcher: Programs, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(http_slots, "_IDLE_S", LIMIT_S)  # connections are kept, however slowly a test goes on
    containers: Containers | Pods | None = None
    if launcher.kind == "docker":
        containers = Containers(secrets.token_hex(4), GATEWAY)
        await containers.start()
    elif isinstance(launcher, PodImages):
        containers = Pods(secrets.token_hex(4), Access(url=launcher.server.url, namespace="functions"))
        await containers.start()
    rig = Rig(launcher, NodeSettings(abort_grace_s=0.5), containers)
    await rig.node.start()
    yield rig
    await rig.node.close()


@pytest.fixture
async def function(rig: Rig) -> FunctionId:
    function = await rig.function()
    await rig.call(function, "/count", cold=True)
    return function


@pytest.mark.parametrize("launcher", ["docker"], indirect=True)
async def test_a_container_in_a_cluster_is_told_where_the_clusters_gateway_is(rig: Rig, function: FunctionId) -> None:
    """It was told of one on port 0 of its node, which has none."""
    import docker

    assert (await rig.json(function, "/env"))["OPENFAAS_URL"] == GATEWAY
    with contextlib.closing(docker.from_env(timeout=LIMIT_S)) as engine:
        (container,) = engine.containers.list(filters={"name": "server.ns-"})
        hosts = container.attrs["HostConfig"]["ExtraHosts"]
    assert sorted(hosts) == sorted(f"{name}:127.0.0.1" for name in GATEWAY_NAMES)


async def test_a_miss_starts_it_and_its_connections_are_kept(rig: Rig) -> None:
    function = await rig.function()

    head, body = await rig.call(function, body=b"first", cold=True)
    for _ in range(5):
        await rig.call(function, body=b"again")
    count = await rig.json(function, "/count")

    assert (head.status, body) == (200, b"first")
    assert (b"content-type", b"application/x-echo") in head.headers
    assert [value for name, value in head.headers if name == b"x-one"] == [b"1", b"2"]
    assert count["connections"] == 2  # that of the look whether it is ready, and ours
    loaded = rig.facts_of(Loaded)
    assert len(loaded) == 1
    assert isinstance(loaded[0], Loaded)
    assert loaded[0].occupation == 128 * MiB
    assert len(rig.facts_of(Finished)) == 7


async def test_the_request_arrives_as_it_was_sent(rig: Rig, function: FunctionId) -> None:
    sent = [(b"host", b"example.org"), (b"x-a", b"1"), (b"x-a", b"2"), (b"expect", b"100-continue")]
    sent.append((b"content-length", b"3"))

    seen = await rig.json(function, "/seen?a=%20b&c", body=b"abc", method="PUT", headers=sent)

    assert (seen["method"], seen["target"], seen["bytes"]) == ("PUT", "/seen?a=%20b&c", 3)
    assert seen["headers"] == [["host", "example.org"], ["x-a", "1"], ["x-a", "2"], ["content-length", "3"]]


async def test_answers_of_every_kind_are_read_to_their_end_and_no_further(rig: Rig, function: FunctionId) -> None:
    expected = {
        ("GET", "/chunked"): (200, b"one,two,three"),
        ("GET", "/eof"): (200, b"until the end"),
        ("GET", "/early-hints"): (200, b"after the hints"),
        ("GET", "/empty"): (204, b""),
        ("GET", "/unchanged"): (304, b""),
        ("HEAD", "/head"): (200, b""),
        ("GET", "/head"): (200, b"seven77"),
        ("GET", "/nothing"): (404, b"/nothing"),
    }
    found = {}

    for method, path in expected:
        for _ in range(2):
            head, body = await rig.call(function, path, method=method)
            found[method, path] = (head.status, body)

    assert found == expected


async def test_an_answer_to_head_has_its_length_and_keeps_the_connection(rig: Rig, function: FunctionId) -> None:
    before = (await rig.json(function, "/count"))["connections"]

    heads = [await rig.call(function, path, method="HEAD") for path in ("/head", "/head", "/empty", "/head")]

    assert [(head.length, body) for head, body in heads] == [(7, b""), (7, b""), (-1, b""), (7, b"")]
    assert (await rig.json(function, "/count"))["connections"] == before


async def test_an_answer_that_streams_has_the_length_that_it_declares(rig: Rig, function: FunctionId) -> None:
    for path, length in (("/big?4000000", 4_000_000), ("/chunked", -1)):
        head, body = await rig.call(function, path)
        assert (head.length, len(body)) == (length, 4_000_000 if length > 0 else 13)


async def test_a_short_answer_is_passed_on_as_it_comes_unless_it_comes_at_once(rig: Rig, function: FunctionId) -> None:
    exchange = rig.begin(rig.grant(function), "/drips")
    head, _, done = await exchange.answer()
    first = await exchange.chunk()

    assert (head.length, done, first) == (6, False, b"one")
    await rig.call(function, "/go-on")
    assert (await exchange.chunk(), await exchange.chunk()) == (b"two", None)
    assert (await rig.call(function, "/apart"))[1] == b"body"


@pytest.mark.parametrize("size", [3, 300_000])
async def test_an_answer_that_is_longer_than_it_says_is_an_error(rig: Rig, function: FunctionId, size: int) -> None:
    with pytest.raises(GpufaasError, match=f"more than the {size} bytes of its Content-Length"):
        await rig.call(function, f"/longer?{size}")

    assert (await rig.call(function, body=b"next"))[1] == b"next"


async def test_streams_pass_both_ways_as_they_come(rig: Rig, function: FunctionId) -> None:
    exchange = rig.begin(rig.grant(function), "/duplex", b"one", mode=STREAM)

    _, first, done = await exchange.answer()
    heard = [await exchange.chunk()]
    for piece in (b"two", b"three"):
        await exchange.send_body(piece)
        heard.append(await exchange.chunk())
    await exchange.end_body()

    assert (first, done) == (b"", False)
    assert heard == [b"one", b"two", b"three"]
    assert await exchange.chunk() is None
    assert (await rig.call(function, body=b"next"))[1] == b"next"


@pytest.mark.parametrize("length", [None, 400_000])
async def test_a_body_is_sent_as_it_comes(rig: Rig, function: FunctionId, length: int | None) -> None:
    headers = [(b"content-length", str(length).encode())] if length else []
    exchange = rig.begin(rig.grant(function), "/echo", b"a" * 100_000, headers=headers, mode=STREAM)
    for letter in (b"b", b"c", b"d"):
        await exchange.send_body(letter * 100_000)
    await exchange.end_body()

    _, body = await whole(exchange)

    assert body == b"".join(letter * 100_000 for letter in (b"a", b"b", b"c", b"d"))


async def test_a_streamed_body_waits_for_its_worker(rig: Rig) -> None:
    function = await rig.function()
    exchange = rig.begin(rig.grant(function, cold=True), "/echo", b"early ", mode=STREAM)
    await exchange.send_body(b"bird")
    await exchange.end_body()

    assert (await whole(exchange))[1] == b"early bird"


async def test_a_body_that_lies_in_a_file_is_sent(rig: Rig, function: FunctionId, tmp_path: Path) -> None:
    (tmp_path / "body").write_bytes(b"z" * 3_000_000)

    _, body = await rig.call(function, mode=FILE, file=str(tmp_path / "body"))

    assert body == b"z" * 3_000_000


async def test_an_answer_that_comes_before_its_request_is_sent_is_taken(rig: Rig, function: FunctionId) -> None:
    exchange = rig.begin(rig.grant(function), "/early", b"x" * 1000, mode=STREAM)
    head, body = await whole(exchange)
    await exchange.send_body(b"too late")
    await exchange.end_body()

    assert (head.status, body) == (413, b"too much")
    assert (await rig.call(function, body=b"next"))[1] == b"next"


async def test_a_slow_reader_holds_the_function_up_and_not_our_memory(rig: Rig, function: FunctionId) -> None:
    exchange = rig.begin(rig.grant(function), f"/big?{64 * MiB}")
    await exchange.answer()
    size, most = 0, 0

    while (piece := await exchange.chunk()) is not None:
        size += len(piece)
        most = max(most, exchange._buffered)
        await asyncio.sleep(0)

    assert size == 64 * MiB
    assert most < 2 * MiB


async def test_a_connection_that_switches_protocols_carries_bytes_both_ways_until_it_ends(
    rig: Rig, function: FunctionId
) -> None:
    exchange = rig.begin(rig.grant(function), "/switch", method="GET", headers=[(b"upgrade", b"echo")], mode=UPGRADE)
    async with asyncio.timeout(LIMIT_S):
        head, _, done = await exchange.answer()
        came = await exchange.chunk() or b""
        for _ in range(3):
            await exchange.send_body(b"x" * 100_000)
            while len(came) < 100_000:
                came += await exchange.chunk() or b""
            came = came[100_000:]
        await exchange.send_body(b"bye")
        rest = await exchange.chunk()

    assert (head.status, done, came, rest) == (101, False, b"xxxxx", None)
    assert (b"x-asked", b"Upgrade") in head.headers
    finished = rig.facts_of(Finished)[-1]
    assert isinstance(finished, Finished)
    assert not finished.ok  # its time is not learnt
    assert (await rig.call(function, body=b"next"))[1] == b"next"


async def test_protocols_are_not_switched_unasked(rig: Rig, function: FunctionId) -> None:
    with pytest.raises(WorkerCrashed, match="switched protocols, which was not asked for"):
        await rig.call(function, "/switch", method="GET")

    refused = await rig.call(function, "/nothing", method="GET", headers=[(b"upgrade", b"echo")], mode=UPGRADE)
    assert (refused[0].status, refused[1]) == (404, b"/nothing")


async def test_calls_at_once_have_a_connection_each(rig: Rig, function: FunctionId) -> None:
    answers = await asyncio.gather(*(rig.call(function, "/chunked") for _ in range(8)))

    assert [body for _, body in answers] == [b"one,two,three"] * 8


@pytest.mark.parametrize("path", ["/mute", "/garbage"])
async def test_no_answer_is_said_and_the_worker_serves_on(rig: Rig, function: FunctionId, path: str) -> None:
    with pytest.raises(WorkerCrashed, match="gave no answer"):
        await rig.call(function, path)

    assert (await rig.call(function, body=b"next"))[1] == b"next"
    assert not rig.facts_of(WorkerExited)


async def test_half_an_answer_is_an_error(rig: Rig, function: FunctionId) -> None:
    with pytest.raises(GpufaasError, match="broke off"):
        await rig.call(function, "/half")

    assert (await rig.call(function, body=b"next"))[1] == b"next"


async def test_a_connection_that_was_closed_meanwhile_costs_no_call(rig: Rig, function: FunctionId) -> None:
    """At whatever moment if the call may be sent twice, else once its end was heard of."""
    for _ in range(20):
        assert (await rig.call(function, "/close-idle", method="GET"))[1] == b"bye"
        assert (await rig.call(function, "/head", method="GET"))[1] == b"seven77"
    slots = [*rig.node.workers()[0].calls.free]
    for _ in range(3):
        assert (await rig.call(function, "/close-idle", method="GET"))[1] == b"bye"
        await eventually(lambda: not any(each._connection for each in slots))
        assert (await rig.call(function, body=b"post"))[1] == b"post"


async def test_a_caller_who_leaves_closes_the_connection_and_frees_the_slot(rig: Rig, function: FunctionId) -> None:
    grant = rig.grant(function)
    exchange = rig.begin(grant, "/slow")
    await eventually(lambda: "slow began" in rig.logs.lines)

    rig.node.grants.abort(grant.call, DEVICE)

    finished = rig.facts_of(Finished)[-1]
    assert isinstance(finished, Finished)
    assert (finished.call, finished.ok) == (grant.call, False)
    await eventually(lambda: "slow: the caller went away" in rig.logs.lines)
    with pytest.raises(GpufaasError):
        await exchange.answer()
    assert len(rig.node.workers()) == 1


async def test_one_that_dies_in_a_call_says_how_with_its_last_words(rig: Rig, function: FunctionId) -> None:
    with pytest.raises(WorkerCrashed, match=r"status 3[\s\S]*last words"):
        await rig.call(function, "/die", method="GET")

    assert len(rig.facts_of(WorkerExited)) == 1
    assert rig.node.reserved(DEVICE) == 0
    assert (await rig.call(function, body=b"back", cold=True))[1] == b"back"


async def test_one_that_cannot_start_says_why(rig: Rig) -> None:
    function = await rig.function("broken", env={"FAIL": "1"})

    with pytest.raises(LoadFailed, match=r"status 1[\s\S]*this cannot work"):
        await rig.call(function, cold=True)

    assert len(rig.facts_of(CopyFailed)) == 1
    assert rig.node.reserved(DEVICE) == 0


async def test_it_has_no_more_memory_than_was_reserved(rig: Rig, function: FunctionId) -> None:
    assert (await rig.call(function, f"/eat?{30 * MiB}"))[0].status == 200

    # An engine says why it killed a container; of a process it is seen only where it says so itself.
    with pytest.raises((OutOfMemory, WorkerCrashed)):
        await rig.call(function, f"/eat?{600 * MiB}")


async def test_one_that_is_evicted_is_asked_to_end_and_leaves_nothing(rig: Rig, function: FunctionId) -> None:
    worker = rig.node.workers()[0]
    pid = rig.launcher.pid_of(worker)
    assert pid is not None

    rig.node.evict(function, DEVICE)

    await eventually(lambda: worker.state is WorkerState.GONE)
    await eventually(lambda: not psutil.pid_exists(pid) and "asked to end" in rig.logs.lines)
    assert rig.node.reserved(DEVICE) == 0
    assert not rig.facts_of(WorkerExited)


async def test_one_that_is_evicted_while_it_starts_leaves_nothing(rig: Rig) -> None:
    function = await rig.function()
    grant = rig.grant(function, cold=True)
    rig.node.grants.open(grant)
    worker = rig.node.workers()[0]
    await eventually(lambda: rig.launcher.pid_of(worker))
    pid = rig.launcher.pid_of(worker)

    rig.node.evict(function, DEVICE)

    await eventually(lambda: worker.state is WorkerState.GONE)
    assert rig.node.reserved(DEVICE) == 0
    await eventually(lambda: not psutil.pid_exists(pid or 0))


async def test_one_that_fails_its_health_check_is_killed(rig: Rig) -> None:
    function = await rig.function(health_path="/not-there", ready_path="/_/health", health_period_s=0.1)
    await rig.call(function, cold=True)

    await eventually(lambda: rig.facts_of(WorkerExited))

    fact = rig.facts_of(WorkerExited)[0]
    assert isinstance(fact, WorkerExited)
    assert "health check failed 3 times: GET /not-there was answered '404 Not Found' with '/not-there'" in fact.reason


async def test_a_deploy_is_told_whether_it_starts(rig: Rig) -> None:
    good = rig.launcher.spec("good", memory=64 * MiB, ready_delay_s=600.0)  # for which a check does not wait
    bad = rig.launcher.spec("bad", memory=64 * MiB, env={"FAIL": "1"})
    if rig.launcher.kind != "process":
        pytest.skip("a container is started when it is called: what it needs may not be there before")

    await rig.node.functions.check(good)
    with pytest.raises(InvalidSpec, match=r"bad does not start[\s\S]*this cannot work"):
        await rig.node.functions.check(bad)

    await eventually(lambda: not rig.node.workers())


async def test_platforms_on_one_machine_do_not_take_each_others_ports(rig: Rig) -> None:
    """Both look for free ports from the same one on, and a server takes its time before it listens."""
    if rig.launcher.kind != "process":
        pytest.skip("a container has its ports to itself")
    function = await rig.function()
    other = Node(
        open_devices(["cpu:0=400MiB"], NodeId("n")),
        rig.launcher,
        rig.logs,
        lambda _: None,
        host_cache=HostCache(HostTier(0)),
    )
    await other.start()
    await other.functions.define(rig.launcher.spec("other"))
    grant = Grant(1, 1, (CallId("x"),), FunctionId("other.ns@1"), "other", (Part(DEVICE, 128 * MiB),), True)

    mine, theirs = await asyncio.gather(
        rig.call(function, "/env", cold=True),
        whole(other.grants.call(grant, CallHead("x", "POST", "/env", b"", []), b"")),
    )

    assert json.loads(mine[1])["OPENFAAS_NAME"] == "server"
    assert json.loads(theirs[1])["OPENFAAS_NAME"] == "other"
    await other.close()


async def test_one_that_never_listens_or_is_never_ready_is_given_up_and_it_is_said_which(rig: Rig) -> None:
    function = await rig.function(env={"PORT": "1"}, ready_path="/nowhere", stall_s=1.0)
    listens = rig.launcher.kind == "process"  # which is given its port
    why = "to be ready: GET /nowhere was answered '404 Not Found' with '/nowhere'" if listens else "to listen on port"

    with pytest.raises(LoadFailed, match=rf"made no progress for 1 s .*, and has yet {re.escape(why)}"):
        await rig.call(function, cold=True)


async def test_closing_the_node_ends_them(rig: Rig, function: FunctionId) -> None:
    pid = rig.launcher.pid_of(rig.node.workers()[0])
    assert pid is not None

    await rig.node.close()

    await eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    assert function


async def test_kill_9_is_noticed_while_idle(rig: Rig, function: FunctionId) -> None:
    pid = rig.launcher.pid_of(rig.node.workers()[0])
    assert pid is not None

    os.kill(pid, signal.SIGKILL)

    await eventually(lambda: rig.facts_of(WorkerExited))
    assert not rig.node.workers()
    assert function
