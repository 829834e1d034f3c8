"""The requests to the Docker engine, with an engine that only records them. tests/integration has the real one."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import docker
import pytest
import requests
from docker.errors import APIError, ImageNotFound
from msgspec.structs import replace

from gpufaas_cache_manager.host_tier import HostTier
from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.errors import GpufaasError, InvalidSpec
from gpufaas_core.model import Device, DeviceId, FunctionId, NodeId
from gpufaas_core.units import GiB, MiB
from gpufaas_gpu_manager.devices import CpuDevice
from gpufaas_gpu_manager.enforcement import Enforcement
from gpufaas_gpu_manager.host_cache import HostCache
from gpufaas_gpu_manager.launch import containers as module
from gpufaas_gpu_manager.launch.containers import ContainerLog, Containers
from gpufaas_gpu_manager.launch.networks import Network
from gpufaas_gpu_manager.launch.recipes import Recipes
from gpufaas_gpu_manager.line_limit import Allowance
from gpufaas_gpu_manager.settings import NodeSettings

SPEC = WorkerSpec(FunctionId("f.ns@1"), "f", "ns", "", "server", image="f:1", env={"MINE": "1"})
NETWORK = Network("n1", "10.0.0.1", "10.0.0.0/24")


class Engine:
    """The few calls of `docker.DockerClient` that are made; `asked` is how the last container was made."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}
        self.fails_with: Exception | None = None
        self.labels: dict[str, str] | None = {}
        self.here, self.closed = True, False
        self.pulled: list[str] = []
        self.containers = self.images = self

    def create(self, image: str, **asked: Any) -> "Engine":
        self.asked = {"image": image, **asked}
        return self

    def start(self) -> None:
        if self.fails_with is not None:
            raise self.fails_with

    def get(self, image: str) -> Any:
        if not self.here:
            raise ImageNotFound(image)
        return SimpleNamespace(labels=self.labels, attrs={"RepoDigests": []})

    def pull(self, image: str, tag: str | None = None) -> Any:
        self.pulled.append(f"{image}:{tag}" if tag else image)
        return SimpleNamespace(labels=self.labels)

    def close(self) -> None:
        self.closed = True

    def reload(self) -> None: ...
    def remove(self, **_: Any) -> None: ...

    id = "c1"
    attrs = {  # noqa: RUF012
        "NetworkSettings": {"Networks": {"mine": {"IPAddress": "10.0.0.2"}}},
        "State": {"Pid": 7},
        "Config": {"Env": []},
    }


class Gpu:
    """A CUDA device, as `devices.CudaDevice` describes itself."""

    device = Device(DeviceId("n/cuda:0"), "Test GPU", 16 * GiB, {"gpu": "true"})
    torch_device, enforced, uuid, cores, emulation = "cuda:0", False, "GPU-one", 0.0, None
    env = {"CUDA_VISIBLE_DEVICES": "GPU-one", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # noqa: RUF012


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def containers(engine: Engine) -> Containers:
    containers = Containers("instance", "http://gateway.openfaas:8080")
    containers._client = engine
    containers.networks._there = lambda namespace: {namespace: NETWORK}  # type: ignore[method-assign]
    return containers


def create(containers: Containers, source: Any, spec: WorkerSpec = SPEC, memory: int = 3 * GiB) -> None:
    device = SimpleNamespace(source=source)
    worker: Any = SimpleNamespace(
        spec=spec,
        device=device,
        memory=memory,
        number=1,
        output=SimpleNamespace(secret="5ec2e7"),
    )
    no_bundles: Any = None
    recipes = Recipes(no_bundles, NodeSettings(), Enforcement(), 1, HostCache(HostTier(0)))
    containers.create(SimpleNamespace(worker=worker, recipes=recipes), "", {}, NETWORK)  # type: ignore[arg-type]


def test_on_a_gpu_it_is_given_that_one_and_no_other(containers: Containers, engine: Engine) -> None:
    create(containers, Gpu())

    (request,) = engine.asked["device_requests"]
    assert request["Driver"] == "nvidia"
    assert request["DeviceIDs"] == ["GPU-one"]
    assert request["Capabilities"] == [["gpu", "compute", "utility"]]
    env = engine.asked["environment"]
    assert "CUDA_VISIBLE_DEVICES" not in env  # inside there is one GPU, number 0
    assert (env["GPUFAAS_DEVICE"], env["GPUFAAS_DEVICE_MEMORY"]) == ("cuda:0", str(3 * GiB))
    assert (env["MINE"], env["OPENFAAS_NAME"]) == ("1", "f")


def test_on_a_gpu_the_reservation_is_of_its_memory_and_limits_memory_is_of_the_machines(
    containers: Containers, engine: Engine
) -> None:
    create(containers, Gpu())
    assert "mem_limit" not in engine.asked

    create(containers, Gpu(), replace(SPEC, memory_limit=2 * GiB))
    assert (engine.asked["mem_limit"], engine.asked["memswap_limit"]) == (2 * GiB, 2 * GiB)


def test_on_a_cpu_device_it_is_given_no_gpu_and_is_held_to_its_reservation(
    containers: Containers, engine: Engine
) -> None:
    create(containers, CpuDevice(NodeId("n"), 0, GiB), memory=256 * MiB)

    assert "device_requests" not in engine.asked
    assert (engine.asked["mem_limit"], engine.asked["memswap_limit"]) == (256 * MiB, 256 * MiB)
    env = engine.asked["environment"]
    assert (env["CUDA_VISIBLE_DEVICES"], env["GPUFAAS_DEVICE"]) == ("", "cpu")


def test_it_has_the_capabilities_that_its_function_keeps_and_no_more(containers: Containers, engine: Engine) -> None:
    create(containers, CpuDevice(NodeId("n"), 0, GiB))
    assert engine.asked["cap_drop"] == ["ALL"]
    assert "SETUID" in engine.asked["cap_add"]
    assert "NET_RAW" not in engine.asked["cap_add"], "one that has it reads what others send"
    assert engine.asked["security_opt"] == ["no-new-privileges"]

    create(containers, CpuDevice(NodeId("n"), 0, GiB), replace(SPEC, capabilities=()))
    assert engine.asked["cap_add"] == []


def test_an_engine_that_cannot_give_gpus_is_told_what_it_lacks(containers: Containers, engine: Engine) -> None:
    said = 'could not select device driver "nvidia" with capabilities: [[gpu compute utility]]'
    engine.fails_with = APIError("500", explanation=said)

    with pytest.raises(
        GpufaasError, match=r"could not select device driver .*: give the engine NVIDIA's Container Tool"
    ):
        create(containers, Gpu())


async def test_a_platform_stops_also_if_the_engine_has_gone(containers: Containers, engine: Engine) -> None:
    def gone(**_: Any) -> None:
        raise ConnectionError("no such file: docker.sock")

    engine.list = gone  # type: ignore[attr-defined]

    await containers.close()

    assert engine.closed


async def test_an_engine_that_does_not_answer_in_time_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(**_: Any) -> None:
        raise requests.ReadTimeout("Read timed out")

    monkeypatch.setattr(docker, "from_env", hangs)

    with pytest.raises(InvalidSpec, match=r"the Docker engine does not answer \(Read timed out\): start it"):
        await Containers("instance", "").start()


def test_containers_of_nodes_on_one_machine_have_different_names(engine: Engine) -> None:
    names = set()
    for node in ("node-gpu-1", "node-gpu-2"):
        containers = Containers(node, "http://gateway.openfaas:8080")
        containers._client = engine
        create(containers, Gpu())
        names.add(engine.asked["name"])

    assert len(names) == 2


@pytest.mark.parametrize("here", [True, False])
async def test_an_image_may_say_itself_when_it_is_ready_and_well(
    containers: Containers, engine: Engine, here: bool
) -> None:
    engine.here = here
    engine.labels = {"com.openfaas.ready.http.path": "/_/ready", "com.openfaas.health.http.path": "/_/health", "x": "y"}

    manifest, spec = await containers.pull(SPEC)
    _, asked = await containers.pull(replace(SPEC, ready_path="/mine"))

    assert (manifest.kind, spec.ready_path, spec.health_path) == ("server", "/_/ready", "/_/health")
    assert asked.ready_path == "/mine"  # the function has the last word
    assert engine.pulled == ([] if here else ["f:1", "f:1"])


@pytest.mark.parametrize("labels", [None, {}, {"com.openfaas.ready.http.path": "no path\r\n"}])
async def test_an_image_that_says_nothing_usable_is_ready_when_its_port_is(
    containers: Containers, engine: Engine, labels: dict[str, str] | None
) -> None:
    engine.labels = labels

    _, spec = await containers.pull(SPEC)

    assert spec == SPEC


class Streams:
    """An engine whose stream of lines breaks after the first one, while the container runs on."""

    def __init__(self) -> None:
        self.opened = 0
        self.api = self

    def logs(self, engine_id: str, **_: Any) -> Iterator[bytes]:
        assert engine_id == "c1"
        self.opened += 1
        if self.opened == 1:
            yield b"before\n"
            raise ConnectionError("the engine restarts")
        yield b"after\n"

    def inspect_container(self, engine_id: str) -> dict[str, Any]:
        assert engine_id == "c1"
        return {"State": {"Running": self.opened == 1}}


async def test_lines_are_followed_on_when_their_stream_breaks_and_the_container_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_AGAIN_S", 0.0)
    containers, lines = Containers("instance", "http://gateway.openfaas:8080"), list[str | None]()
    containers._client, containers._loop = Streams(), asyncio.get_running_loop()
    container: Any = SimpleNamespace(dead=False, on_lines=lambda more, _: lines.extend(more or [None]))

    await asyncio.to_thread(ContainerLog(containers, container, "c1", "stdout", Allowance(0.0)).follow)
    await asyncio.sleep(0)  # what threads hand over comes in the next turn

    assert [each for each in lines if each] == ["before", "after"]
    assert lines[-1] is None
