"""
A copy that gave no sign of life went on getting calls beside an idle device, and a call that did not end held its
device for 10 s beyond its time limit.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.integration.conftest import GATED, GATED_MODEL, HTTP, TORCH, Platform, stopped, until

LOOP = GATED_MODEL.replace("import os, time", "import asyncio, os, time").replace("def handle", "async def handle")
LOOP = LOOP.replace("time.sleep", "await asyncio.sleep")
KINDS = {
    "threads": (GATED_MODEL, TORCH, {"slots": "4", "memory": "60Mi"}),
    "loop": (LOOP, TORCH, {"slots": "4", "memory": "60Mi"}),
    "one slot": (GATED_MODEL, TORCH, {"memory": "60Mi"}),
    "CPU function": (GATED, HTTP, {"memory": "60Mi"}),
}
LIMIT_S = 12
"""Of a call. Calls that a stopped copy has begun, or was given, would be answered with 504."""
HOLDS_GIL = """
    import ctypes, os, threading, time

    def load(device):
        return None

    def handle(model, event, context):
        if event.text == "hold":
            ctypes.PyDLL(None).sleep(60)
        elif event.text == "loop":
            while True:
                pass
        return f"{os.getpid()}"
"""
BOTH_S = 8.0
"""Far more than the second that a call may take beyond its limit, and far less than that and the 10 s that it took."""


@pytest.fixture(scope="module")
def two(module_platform: Callable[..., Platform]) -> Platform:
    """Two devices; each holds one copy of a function of this module."""
    return module_platform("--device", "cpu:0=100MiB", "--device", "cpu:1=100MiB").start()


@pytest.fixture
def platform(two: Platform) -> Iterator[Platform]:
    yield two
    two.remove_all()
    until(two.is_empty, "nothing is left")


def ask(platform: Platform, path: str) -> int:
    """Return the process that has answered."""
    answer = platform.call(path, headers={"X-Timeout": f"{LIMIT_S}s"})
    assert answer.status_code == 200, answer.text
    return int(answer.text)


def silent(platform: Platform) -> list[dict[str, Any]]:
    return [each for device in platform.status()["devices"] for each in device["resident"] if each["silent"]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_copy_gets_no_calls_beside_an_idle_device_until_it_goes_on(platform: Platform, kind: str) -> None:
    source, lang, annotations = KINDS[kind]
    path = platform.deploy("gated", source, lang, **annotations)
    first = ask(platform, path)

    with stopped(first):
        began = [platform.begin(path, headers={"X-Timeout": f"{LIMIT_S}s"}) for _ in range(3)]
        others = {int(each.result().text) for each in began}
        assert first not in others, "calls that it was given, and had not begun, have run elsewhere"
        assert ask(platform, path) in others
        assert [each["draining"] for each in silent(platform)] == [True]
    until(lambda: not silent(platform), "it is heard again")
    assert len(platform.workers()) == 2, f"and was not ended: {platform.log('gated')}"

    with stopped(others.pop()):
        assert ask(platform, path) == first


@pytest.mark.parametrize("kind", ["threads", "loop"])
def test_a_call_that_it_runs_goes_on_with_it_and_others_do_not_join_it(platform: Platform, kind: str) -> None:
    source, lang, annotations = KINDS[kind]
    path = platform.deploy("gated", source, lang, **annotations)
    first, gate = ask(platform, path), platform.gate()
    held = platform.begin(path, gate.body, headers={"X-Timeout": "60s"})
    until(gate.reached)

    with stopped(first):
        assert ask(platform, path) != first
        gate.open()
        assert not held.done()

    assert int(held.result().text) == first, "once"


@pytest.mark.parametrize("slots", ["1", "4"])
@pytest.mark.parametrize("how", ["loop", "hold"])
def test_a_call_that_does_not_end_gives_its_device_back_soon_after_its_time(
    platform: Platform, slots: str, how: str
) -> None:
    path = platform.deploy("endless", HOLDS_GIL, slots=slots, memory="60Mi")
    assert platform.call(path).status_code == 200

    began = time.monotonic()
    assert platform.call(path, how.encode(), headers={"X-Timeout": "1s"}).status_code == 504
    until(lambda: platform.running() == 0, "its device is free")

    assert time.monotonic() - began < BOTH_S
    assert "gpufaas: killed: " in platform.log("endless")
