"""Whose the other end of a TCP connection is, if it is a process of this machine: the kernel tells (sock_diag(7))."""

import contextlib
import fcntl
import functools
import ipaddress
import logging
import os
import socket
import struct
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

Address = tuple[str, int]

WORKERS: Final = range(1_900_000_000, 1_901_048_576)
"""Uids that nodes of this machine give to functions unless their operator names others: those are locked in `LOCKS`."""
LOCKS: Final = Path("/run/gpufaas/uids")
"""A file in which each platform locks the bytes at the uids of its functions. Only root opens it."""

_SOCK_DIAG: Final = 4
_BY_FAMILY: Final = 20
_ASKED: Final = struct.Struct("=IHHII BBBxI 4s16s16s4x8s")
"""Length, type, flags, number, port; family, protocol, extensions, states; both ports, both addresses, cookie."""
_TOLD: Final = struct.Struct("=4xH11xB62xII")
"""Type; state, uid and inode, which is 0 once no process has the socket open."""
_LISTENS: Final = 10


def uid_of(peer: Address, here: Address) -> int | None:
    """
    Return the uid of the process at *peer*, an end of a connection whose other end is *here*. None: no process of this
    machine has that end open, as far as the kernel tells.
    """
    ends = [ipaddress.ip_address(host.partition("%")[0]) for host, _ in (peer, here)]
    ends = [getattr(each, "ipv4_mapped", None) or each for each in ends]
    asked = _ASKED.pack(
        _ASKED.size, _BY_FAMILY, 1, 1, 0, socket.AF_INET if ends[0].version == 4 else socket.AF_INET6,
        socket.IPPROTO_TCP, 0, 0xFFFFFFFF, struct.pack("!HH", peer[1], here[1]), *(each.packed for each in ends),
        b"\xff" * 8,
    )  # fmt: skip
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, _SOCK_DIAG) as kernel,
    ):
        kernel.settimeout(1)
        kernel.sendto(asked, (0, 0))
        answer = kernel.recv(4096)
        if len(answer) >= _TOLD.size:  # else it is an error
            kind, state, uid, inode = _TOLD.unpack_from(answer)
            if kind == _BY_FAMILY and inode and state != _LISTENS:  # it tells who listens if there is no connection
                return int(uid)
    return None


def is_own(host: str) -> bool:
    """Whether *host* is of this machine: packets to it come from it. (With ip_nonlocal_bind a bind tells nothing.)"""
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as tried,
    ):
        tried.connect((host, 9))
        return bool(tried.getsockname()[0] in (host, "127.0.0.1", "::ffff:127.0.0.1"))
    return False


def may_be_worker(peer: Address | None, here: Address | None) -> bool:
    """
    Return whether the process at *peer* has a uid of functions, or may have had: whose it was cannot be told once it
    has closed its end. False where the kernel tells of nobody.
    """
    if not _tells():
        return False
    if peer is None or here is None:
        return True
    uid = uid_of(peer, here)
    return is_own(peer[0]) if uid is None else uid in WORKERS or _is_given(uid)


def lock_of(uids: range) -> bytes:
    """Return a lock of *uids*, for fcntl(2). It is of an open file: a platform is told of its own, too."""
    return struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, uids.start, len(uids), 0)


def _is_given(uid: int) -> bool:
    """Whether a platform of this machine gives *uid* to functions."""
    with contextlib.suppress(OSError), LOCKS.open("rb+") as locks:
        found: bytes = fcntl.fcntl(locks, fcntl.F_OFD_GETLK, lock_of(range(uid, uid + 1)))
        return struct.unpack_from("h", found) != (fcntl.F_UNLCK,)
    return False


@functools.cache
def _tells() -> bool:
    """Return whether the kernel tells here, tried with a connection of our own."""
    with (
        contextlib.suppress(OSError),
        socket.create_server(("127.0.0.1", 0)) as there,
        socket.create_connection(there.getsockname()) as end,
    ):
        if uid_of(end.getsockname(), end.getpeername()) == os.geteuid():
            return True
    log.warning("peers.unknown: this kernel lacks inet_diag, so what keeps functions from management is its password")
    return False
