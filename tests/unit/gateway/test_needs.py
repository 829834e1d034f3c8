"""What a deployment says of compute, sharing and latency: what the scheduler and nodes get, and what is refused."""

import re
from pathlib import Path

import pytest
from tests.unit.gateway import fakes

from gpufaas_core.constraints import GPU
from gpufaas_core.errors import InvalidSpec, NoDeviceFits
from gpufaas_core.model import Device, DeviceId, Need
from gpufaas_core.ports import read_ports
from gpufaas_core.units import GiB
from gpufaas_gateway.annotations import ANNOTATIONS
from gpufaas_gateway.catalogue import ServedRevision

CPU = Device(DeviceId("n/cpu:0"), "cpu", 8 * GiB, {GPU: "false"})
CUDA = Device(DeviceId("n/cuda:0"), "Test GPU", 8 * GiB, {GPU: "true"})


class Platform(fakes.Platform):
    """Deploys a function with annotations that are written without ``gpufaas.`` and with ``_`` for ``-``."""

    async def deploy(self, kind: str = "model", **annotations: str) -> ServedRevision:
        """*kind*: of the bundle, or ``image`` for none."""
        self.workers.bundle(self.bundle, kind=kind)
        given = {f"gpufaas.{name.replace('_', '-')}": text for name, text in annotations.items()}
        return await super().deploy(image=kind == "image", annotations=given)


@pytest.fixture
def platform() -> Platform:
    return Platform(CPU, CUDA)


@pytest.mark.parametrize(
    ("kind", "annotations", "need"),
    [
        ("model", {}, Need()),
        ("model", {"sharing": "exclusive", "compute": "100"}, Need()),
        ("model", {"sharing": "time"}, Need(sharing="time")),
        ("model", {"sharing": "spatial", "compute": "30"}, Need(30, "spatial")),
        ("model", {"sharing": " share ", "compute": " 1 "}, Need(1, "share")),
        ("model", {"sharing": "auto"}, Need(sharing="auto")),
        ("model", {"slots": "240"}, Need(slots=240)),
        ("model", {"sharing": "spatial", "compute": "20", "slots": "3"}, Need(20, "spatial", 3)),
        ("model", {"latency_goal": "200ms"}, Need(latency_goal_s=0.2)),
        ("model", {"batch_max": "8"}, Need(batch_max=8)),
        ("model", {"batch_max": "1", "sharing": "share", "compute": "50"}, Need(50, "share")),
        ("model", {"batch_max": "8", "batch_wait": "0"}, Need(batch_max=8)),
        (
            "model",
            {"batch_max": "4", "batch_wait": "5ms", "batch_adaptive": "true", "latency_goal": "200ms"},
            Need(batch_max=4, batch_wait_s=0.005, latency_goal_s=0.2, batch_adaptive=True),
        ),
        ("http", {"latency_goal": "1m30s"}, Need(0, slots=32, latency_goal_s=90.0)),
        ("server", {"device": "cuda"}, Need(0, slots=100)),
        ("server", {"device": "cuda", "sharing": "exclusive"}, Need()),
        ("image", {"device": "cuda", "sharing": "spatial", "compute": "50"}, Need(50, "spatial")),
        ("image", {"device": "cuda", "sharing": "share", "compute": "50", "slots": "16"}, Need(50, "share", 16)),
        ("image", {"device": "cuda", "sharing": "exclusive", "slots": "4"}, Need(slots=4)),
        ("image", {"device": "cuda", "slots": "16"}, Need(0, slots=16)),
        ("image", {"latency_goal": "2"}, Need(0, slots=100, latency_goal_s=2.0)),
    ],
)
async def test_the_scheduler_and_the_node_are_told_what_a_function_needs(
    platform: Platform, kind: str, annotations: dict[str, str], need: Need
) -> None:
    deployed = await platform.deploy(kind, **annotations)

    assert deployed.function.need == deployed.spec.need == need
    assert platform.scheduler.functions[deployed.function_id].need == need
    assert platform.workers.defined[deployed.function_id].need == need
    assert deployed.compute == need.compute


async def test_the_scheduler_is_told_what_a_function_says_of_itself(platform: Platform) -> None:
    said = await platform.deploy(
        task="classify", model="torchvision/resnet50", accuracy="76.1", weight="2.5", priority="-3", overload="shed",
        latency_goal="1s",
    )  # fmt: skip
    function = platform.scheduler.functions[said.function_id]

    assert (function.task, function.model, function.accuracy) == ("classify", "torchvision/resnet50", 76.1)
    assert (function.weight, function.priority, function.sheds) == (2.5, -3, True)


async def test_a_function_that_says_nothing_of_itself_queues_its_calls(platform: Platform) -> None:
    plain = (await platform.deploy(overload="queue")).function

    assert (plain.task, plain.model, plain.accuracy) == ("", "", 0.0)
    assert (plain.weight, plain.priority, plain.sheds) == (1.0, 0, False)


@pytest.mark.parametrize(
    ("kind", "annotations", "says"),
    [
        ("model", {"compute": "0"}, "gpufaas.compute: '0' is not a share of a device's compute: .* from 1 to 100"),
        ("model", {"compute": "101"}, "gpufaas.compute: '101' is not a share"),
        ("model", {"compute": "30%"}, "gpufaas.compute: '30%' is not a share"),
        ("model", {"compute": "-5"}, "gpufaas.compute: '-5' is not a share"),
        ("model", {"sharing": "share", "compute": "0"}, "gpufaas.compute: '0' is not a share"),
        ("model", {"sharing": "share", "compute": "101"}, "gpufaas.compute: '101' is not a share"),
        ("model", {"sharing": "mps"}, "gpufaas.sharing: 'mps' is not one of exclusive, time, spatial, share, auto"),
        ("model", {"compute": "30"}, "with gpufaas.sharing exclusive .* not 30 per cent: remove it, or set"),
        ("model", {"sharing": "time", "compute": "99"}, "with gpufaas.sharing time .* not 99 per cent"),
        ("model", {"sharing": "auto", "compute": "30"}, "with gpufaas.sharing auto .* not 30 per cent"),
        ("model", {"sharing": "spatial"}, "gpufaas.sharing: spatial needs gpufaas.compute"),
        ("model", {"sharing": "share"}, "gpufaas.sharing: share needs gpufaas.compute"),
        ("model", {"sharing": "time", "slots": "2"}, "gpufaas.sharing: time runs one call at a time, .* asks for 2"),
        ("model", {"slots": "241"}, "gpufaas.slots: 241 calls at once in one process .* over its limit of 240"),
        ("http", {"sharing": "share", "compute": "50"}, "gpufaas.sharing: is for models, and for programs and images"),
        ("http", {"compute": "100"}, "gpufaas.compute: is for models.*remove the annotation$"),
        ("image", {"sharing": "time"}, "gpufaas.sharing: is for models.*, or ask for a GPU$"),
        ("model", {"batch_max": "0"}, "gpufaas.batch-max: '0' must be at least 1"),
        ("model", {"batch_max": "many"}, "gpufaas.batch-max: 'many' is not a whole number"),
        ("model", {"batch_max": "241"}, "gpufaas.batch-max: 241 calls in one process are over its limit of 240"),
        ("model", {"batch_max": "8", "sharing": "share", "compute": "50"}, "gpufaas.batch-max: with .* share a call"),
        ("http", {"batch_max": "8"}, r"gpufaas.batch-max: calls run together in handle_batch\(.*remove the annotation"),
        ("image", {"batch_max": "8", "device": "cuda"}, "gpufaas.batch-max: calls run together"),
        ("model", {"batch_wait": "5ms"}, "gpufaas.batch-wait: .* gpufaas.batch-max is 1: remove it, or set"),
        ("model", {"batch_max": "8", "batch_wait": "-5ms"}, "gpufaas.batch-wait: '-5ms' is not a duration"),
        ("model", {"batch_max": "8", "batch_wait": "1h"}, "gpufaas.batch-wait: '1h' is more than 10 s"),
        (
            "model",
            {"batch_max": "8", "batch_wait": "50ms", "latency_goal": "50ms"},
            "gpufaas.batch-wait: 0.05 s leaves nothing of gpufaas.latency-goal, 0.05 s: make it shorter",
        ),
        ("model", {"batch_adaptive": "true"}, "gpufaas.batch-adaptive: .* gpufaas.batch-max is 1"),
        ("model", {"batch_max": "8", "batch_adaptive": "true"}, "gpufaas.batch-adaptive: .* is not set: set it"),
        ("model", {"batch_max": "8", "batch_adaptive": "8"}, "gpufaas.batch-adaptive: '8' is neither true nor false"),
        ("model", {"latency_goal": "0s"}, "gpufaas.latency-goal: '0s' must be more than 0"),
        ("model", {"latency_goal": "25h"}, "gpufaas.latency-goal: '25h' must be more than 0 and at most 24h"),
        ("model", {"latency_goal": "fast"}, "gpufaas.latency-goal: 'fast' is not a duration"),
        ("model", {"preload": "transformers, my-module"}, "gpufaas.preload: 'my-module' is not the name of a module"),
        ("model", {"preload": " "}, "gpufaas.preload: '' is not the name of a module"),
        ("model", {"preload": " ".join(f"m{n}" for n in range(33))}, "gpufaas.preload: 33 modules are over the limit"),
        ("server", {"preload": "numpy"}, "gpufaas.preload: is for functions of a template .* remove the annotation"),
        ("image", {"preload": "numpy"}, "gpufaas.preload: is for functions of a template"),
        (
            "image",
            {"capabilities": "KILL, SYS_ADMIN"},
            "gpufaas.capabilities: 'KILL, SYS_ADMIN': name those to keep of",
        ),
        ("image", {"capabilities": ""}, "gpufaas.capabilities: '': name those to keep of .* or write none"),
        ("http", {"capabilities": "none"}, "gpufaas.capabilities: is for images: processes have none"),
        ("http", {"connect": "0"}, "gpufaas.connect: '0' is no port or range in 1-65535: write"),
        ("http", {"connect": "80,65536"}, "gpufaas.connect: '65536' is no port"),
        ("http", {"connect": "9-8"}, "gpufaas.connect: '9-8' is no port"),
        ("http", {"connect": "postgres"}, "gpufaas.connect: 'postgres' is no port"),
        ("http", {"connect": "5432,"}, "gpufaas.connect: '' is no port"),
        (
            "http",
            {"connect": "2300-2400"},
            "gpufaas.connect: '2300-2400' has port 2379 or 2380, which are etcd's: leave",
        ),
        ("http", {"connect": "4000-5000"}, "gpufaas.connect: 1001 ports are over the limit of 1000: name fewer, or"),
        ("image", {"connect": "5432"}, "gpufaas.connect: containers have networks of their own: remove"),
        ("http", {"accuracy": "good"}, "gpufaas.accuracy: 'good' is not an accuracy in per cent"),
        ("http", {"accuracy": "0.76"}, "gpufaas.accuracy: '0.76' is not an accuracy in per cent, 0 or 1 to 100: write"),
        ("http", {"weight": "0"}, "gpufaas.weight: '0' is not a number above 0: write for example 1.5"),
        ("http", {"weight": "1e7"}, r"gpufaas.weight: '1e7' is over the limit of 1e\+06"),
        ("http", {"priority": "1.5"}, "gpufaas.priority: '1.5' is not a whole number from -100 to 100"),
        ("http", {"priority": "-101"}, "gpufaas.priority: '-101' is not a whole number from -100 to 100"),
        ("http", {"overload": "drop"}, "gpufaas.overload: 'drop' is neither queue nor shed"),
        ("http", {"overload": "shed"}, "gpufaas.overload: shed .* gpufaas.latency-goal, which is not set: set it"),
        ("http", {"task": ""}, "gpufaas.task: '' is not a name"),
        ("http", {"prefer": "best"}, "gpufaas.prefer: 'best' is not one of cheapest, fastest, accurate"),
        ("http", {"max_cost": "-1"}, "gpufaas.max-cost: '-1' is not a number above 0"),
        ("http", {"min_accuracy": "70"}, "gpufaas.min-accuracy: 70 is above gpufaas.accuracy, which is not set, so"),
        (
            "http",
            {"min_accuracy": "70", "accuracy": "69.5"},
            "gpufaas.min-accuracy: 70 is above gpufaas.accuracy, 69.5",
        ),
        ("http", {"application": "shop"}, "gpufaas.application: is not supported yet: remove the annotation, and call"),
        ("http", {"kinds": "a100"}, "gpufaas.kinds: is not supported yet: remove the annotation, and name devices"),
        ("http", {"scale_by": "queue"}, "gpufaas.scale-by: is not supported yet: remove the annotation, and scale by"),
        ("model", {"latency": "1s"}, "gpufaas.latency is not known: did you mean gpufaas.latency-goal"),
    ],
)
async def test_what_cannot_be_is_refused_in_one_line_that_says_what_to_do(
    platform: Platform, kind: str, annotations: dict[str, str], says: str
) -> None:
    with pytest.raises(InvalidSpec, match=says) as refused:
        await platform.deploy(kind, **annotations)

    assert "\n" not in str(refused.value)
    assert platform.scheduler.functions == {}


@pytest.mark.parametrize("kind", ["model", "http", "server"])
async def test_the_ports_that_a_function_connects_to_go_to_its_nodes(platform: Platform, kind: str) -> None:
    deployed = await platform.deploy(kind, connect=" 5432, 8000-8002")

    assert read_ports(deployed.spec.connect) == (5432, 8000, 8001, 8002)


@pytest.mark.parametrize("kind", ["model", "http"])
async def test_modules_to_preload_are_names_in_a_row(platform: Platform, kind: str) -> None:
    deployed = await platform.deploy(kind, preload="transformers, PIL.Image  transformers,")

    assert deployed.spec.preload == ("transformers", "PIL.Image")


async def test_compute_that_no_device_has_is_refused(platform: Platform) -> None:
    half = Device(DeviceId("n/cuda:0"), "Test GPU", 8 * GiB, {GPU: "true"}, compute=50)
    platform = Platform(CPU, half)

    with pytest.raises(NoDeviceFits, match=r"needs 100 per cent .*sharing exclusive.* that it may run on has .* 50 "):
        await platform.deploy(device="cuda")
    with pytest.raises(NoDeviceFits, match="needs 51 per cent"):
        await platform.deploy(device="cuda", sharing="spatial", compute="51")

    assert (await platform.deploy(device="cuda", sharing="spatial", compute="50")).function.need.compute == 50


async def test_memory_is_looked_for_on_devices_that_have_the_compute() -> None:
    wide = Device(DeviceId("n/cuda:1"), "Small GPU", 1 * GiB, {GPU: "true"})
    half = Device(DeviceId("n/cuda:0"), "Test GPU", 8 * GiB, {GPU: "true"}, compute=50)

    with pytest.raises(NoDeviceFits, match=r"the largest device \(n/cuda:1\) has 1.0 GiB"):
        await Platform(half, wide).deploy(memory="2GiB")


def test_the_docs_have_one_row_for_each_annotation() -> None:
    text = (Path(__file__).parents[3] / "docs" / "writing-functions.md").read_text()
    table = text.partition("| annotation | values |")[2].partition("\n\n")[0]
    rows = [row.split(" | ")[0] for row in table.splitlines()[2:]]

    assert sorted(name for row in rows for name in re.findall(r"`(gpufaas\.[-a-z]+)`", row)) == list(ANNOTATIONS)
