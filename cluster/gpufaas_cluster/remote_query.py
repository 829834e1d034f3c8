"""A query to a node elsewhere, and what it answers."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

import msgspec

from gpufaas_cluster.call_connection import CallLane
from gpufaas_cluster.call_heads import ErrorHead, QueryHead
from gpufaas_cluster.connection import NotReached
from gpufaas_cluster.error_codes import make_error
from gpufaas_core.errors import GpufaasError
from gpufaas_core.wire.kinds import Kind

_decode_error: Final = msgspec.msgpack.Decoder(ErrorHead).decode


class RemoteQuery:
    """See `NodeClient.ask` and `ask_lines`. It is a `LaneUser`."""

    brief = False

    def __init__(self, what: str, value: object) -> None:
        self.gone = False
        """The query is answered, or was cancelled."""
        self._head = QueryHead(what)
        self._value = msgspec.msgpack.encode(value)
        self._lane: CallLane | None = None
        self._pieces: asyncio.Queue[bytes | GpufaasError | None] = asyncio.Queue()
        """Those that have come; behind them the error, or None, with which the answer ends."""

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """
        Yield the answer in pieces as they come. Its node sends more as they are taken; none, once this is closed.

        :raises NotReached: the node is not there, or was lost
        :raises GpufaasError: its error
        """
        try:
            while (piece := await self._pieces.get()) is not None:
                if isinstance(piece, GpufaasError):
                    raise piece
                if self._lane is not None and self._pieces.empty():
                    self._lane.resume()
                    self._lane.pause()
                yield piece
        finally:
            self._cancel()

    def _cancel(self) -> None:
        """Want no answer any more. Nothing once there is one."""
        if not self.gone and self._lane is not None:
            self._lane.send(Kind.CANCEL)
            self._lane.resume()
        self.gone = True

    def _end(self, error: GpufaasError | None) -> None:
        if self._lane is not None:
            self._lane.resume()
        self.gone, self._lane = True, None
        self._pieces.put_nowait(error)

    # --- the lane's side ---

    def sent_on(self, lane: CallLane) -> None:
        self._lane = lane
        lane.pause()
        lane.send(Kind.ASK, self._head, self._value)

    def not_sent(self, reason: str) -> None:
        self._end(NotReached(reason))

    def go_on(self) -> None:
        """All that it says was sent."""

    def on_lost(self, reason: str) -> None:
        self._end(NotReached(f"the node was lost: {reason}"))

    def on_frame(self, kind: int, header: bytes, body: bytes) -> None:
        if kind in (Kind.CHUNK, Kind.REPLY) and not self.gone:
            self._pieces.put_nowait(body)
        if kind == Kind.ERROR:
            head = _decode_error(header)
            self._end(make_error(head.name, head.message, head.retry_after_s))
        elif kind in (Kind.REPLY, Kind.END):
            self._end(None)
