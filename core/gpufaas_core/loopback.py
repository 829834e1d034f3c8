"""TCP within one machine."""

import asyncio
import contextlib
import socket
from typing import Final

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
