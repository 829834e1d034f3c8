"""
One HTTP exchange: a plain call of a function, from the head of its request to the end of its answer.

It never becomes ASGI: no scope, no message, no task. A quick call is an `HttpExchange`, the coroutine that runs it, and
one write.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Final, Self

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from gpufaas_core.driven import Driven
from gpufaas_core.errors import CallCancelled
from gpufaas_core.units import Bytes, KiB, Seconds
from gpufaas_gateway.answer_stream import AnswerStream, BrokenAnswer
from gpufaas_gateway.answering import Answer, let_go
from gpufaas_gateway.call_headers import BODILESS, Header, ReadHead
from gpufaas_gateway.fronts.target import Target
from gpufaas_gateway.http.body_receiver import BodyReceiver
from gpufaas_gateway.http.bounds import BoundedHttp
from gpufaas_gateway.request import Request

log = logging.getLogger("gateway")

_COPIED: Final[Bytes] = 64 * KiB
"""A larger piece is written by itself: to join it to what frames it would copy it."""
_FAILED: Final = (
    b"content-type: text/plain; charset=utf-8\r\ncontent-length: 21\r\nconnection: close\r\n\r\nInternal Server Error"
)


@dataclass(eq=False, slots=True)
class HttpFront:
    """What the connections of a server need to serve calls."""

    target: Callable[[bytes, bytes], Target | None]
    """Returns what path and query of a call say; None: the request is for the application."""
    admits: Callable[[str], bool] = lambda _: True
    """Whether calls from this address are served here; all others are left to the application."""
    _starts: dict[int, bytes] = field(default_factory=dict)
    _starts_with: list[Header] = field(default_factory=list)

    def start_of(self, status: int, headers: list[Header]) -> bytes:
        """Return the first lines of an answer. *headers*: those of the server, a new list whenever they change."""
        if headers is not self._starts_with:
            self._starts, self._starts_with = {}, headers
        found = self._starts.get(status)
        if found is None:
            lines = (b"%b: %b\r\n" % pair for pair in headers)
            found = self._starts[status] = STATUS_LINE[status] + b"".join(lines)
        return found


class HttpExchange(Driven):
    """
    See module. It is the `Caller` of its call, and drives it; to uvicorn it is a `Cycle`, and the task that serves it:
    a server that stops waits for what is in its tasks, and cancels it in the end.
    """

    __slots__ = (
        "_connection", "_front", "_left", "_news", "_sent_at", "_tell", "_waiter", "body", "chunked_encoding",
        "disconnected", "headers", "keep_alive", "method", "more_body", "read", "response_complete",
        "response_started", "target", "waiting_for_100_continue",
    )  # fmt: skip

    def __init__(
        self, connection: BoundedHttp, front: HttpFront, target: Target, method: str, headers: list[Header],
        read: ReadHead, *, expects: bool = False, keep_alive: bool = True,
    ) -> None:  # fmt: skip
        """:param expects: the caller sends the body when we say that we read it"""
        super().__init__(connection.loop)
        self.keep_alive = keep_alive
        self.waiting_for_100_continue = expects
        self.body: bytes | bytearray = b""
        """What came of the body and was not received yet."""
        self.more_body = True
        self.disconnected = self.response_started = self.response_complete = False
        self.chunked_encoding: bool | None = False
        self._connection = connection
        self._front = front
        self.target = target
        self.method = method
        self.headers = headers
        self.read = read
        self._left: float = inf
        """The bytes that are left of the declared length of an answer that streams, if one was declared."""
        self._sent_at = -1.0
        """The turn of the loop in which a piece of the answer was sent."""
        self._news = False
        """Something of the body, or its end, has come and was not received yet."""
        self._tell: Callable[[], None] | None = None
        self._waiter: asyncio.Future[None] | None = None

    def begin(self) -> None:
        """Run the call, with the body if all of it has come."""
        target, body = self.target, None
        if not (self.more_body or self.disconnected or self.waiting_for_100_continue):
            body, self.body = bytes(self.body), b""
            self._news = False
        self._connection.tasks.add(self)  # type: ignore[arg-type]
        request = Request(
            target.name, self.method, target.path, target.query, self.headers, body, self, self._connection.client,
            target.outer, read=self.read, driven=self,
        )  # fmt: skip
        self.drive(self._serve(request))

    def ended(self) -> None:
        self._connection.tasks.discard(self)

    # --- the connection's side ---

    @property
    def message_event(self) -> Self:
        """uvicorn sets it when the connection is lost."""
        return self

    def on_body(self, piece: bytes) -> None:
        if self.response_complete:
            return
        if not self.body:
            self.body = piece
        else:
            if type(self.body) is bytes:
                self.body = bytearray(self.body)
            self.body += piece
        if len(self.body) > HIGH_WATER_LIMIT:
            self._connection.flow.pause_reading()
        self.set()

    def on_body_end(self) -> None:
        if not self.response_complete:
            self.more_body = False
            self.set()

    def gone(self) -> None:
        """The connection is lost."""
        self.disconnected = not self.response_complete
        self.set()
        tell, self._tell = self._tell, None
        if tell is not None:
            tell()

    def set(self) -> None:
        """Wake who receives the body."""
        self._news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- `Caller` ---

    async def receive(self) -> tuple[bytes, bool]:
        connection = self._connection
        if self.waiting_for_100_continue and not connection.transport.is_closing():
            connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.waiting_for_100_continue = False
        if not self.disconnected and not self.response_complete:
            connection.flow.resume_reading()
            while not self._news:
                self._waiter = connection.loop.create_future()
                await self._waiter
            self._news = False
        if self.disconnected or self.response_complete:
            raise CallCancelled("the caller went away")
        piece, self.body = bytes(self.body), b""
        return piece, self.more_body

    async def fill(self, into: memoryview, first: bytes, within_s: Seconds | None) -> Bytes:
        """See `body_memory.Filler`."""
        connection, at = self._connection, len(first)
        if not self.keep_alive or not self.more_body or self.disconnected or connection.transport.is_closing():
            return 0
        end = at + len(self.body)
        into[:at], into[at:end] = first, self.body
        self.body, self._news = b"", False
        receiver = BodyReceiver(connection, into, end, self.on_body, self.set)
        timer = None if within_s is None else connection.loop.call_later(within_s, receiver.stop_filling)
        try:
            while receiver.filling and not self.disconnected:
                self._waiter = connection.loop.create_future()
                await self._waiter
        finally:
            receiver.stop_filling()
            if timer is not None:
                timer.cancel()
        self._news = bool(self.body)
        if self.disconnected:
            raise CallCancelled("the caller went away")
        return receiver.filled

    def on_gone(self, tell: Callable[[], None] | None) -> bool:
        if self.disconnected:
            return False
        if tell is not None:
            self._connection.flow.resume_reading()  # else nobody notices the end of the connection
        self._tell = tell
        return True

    # --- the answer ---

    async def _serve(self, request: Request) -> None:
        try:
            answer = await self.target.run(request, self._send_early)
            if answer.stream is not None:
                with answer.stream as stream:
                    await self._pass_on(answer, stream)
            elif not self.response_started:
                await self._drained()
                self._send(answer)
            if not self.disconnected:
                self.response_complete = True
                self.waiting_for_100_continue = False
                self.set()
                if not self.keep_alive:
                    self._connection.transport.close()
                self._connection.on_response_complete()
        except (CallCancelled, BrokenAnswer, asyncio.CancelledError) as exc:
            let_go(exc)  # the caller is gone; or the connection is closed, which is the message
        except Exception:
            log.exception("a request failed in the platform itself: /function/%s", self.target.name)
        finally:
            if not self.response_complete:
                self._break_off()

    async def _drained(self) -> None:
        """Return when there is room for more of the answer, or the caller is gone."""
        flow = self._connection.flow
        if flow.write_paused and not self.disconnected:
            await flow.drain()

    def _send_early(self, answer: Answer) -> None:
        if not self._connection.flow.write_paused:
            self._send(answer)

    def _send(self, answer: Answer) -> None:
        """Send an answer that does not stream."""
        if self.disconnected:
            return
        body = b"" if self.method == "HEAD" else answer.body
        head = self._head(answer)
        if self.chunked_encoding:
            body = (b"%x\r\n%b\r\n" % (len(body), bytes(body)) if body else b"") + b"0\r\n\r\n"
        self.response_started = True
        transport = self._connection.transport
        if len(body) <= _COPIED:
            transport.write(head + body)
        else:
            transport.writelines((head, body))

    async def _pass_on(self, answer: Answer, stream: AnswerStream) -> None:
        """Send an answer piece by piece, each in one write."""
        if self._connection.flow.write_paused:
            await self._drained()
        head = self._head(answer)
        if not self.disconnected:
            self.response_started = True
            self._connection.transport.write(head)
        if self.method == "HEAD":
            stream.cancel()  # an answer to HEAD has no body, and the function's may have no end
            return
        stream.pour(self._send_next)
        while (piece := await stream.chunk()) is not None:
            if self._connection.flow.write_paused:
                await self._drained()
            if not self.disconnected and piece:
                self._send_piece(piece)
        if not self.disconnected:
            if self.chunked_encoding:
                self._connection.transport.write(b"0\r\n\r\n")
            elif self._left not in (0, inf):
                raise RuntimeError("an answer is shorter than its Content-Length")

    def _send_next(self, piece: bytes) -> bool:
        """
        Send a piece as it comes, without a turn of the loop. False: it has to wait, or was not the first one that came
        in this turn: those of one turn are sent together, unless they are large.
        """
        now, size = self._loop.time(), len(piece)
        if not self._paused or self._connection.flow.write_paused or self._left < size:
            return False
        if now == self._sent_at and size <= _COPIED:
            return False
        self._sent_at = now
        if not self.disconnected:
            self._send_piece(piece)
        return True

    def _send_piece(self, piece: bytes) -> None:
        """:raises RuntimeError: it is more than the answer's declared length"""
        transport = self._connection.transport
        if not self.chunked_encoding:
            self._left -= len(piece)
            if self._left < 0:
                raise RuntimeError("an answer is longer than its Content-Length")
            transport.write(piece)
        elif len(piece) <= _COPIED:
            transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        else:
            transport.writelines((b"%x\r\n" % len(piece), piece, b"\r\n"))

    def _head(self, answer: Answer) -> bytes:
        """
        Return the head of *answer*. It settles how long the body is, or that it goes in chunks.

        :raises RuntimeError: a header has a line break
        """
        start = self._front.start_of(answer.status, self._connection.server_state.default_headers)
        if answer.lines:
            return start + answer.lines + (b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
        chunked, lines = self.method != "HEAD" and answer.status not in BODILESS, [start]
        for name, value in answer.headers:
            lines.append(b"%b: %b\r\n" % (name, value))
            if name == b"content-length":
                chunked, self._left = False, int(value)
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        if chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        self.chunked_encoding = chunked
        ends = start.count(b"\n") + len(lines)
        lines.append(b"\r\n")
        head = b"".join(lines)
        if head.count(b"\n") != ends or head.count(b"\r") != ends:
            raise RuntimeError("a header of an answer has a line break")
        return head

    def _break_off(self) -> None:
        """There is no answer, or only a part of one. The caller must not take it for whole."""
        if self.disconnected:
            return
        connection = self._connection
        if not self.response_started:
            connection.transport.write(self._front.start_of(500, connection.server_state.default_headers) + _FAILED)
            self.response_complete = True
        connection.transport.close()
