"""Plans that people apply to a real platform: what is resident, what calls meet, and what outlives kill -9."""

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.conftest import GATED_MODEL, Platform, Watching
from tests.waiting import until

from gpufaas_core.messages import EvictCopy, StartCall
from gpufaas_scheduler.journal import replay

DEVICE = ("--device", "cpu:0=400MiB,cores=0.6")
PER_S = 20
LINEAR = """
    import torch

    def load(device):
        return torch.nn.Linear(8, 1).to(device)

    def handle(model, event, context):
        with torch.no_grad():
            return {"answer": float(model(torch.ones(1, 8)))}
"""

Planned = Mapping[str, object]
"""What a plan says of a function on the one device: ``{"share": 40}``."""


class Planning:
    """A platform of one device, and its plans."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        device = platform.status()["devices"][0]["device"]
        self.device, self.labels = device["id"], device["labels"]

    def body(self, **planned: Planned) -> dict[str, Any]:
        return {"replicas": [{"function": name, "device": self.device, **what} for name, what in planned.items()]}

    def put(self, **planned: Planned) -> httpx.Response:
        return self.platform.http.put("/system/plan", json=self.body(**planned))

    def apply(self, **planned: Planned) -> int:
        """Return the version, once all of it is resident."""
        version = self.put(**planned).raise_for_status().json()["version"]
        self.carried_out(planned)
        return int(version)

    def shown(self) -> dict[str, Any]:
        found: dict[str, Any] = self.platform.http.get("/system/plan").raise_for_status().json()
        return found

    def names(self) -> set[str]:
        return {each["function"].partition(".")[0] for each in self.shown()["replicas"]}

    def carried_out(self, planned: Mapping[str, Planned]) -> None:
        def done() -> bool:
            states = {each["function"].partition(".")[0]: each["state"] for each in self.shown()["replicas"]}
            return states == dict.fromkeys(planned, "resident")

        until(done, lambda: f"the plan is carried out: {self.shown()}")

    def resident(self, name: str) -> dict[str, Any]:
        (found,) = [
            each for each in self.platform.status()["devices"][0]["resident"] if each["name"].startswith(f"{name}.")
        ]
        return dict(found)


@pytest.fixture
def planning(make_platform: Callable[..., Platform], tmp_path: Path) -> Iterator[Planning]:
    platform = make_platform(*DEVICE, "--journal", str(tmp_path / "journal")).start()
    yield Planning(platform)
    assert platform.stop() == 0


class Calls(Watching):
    """Calls a function `PER_S` times a second until the block ends, whether or not it has answered."""

    every_s = 1 / PER_S

    def __init__(self, platform: Platform, path: str) -> None:
        super().__init__()
        self._platform, self._path = platform, path
        self.answers: list[Future[httpx.Response]] = []

    def look(self) -> None:
        self.answers.append(self._platform.begin(self._path))


def evicted(journal: Path) -> list[str]:
    """Return what the engine said that ended a copy, of all that the journal has."""
    found = []
    for _, commands in replay(journal):
        for each in commands:
            begun = each.grant if isinstance(each, StartCall) else each
            if isinstance(each, EvictCopy) or getattr(begun, "victims", ()):
                found.append(f"{each}")
    return found


def test_copies_with_shares_come_one_after_the_other_under_calls_and_evict_nobody(
    make_platform: Callable[..., Platform], tmp_path: Path
) -> None:
    platform = make_platform(*DEVICE, "--journal", str(tmp_path / "journal")).start()
    planning = Planning(platform)
    if planning.labels["compute.enforcement"] != "cpu-quota":
        pytest.skip("no control groups with CPU time can be made here")
    paths = {name: platform.deploy(name, LINEAR, sharing="auto") for name in ("one", "two")}
    assert platform.call(paths["one"]).status_code == 200

    with Calls(platform, paths["one"]) as calls:
        until(lambda: len(calls.answers) > PER_S // 2, "it is called")
        planning.apply(one={"share": 40})
        planning.apply(one={"share": 40}, two={"share": 30})
        many = len(calls.answers) + PER_S
        until(lambda: len(calls.answers) > many, "it is called for another second")
        second = platform.call(paths["two"])

    assert second.status_code == 200
    assert second.headers["x-gpufaas-share"] == "30"
    answers = [each.result() for each in calls.answers]
    assert [each.text for each in answers if each.status_code != 200] == []
    assert answers[-1].headers["x-gpufaas-share"] == "40"
    assert [planning.resident(name)["share"] for name in paths] == [40, 30]
    assert platform.stop() == 0
    assert evicted(tmp_path / "journal") == []


def test_copies_that_reserve_half_of_a_device_run_side_by_side_until_the_plan_is_rolled_back(
    planning: Planning,
) -> None:
    platform = planning.platform
    paths = {name: platform.deploy(name, GATED_MODEL, sharing="auto") for name in ("one", "two")}
    before = planning.apply(one={})
    planning.apply(one={"reserve": 50}, two={"reserve": 50})

    gates = {name: platform.gate() for name in paths}
    calls = {name: platform.begin(path, gates[name].body) for name, path in paths.items()}
    until(lambda: all(each.reached() for each in gates.values()), lambda: f"both run: {platform.status()}")
    for each in gates.values():
        each.open()
    assert {each.result().status_code for each in calls.values()} == {200}

    back = platform.http.post("/system/plan/rollback", json={"version": before}).raise_for_status().json()
    assert back["why"] == f"rollback to {before}"
    planning.carried_out({"one": {}})
    first, second = platform.gate(), platform.gate()
    alone = platform.begin(paths["one"], first.body)
    until(first.reached, "it runs")
    waits = platform.begin(paths["two"], second.body)
    until(lambda: platform.queued() == 1, "the other one waits for the whole device")
    assert not second.reached()
    first.open()
    second.open()
    assert (alone.result().status_code, waits.result().status_code) == (200, 200)


def test_a_plan_and_its_pins_outlive_a_restart_and_are_carried_out_again_without_a_call(planning: Planning) -> None:
    platform = planning.platform
    for name in ("one", "two"):
        platform.deploy(name, LINEAR, sharing="auto")
    planning.apply(one={"reserve": 50})
    pinned = {"function": "two", "device": planning.device, "reserve": 30}
    platform.http.post("/system/plan/pin", json=pinned).raise_for_status()
    kept = planning.shown()

    assert platform.stop() == 0
    platform.options = DEVICE
    platform.start()

    planning.carried_out({"one": {}, "two": {}})
    assert {key: each for key, each in planning.shown().items() if key != "replicas"} == {
        key: each for key, each in kept.items() if key != "replicas"
    }
    assert {each["function"]: (each["reserve"], each["pinned"]) for each in planning.shown()["replicas"]} == {
        "one.openfaas-fn": (50, False),
        "two.openfaas-fn": (30, True),
    }


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 8))])
def test_a_platform_that_is_killed_while_plans_are_applied_has_one_of_them_and_has_it_whole(
    planning: Planning, seed: int
) -> None:
    platform, rng = planning.platform, random.Random(seed)
    for name in ("one", "two", "three"):
        platform.deploy(name, LINEAR, sharing="auto")
    plans = [{"one": {"reserve": 30}, "two": {"reserve": 30}}, {"three": {"reserve": 60}, "two": {"reserve": 20}}]
    planning.apply(**plans[0])
    answered: list[int] = []

    def keep_applying() -> None:
        number = 0
        while True:
            number += 1
            try:
                answered.append(planning.put(**plans[number % 2]).raise_for_status().json()["version"])
            except httpx.TransportError:
                return

    applying = threading.Thread(target=keep_applying)
    applying.start()
    moment = rng.randint(1, 12)
    until(lambda: len(answered) >= moment, "so many plans were applied, and the next one is on its way")
    platform.kill()
    applying.join()
    platform.options = DEVICE
    platform.start()

    shown = planning.shown()
    assert shown["version"] in (answered[-1], answered[-1] + 1), "an answered plan is kept; one more may have come"
    said = {each["function"].partition(".")[0]: {"reserve": each["reserve"]} for each in shown["replicas"]}
    assert said == plans[(shown["version"] - 1) % 2]
    planning.carried_out(said)
    assert planning.put(**plans[0]).json()["version"] == shown["version"] + 1
