"""A call at a node elsewhere: the gateway's end (port: `ports.CallExchange`)."""

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec

from gpufaas_cluster.call_connection import CallLane
from gpufaas_cluster.call_heads import ErrorHead, NodeAnswerHead, NodeCallHead
from gpufaas_cluster.error_codes import make_error
from gpufaas_cluster.placed_call import PlacedCall
from gpufaas_core.answer_buffer import AnswerBuffer
from gpufaas_core.errors import GpufaasError, GrantRefused, StorageFailed, WorkerCrashed
from gpufaas_core.messages import Grant
from gpufaas_core.units import Bytes
from gpufaas_core.wire.bodies import CHUNK_BYTES, FILE, INLINE, pieces_of
from gpufaas_core.wire.heads import CallHead, EndHead
from gpufaas_core.wire.kinds import Kind, name_of
from gpufaas_core.wire.prefix import BrokenFrame

_decode_answer: Final = msgspec.msgpack.Decoder(NodeAnswerHead).decode
_decode_end: Final = msgspec.msgpack.Decoder(EndHead).decode
_decode_failure: Final = msgspec.msgpack.Decoder(ErrorHead).decode

BUFFER: Final[Bytes] = 256 * 1024
"""Bytes of an answer that wait here for a slow reader; more stay with the node."""
_BRIEF: Final[Bytes] = 64 * 1024
"""A body of more goes beside what is large, so that small calls do not wait behind it."""

OnUnreachable = Callable[[Grant, str], None]
"""Called with a grant and a reason when its node could not be reached: nothing was sent."""


class RemoteExchange(AnswerBuffer):
    """See module."""

    __slots__ = (
        "_body", "_cancelled", "_head", "_kept", "_lane", "_on_unreachable", "_over", "_roomy", "_sender",
        "grant",
    )  # fmt: skip

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_unreachable: OnUnreachable,
        grant: Grant,
        head: CallHead,
        body: bytes | memoryview,
        kept: PlacedCall | None = None,
    ) -> None:
        """:param kept: what has *grant*, if that may be kept"""
        super().__init__(loop, BUFFER)
        self.grant = grant
        self._lane: CallLane | None = None
        """While the answer is waited for."""
        self._kept = kept
        self._on_unreachable = on_unreachable
        self._head = head
        self._body = body
        self._over = False
        """The node has sent the last frame, or is gone."""
        self._cancelled = False
        self._roomy: asyncio.Future[None] | None = None
        """The sender of the body waits for room."""
        self._sender: asyncio.Task[None] | None = None

    # --- the gateway's side ---

    async def send_body(self, piece: bytes) -> None:
        """
        Send a piece of a streamed body; wait while the worker does not read. Does nothing once the call is over.

        :raises GrantRefused: nothing was taken; send this piece again under the next grant
        """
        for part in pieces_of(piece):
            if (lane := await self._may_send()) is None:
                return
            lane.send(Kind.BODY, None, part)

    def when_runs(self, tell: Callable[[], None]) -> None:
        self.on_run = tell
        if not (self.grant.cold or self.grant.load_s):
            tell()  # its node does not

    async def end_body(self) -> None:
        """:raises GrantRefused: as `send_body`"""
        if (lane := await self._may_send()) is not None:
            lane.send(Kind.BODY_END)

    def fail(self, error: GpufaasError) -> None:
        """Raise *error* to readers and senders, and cancel the call at the node."""
        if self.error is None:
            self.error = error
        if not self._over and not self._cancelled:
            self._cancelled = True
            self._chunks.clear()
            self._stop_sending()
            if self._lane is not None:
                self._lane.send(Kind.CANCEL)
                self._resume()
        self._wake()

    async def _may_send(self) -> CallLane | None:
        """Wait until more of the body may be sent; None: the call is over. :raises GrantRefused: as `send_body`"""
        while self.error is None and not self._over:
            if self._lane is not None and not self._lane.full:
                return self._lane
            self._roomy = self._loop.create_future()
            await self._roomy
        if isinstance(self.error, GrantRefused):
            raise self.error
        return None

    def _wake(self) -> None:
        self._wake_reader()
        self.go_on()

    def go_on(self) -> None:
        if self._roomy is not None and not self._roomy.done():
            self._roomy.set_result(None)

    def _pause_source(self) -> bool:
        if self._lane is not None:
            self._lane.pause()
        return self._lane is not None

    def _resume_source(self) -> None:
        if self._lane is not None:
            self._lane.resume()

    # --- the lane's side ---

    @property
    def gone(self) -> bool:
        return self._cancelled

    @property
    def brief(self) -> bool:
        return self._head.body_mode == INLINE and len(self._body) <= _BRIEF

    def sent_on(self, lane: CallLane) -> None:
        self._lane = lane
        head, grant = self._head, self.grant
        if self._kept is None:
            call, lane.known = NodeCallHead(grant, head), None
        else:
            call, lane.known = NodeCallHead(None if lane.known is grant else grant, head, self._kept.calls), grant
        body, self._body = self._body, b""
        lane.send(Kind.CALL, call, body)
        if head.body_mode != INLINE:
            lane.body_follows()
        if head.body_mode == FILE:
            self._sender = self._loop.create_task(self._send_file(head.body_path))

    def not_sent(self, reason: str) -> None:
        self._over = True
        if not self._cancelled:
            self._on_unreachable(self.grant, reason)
            self.fail(GrantRefused(reason))

    def on_lost(self, reason: str) -> None:
        assert self._lane is not None
        name = self._lane.connection.node
        self._finish()
        self.fail(WorkerCrashed(f"node {name} was lost during the call, which may have run there: {reason}"))

    def on_frame(self, kind: int, header: bytes, body: bytes) -> None:
        if kind == Kind.ANSWER or kind == Kind.HEAD:
            answer = _decode_answer(header)
            whole = kind == Kind.ANSWER
            if answer.kept and self._kept is not None:
                self._kept.on_answer(answer.head.run_s)
            if not self._cancelled:
                self.load_s, self.phases, self.tier = answer.load_s, answer.phases, answer.tier
                if answer.grant is not None:
                    self.grant = answer.grant
                self._chunks.append((answer.head, body, whole))
            if whole:
                self._finish()
            self._wake()
        elif kind == Kind.CHUNK:
            if not self._cancelled:
                self._pass_or_keep(body)
        elif kind == Kind.RUNS:
            if self.on_run is not None:
                self.on_run()
        elif kind == Kind.END:
            self.end = end = _decode_end(header)
            self._finish()
            if end.error and not self._cancelled:
                self.fail(GpufaasError(f"the function's answer broke off: {end.error}"))
            self._wake()
        elif kind == Kind.REFUSED or kind == Kind.ERROR:
            failure = _decode_failure(header)
            self.load_s, self.phases, self.tier = failure.load_s, failure.phases, failure.tier
            self._finish()
            self.fail(make_error(failure.name, failure.message, failure.retry_after_s))
        else:
            raise BrokenFrame(f"{name_of(kind)} in answer to a call")

    def _finish(self) -> None:
        self._resume()
        self._over = True
        self._lane = None
        self._stop_sending()

    def _stop_sending(self) -> None:
        if self._sender is not None:
            self._sender.cancel()
            self._sender = None

    async def _send_file(self, path: str) -> None:
        try:
            with open(path, "rb", buffering=0) as file:  # noqa: ASYNC230 - in the page cache: just written
                while piece := file.read(CHUNK_BYTES):
                    await self.send_body(piece)
                    await asyncio.sleep(0)  # other calls come between the pieces
            await self.end_body()
        except OSError as exc:
            self._sender = None
            self.fail(StorageFailed(f"the body could not be read from {path} ({exc.strerror}): call again"))
