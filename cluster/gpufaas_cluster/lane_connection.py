"""
What both ends of a connection between gateway and node do: frames in, to its lanes; frames out, together where that
saves writes.

A gateway has two to each node, and any number of calls at once on each: one for small calls, and one for what is large,
streams, or asks, whose pieces would hold up small calls beside it.
"""

import asyncio
import logging
from collections import deque
from typing import Final, Generic, Protocol, TypeVar, cast

import msgspec

from gpufaas_core.model import Bytes
from gpufaas_core.steps import IllegalStep
from gpufaas_core.wire.prefix import KIND, LANE, LANES, BrokenFrame, FrameReader, encode_prefix

log = logging.getLogger("calls")

_SHORT: Final = 16 * 1024
"""Bytes of a body that are copied, to be sent with its header in one system call."""
_HELD: Final = 16
"""Frames that go out together at most: the other end begins meanwhile."""


class Lane(Protocol):
    """One end of a lane, as its connection calls it."""

    def on_frame(self, kind: int, header: bytes, body: bytes) -> None:
        """:raises BrokenFrame, IllegalStep, msgspec.DecodeError: the frame makes no sense, or none now"""

    def go_on(self) -> None:
        """The connection takes more again."""

    def lose(self, why: str) -> None:
        """The connection is over."""


LaneT = TypeVar("LaneT", bound=Lane)


class LaneConnection(asyncio.Protocol, Generic[LaneT]):
    """One end."""

    def __init__(self, peer: str, window: Bytes) -> None:
        """
        :param peer: what a log calls the other end
        :param window: the credit that answers have on each lane
        """
        self.window = window
        self.lanes: dict[int, LaneT] = {}
        """Those that were used, by their number."""
        self.full = False
        """The other end does not take more for now."""
        self.lost = False
        self.running = 0
        """Calls that are on it. If there are several, the small frames of one turn of the loop go out together."""
        self._peer = peer
        self._turns: deque[LaneT] = deque()
        """The lanes, in the order in which they go on."""
        self._reader = FrameReader(lanes=LANES)
        self._held: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._why = ""

    def new_lane(self, number: int) -> LaneT:
        """Return the lane of that number, of which a frame has come for the first time. :raises BrokenFrame: no"""
        raise NotImplementedError

    def add(self, number: int, lane: LaneT) -> None:
        """*lane* is used from now on."""
        self.lanes[number] = lane
        self._turns.append(lane)

    @property
    def usable(self) -> bool:
        return not self.lost and self._transport is not None and not self._transport.is_closing()

    def send(self, kind: int, head: msgspec.Struct | None, body: bytes | memoryview, lane: int) -> None:
        """Send a frame; nothing once the connection is lost."""
        if self.lost:
            return
        held, transport = self._held, self._transport
        assert transport is not None
        prefix = encode_prefix(kind, head, len(body), lane)
        if len(body) > _SHORT:
            self._flush()
            transport.write(prefix)
            transport.write(body)
        elif self.running > 1 or held:
            held.append(prefix + body)
            if len(held) == 1:
                asyncio.get_running_loop().call_soon(self._flush)
            elif len(held) == _HELD:
                self._flush()
        else:
            transport.write(prefix + body)

    def _flush(self) -> None:
        held = self._held
        if held and not self.lost and self._transport is not None:
            self._transport.write(b"".join(held))
        held.clear()

    def close(self) -> None:
        """End it; what was sent before still goes out."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self, why: str) -> None:
        """End it at once; what is on its lanes is told *why*."""
        self._why = self._why or why
        if self._transport is not None:
            self._transport.abort()
        self._lose()

    def _lose(self) -> None:
        self.lost = True
        for lane in list(self._turns):
            lane.lose(self._why)

    # --- asyncio's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from asyncio's

    def data_received(self, data: bytes) -> None:
        lanes = self.lanes
        try:
            for kind, header, body in self._reader.feed(data):
                lane = lanes.get(kind >> LANE) or self.new_lane(kind >> LANE)
                lane.on_frame(kind & KIND, header, body)
        except (BrokenFrame, IllegalStep, msgspec.DecodeError) as exc:
            log.warning("%s sent what is no frame, or none that comes now: %s", self._peer, exc)
            self.abort(f"it sent what is no frame, or none that comes now: {exc}")

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False
        self._turns.rotate(-1)  # none is always the first
        for lane in list(self._turns):
            if self.full:
                return
            lane.go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self._why = self._why or (str(exc) if exc else "the other end closed the connection")
        self._lose()
