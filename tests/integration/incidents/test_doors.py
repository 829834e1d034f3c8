"""Requests of clients and strangers to the ports of a platform."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.integration.conftest import (
    ECHO,
    ECHO_MODEL,
    HTTP,
    LIMIT_S,
    PROGRAM,
    Peak,
    Platform,
    free_port,
    until,
)

from gpufaas import Refused

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("segments", [1, 2])
def test_java_and_curl_offer_h2c_with_a_body(platform: Platform, segments: int) -> None:
    """The body was lost behind a 200; in a segment of its own it was taken for a second request."""
    path = platform.deploy("echo", ECHO, HTTP)
    body = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    head = (
        f"POST {path} HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nContent-Length: {len(body)}\r\nHost: x\r\n"
        "HTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAAAAYABgAA\r\nUpgrade: h2c\r\n"
        "User-Agent: Java-http-client/17.0.15\r\n\r\n"
    ).encode()
    with platform.socket() as sock:
        for piece in [head + body] if segments == 1 else [head, body]:
            sock.sendall(piece)
        sock.sendall(b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = b"".join(iter(lambda: sock.recv(65_536), b""))

    assert answer.count(b"HTTP/1.1 200 OK") == 2, answer
    assert body in answer.partition(b"\r\n\r\n")[2]


def test_strangers_cost_a_scheduler_next_to_nothing(tmp_path: Path) -> None:
    """150 connections that never showed the token were listened to for 2 GB, and the leader was deposed meanwhile."""
    port, status_port = free_port(), free_port()
    (tmp_path / "token").write_text("a token of sixteen bytes")
    arguments = ["--id", "s1", "--token-file", str(tmp_path / "token"), "--etcd", "127.0.0.1:1"]
    with contextlib.ExitStack() as stack:
        scheduler = stack.enter_context(
            subprocess.Popen(
                [sys.executable, *PROGRAM, "scheduler", *arguments, "--listen", f"127.0.0.1:{port}",
                 "--status-port", str(status_port)],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
        )  # fmt: skip
        stack.callback(scheduler.kill)

        def opened() -> socket.socket:
            return stack.enter_context(socket.create_connection(("127.0.0.1", port), LIMIT_S))

        def listens() -> bool:
            with contextlib.suppress(OSError):
                return bool(opened().recv(1))
            return False

        until(listens)
        peak = Peak(scheduler.pid)
        strangers = [opened() for _ in range(150)]
        for each in strangers:
            with contextlib.suppress(OSError):
                each.sendall((64 << 20).to_bytes(4, "little") + b"a" * (4 << 20))
        for each in strangers:
            with contextlib.suppress(ConnectionError):
                while each.recv(65_536):
                    pass  # until it is cut off: then nothing more is read of it
        grown = peak.growth

        assert grown < 64 << 20, f"{grown >> 20} MiB"
        assert listens()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("POST /function/nothing HTTP/1.1\r\n", 400),
        ("POST /function/nothing HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n", 501),
        (f"GET /{'a' * 100_000} HTTP/1.1\r\nHost: x\r\n", 414),
        ("GET /function/nothing HTTP/1.1\r\nHost: x\r\n" + "a: b\r\n" * 100_000, 431),
    ],
    ids=("host", "coding", "long", "many"),
)
def test_heads_that_nobody_should_send_are_refused(platform: Platform, head: str, status: int) -> None:
    with platform.socket() as sock:
        sock.sendall(f"{head}\r\n".encode())
        assert sock.recv(65_536).startswith(f"HTTP/1.1 {status} ".encode())


def test_a_preflight_loads_nothing(platform: Platform) -> None:
    """OPTIONS loaded the model, to be answered 200 without what a browser looks for."""
    path = platform.deploy(
        "crossed", ECHO_MODEL, cors_origins="https://app.example", cors_headers="content-type, x-call-id"
    )
    asked = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}

    answer = platform.http.options(path, headers=asked)
    refused = platform.http.options(path, headers=asked | {"Origin": "https://evil.example"})

    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    assert answer.headers["access-control-allow-methods"] == "GET, HEAD, POST"
    assert answer.headers["access-control-allow-headers"] == "content-type, x-call-id"
    assert refused.status_code == 403
    assert all(each["resident"] == [] for each in platform.status()["devices"]), "also none that is loading"

    called = platform.call(path, b"hi", headers={"Origin": "https://app.example"})
    assert (called.text, called.headers["access-control-allow-origin"]) == ("hi", "https://app.example")
    assert "access-control-allow-origin" not in platform.call(path, b"hi", headers={"Origin": "http://x"}).headers
    with pytest.raises(Refused, match="cors-origins"):
        platform.deploy("crossed", ECHO_MODEL, cors_origins="app.example")


PREFLIGHT = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}


def test_a_preflight_of_a_function_that_says_nothing_gives_no_leave_and_loads_nothing(platform: Platform) -> None:
    """It was a call like any other: it loaded the model."""
    path = platform.deploy("uncrossed", ECHO_MODEL)

    answer = platform.http.options(path, headers=PREFLIGHT)

    assert answer.status_code == 204
    assert not [name for name in answer.headers if name.startswith("access-control-")]
    assert all(each["resident"] == [] for each in platform.status()["devices"]), "also none that is loading"
    plain = platform.http.request("OPTIONS", path, content=b"what may I do?")
    assert (plain.status_code, plain.text) == (200, "what may I do?"), "OPTIONS that is no preflight is a call"


def test_a_function_may_answer_preflights_itself(platform: Platform) -> None:
    """As functions do that come from OpenFaaS, where OPTIONS always reaches them."""
    own = """
        def handle(event, context):
            return {"statusCode": 204, "headers": {"access-control-allow-origin": "https://app.example"}}
    """
    path = platform.deploy("itself", own, HTTP, cors_origins="function")

    for answer in (platform.http.options(path, headers=PREFLIGHT), platform.http.get(path, headers=PREFLIGHT)):
        assert answer.headers.get_list("access-control-allow-origin") == ["https://app.example"]


@pytest.fixture
def few_descriptors(tmp_path: Path) -> Iterator[Platform]:
    """A platform with 400 descriptors, of 100 that it finds."""
    platform = Platform(tmp_path / "few")
    platform.prefix = ["prlimit", "--nofile=100:400"]
    platform.start()
    yield platform
    platform.close()


def _answered(platform: Platform, path: str) -> bytes:
    """Return what is answered to a caller who sends head and body before it reads; raise OSError: it was reset."""
    body = b"x" * 300_000
    with platform.socket() as sock:
        sock.sendall(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body)))
        sock.sendall(body)
        answer = b""
        while piece := sock.recv(65_536):
            answer += piece
        return answer


def test_connections_leave_descriptors_for_functions(few_descriptors: Platform) -> None:
    """
    The 111th function was answered `Errno 24`, as was whatever came when callers held all descriptors. Of 120 callers
    who came later, 111 were reset before they could read why they were refused.
    """
    platform = few_descriptors
    path = platform.deploy("echo", ECHO, HTTP)
    limits = httpx.Limits(keepalive_expiry=LIMIT_S)
    with contextlib.ExitStack() as stack:
        # The connections of `platform.http` are closed when they are idle for some seconds.
        before = stack.enter_context(
            httpx.Client(base_url=platform.url, timeout=LIMIT_S, trust_env=False, limits=limits)
        )
        assert before.get("/healthz").status_code == 200
        held = [stack.enter_context(platform.socket()) for _ in range(300)]

        assert held[-1].recv(65_536).startswith(b"HTTP/1.1 503 ")
        assert before.post(path, content=b"hi").content == b"hi", "on a connection that is open"
        until(lambda: "connections are open" in platform.said())
        assert platform.said().count("connections are open") < 10, "not for each"
        with ThreadPoolExecutor(20) as callers:
            answers = list(callers.map(lambda _: _answered(platform, path), range(120)))
        assert {each.partition(b"\r\n")[0] for each in answers} == {b"HTTP/1.1 503 Service Unavailable"}
        assert all(b"\r\nRetry-After: 1\r\n" in each and each.endswith(b"are open\n") for each in answers)

    assert "descriptors.few limit=400" in platform.said()
    until(lambda: platform.healthy() and platform.open_files() < 200)


@pytest.fixture
def hardly_any_descriptors(tmp_path: Path) -> Iterator[Platform]:
    """A platform that may have 128 descriptors: 42 connections of callers, and workers of seven functions."""
    platform = Platform(tmp_path / "hardly")
    platform.prefix = ["prlimit", "--nofile=128:128"]
    platform.start()
    yield platform
    platform.close()


def test_a_worker_too_many_for_the_descriptors_is_refused_until_there_is_room(hardly_any_descriptors: Platform) -> None:
    """A cold call was answered `502 … [Errno 24] Too many open files`, and its function was marked as failed."""
    platform = hardly_any_descriptors
    with contextlib.ExitStack() as stack:
        for _ in range(35):
            stack.enter_context(platform.socket())
        paths = [platform.deploy(f"one-{number}", ECHO, HTTP) for number in range(9)]
        answers = [platform.call(path, b"hi") for path in paths]
        refused = [platform.call(paths[-1], b"hi") for _ in range(3)]
        answer = answers[-1]

        assert [each.status_code for each in answers[:3]] == [200] * 3, "connections that are held leave room"
        assert {each.status_code for each in refused} == {503}
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.headers["x-gpufaas-error"] == "grant-refused"
        assert "may have 128 files open" in answer.text
        assert "ulimit -Hn" in answer.text
        assert platform.call("/function/one-0", b"warm").content == b"warm"
        failed = [each["name"] for each in platform.http.get("/system/functions").json() if "Failed" in str(each)]
        assert failed == []
        assert 1 <= platform.said().count("descriptors.exhausted") < len(refused), "not for each"
        platform.remove("one-0")
        until(lambda: platform.call(paths[-1], b"hi").content == b"hi")


def test_nobody_else_looks_into_the_data(few_descriptors: Platform) -> None:
    assert few_descriptors.data.stat().st_mode & 0o777 == 0o700
