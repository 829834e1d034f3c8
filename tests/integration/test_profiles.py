"""Profiles that are taken: what is measured, that calls run meanwhile, and what kill -9 leaves."""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests.integration.conftest import Platform
from tests.waiting import until

BATCHED = """
    import time

    def load(device):
        return None

    def handle_batch(model, events, contexts):
        end = time.process_time() + 0.001 * len(events)
        while time.process_time() < end:
            pass
        return [event.json()["n"] for event in events]
"""
WAITER = """
    import os, time

    def load(device):
        return None

    def handle(model, event, context):
        time.sleep(float(event.text))
        return context.function
"""
"""Its calls, and batches, take as many seconds as the input says."""


def taken(platform: Platform, name: str, body: bytes = b"", **how: object) -> httpx.Response:
    params = {key: str(value) for key, value in how.items()}
    return platform.http.post(f"/system/profile/{name}", content=body, params=params)


def probes(platform: Platform) -> list[str]:
    """Return the names of copies that are there for a profile."""
    devices = platform.http.get("/system/status").json()["devices"]
    return [each["name"] for device in devices for each in device["resident"] if "+profile" in each["name"]]


@contextlib.contextmanager
def calling(platform: Platform, path: str, body: bytes) -> Iterator[list[int]]:
    """Call a function ten times a second meanwhile; what it gives has the status of each call that has ended."""
    statuses: list[int] = []
    stop = threading.Event()

    def call() -> None:
        while not stop.wait(0.1):
            statuses.append(platform.http.post(path, content=body).status_code)

    with ThreadPoolExecutor(1) as pool:
        running: Future[None] = pool.submit(call)
        try:
            yield statuses
        finally:
            stop.set()
            running.result()


def test_a_profile_is_taken_while_calls_of_its_function_and_of_another_one_run(platform: Platform) -> None:
    mine = platform.deploy("mine", BATCHED, batch_max="4", slots="2")
    other = platform.deploy("other", WAITER)
    platform.http.post(mine, content=b'{"n": 1}').raise_for_status()

    with calling(platform, mine, b'{"n": 1}') as first, calling(platform, other, b"0.01") as second:
        answer = taken(platform, "mine", b'{"n": 1}')
        until(lambda: len(first) > 3 and len(second) > 3)

    assert answer.status_code == 200, answer.text
    assert {*first, *second} == {200}
    (found,) = answer.json()["profiles"].values()
    assert {size: each["timed"] for size, each in found["batches"].items()} == {"1": 20, "2": 20, "4": 20}
    assert {size: each["timed"] for size, each in found["together"].items()} == {"1": 20, "2": 20, "4": 20}
    assert all(0 < each["uses"] <= 100 for each in found["batches"].values())
    assert (found["load_s"] > 0, found["memory"] > 0, found["at_once"]) == (True, True, 2)
    assert platform.http.get("/system/profile/mine").json() == answer.json()
    until(lambda: not probes(platform), "what was there for the profile is gone")


def test_without_an_input_and_a_sample_the_answer_says_so(platform: Platform) -> None:
    platform.deploy("mine", BATCHED, batch_max="2")

    refused = taken(platform, "mine", quick=1)

    assert refused.status_code == 400
    assert "there is no sample input: give --input FILE" in refused.text
    assert platform.http.get("/system/profile/mine").status_code == 404


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"batches": "3"}, "a batch of 3: mine runs batches of 1 to 2 (gpufaas.batch-max)"),
        ({"batches": "0"}, "a batch of 0: mine runs batches"),
        ({"batches": "many"}, "batches 'many' are no sizes"),
        ({"together": 2}, "2 batches at once: a copy of mine runs up to 1 (gpufaas.slots)"),
        ({"device": "local/cuda:7"}, "mine may run on no device local/cuda:7"),
    ],
    ids=["over batch-max", "zero", "words", "over slots", "no such device"],
)
def test_what_cannot_be_measured_is_one_line(platform: Platform, how: dict[str, object], said: str) -> None:
    platform.deploy("mine", BATCHED, batch_max="2")

    answer = taken(platform, "mine", b'{"n": 1}', **how)

    assert answer.status_code == 400
    assert said in answer.text
    assert answer.text.count("\n") == 1


def test_a_function_that_does_not_load_or_refuses_its_input_leaves_nothing(platform: Platform) -> None:
    platform.deploy("broken", "def load(device):\n    raise OSError('no weights')\n\ndef handle(*_): return ''\n")
    platform.deploy("mine", WAITER)

    failed, refused = taken(platform, "broken", b"1"), taken(platform, "mine", b"no number")

    assert (failed.status_code, "no weights" in failed.text) == (502, True), failed.text
    assert (refused.status_code, "ValueError" in refused.text) == (502, True), refused.text
    assert platform.http.get("/system/profile/mine").status_code == 404
    until(lambda: not probes(platform))


def test_a_command_that_is_killed_leaves_the_device_to_calls_and_no_profile(platform: Platform) -> None:
    path = platform.deploy("mine", WAITER)
    command = [sys.executable, "-m", "gpufaas_cli", "profile", "mine", "-g", platform.url, "--input", "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as taking:
        assert taking.stdin is not None
        taking.stdin.write(b"0.2")
        taking.stdin.close()
        until(lambda: probes(platform), "it has begun")
        taking.kill()

    assert platform.http.post(path, content=b"0", timeout=5).status_code == 200
    until(lambda: not probes(platform), "the probe is gone")
    assert platform.http.get("/system/profile/mine").status_code == 404


def test_a_profile_outlives_a_kill_of_the_platform_and_one_that_was_begun_does_not(
    make_platform: Callable[..., Platform],
) -> None:
    platform = make_platform("--device", "cpu:0=400MiB").start()
    path = platform.deploy("mine", WAITER)
    whole = taken(platform, "mine", b"0.001", quick=1).json()
    platform.deploy("slow", WAITER.replace("float", "1 * float"))
    with ThreadPoolExecutor(1) as pool:
        begun: Future[httpx.Response] = pool.submit(taken, platform, "slow", b"0.2")
        until(lambda: probes(platform))
        platform.kill()
        assert isinstance(begun.exception(), httpx.TransportError)
    platform.start()

    assert platform.http.post(path, content=b"0").status_code == 200
    assert platform.http.get("/system/profile/mine").json() == whole
    assert platform.http.get("/system/profile/slow").status_code == 404
    assert probes(platform) == []


def test_profiles_go_from_one_function_to_another(platform: Platform) -> None:
    platform.deploy("mine", WAITER)
    platform.deploy("yours", WAITER.replace("float", "1 * float"))
    content: dict[str, Any] = taken(platform, "mine", b"0.001", quick=1).json()
    ((kind, profile),) = content["profiles"].items()

    old = {**content, "profiles": {kind: {**profile, "torch": "1.0"}}}
    stale = platform.http.put("/system/profile/yours", json=old).json()
    shown = platform.http.get("/system/profile/yours").json()
    wrong = {**content, "profiles": {kind: {**profile, "load_s": -1}}}
    refused = platform.http.put("/system/profile/yours", content=json.dumps(wrong))

    assert stale["function"] == "yours.openfaas-fn"
    assert "it was taken with torch 1.0, and local/cpu:0 has " in shown["stale"][kind]
    assert (refused.status_code, "load_s" in refused.text) == (400, True), refused.text
    assert platform.http.get("/system/profile/yours").json() == shown


def test_a_platform_that_may_takes_profiles_of_idle_models_unasked(make_platform: Callable[..., Platform]) -> None:
    platform = make_platform("--device", "cpu:0=400MiB", "--profile-idle").start()
    platform.builds.samples["mine"] = '{"n": 1}'
    path = platform.deploy("mine", BATCHED, batch_max="2")
    platform.deploy("bare", WAITER)

    until(lambda: platform.http.get("/system/profile/mine").status_code == 200, "it is taken")

    assert platform.http.get("/system/profile/bare").status_code == 404
    assert platform.http.post(path, content=b'{"n": 3}').json() == 3
