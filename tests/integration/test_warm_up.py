"""An author's ``warm_up`` runs where no call waits for a load, and never fails one."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.integration.conftest import Platform, until

pytestmark = pytest.mark.slow
MODEL = """
    import time

    def load(device):
        return []

    def warm_up(model):
        time.sleep(1)
        model.append("warm")

    def handle(model, event, context):
        return model
"""


def ready(platform: Platform, name: str) -> None:
    until(lambda: name in platform.residents(), f"{name} is loaded")


def profiles(platform: Platform) -> dict[str, Any]:
    found: dict[str, Any] = platform.http.get("/system/function/kept").json()["gpufaas"]["profiles"]
    return found


def test_a_copy_that_is_kept_is_warm_and_one_that_a_call_waits_for_is_not(
    make_platform: Callable[..., Platform],
) -> None:
    platform = make_platform("--device", "cpu:0=300MiB").start()
    kept = platform.deploy("kept", MODEL)
    began = time.monotonic()
    platform.http.post("/system/scale-function/kept", json={"replicas": 1}).raise_for_status()
    ready(platform, "kept")
    took = time.monotonic() - began
    until(lambda: "cpu" in profiles(platform), "its load is learnt")
    assert profiles(platform)["cpu"]["load_s"] <= took - 1, "warming up is no part of a load"
    called = platform.deploy("called", MODEL)

    warm, cold = platform.call(kept), platform.call(called)

    assert (warm.headers["x-gpufaas-start"], warm.json()) == ("hit", ["warm"])
    assert (cold.headers["x-gpufaas-start"], cold.json()) == ("disk", [])


def test_a_warm_up_that_fails_is_in_the_log_and_the_copy_serves(make_platform: Callable[..., Platform]) -> None:
    platform = make_platform("--device", "cpu:0=300MiB").start()
    broken = MODEL.replace("time.sleep(1)", 'raise SystemExit("no room for the example")')
    path = platform.deploy("broken", broken, labels={"com.openfaas.scale.min": "1"})
    ready(platform, "broken")

    answer = platform.call(path)

    assert (answer.headers["x-gpufaas-start"], answer.json()) == ("hit", [])
    for line in ("SystemExit: no room for the example", "warm_up() failed, and the model serves without it"):
        until(lambda: line in platform.log("broken"), line)  # noqa: B023
