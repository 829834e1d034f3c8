"""
Malformed requests. Requests made from the OpenAPI document, valid and not, by schemathesis; and bytes on a raw
socket that no client would make. Afterwards the platform is as it was: no call, worker, file or connection is left.

A short run is part of the tests; ``make fuzz`` gives it minutes, and waits for slow clients to be hung up on. Both are
bounded by numbers of cases and not by time, so that a quick machine and a slow one send the same.
"""

import contextlib
import json
import os
import random
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.integration.conftest import HTTP, LIMIT_S, Platform, until

LONG = "FUZZ_CASES" in os.environ
CASES = os.environ.get("FUZZ_CASES", "5")
"""For each operation, beside those that follow from the document."""
SEED = () if LONG else ("--seed", "1")
"""The short run in the suite draws the same each time; `make fuzz` draws anew."""
FUZZ_S = 1_200 if LONG else 180
"""More than a slow machine takes."""

FILES = 64
"""It has some 30 open, and one more for each of the 16 calls that its two functions take at once."""
ECHO = """
    def handle(event, context):
        print("called")
        return {"statusCode": 200, "body": event.body}
"""
SMUGGLED = b"0\r\n\r\nGET /system/functions HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    home = tmp_path_factory.mktemp("fuzz")
    running = Platform(home, "--functions", "process", "--auth", "on", "--device", "cpu:0=400MiB").start()
    try:
        running.http.auth = ("admin", (running.data / "auth" / "basic-auth-password").read_text())
        until(lambda: "ready in" in running.said())
        yield running
        assert running.stop() == 0
        assert "Traceback" not in running.said()
    finally:
        running.close()


@pytest.fixture
def platform(target: Platform) -> Iterator[Platform]:
    """Its functions are ``echo`` and ``other``. Each test leaves it as it was, with no open connection but ours."""
    target.http.delete("/system/namespace/openfaas-fn/quota").raise_for_status()  # one that was drawn holds us too
    refused.clear()
    for name in ("echo", "other"):
        if target.http.get(f"/system/function/{name}").status_code == 404:
            deploy(target, name)
        assert target.call(f"/function/{name}", b"before").content == b"before"

    lines = target.said().count("\n")

    yield target

    assert target.call("/function/echo", b"after").content == b"after"
    until(target.is_idle, "no call is left")
    until(lambda: is_clean(target), "no connection, file or open file is left")
    assert len(target.workers()) <= 2
    said = target.said()
    assert "Traceback" not in said
    lines += len(refused) + said.count("worker.refused")  # one that hangs up at once may have been a worker
    assert not refused or said.count("\n") <= lines, f"a line at most of each: {said[-2000:]}"


refused: list[bytes] = []
"""What a test has sent that was to be refused."""


def is_clean(platform: Platform) -> bool:
    return len(connections(platform)) <= 1 and platform.open_files() <= FILES and platform.spooled() == []


def connections(platform: Platform) -> list[Any]:
    """Those to the gateway, idle ones of ours included."""
    return [
        each
        for each in psutil.Process(platform.pid).net_connections("tcp")
        if each.laddr.port == platform.port and each.status != psutil.CONN_LISTEN
    ]


def deploy(platform: Platform, name: str) -> None:
    built = platform.build("echo", ECHO, HTTP)
    sent = platform.http.put(f"/system/artifacts/{built.digest}", content=built.bundle_tar.read_bytes())
    assert sent.status_code == 201, sent.text
    body = {"service": name, "image": "echo:1", "annotations": {"gpufaas.bundle": built.digest}}
    answer = platform.http.post("/system/functions", json=body)
    assert answer.status_code == 202, answer.text


# --- from the document ---


def hinted(document: Any, digest: str) -> Any:
    """
    Return *document* with names that exist among those that are made up, so that not all ends at 404; and without
    logs that are followed, which have no end.
    """
    known = {
        "name": ["echo", "echo.openfaas-fn", "openfaas-fn", "dev"], "service": ["echo", "twin"],
        "functionName": ["echo", "twin"], "function_name": ["echo"], "namespace": ["openfaas-fn", "dev"],
        "digest": [digest], "gpufaas.bundle": [digest],
    }  # fmt: skip
    schemas = document["components"]["schemas"]
    schemas["FunctionDeployment"]["properties"]["annotations"] = {
        "anyOf": [
            {"type": "object", "required": ["gpufaas.bundle"], "properties": {"gpufaas.bundle": {"const": digest}}},
            schemas["FunctionDeployment"]["properties"]["annotations"],
        ]
    }
    for schema in schemas.values():
        for name, field in schema.get("properties", {}).items():
            if name in known:
                schema["properties"][name] = {"anyOf": [{"enum": known[name]}, field]}
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["parameters"] = [each for each in operation.get("parameters", ()) if each["name"] != "follow"]
            for parameter in operation["parameters"]:
                if parameter["name"] in known:
                    parameter["schema"] = {"anyOf": [{"enum": known[parameter["name"]]}, parameter["schema"]]}
    return document


def remove_all(platform: Platform) -> None:
    namespaces = platform.http.get("/system/namespaces").json()
    for namespace in namespaces:
        for each in platform.http.get("/system/functions", params={"namespace": namespace}).json():
            body = {"functionName": each["name"], "namespace": namespace}
            assert platform.http.request("DELETE", "/system/functions", json=body).status_code == 202
        if namespace != "openfaas-fn":
            assert platform.http.delete(f"/system/namespace/{namespace}").status_code == 202


@pytest.mark.timeout(FUZZ_S + 20)
@pytest.mark.slow
def test_what_the_document_describes_is_answered_as_it_says(target: Platform, tmp_path: Path) -> None:
    document = target.http.get("/openapi.json").json()
    path = tmp_path / "openapi.json"
    path.write_text(json.dumps(hinted(document, target.build("echo", ECHO, HTTP).digest)))
    target.http.post("/system/namespace/", json={"name": "dev"})

    fuzzed = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", "--config-file",
         str(Path(__file__).with_name("schemathesis.toml")), "run", str(path), "--url", target.url,
         "--auth", f"admin:{(target.data / 'auth' / 'basic-auth-password').read_text()}",
         "--max-examples", CASES, "--request-timeout", str(LIMIT_S),
         # One worker: Python 3.11 may fail to parse source in two threads at once (SystemError in ast).
         "--workers", "1", "--continue-on-failure", "--warnings", "off", "--no-color", *SEED],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=FUZZ_S,
    )  # fmt: skip

    print(fuzzed.stdout)
    assert fuzzed.returncode == 0, fuzzed.stdout[-20_000:] + fuzzed.stderr[-2_000:]
    assert "Traceback" not in target.said()
    remove_all(target)
    until(target.is_empty, "no call, worker or reservation outlives its function")
    until(lambda: is_clean(target), "no connection, file or open file is left")


# --- from the socket ---


def refuses(platform: Platform, request: bytes, statuses: str) -> None:
    """It answers with one of *statuses*, or hangs up; and says no more than one line about it: see `platform`."""
    refused.append(request)

    answer = platform.exchange(request)

    assert re.match(rb"HTTP/1.1 (%s) |$" % statuses.encode(), answer), answer[:500]


def authorization(platform: Platform) -> bytes:
    request = next(platform.http.auth.auth_flow(httpx.Request("GET", platform.url)))  # type: ignore[union-attr]
    return f"Authorization: {request.headers['authorization']}\r\n".encode()


@pytest.mark.parametrize("path", [
    "/../system/functions", "/system/../../etc/passwd", "//system/functions", "/system//functions",
    "/system/./functions", "/%2e%2e/etc/passwd", "/system/functions/..%2f..%2fsecrets", "/system%2ffunctions",
    "/system/function/a%00b", "/system/function/..%5c..%5cx", "/system/function/%2e%2e", "/system/function/a/b",
    "/system/secrets/..;/functions", "/%c0%ae%c0%ae/etc/passwd", "/system/artifacts/../../../etc/passwd",
    "/system/artifacts/%2e%2e%2fgpufaas.db", "/%", "/%zz", "/system/functions%20", "/system/functions%0d%0aX:%20y",
    "/system/function/" + "a" * 100_000, "/system/logs?name=" + "a" * 300, "/system/logs?name=..%2f..%2fgpufaas",
    "/system/logs?name=a%00b", "/system/logs?name=echo&tail=" + "9" * 5_000, "/system/logs?name=echo&since=0000-99",
    "/system/namespace/" + "n" * 5_000, "/async/" + "c" * 100_000, "/async/%ff%fe",
    "/function/../system/functions", "/function/..%2fsystem%2ffunctions", "/function/a%00b", "/function/%2e%2e/%2e%2e",
    "/function//echo", "/function/", "/function/" + "a" * 100_000, "/function/%ff%fe", "/async-function/echo",
    "/async-function/../system/functions", "*", "x", "/\xff", "/system/functions HTTP/1.1\r\nX: y",
])  # fmt: skip
def test_paths_with_tricks_lead_nowhere(platform: Platform, path: str) -> None:
    """With the password: what is refused is the path. What the clean path would be is said by 301."""
    request = b"GET %s HTTP/1.1\r\nHost: x\r\n" % path.encode("latin-1") + authorization(platform) + b"\r\n"
    if "X: y" in path:
        request = request.replace(b" HTTP/1.1\r\nHost", b"\r\nHost")

    refuses(platform, request, "301|400|404|405|414|422|431" if "X: y" not in path else "200|400")


@pytest.mark.parametrize("spelled", ["http://x/system/functions", "http://x/function/../system/functions",
                                    "/system/functions?/function/", "/system/functions#/function/", "/SYSTEM/functions",
                                    "/;/system/functions", "/function/..;/system/functions"])  # fmt: skip
def test_no_spelling_is_a_way_around_the_password(platform: Platform, spelled: str) -> None:
    refuses(platform, f"GET {spelled} HTTP/1.1\r\nHost: x\r\n\r\n".encode(), "301|400|401|404")


@pytest.mark.parametrize("path", [b"/function/echo", b"/async-function/echo", b"/system/functions", b"/nothing"])
@pytest.mark.parametrize("head", [
    b"Content-Length: 5\r\nTransfer-Encoding: chunked", b"Transfer-Encoding: chunked\r\nContent-Length: 5",
    b"Content-Length: 5\r\nContent-Length: 6", b"Content-Length: 5\r\nContent-Length: 5", b"Content-Length: 5, 5",
    b"Content-Length: +5", b"Content-Length: -1", b"Content-Length: 0x5", b"Content-Length: 5 5", b"Content-Length: ",
    b"Content-Length: 99999999999999999999999", b"Transfer-Encoding: chunked, identity", b"Transfer-Encoding: xchunked",
    b"Transfer-Encoding : chunked", b"Transfer-Encoding:\x0bchunked", b"Transfer-Encoding: chunked\r\n gzip",
    b"X: a\nTransfer-Encoding: chunked", b"X\0: a", b"X: a\0b", b"X: a\rb", b"X y: a", b": a", b"no colon",
    b"X-Call-Id: a\x01b", b"X-Call-Id: a\x7fb", b"X-Call-Id: a\x1bb",
])  # fmt: skip
def test_heads_that_can_be_read_in_two_ways_are_refused(platform: Platform, head: bytes, path: bytes) -> None:
    request = b"POST " + path + b" HTTP/1.1\r\nHost: x\r\n" + authorization(platform) + head + b"\r\n\r\n" + SMUGGLED

    refuses(platform, request, "400|413|501")


@pytest.mark.parametrize("chunks", [
    b"zz\r\n", b"-1\r\nhi\r\n", b"ffffffffffffffffff\r\n", b"2\r\nhi!!\r\n0\r\n\r\n", b"2 \r\nhi\r\n0\r\n\r\n",
    b"2\nhi\n0\n\n", b"0x2\r\nhi\r\n0\r\n\r\n", b"2;\0\r\nhi\r\n0\r\n\r\n",
])  # fmt: skip
@pytest.mark.parametrize("path", [b"/function/echo", b"/async-function/echo", b"/system/functions"])
def test_chunks_that_are_none_are_refused(platform: Platform, chunks: bytes, path: bytes) -> None:
    head = b"POST " + path + b" HTTP/1.1\r\nHost: x\r\n" + authorization(platform)

    refuses(platform, head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks, "400|413")


@pytest.mark.parametrize("line", [
    b"FOO /function/echo HTTP/1.1", b"get /function/echo HTTP/1.1", b"G\0T /function/echo HTTP/1.1",
    b"TRACE /function/echo HTTP/1.1", b"CONNECT x:80 HTTP/1.1", b"PROPFIND /system/functions HTTP/1.1",
    b"GET /function/echo HTTP/9.9", b"GET /function/echo", b"GET  HTTP/1.1", b"PRI * HTTP/2.0", b"\x16\x03\x01\x02\0",
    b"GET /function/echo HTTP/1.1 HTTP/1.1", b"\xff\xfe\xfd", b"A" * 70_000, b"/function/echo",
])  # fmt: skip
def test_what_is_no_request_is_refused(platform: Platform, line: bytes) -> None:
    refuses(platform, line + b"\r\nHost: x\r\n\r\n", "400|401|404|405|431|505")


@pytest.mark.parametrize("size", [100_000, 900_000])
def test_a_large_header_reaches_its_function_or_is_refused(platform: Platform, size: int) -> None:
    """The gateway takes 1 MiB; what a function's worker takes is up to it, and it lives on."""
    answer = platform.call("/function/echo", b"x", headers={"X-Large": "a" * size})

    assert answer.status_code in (200, 431), answer.text[:200]


@pytest.mark.parametrize("head", [b"X: " + b"a" * (2 << 20), b"".join(b"X-%d: a\r\n" % n for n in range(150_000))])
def test_an_oversized_head_is_refused(platform: Platform, head: bytes) -> None:
    refuses(platform, b"GET /function/echo HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n", "431")


def test_random_bytes_are_refused(platform: Platform) -> None:
    for seed in range(20 if not LONG else 500):
        refuses(platform, random.Random(seed).randbytes(1 + seed * 37 % 4000) + b"\r\n\r\n", "400|431")


UNFINISHED = (
    b"", b"G", b"GET /function/echo HTTP/1.1\r\nHost: x\r\nX: ", b"\r\n\r\n",
    b"POST /function/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc",
    b"POST /async-function/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc",
    b"POST /system/functions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc",
    b"POST /function/echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
    b"POST /function/nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc",
)  # fmt: skip


@pytest.mark.parametrize("reset", [False, True])
def test_clients_who_stop_half_way_leave_nothing(platform: Platform, reset: bool) -> None:
    """All at once, while another client is served; some close, others are gone with a reset."""
    heads = [each.replace(b" HTTP/1.1\r\n", b" HTTP/1.1\r\n" + authorization(platform)) for each in UNFINISHED]
    with contextlib.ExitStack() as opened:
        for each in [*UNFINISHED, *heads] * 10:
            connection = opened.enter_context(platform.socket())
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(each)

        # `echo` itself may have all its places taken by bodies that come slowly: until they end, or its time limit.
        assert platform.call("/function/other", b"meanwhile").content == b"meanwhile"
        assert platform.http.get("/system/functions").status_code == 200


@pytest.mark.skipif(not LONG, reason="waits for the gateway's patience to end; make fuzz does")
@pytest.mark.timeout(200)
def test_clients_who_dawdle_are_hung_up_on(platform: Platform) -> None:
    """A byte every second of all that can be unfinished: no head and no body takes longer than a minute or so."""
    pieces = [*UNFINISHED[2:], *(each.replace(b" HTTP/1.1\r\n", b" HTTP/1.1\r\n" + authorization(platform))
                                 for each in UNFINISHED[2:])]  # fmt: skip
    ends = time.monotonic() + 120
    with contextlib.ExitStack() as opened:
        left = [opened.enter_context(platform.socket()) for _ in pieces]
        for connection, piece in zip(left, pieces, strict=True):
            connection.sendall(piece)
            connection.setblocking(False)
        while left:
            assert time.monotonic() < ends, f"{len(left)} of {len(pieces)} are still connected"
            time.sleep(1)
            for connection in tuple(left):
                try:
                    connection.send(b"a")
                    while connection.recv(65_536):
                        pass
                    left.remove(connection)
                except BlockingIOError:
                    pass
                except OSError:
                    left.remove(connection)
