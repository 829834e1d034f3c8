"""Functions of different owners on one platform, and calls that ask for more than they can get."""

from collections.abc import Callable
from typing import Any

import httpx
from tests.integration.conftest import ECHO_MODEL, SLEEPER, Platform, until

SCALE = "com.openfaas.scale."


def test_a_function_that_sheds_refuses_at_once_what_would_be_late_and_others_let_it_wait(platform: Platform) -> None:
    sheds = platform.deploy("sheds", SLEEPER, latency_goal="1s", overload="shed", accuracy="76.1")
    queues = platform.deploy("queues", SLEEPER, latency_goal="1s")
    patient, tight = {"X-Latency-Goal": "60s"}, {"X-Latency-Goal": "10ms"}
    for path in (sheds, queues):
        assert platform.call(path, b"0.5", headers=patient).status_code == 200, "from now on its times are known"

    ahead = [platform.begin(sheds, b"0.5", headers=patient) for _ in range(6)]
    until(lambda: platform.running() + platform.queued() == 6)
    late = platform.call(sheds, b"0.5")

    assert not ahead[-1].done()
    assert (late.status_code, late.headers["x-gpufaas-error"]) == (503, "too-late")
    assert int(late.headers["retry-after"]) >= 1
    told = late.json()
    assert told["error"].startswith("sheds.openfaas-fn")
    assert (told["goal_s"], told["starts_in_s"] > 0.0) == (1.0, True)
    assert [each.result().status_code for each in ahead] == [200] * 6

    assert platform.call(sheds, b"0.5", headers=tight).status_code == 503, "not even alone"
    assert platform.call(queues, b"0.5", headers=tight).status_code == 200
    never = platform.call(sheds, b"0", headers={"X-Min-Accuracy": "80"})
    assert (never.status_code, never.json()["has"]) == (422, {"accuracy": 76.1})


def test_each_function_keeps_to_its_owner(make_platform: Callable[..., Platform]) -> None:
    """One is in a plan, one has labels, one has only calls."""
    platform = make_platform("--device", "cpu:0=400MiB", "--device", "cpu:1=400MiB").start()
    idle = {f"{SCALE}zero": "true", f"{SCALE}zero-duration": "500ms"}
    paths = {
        "planned": platform.deploy("planned", ECHO_MODEL, labels=idle),
        "labelled": platform.deploy("labelled", ECHO_MODEL, labels=idle),
        "plain": platform.deploy("plain", ECHO_MODEL),
    }
    pinned = {"function": "planned", "device": "local/cpu:1"}
    platform.http.post("/system/plan/pin", json=pinned).raise_for_status()
    for path in paths.values():
        assert platform.call(path, b"x").status_code == 200

    def scale(name: str, replicas: int) -> httpx.Response:
        return platform.http.post(f"/system/scale-function/{name}", json={"replicas": replicas})

    def owner(name: str) -> Any:
        return platform.detail(name)["owner"]

    until(lambda: "labelled" not in platform.residents(), "its labels say so, and nobody calls it")
    assert {name: owner(name) for name in paths} == {"planned": "plan", "labelled": "labels", "plain": "calls"}
    planned = platform.detail("planned")
    assert planned["devices"] == ["local/cpu:1"], "the autoscaler leaves it, though it is as idle"
    assert [(each["device"], each["state"]) for each in planned["plan"]] == [("local/cpu:1", "resident")]
    refused = scale("planned", 2)
    assert (refused.status_code, "plan 1 (by admin) pins it" in refused.text) == (409, True)
    assert scale("plain", 2).status_code == 202
    until(lambda: sorted(platform.residents()) == ["plain", "plain", "planned"])

    platform.http.post("/system/plan/unpin", json={"function": "planned"}).raise_for_status()

    assert owner("planned") == "labels"
    until(lambda: sorted(platform.residents()) == ["plain", "plain"], "its labels decide again")
    assert scale("planned", 1).status_code == 202
