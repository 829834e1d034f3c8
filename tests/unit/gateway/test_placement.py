"""The devices on which a function may run: requests, refusals, and what the scheduler and nodes get."""

from collections.abc import Sequence
from typing import Any

import pytest
from tests.unit.gateway.fakes import Platform

from gpufaas_core.constraints import PRODUCT, Constraint
from gpufaas_core.errors import InvalidSpec, NoDeviceFits
from gpufaas_core.model import Device, DeviceId, Need, Profile
from gpufaas_core.units import GiB, MiB
from gpufaas_gateway.placement import PROFILES, read_placement, read_profiles


def device(name: str, memory: int = 4 * GiB, **labels: str) -> Device:
    """As a node makes one."""
    cuda = name.startswith("cuda")
    said = {
        "device.id": f"local/{name}", "device.kind": "cuda" if cuda else "cpu", "gpu": "true" if cuda else "false",
        **({PRODUCT: "Test-GPU"} if cuda else {}), **labels,
    }  # fmt: skip
    return Device(DeviceId(f"local/{name}"), "Test GPU" if cuda else "cpu", memory, said)


CPU, GPU = device("cpu:0"), device("cuda:0", 16 * GiB)


def asked(**fields: Any) -> list[str]:
    """What is asked for, as text, of an image if it says so."""
    fields = {"constraints": (), "limits": {}, "requests": {}, "annotations": {}, "labels": {}, **fields}
    return [str(each) for each in read_placement(**fields).asked]


# --- reading ----------------------------------------------------------------------------------------------------------


def test_what_asks_for_nothing_may_run_anywhere() -> None:
    assert asked() == []
    assert asked(limits={"memory": "1Gi", "cpu": "2", "nvidia.com/gpu": "0"}) == []
    assert asked(annotations={"gpufaas.device": "any"}) == []


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"limits": {"nvidia.com/gpu": "1"}}, "gpu=true (limits nvidia.com/gpu)"),
        ({"requests": {"nvidia.com/gpu": "1"}}, "gpu=true (requests nvidia.com/gpu)"),
        ({"annotations": {"gpufaas.device": "cuda"}}, "gpu=true (annotation gpufaas.device)"),
        ({"annotations": {"gpufaas.device": "cpu"}}, "gpu!=true (annotation gpufaas.device)"),
        ({"annotations": {"com.openfaas.profile": "gpu"}}, "gpu=true (profile gpu)"),
        ({"annotations": {"com.openfaas.profile": " nvidia-gpu "}}, "gpu=true (profile nvidia-gpu)"),
        ({"labels": {"com.openfaas.profile": "gpu"}}, "gpu=true (profile gpu)"),
        ({"constraints": ["gpu == true"]}, "gpu=true (constraints)"),
    ],
)
def test_each_way_to_ask_becomes_a_constraint_that_knows_where_it_is_from(fields: Any, expected: str) -> None:
    assert asked(**fields) == [expected]


def test_all_that_ask_must_be_satisfied() -> None:
    everything = asked(
        limits={"nvidia.com/gpu": "1"}, annotations={"com.openfaas.profile": "gpu,gold"}, constraints=["zone!=b"],
        profiles=read_profiles(["gold=tier=gold,zone!=c"]),
    )  # fmt: skip

    assert everything == [
        "gpu=true (limits nvidia.com/gpu)", "gpu=true (profile gpu)", "tier=gold (profile gold)",
        "zone!=c (profile gold)", "zone!=b (constraints)",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"limits": {"nvidia.com/gpu": "2"}}, "limits nvidia.com/gpu: '2': a function runs on one GPU: ask for 1"),
        ({"limits": {"nvidia.com/gpu": "0.5"}}, "'0.5': a function runs on one GPU.*gpufaas.memory"),
        ({"limits": {"amd.com/gpu": "1"}}, "limits amd.com/gpu: there are NVIDIA GPUs and CPU devices here only"),
        ({"requests": {"intel.com/gpu": "1"}}, "requests intel.com/gpu: there are NVIDIA GPUs"),
        ({"annotations": {"gpufaas.device": "gpu"}}, "annotation gpufaas.device: 'gpu' is not one of cuda, cpu, any"),
        ({"annotations": {"com.openfaas.profile": "nvidia"}}, "no profile 'nvidia': did you mean nvidia-gpu"),
        ({"annotations": {"com.openfaas.profile": "spot"}}, r"no profile 'spot': \(there are: gpu, nvidia-gpu"),
        ({"constraints": ["gpu"]}, "constraints: 'gpu' is not a constraint: write KEY=VALUE"),
    ],
)
def test_what_cannot_be_had_or_read_is_refused_by_its_field(fields: Any, says: str) -> None:
    with pytest.raises(InvalidSpec, match=says):
        asked(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"limits": {"nvidia.com/gpu": "1"}},
        {"annotations": {"gpufaas.device": "any"}},
        {"constraints": ["gpu=True"]},
        {"constraints": ["gpu!=false"]},
        {"constraints": ["device.kind==cuda"]},
        {"constraints": ["nvidia.com/gpu.product=NVIDIA-H200"]},
        {"constraints": ["device.id=local/cuda:1"]},
    ],
)
def test_an_image_may_be_on_a_gpu_if_anything_says_so(fields: Any) -> None:
    assert not [each for each in asked(**fields, image=True) if "gpu!=true" in each]


@pytest.mark.parametrize("fields", [{}, {"constraints": ["zone=a"]}, {"constraints": ["gpu=false"]}])
def test_an_image_stays_on_cpu_devices_otherwise(fields: Any) -> None:
    assert asked(**fields, image=True)[-1] == "gpu!=true (an image that asks for no GPU)"
    assert not [each for each in asked(**fields) if "gpu!=true" in each]


@pytest.mark.parametrize("text", ["gold", "=a=b", "gold=", "Gold=a=b", "gold=a", "gpu=zone=a"])
def test_a_profile_that_cannot_be_read_or_is_there_already_is_refused(text: str) -> None:
    with pytest.raises(InvalidSpec):
        read_profiles([text])
    assert read_profiles([]) == PROFILES


# --- deploying --------------------------------------------------------------------------------------------------------


async def test_the_scheduler_and_the_node_are_told_the_constraints() -> None:
    platform = Platform(CPU, GPU)

    deployed = await platform.deploy(limits={"nvidia.com/gpu": "1"}, constraints=("gpu=true", "zone!=b"))

    expected = (Constraint("gpu", "true"), Constraint("zone", "b", negated=True))
    assert platform.scheduler.functions[deployed.function_id].constraints == expected
    assert platform.workers.defined[deployed.function_id].constraints == expected


async def test_a_model_that_asks_for_nothing_may_run_on_any_device() -> None:
    platform = Platform(CPU, GPU)

    deployed = await platform.deploy()

    assert platform.scheduler.functions[deployed.function_id].constraints == ()


@pytest.mark.parametrize(
    ("devices", "fields", "says"),
    [
        ([CPU], {"limits": {"nvidia.com/gpu": "1"}},
         r"asks for a GPU, gpu=true \(limits nvidia.com/gpu\), and this platform has no CUDA device: serve with --dev"),
        ([CPU], {"annotations": {"com.openfaas.profile": "gpu"}}, r"gpu=true \(profile gpu\), and this platform"),
        ([CPU], {"annotations": {"gpufaas.device": "cuda"}}, r"\(annotation gpufaas.device\), and this platform"),
        ([CPU], {"constraints": ("gpu=true",)}, r"gpu=true \(constraints\), and this platform has no CUDA device"),
        ([CPU], {"constraints": ("nvidia.com/gpu.product=A",)}, r"product=A \(constraints\), and this platform"),
        ([GPU], {"constraints": ("nvidia.com/gpu.product=A",)},
         r"none satisfies .*product=A \(constraints\): nvidia.com/gpu.product is Test-GPU here: correct it$"),
        ([CPU], {"constraints": ("zone=a",)},
         r"zone=a \(constraints\): no device has the label zone \(there are: device.id, device.kind, gpu\): "
         r"correct it, or label a device, as in 'gpufaas serve --label zone=a'"),
        ([device("cpu:0", zone="b"), device("cpu:1", zone="c")], {"constraints": ("zone=a",)}, "zone is b, c here"),
        ([CPU], {"constraints": ("device.knd=cpu",)}, "no device has the label device.knd, did you mean device.kind"),
        ([CPU], {"constraints": ("gpu!=false",)}, "this platform has no CUDA device"),
        ([CPU, GPU], {"annotations": {"gpufaas.device": "cpu", "com.openfaas.profile": "gpu"}},
         r"none satisfies all of gpu!=true \(annotation gpufaas.device\), gpu=true \(profile gpu\): remove or correct"),
        ([GPU], {"image": True}, "all devices here are GPUs, and images run on CPU devices unless they ask for a GPU"),
        ([CPU, device("cuda:0", tier="gold")], {"image": True, "annotations": {"com.openfaas.profile": "gold"}},
         r"none satisfies all of tier=gold \(profile gold\), gpu!=true \(an image that asks for no GPU\): images"),
    ],
)  # fmt: skip
async def test_what_no_device_satisfies_is_refused_with_what_there_is(
    devices: Sequence[Device], fields: Any, says: str
) -> None:
    platform = Platform(*devices)

    with pytest.raises(InvalidSpec, match=says):
        await platform.deploy(**fields)

    assert not platform.workers.defined
    assert not platform.scheduler.functions


async def test_only_devices_that_it_may_use_count_for_its_size() -> None:
    platform = Platform(device("cpu:0", 1 * GiB), device("cuda:0", 16 * GiB))

    with pytest.raises(NoDeviceFits, match=r"but the largest device that it may run on \(local/cpu:0\) has 1.0 GiB"):
        await platform.deploy(annotations={"gpufaas.memory": "2GiB", "gpufaas.device": "cpu"})
    assert await platform.deploy(annotations={"gpufaas.memory": "2GiB"})


# --- images -----------------------------------------------------------------------------------------------------------


async def test_an_image_without_a_request_takes_many_calls_on_a_cpu_device() -> None:
    platform = Platform(CPU, GPU)

    deployed = await platform.deploy(image=True, limits={"memory": "256Mi"})

    assert (deployed.compute, deployed.spec.need.slots, deployed.spec.memory) == (0, 100, 256 * MiB)
    assert deployed.options.placement.among([CPU, GPU]) == [CPU]


async def test_an_image_on_a_gpu_has_all_of_it_and_takes_one_call_at_a_time() -> None:
    """A container cannot be limited to a share of a GPU, and ``nvidia.com/gpu: 1`` means a whole one elsewhere."""
    platform = Platform(CPU, GPU, device("cuda:1", 12 * GiB))

    deployed = await platform.deploy(image=True, limits={"nvidia.com/gpu": "1", "memory": "2Gi"})

    assert (deployed.compute, deployed.spec.need) == (100, Need())
    assert deployed.function.profile("Test GPU").occupation == 16 * GiB
    assert deployed.spec.memory_limit == 2 * GiB  # of the machine's memory, which is what limits.memory means
    assert deployed.options.placement.among([CPU, GPU]) == [GPU]


async def test_an_image_that_says_what_it_needs_shares_its_gpu() -> None:
    platform = Platform(CPU, GPU)

    deployed = await platform.deploy(image=True, annotations={"gpufaas.device": "cuda", "gpufaas.memory": "3GiB"})

    assert deployed.function.profile("Test GPU").occupation == 3 * GiB


async def test_an_image_that_batches_by_itself_may_take_more_calls_at_once() -> None:
    platform = Platform(CPU, GPU)

    deployed = await platform.deploy(image=True, annotations={"gpufaas.device": "cuda", "gpufaas.slots": "64"})

    assert (deployed.compute, deployed.spec.need) == (0, Need(0, slots=64))


async def test_an_image_for_any_device_is_charged_by_the_kind_of_it() -> None:
    platform = Platform(CPU, GPU)

    deployed = await platform.deploy(image=True, annotations={"gpufaas.device": "any"}, limits={"memory": "1Gi"})

    assert deployed.function.constraints == ()
    assert deployed.function.profile("cpu").occupation == GiB
    assert deployed.function.profile("Test GPU").occupation == 16 * GiB
    assert deployed.compute == 100


async def test_what_an_image_cost_before_does_not_change_what_it_is_given_now() -> None:
    platform = Platform(CPU)
    platform.store.save_profile("image:f:1", "cpu", Profile(2.0, 0.5, 100 * MiB, measured=True))

    deployed = await platform.deploy(image=True, limits={"memory": "1Gi"})

    assert deployed.function.profile("cpu") == Profile(2.0, 0.5, GiB, measured=True)
