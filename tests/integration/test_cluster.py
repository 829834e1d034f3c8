"""Several gateways, schedulers and nodes as processes of their own, as their users and operators meet them."""

import asyncio
import contextlib
import hashlib
import importlib.metadata
import json
import platform
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from kubernetes_server import KubernetesServer
from tests.etcd_process import etcd_missing
from tests.integration.cluster import Cluster, Gateway, MiB, Service
from tests.integration.conftest import ECHO, ECHO_MODEL, GATED_MODEL, HTTP, LIMIT_S, TORCH, stopped, until
from tests.integration.test_access import READER
from tests.integration.test_streaming import STEPS_HTTP, STEPS_MODEL
from tests.integration.test_websockets import deploy as deploy_server
from tests.solvers import install_solvers
from websockets.sync.client import connect as connect_sync

from gpufaas import Refused
from gpufaas_cli.build_target import BuildTarget, environments
from gpufaas_cli.bundles import BuildRequest, build
from gpufaas_cluster import control

pytestmark = [
    pytest.mark.skipif(bool(etcd_missing()), reason=etcd_missing() or "-"),
    pytest.mark.timeout(180),
]

LARGE_MODEL = """
    def load(device):
        return bytearray(range(1, 251)) * (360 << 10)

    def handle(model, event, context):
        return f"{len(model)}"
"""


STARTED = ("disk", "peer")
"""What a start without weights says: its node had the bundle already, or fetched it from the gateway for this start."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        yield made.start()
        for each in made.services:
            assert each.stop() == 0, f"{each.id} stops in peace: {each.said()[-2000:]}"
            assert "Traceback" not in each.said(), f"{each.id}: {each.said()}"
    finally:
        made.close()


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    """Two of each. Every test leaves it as it found it, and all parts of it of one mind."""
    yield shared
    shared.remove_all()
    shared.wait_agreed()
    until(lambda: not any(node.workers() for node in shared.nodes), "no worker outlives its function")


# --- what it says of itself ---


@contextlib.contextmanager
def kubernetes() -> Iterator[KubernetesServer]:
    """Kubernetes' API, on a thread of its own."""
    server, began, over = KubernetesServer(), threading.Event(), threading.Event()

    async def serve() -> None:
        await server.start()
        began.set()
        await asyncio.to_thread(over.wait)
        await server.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert began.wait(LIMIT_S)
        yield server
    finally:
        over.set()
        thread.join()


@pytest.mark.long
def test_a_gateway_says_what_functions_run_as(cluster: Cluster) -> None:
    """It said "processes" whatever the nodes made of images."""
    one = cluster.gateways[0]

    def orchestration() -> str:
        return str(one.web.get("/system/info").json()["provider"]["orchestration"])

    assert orchestration() == "processes"
    with kubernetes() as server:
        node = cluster.node("n-pods", "cpu:0=100MiB")
        node.arguments += ["--functions", "kubernetes"]
        node.env = {"GPUFAAS_KUBERNETES_URL": server.url, "GPUFAAS_KUBERNETES_NAMESPACE": server.namespace}
        node.start()
        try:
            until(lambda: orchestration() == "processes and pods")
        finally:
            node.stop()
    until(lambda: orchestration() == "processes")


ENDLESS = """
    import os

    def handle(event, context):
        while event.text == "loop":
            pass
        return f"{os.getpid()}"
"""


def test_a_stopped_worker_gets_no_calls_and_one_whose_call_does_not_end_is_ended_soon_after_its_time(
    cluster: Cluster,
) -> None:
    """Its gateway keeps grants of this function, so nodes hear from it alone that the time of a call is over."""
    gateway = cluster.gateways[0]
    path = gateway.deploy("endless", ENDLESS, HTTP)
    first = int(gateway.call(path).text)

    with stopped(first):
        second = gateway.call(path, headers={"X-Timeout": "12s"})
    assert (second.status_code, second.text == str(first)) == (200, False), second.text
    before = {each.pid for node in cluster.nodes for each in node.workers()}
    began = time.monotonic()
    for _ in before:
        assert gateway.call(path, b"loop", headers={"X-Timeout": "1s"}).status_code == 504
    until(lambda: before - {each.pid for node in cluster.nodes for each in node.workers()}, "one of them is ended")

    assert time.monotonic() - began < 9.0, "far less than 10 s after that"


# --- functions ---


@pytest.mark.parametrize("lang", [TORCH, HTTP])
def test_what_one_gateway_deploys_the_other_calls_at_once(cluster: Cluster, lang: str) -> None:
    one, other = cluster.gateways
    for number in range(3):
        path = one.deploy(f"new{number}", ECHO_MODEL if lang == TORCH else ECHO, lang)

        # Between the gateways is etcd: what one has answered, the other knows in a moment, or waits for.
        until(lambda: other.call(path, b"hello").status_code != 404)  # noqa: B023

        assert other.call(path, b"hello").text == "hello"


def test_a_model_is_resident_on_one_node_and_calls_of_both_gateways_hit_it(cluster: Cluster) -> None:
    one, other = cluster.gateways
    # A load takes long enough that no call is sooner elsewhere, also where the end of the one before is told late.
    path = one.deploy("model", ECHO_MODEL.replace("return None", "import time; time.sleep(2)"))

    first = one.call(path, b"x")
    until(lambda: other.call(path, b"x").status_code == 200)
    rest = [each.call(path, b"x") for each in cluster.gateways for _ in range(5)]

    assert first.headers["x-gpufaas-start"] in STARTED
    assert {each.headers["x-gpufaas-start"] for each in rest} == {"hit"}
    assert {each.headers["x-gpufaas-device"] for each in rest} == {first.headers["x-gpufaas-device"]}
    node = first.headers["x-gpufaas-device"].partition("/")[0]
    until(lambda: all(each.residents()[node] == ["model"] for each in cluster.gateways))


def test_calls_of_both_gateways_run_in_one_batch(cluster: Cluster) -> None:
    one, other = cluster.gateways
    source = """
        def load(device):
            return None

        def handle_batch(model, events, contexts):
            return [f"{event.text} of {len(events)}" for event in events]
    """
    path = one.deploy("together", source, batch_max="2", batch_wait="10s")
    until(lambda: other.call(path, b"x").status_code == 200)

    with ThreadPoolExecutor(2) as threads:
        begun = [threads.submit(each.call, path, each.id.encode()) for each in cluster.gateways]
        answers = [each.result() for each in begun]

    assert [each.text for each in answers] == ["g1 of 2", "g2 of 2"]
    assert [each.headers["x-gpufaas-batch"] for each in answers] == ["2", "2"]


def test_a_load_and_a_call_that_run_out_of_memory_have_more_room_the_next_time(cluster: Cluster) -> None:
    """The load is tried again in the same call, on whichever node; the call when it may run twice."""
    gateway = cluster.gateways[0]
    source = """
        def load(device):
            return bytearray(120 << 20)

        def handle(model, event, context):
            return str(len(bytearray(int(event.text or 1) << 20)))
        """
    once = gateway.deploy("once", source, memory="60Mi")
    twice = gateway.deploy("twice", source, memory="150Mi", idempotent="true")

    first = gateway.call(once)
    assert first.status_code == 200, first.text
    assert first.headers["x-gpufaas-start"] in STARTED
    answer = gateway.call(once, b"1000")
    assert (answer.status_code, answer.headers["x-gpufaas-error"]) == (507, "out-of-memory")
    assert gateway.call(once, b"200").status_code == 200
    gateway.cli.remove("once")
    assert gateway.call(twice).status_code == 200
    assert gateway.call(twice, b"100").status_code == 200


def test_what_is_scraped_of_all_services_has_each_device_and_function_once(cluster: Cluster) -> None:
    gateway = cluster.gateways[0]
    path = gateway.deploy("model", ECHO_MODEL)
    for each in cluster.gateways:
        until(lambda: each.call(path, b"x").status_code == 200)  # noqa: B023

    def told() -> list[str]:
        return [name for each in cluster.services for name in each.metrics()]

    counted = 'gateway_function_invocation_total{code="200",function_name="model.openfaas-fn"}'
    until(lambda: told().count(counted) == 2, "each call is counted once it was answered")
    documented = (Path(__file__).parents[2] / "docs/metrics.md").read_text()

    assert sum(name.startswith("gpufaas_device_calls_total{") for name in told()) == 2, "one of each device"
    for name in {name.partition("{")[0] for name in told()}:
        base = name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
        assert f"| `{name}` |" in documented or f"| `{base}` |" in documented, name


def test_models_beyond_the_memory_of_all_nodes_evict_each_other_within_budgets(cluster: Cluster) -> None:
    """Eight models of 120 MiB on two devices of 400 MiB."""
    gateway = cluster.gateways[0]
    paths = [gateway.deploy(f"large{number}", LARGE_MODEL, memory="120Mi") for number in range(8)]
    over: list[str] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(0.02):
            for node in cluster.nodes:
                held, found = node.held_bytes(), node.metrics()
                reserved = found[f'gpufaas_node_reserved_bytes{{device="{node.id}/cpu:0"}}']
                if held > 400 * MiB or reserved > 400 * MiB:
                    over.append(f"{node.id}: {held} held, {reserved} promised")

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for each in cluster.gateways:
            until(lambda: each.functions() == sorted(f"large{number}" for number in range(8)))  # noqa: B023
        answers = [each.call(path) for _ in range(2) for path in paths for each in cluster.gateways]
    finally:
        stop.set()
        looking.join()

    assert {each.status_code for each in answers} == {200}, {each.text for each in answers if each.status_code != 200}
    assert over == []
    assert {each.headers["x-gpufaas-device"] for each in answers} == {"n1/cpu:0", "n2/cpu:0"}
    leader = cluster.the_leader().metrics()
    evictions = sum(leader[f'gpufaas_device_evictions_total{{device="n{each}/cpu:0"}}'] for each in (1, 2))
    assert evictions >= 2, "three of the eight have room on each device"


def test_an_update_is_seen_by_both_gateways_and_a_removal_too(cluster: Cluster) -> None:
    one, other = cluster.gateways
    path = one.deploy("changing", 'def handle(event, context): return "first"', HTTP)
    until(lambda: other.call(path).text == "first")

    other.deploy("changing", 'def handle(event, context): return "second"', HTTP)
    until(lambda: one.call(path).text == "second")
    one.cli.remove("changing")

    until(lambda: other.call(path).status_code == 404)
    assert "there is no function 'changing'" in other.call(path).text
    until(lambda: not any(node.workers() for node in cluster.nodes), "its workers end on the nodes")


@pytest.mark.long
def test_a_quota_that_is_set_at_one_gateway_holds_at_all_and_each_counts_its_own_calls(
    cluster: Cluster, open_path: Path
) -> None:
    one, other = cluster.gateways
    quota = "/system/namespace/openfaas-fn/quota"
    path = one.deploy("gated", GATED_MODEL)
    until(lambda: other.functions() == ["gated"])
    one.web.put(quota, json={"maxFunctions": 1, "maxInFlight": 1}).raise_for_status()
    until(lambda: other.web.get(quota).json().get("maxInFlight") == 1)
    running: list[httpx.Response] = []

    def call(gateway: Gateway) -> None:
        running.append(gateway.call(path, str(open_path / "gate").encode()))

    callers = [threading.Thread(target=call, args=(each,)) for each in cluster.gateways]
    for each in callers:
        each.start()
    try:
        for gateway in cluster.gateways:
            until(lambda: gateway.web.get(quota).json()["used"]["inFlight"] == 1)  # noqa: B023
        refused = [each.call(path) for each in cluster.gateways]
        with pytest.raises(Refused, match=r"quota of functions \(1 of 1\)"):
            other.deploy("second", ECHO, HTTP)
    finally:
        (open_path / "gate").touch()
        for each in callers:
            each.join()
        other.web.delete(quota).raise_for_status()

    assert [each.status_code for each in refused] == [429, 429]
    assert [each.status_code for each in running] == [200, 200]
    until(lambda: "maxInFlight" not in one.web.get(quota).json())
    assert one.call(path, str(open_path / "gate").encode()).status_code == 200


@pytest.mark.long
def test_a_gateway_that_starts_holds_to_the_quotas_that_there_are(cluster: Cluster) -> None:
    one, other = cluster.gateways
    quota = "/system/namespace/openfaas-fn/quota"
    path = one.deploy("model", ECHO_MODEL)
    one.web.put(quota, json={"maxInFlight": 0}).raise_for_status()
    try:
        other.stop()
        other.start()
        assert other.call(path).status_code == 429, "from its first call on"
    finally:
        one.web.delete(quota).raise_for_status()
    until(lambda: other.call(path, b"x").status_code == 200)


@pytest.mark.long
def test_copies_that_are_asked_for_at_one_gateway_are_spread_over_the_nodes(cluster: Cluster) -> None:
    one, other = cluster.gateways
    path = one.deploy("scaled", ECHO_MODEL)
    until(lambda: other.call(path).status_code == 200)

    assert other.web.post("/system/scale-function/scaled", json={"service": "scaled", "replicas": 2}).is_success

    until(lambda: one.residents() == {"n1": ["scaled"], "n2": ["scaled"]}, str(one.residents()))
    until(lambda: {one.call(path).headers["x-gpufaas-device"] for _ in range(8)} >= {"n1/cpu:0"})


@pytest.mark.long
def test_namespaces_are_those_of_all_gateways(cluster: Cluster) -> None:
    one, other = cluster.gateways
    one.cli.put_namespace("team")
    until(lambda: "team" in other.cli.namespaces())

    path = other.deploy("echo.team", ECHO, HTTP)

    until(lambda: one.call(path, b"x").text == "x")
    assert one.call("/function/echo").status_code == 404
    other.cli.remove("echo", "team")
    until(lambda: one.call(path).status_code == 404)
    one.cli.remove_namespace("team")
    until(lambda: "team" not in other.cli.namespaces())


def test_secrets_reach_functions_on_nodes_sealed_on_their_way(cluster: Cluster) -> None:
    one, other = cluster.gateways
    value = f"value-{secrets.token_hex(8)}"
    one.cli.put_secret("key", value)
    path = other.deploy("reader", READER, HTTP, secrets=["key"], env={"secret_mount_path": ""})

    until(lambda: value in one.call(path).text, one.call(path).text)
    other.cli.put_secret("key", value + "-2", update=True)
    until(lambda: value + "-2" in one.call(path).text)

    assert value not in cluster.etcd.ctl("get", "--prefix", "/gpufaas/"), "in etcd it is sealed"
    other.cli.remove("reader")
    one.cli.remove_secret("key")


@pytest.mark.long
def test_what_functions_print_is_read_through_any_gateway(cluster: Cluster) -> None:
    one, other = cluster.gateways
    path = one.deploy("talking", "def handle(event, context): print('I heard', event.text, flush=True)", HTTP)
    until(lambda: other.call(path, b"this").status_code == 200)

    until(lambda: all("I heard this" in each.log_of("talking") for each in cluster.gateways))

    with other.web.stream("GET", "/system/logs", params={"name": "talking", "follow": "true", "tail": "1"}) as answer:
        lines = answer.iter_lines()
        assert "I heard this" in next(lines), "it follows from there on"
        one.call(path, b"that")
        assert any("I heard that" in json.loads(line)["text"] for line in lines)


@pytest.mark.long
@pytest.mark.parametrize(("lang", "source"), [(TORCH, STEPS_MODEL), (HTTP, STEPS_HTTP)])
def test_answers_stream_through_gateway_and_node(cluster: Cluster, open_path: Path, lang: str, source: str) -> None:
    gateway = cluster.gateways[1]
    path = gateway.deploy("steps", source, lang)
    gate = open_path / "step-"

    with gateway.web.stream("POST", path, content=str(gate).encode()) as answer:
        pieces = answer.iter_text()
        for number in range(5):
            (gate.parent / f"{gate.name}{number}").touch()
            assert next(pieces).strip() == f"data: {number}"


@pytest.mark.long
def test_websockets_reach_functions_on_nodes(cluster: Cluster) -> None:
    gateway = cluster.gateways[0]
    deploy_server(_AsPlatform(gateway), "talk")  # type: ignore[arg-type]

    for each in cluster.gateways:
        until(lambda: "talk" in each.functions())  # noqa: B023
        with connect_sync(f"ws://{each.address}/function/talk", proxy=None) as connection:
            for message in ("text", b"\x00\xff bytes", "x" * 70_000):
                connection.send(message)
                assert connection.recv(LIMIT_S) == message


class _AsPlatform:
    def __init__(self, gateway: Gateway) -> None:
        self.http, self.port = gateway.web, gateway.port

    def deploy_spec(self, spec: Mapping[str, object]) -> httpx.Response:
        return self.http.post("/system/functions", json=spec)


@pytest.mark.long
@pytest.mark.parametrize("lang", [TORCH, HTTP])
def test_large_bodies_arrive_whole(cluster: Cluster, lang: str) -> None:
    gateway = cluster.gateways[0]
    source = "import hashlib\ndef handle(event, context): return hashlib.sha256(event.body).hexdigest()"
    if lang == TORCH:
        source = source.replace("def handle(", "def load(device): pass\ndef handle(model, ")
    path = gateway.deploy("large", source, lang, memory="300Mi", max_body="64Mi")
    body = secrets.token_bytes(MiB) * 48

    assert gateway.call(path, body).text == hashlib.sha256(body).hexdigest()
    for node in cluster.nodes:
        until(lambda: list((node.data / "spool").iterdir()) == [])  # noqa: B023


def test_calls_are_explained_by_the_scheduler_to_any_gateway(cluster: Cluster) -> None:
    one, other = cluster.gateways
    path = one.deploy("explained", ECHO_MODEL)
    answer = one.call(path, b"x")

    until(lambda: other.web.get(f"/system/explain/{answer.headers['x-call-id']}").status_code == 200,
          other.web.get(f"/system/explain/{answer.headers['x-call-id']}").text)  # fmt: skip


def test_any_gateway_says_what_nodes_provide_to_functions(cluster: Cluster) -> None:
    found = [each.web.get("/system/environments").json() for each in cluster.gateways]

    assert [[each["nodes"] for each in of] for of in found] == [[["n1", "n2"]]] * len(cluster.gateways)
    assert found[0][0]["python"] == platform.python_version()
    assert found[0][0]["distributions"]["torch"]["version"] == importlib.metadata.version("torch")


@pytest.mark.long
def test_a_bundle_must_fit_all_nodes_that_its_constraints_allow(cluster: Cluster, tmp_path: Path) -> None:
    """n2 has a package that n1 has not."""
    gateway, other = cluster.gateways[0], cluster.nodes[1]
    for name, text in {
        "fn/handler.py": "import learn\n\ndef handle(event, context):\n    return learn.WHERE\n",
        "fn/requirements.txt": "learn",
        "n2/learn.py": "WHERE = 'n2'\n",
        "n2/learn-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: learn\nVersion: 1.0\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    body: dict[str, object] = {"service": "fn", "image": "fn"}

    def restarted_with(env: dict[str, str]) -> None:
        assert other.stop() == 0
        other.env = env
        other.start()
        until(cluster.whole)

    restarted_with({"PYTHONPATH": str(tmp_path / "n2")})
    try:
        allowed = environments(gateway.cli, {**body, "constraints": ["node.id=n2"]})
        assert [each.nodes for each in environments(gateway.cli) or ()] == [("n1",), ("n2",)]
        assert [each.nodes for each in allowed or ()] == [("n2",)]
        built = build(BuildRequest("fn", HTTP, tmp_path / "fn", build_root=tmp_path / "build",
                                   target=lambda: BuildTarget(tuple(allowed or ()), "the cluster")))  # fmt: skip
        gateway.cli.put_artifact(built.digest, built.bundle_tar, lambda _: None)
        body["annotations"] = {"gpufaas.bundle": built.digest}

        with pytest.raises(Refused, match=r"does not fit node n1: .* needs learn, and there is none"):
            gateway.cli.deploy(body)
        gateway.cli.deploy({**body, "constraints": ["node.id=n2"]})

        assert gateway.call("/function/fn").text == "n2"
    finally:
        gateway.cli.remove("fn")
        restarted_with({})


def test_the_cli_lists_nodes_and_drains_one(cluster: Cluster) -> None:
    gateway = cluster.gateways[0]
    path = gateway.deploy("model", ECHO_MODEL)

    assert "memory limit enforced by" in cluster.nodes[0].said()
    listed = cli("node", "list", "--gateway", gateway.url)
    assert all(f"n{number}" in listed for number in (1, 2)), listed
    assert cluster.nodes[0].address in cli("node", "describe", "n1", "--gateway", gateway.url)
    cli("node", "drain", "n1", "--gateway", gateway.url)
    until(lambda: cluster.gateways[1].nodes()["n1"]["state"] == "drained")
    assert "drained" in cli("node", "list", "--gateway", gateway.url)

    assert {gateway.call(path).headers["x-gpufaas-device"] for _ in range(5)} == {"n2/cpu:0"}
    gateway.cli.drain_node("n1", False)
    until(lambda: gateway.nodes()["n1"]["state"] == "ready")
    assert "there is no node 'n9'" in cli("node", "drain", "n9", "--gateway", gateway.url, fails=True)


@pytest.mark.long
def test_a_call_that_a_caller_gives_up_ends_on_its_node(cluster: Cluster) -> None:
    gateway = cluster.gateways[0]
    source = """
        import itertools

        def load(device):
            return None

        def handle(model, event, context):
            return map(str, itertools.count()) if event.body else "short"
    """
    path = gateway.deploy("endless", source, timeout="1h")

    with socket.create_connection((gateway.host, gateway.port)) as caller:
        caller.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx".encode())
        assert caller.recv(1024)
        until(lambda: sum(gateway.status()["running"].values()) == 1)

    until(lambda: not sum(gateway.status()["running"].values()))
    assert gateway.call(path).text == "short"


@pytest.mark.long
def test_a_node_that_is_stopped_lets_its_calls_end_and_gets_no_others(cluster: Cluster, open_path: Path) -> None:
    gateway = cluster.gateways[0]
    path = gateway.deploy("gated", GATED_MODEL)
    gate = open_path / "gate"
    with ThreadPoolExecutor() as threads:
        running = threads.submit(gateway.call, path, str(gate).encode())
        until((open_path / "gate.began").exists)
        (busy,) = [node for node in cluster.nodes if node.workers()]

        busy.signal(signal.SIGTERM)
        until(lambda: busy.id not in gateway.nodes(), "it is out of the view")
        elsewhere = gateway.call(path)
        gate.touch()

        assert running.result().status_code == 200, running.result().text
    assert elsewhere.status_code == 200
    assert not elsewhere.headers["x-gpufaas-device"].startswith(busy.id)
    assert busy.end() == 0
    busy.start()
    until(cluster.whole)


def cli(*arguments: str, fails: bool = False) -> str:
    """Run the CLI; return what it says."""
    done = subprocess.run(
        [sys.executable, "-m", "gpufaas_cli", *arguments], capture_output=True, text=True, check=False
    )
    assert bool(done.returncode) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


# --- what is refused, and how it is said ---


def says(service: Service, text: str) -> None:
    until(lambda: text in service.said(), lambda: f"{service.id} says {text!r}; it says {service.said()}")


@pytest.fixture
def another(shared: Cluster) -> Iterator[Callable[[str], Service]]:
    made: list[Service] = []

    def make(id_: str) -> Service:
        made.append(shared.node(id_, "cpu:0=100MiB"))
        made[-1].log = shared.home / f"{id_}-{secrets.token_hex(2)}.other"
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_node_with_another_token_is_turned_away_with_a_line_on_both_sides(
    shared: Cluster, another: Callable[[str], Service], tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("of another cluster altogether")
    node = another("n7")
    node.arguments += ["--token-file", str(tmp_path / "token")]
    node.start(wait=False)

    says(node, "has another token than scheduler s1: give it the same --token-file" if shared.the_leader().id == "s1"
         else "has another token than scheduler s2: give it the same --token-file")  # fmt: skip
    says(shared.the_leader(), "node n7 has another token")
    until(lambda: node.readiness()[0] == 503 and "token" in node.readiness()[1], str(node.readiness()))


@pytest.mark.slow  # it tries for as long as its own earlier run could be there
@pytest.mark.long  # the twin asks for as long as the lease of a node that died lasts
def test_a_second_node_of_the_same_name_ends_with_an_error_and_the_first_goes_on(
    shared: Cluster, another: Callable[[str], Service]
) -> None:
    twin = another("n1")
    twin.arguments[twin.arguments.index("--data") + 1] += "-twin"
    twin.start(wait=False)

    assert twin.end() != 0
    said = twin.said()
    assert "n1" in said.splitlines()[-1], said
    assert shared.nodes[0].address in said, said
    assert "Traceback" not in said, said
    assert shared.nodes[0].readiness()[0] == 200
    assert shared.whole()


OTHER_RELEASE = """
import sys
from gpufaas_cluster import control
control.PROTOCOL += 1
from gpufaas_cli.main import main
sys.argv[0] = "gpufaas"
main()
"""


def test_a_node_of_a_release_that_speaks_otherwise_is_turned_away(
    shared: Cluster, another: Callable[[str], Service], tmp_path: Path
) -> None:
    program = tmp_path / "other_release.py"
    program.write_text(OTHER_RELEASE)
    node = another("n8")
    node.program = [str(program)]
    node.start(wait=False)

    says(node, f"node n8 speaks protocol {control.PROTOCOL + 1}")
    says(node, f"this scheduler speaks {control.PROTOCOL}")
    until(
        lambda: any(
            "turned away" in each.said() and f"node n8 speaks protocol {control.PROTOCOL + 1}" in each.said()
            for each in shared.schedulers
        ),
        "a scheduler logs it, too",
    )
    assert "n8" not in shared.gateways[0].nodes()


def test_an_etcd_with_somebody_elses_keys_is_refused_at_once(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, schedulers=1, nodes=1, gateways=1)
    try:
        cluster.etcd.start()
        cluster.etcd.ctl("put", "/gpufaas/v1/config", "theirs")
        for each in cluster.services:
            each.start(wait=False)

        for each in cluster.services:
            assert each.end() != 0
            said = each.said()
            assert "/gpufaas" in said.splitlines()[-1], said
            assert "another prefix" in said, said
            assert "Traceback" not in said, said
    finally:
        cluster.close()


@pytest.mark.long
def test_without_etcd_services_say_which_endpoint_and_begin_when_it_comes(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, schedulers=1, nodes=1, gateways=1)
    try:
        for each in cluster.services:
            each.start(wait=False)
        for each in cluster.services:
            says(each, cluster.etcd.endpoint)
            until(lambda: each.readiness() == (503, "waits for etcd"), str(each.readiness()))  # noqa: B023
            assert each.http.get("/healthz").status_code == 200

        cluster.start()

        assert cluster.gateways[0].deploy("echo", ECHO, HTTP)
        assert cluster.gateways[0].call("/function/echo", b"x").text == "x"
    finally:
        cluster.close()


@pytest.mark.long
def test_a_service_that_waits_for_etcd_can_be_stopped(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, schedulers=1, nodes=1, gateways=1)
    try:
        for each in cluster.services:
            each.start(wait=False)
        for each in cluster.services:
            says(each, cluster.etcd.endpoint)
            each.signal(signal.SIGTERM)
            assert each.end() == 0, each.said()
            assert "Traceback" not in each.said()
    finally:
        cluster.close()


# --- plans ---


def test_a_plan_is_whole_and_at_all_gateways_when_schedulers_and_gateways_are_killed_while_plans_are_applied(
    cluster: Cluster,
) -> None:
    """Two people apply at two gateways all the time: one wins each time, and the other is told."""
    one, other = cluster.gateways
    one.deploy("planned", ECHO_MODEL, slots="4")
    until(lambda: other.functions() == ["planned"])
    stop, applied, refused = threading.Event(), [], []

    def apply(gateway: Gateway, slots: int) -> None:
        while not stop.is_set():
            with contextlib.suppress(httpx.TransportError):
                shown = gateway.web.get("/system/plan")
                replica = {"function": "planned", "device": f"n{slots % 2 + 1}/cpu:0", "slots": slots}
                if shown.status_code == 200:  # it is up again
                    asked = {"replicas": [replica], "why": f"{slots}", "base": shown.json()["version"]}
                    answer = gateway.web.put("/system/plan", json=asked)
                    (applied if answer.status_code == 200 else refused).append(answer)

    def plan_of(gateway: Gateway) -> tuple[int, str, int]:
        found = gateway.web.get("/system/plan").json()
        return found["version"], found["why"], found["replicas"][0]["slots"]

    def states(gateway: Gateway) -> list[str]:
        return [each["state"] for each in gateway.web.get("/system/plan").json()["replicas"]]

    with ThreadPoolExecutor(2) as threads:
        applying = [threads.submit(apply, each, slots) for slots, each in enumerate(cluster.gateways, 1)]
        for victim in (cluster.the_leader(), other):
            many = len(applied) + 2
            until(lambda: len(applied) > many, "plans are applied")  # noqa: B023
            victim.kill()
            victim.start()
        cluster.the_leader()
        stop.set()
        for each in applying:
            each.result()

    until(lambda: plan_of(one) == plan_of(other))
    version, why, slots = plan_of(one)
    assert (why, one.web.get("/system/plan").json()["replicas"][0]["device"]) == (f"{slots}", f"n{slots % 2 + 1}/cpu:0")
    assert version >= max(each.json()["version"] for each in applied)
    assert {each.status_code for each in refused} <= {409, 400, 503}, {each.text for each in refused}
    assert any(each.status_code == 409 and "came in between" in each.text for each in refused)
    until(
        lambda: [states(each) for each in (one, other)] == [["resident"]] * 2, lambda: one.web.get("/system/plan").text
    )
    one.web.put("/system/plan", json={"replicas": []}).raise_for_status()


@pytest.mark.long
def test_the_leader_plans_and_its_successor_goes_on_while_any_gateway_shows_it_and_asks(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_solvers(tmp_path, monkeypatch)
    one, other = cluster.gateways
    one.deploy("planned", ECHO_MODEL)
    before = one.web.get("/system/plan").json()["version"]
    for each in cluster.schedulers:
        each.arguments += ["--planner", "gathers"]
        each.kill()
        each.start()

    until(lambda: other.web.get("/system/plan").json()["version"] == before + 1, "the leader plans")
    first = other.web.get("/system/plan").json()
    made = one.web.post("/system/plan/make")
    (before_it := cluster.the_leader()).kill()
    cluster.the_leader()
    before_it.start()
    pinned = one.web.post("/system/plan/pin", json={"function": "planned", "device": "n1/cpu:0"})
    until(lambda: other.web.get("/system/plan").json()["planner"].get("solver"), "the gateway has found the successor")
    refused = other.web.post("/system/plan/make")

    assert (first["by"], [each["device"] for each in first["replicas"]]) == ("planner gathers", ["n2/cpu:0"])
    assert first["planner"]["solver"] == "gathers"
    assert made.json()["version"] == first["version"]  # it is in force already
    assert pinned.status_code == 200, pinned.text
    assert refused.status_code == 400
    assert "solver gathers changes what is pinned: planned.openfaas-fn on n1/cpu:0" in refused.text

    for each in cluster.schedulers:
        del each.arguments[-2:]
        each.kill()
        each.start()
    cluster.the_leader()
    until(lambda: one.web.get("/system/plan").json()["planner"] == {})
    one.web.put("/system/plan", json={"replicas": []}).raise_for_status()
