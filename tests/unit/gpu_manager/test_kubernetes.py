"""Functions as pods: the requests to Kubernetes, and the effect of its answers. tests/contract has the contract."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kubernetes_server import KubernetesServer
from tests.waiting import eventually

from gpufaas_cache_manager.host_tier import HostTier
from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.errors import GpufaasError, InvalidSpec, LoadFailed, OutOfMemory, WorkerCrashed
from gpufaas_core.logs import Printed
from gpufaas_core.messages import Event, Grant, WorkerExited
from gpufaas_core.model import CallId, Device, DeviceId, FunctionId, Need, NodeId, Part
from gpufaas_core.units import GiB, MiB
from gpufaas_core.wire.heads import CallHead
from gpufaas_gpu_manager.devices import open_devices
from gpufaas_gpu_manager.host_cache import HostCache
from gpufaas_gpu_manager.launch.kubernetes import Pods
from gpufaas_gpu_manager.launch.kubernetes_api import Access, access_from
from gpufaas_gpu_manager.launch.pod_manifest import PodSettings, settings_from
from gpufaas_gpu_manager.node import Node
from gpufaas_gpu_manager.settings import NodeSettings

SERVER = Path(__file__).parents[2] / "images" / "server.py"
DEVICE = DeviceId("n/cpu:0")
FUNCTION = FunctionId("f.ns@1")


class Lines:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def extend(self, function: str, instance: str, printed: Iterable[Printed]) -> None:  # noqa: ARG002 - the port's
        self.lines.extend(each.text for each in printed)


class Files:
    """Secrets of functions, as a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def mount(self, *_: object, **__: object) -> Path:
        return self.root

    def unmount(self, function: FunctionId) -> None: ...


class Cluster:
    """An API server, and a node that runs functions as its pods."""

    def __init__(self, server: KubernetesServer, settings: PodSettings, secrets: Path) -> None:
        self.server = server
        self.pods = Pods("ours", access(server), settings)
        self.logs = Lines()
        self.facts: list[Event] = []
        node_settings = NodeSettings(secrets=Files(secrets), env={"OPENFAAS_URL": "http://127.0.0.1:8080"})
        devices = open_devices(["cpu:0=400MiB"], NodeId("n"))
        bundles: Any = None
        self.node = Node(
            devices,
            bundles,
            self.logs,
            self.facts.append,
            settings=node_settings,
            containers=self.pods,
            host_cache=HostCache(HostTier(0)),
        )
        self.number = 0

    async def define(self, **asked: Any) -> None:
        spec = WorkerSpec(FUNCTION, "f", "ns", "", "server", Need(0, slots=4), **{"image": "test:1", **asked})
        await self.node.functions.define(spec)

    async def call(
        self, path: str = "/echo", body: bytes = b"", *, cold: bool = False, memory: int = 128 * MiB
    ) -> bytes:
        self.number += 1
        call = CallId(f"c{self.number}")
        grant = Grant(1, self.number, (call,), FUNCTION, "f", (Part(DEVICE, memory),), cold)
        path, _, query = path.partition("?")
        exchange = self.node.grants.call(grant, CallHead(call, "POST", path, query.encode(), []), body)
        async with asyncio.timeout(30):
            _, answer, done = await exchange.answer()
            while not done and (piece := await exchange.chunk()) is not None:
                answer += piece
        return answer

    @property
    def pod(self) -> dict[str, Any]:
        (pod,) = self.server.pods()
        return pod


def access(server: KubernetesServer) -> Access:
    return Access(url=server.url, namespace=server.namespace)


@pytest.fixture
async def server() -> AsyncIterator[KubernetesServer]:
    server = KubernetesServer({"test:1": [sys.executable, "-u", str(SERVER)]})
    await server.start()
    yield server
    await server.close()


@pytest.fixture
def settings() -> PodSettings:
    return PodSettings(gateway="http://gateway.gpufaas:8080", node_selector={"kubernetes.io/hostname": "here"})


@pytest.fixture
async def cluster(server: KubernetesServer, settings: PodSettings, tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(server, settings, tmp_path)
    yield cluster
    await cluster.node.close()
    assert server.pods() == []
    assert server.secrets() == []


async def test_a_pod_is_what_its_function_asks_for(cluster: Cluster) -> None:
    await cluster.define(
        env={"MINE": "$(HOME)"}, labels={"team": "a", "note": "not a label's value!"}, cpus=0.5, read_only=True,
        capabilities=("KILL",),
    )  # fmt: skip

    await cluster.call(cold=True)
    pod = cluster.pod
    spec, (container,) = pod["spec"], pod["spec"]["containers"]
    env = {each["name"]: each["value"] for each in container["env"]}

    assert (
        pod["metadata"]["labels"].items() >= {"team": "a", "faas_function": "f", "gpufaas.io/instance": "ours"}.items()
    )
    assert "note" not in pod["metadata"]["labels"]
    assert (spec["restartPolicy"], spec["automountServiceAccountToken"]) == ("Never", False)
    assert spec["nodeSelector"] == {"kubernetes.io/hostname": "here"}
    assert container["resources"]["limits"] == {"memory": str(128 * MiB), "cpu": "500m"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], "add": ["KILL"]},
    }  # fmt: skip
    assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]
    assert env["MINE"] == "$$(HOME)"  # Kubernetes makes $(HOME) of it, and would else make a path
    assert env["OPENFAAS_URL"] == "http://gateway.gpufaas:8080"


async def test_secrets_come_as_a_secret_of_the_pod_and_go_with_it(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"s3cret\x00")
    await cluster.define(secrets=("key",))

    assert await cluster.call("/secret?key", cold=True) == b"s3cret\x00"
    (secret,) = cluster.server.secrets()
    assert secret["metadata"]["name"] == cluster.pod["metadata"]["name"]
    mounts = cluster.pod["spec"]["containers"][0]["volumeMounts"]
    assert mounts == [{"name": "secrets", "mountPath": "/var/openfaas/secrets", "readOnly": True}]

    cluster.node.evict(FUNCTION, DEVICE)
    await eventually(lambda: not cluster.server.pods() and not cluster.server.secrets())


async def test_an_image_that_cannot_be_pulled_is_said_in_kubernetes_words(cluster: Cluster) -> None:
    await cluster.define(image="registry.example/none:1")

    with pytest.raises(LoadFailed) as failed:
        await cluster.call(cold=True)

    said = str(failed.value)
    assert "image registry.example/none:1 cannot be pulled (ImagePullBackOff): failed to pull and unpack" in said
    assert "GPUFAAS_KUBERNETES_PULL_SECRETS" in said
    assert cluster.node.reserved(DEVICE) == 0


async def test_one_that_takes_more_than_its_limit_is_told_so(cluster: Cluster) -> None:
    await cluster.define()
    await cluster.call(cold=True)

    with pytest.raises(OutOfMemory, match="out of memory at its limit of 128 MiB"):
        await cluster.call(f"/eat?{600 * MiB}")


@pytest.mark.parametrize("settings", [PodSettings(node_selector={"kubernetes.io/hostname": "elsewhere"})])
async def test_a_pod_that_finds_no_machine_is_given_up_with_the_reason(cluster: Cluster) -> None:
    await cluster.define(stall_s=0.3)

    with pytest.raises(LoadFailed, match=r"to be given a machine: 0/1 nodes are available"):
        await cluster.call(cold=True)


async def test_a_refusal_is_told_to_the_caller(cluster: Cluster) -> None:
    await cluster.define()
    cluster.server.refusals["POST", "pods"] = (403, 'pods "f" is forbidden: exceeded quota: compute')

    with pytest.raises(LoadFailed, match=r"did not start a pod of test:1: .*exceeded quota: compute"):
        await cluster.call(cold=True)
    cluster.server.refusals.clear()

    assert await cluster.call(body=b"now", cold=True) == b"now"


async def test_a_pod_that_somebody_deletes_is_started_by_the_next_call(cluster: Cluster) -> None:
    await cluster.define()
    await cluster.call(cold=True)

    await cluster.server.delete_pod(cluster.pod["metadata"]["name"])

    await eventually(lambda: [each for each in cluster.facts if isinstance(each, WorkerExited)])
    assert await cluster.call(body=b"back", cold=True) == b"back"


async def test_a_watch_that_breaks_goes_on_where_it_was(cluster: Cluster) -> None:
    await cluster.define()
    await cluster.call(cold=True)
    lists = cluster.server.asked.count(("GET", "/api/v1/namespaces/functions/pods"))

    cluster.server.drop_watches()
    await cluster.server.delete_pod(cluster.pod["metadata"]["name"], 0)  # while nobody watches

    await eventually(lambda: [each for each in cluster.facts if isinstance(each, WorkerExited)])
    again = cluster.server.asked.count(("GET", "/api/v1/namespaces/functions/pods"))
    assert again == lists + 1  # one more watch, and no list: lists and watches have the same path
    assert cluster.server.watched_from[-1] > cluster.server.watched_from[0]  # bookmarks moved it on


@pytest.mark.parametrize("gone_as_status", [False, True])
async def test_a_version_that_kubernetes_has_forgotten_is_listed_again(cluster: Cluster, gone_as_status: bool) -> None:
    await cluster.define()
    await cluster.call(cold=True)
    cluster.server.gone_as_status = gone_as_status
    cluster.server.bookmark_s = 60

    cluster.server.drop_watches()
    await cluster.server.delete_pod(cluster.pod["metadata"]["name"], 0)
    await cluster.server.compact()  # the deletion is not among what can be watched any more

    await eventually(lambda: [each for each in cluster.facts if isinstance(each, WorkerExited)])
    assert await cluster.call(body=b"back", cold=True) == b"back"


@pytest.mark.parametrize(
    "status",
    [{"containerStatuses": [{"name": "function", "restartCount": "many"}]}, {"message": "other ends\x85of lines\x85"}],
)
async def test_a_strange_status_does_not_end_the_watch(cluster: Cluster, status: dict[str, Any]) -> None:
    await cluster.define()
    await cluster.call(cold=True)
    (key,) = [each for each in cluster.server.objects if each[1] == "pods"]

    await cluster.server._store(key, {**cluster.pod, "status": status}, "MODIFIED")
    await cluster.server.delete_pod(key[3], 0)

    await eventually(lambda: [each for each in cluster.facts if isinstance(each, WorkerExited)])
    assert len(cluster.server.watched_from) == 1


async def test_a_log_that_breaks_is_followed_on_without_a_line_twice(cluster: Cluster) -> None:
    await cluster.define()
    await cluster.call(cold=True)
    await eventually(lambda: "listening on 8080" in cluster.logs.lines)

    before = set(cluster.server._watches)
    cluster.server.drop_watches()
    await eventually(lambda: len(cluster.server._watches - before) == len(before), "all are followed again")
    with pytest.raises(WorkerCrashed, match=r"status 3[\s\S]*last words"):
        await cluster.call("/die")

    assert cluster.logs.lines.count("listening on 8080") == 1
    assert cluster.logs.lines.count("last words") == 1


async def test_pods_of_an_earlier_run_are_removed_and_those_of_others_are_not(server: KubernetesServer) -> None:
    for instance in ("ours", "another"):
        earlier = Cluster(server, PodSettings(), Path("/nonexistent"))
        earlier.pods = earlier.node.host.containers = Pods(instance, access(server))
        await earlier.define()
        await earlier.call(cold=True)
        for task in [earlier.pods._watching, *earlier.pods._tasks]:  # it was killed
            assert task is not None
            task.cancel()
        assert earlier.pods._server is not None
        await earlier.pods._server.close()
    ours = Pods("ours", access(server))

    await ours.start()

    await eventually(lambda: len(server.pods()) == 1)
    assert server.pods()[0]["metadata"]["labels"]["gpufaas.io/instance"] == "another"
    await ours.close()


async def test_more_memory_is_asked_for_while_it_runs(cluster: Cluster) -> None:
    await cluster.define()
    await cluster.call(cold=True)

    cluster.node.resize(FUNCTION, DEVICE, 300 * MiB)

    await eventually(lambda: cluster.pod["spec"]["containers"][0]["resources"]["limits"]["memory"] == str(300 * MiB))
    assert await cluster.call(f"/eat?{150 * MiB}") == str(150 * MiB).encode()


async def test_what_we_may_not_do_is_said_at_the_start(server: KubernetesServer) -> None:
    server.refusals["DELETE", "pods"] = (403, "pods is forbidden")
    pods = Pods("ours", access(server))

    with pytest.raises(InvalidSpec, match=r"refuses \(403: pods is forbidden\): the service account needs to get"):
        await pods.start()


async def test_without_a_server_a_deploy_says_what_is_missing() -> None:
    pods = Pods("ours", Access(url="http://127.0.0.1:9", namespace="x"))

    with pytest.raises(InvalidSpec, match=r"has only an image \(test:1\): Kubernetes at .* does not answer"):
        await pods.pull(WorkerSpec(FUNCTION, "f", "ns", "", "server", image="test:1"))


async def test_a_token_that_was_replaced_is_read_again(server: KubernetesServer, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(server.token)
    pods = Pods("ours", Access(url=server.url, namespace="functions", token_file=token))
    await pods.start()

    server.token = "another"
    token.write_text("another\n")
    assert pods._server is not None

    assert (await pods._server.list({}))[0] == {}
    await pods.close()


async def test_a_function_that_is_placed_on_a_gpu_is_refused(server: KubernetesServer) -> None:
    source = SimpleNamespace(uuid="GPU-one", device=Device(DeviceId("n/cuda:0"), "Test GPU", 16 * GiB))
    spec = WorkerSpec(FUNCTION, "f", "ns", "", "server", image="test:1")
    worker: Any = SimpleNamespace(spec=spec, device=SimpleNamespace(source=source, id="n/cuda:0"))
    pods = Pods("ours", access(server))
    await pods.start()

    with pytest.raises(GpufaasError, match="pods of functions get no GPU"):
        await pods.create(SimpleNamespace(worker=worker), {})  # type: ignore[arg-type]
    await pods.close()


# --- where the API server is ---


def test_in_a_pod_its_service_account_is_used(tmp_path: Path) -> None:
    for name, text in (("token", "t"), ("ca.crt", "c"), ("namespace", "faas\n")):
        (tmp_path / name).write_text(text)

    found = access_from({"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}, tmp_path)

    assert found == Access(
        url="https://[fd00::1]:6443", namespace="faas", token_file=tmp_path / "token", ca_file=tmp_path / "ca.crt"
    )


def test_what_is_said_explicitly_comes_first(tmp_path: Path) -> None:
    env = {"GPUFAAS_KUBERNETES_URL": "https://k:6443/", "GPUFAAS_KUBERNETES_TOKEN_FILE": "/t"}

    found = access_from(env | {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path)

    assert found == Access(url="https://k:6443", namespace="default", token_file=Path("/t"))


def test_outside_of_kubernetes_it_is_said_what_to_set() -> None:
    with pytest.raises(InvalidSpec, match=r"in no pod of Kubernetes .*GPUFAAS_KUBERNETES_URL"):
        access_from({})


def test_pods_are_kept_to_the_machine_whose_memory_is_promised() -> None:
    found = settings_from({"GPUFAAS_KUBERNETES_NODE": "worker-3", "GPUFAAS_KUBERNETES_PULL_SECRETS": "a, b"})

    assert found.node_selector == {"kubernetes.io/hostname": "worker-3"}
    assert found.pull_secrets == ("a", "b")
