"""
Connections that are closed so that their callers can read the answer.

A caller may still send when it is answered: the rest of a body that is too large, a head that nobody waits for. Linux
resets a connection that is closed with bytes unread, or to which more come, and a reset takes the answer from a caller
who has not read it. So the socket of such a connection is closed in the direction of the caller first. What comes is
dropped until the caller closes it, too.
"""

import asyncio
import contextlib
import socket
from collections import OrderedDict
from typing import Final

from gpufaas_core.descriptors import lingering_share
from gpufaas_core.units import KiB, Seconds

_dropped: Final = bytearray(64 * KiB)
_lingering: Final[OrderedDict[socket.socket, asyncio.TimerHandle]] = OrderedDict()
"""Those of this process. When there are too many, the first one goes: who has sent nothing for the longest time."""


def linger(transport: asyncio.Transport, within_s: Seconds) -> None:
    """Wait so for the caller of *transport*, whose protocol has just lost its connection, but no longer than this."""
    with contextlib.suppress(OSError):  # there is no descriptor left for it, or the caller has gone
        sock: socket.socket = transport.get_extra_info("socket").dup()
        if len(_lingering) >= lingering_share():
            end(next(iter(_lingering)))
        loop = asyncio.get_running_loop()
        _lingering[sock] = loop.call_later(within_s, end, sock)
        loop.add_reader(sock, _drop, sock)  # tells that the caller has gone, too
        sock.shutdown(socket.SHUT_WR)


def _drop(sock: socket.socket) -> None:
    _lingering.move_to_end(sock)
    try:
        size = sock.recv_into(_dropped)
    except BlockingIOError:
        return
    except OSError:
        size = 0
    if not size:
        end(sock)


def end(sock: socket.socket) -> None:
    """Wait for its caller no longer."""
    _lingering.pop(sock).cancel()
    asyncio.get_running_loop().remove_reader(sock)
    sock.close()
