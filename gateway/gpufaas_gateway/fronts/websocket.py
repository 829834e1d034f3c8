"""
WebSockets to functions: the websocket scope of ``/function/NAME[/path]``, a plain ASGI application.

A connection is one call: it waits for a slot, holds it while it lives, and is counted once. The server speaks the
protocol with the caller. Here is the function's side: the worker is asked to switch protocols, as by any client. Then
the exchange carries bytes, whose frames the websockets library (its part without IO) makes and reads.

Two loops pass messages on, each of which waits for the side that it writes to: `_to_function` in a task of its own,
`pump` in the task of the call. The function's time limit bounds the handshake, and the time in which a side takes no
message; not the connection.
"""

import asyncio
import base64
import os
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.types import Receive, Scope, Send
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import CLIENT, OPEN, Protocol
from websockets.utils import accept_key

from gpufaas_core.errors import CallCancelled, GpufaasError, UnknownFunction, WorkerCrashed
from gpufaas_core.model import FunctionId, Seconds
from gpufaas_core.units import Bytes, MiB, format_bytes
from gpufaas_gateway.answer_stream import SWITCHED, AnswerStream
from gpufaas_gateway.answering import Answer, Run, refusal
from gpufaas_gateway.call_body import Caller
from gpufaas_gateway.call_headers import Header
from gpufaas_gateway.catalogue import Catalogue
from gpufaas_gateway.errors import status_of
from gpufaas_gateway.fronts.openfaas import PREFIX
from gpufaas_gateway.http.bounded_websocket import TURN_BYTES
from gpufaas_gateway.request import Request

OUTER: Final = "gpufaas.outer"
"""Key in an ASGI scope: the worker that makes the call (`messages.Outer`)."""
MAX_MESSAGE: Final[Bytes] = 16 * MiB
"""The largest message in either direction. It is held whole, and twice for a moment."""
_CLOSE_S: Final[Seconds] = 5.0
"""How long a function may take to end its connection after a Close frame."""
_REFUSAL: Final[Bytes] = 64 * 1024
"""The most bytes that are passed on of an answer without a WebSocket. They are held whole."""
_MAX_CONTROL: Final[Bytes] = 1 * MiB
"""The most bytes of answers to pings that the function may leave unread."""
_TURN_MESSAGES: Final = 64
"""The most messages that are passed on in one turn of the loop."""
_MAX_REASON: Final[Bytes] = 123
_NOT_PASSED: Final = frozenset((b"content-length", b"expect"))
_OURS: Final = frozenset((b"x-call-id", b"x-start-time", b"x-served-by"))
_HANDSHAKE: Final = b"sec-websocket-"


@dataclass(frozen=True, eq=False)
class WebSocketCalls:
    """The ASGI application."""

    run: Run
    catalogue: Catalogue
    _open: "dict[_WebSocketCaller, FunctionId]" = field(default_factory=dict)

    def close_old(self, function: FunctionId) -> None:
        """Ask the callers of *function*, a revision that was replaced, to connect again."""
        for connection in [each for each, of in self._open.items() if of == function]:
            connection.restart()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # websocket.connect
        name, _, path = scope["raw_path"][len(PREFIX) :].partition(b"/")
        key = base64.b64encode(os.urandom(16))
        connection = _WebSocketCaller(receive, send)
        request = Request(
            name.decode("latin-1"), "GET", "/" + path.decode("latin-1"), scope["query_string"], _passed(scope),
            caller=connection, client=scope.get("client"), outer=scope.get(OUTER),
            upgrade=[(b"upgrade", b"websocket"), (b"sec-websocket-version", b"13"), (b"sec-websocket-key", key)],
        )  # fmt: skip
        try:
            answer = await self.run(request)
            if answer.stream is None:
                await _refuse(send, answer)
                return
            with answer.stream as stream:
                try:
                    if answer.status != SWITCHED:
                        await _pass_refusal(send, answer, stream)
                        return
                    await connection.accept(answer, stream, key, scope["subprotocols"])
                except GpufaasError as error:
                    stream.call.status = status_of(error)
                    if not isinstance(error, CallCancelled):
                        await _refuse(send, refusal(error, [pair for pair in answer.headers if pair[0] in _OURS]))
                    stream.cancel()
                    return
                await self._join(connection, stream)
        except CallCancelled:
            pass  # before there was an answer
        finally:
            connection.end()

    async def _join(self, connection: "_WebSocketCaller", stream: AnswerStream) -> None:
        """Pass messages on until one side has ended."""
        deployed = stream.call.deployed
        assert deployed is not None
        self._open[connection] = deployed.function_id
        current = self.catalogue.find(deployed.full_name)
        try:
            async with asyncio.TaskGroup() as group:
                connection.begin(group)
                if current is not None and current.function_id != deployed.function_id:
                    connection.restart()  # while it was waiting
                try:
                    await connection.pump()
                except GpufaasError as error:
                    stream.call.status, code = _at_end(error)
                    stream.cancel()
                    await connection.tell(code, str(error))
                connection.end()
        finally:
            del self._open[connection]


class _WebSocketCaller(Caller):
    """Joins a caller's connection and that of the function."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._function = Protocol(CLIENT, max_size=MAX_MESSAGE)
        self._name = ""
        self._timeout_s: Seconds = 0.0
        self._max_message: Bytes = MAX_MESSAGE
        self._first = asyncio.ensure_future(receive())
        self._stream: AnswerStream
        """Since `accept`."""
        self._timer: asyncio.TimerHandle | None = None
        self._group: asyncio.TaskGroup | None = None
        self._pump: asyncio.Task[None] | None = None
        self._control: asyncio.Task[None] | None = None
        self._controlled: Bytes = 0
        self._sending = asyncio.Lock()
        """One message goes to the function at a time, since a large one goes in parts."""
        self._pieces: list[bytes | bytearray | memoryview] = []
        self._text = False
        self._told = False
        """The caller's side is closed, or closing: nothing more is sent there."""

    async def receive(self) -> tuple[bytes, bool]:
        """Wait until the caller leaves before there is an answer."""
        message = await asyncio.shield(self._first)
        if message["type"] == "websocket.disconnect":
            raise CallCancelled("the caller went away")
        await asyncio.Event().wait()  # its messages are for the function
        raise AssertionError

    async def accept(self, answer: Answer, stream: AnswerStream, key: bytes, offered: list[str]) -> None:
        """
        Pass the function's answer 101 on.

        :raises WorkerCrashed: the answer breaks the protocol
        """
        self._stream, deployed = stream, stream.call.deployed
        assert deployed is not None
        self._name, self._timeout_s = deployed.name, min(deployed.timeout_s, deployed.exec_s)
        self._max_message = min(MAX_MESSAGE, deployed.max_body)
        given = dict(answer.headers)
        subprotocol = given.get(b"sec-websocket-protocol", b"").decode("latin-1") or None
        wrong = ""
        if given.get(b"sec-websocket-accept") != accept_key(key.decode()).encode():
            wrong = "its Sec-WebSocket-Accept is not the one that belongs to the key"
        elif given.get(b"sec-websocket-extensions"):
            wrong = "it uses extensions, none of which was offered"
        elif subprotocol is not None and subprotocol not in offered:
            wrong = f"it chose the subprotocol {subprotocol!r}, which was not offered"
        if wrong:
            raise WorkerCrashed(f"{self._name} answered a WebSocket handshake with what is no answer: {wrong}")
        headers = [pair for pair in answer.headers if not pair[0].startswith(_HANDSHAKE)]
        try:
            await self._send({"type": "websocket.accept", "subprotocol": subprotocol, "headers": headers})
        except OSError as exc:
            raise CallCancelled("the caller went away") from exc

    # --- the pumps ---

    def begin(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._pump = group.create_task(self._to_function())

    async def pump(self) -> None:
        """
        Pass on what the function says, until it has ended its connection.

        :raises GpufaasError: it broke off, or the caller did
        """
        function = self._function
        passed = 0
        while (data := await self._stream.chunk()) is not None:
            for at in range(0, len(data), TURN_BYTES):
                function.receive_data(data[at : at + TURN_BYTES])
                frames = function.events_received()
                self._answer_control(len(frames))
                for frame in frames:
                    if isinstance(frame, Frame):
                        await self._on_frame(frame)
                        passed += 1
                        if passed % _TURN_MESSAGES == 0:
                            await asyncio.sleep(0)  # nothing else here waits while the caller takes them
            if function.parser_exc is not None:
                said = function.close_sent
                if said is not None and said.code == CloseCode.MESSAGE_TOO_BIG:
                    raise _TooBig(f"{self._name} sent a message of over {format_bytes(MAX_MESSAGE)}")
                raise WorkerCrashed(f"{self._name} sent what is not WebSocket: {function.parser_exc}")
        if function.close_rcvd is None and not self._told:
            raise WorkerCrashed(f"{self._name} broke off without a goodbye")

    async def _on_frame(self, frame: Frame) -> None:
        if frame.opcode is Opcode.CLOSE:
            said = self._function.close_rcvd
            assert said is not None
            self._end_within(_CLOSE_S)
            code = CloseCode.NORMAL_CLOSURE if said.code == CloseCode.NO_STATUS_RCVD else said.code
            await self.tell(code, said.reason)
            return
        if frame.opcode in (Opcode.PING, Opcode.PONG):
            return
        if frame.opcode is not Opcode.CONT:
            self._text = frame.opcode is Opcode.TEXT
        self._pieces.append(frame.data)
        if not frame.fin:
            return
        pieces, self._pieces = self._pieces, []
        data = bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces)
        if not self._text:
            await self._pass({"type": "websocket.send", "bytes": data})
            return
        try:
            text = data.decode()
        except UnicodeDecodeError:
            raise WorkerCrashed(f"{self._name} sent a text that is not UTF-8") from None
        await self._pass({"type": "websocket.send", "text": text})

    async def _pass(self, message: MutableMapping[str, Any]) -> None:
        """Send to the caller; returns when there is room for another."""
        if self._told:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(message)
        except TimeoutError:
            self._told = True
            raise CallCancelled(f"the caller took no message for {self._timeout_s:g} s") from None
        except (OSError, RuntimeError) as exc:  # RuntimeError: of uvicorn, if it has just sent a Close frame itself
            self._told = True
            raise CallCancelled("the caller went away") from exc

    async def tell(self, code: int, reason: str) -> None:
        """Close the caller's side, if it is open."""
        if not self._told:
            self._told = True
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await self._send({"type": "websocket.close", "code": code, "reason": _short(reason)})
            except (OSError, RuntimeError):  # as above; TimeoutError is an OSError
                pass

    async def _to_function(self) -> None:
        message = await self._first
        taken = 0
        while message["type"] == "websocket.receive":
            text = message.get("text")
            data: bytes = message["bytes"] if text is None else text.encode()
            if len(data) > self._max_message:
                await self.tell(
                    CloseCode.MESSAGE_TOO_BIG, f"{self._name} takes at most {format_bytes(self._max_message)}"
                )
                await self._part(CloseCode.GOING_AWAY)
                return
            if self._function.state is not OPEN:
                return  # the function closes the connection
            if text is None:
                self._function.send_binary(data)
            else:
                self._function.send_text(data)
            await self._flush()
            taken += 1
            if taken % _TURN_MESSAGES == 0:
                await asyncio.sleep(0)
            message = await self._receive()
        if "reason" not in message and message.get("code") in (CloseCode.NO_STATUS_RCVD, CloseCode.ABNORMAL_CLOSURE):
            self._told = True
            self._stream.call.fail(CallCancelled("the caller went away"))
        else:
            self._told = True
            await self._part(message.get("code", CloseCode.NO_STATUS_RCVD), message.get("reason") or "")

    async def _part(self, code: int, reason: str = "") -> None:
        """Send a Close frame to the function, and end its connection if it does not."""
        self._end_within(_CLOSE_S)
        if self._function.state is OPEN:
            if code == CloseCode.NO_STATUS_RCVD:
                self._function.send_close()
            else:
                self._function.send_close(code, _short(reason))
            await self._flush()

    async def _flush(self) -> None:
        try:
            async with self._sending:
                while data := b"".join(self._function.data_to_send()):
                    async with asyncio.timeout(self._timeout_s):
                        await self._stream.send(data)
        except TimeoutError:
            self._stream.call.fail(
                WorkerCrashed(f"{self._name} took no message for {self._timeout_s:g} s, its time limit")
            )

    def _answer_control(self, frames: int) -> None:
        """
        Send the protocol's own answers. A task does it, at most one at a time: to wait for room here would stop the
        reading, for which the function may wait in turn.
        """
        assert self._group is not None
        if self._control is None or self._control.done():
            self._controlled = 0
            if self._function.writes:
                self._control = self._group.create_task(self._flush())
        else:
            self._controlled += frames * _MAX_REASON
            if self._controlled > _MAX_CONTROL:
                raise WorkerCrashed(f"{self._name} sends pings, and does not read the answers")

    # --- the end ---

    def restart(self) -> None:
        """Close both sides: the function was updated, and the caller shall connect to the new revision."""
        if self._group is not None and not self._told:
            self._group.create_task(self._restart())

    async def _restart(self) -> None:
        await self.tell(CloseCode.SERVICE_RESTART, f"{self._name} was updated: connect again")
        await self._part(CloseCode.GOING_AWAY)

    def _end_within(self, seconds: Seconds) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(
                seconds, self._stream.call.fail, CallCancelled(f"{self._name} did not end its connection in time")
            )

    def end(self) -> None:
        """Let go of what waits."""
        if self._timer is not None:
            self._timer.cancel()
        for task in (self._first, self._pump, self._control):
            if task is not None:
                task.cancel()


class _TooBig(GpufaasError):
    """A message of the function is larger than `MAX_MESSAGE`."""


def _passed(scope: Scope) -> list[Header]:
    """Return the caller's headers without those of its connection."""
    return [
        pair
        for pair in scope["headers"]
        if pair[0] not in _NOT_PASSED and (not pair[0].startswith(_HANDSHAKE) or pair[0] == b"sec-websocket-protocol")
    ]


async def _pass_refusal(send: Send, answer: Answer, stream: AnswerStream) -> None:
    """Pass on the answer of a function that did not switch protocols."""
    body = b""
    while len(body) < _REFUSAL and (piece := await stream.chunk()) is not None:
        body += piece
    stream.cancel()
    await _refuse(send, Answer(answer.status, answer.headers, body[:_REFUSAL]))


async def _refuse(send: Send, answer: Answer) -> None:
    """Answer a handshake with *answer*, which has no stream."""
    headers = [pair for pair in answer.headers if not pair[0].startswith(_HANDSHAKE) and pair[0] != b"content-length"]
    try:
        await send({"type": "websocket.http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "websocket.http.response.body", "body": bytes(answer.body)})
    except OSError:
        pass  # the caller went away


def _at_end(error: GpufaasError) -> tuple[int, CloseCode]:
    """Return the status that an accepted connection is counted with when it ends with *error*, and its close code."""
    if isinstance(error, UnknownFunction):
        return SWITCHED, CloseCode.GOING_AWAY
    if isinstance(error, CallCancelled):
        return SWITCHED, CloseCode.INTERNAL_ERROR
    return status_of(error), CloseCode.MESSAGE_TOO_BIG if isinstance(error, _TooBig) else CloseCode.INTERNAL_ERROR


def _short(reason: str) -> str:
    return reason.encode()[:_MAX_REASON].decode(errors="ignore")
