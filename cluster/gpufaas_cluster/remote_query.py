"""A query to a node elsewhere, and what it answers."""

import asyncio
from typing import Any, Final

import msgspec

from gpufaas_cluster.call_connection import CallLane, LaneBuffer
from gpufaas_cluster.call_heads import ErrorHead, QueryHead
from gpufaas_cluster.connection import NotReached
from gpufaas_cluster.error_codes import make_error
from gpufaas_core.errors import GpufaasError
from gpufaas_core.wire.heads import EndHead
from gpufaas_core.wire.kinds import Kind

_decode_error: Final = msgspec.msgpack.Decoder(ErrorHead).decode


class RemoteQuery(LaneBuffer):
    """See `NodeClient.ask` and `ask_lines`. `reply` returns the answer whole, `chunk` in pieces as they come."""

    def __init__(self, what: str, value: Any) -> None:
        super().__init__(asyncio.get_running_loop())
        self.gone = False
        """It is answered, or was cancelled."""
        self._head = QueryHead(what)
        self._value = msgspec.msgpack.encode(value)

    async def reply(self) -> bytes:
        """
        Return what the node answers.

        :raises NotReached: the node is not there, or was lost
        :raises GpufaasError: its error
        """
        pieces = []
        try:
            while (piece := await self.chunk()) is not None:
                pieces.append(piece)
        finally:
            self.cancel()
        return b"".join(pieces)

    def cancel(self) -> None:
        """Want no answer any more. Nothing once there is one."""
        if not self.gone and self._lane is not None:
            self._lane.send(Kind.CANCEL)
            self._resume()
        self.gone = True
        self._chunks.clear()

    def _end(self, error: GpufaasError | None) -> None:
        self._resume()
        self.gone, self._lane, self._error, self.end = True, None, error, EndHead(0.0)
        self._wake_reader()

    # --- the lane's side ---

    brief = False

    def sent_on(self, lane: CallLane) -> None:
        self._lane = lane
        lane.send(Kind.ASK, self._head, self._value)

    def not_sent(self, reason: str) -> None:
        self._end(NotReached(reason))

    def go_on(self) -> None:
        """All that it says was sent."""

    def on_lost(self, reason: str) -> None:
        self._end(NotReached(f"the node was lost: {reason}"))

    def on_frame(self, kind: int, header: bytes, body: bytes) -> None:
        if kind in (Kind.CHUNK, Kind.REPLY) and not self.gone:
            self._keep(body)
            self._wake_reader()
        if kind == Kind.ERROR:
            head = _decode_error(header)
            self._end(make_error(head.name, head.message, head.retry_after_s))
        elif kind in (Kind.REPLY, Kind.END):
            self._end(None)
