"""
The invocation path: ``/function/NAME[/path]``, a plain ASGI application.

One call: find the function, read a model function's body whole (a slow client must not hold a device), ask the
scheduler for a lease, hand head and body to the node, pass the answer on as it comes. Nothing here polls, sleeps or
parses a body. A call that is quick costs one timer and no task; one that takes longer than `_WATCH_AFTER_S` gets a task
that listens for its caller's hanging up.
"""

import asyncio
import math
import os
import random
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from gpufaas_core.answer_spool import AnswerSpool
from gpufaas_core.errors import (
    BodyTooLarge,
    CallCancelled,
    DeadlineExceeded,
    GpufaasError,
    InvalidSpec,
    LeaseRefused,
    OutOfMemory,
    StorageFailed,
    UnknownFunction,
)
from gpufaas_core.frames import FILE, INLINE, STREAM, AnswerHead, CallHead
from gpufaas_core.messages import Lease, Outer
from gpufaas_core.model import CallId, FunctionId, Seconds
from gpufaas_core.units import format_bytes, parse_duration
from gpufaas_gateway.catalogue import Catalogue, Deployed
from gpufaas_gateway.cors import preflight
from gpufaas_gateway.errors import METHODS, BodyTooSlow, MethodNotAllowed, Unavailable, headers_of, status_of
from gpufaas_gateway.metrics import Metrics
from gpufaas_gateway.origins import outer_of
from gpufaas_gateway.quotas import Passage

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Header = tuple[bytes, bytes]

PREFIX: Final = b"/function/"
SPOOL_ABOVE: Final = 1024 * 1024
"""A model function's body beyond this waits on disk, not in memory; one of a CPU function that says it is longer, or
does not say, streams."""
BODY_BYTES_PER_S: Final = 500
"""A body that streams and comes more slowly uses up its caller's patience (Apache's measure too)."""
READ_BYTES_PER_S: Final = 32 * 1024
"""What is left of an answer when its call's time is up, and its function is done, has so much more time."""
_HELD_BYTES: Final = 64 * 1024
"""Of the body of a CPU function's call that waits; as much again stays with the server, and then with the caller."""
_WATCH_AFTER_S: Final = 0.025
_random: Final = random.Random(os.urandom(16))
HOP_BY_HOP: Final = frozenset((
    b"connection", b"proxy-connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te",
    b"trailer", b"transfer-encoding", b"upgrade",
))  # fmt: skip
_NOTED: Final = HOP_BY_HOP | {
    b"content-length", b"server-timing", b"x-call-id", b"x-start-time", b"x-forwarded-for", b"x-forwarded-host",
    b"x-timeout", b"x-gpufaas-size",
}  # fmt: skip
"""Of a request: not passed on, or looked at."""
_DROPPED: Final = HOP_BY_HOP | {b"content-length", b"server-timing", b"x-call-id", b"x-start-time", b"x-served-by"}
"""Of a function's answer."""
_OVER: Final = CallCancelled("the call is over")
_BODILESS: Final = frozenset((204, 304))
"""Whatever a handler returns with these would be read as the beginning of the connection's next answer."""


class CallExchange(Protocol):
    """A call at its worker; see `gpufaas_gpu_manager.exchange.Exchange`."""

    load_s: Seconds
    phases: tuple[tuple[str, Seconds], ...]
    lease: Lease

    @property
    def loading_s(self) -> Seconds:
        """How long it has waited for a worker that still loads; 0.0: it does not, or nobody here knows."""
        ...

    @property
    def end(self) -> Any: ...

    @property
    def unread(self) -> int: ...

    async def answer(self) -> tuple[AnswerHead, bytes, bool]: ...

    async def chunk(self) -> bytes | None: ...

    async def send_body(self, piece: bytes) -> None:
        """:raises LeaseRefused: it was refused before this, which is to go under the next lease"""

    async def end_body(self) -> None:
        """:raises LeaseRefused: as `send_body`"""

    def keep_for(self, spool: AnswerSpool) -> None:
        """What comes of its answer and a slow caller does not read may wait in *spool*, until `close`."""

    def close(self) -> None: ...

    def fail(self, error: GpufaasError) -> None:
        """Whoever waits for it gets *error*; nobody will read on."""


class NodePort(Protocol):
    """Where calls are carried to: a node in this process, or a connection to one."""

    def call(self, lease: Lease, head: CallHead, body: bytes | memoryview) -> CallExchange:
        """:raises LeaseRefused: nothing of it was taken, and the scheduler knows"""


class PlacementPort(Protocol):
    """The scheduler, as a gateway asks it; see `gpufaas_scheduler.service.SchedulerService`."""

    def place(
        self,
        call: CallId,
        function: FunctionId,
        timeout_s: Seconds,
        size: float = 0.0,
        outer: Outer | None = None,
        endless: bool = False,
    ) -> Lease | asyncio.Future[Lease]: ...

    def again(self, call: CallId) -> asyncio.Future[Lease]: ...

    def cancel(self, call: CallId) -> None: ...

    def over(self, call: CallId) -> None: ...


class _Call:
    """What can end a call from outside while it waits: its timer, its caller, the server's stop."""

    __slots__ = (
        "asked", "at_caller", "awaits_body", "body_due", "error", "exchange", "future", "held", "loading_s", "nested",
        "owner", "pace", "reads_on", "spool", "spooled", "task", "timeout_s", "timer", "watched",
    )  # fmt: skip

    def __init__(self) -> None:
        self.owner = asyncio.current_task()
        self.at_caller = True
        """It reads from its caller or writes to him, who may do nothing for ever: only a cancellation ends that."""
        self.future: asyncio.Future[Lease] | None = None
        self.exchange: CallExchange | None = None
        self.error: GpufaasError | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.timeout_s: Seconds = 0.0
        self.asked = False
        """`timeout_s` is what its caller asked for, not the function's limit."""
        self.nested = False
        """`timeout_s` is what is left of the call that made it."""
        self.task: asyncio.Task[None] | None = None
        self.watched = False
        """It is not a quick one: `_watch` has seen it."""
        self.spool: str | None = None
        self.spooled = 0
        """Bytes in it."""
        self.held: deque[MutableMapping[str, Any]] | None = None
        """What came of a body that streams while its call waits; None: it does not stream."""
        self.pace: asyncio.TimerHandle | None = None
        self.loading_s: Seconds = 0.0
        """For so long it had waited for a worker that still loaded when its time was up."""
        self.awaits_body = False
        """A body that streams, and a function that could take more of it."""
        self.reads_on = False
        """Its time is up, and only its caller is waited for."""
        self.body_due = 0.0
        """When its caller's patience is used up, unless something comes."""

    def fail(self, error: GpufaasError) -> None:
        if self.error is not None:
            return
        self.error = error
        if self.at_caller:
            assert self.owner is not None
            self.owner.cancel()
        elif self.exchange is not None:
            self.exchange.fail(error)
        elif self.future is not None and not self.future.done():
            self.future.set_exception(error)


class Invocations:
    """The ASGI application. `spool` is a directory for large bodies, emptied by whoever starts the platform."""

    def __init__(
        self,
        catalogue: Catalogue,
        scheduler: PlacementPort,
        node: NodePort,
        metrics: Metrics,
        spool: Path,
        *,
        served_by: str = "gpufaas",
        call_suffix: str = "",
    ) -> None:
        """
        :param served_by: our product token, ``NAME/VERSION``
        :param call_suffix: ends every id that the scheduler is told, so that those of several gateways differ
        """
        self._suffix = call_suffix
        self._served_by = (b"x-served-by", served_by.encode())
        self._catalogue = catalogue
        self._scheduler = scheduler
        self._node = node
        self._metrics = metrics
        self._spool = spool
        self._answers = AnswerSpool(spool)
        self._loop = asyncio.get_running_loop()
        self._serial = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        started_ns = time.time_ns()
        raw: bytes = scope["raw_path"]
        name, _, path = raw[len(PREFIX) :].partition(b"/")
        method: str = scope["method"]
        sent_id = asked = sized = b""
        headers: list[Header] = []
        forwarded = hosted = False
        length = -1
        for pair in scope["headers"]:
            key = pair[0]
            if key in _NOTED:
                if key == b"content-length":
                    length = int(pair[1])
                elif key == b"x-forwarded-for":
                    forwarded = True
                elif key == b"x-forwarded-host":
                    hosted = True
                elif key == b"x-timeout":
                    asked = pair[1]
                elif key == b"x-gpufaas-size":
                    sized = pair[1]
                elif key == b"x-call-id":
                    sent_id = pair[1][:128]
                    continue
                else:
                    continue
            headers.append(pair)
        if sent_id:
            # The engine's name of a call must be unique, whatever callers send.
            self._serial += 1
            public_id, call_id = sent_id, CallId(f"{sent_id.decode('latin-1')}#{self._serial}{self._suffix}")
        else:
            call_id = CallId(new_call_id())
            public_id = call_id.encode()
            if self._suffix:
                call_id = CallId(f"{call_id}#{self._suffix}")
        start_time = str(started_ns).encode()
        answered = [(b"x-call-id", public_id), (b"x-start-time", start_time), self._served_by]

        deployed: Deployed | None = None
        crossing: list[Header] = []
        call = _Call()
        passage: Passage | None = None
        lease: Lease | None = None
        status = 500
        queue_s = load_s = run_s = 0.0
        begun = ran_out = False
        try:
            found = self._find(name, method)
            if found.cors is not None or method == "OPTIONS":
                if (answer_now := preflight(found.cors, method, headers)) is not None:
                    status, said = answer_now
                    await send({"type": "http.response.start", "status": status, "headers": said + answered})
                    await send({"type": "http.response.body", "body": b""})
                    return
                crossing = found.cors.allows(headers) if found.cors is not None else []
                answered += crossing
            deployed = found
            deployed.stats.started()
            if deployed.gate is not None:
                passage = deployed.gate.enter()
            if not forwarded and scope.get("client"):
                host, port = scope["client"]
                headers.append((b"x-forwarded-for", f"{host}:{port}".encode()))
            if not hosted:
                headers.extend((b"x-forwarded-host", value) for key, value in headers[:] if key == b"host")
            headers.append((b"x-call-id", public_id))
            headers.append((b"x-start-time", start_time))
            if length > deployed.max_body:
                raise _too_large(deployed, length)
            timeout_s = deployed.timeout_s
            if asked and (wanted_s := _asked_timeout(asked)) < timeout_s:
                timeout_s, call.asked = wanted_s, True
            call.timeout_s = timeout_s
            size = told_size(sized) if sized else 0.0
            call.timer = self._loop.call_later(
                _WATCH_AFTER_S, self._watch, call, receive, deployed, began + timeout_s, False
            )
            body, mode = await self._read(deployed, call, receive, length)
            call.at_caller = False
            if not sized:
                # Of a body that streams, no more is known than what its caller says.
                size = float(length if length > 0 else len(body) if mode == INLINE else call.spooled)
            outer = outer_of(scope, sent_id)

            left_s = began + timeout_s - time.perf_counter()
            try:
                placed = self._scheduler.place(call_id, deployed.function_id, left_s, size, outer)
            except UnknownFunction:
                # It was updated while its body came: the new revision answers.
                deployed = self._find(name, method)
                placed = self._scheduler.place(call_id, deployed.function_id, left_s, size, outer)
            head = CallHead(
                public_id.decode("latin-1"), method, "/" + path.decode("latin-1"), scope["query_string"],
                headers, mode, call.spool or "", timeout_s,
            )  # fmt: skip
            while True:
                if isinstance(placed, Lease):
                    lease = placed
                else:
                    if passage is not None:
                        try:
                            passage.wait()
                        except GpufaasError:
                            placed.cancel()  # nobody will ask it
                            raise
                    call.future = placed
                    if call.watched or not self._suffix:
                        # Where the scheduler is another process, every call waits for it, but few wait long.
                        self._listen(call, receive)
                    try:
                        lease = await placed
                    except UnknownFunction:
                        # As above, by a scheduler that is not in this process.
                        newer = self._catalogue.find(name.decode("latin-1"))
                        if newer is None or newer is deployed or newer.unavailable or call.error is not None:
                            raise
                        deployed = newer
                        left_s = began + timeout_s - time.perf_counter()
                        placed = self._scheduler.place(call_id, deployed.function_id, left_s, size, outer)
                        continue
                    call.future = None
                if lease.within_s is not None:
                    timeout_s = self._end_with_outer(call, receive, deployed, began, timeout_s, lease.within_s)
                    head = msgspec.structs.replace(head, timeout_s=timeout_s)
                if passage is not None:
                    passage.granted()
                try:
                    exchange = call.exchange = self._node.call(lease, head, body)
                    if call.error is not None:
                        exchange.fail(call.error)  # it came between the lease and here, where there was nothing to end
                    queue_s = time.perf_counter() - began
                    if mode == STREAM:
                        self._stop_watching(call)
                        call.timer = self._loop.call_later(
                            began + timeout_s - time.perf_counter(), self._expire, call, deployed
                        )
                        call.body_due = time.perf_counter() + deployed.body_patience_s
                        call.pace = self._loop.call_later(deployed.body_patience_s, self._keep_pace, call, deployed)
                        call.task = self._loop.create_task(
                            self._stream_body(call, exchange, deployed, receive, len(body))
                        )
                    answer, answer_body, whole = await exchange.answer()
                    break
                except LeaseRefused:  # by the node, or by a worker that was gone before it took anything
                    call.exchange = None
                    if call.error is not None:
                        raise call.error from None  # it came after the refusal
                    if mode == STREAM and call.task is not None:
                        call.task.cancel()  # what it holds stays in `held`
                        call.task = None
                        self._stop_pace(call)
                    placed = self._scheduler.again(call_id)
                except OutOfMemory:
                    # Its worker has been given more room meanwhile, if there is any.
                    if not deployed.idempotent or mode == STREAM or ran_out or call.error is not None:
                        raise
                    ran_out, call.exchange = True, None
                    self._scheduler.over(call_id)
                    call_id = CallId(f"{new_call_id()}#{self._suffix}" if self._suffix else new_call_id())
                    left_s = began + timeout_s - time.perf_counter()
                    placed = self._scheduler.place(call_id, deployed.function_id, left_s, size, outer)
            lease = exchange.lease
            load_s = exchange.load_s
            run_s = answer.run_s
            status = answer.status
            if not whole:
                run_s = time.perf_counter() - began - queue_s - load_s
            out = _call_headers(answer, headers, run_s)
            if crossing:
                out = [pair for pair in out if pair[0] != b"access-control-allow-origin"]
            out += answered
            out += placement_headers(lease)
            if whole:
                self._stop_watching(call)
                out.append((b"server-timing", _timing(queue_s, load_s, run_s, exchange.phases)))
                if status in _BODILESS:
                    answer_body = b""
                elif method != "HEAD":
                    out.append((b"content-length", b"%d" % len(answer_body)))
                elif answer.length >= 0:
                    out.append((b"content-length", b"%d" % answer.length))
                begun = True
                await send({"type": "http.response.start", "status": status, "headers": out})
                await send({"type": "http.response.body", "body": answer_body})
            else:
                self._listen(call, receive)
                out.append((b"server-timing", _timing(queue_s, load_s, run_s, exchange.phases)))
                if answer.length >= 0 and status not in _BODILESS:
                    out.append((b"content-length", b"%d" % answer.length))
                begun = call.at_caller = True
                if call.error is not None:
                    raise call.error
                await send({"type": "http.response.start", "status": status, "headers": out})
                if method == "HEAD":
                    # Nobody is to see the body, which may have no end.
                    self._stop_watching(call)
                    self._scheduler.cancel(call_id)
                    await send({"type": "http.response.body", "body": b""})
                    return
                exchange.keep_for(self._answers)
                while (piece := await exchange.chunk()) is not None:
                    if status not in _BODILESS:
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                    if call.pace is not None:
                        call.body_due = time.perf_counter() + deployed.body_patience_s
                run_s = exchange.end.run_s
                self._stop_watching(call)
                await send({"type": "http.response.body", "body": b""})
        except (GpufaasError, asyncio.CancelledError) as exc:
            if isinstance(exc, GpufaasError):
                error = exc
            elif call.error is not None and call.owner is not None and call.at_caller:
                error = call.error  # it is `_Call.fail` that cancelled us
                call.owner.uncancel()
            else:
                # The server stops, or whoever called us gave up: whoever holds our place must know.
                status = status_of(CallCancelled())
                self._scheduler.cancel(call_id)
                raise
            status = status_of(error)
            self._scheduler.cancel(call_id)
            self._stop_watching(call)
            if begun:
                # Nothing may follow half an answer: the connection is cut, so that the caller sees that it is half.
                raise BrokenAnswer(str(error)) from error
            if not isinstance(error, CallCancelled):
                load_s = load_s or call.loading_s
                answered.append((b"server-timing", _timing(queue_s or time.perf_counter() - began, load_s, run_s)))
                if lease is not None:
                    ran_s = time.perf_counter() - began - queue_s - load_s
                    answered += [(b"x-duration-seconds", b"%.6f" % ran_s), *placement_headers(lease)]
                await send_error(send, error, answered)
        finally:
            self._scheduler.over(call_id)
            if passage is not None:
                passage.leave()
            self._stop_watching(call)
            if call.exchange is not None:
                call.exchange.fail(_OVER)  # nothing, if it ended: only then a node elsewhere knows that nobody reads
                call.exchange.close()
            if call.spool is not None:
                _unlink(call.spool)
            if deployed is not None:
                hit = None if lease is None else not lease.cold
                deployed.stats.observe(status, time.perf_counter() - began, hit, queue_s, load_s, run_s)

    def _find(self, name: bytes, method: str) -> Deployed:
        deployed = self._catalogue.find(name.decode("latin-1"))
        if deployed is None:
            if not self._catalogue.loaded:
                raise Unavailable("the platform is starting: its functions are not all loaded; try again in a second")
            raise UnknownFunction(
                f"there is no function {name.decode('latin-1')!r}: deploy it (gpufaas up), or see gpufaas list"
            )
        if method not in METHODS:
            raise MethodNotAllowed(f"{method} is not forwarded to functions: use one of {', '.join(METHODS)}")
        if deployed.unavailable is not None:
            raise Unavailable(f"{deployed.name} cannot be called: {deployed.unavailable}")
        return deployed

    # --- the body ---

    async def _read(self, deployed: Deployed, call: _Call, receive: Receive, length: int) -> tuple[bytes, int]:
        """
        Return the body and how it travels.

        A model function's body is read whole: beyond `SPOOL_ABOVE` it is written to a file, of which the worker reads.
        So is that of a CPU function if it says that it is not longer: a slow caller holds no slot. Of any other one,
        it gets the first piece, and the rest as it comes.
        """
        message = await receive()
        if message["type"] == "http.disconnect":
            raise CallCancelled("the caller went away")
        body: bytes = message.get("body", b"")
        if not message.get("more_body", False):
            if len(body) > deployed.max_body:
                raise _too_large(deployed, len(body))
            return body, INLINE
        if not deployed.exclusive and not 0 <= length <= SPOOL_ABOVE:
            call.held = deque()
            return body, STREAM
        pieces, size, file = [body], len(body), None
        try:
            while message.get("more_body", False):
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise CallCancelled("the caller went away")
                piece: bytes = message.get("body", b"")
                size += len(piece)
                if size > deployed.max_body:
                    raise _too_large(deployed, size)
                pieces.append(piece)
                if size > SPOOL_ABOVE:
                    if file is None:
                        fd, call.spool = tempfile.mkstemp(prefix="body-", dir=self._spool)
                        file = os.fdopen(fd, "wb")
                    for each in pieces:
                        file.write(each)
                    pieces.clear()
            if file is None:
                return b"".join(pieces), INLINE
            file.close()
            call.spooled = size
            return b"", FILE
        except OSError as exc:
            raise StorageFailed(
                f"the body of {format_bytes(size)} could not be kept in {self._spool} ({exc.strerror}): "
                "make room there, or send less"
            ) from exc
        finally:
            if file is not None and not file.closed:
                file.close()

    async def _stream_body(
        self, call: _Call, exchange: CallExchange, deployed: Deployed, receive: Receive, size: int
    ) -> None:
        """
        Pass the rest of a body on as it comes, then listen for the caller's hanging up.

        Meanwhile the call has a slot, so its caller must go on: his patience (`gpufaas.body-patience`) is used up by
        the time in which we wait for him, and comes back with what he sends, and with each piece of an answer.
        """
        assert call.held is not None
        held, patience_s = call.held, deployed.body_patience_s
        while True:
            if held:
                message = held.popleft()
            else:
                call.awaits_body = True
                message = await receive()
                call.awaits_body = False
            if message["type"] == "http.disconnect":
                call.fail(CallCancelled("the caller went away"))
                return
            piece: bytes = message.get("body", b"")
            size += len(piece)
            if size > deployed.max_body:
                call.fail(_too_large(deployed, size))
                return
            held.appendleft(message)  # until the node has taken it: a lease that is refused comes again
            try:
                if piece:
                    due = call.body_due - time.perf_counter()
                    await exchange.send_body(piece)  # what this takes is not the caller's fault
                    call.body_due = time.perf_counter() + min(patience_s, due + len(piece) / BODY_BYTES_PER_S)
                if not message.get("more_body", False):
                    self._stop_pace(call)
                    await exchange.end_body()
            except LeaseRefused:
                return
            held.popleft()

    # --- timers ---

    def _watch(self, call: _Call, receive: Receive, deployed: Deployed, expires: float, listen: bool) -> None:
        """The call is not a quick one: from now on its caller is listened to, and its time limit counts."""
        call.watched = True
        call.timer = self._loop.call_later(max(0.0, expires - time.perf_counter()), self._expire, call, deployed)
        if listen or call.exchange is not None or call.future is not None:
            self._listen(call, receive)

    def _end_with_outer(
        self, call: _Call, receive: Receive, deployed: Deployed, began: float, timeout_s: Seconds, within_s: Seconds
    ) -> Seconds:
        """A call of a call ends before that does. Return its time limit, from its own beginning."""
        limit_s = time.perf_counter() - began + within_s
        if limit_s >= timeout_s:
            return timeout_s
        call.timeout_s, call.nested = limit_s, True
        self._stop_timer(call)
        self._watch(call, receive, deployed, began + limit_s, False)
        return limit_s

    def _listen(self, call: _Call, receive: Receive) -> None:
        if call.task is None:
            call.task = self._loop.create_task(_until_gone(call, receive))

    def _expire(self, call: _Call, deployed: Deployed) -> None:
        exchange = call.exchange
        if exchange is not None and exchange.end is not None and not call.reads_on:
            # The function is done: its caller has the time that a slow line takes, but does not keep a file for hours.
            call.reads_on = True
            left = exchange.unread + SPOOL_ABOVE  # about so much is with the server and the kernel
            call.timer = self._loop.call_later(left / READ_BYTES_PER_S, self._expire, call, deployed)
            return
        what = f"{deployed.name} did not answer"
        if call.exchange is None and call.future is None:
            what = f"the body for {deployed.name} did not arrive"
        whose = "its time limit (annotation gpufaas.timeout, or environment exec_timeout)"
        if call.nested:
            whose = "which is when the call that made it ends"
        elif call.asked:
            whose = f"which is what X-Timeout asks for (the function's time limit is {deployed.timeout_s:g} s)"
        if exchange is not None and (loading_s := exchange.loading_s):
            call.loading_s = loading_s
            whose += f"; its worker was still loading, for {loading_s:.3g} s of that"
        call.fail(DeadlineExceeded(f"{what} within {call.timeout_s:g} s, {whose}"))

    def _keep_pace(self, call: _Call, deployed: Deployed) -> None:
        """The caller's patience may be used up; if it is not, look again when it can be."""
        patience_s = deployed.body_patience_s
        left_s = call.body_due - time.perf_counter()
        if left_s <= 0.0 and call.awaits_body:
            call.pace = None
            call.fail(
                BodyTooSlow(
                    f"the body for {deployed.name} comes too slowly: over {patience_s:g} s, fewer than "
                    f"{BODY_BYTES_PER_S} bytes/s of it came, and nothing was answered (annotation "
                    "gpufaas.body-patience; a body of at most 1 MiB with a Content-Length may take all of the time "
                    "limit)"
                )
            )
            return
        call.pace = self._loop.call_later(left_s if left_s > 0.0 else patience_s, self._keep_pace, call, deployed)

    def _stop_pace(self, call: _Call) -> None:
        if call.pace is not None:
            call.pace.cancel()
            call.pace = None

    def _stop_timer(self, call: _Call) -> None:
        if call.timer is not None:
            call.timer.cancel()
            call.timer = None

    def _stop_watching(self, call: _Call) -> None:
        self._stop_pace(call)
        self._stop_timer(call)
        if call.task is not None:
            call.task.cancel()
            call.task = None


class BrokenAnswer(Exception):
    """An answer broke off after it had begun; the server closes the connection. Not an error of the platform's."""


async def _until_gone(call: _Call, receive: Receive) -> None:
    """
    Listen for the caller's hanging up.

    What comes of a body that streams is kept for its call, up to a bound: beyond it, the caller is not heard until the
    call is placed.
    """
    size = 0
    while size <= _HELD_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            call.fail(CallCancelled("the caller went away"))
            return
        if call.held is not None:
            call.held.append(message)
            size += len(message.get("body", b""))


async def send_error(send: Send, error: GpufaasError, extra: list[Header]) -> None:
    """Answer *error* as plain text, with the status that it has."""
    body = str(error).encode()
    headers = [(name.lower().encode(), value.encode()) for name, value in headers_of(error).items()]
    names = {name for name, _ in headers}
    if b"content-type" not in names:
        headers.append((b"content-type", b"text/plain; charset=utf-8"))
    headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status_of(error), "headers": headers + extra})
    await send({"type": "http.response.body", "body": body})


def answer_headers(given: list[Header], answered: list[Header]) -> list[Header]:
    if len(given) == 1 and given[0][0] == b"content-type":  # nearly every answer
        return [given[0], *answered]
    return [pair for pair in given if pair[0] not in _DROPPED] + answered


def _call_headers(answer: AnswerHead, asked: list[Header], run_s: Seconds) -> list[Header]:
    """
    Return what a function's answer gives of headers.

    One without a type has that of the request, else text/plain, as OpenFaaS's provider has it (openfaas.md §3.5); how
    long it took is said by its watchdog, or by us.
    """
    given = answer.headers
    if len(given) == 1 and given[0][0] == b"content-type":  # nearly every answer
        return [given[0], (b"x-duration-seconds", b"%.6f" % run_s)]
    typed, timed = answer.status in _BODILESS, False
    out: list[Header] = []
    for pair in given:
        name = pair[0]
        if name in _DROPPED:
            continue
        if name == b"content-type":
            typed = True
        elif name == b"x-duration-seconds":
            timed = True
        out.append(pair)
    if not typed:
        out.append(next((pair for pair in asked if pair[0] == b"content-type"), (b"content-type", b"text/plain")))
    if not timed:
        out.append((b"x-duration-seconds", b"%.6f" % run_s))
    return out


def _asked_timeout(text: bytes) -> Seconds:
    """Return the seconds that an X-Timeout asks for; a value that is none asks for nothing, as with OpenFaaS."""
    try:
        return parse_duration(text.decode("latin-1")) or math.inf
    except InvalidSpec:
        return math.inf


def told_size(text: bytes) -> float:
    """
    Return what an X-Gpufaas-Size says.

    :raises InvalidSpec: it is no number that a size can be
    """
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not 0.0 <= size < math.inf:
        shown = text[:40].decode("latin-1")
        raise InvalidSpec(f"X-Gpufaas-Size is a number, 0 or more, in any unit of the function's own; not {shown!r}")
    return size


def new_call_id() -> str:
    """Return a random UUID, version 4. It names a call and guards nothing, so it needs no system call for entropy."""
    text = f"{_random.getrandbits(128):032x}"
    return f"{text[:8]}-{text[8:12]}-4{text[13:16]}-{'89ab'[int(text[16], 16) & 3]}{text[17:20]}-{text[20:]}"


def placement_headers(lease: Lease) -> list[Header]:
    return [(b"x-gpufaas-start", b"miss" if lease.cold else b"hit"), (b"x-gpufaas-device", lease.device.encode())]


def _timing(queue_s: Seconds, load_s: Seconds, run_s: Seconds, phases: tuple[tuple[str, Seconds], ...] = ()) -> bytes:
    """Server-Timing in ms; after a miss also what its load consisted of, as ``load-room`` and so on."""
    timing = b"queue;dur=%.3f, load;dur=%.3f, run;dur=%.3f" % (queue_s * 1e3, load_s * 1e3, run_s * 1e3)
    for name, seconds in phases:
        timing += b", load-%s;dur=%.3f" % (name.encode(), seconds * 1e3)
    return timing


def _too_large(deployed: Deployed, size: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the body has {format_bytes(size)} or more, but {deployed.name} takes at most "
        f"{format_bytes(deployed.max_body)}: send less, or deploy it with a larger gpufaas.max-body"
    )


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass
