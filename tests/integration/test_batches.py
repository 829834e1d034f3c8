"""Calls that run together in one `handle_batch`: each has its own answer, its own errors and its own caller."""

import re
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from socket import socket
from typing import Any

import httpx
import pytest
from tests.integration.conftest import Platform
from tests.waiting import until

from gpufaas import Refused

TOGETHER = """
    import os, time

    def load(device):
        return os.getpid()

    def one(model, event, context, size):
        match event.headers.get("x-do"):
            case "raise":
                return ValueError("not this one")
            case "parse":
                return event.json()["answer"]
            case "status":
                return {"statusCode": 201, "body": "made", "headers": {"x-own": event.text}}
            case "headers":
                return {"body": "", "headers": {"x-large": "x" * int(event.text)}}
            case "stream":
                return (piece for piece in "abc")
            case "large":
                return b"x" * 1_000_000
            case "unsendable":
                return object()
            case "fail all":
                raise RuntimeError(f"all {size} fail")
            case "memory":
                raise MemoryError
            case "exit":
                os._exit(3)
            case "too few":
                return "too few"
        return {"pid": model, "size": size, "text": event.text, "call": context.call_id}

    def handle_batch(model, events, contexts):
        for event in events:
            if gate := event.headers.get("x-gate"):
                open(gate + ".began", "w").close()
                until = time.monotonic() + 60
                while not os.path.exists(gate) and time.monotonic() < until:
                    time.sleep(0.005)
        if events[0].headers.get("x-do") == "no list":
            return None
        answers = [one(model, *each, len(events)) for each in zip(events, contexts)]
        return [each for each in answers if each != "too few"]
"""


class Calls:
    """Calls of one function that wait for its device, so that they run together once it is free."""

    def __init__(self, platform: Platform, path: str) -> None:
        self.platform, self.path = platform, path
        self.begun: list[Future[httpx.Response]] = []

    def begin(self, body: bytes = b"", **headers: str) -> "Future[httpx.Response]":
        before = self._there()
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        self.begun.append(self.platform.begin(self.path, body, headers=named))
        until(lambda: self._there() > before, "the call waits")  # so that the order is known
        return self.begun[-1]

    def _there(self) -> int:
        return self.platform.queued() + self.platform.running()  # a full batch of short calls goes ahead

    def answers(self) -> list[httpx.Response]:
        return [each.result() for each in self.begun]


def inflight(platform: Platform, name: str) -> int:
    """Return for how many calls of the function a caller waits."""
    return int(platform.status()["functions"][f"{name}.openfaas-fn"]["inflight"])


@contextmanager
def held(platform: Platform, path: str) -> Iterator[Calls]:
    """Occupy the device with a call until the end of the block."""
    gate = platform.gate()
    first = platform.begin(path, headers={"x-gate": gate.body.decode()})
    until(gate.reached, "the first call runs")
    try:
        yield Calls(platform, path)
    finally:
        gate.open()
        assert first.result().status_code == 200


def test_calls_that_wait_run_together_and_each_has_its_own_answer(platform: Platform) -> None:
    path = platform.deploy("together", TOGETHER, batch_max="4")
    with held(platform, path) as calls:
        for number in range(5):
            calls.begin(b"%d" % number, x_call_id=f"call-{number}")

    answers = calls.answers()

    said = [each.json() for each in answers]
    assert [each["text"] for each in said] == list("01234")
    assert [each["call"] for each in said] == [f"call-{number}" for number in range(5)]
    assert [each["size"] for each in said] == [4, 4, 4, 4, 1]
    assert [each.headers.get("x-gpufaas-batch") for each in answers] == ["4", "4", "4", "4", None]
    assert [each.headers["x-call-id"] for each in answers] == [f"call-{number}" for number in range(5)]
    assert all("run;dur=" in each.headers["server-timing"] for each in answers)
    explained = platform.http.get("/system/explain/call-1").json()
    assert sorted(each.partition("#")[0] for each in explained["batch"]) == ["call-0", "call-2", "call-3"]
    metrics = platform.http.get("/metrics").text
    assert 'gpufaas_function_batch_size_bucket{function_name="together.openfaas-fn",le="2"} 2.0' in metrics
    assert 'gpufaas_function_batch_size_bucket{function_name="together.openfaas-fn",le="4"} 6.0' in metrics
    assert 'gpufaas_function_grants_total{function_name="together.openfaas-fn"} 3.0' in metrics


def test_what_is_wrong_with_one_call_does_not_concern_the_others(platform: Platform) -> None:
    path = platform.deploy("together", TOGETHER, batch_max="10")
    with held(platform, path) as calls:
        for do in ("", "raise", "status", "stream", "large", "unsendable"):
            calls.begin(b"%d" % len(calls.begun), x_do=do)
        calls.begin(b"5000000", x_do="headers")
        calls.begin(b"100000", x_do="headers")
        calls.begin(b"no json", x_do="parse", content_type="application/json")
        calls.begin(b'{"answer": 42}', x_do="parse", content_type="application/json")

    plain, raised, status, stream, large, unsendable, head, smaller_head, misread, parsed = calls.answers()

    assert plain.json()["text"] == "0"
    assert (raised.status_code, raised.text) == (500, "ValueError: not this one")
    assert (status.status_code, status.text, status.headers["x-own"]) == (201, "made", "2")
    assert (head.status_code, smaller_head.status_code) == (500, 502)
    assert "headers of 5 MiB: an answer may have 64 KiB" in head.text
    assert smaller_head.headers["x-gpufaas-error"] == "bad-answer"
    assert (stream.status_code, stream.text.partition(":")[0]) == (500, "TypeError")
    assert "an answer of handle_batch() cannot stream" in stream.text
    assert large.content == b"x" * 1_000_000
    assert unsendable.status_code == 500
    assert "not JSON-able" in unsendable.text
    assert (misread.status_code, misread.text[:21]) == (400, "the body is not JSON:")
    assert (parsed.status_code, parsed.text) == (200, "42")
    assert {each.headers["x-gpufaas-batch"] for each in calls.answers()} == {"10"}
    assert platform.http.get(path).json()["pid"] == plain.json()["pid"], "the worker lives on"


@pytest.mark.parametrize(
    ("do", "says"),
    [
        ("fail all", "RuntimeError: all 3 fail"),
        ("too few", "gpufaas_functions.batches.BadBatch: handle_batch() returned 2 answers for 3 events"),
        ("no list", "gpufaas_functions.batches.BadBatch: handle_batch() returned NoneType, not a list"),
    ],
)
def test_an_error_of_the_whole_batch_is_that_of_each_call(platform: Platform, do: str, says: str) -> None:
    path = platform.deploy("together", TOGETHER, batch_max="3")
    with held(platform, path) as calls:
        for _ in range(3):
            calls.begin(x_do=do if not calls.begun else "")

    for answer in calls.answers():
        assert answer.status_code == 500
        assert answer.text.startswith(says)
        assert "\n" not in answer.text
    assert platform.call(path, headers={"x-do": "fail all"}).text == "RuntimeError: all 1 fail"
    until(lambda: "all 1 fail" in platform.log("together"), "what is printed later is there")
    assert platform.log("together").count("Traceback") == 2, "one for each batch"


def test_a_batch_that_runs_out_of_memory_is_answered_with_one_text_and_the_next_is_smaller(platform: Platform) -> None:
    path = platform.deploy("together", TOGETHER, batch_max="4")
    with held(platform, path) as calls:
        for do in ("", "", "memory", ""):
            calls.begin(x_do=do)
    answers = calls.answers()
    with held(platform, path) as following:
        for _ in range(4):
            following.begin()

    assert [each.status_code for each in answers] == [507] * 4
    assert len({each.text for each in answers}) == 1
    assert "ran out of memory (MemoryError)" in answers[0].text
    assert "Its batches are smaller for a while" in answers[0].text
    assert [each.json()["size"] for each in following.answers()] == [2, 2, 2, 2]


def test_a_caller_who_hangs_up_takes_only_its_own_call_along(platform: Platform) -> None:
    path = platform.deploy("together", TOGETHER, batch_max="4")
    inside = platform.gate()
    with held(platform, path) as calls:
        calls.begin(b"stays", x_gate=inside.body.decode())
        leaves = platform.socket()
        leaves.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
        until(lambda: platform.queued() == 2, "it waits")
        gone = platform.socket()
        gone.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
        until(lambda: platform.queued() == 3, "it waits")
        gone.close()
        until(lambda: platform.queued() == 2, "it does not wait any more")
    until(inside.reached, "the batch runs")
    leaves.close()
    until(lambda: inflight(platform, "together") == 1, "its leaving is noticed")
    inside.open()

    (answer,) = calls.answers()

    assert answer.json()["size"] == 2
    assert platform.call(path).json()["pid"] == answer.json()["pid"]


def test_calls_of_a_batch_whose_worker_dies_are_answered_as_if_each_had_been_alone(platform: Platform) -> None:
    path = platform.deploy("together", TOGETHER, batch_max="3")
    with held(platform, path) as calls:
        for do in ("", "exit", ""):
            calls.begin(x_do=do)

    assert [each.status_code for each in calls.answers()] == [502] * 3
    assert all("exit status 3" in each.text for each in calls.answers())
    assert platform.call(path).json()["size"] == 1


@contextmanager
def two_batches(platform: Platform, do: str, ahead: list[str]) -> Iterator[list[Any]]:
    """
    Hold a batch of three calls, whose first one shall *do* that, until the end of the block; meanwhile calls that shall
    do *ahead* come, and three of them go ahead. Give all, of callers who leave ("leaves") the socket.
    """
    code = f"{TOGETHER}\n    # {do}, {ahead}"  # times are learnt for each bundle
    path = platform.deploy("short", code, batch_max="3", batch_wait="2s")
    gate = platform.gate()
    begun: list[Any] = []

    def three_go_ahead() -> bool:
        nonlocal gate
        gate.open()
        for each in begun:
            each.close() if isinstance(each, socket) else each.result()
        begun.clear()
        if not platform.residents():
            platform.call(path)  # on a new copy, the first call does not wait for others
        for _ in range(30):
            for each in [platform.begin(path) for _ in range(3)]:
                each.result()
        gate = platform.gate()
        held = {"x-gate": gate.body.decode()}
        begun.extend(platform.begin(path, headers={**held, "x-do": each}) for each in (do, "", ""))
        until(gate.reached, "they run together")
        for number, each in enumerate(ahead):
            if each == "leaves":
                begun.append(platform.socket())
                begun[-1].sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
            else:
                begun.append(platform.begin(path, b"%d" % number, headers={"x-do": each}))
            until(lambda: platform.queued() + platform.running() == len(begun), "it is there")
        return platform.running() == 6

    until(three_go_ahead, "its batches are known to be short")
    yield begun
    gate.open()


def test_a_batch_that_went_ahead_is_served_though_the_worker_dies_before_it_began(platform: Platform) -> None:
    with two_batches(platform, "exit", [""] * 3) as calls:
        pass

    answers = [each.result() for each in calls]

    assert [each.status_code for each in answers] == [502] * 3 + [200] * 3
    assert len({each.json()["pid"] for each in answers[3:]}) == 1


def test_batches_go_ahead_of_each_other_and_each_call_has_its_own_answer(platform: Platform) -> None:
    do = ["", "raise", "large", "status", "", "large", "", "", ""]
    with two_batches(platform, "large", do) as calls:
        pass

    answers = [each.result() for each in calls]

    assert [each.status_code for each in answers] == [200] * 4 + [500, 200, 201] + [200] * 5
    lengths = [len(each.content) for each, what in zip(answers[3:], do, strict=True) if what == "large"]
    assert lengths == [1_000_000] * 2
    plain = [(number, each.json()) for number, each in enumerate(answers[3:]) if not do[number]]
    assert [said["text"] for _, said in plain] == [str(number) for number, _ in plain]
    assert {said["size"] for _, said in plain} == {3}


def test_callers_of_a_batch_that_went_ahead_may_leave(platform: Platform) -> None:
    with two_batches(platform, "", ["", "", "leaves"]) as calls:
        calls.pop().close()
        until(lambda: inflight(platform, "short") == 5, "its leaving is noticed")

    assert [each.result().status_code for each in calls] == [200] * 5
    until(platform.is_idle, "nothing is left of it")


def test_a_call_waits_for_others_beside_an_idle_device_and_not_longer_than_it_may(platform: Platform) -> None:
    path = platform.deploy("together", TOGETHER, batch_max="3", batch_wait="10s")
    assert platform.call(path).json()["size"] == 1
    full = [each.result() for each in [platform.begin(path) for _ in range(3)]]
    platform.deploy("together", TOGETHER, batch_max="3", batch_wait="300ms")
    assert platform.call(path).json()["size"] == 1, "a new copy is not waited for"
    alone = platform.call(path)

    assert [each.json()["size"] for each in full] == [3] * 3
    assert all(waited_ms(each) < 9_000 for each in full), "a full batch waits no longer"
    assert alone.json()["size"] == 1
    assert 298 <= waited_ms(alone) < 9_000, "for its own 300 ms; the loop's clock has whole ms"
    metrics = platform.http.get("/metrics").text
    counted = dict(re.findall(r'batch_wait_seconds_(\w+){function_name="together.openfaas-fn"[^}]*} ([\d.]+)', metrics))
    assert (counted["count"], float(counted["sum"]) >= 0.298) == ("6.0", True)


def waited_ms(answer: httpx.Response) -> float:
    """Return how long the call was held back for others."""
    found = re.search(r"queue;dur=([\d.]+), .*queue-batch;dur=([\d.]+)", answer.headers["server-timing"])
    assert found is None or float(found[2]) <= float(found[1])
    return 0.0 if found is None else float(found[2])


BOTH = """
    def load(device):
        return None

    def handle(model, event, context):
        return (piece for piece in ("one", " ", "call"))
"""


def test_a_call_alone_is_the_handle_s_if_there_is_one(platform: Platform) -> None:
    both = BOTH + "\n    def handle_batch(model, events, contexts):\n        return ['batch'] * len(events)\n"

    assert platform.call(platform.deploy("both", both, batch_max="8")).text == "one call"
    assert platform.call(platform.deploy("both", both)).text == "one call", "batch-max is 1"


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("", "handler.py defines no function handle_batch(), which gpufaas.batch-max 8 needs"),
        ("async def made(*_): ...", "handle_batch() is async, which is not supported"),
        ("def made(*_): yield 1", "handle_batch() is a generator, and a batch cannot stream"),
    ],
)
def test_what_cannot_run_batches_is_refused_at_deploy(platform: Platform, function: str, says: str) -> None:
    made = f"{function}\n    handle_batch = made" if function else ""  # the build looks at a plain def
    with pytest.raises(Refused) as refused:
        platform.deploy("both", f"{BOTH}\n    {made}\n", batch_max="8")

    assert says in str(refused.value)


def test_an_async_handler_is_told_to_use_slots_instead_of_batches(platform: Platform) -> None:
    handler = """
    def load(device):
        return None

    async def handle(model, event, context):
        return "one"
"""

    with pytest.raises(Refused, match=r"is async, and gathers its calls itself: remove gpufaas.batch-max, and set gpu"):
        platform.deploy("gathers", handler, batch_max="8")
