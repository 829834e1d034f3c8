"""Copies come and go under load, on the real platform, and no call notices."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.integration.conftest import ECHO, HTTP, TORCH, Platform, until

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


@pytest.mark.parametrize(("source", "lang"), [(SLOW_ECHO, HTTP), (MODEL, TORCH)], ids=["cpu", "model"])
def test_no_call_is_lost_while_copies_come_and_go(
    make_platform: Callable[..., Platform], source: str, lang: str
) -> None:
    """Scaled up, down and to zero, and updated, over and over, with calls all the time."""
    platform = make_platform("--device", "cpu:0=400MiB", "--device", "cpu:1=400MiB").start()
    path = platform.deploy("echo", source, lang)
    over = threading.Event()

    def call(caller: int) -> list[str]:
        wrong = []
        number = 0
        while not over.is_set():
            number += 1
            body = b"%d %d" % (caller, number)
            answer = platform.call(path, body)
            if answer.status_code != 200 or answer.content != body:
                wrong.append(f"{answer.status_code} {answer.text}")
        assert number > 10
        return wrong

    with ThreadPoolExecutor(CALLERS) as callers:
        results = [callers.submit(call, caller) for caller in range(CALLERS)]
        try:
            for turn in range(5):
                for replicas in (2, 1, 0, 2, 0):
                    scaled = platform.http.post("/system/scale-function/echo", json={"replicas": replicas})
                    assert scaled.status_code == 202
                    over.wait(0.2)  # so that each number meets calls in flight
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
    assert answer.headers["x-gpufaas-start"] == "miss"
    assert platform.http.get("/system/function/echo").json()["replicas"] == 1
