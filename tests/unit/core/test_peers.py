"""Whose the other end of a connection is: of real sockets, and of the user that a forked process became."""

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import until

from gpufaas_core import peers
from gpufaas_core.peers import lock_of, may_be_worker, uid_of

WORKERS = range(1_900_000_000, 1_900_000_010)
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
WAYS = [
    (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
    (socket.AF_INET, "127.0.0.1", "::ffff:127.0.0.1"),
    (socket.AF_INET6, "::1", "::1"),
    (socket.AF_INET6, "::", "127.0.0.1"),
]


@contextlib.contextmanager
def connected(
    family: int = socket.AF_INET, host: str = "127.0.0.1", to: str = "127.0.0.1"
) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield both ends: the peer's, and the server's."""
    both = family == socket.AF_INET6 and host == "::"
    try:
        listening = socket.create_server((host, 0), family=family, dualstack_ipv6=both)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with listening, socket.socket(socket.AF_INET6 if ":" in to else socket.AF_INET) as peer:
        peer.connect((to, listening.getsockname()[1]))
        with listening.accept()[0] as here:
            yield peer, here


def is_refused(here: socket.socket) -> bool:
    return may_be_worker(here.getpeername()[:2], here.getsockname()[:2])


@pytest.mark.parametrize("way", WAYS)
def test_a_process_of_this_user_is_told_by_each_kind_of_address(way: tuple[int, str, str]) -> None:
    with connected(*way) as (_, here):
        assert uid_of(here.getpeername()[:2], here.getsockname()[:2]) == os.geteuid()
        assert not is_refused(here)


@ROOT
@pytest.mark.parametrize("way", WAYS)
def test_a_worker_is_told_by_each_kind_of_address(way: tuple[int, str, str]) -> None:
    os.setresuid(-1, WORKERS[3], -1)
    try:
        with connected(*way) as (_, here):
            os.setresuid(-1, 0, -1)
            assert is_refused(here)
    finally:
        os.setresuid(-1, 0, -1)


@pytest.mark.parametrize("way", WAYS)
def test_who_has_closed_its_end_may_have_been_a_worker(way: tuple[int, str, str]) -> None:
    """It sends what does harm without an answer, and is gone before anybody looks."""
    with connected(*way) as (peer, here):
        peer.sendall(b"x")
        peer.close()

        until(lambda: is_refused(here))


def test_who_has_reset_its_connection_may_have_been_a_worker() -> None:
    with connected() as (peer, here):
        ends = here.getpeername(), here.getsockname()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()

        assert may_be_worker(*ends)


def test_a_caller_that_only_ended_its_request_is_told() -> None:
    with connected() as (peer, here):
        peer.shutdown(socket.SHUT_WR)

        assert not is_refused(here)


def test_who_listens_at_the_port_of_a_peer_is_not_taken_for_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as ours:
        assert uid_of(ours.getsockname(), ("127.0.0.1", 1)) is None
        assert may_be_worker(ours.getsockname(), ("127.0.0.1", 1))


def test_an_address_of_loopback_that_nobody_has_is_of_this_machine() -> None:
    assert may_be_worker(("127.0.0.5", 40_000), ("127.0.0.1", 80))


@pytest.mark.parametrize("peer", ["192.0.2.7", "2001:db8::7", "::ffff:192.0.2.7"])
def test_a_peer_on_another_machine_is_nobody_here(peer: str) -> None:
    assert uid_of((peer, 40_000), ("::1" if "db8" in peer else "127.0.0.1", 80)) is None
    assert not may_be_worker((peer, 40_000), ("::1" if "db8" in peer else "127.0.0.1", 80))


def test_a_uid_that_a_platform_of_this_machine_has_locked_is_of_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one may have been told to take it: a node beside the scheduler, with a range of its own."""
    monkeypatch.setattr(peers, "LOCKS", tmp_path / "uids")
    with connected() as (_, here), (tmp_path / "uids").open("wb") as locks:
        assert not is_refused(here)
        fcntl.fcntl(locks, fcntl.F_OFD_SETLK, lock_of(range(os.geteuid(), os.geteuid() + 1)))

        assert is_refused(here)


def test_a_peer_whose_address_is_not_known_may_be_a_worker() -> None:
    assert may_be_worker(None, None)
