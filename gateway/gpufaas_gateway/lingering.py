"""
Closing a connection so that the caller can read the answer.

A caller may still send when it is answered: the rest of a body that is too large, a head that nobody waits for. Linux
resets a connection that is closed with bytes unread, or to which more come, and a reset takes the answer from a caller
who has not read it. So such a connection is closed in the direction of the caller first. What comes is dropped until
the caller closes it, too, or sends nothing for a while.
"""

import asyncio
import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

from gpufaas_core.descriptors import lingering_share
from gpufaas_core.units import Bytes, KiB, Seconds

QUIET_S: Final[Seconds] = 2.0
"""A caller who sends nothing for so long, and at most twice as long, is waited for no longer."""
LINGER_S: Final[Seconds] = 30.0
"""The time for all that a caller still sends."""
_PIECE: Final[Bytes] = 64 * KiB

_lingering: Final[OrderedDict["_Drain", None]] = OrderedDict()
"""Those of this process. When there are too many, the first one goes: who has sent nothing for the longest time."""


class LingeringTransport:
    """
    A transport whose `close` waits for the caller, if more may come from there. All else is the transport's.

    :param expects: returns whether the caller has an answer, and may still send; may be replaced
    """

    __slots__ = ("_transport", "expects", "get_extra_info", "is_closing", "write", "writelines")

    def __init__(self, transport: asyncio.Transport, expects: Callable[[], bool]) -> None:
        self._transport = transport
        self.expects = expects
        # Bound here, so that a call pays nothing for it.
        self.get_extra_info = transport.get_extra_info
        self.write: Callable[[Any], None] = transport.write
        self.writelines: Callable[[Any], None] = transport.writelines
        self.is_closing: Callable[[], bool] = transport.is_closing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def pause_reading(self) -> None:
        if not self.is_closing():  # else what comes is to be dropped
            self._transport.pause_reading()

    def close(self) -> None:
        transport = self._transport
        if self.is_closing():
            return
        if not (self.expects() and transport.can_write_eof()):
            transport.close()
            return
        self.write = self.writelines = lambda _: None  # as of a transport that is closed
        self.is_closing = lambda: True
        _Drain(transport)


class _Drain(asyncio.Protocol):
    """Takes the place of the protocol of *transport*: it drops what comes, and closes the transport."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._ends_at = self._loop.time() + LINGER_S
        self._came = False
        transport.pause_reading()  # how it reads is settled when it begins to
        self._protocol: Any = transport.get_protocol()
        transport.set_protocol(self)
        transport.resume_reading()
        if len(_lingering) >= lingering_share():
            next(iter(_lingering)).end()
        _lingering[self] = None
        self._timer = self._loop.call_later(QUIET_S, self._look)
        self._loop.call_soon(self._tell)
        try:
            transport.write_eof()
        except OSError:  # the caller has gone
            self.end()

    def end(self) -> None:
        """Close the connection. What has come meanwhile is read first: it would reset the connection."""
        _lingering.pop(self, None)
        self._timer.cancel()
        with contextlib.suppress(OSError, ValueError):
            os.read(self._transport.get_extra_info("socket").fileno(), _PIECE)
        self._transport.close()

    def _tell(self) -> None:
        """For the protocol the connection is over, unless it has an answer on its way."""
        if not self._transport.get_write_buffer_size():
            protocol, self._protocol = self._protocol, asyncio.Protocol()
            protocol.connection_lost(None)

    def _look(self) -> None:
        if self._came and self._loop.time() < self._ends_at:
            self._came = False
            self._timer = self._loop.call_later(QUIET_S, self._look)
        else:
            self.end()

    def data_received(self, data: bytes) -> None:  # noqa: ARG002 - the protocol's
        self._came = True
        if self in _lingering:
            _lingering.move_to_end(self)

    def eof_received(self) -> None:
        self.end()

    def connection_lost(self, exc: Exception | None) -> None:
        _lingering.pop(self, None)
        self._timer.cancel()
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()
