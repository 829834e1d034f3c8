"""Connections within one machine."""

import asyncio
import contextlib
import fcntl
import socket
import struct
import termios
from typing import Final

from gpufaas_core.model import Bytes

_UNPACED: Final = b"reno"
"""Every kernel has it and lets every process choose it. Where nothing is lost, it sends at once."""
_HERE: Final = ("127.", "::1", "::ffff:127.")


def unpace(transport: asyncio.BaseTransport) -> None:
    """
    Have what is sent to this machine itself sent at once. The default of a machine may be BBR, which spreads it by
    timers, to spare a network: within a machine that costs both ends, and spares nothing.
    """
    peer = transport.get_extra_info("peername")
    if type(peer) is tuple and peer[0].startswith(_HERE):
        with contextlib.suppress(OSError, AttributeError):
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _UNPACED)


def count_unread(transport: asyncio.BaseTransport) -> Bytes:
    """Return the bytes that came for *transport* and wait in the kernel until they are read."""
    return _count(transport, termios.FIONREAD)


def count_unsent(transport: asyncio.BaseTransport) -> Bytes:
    """Return the bytes that *transport* gave to the kernel and that the other end has not read."""
    return _count(transport, termios.TIOCOUTQ)


def _count(transport: asyncio.BaseTransport, what: int) -> Bytes:
    sock = transport.get_extra_info("socket")
    try:
        return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), what, b"\0" * 4))[0])
    except (OSError, ValueError, AttributeError):  # it is closed
        return 0
