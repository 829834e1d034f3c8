"""Functions keep to the devices that they ask for, on the real platform."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.integration.conftest import ECHO, ECHO_MODEL, GATED_MODEL, HTTP, TORCH, Platform, until

from gpufaas import Refused


@pytest.fixture(scope="module")
def zones(module_platform: Callable[..., Platform]) -> Platform:
    return module_platform(
        "--device", "cpu:0=300MiB,zone=a", "--device", "cpu:1=300MiB,zone=b", "--label", "rack=1",
        "--profile", "far=zone=b,rack=1",
    ).start()  # fmt: skip


def deploy(platform: Platform, name: str, source: str, lang: str, **spec: Any) -> str:
    built = platform.build(name, source, lang)
    platform.upload(built)
    annotations = {"gpufaas.bundle": built.digest, "gpufaas.memory": "48Mi", **spec.pop("annotations", {})}
    body = {"service": name, "image": name, "annotations": annotations, **spec}
    answer = platform.deploy_spec(body)
    if answer.status_code not in (200, 202):
        raise Refused(answer.status_code, answer.text)
    return f"/function/{name}"


@pytest.mark.parametrize(("source", "lang"), [(ECHO_MODEL, TORCH), (ECHO, HTTP)])
@pytest.mark.parametrize(
    ("asked", "device"),
    [
        ({"constraints": ["zone==b"]}, "local/cpu:1"),
        ({"constraints": ["zone!=b", "gpu=false"]}, "local/cpu:0"),
        ({"constraints": ["device.id=local/cpu:1"]}, "local/cpu:1"),
        ({"annotations": {"com.openfaas.profile": "far"}}, "local/cpu:1"),
    ],
)
def test_a_function_runs_where_it_asks_to(zones: Platform, source: str, lang: str, asked: Any, device: str) -> None:
    path = deploy(zones, "asks", source, lang, **asked)

    answers = [each.result() for each in [zones.begin(path, b"%d" % number) for number in range(6)]]

    assert {each.headers["x-gpufaas-device"] for each in answers} == {device}
    assert zones.http.get("/system/function/asks").json()["gpufaas"]["placement"]["devices"] == [device]
    zones.remove_all()


def test_a_model_waits_for_its_device_while_others_run_beside_it(zones: Platform) -> None:
    gate = zones.gate()
    held = deploy(zones, "held", GATED_MODEL, TORCH, constraints=["zone=b"])
    other = deploy(zones, "other", ECHO_MODEL, TORCH)
    running = zones.begin(held, gate.body)
    until(gate.reached, "the first call runs")
    waiting = zones.begin(held, gate.body)
    until(lambda: zones.queued() == 1, "the second call waits for the same device")

    elsewhere = zones.call(other, b"x")

    assert elsewhere.headers["x-gpufaas-device"] == "local/cpu:0"
    assert zones.queued() == 1
    gate.open()
    assert {each.result().headers["x-gpufaas-device"] for each in (running, waiting)} == {"local/cpu:1"}
    zones.remove_all()


def test_what_no_device_satisfies_is_refused_and_changes_nothing(zones: Platform) -> None:
    path = deploy(zones, "kept", ECHO, HTTP)

    with pytest.raises(Refused) as refused:
        deploy(zones, "kept", ECHO, HTTP, constraints=["zone=c"])
    with pytest.raises(Refused) as no_gpu:
        deploy(zones, "kept", ECHO, HTTP, limits={"nvidia.com/gpu": "1"})

    assert (refused.value.status, no_gpu.value.status) == (400, 400)
    assert "none satisfies zone=c (constraints): zone is a, b here" in str(refused.value)
    assert "gpu=true (limits nvidia.com/gpu), and this platform has no CUDA device" in str(no_gpu.value)
    assert zones.call(path, b"still").content == b"still"


def test_the_platform_says_which_labels_its_devices_have(zones: Platform) -> None:
    labels = [each["device"]["labels"] for each in zones.status()["devices"]]

    assert [(each["zone"], each["rack"], each["gpu"]) for each in labels] == [("a", "1", "false"), ("b", "1", "false")]
    until(lambda: "zone=a" in zones.said())
