"""Copies come and go under load, on the real platform, and no call notices."""

import json
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.integration.conftest import ECHO, GATED, HTTP, TORCH, Platform, until

SLOW_ECHO = """
    import time

    def handle(event, context):
        time.sleep(0.01)
        return event.body
"""
MODEL = """
    import time

    def load(device):
        return None

    def handle(model, event, context):
        time.sleep(0.01)
        return event.body
"""
CALLERS = 8
TELLS_PID = """
    import os, time

    def handle(event, context):
        print("asked")
        time.sleep(0.01)
        return str(os.getpid())
"""


@pytest.mark.parametrize(("source", "lang"), [(SLOW_ECHO, HTTP), (MODEL, TORCH)], ids=["cpu", "model"])
def test_no_call_is_lost_while_copies_come_and_go(
    make_platform: Callable[..., Platform], source: str, lang: str
) -> None:
    """Scaled up, down and to zero, and updated, over and over, with calls all the time."""
    platform = make_platform("--device", "cpu:0=400MiB", "--device", "cpu:1=400MiB").start()
    path = platform.deploy("echo", source, lang)
    over = threading.Event()
    answered: list[int] = []

    def call(caller: int) -> list[str]:
        wrong = []
        number = 0
        while not over.is_set():
            number += 1
            body = b"%d %d" % (caller, number)
            answer = platform.call(path, body)
            if answer.status_code != 200 or answer.content != body:
                wrong.append(f"{answer.status_code} {answer.text}")
            answered.append(caller)
        return wrong

    with ThreadPoolExecutor(CALLERS) as callers:
        results = [callers.submit(call, caller) for caller in range(CALLERS)]
        try:
            for turn in range(5):
                for replicas in (2, 1, 0, 2, 0):
                    scaled = platform.http.post("/system/scale-function/echo", json={"replicas": replicas})
                    assert scaled.status_code == 202
                    goal = len(answered) + 2 * CALLERS
                    until(lambda: len(answered) >= goal, "it meets calls in flight")  # noqa: B023
                platform.deploy("echo", source, lang, env={"TURN": str(turn)})
        finally:
            over.set()
        wrong = [each for result in results for each in result.result()]

    assert wrong == []
    assert platform.stop() == 0


def test_copies_are_loaded_without_calls_and_a_call_at_zero_is_served(make_platform: Callable[..., Platform]) -> None:
    platform = make_platform("--device", "cpu:0=400MiB", "--device", "cpu:1=400MiB").start()
    path = platform.deploy("echo", ECHO, HTTP)

    platform.http.post("/system/scale-function/echo", json={"replicas": 2})
    until(lambda: platform.residents() == ["echo", "echo"])

    platform.http.post("/system/scale-function/echo", json={"replicas": 0})
    assert platform.http.get("/system/function/echo").json()["replicas"] == 0
    until(platform.is_empty)

    answer = platform.call(path, b"hello")
    assert (answer.status_code, answer.content) == (200, b"hello")
    assert answer.headers["x-gpufaas-start"] == "disk"
    assert platform.http.get("/system/function/echo").json()["replicas"] == 1


# --- several copies on one device ---


def scale(platform: Platform, name: str, replicas: int) -> None:
    answer = platform.http.post(f"/system/scale-function/{name}", json={"replicas": replicas})
    assert answer.status_code == 202


def available(platform: Platform, name: str) -> int:
    return int(platform.http.get(f"/system/function/{name}").json()["availableReplicas"])


def pids(platform: Platform, path: str, calls: int) -> set[str]:
    answers = [platform.call(path) for _ in range(calls)]
    assert [each.status_code for each in answers] == [200] * calls
    return {each.text for each in answers}


def test_each_copy_on_a_device_is_a_process_that_takes_its_share_and_is_replaced_when_it_dies(
    platform: Platform,
) -> None:
    path = platform.deploy("tells", TELLS_PID, HTTP, memory="48Mi")
    scale(platform, "tells", 4)
    until(lambda: available(platform, "tells") == 4)

    first = pids(platform, path, 8)

    assert len(first) == 4
    assert first == {str(each.pid) for each in platform.workers()}
    (device,) = platform.status()["devices"]
    assert sorted(each["copy"] for each in device["resident"]) == [0, 1, 2, 3]

    def instances() -> set[str]:
        lines = platform.http.get("/system/logs", params={"name": "tells"}).text.splitlines()
        return {json.loads(line)["instance"] for line in lines}

    until(lambda: len(instances()) == 4, "each has printed")

    killed = int(min(first))
    os.kill(killed, signal.SIGKILL)

    def replaced() -> bool:
        """It is known to be dead if there is another one; only then says the platform how many are left."""
        there = {each.pid for each in platform.workers()}
        return len(there) == 4 and killed not in there and available(platform, "tells") == 4

    until(replaced)
    second = pids(platform, path, 8)
    assert len(second & first) == 3
    assert len(second - first) == 1


def test_no_call_is_lost_when_one_of_many_copies_is_left(platform: Platform) -> None:
    path = platform.deploy("tells", TELLS_PID, HTTP, memory="48Mi", slots="2")
    over = threading.Event()

    def call() -> list[str]:
        answers = []
        while not over.is_set():
            answer = platform.call(path)
            answers.append("" if answer.status_code == 200 else f"{answer.status_code} {answer.text}")
        return answers

    with ThreadPoolExecutor(CALLERS) as callers:
        results = [callers.submit(call) for _ in range(CALLERS)]
        try:
            for _ in range(3):
                scale(platform, "tells", 4)
                until(lambda: available(platform, "tells") == 4)
                scale(platform, "tells", 1)
                until(lambda: len(platform.workers()) == 1, "the others have served what they had and are gone")
        finally:
            over.set()
        answers = [each for result in results for each in result.result()]

    assert set(answers) == {""}
    assert len(pids(platform, path, 4)) == 1


def test_a_minimum_of_five_copies_is_there_after_the_deploy_and_after_an_update(platform: Platform) -> None:
    labels = {"com.openfaas.scale.min": "5"}
    path = platform.deploy("five", TELLS_PID, HTTP, labels=labels, memory="48Mi")
    until(lambda: available(platform, "five") == 5)
    old = pids(platform, path, 10)

    platform.deploy("five", TELLS_PID, HTTP, labels=labels, memory="48Mi", env={"NEW": "1"})
    until(lambda: available(platform, "five") == 5)

    new = pids(platform, path, 10)
    assert (len(old), len(new)) == (5, 5)
    assert not old & new
    until(lambda: len(platform.workers()) == 5, "the old revision is gone")


def test_the_memory_of_a_device_bounds_what_is_available(platform: Platform) -> None:
    # Not the bundle of other tests: what was measured of it would be its reservation.
    platform.deploy("large", f"{TELLS_PID}\n    # large\n", HTTP, memory="150Mi")

    scale(platform, "large", 9)

    until(lambda: available(platform, "large") == 2)
    assert platform.http.get("/system/function/large").json()["replicas"] == 9
    assert platform.call("/function/large").status_code == 200


def test_the_autoscaler_reaches_its_target_on_one_device(platform: Platform) -> None:
    """Three calls at once, one slot each: without two more copies the second would wait for the first for ever."""
    labels = {"com.openfaas.scale.type": "capacity", "com.openfaas.scale.target": "1",
              "com.openfaas.scale.target-proportion": "1", "com.openfaas.scale.max": "3"}  # fmt: skip
    path = platform.deploy("busy", GATED, HTTP, labels=labels, memory="48Mi", slots="1")
    gates = [platform.gate() for _ in range(3)]

    calls = [platform.begin(path, each.body) for each in gates]

    until(lambda: all(each.reached() for each in gates))
    for each in gates:
        each.open()
    assert len({each.result().text for each in calls}) == 3


def test_a_number_that_was_set_outlives_the_next_looks_of_the_autoscaler(platform: Platform) -> None:
    """Also a zero that was set while a call runs, and the number that an alert asks for."""

    def shown(name: str) -> int:
        return int(platform.http.get(f"/system/function/{name}").json()["replicas"])

    labels = {"com.openfaas.scale.max": "4", "com.openfaas.scale.factor": "50"}
    for name in ("by-hand", "by-alert", "runs"):
        platform.deploy(name, GATED, HTTP, labels=labels, memory="32Mi")
    gate = platform.gate()
    call = platform.begin("/function/runs", gate.body)
    until(gate.reached)

    scale(platform, "by-hand", 3)
    scale(platform, "runs", 0)
    fires = {"alerts": [{"status": "firing", "labels": {"function_name": "by-alert"}}]}
    platform.http.post("/system/alert", json=fires).raise_for_status()
    idle = {"com.openfaas.scale.zero": "true", "com.openfaas.scale.zero-duration": "1s"}
    platform.call(platform.deploy("idle", ECHO, HTTP, labels=idle, memory="32Mi"))
    until(lambda: shown("idle") == 0, "the autoscaler has looked at all of them, twice")

    assert (shown("by-hand"), shown("runs"), shown("by-alert")) == (3, 0, 3)
    gate.open()
    assert call.result().status_code == 200
