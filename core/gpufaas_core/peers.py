"""Whose the other end of a TCP connection is, if it is a process of this machine: the kernel tells (sock_diag(7))."""

import errno
import functools
import ipaddress
import logging
import os
import socket
import struct
from typing import Final

log = logging.getLogger(__name__)

Address = tuple[str, int]

_SOCK_DIAG: Final = 4
_BY_FAMILY: Final = 20
_REQUEST: Final = 1
_HEAD: Final = struct.Struct("=IHHII")
"""Of netlink: length, type, flags, sequence number, port."""
_ASKED: Final = struct.Struct("=BBBxI")
"""Family, protocol, extensions, states."""
_ENDS: Final = struct.Struct("!HH16s16s")
_TOLD: Final = struct.Struct("=BBxx48x4x4x4xII")
"""Family, state, then of the socket uid and inode, which is 0 once no process has it open."""
_NO_COOKIE: Final = b"\0" * 4 + b"\xff" * 8
_LISTENS: Final = 10


def uid_of(peer: Address, here: Address) -> int | None:
    """
    Return the uid of the process at *peer*, an end of a connection whose other end is *here*.

    :returns: None: it is on another machine
    :raises ProcessLookupError: it is an address of this machine, and no process has that end open
    :raises OSError: the kernel does not tell
    """
    ends = [ipaddress.ip_address(host.partition("%")[0]) for host, _ in (peer, here)]
    ends = [getattr(each, "ipv4_mapped", None) or each for each in ends]
    family = socket.AF_INET if ends[0].version == 4 else socket.AF_INET6
    asked = (
        _ASKED.pack(family, socket.IPPROTO_TCP, 0, 0xFFFFFFFF)
        + _ENDS.pack(peer[1], here[1], *(each.packed for each in ends))
        + _NO_COOKIE
    )
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, _SOCK_DIAG) as kernel:
        kernel.settimeout(1)
        kernel.sendto(_HEAD.pack(_HEAD.size + len(asked), _BY_FAMILY, _REQUEST, 1, 0) + asked, (0, 0))
        answer = kernel.recv(4096)
    if _HEAD.unpack_from(answer)[1] == _BY_FAMILY:
        _, state, uid, inode = _TOLD.unpack_from(answer, _HEAD.size)
        if inode and state != _LISTENS:  # where there is no such connection, who listens at the port is found
            return int(uid)
    elif (number := -struct.unpack_from("=i", answer, _HEAD.size)[0]) != errno.ENOENT:
        raise OSError(number, os.strerror(number))
    if ends[0].is_loopback or _is_own(peer[0]):
        raise ProcessLookupError(f"no process has {peer[0]}:{peer[1]} open")
    return None


def _is_own(host: str) -> bool:
    """Whether packets to *host* would come from it. (Binding tells nothing where ip_nonlocal_bind is set.)"""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as tried:
        try:
            tried.connect((host, 9))
        except OSError:
            return False
        return bool(tried.getsockname()[0] == host)


def may_be_of(uids: range, peer: Address | None, here: Address | None) -> bool:
    """
    Return whether the process at *peer* has one of *uids*, or may have had: whose it was cannot be told once it has
    closed its end. False where the kernel tells of nobody.
    """
    if not uids or not _tells():
        return False
    try:
        return peer is None or here is None or uid_of(peer, here) in uids
    except OSError:
        return True


@functools.cache
def _tells() -> bool:
    """Return whether the kernel tells here, tried with a connection of our own."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as there, socket.create_connection(there.getsockname()) as end:
            if uid_of(end.getsockname(), end.getpeername()) == os.geteuid():
                return True
    except OSError:
        pass
    log.warning("peers.unknown: this kernel lacks inet_diag, so what keeps functions from management is its password")
    return False
