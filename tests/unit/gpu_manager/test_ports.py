"""To which TCP ports a function may connect, and what its author is told of one that is closed."""

import asyncio
import contextlib
import errno
import os
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.etcd_process import EtcdProcess, etcd_missing

from gpufaas_apps import machine
from gpufaas_apps.options import DeviceOptions
from gpufaas_core.constraints import ISOLATED_BY
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.model import Device, DeviceId
from gpufaas_functions import answers
from gpufaas_functions.answers import from_the_author, in_one_line
from gpufaas_gpu_manager.isolation import levels, ports
from gpufaas_gpu_manager.isolation.ports import etcd_here, ports_of
from gpufaas_gpu_manager.isolation.walls import Walls

BEST, STRICT = Walls(landlock=6), Walls(landlock=6, strict=True)
ETCD = Walls(landlock=6, etcd=(23_790,))
GATEWAY = "http://127.0.0.1:8080"


@pytest.mark.parametrize(
    ("connect", "walls", "gateway", "expected"),
    [
        ("", BEST, GATEWAY, None),
        ("any", STRICT, GATEWAY, None),
        ("", STRICT, GATEWAY, (8080,)),
        ("", ETCD, GATEWAY, (8080,)),
        ("5432,80-81", BEST, GATEWAY, (80, 81, 5432, 8080)),
        ("5432", ETCD, "https://gateway.example", (5432, 443)),
        ("5432", BEST, "http://gateway.example", (5432, 80)),
        ("5432", STRICT, "", (5432,)),
        ("5432", Walls(), GATEWAY, None),
        ("5432", Walls(landlock=3), GATEWAY, None),
    ],
)
def test_a_function_connects_to_the_ports_that_it_names_and_the_gateways(
    connect: str, walls: Walls, gateway: str, expected: tuple[int, ...] | None
) -> None:
    assert ports_of(connect, walls, gateway) == expected


@pytest.mark.parametrize("connect", ["any", "23000-23900"])
def test_no_function_reaches_an_etcd_without_a_login_by_asking_for_it(connect: str) -> None:
    with pytest.raises(
        InvalidSpec, match=f"gpufaas.connect: {connect} reaches an etcd without a login, at port 23790: name"
    ):
        ports_of(connect, ETCD, GATEWAY)


def test_what_holds_workers_says_that_they_connect_to_the_gateway_only_and_why() -> None:
    assert str(STRICT) == "Landlock 6, connects to the gateway only"
    assert str(ETCD) == "Landlock 6, connects to the gateway only, as etcd has no login"
    assert str(Walls(strict=True)) == "nothing", "without Landlock they connect to any"


@pytest.mark.platform
@pytest.mark.skipif(bool(etcd_missing()), reason=etcd_missing())
def test_an_etcd_of_this_machine_is_found_while_it_asks_for_no_login(monkeypatch: pytest.MonkeyPatch) -> None:
    with EtcdProcess() as etcd:
        monkeypatch.setattr(ports, "ETCD", (etcd.port, 2380))
        other = f"http://localhost:{etcd.port}"
        assert etcd_here() == etcd_here([other]) == etcd_here([etcd.endpoint]) == (etcd.port,)
        etcd.ctl("user", "add", "root:secret")
        etcd.ctl("user", "grant-role", "root", "root")
        etcd.ctl("auth", "enable")
        assert etcd_here() == ()
    assert etcd_here() == (), "nothing listens there"


def test_what_listens_and_says_nothing_or_is_no_etcd_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_PATIENCE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(ports, "ETCD", (silent.getsockname()[1], 2380))
        assert etcd_here(["https://127.0.0.1:1", "192.0.2.1:2379"]) == ()


class Answers404(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_error(404)


def test_an_etcd_at_any_address_of_loopback_is_of_this_machine() -> None:
    """Where Debian puts the machine's own name: 127.0.1.1. Packets to it come from 127.0.0.1."""
    with HTTPServer(("127.0.1.1", 0), Answers404) as etcd:
        answering = threading.Thread(target=etcd.handle_request)
        answering.start()
        assert etcd.server_port in etcd_here([f"127.0.1.1:{etcd.server_port}"])
        answering.join()


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "ports_limited", True)


def by_address() -> None:
    address = ("127.0.0.1", 5432)
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) if address else AssertionError


def by_a_library() -> None:
    try:
        by_address()
    except OSError as exc:
        raise RuntimeError("cannot reach the database") from exc


def by_a_library_that_hides_it() -> None:
    with contextlib.suppress(KeyError):
        try:
            by_address()
        except OSError:
            raise RuntimeError("cannot reach the database") from None


def by_a_path() -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/etc/shadow")


def said(of: Callable[[], object]) -> str:
    try:
        of()
    except Exception as exc:
        return in_one_line(from_the_author(exc))
    raise AssertionError("it did not fail")


CLOSED = "if it connects: its TCP port is not among those of the annotation gpufaas.connect"


@pytest.mark.parametrize("fails", [by_address, by_a_library, by_a_library_that_hides_it])
@pytest.mark.usefixtures("limited")
def test_a_connection_that_is_refused_names_the_annotation(fails: Callable[[], None]) -> None:
    assert said(fails).endswith(CLOSED)


@pytest.mark.usefixtures("limited")
def test_a_file_that_may_not_be_read_has_nothing_to_do_with_ports() -> None:
    assert "gpufaas.connect" not in said(by_a_path)


def test_where_all_ports_are_open_nothing_is_said_of_them() -> None:
    assert "gpufaas.connect" not in said(by_address)


def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(socket.socket, "connect", connect)


@pytest.mark.usefixtures("limited")
def test_pythons_own_ways_to_connect_name_the_annotation(monkeypatch: pytest.MonkeyPatch) -> None:
    refused(monkeypatch)

    async def opens() -> None:
        await asyncio.open_connection("127.0.0.1", 5432)

    assert said(lambda: socket.create_connection(("127.0.0.1", 5432))).endswith(CLOSED)
    assert said(lambda: asyncio.run(opens())).endswith(CLOSED)


@pytest.mark.parametrize(
    ("abi", "says", "warns"),
    [(7, "Landlock 7, connects to the gateway only, as etcd has no login", 0), (3, "Landlock 3", 1)],
)
def test_the_start_up_says_that_an_etcd_has_no_login(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, abi: int, says: str, warns: int
) -> None:
    monkeypatch.setattr(levels, "walls", lambda *_: Walls(landlock=abi))
    monkeypatch.setattr(machine, "etcd_here", lambda _: (2379,))
    device: Any = SimpleNamespace(device=Device(DeviceId("n/cpu:0"), "cpu", 0))

    machine.isolation_of(DeviceOptions(), tmp_path, [device])

    assert device.device.labels[ISOLATED_BY] == says
    assert caplog.text.count("an etcd at port 2379 asks for no login, and functions reach it") == warns
