"""One WebSocket with messages of one byte, sent as fast as possible, delayed all other callers for seconds."""

import contextlib
import socket
import threading
import time
from statistics import median

import pytest
from tests.integration.conftest import LIMIT_S, Platform
from tests.integration.test_websockets import deploy

pytestmark = pytest.mark.timeout(120)

TINY = b"\x81\x81\0\0\0\0x" * 2_000
"""Masked text messages of one byte."""


def flood(platform: Platform, path: str, stop: threading.Event) -> None:
    with socket.create_connection(("127.0.0.1", platform.port), LIMIT_S) as sock:
        sock.sendall(
            f"GET {path} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n".encode()
        )
        reader = threading.Thread(target=read, args=(sock,))
        reader.start()
        with contextlib.suppress(OSError):
            while not stop.is_set():
                sock.sendall(TINY)
            sock.shutdown(socket.SHUT_RDWR)
        reader.join()


def read(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while sock.recv(1 << 20):
            pass


@pytest.mark.long
def test_small_messages_keep_nobody_waiting(platform: Platform) -> None:
    deploy(platform)
    stop = threading.Event()
    thread = threading.Thread(target=flood, args=(platform, "/function/talk", stop))
    thread.start()
    took = []
    try:
        time.sleep(1.0)
        for _ in range(15):
            began = time.monotonic()
            assert platform.http.get("/healthz").status_code == 200
            took.append(time.monotonic() - began)
            time.sleep(0.05)
    finally:
        stop.set()
        thread.join()

    assert median(took) < 0.25, took
