"""What both ends of a connection between gateway and node do: read frames, and write as far as the other end takes."""

import asyncio
from typing import Final, cast

import msgspec

from gpufaas_core.steps import IllegalStep
from gpufaas_core.wire.prefix import BrokenFrame, FrameReader, encode_prefix

_SHORT: Final = 16 * 1024
"""Bytes of a body that are copied, to be sent with its header in one system call."""
_HELD: Final = 16
"""Frames that go out together at most: the other end begins meanwhile."""


class FrameConnection(asyncio.Protocol):
    """One end. Its kinds say what frames mean (`on_frame`), and what to do about bytes that are no frame."""

    def __init__(self, lanes: int = 1) -> None:
        """:param lanes: so many calls may be on it at once; the slot of a frame says of which it is"""
        self.full = False
        """The other end does not take more for now."""
        self.lost = False
        self._reader = FrameReader(lanes=lanes)
        self.running = 0
        """Calls that are on it. If there are several, the small frames of one turn of the loop go out together."""
        self._held: list[bytes] = []
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._drained: asyncio.Future[None] | None = None

    def on_frame(self, kind: int, header: bytes, body: bytes) -> None:
        """:raises BrokenFrame, IllegalStep, msgspec.DecodeError: the frame makes no sense, or none now"""
        raise NotImplementedError

    def broken(self, error: Exception) -> None:
        """The other end has sent what is no frame: end the connection."""
        raise NotImplementedError

    @property
    def usable(self) -> bool:
        return not self.lost and not self._transport.is_closing()

    def send(
        self, kind: int, head: msgspec.Struct | None = None, body: bytes | memoryview = b"", lane: int = 0
    ) -> None:
        """Send a frame; nothing once the connection is lost."""
        if self.lost:
            return
        held = self._held
        prefix = encode_prefix(kind, head, len(body), lane)
        if len(body) > _SHORT:
            self._flush()
            self._transport.write(prefix)
            self._transport.write(body)
        elif self.running > 1 or held:
            held.append(prefix + body)
            if len(held) == 1:
                asyncio.get_running_loop().call_soon(self._flush)
            elif len(held) == _HELD:
                self._flush()
        else:
            self._transport.write(prefix + body)

    def _flush(self) -> None:
        held = self._held
        if held and not self.lost:
            self._transport.write(b"".join(held))
        held.clear()

    async def drain(self) -> None:
        """Wait until there is room for more, or the connection is lost."""
        while self.full and not self.lost:
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained

    def close(self) -> None:
        """End it; what was sent before still goes out."""
        self._flush()
        self._transport.close()

    # --- asyncio's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from asyncio's

    def data_received(self, data: bytes) -> None:
        try:
            for kind, header, body in self._reader.feed(data):
                self.on_frame(kind, header, body)
        except (BrokenFrame, IllegalStep, msgspec.DecodeError) as exc:
            self.broken(exc)

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's
        self.lost = True
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
