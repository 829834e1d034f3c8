"""
What a stranger sends, or a function answers, concerns nobody else. A body that was no UTF-8 failed all calls of its
batch; one that was no JSON, or whose caller hung up before a function had read it from its file, ran them twice. An
answer with ``Transfer-Encoding`` in upper case ended early for a connection that callers share, and the next caller
read what a function had made up.
"""

import contextlib
import http.client
from pathlib import Path

import pytest
from tests.integration.conftest import HTTP, Platform
from tests.waiting import LIMIT_S, until

READS = """
    def load(device):
        return None

    def one(event):
        return event.json()["text"] if event.path == "/json" else event.text

    def handle(model, event, context):
        return one(event)
"""
READS_ASYNC = """
    async def handle(event, context):
        return event.json()["text"] if event.path == "/json" else event.text
"""


def test_a_body_that_cannot_be_read_is_its_callers_fault_and_not_the_handlers(platform: Platform) -> None:
    latin_1 = b'{"text":"caf\xe9"}'
    for path in (platform.deploy("reads", READS), platform.deploy("reads-async", READS_ASYNC, HTTP)):
        for kind in ("/json", "/text"):
            bad = platform.call(path + kind, latin_1)
            unknown = platform.call(path + kind, latin_1, headers={"content-type": "text/plain; charset=klingon"})
            assert (bad.status_code, unknown.status_code) == (400, 415)
            assert "can't decode byte 0xe9" in bad.text
            assert "send the body in UTF-8" in unknown.text
        named = platform.call(path + "/json", latin_1, headers={"content-type": "application/json; charset=latin-1"})
        assert named.text == "café"
    assert "Traceback" not in platform.log("reads") + platform.log("reads-async")


RECORDS = """
    import os, time

    def load(device):
        return None

    def handle_batch(model, events, contexts):
        for event in events:
            if gate := event.headers.get("x-gate"):
                open(gate + ".began", "w").close()
                until = time.monotonic() + 60
                while not os.path.exists(gate) and time.monotonic() < until:
                    time.sleep(0.005)
        found = []
        for event, context in zip(events, contexts):
            streamed = sum(map(len, event.stream()))
            size = len(event.json()["text"]) if event.path == "/json" else len(event.body)
            with open(os.environ["record"], "a") as record:
                record.write(f"{context.call_id} {len(events)} {streamed} {size}\\n")
            found.append(context.call_id)
        return found
"""
LARGE = b"x" * (2 << 20)


def test_no_call_runs_twice_whatever_the_others_of_its_batch_send(platform: Platform, open_path: Path) -> None:
    """Neither a body that is not JSON or UTF-8, nor a caller who hangs up before its body was read from its file."""
    record = open_path / "record"
    path = platform.deploy("records", RECORDS, batch_max="8", env={"record": str(record)})
    other = {"content-type": "application/json"}
    held, inside = platform.gate(), platform.gate()
    first = platform.begin(path, headers={"x-gate": held.body.decode(), "x-call-id": "first"})
    until(held.reached, "the worker is occupied")
    calls = [
        platform.begin(path, b"1", headers={"x-gate": inside.body.decode(), "x-call-id": "good-0"}),
        platform.begin(path + "/json", b'{"text":"a"}', headers={**other, "x-call-id": "good-1"}),
        platform.begin(path + "/json", b"{", headers={**other, "x-call-id": "no-json"}),
        platform.begin(path + "/json", b'{"text":"caf\xe9"}', headers={**other, "x-call-id": "no-utf-8"}),
    ]
    leaves = platform.socket()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nX-Call-Id: leaves\r\nConnection: close\r\nContent-Length: {len(LARGE)}"
    leaves.sendall(head.encode() + b"\r\n\r\n" + LARGE)
    until(lambda: platform.queued() == 5, "all of them wait")
    held.open()
    until(inside.reached, "the batch runs")
    leaves.close()
    until(lambda: platform.spooled() == [], "the caller's leaving is noticed")
    inside.open()

    answers = [each.result() for each in (first, *calls)]

    assert [each.status_code for each in answers] == [200, 200, 200, 400, 400]
    assert [each.text for each in answers[:3]] == ["first", "good-0", "good-1"]
    lines = sorted(line.split() for line in record.read_text().splitlines())
    assert lines == [
        ["first", "1", "0", "0"], ["good-0", "3", "1", "1"], ["good-1", "3", "12", "1"],
        ["leaves", "3", str(len(LARGE)), str(len(LARGE))],
    ]  # fmt: skip
    assert "Traceback" not in platform.log("records")


LATE = """
    import os, time

    def handle(event, context):
        gate, record = event.headers["x-gate"], event.headers["x-record"]
        open(gate + ".began", "w").close()
        until = time.monotonic() + 60
        while not os.path.exists(gate) and time.monotonic() < until:
            time.sleep(0.005)
        size = sum(map(len, event.stream()))
        with open(record + ".new", "w") as file:
            file.write(f"{size} {len(event.body)}")
        os.rename(record + ".new", record)
"""
LATE_MODEL = "    def load(device):\n        return None\n" + LATE.replace("(event,", "(model, event,")
LATE_ASYNC = LATE_MODEL.replace("def handle", "async def handle")


@pytest.mark.parametrize("source", [LATE_MODEL, LATE_ASYNC])
def test_a_body_in_a_file_can_be_read_after_its_caller_has_left(
    platform: Platform, open_path: Path, source: str
) -> None:
    path, gate, record = platform.deploy("late", source), platform.gate(), open_path / "record"
    with platform.socket() as leaves:
        leaves.sendall(
            f"POST {path} HTTP/1.1\r\nHost: x\r\nX-Gate: {gate.body.decode()}\r\nX-Record: {record}\r\n"
            f"Connection: close\r\nContent-Length: {len(LARGE)}\r\n\r\n".encode()
            + LARGE
        )
        until(gate.reached, "it runs")
        assert platform.spooled(), "its body is in a file"
    until(lambda: platform.spooled() == [], "its caller has left")
    gate.open()

    until(record.exists, "it goes on")

    assert record.read_text().split() == [str(len(LARGE))] * 2


SPLITS = """
    import gpufaas_functions.author as author

    author._header = author._known_header = lambda name, value: (name.encode(), value.encode())
    SECOND = "HTTP/1.1 200 OK\\r\\ncontent-length: 4\\r\\n\\r\\nevil"

    def handle(event, context):
        body = "0\\r\\n\\r\\n" + SECOND if event.query["name"].lower().startswith("transfer") else SECOND
        headers = {event.query["name"]: event.query["value"]}
        return {"body": iter([body, SECOND]) if event.path == "/stream" else body, "headers": headers}
"""


def test_no_header_of_a_function_splits_the_connection_that_its_callers_share(platform: Platform) -> None:
    path = platform.deploy("splits", SPLITS, HTTP)
    honest = platform.deploy("honest", "def handle(event, context):\n    return 'honest'", HTTP)
    connection = http.client.HTTPConnection("127.0.0.1", platform.port, timeout=LIMIT_S)

    def get(path: str) -> tuple[int, bytes]:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()

    with contextlib.closing(connection):
        assert get(honest) == (200, b"honest")
        shared = connection.sock
        for name, value, status in (
            ("Transfer-Encoding", "chunked", 502),
            ("tRANSFER-eNCODING", "chunked", 502),
            ("transfer-encoding", "chunked", 200),
            ("Content-Length", "0", 502),
            ("Connection", "close", 502),
            ("connection", "close", 200),
            ("keep-alive", "timeout=0", 200),
            ("x-a", "b%0Bc", 502),
        ):
            for way in ("", "/stream"):
                found, body = get(f"{path}{way}?name={name}&value={value}")
                assert (found, b"evil" in body) == (status, status == 200), (name, way)
                assert get(honest) == (200, b"honest"), (name, way)
        assert get(f"{path}?name=content-length&value=0")[1].endswith(b"evil")
        assert get(honest) == (200, b"honest")
        assert connection.sock is shared, "no answer has closed it"
