"""One WebSocket with messages of one byte, sent as fast as possible, delayed all other callers for seconds."""

import contextlib
import socket
import threading
import time
from statistics import median

import pytest
from tests.integration.conftest import LIMIT_S, Platform, until
from tests.integration.test_websockets import deploy

pytestmark = pytest.mark.timeout(120)

TINY = b"\x81\x81\0\0\0\0x" * 2_000
"""Masked text messages of one byte."""


def flood(platform: Platform, path: str, stop: threading.Event, echoed: list[int]) -> None:
    with socket.create_connection(("127.0.0.1", platform.port), LIMIT_S) as sock:
        sock.sendall(
            f"GET {path} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n".encode()
        )
        reader = threading.Thread(target=read, args=(sock, echoed))
        reader.start()
        with contextlib.suppress(OSError):
            while not stop.is_set():
                sock.sendall(TINY)
            sock.shutdown(socket.SHUT_RDWR)
        reader.join()


def read(sock: socket.socket, echoed: list[int]) -> None:
    with contextlib.suppress(OSError):
        while piece := sock.recv(1 << 20):
            echoed.append(len(piece))


@pytest.mark.long
def test_small_messages_keep_nobody_waiting(platform: Platform) -> None:
    deploy(platform)
    stop = threading.Event()
    echoed: list[int] = []
    thread = threading.Thread(target=flood, args=(platform, "/function/talk", stop, echoed))
    thread.start()
    took = []
    try:
        for number in range(15):
            until(lambda: sum(echoed) > 10_000 * (number + 1), "it goes on")  # noqa: B023
            began = time.monotonic()
            assert platform.http.get("/healthz").status_code == 200
            took.append(time.monotonic() - began)
    finally:
        stop.set()
        thread.join()

    assert median(took) < 1.0, took
