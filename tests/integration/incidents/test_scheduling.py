"""
Calls waited 39 s for a call of 40 s beside an idle device, and a model waited until its deadline for memory of an idle
CPU function.
"""

from collections.abc import Callable

import pytest
from tests.integration.conftest import ECHO, GATED_MODEL, HTTP, SLEEPER, Platform, until

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("policy", ["least-wait", pytest.param("lalb-o3", marks=pytest.mark.long)])
def test_a_call_waits_no_longer_behind_a_long_one_than_a_load_takes_elsewhere(
    make_platform: Callable[..., Platform], policy: str
) -> None:
    platform = make_platform("--device", "cpu:0=100MiB", "--device", "cpu:1=100MiB", "--policy", policy).start()
    path = platform.deploy("gated", GATED_MODEL, memory="64Mi")
    assert platform.call(path).status_code == 200
    other = platform.deploy("other", GATED_MODEL, memory="64Mi")
    for _ in range(10):  # what the idle device holds is worth more than a second copy
        assert platform.call(other).status_code == 200
    gate = platform.gate()
    long = platform.begin(path, gate.body)
    until(gate.reached)

    assert platform.call(path).status_code == 200, "it did not wait for the long one"

    gate.open()
    assert long.result().status_code == 200


def test_a_model_gets_the_room_of_an_idle_cpu_function_at_once(make_platform: Callable[..., Platform]) -> None:
    platform = make_platform("--device", "cpu:0=100MiB").start()
    echo = platform.deploy("echo", ECHO, HTTP)
    assert platform.call(echo, b"here").content == b"here"
    assert platform.residents() == ["echo"]
    model = platform.deploy("sleeper", SLEEPER, memory="96Mi")

    assert platform.call(model, b"0").text == "slept"

    assert platform.residents() == ["sleeper"]
