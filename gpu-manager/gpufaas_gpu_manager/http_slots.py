"""
Calls as HTTP requests to a worker that listens on a port: one connection per slot, kept alive, one call at a time.

A quick call is a request in one write and an answer in one read, without a task, timer or future. A task is made only
to connect, and to send a body that is in a file. After a switch of protocols (WebSocket) a connection carries bytes
that are not parsed, until it ends.
"""

import asyncio
import os
import socket
import time
from typing import Final, cast

from gpufaas_core.errors import BadAnswer
from gpufaas_core.loopback import count_unread, unpace
from gpufaas_core.model import Seconds
from gpufaas_core.plausible import why_no_answer
from gpufaas_core.wire.bodies import FILE, STREAM, UPGRADE
from gpufaas_core.wire.heads import AnswerHead, CallHead, EndHead
from gpufaas_functions.body_file import BodyFile
from gpufaas_gpu_manager.exchange import Exchange
from gpufaas_gpu_manager.http_messages import SWITCHED, AnswerParser, BadHttp, chunk, declared_length, request_head
from gpufaas_gpu_manager.last_calls import lose
from gpufaas_gpu_manager.node_call import HOLD, SEND
from gpufaas_gpu_manager.proc import is_exiting
from gpufaas_gpu_manager.worker import Worker

SHORT: Final = 16 * 1024
"""An answer of this length at most is passed on whole if it comes whole; a request's body is sent with its head."""
_WHOLE_WITHIN_S: Final[Seconds] = 0.005
"""Many servers send a head and its short body in two writes: so long after the first, the answer is passed on in
parts."""
_PIECE: Final = 256 * 1024
_IDLE_S: Final[Seconds] = 1.0
"""A connection that was idle for longer is not used again: servers close idle ones, some after two seconds, and a call
sent at that moment is lost if it may not be sent twice. A new connection costs 0.1 ms."""
_CONNECT_S: Final[Seconds] = 5.0
HERE: Final = "127.0.0.1"
"""The host of workers that are processes. The process of a container may be one of another machine, unknown here."""
_IDEMPOTENT: Final = frozenset(("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE"))


async def connected(path: str) -> socket.socket:
    """
    Connect to the unix socket at *path*. A link there is not followed: its worker may have made it, to another's.

    :raises OSError: none accepts there
    """
    place, made = os.open(path, os.O_PATH | os.O_NOFOLLOW), socket.socket(socket.AF_UNIX)
    try:
        made.setblocking(False)
        await asyncio.get_running_loop().sock_connect(made, f"/proc/self/fd/{place}")
    except BaseException:
        made.close()
        raise
    finally:
        os.close(place)
    return made


class HttpSlot:
    """`Slot`: at most one call at a time to ``host:port``. Connects when it has to."""

    def __init__(self, worker: Worker, host: str, port: int) -> None:
        self._worker = worker
        self._host = host
        self._port = port
        self.loop = worker.loop
        self.unix = ""
        """The path of the unix socket on which it listens in place of the port."""
        self._connection: _ProgramConnection | None = None
        self.exchange: Exchange | None = None
        self._head: CallHead | None = None
        self._body: bytes | memoryview = b""
        self._begun_at = 0.0
        self._chunked = False
        self._sending = False
        """The request is not completely sent: its connection cannot carry another."""
        self._may_retry = False
        self._taken: list[tuple[bytes, bytes]] | None = None
        """The headers of the last answer, which is a valid one. If they are the same list again, so is the next."""
        self._task: asyncio.Task[None] | None = None
        self._connected = asyncio.Event()
        """For the caller that streams a body and waits for the connection."""

    @property
    def expects(self) -> bool:
        """Whether something of an answer may still come."""
        return self.exchange is not None and self._connection is not None

    def begin(self, exchange: Exchange, head: CallHead, body: bytes | memoryview) -> None:
        self.exchange = exchange
        self._head = head
        self._body = body
        self._begun_at = now = time.monotonic()
        exchange.once = head.body_mode == STREAM
        connection = self._connection
        if connection is not None and not connection.lost and now - connection.idle_since < _IDLE_S:
            self._may_retry = head.body_mode != STREAM and head.method in _IDEMPOTENT
            self._send(connection, head, body)
        else:
            self._may_retry = False
            self.close()
            if head.body_mode != STREAM:
                exchange.step(HOLD)  # the worker may die before the connection is there
            self._task = self.loop.create_task(self._connect(head, body))

    def cancel(self, exchange: Exchange) -> None:
        """No caller waits any more: close the connection, by which the server knows."""
        if exchange is self.exchange:
            self.close()
            self._over(exchange, ok=False)

    async def send_body(self, piece: bytes) -> None:
        connection = self._connection or await self._ready()
        if connection is not None:
            await connection.write(chunk(piece) if self._chunked else piece)

    async def end_body(self) -> None:
        connection = self._connection or await self._ready()
        if connection is not None:
            self._sending = False
            if self._chunked:
                await connection.write(b"0\r\n\r\n")

    def pause(self) -> None:
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        if self._connection is not None:
            self._connection.resume()

    def hear_out(self) -> bool:
        """The server is gone: read all that it has sent, at any pace of the caller. Return whether some of it waits."""
        return self._connection is not None and self._connection.hear_out()

    async def _ready(self) -> "_ProgramConnection | None":
        """Wait for the connection of the call that is being begun; None: there will be none."""
        if self._task is None or self.exchange is None:
            return None
        exchange = self.exchange
        self._connected.clear()
        await self._connected.wait()
        return self._connection if self.exchange is exchange else None

    async def _connect(self, head: CallHead, body: bytes | memoryview) -> None:
        try:
            async with asyncio.timeout(_CONNECT_S):
                if self.unix:
                    own = await connected(self.unix)
                    connecting = self.loop.create_unix_connection(lambda: _ProgramConnection(self), sock=own)
                else:
                    connecting = self.loop.create_connection(lambda: _ProgramConnection(self), self._host, self._port)
                _, connection = await connecting
        except TimeoutError:
            self._broke(f"it did not accept a connection to its port {self._port} within {_CONNECT_S:g} s")
        except OSError as exc:
            self._broke(f"it did not accept a connection to its port {self._port} ({exc.strerror or exc})")
        else:
            self._task = None
            if connection.lost:
                self._broke("it closed the connection at once")
            elif self._host == HERE and (pid := self._worker.pid) is not None and is_exiting(pid):
                connection.close()
                self._broke("it was about to end")
            else:
                self._connection = connection
                if self.exchange is not None:
                    self.exchange.step(SEND)
                self._send(connection, head, body)
        self._connected.set()

    def _send(self, connection: "_ProgramConnection", head: CallHead, body: bytes | memoryview) -> None:
        mode = head.body_mode
        self._sending = mode in (STREAM, FILE)
        self._chunked = False
        connection.expect(head.method, mode == UPGRADE)
        if (exchange := self.exchange) is not None and exchange.file is not None:
            self._task = self.loop.create_task(self._send_file(connection, head, exchange.file))
            return
        length = declared_length(head) if mode == STREAM else len(body)
        request = request_head(head, length)
        if length is None:
            self._chunked = True
            connection.transport.write(request + chunk(body) if body else request)
        elif len(body) <= SHORT:
            connection.transport.write(request + body)
        else:
            connection.transport.write(request)
            connection.transport.write(body)

    async def _send_file(self, connection: "_ProgramConnection", head: CallHead, file: BodyFile) -> None:
        try:
            length = len(file)
            await connection.write(request_head(head, length))
            for at in range(0, length, _PIECE):
                await connection.write(file.read(at, _PIECE))  # in the page cache: just written
                await asyncio.sleep(0)  # other calls come between the pieces
        except OSError as exc:
            self.close()
            self._broke(f"its request's body could not be read ({exc.strerror})")
        else:
            self._sending = False

    # --- what connections tell ---

    def on_answer(self, connection: "_ProgramConnection", body: bytes | None) -> None:
        """The answer is whole; *body* is None when its head was passed on before."""
        exchange, answer = self.exchange, connection.answer
        assert exchange is not None
        status, headers = answer.status, answer.headers
        if body is not None and self._refused(status, headers):
            return
        if answer.keep and not self._sending:
            connection.idle_since = time.monotonic()
        else:
            self.close()
        # The engine first, which may have the next call for this slot, then the caller. The time of a switched
        # connection says nothing about the next one: it is not learnt.
        run_s = self._over(exchange, ok=status < 500 and status != SWITCHED)
        if body is None:
            exchange.on_end(EndHead(run_s))
        else:
            exchange.on_answer(AnswerHead(status, headers, run_s, length=answer.length), body)

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]], length: int) -> None:
        if self.exchange is not None and not self._refused(status, headers):
            self.exchange.on_head(AnswerHead(status, headers, length=length))

    def _refused(self, status: int, headers: list[tuple[bytes, bytes]]) -> bool:
        """If this is no valid answer, fail the call, close the connection, and return True."""
        if headers is self._taken:
            return False
        wrong = why_no_answer(200 if status == SWITCHED else status, headers)
        exchange = self.exchange
        self._taken = None if wrong else headers
        if wrong and exchange is not None:
            self.close()
            self._over(exchange, ok=False)
            exchange.fail(BadAnswer(f"the function's answer cannot be sent: {wrong}"))
        return bool(wrong)

    def on_lost(self, connection: "_ProgramConnection", reason: str) -> None:
        """*connection* is gone or cannot be used any more, before the end of an answer if it carried a call."""
        if connection is not self._connection:
            return
        untouched = not connection.answering
        begun = connection.head_sent
        self.close()
        exchange = self.exchange
        if exchange is None:
            return
        if begun:
            run_s = self._over(exchange, ok=False)
            exchange.on_end(EndHead(run_s, error=reason))
        elif untouched and self._may_retry and self._head is not None:
            self._task = self.loop.create_task(self._connect(self._head, self._body))
        else:
            self._broke(reason)
        self._worker.last_words.on_lost()

    def _broke(self, reason: str) -> None:
        self._connected.set()
        if self.exchange is not None:
            lose(self._worker.calls, self, self.exchange, reason)

    def _over(self, exchange: Exchange, *, ok: bool) -> Seconds:
        run_s = time.monotonic() - self._begun_at
        self.exchange = self._head = None
        self._body = b""
        self._worker.calls.on_done(self, exchange, run_s, 0, False, ok)
        return run_s

    def close(self) -> None:
        """Close the connection, and end the task that uses it."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        self._connected.set()


class _ProgramConnection(asyncio.Protocol):
    """One kept-alive connection."""

    def __init__(self, slot: HttpSlot) -> None:
        self.transport: asyncio.Transport = cast(asyncio.Transport, None)
        self.answer = AnswerParser()
        self.lost = False
        self.idle_since = 0.0
        self.answering = False
        """Something of the answer has come."""
        self.head_sent = False
        self._slot = slot
        self._expecting = False
        self._whole_timer: asyncio.TimerHandle | None = None
        self._paused = False
        self._heard_out = False
        self._room = asyncio.Event()
        """For those who send and wait for room: two may at once, after protocols were switched."""
        self._room.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from asyncio's
        unpace(transport)

    def expect(self, method: str, may_switch: bool) -> None:
        """A request goes out: the next message is its answer."""
        self._expecting = True
        self.answering = self.head_sent = False
        self.answer.expect(method, may_switch)

    async def write(self, data: bytes) -> None:
        if self.lost or self.transport.is_closing():
            return
        self.transport.write(data)
        await self._room.wait()

    def pause(self) -> None:
        if not self._paused and not self._heard_out and not self.transport.is_closing():
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        if self._paused and not self.transport.is_closing():
            self._paused = False
            self.transport.resume_reading()

    def hear_out(self) -> bool:
        self._heard_out = True
        self.resume()
        return count_unread(self.transport) > 0

    def close(self) -> None:
        self.lost = True
        self._expecting = False
        self._stop_timer()
        self.resume_writing()
        self.transport.abort()

    # --- the transport's side ---

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    def data_received(self, data: bytes) -> None:
        if not self._expecting:
            self._slot.on_lost(self, "it sent what nobody asked for")  # such as the 408 of a timeout
            return
        self.answering = True
        answer = self.answer
        try:
            answer.feed(data)
        except BadHttp as exc:
            self._slot.on_lost(self, str(exc))
            return
        if answer.complete:
            self._finish()
        elif self.head_sent:
            if answer.pieces:
                self._pass(answer.take())
        elif answer.status:
            if not 0 <= answer.length <= SHORT:
                self._begin()
            elif self._whole_timer is None:
                self._whole_timer = self._slot.loop.call_later(_WHOLE_WITHIN_S, self._begin)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.resume_writing()
        if exc is None and self._expecting and self.answer.feed_end():
            self._finish()
        elif self.answer.status:
            self._slot.on_lost(self, "the connection to the function closed in the middle of its answer")
        else:
            self._slot.on_lost(self, "it closed the connection without an answer")

    def _stop_timer(self) -> None:
        if self._whole_timer is not None:
            self._whole_timer.cancel()
            self._whole_timer = None

    def _begin(self) -> None:
        """Pass on the head of the answer, and what has come of its body."""
        self._stop_timer()
        answer = self.answer
        self.head_sent = True
        self._slot.on_head(answer.status, answer.headers, answer.length)
        if answer.pieces:
            self._pass(answer.take())

    def _pass(self, piece: bytes) -> None:
        if self._slot.exchange is not None:
            self._slot.exchange.on_chunk(piece)

    def _finish(self) -> None:
        self._expecting = False
        if self._whole_timer is not None:
            self._stop_timer()
        if self._paused:
            self.resume()
        body = self.answer.take()
        if not self.head_sent:
            self._slot.on_answer(self, body)
            return
        if body:
            self._pass(body)
        self._slot.on_answer(self, None)
