"""A watchdog listens before the server behind it."""

import os
import socket
from pathlib import Path

import pytest

from gpufaas_gpu_manager.launch.upstream import listens, upstream_port


@pytest.mark.parametrize(("env", "port"), [
    (["mode=http", "upstream_url=http://127.0.0.1:5000"], 5000),
    (["PATH=/bin", "mode=http", "http_upstream_url=http://localhost:3000/x"], 3000),
    (["mode=http", "upstream_url=http://127.0.0.1"], 80),
    (["mode=http"], 0),
    (["mode=streaming", "upstream_url=http://127.0.0.1:5000"], 0),
    (["mode=http", "upstream_url=http://elsewhere:5000"], 0),
    (["mode=http", "upstream_url=http://127.0.0.1:x"], 0),
    ([], 0),
])  # fmt: skip
def test_the_port_is_what_the_images_environment_says(env: list[str], port: int) -> None:
    assert upstream_port(env) == port


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_it_listens_once_the_kernel_says_so(family: socket.AddressFamily) -> None:
    with socket.socket(family) as sock:
        sock.bind(("127.0.0.1" if family == socket.AF_INET else "::1", 0))
        port = sock.getsockname()[1]

        assert not listens(os.getpid(), "127.0.0.1", port)
        sock.listen()
        assert listens(os.getpid(), "127.0.0.1", port)


def test_what_cannot_be_seen_is_not_waited_for(tmp_path: Path) -> None:
    assert listens(os.getpid(), "203.0.113.7", 1), "a container of an engine elsewhere"
    assert listens(1, "127.0.0.1", 1, tmp_path), "it has ended"
