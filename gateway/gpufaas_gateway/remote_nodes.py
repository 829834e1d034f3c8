"""
Calls to nodes elsewhere: straight to their doors, over connections that are kept (`gpufaas_core.door_frames`).

Each node has one link, which says that both ends are alive: when it is lost, so is every call there, and the node is
dialled again until it is no longer among those that the scheduler sees. A warm call is one write and one read, without
a task.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from functools import partial
from typing import Any, Final, Protocol, cast

import msgspec

from gpufaas_core import wire
from gpufaas_core.answer_buffer import AnswerBuffer
from gpufaas_core.connection import Identity, Link, NotReached, connect
from gpufaas_core.door_frames import Asked, DoorAnswer, DoorCall, DoorKind, Failure, Room
from gpufaas_core.errors import GpufaasError, LeaseRefused, StorageFailed, WorkerCrashed
from gpufaas_core.frames import (
    CHUNK_BYTES,
    FILE,
    BrokenFrame,
    CallHead,
    EndHead,
    FrameReader,
    Kind,
    encode_frame,
    encode_prefix,
)
from gpufaas_core.messages import Lease
from gpufaas_core.model import CallId, Device, NodeId, Seconds

log = logging.getLogger("nodes")

DIAL_S: Final[Seconds] = 2.0
"""A node that does not take a connection within this is not there, as far as the call goes that wanted it."""
_IDLE: Final = 128
"""Connections to a node that are kept for later calls."""
_TRIM_S: Final[Seconds] = 5.0
"""Every so often, those that were not needed since the last time are closed, but for one."""
_DIALS: Final = 16
"""To one node, at once."""
_BUFFER: Final = 256 * 1024
"""Bytes of an answer that wait here for a slow caller; more stay with the node."""
_SHORT: Final = 16 * 1024
_FIRST_RETRY_S: Final[Seconds] = 0.1
_LONGEST_RETRY_S: Final[Seconds] = 3.0
_decode_answer: Final = msgspec.msgpack.Decoder(DoorAnswer).decode
_decode_end: Final = msgspec.msgpack.Decoder(EndHead).decode
_decode_room: Final = msgspec.msgpack.Decoder(Room).decode
_decode_failure: Final = msgspec.msgpack.Decoder(Failure).decode

OnUnreachable = Callable[[CallId, str, str], None]
"""Told of a call whose node, by its device, could not be reached, and why: nothing of it was taken."""


class RemoteNodes:
    """`NodePort`. `set_nodes` says which nodes there are; calls of others are refused."""

    def __init__(self, me: Identity, on_unreachable: OnUnreachable = lambda *_: None) -> None:
        self.me = me
        self.on_unreachable = on_unreachable
        self.watchers: set[Callable[[], None]] = set()
        """Told when a node came, went, was lost or found."""
        self.loop = asyncio.get_running_loop()
        self._nodes: dict[str, RemoteNode] = {}
        self._leaving: dict[str, RemoteNode] = {}
        """Gone from the view, while calls run there."""

    def set_nodes(self, views: Iterable[wire.NodeView]) -> None:
        """These are the nodes that there are; calls of one that is no longer among them run on while it lives."""
        seen = {view.id: view for view in views}
        for id_, node in list(self._nodes.items()):
            view = seen.get(NodeId(id_))
            if view is None or view.address != node.address:
                del self._nodes[id_]
                self._leaving[id_] = node
                node.leave()
        self._leaving = {id_: node for id_, node in self._leaving.items() if not node.closed}
        for view in seen.values():
            found = self._nodes.get(view.id)
            left = self._leaving.get(view.id)
            if found is None and left is not None and left.address == view.address:
                # The same link: with another one, the node would take the calls that run there for given up.
                found = self._nodes[view.id] = self._leaving.pop(view.id)
                found.come_back()
            if found is None:
                self._nodes[view.id] = RemoteNode(self, view)
            else:
                found.view = view
        self.changed()

    def changed(self) -> None:
        for watcher in list(self.watchers):
            watcher()

    @property
    def nodes(self) -> "list[RemoteNode]":
        return list(self._nodes.values())

    def unlinked(self) -> list[NodeId]:
        """Return those that cannot be reached."""
        return sorted(node.id for node in self._nodes.values() if node.down)

    def get(self, id_: str) -> "RemoteNode | None":
        return self._nodes.get(id_)

    def devices(self) -> list[Device]:
        return [device for node in self._nodes.values() for device in node.view.devices]

    def call(self, lease: Lease, head: CallHead, body: bytes | memoryview) -> "RemoteExchange":
        """Begin the call; whether its node is there, and takes it, is said by `RemoteExchange.answer`."""
        name = lease.device.rpartition("/")[0]
        exchange = RemoteExchange(self, lease, head, body)
        node = self._nodes.get(name)
        if node is None:
            exchange.not_sent(f"node {name} is not among those that there are")
        else:
            node.begin(exchange)
        return exchange

    async def close(self) -> None:
        """End all connections; calls that still run fail."""
        nodes = [*self._nodes.values(), *self._leaving.values()]
        self._nodes, self._leaving = {}, {}
        for node in nodes:
            node.close()
        await asyncio.gather(*(task for node in nodes for task in node.tasks), return_exceptions=True)


class _User(Protocol):
    """Who has a connection for a while."""

    @property
    def gone(self) -> bool:
        """It does not want one any more."""

    def sent_on(self, connection: "_Connection") -> None:
        """It is yours: say what you have to say."""

    def not_sent(self, reason: str) -> None:
        """There is no connection to be had; nothing was sent."""

    def on_frame(self, kind: int, header: bytes, body: bytes) -> bool:
        """Whether this was the last one."""

    def on_lost(self, reason: str) -> None: ...


class RemoteNode:
    """One node: its link, and the connections to it."""

    def __init__(self, nodes: RemoteNodes, view: wire.NodeView) -> None:
        self.view = view
        self.address = view.address
        self.down = ""
        """Why it cannot be reached; empty: it can, or that is not known yet."""
        self.tasks: set[asyncio.Task[None]] = set()
        self._nodes = nodes
        self._idle: list[_Connection] = []
        """The last used last, and taken first."""
        self._least_idle = 0
        """Never since the last trim were fewer idle."""
        self._trim = nodes.loop.call_later(_TRIM_S, self._close_idle)
        self._all: set[_Connection] = set()
        self._waiting: deque[_User] = deque()
        self._dials = 0
        self._link: Link | None = None
        self._left = False
        self.closed = False
        self._keeper = self._spawn(self._keep_link())

    @property
    def id(self) -> NodeId:
        return self.view.id

    @property
    def linked(self) -> bool:
        return self._link is not None

    def begin(self, user: _User) -> None:
        """Give *user* a connection: at once if there is one, else as soon as there is."""
        while self._idle:
            connection = self._idle.pop()
            if len(self._idle) < self._least_idle:
                self._least_idle = len(self._idle)
            if connection.usable:
                connection.take(user)
                return
        if self.down:
            user.not_sent(f"node {self.id} cannot be reached: {self.down}")
            return
        self._waiting.append(user)
        if self._dials < min(_DIALS, len(self._waiting)):
            self._dials += 1
            self._spawn(self._dial())

    def release(self, connection: "_Connection") -> None:
        """The call of *connection* is over: it may carry another."""
        while self._waiting:
            user = self._waiting.popleft()
            if not user.gone:
                connection.take(user)
                return
        if self._left or len(self._idle) >= _IDLE:
            connection.close()
        else:
            self._idle.append(connection)

    async def ask(self, what: str, value: Any) -> bytes:
        """
        Return what the node answers to a question of the door's.

        :raises NotReached: it is not there, or was lost
        :raises GpufaasError: its error
        """
        question = RemoteQuestion(what, value)
        self.begin(question)
        return await question.reply()

    async def ask_lines(self, what: str, value: Any) -> AsyncGenerator[bytes, None]:
        """Yield the lines of an answer in pieces as they come. :raises GpufaasError: as `ask`"""
        question = RemoteQuestion(what, value)
        self.begin(question)
        rest = b""
        try:
            while (piece := await question.piece()) is not None:
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    yield line
        finally:
            question.cancel()

    def forget(self, connection: "_Connection") -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
            self._least_idle = min(self._least_idle, len(self._idle))
        if self._left and not self._all:
            self.close()

    def leave(self) -> None:
        """It is no longer among the nodes: no new call comes, and those that run go on."""
        self._left = True
        self._refuse_waiting(f"node {self.id} left")
        for connection in list(self._idle):
            connection.close()
        self._idle.clear()
        if not self._all:
            self.close()

    def come_back(self) -> None:
        """It is among the nodes again, before all that ran there was over."""
        self._left = False

    def close(self) -> None:
        """End it all: what runs there fails."""
        self._left = self.closed = True
        self._trim.cancel()
        if self._link is not None:
            self._link.on_lost = lambda _: None
            self._link.close("the gateway left")
        for task in self.tasks:
            task.cancel()
        self._lost("the gateway stops")

    # --- within ---

    def _spawn(self, work: Any) -> "asyncio.Task[None]":
        task: asyncio.Task[None] = self._nodes.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def _dial(self) -> None:
        """Make connections as long as somebody waits for one."""
        try:
            while self._waiting:
                connection = _Connection(self)
                await connect(self.address, self._nodes.me, DIAL_S, connection)
                self._all.add(connection)
                self.release(connection)
        except GpufaasError as exc:
            self._refuse_waiting(str(exc))
        finally:
            self._dials -= 1

    async def _keep_link(self) -> None:
        """Hold the link, and make it again whenever it is lost."""
        retry_s = _FIRST_RETRY_S
        while not self._left or self._all:
            try:
                link = await connect(self.address, self._nodes.me, DIAL_S)
            except GpufaasError as exc:
                known, self.down = bool(self.down), str(exc)
                self._refuse_waiting(self.down)
                if not known:
                    log.warning("node %s cannot be reached: %s", self.id, exc)
                    self._nodes.changed()
                await asyncio.sleep(retry_s)
                retry_s = min(_LONGEST_RETRY_S, 2 * retry_s)
                continue
            lost: asyncio.Future[str] = self._nodes.loop.create_future()
            link.attend(lambda _: None, partial(_settle, lost))
            retry_s = _FIRST_RETRY_S
            self._link, self.down = link, ""
            self._nodes.changed()
            try:
                why = await lost
            finally:
                self._link = None
            log.warning("node %s is lost: %s", self.id, why)
            self.down = why
            self._nodes.changed()  # first: the scheduler, if it is told by this, places no call there again
            self._lost(why)

    def _close_idle(self) -> None:
        unneeded, self._idle = self._idle[: self._least_idle], self._idle[self._least_idle :]
        if unneeded and not self._idle:
            self._idle.append(unneeded.pop())
        for connection in unneeded:
            connection.close()
        self._least_idle = len(self._idle)
        self._trim = self._nodes.loop.call_later(_TRIM_S, self._close_idle)

    def _lost(self, why: str) -> None:
        """It is gone: whoever waits for something from it is told at once."""
        self._refuse_waiting(why)
        self._idle.clear()
        self._least_idle = 0
        for connection in list(self._all):
            connection.abort(why)

    def _refuse_waiting(self, why: str) -> None:
        waiting, self._waiting = self._waiting, deque()
        for user in waiting:
            user.not_sent(f"node {self.id} cannot be reached: {why}")


def _settle(lost: "asyncio.Future[str]", why: str) -> None:
    if not lost.done():
        lost.set_result(why)


class _Connection(asyncio.Protocol):
    """One connection for calls, one at a time."""

    def __init__(self, node: RemoteNode) -> None:
        self.node = node
        self._reader = FrameReader()
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._user: _User | None = None
        self._why = ""
        self._lost = False
        self._full = False
        self._drained: asyncio.Future[None] | None = None

    @property
    def usable(self) -> bool:
        return not self._lost and not self._transport.is_closing()

    def take(self, user: _User) -> None:
        self._user = user
        user.sent_on(self)

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def write_with(self, prefix: bytes, body: bytes | memoryview) -> None:
        if len(body) <= _SHORT:
            self._transport.write(prefix + body)
        else:
            self._transport.write(prefix)
            self._transport.write(body)

    async def drain(self) -> None:
        """Wait until there is room for more."""
        while self._full and not self._lost:
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained

    def pause(self) -> None:
        if self.usable:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self.usable:
            self._transport.resume_reading()

    def close(self) -> None:
        self._transport.close()

    def abort(self, why: str) -> None:
        """End it at once; who has it learns *why*."""
        self._why = why
        self._transport.abort()
        self._end(why)

    def _end(self, why: str) -> None:
        user, self._user = self._user, None
        if user is not None:
            user.on_lost(why)

    # --- asyncio's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from asyncio's

    def data_received(self, data: bytes) -> None:
        try:
            for kind, header, body in self._reader.feed(data):
                user = self._user
                if user is not None and user.on_frame(kind, header, body):
                    self._user = None
                    self.node.release(self)
        except (BrokenFrame, msgspec.DecodeError) as exc:
            self.abort(f"it said what is no frame: {exc}")

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self.resume_writing()
        self.node.forget(self)
        self._end(self._why or (str(exc) if exc else "the node closed the connection"))


class RemoteExchange(AnswerBuffer):
    """`CallExchange`."""

    __slots__ = (
        "_body", "_cancelled", "_connection", "_head", "_nodes", "_over", "_room", "_roomy", "_sender", "lease",
    )  # fmt: skip

    def __init__(self, nodes: RemoteNodes, lease: Lease, head: CallHead, body: bytes | memoryview) -> None:
        super().__init__(nodes.loop, _BUFFER)
        self.lease = lease
        self._nodes = nodes
        self._head = head
        self._body = body
        self._connection: _Connection | None = None
        """While it has one."""
        self._over = False
        """The node has said the last of it, or is gone."""
        self._cancelled = False
        self._room = 0
        """So many bytes of a body that streams the node takes now."""
        self._roomy: asyncio.Future[None] | None = None
        """Whoever sends the body, and waits for room."""
        self._sender: asyncio.Task[None] | None = None

    # --- the gateway's side ---

    async def send_body(self, piece: bytes) -> None:
        """
        Send a piece of a streamed body; waits while the worker does not read. Quietly nothing once it is over.

        :raises LeaseRefused: nothing was taken, and this piece is to be sent again under the next lease
        """
        for at in range(0, len(piece), CHUNK_BYTES):
            if not await self._may_send():
                return
            part = piece if len(piece) <= CHUNK_BYTES else piece[at : at + CHUNK_BYTES]
            self._room -= len(part)
            assert self._connection is not None
            self._connection.write_with(encode_prefix(Kind.BODY, None, len(part)), part)

    async def end_body(self) -> None:
        """:raises LeaseRefused: as `send_body`"""
        if await self._may_send():
            assert self._connection is not None
            self._connection.write(encode_frame(Kind.BODY_END))

    def fail(self, error: GpufaasError) -> None:
        """Whoever waits gets *error*, and the node is told that nobody waits."""
        if self._error is None:
            self._error = error
        if not self._over and not self._cancelled:
            self._cancelled = True
            self._chunks.clear()
            self._stop_sending()
            if self._connection is not None:
                self._connection.write(encode_frame(Kind.CANCEL))
                self._resume()
        self._wake()

    async def _may_send(self) -> bool:
        """Wait for room; False: the call is over."""
        while self._room <= 0 and self._error is None and not self._over:
            self._roomy = self._nodes.loop.create_future()
            await self._roomy
        if self._room <= 0 and isinstance(self._error, LeaseRefused):
            raise self._error
        return self._error is None and not self._over

    def _wake(self) -> None:
        self._wake_reader()
        if self._roomy is not None and not self._roomy.done():
            self._roomy.set_result(None)

    def _pause_source(self) -> bool:
        if self._connection is not None:
            self._connection.pause()
        return self._connection is not None

    def _resume_source(self) -> None:
        if self._connection is not None:
            self._connection.resume()

    # --- the connection's side ---

    @property
    def gone(self) -> bool:
        return self._cancelled

    def sent_on(self, connection: _Connection) -> None:
        self._connection = connection
        head, body = self._head, self._body
        self._body = b""
        connection.write_with(encode_prefix(Kind.CALL, DoorCall(self.lease, head), len(body)), body)
        if head.body_mode == FILE:
            self._sender = self._nodes.loop.create_task(self._send_file(head.body_path, connection))

    def not_sent(self, reason: str) -> None:
        self._over = True
        if not self._cancelled:
            self._nodes.on_unreachable(self.lease.call, self.lease.device, reason)
            self._fail_with(LeaseRefused(reason))

    def on_lost(self, reason: str) -> None:
        self._finish()
        name = self.lease.device.rpartition("/")[0]
        self._fail_with(WorkerCrashed(f"node {name} was lost during the call, which may have run there: {reason}"))

    def on_frame(self, kind: int, header: bytes, body: bytes) -> bool:
        if kind == Kind.ANSWER or kind == Kind.HEAD:
            answer = _decode_answer(header)
            whole = kind == Kind.ANSWER
            if not self._cancelled:
                self.load_s, self.phases = answer.load_s, answer.phases
                if answer.lease is not None:
                    self.lease = answer.lease
                self._chunks.append((answer.head, body, whole))
            if whole:
                self._finish()
            self._wake()
            return whole
        if kind == Kind.CHUNK:
            if not self._cancelled:
                self._keep(body)
                self._wake()
            return False
        if kind == DoorKind.ROOM:
            self._room += _decode_room(header).bytes
            self._wake()
            return False
        if kind == Kind.END:
            self.end = end = _decode_end(header)
            self._finish()
            if end.error and end.error != "cancelled":
                self._fail_with(GpufaasError(f"the function's answer broke off: {end.error}"))
            self._wake()
            return True
        if kind == DoorKind.REFUSED or kind == DoorKind.ERROR:
            failure = _decode_failure(header)
            self._finish()
            self._fail_with(wire.make_error(failure.name, failure.message, failure.retry_after_s))
            return True
        return False

    def _finish(self) -> None:
        self._resume()
        self._over = True
        self._connection = None
        self._stop_sending()

    def _fail_with(self, error: GpufaasError) -> None:
        if self._error is None:
            self._error = error
        self._wake()

    def _stop_sending(self) -> None:
        if self._sender is not None:
            self._sender.cancel()
            self._sender = None

    async def _send_file(self, path: str, connection: _Connection) -> None:
        try:
            with open(path, "rb", buffering=0) as file:  # noqa: ASYNC230 - in the page cache: just written
                while piece := file.read(CHUNK_BYTES):
                    connection.write_with(encode_prefix(Kind.BODY, None, len(piece)), piece)
                    await connection.drain()
                    await asyncio.sleep(0)  # other calls come between the pieces
        except OSError as exc:
            self._sender = None
            self.fail(StorageFailed(f"the body could not be read from {path} ({exc.strerror}): call again"))
        else:
            self._sender = None
            connection.write(encode_frame(Kind.BODY_END))


class RemoteQuestion:
    """A question to a node; see `RemoteNode.ask` and `ask_lines`."""

    def __init__(self, what: str, value: Any) -> None:
        self._frame = encode_frame(DoorKind.ASK, Asked(what), msgspec.msgpack.encode(value))
        self._loop = asyncio.get_running_loop()
        self._connection: _Connection | None = None
        self._over = False
        self._error: GpufaasError | None = None
        self._reply: bytes | None = None
        self._pieces: deque[bytes] = deque()
        self._buffered = 0
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None

    async def reply(self) -> bytes:
        """
        Return what the node answers.

        :raises NotReached: the node is not there, or was lost
        :raises GpufaasError: its error
        """
        try:
            while not self._over:
                await self._wait()
        finally:
            self.cancel()
        if self._error is not None:
            raise self._error
        assert self._reply is not None
        return self._reply

    async def piece(self) -> bytes | None:
        """Return the next piece of an answer in pieces; None at its end. :raises GpufaasError: as `reply`"""
        while not self._pieces:
            if self._over:
                if self._error is not None:
                    raise self._error
                return None
            await self._wait()
        piece = self._pieces.popleft()
        self._buffered -= len(piece)
        if self._paused and self._buffered <= _BUFFER // 2 and self._connection is not None:
            self._paused = False
            self._connection.resume()
        return piece

    def cancel(self) -> None:
        """Nobody waits for it. Nothing once it is over."""
        if not self._over and self._connection is not None:
            self._connection.write(encode_frame(Kind.CANCEL))
            self._connection.resume()
        self._over = True
        self._pieces.clear()

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        await self._waiter

    def _end(self, error: GpufaasError | None) -> None:
        self._over, self._connection, self._error = True, None, error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- the connection's side ---

    @property
    def gone(self) -> bool:
        return self._over

    def sent_on(self, connection: _Connection) -> None:
        self._connection = connection
        connection.write(self._frame)

    def not_sent(self, reason: str) -> None:
        self._end(NotReached(reason))

    def on_lost(self, reason: str) -> None:
        self._end(NotReached(f"the node was lost: {reason}"))

    def on_frame(self, kind: int, header: bytes, body: bytes) -> bool:
        if kind == Kind.CHUNK:
            if not self._over:
                self._pieces.append(body)
                self._buffered += len(body)
                if self._buffered > _BUFFER and self._connection is not None:
                    self._paused = True
                    self._connection.pause()
                self._wake()
            return False
        if self._paused and self._connection is not None:
            self._connection.resume()
        if kind == DoorKind.ERROR:
            failure = _decode_failure(header)
            self._end(wire.make_error(failure.name, failure.message, failure.retry_after_s))
        elif kind == DoorKind.REPLY:
            self._reply = body
            self._end(None)
        elif kind == Kind.END:
            self._end(None)
        else:
            return False
        return True
