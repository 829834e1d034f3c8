"""
`Calls.run`: runs one call of a function. All fronts (HTTP, WebSocket, asynchronous calls) run their calls here.

Find the function, read the body, ask the scheduler for a lease, hand head and body to the node, return the answer.
Nothing here polls, sleeps, asks a database or parses a body. A call that is quick costs no task and no timer; one that
takes longer than `WATCH_AFTER_S` has its caller listened to and its time limit counted (`call_life`).

Every error becomes an answer in one place, `Calls._refused`; `errors` has the status of each.
"""

import asyncio
import time
from pathlib import Path
from typing import Final

import msgspec

from gpufaas_core.answer_spool import AnswerSpool
from gpufaas_core.errors import CallCancelled, GpufaasError, LeaseRefused, OutOfMemory, UnknownFunction
from gpufaas_core.frames import INLINE, STREAM, UPGRADE, AnswerHead, CallHead
from gpufaas_core.messages import Lease, Outer
from gpufaas_core.model import CallId, Seconds
from gpufaas_gateway.call_body import BodyStream, read_body, remove, too_large
from gpufaas_gateway.call_headers import (
    BODILESS,
    Header,
    RequestHead,
    answer_headers,
    asked_timeout,
    call_headers,
    new_call_id,
    placement_headers,
    read_head,
    timing,
    told_size,
)
from gpufaas_gateway.call_life import CallLife
from gpufaas_gateway.catalogue import Catalogue, Deployed
from gpufaas_gateway.cors import preflight
from gpufaas_gateway.errors import METHODS, MethodNotAllowed, NoWebSocket, Unavailable, status_of
from gpufaas_gateway.ports import CallExchange, NodePort, PlacementPort
from gpufaas_gateway.quotas import Passage
from gpufaas_gateway.request import SWITCHED, Answer, AnswerStream, Request, refusal

WATCH_AFTER_S: Final[Seconds] = 0.025
"""A call that takes longer is watched; it may be twice as long until it is."""
_OVER: Final = CallCancelled("the call is over")


class Calls:
    """See module. One event loop owns it."""

    def __init__(
        self,
        catalogue: Catalogue,
        scheduler: PlacementPort,
        node: NodePort,
        spool: Path,
        *,
        served_by: str = "gpufaas",
        call_suffix: str = "",
    ) -> None:
        """
        :param spool: a directory for large bodies, emptied when the platform starts
        :param served_by: our product token, ``NAME/VERSION``
        :param call_suffix: ends every id that the scheduler is told, so that those of several gateways differ
        """
        self._catalogue = catalogue
        self._scheduler = scheduler
        self._node = node
        self._spool = spool
        self._answers = AnswerSpool(spool)
        self._served_by = (b"x-served-by", served_by.encode())
        self._suffix = call_suffix
        self._loop = asyncio.get_running_loop()
        self._serial = 0
        self._young: set[_Call] = set()
        """Calls that began since the last sweep."""
        self._older: set[_Call] = set()
        """Those that began before it: the next one watches them."""
        self._sweeping: asyncio.TimerHandle | None = None

    async def run(self, request: Request) -> Answer:
        """
        Run one call. What may go wrong becomes an answer.

        :raises CallCancelled: the caller went away: nobody is there to be answered
        """
        call = self._new_call(request)
        self._young.add(call)
        if self._sweeping is None:
            self._sweeping = self._loop.call_later(WATCH_AFTER_S, self._sweep)
        try:
            self._admit(call)
            if call.preflight is not None:
                return call.preflight
            if request.body is None:
                caller, found = call.caller, call.deployed
                assert caller is not None
                assert found is not None
                call.body, call.mode, call.file, call.size = await read_body(
                    caller, found, call.head.length, self._spool
                )
                if call.mode == STREAM:
                    call.stream = BodyStream(caller, found, len(call.body), call.fail)
            else:
                call.body, call.size = request.body, len(request.body)
                if call.deployed is not None and call.size > call.deployed.max_body:
                    raise too_large(call.deployed, len(call.body))
            call.at_caller = False
            answer, body, whole = await self._carry(call)
            if whole and not request.upgrade:
                return self._whole(call, answer, body)
            return self._streamed(call, answer, body, whole)
        except (GpufaasError, asyncio.CancelledError) as exc:
            return self._refused(call, exc)
        finally:
            if call.answered is None:
                self._end(call)

    # --- before it is placed ---

    def _new_call(self, request: Request) -> "_Call":
        """Give it an id, which its caller may have chosen; the scheduler's is unique whatever callers send."""
        began, started_ns, head = time.perf_counter(), time.time_ns(), read_head(request.headers)
        public_id = head.call_id
        if public_id:
            self._serial += 1
            call_id = f"{public_id.decode('latin-1')}#{self._serial}{self._suffix}"
        else:
            name = new_call_id()
            public_id = name.encode()
            call_id = f"{name}#{self._suffix}" if self._suffix else name
        return _Call(
            request=request, caller=request.caller, owner=asyncio.current_task(), began=began, head=head,
            public_id=public_id, id=CallId(call_id),
            ours=[(b"x-call-id", public_id), (b"x-start-time", b"%d" % started_ns), self._served_by],
        )  # fmt: skip

    def _admit(self, call: "_Call") -> None:
        """:raises GpufaasError: it cannot be, or may not now"""
        request, head = call.request, call.head
        found = self._find(request)
        crosses = (found.cors is not None or request.method == "OPTIONS") and not request.upgrade
        if crosses and self._asks_another_origin(call, found):
            return
        call.deployed = deployed = found
        deployed.stats.started()
        if deployed.gate is not None:
            call.passage = deployed.gate.enter()
        head.complete(request.client, call.ours[:2])
        call.timeout_s = deployed.timeout_s
        if request.upgrade:
            head.passed += request.upgrade
            call.what = "did not answer a WebSocket handshake"
            call.mode = UPGRADE
        else:
            if head.length > deployed.max_body:
                raise too_large(deployed, head.length)
            if head.timeout and (wanted_s := asked_timeout(head.timeout)) < deployed.timeout_s:
                call.timeout_s = wanted_s
                call.whose = f"which is what X-Timeout asks for (the function's time limit is {deployed.timeout_s:g} s)"
            if head.size:
                call.asked_size = told_size(head.size)
        call.ends = call.began + call.timeout_s
        if (outer := request.outer) is not None and head.call_id:
            outer = msgspec.structs.replace(outer, call=head.call_id.decode("latin-1"))
        call.outer = outer

    def _find(self, request: Request) -> Deployed:
        deployed = self._catalogue.find(request.name)
        if deployed is None:
            if not self._catalogue.loaded:
                raise Unavailable("the platform is starting: its functions are not all loaded; try again in a second")
            raise UnknownFunction(f"there is no function {request.name!r}: deploy it (gpufaas up), or see gpufaas list")
        if request.method not in METHODS:
            raise MethodNotAllowed(f"{request.method} is not forwarded to functions: use one of {', '.join(METHODS)}")
        if deployed.unavailable is not None:
            raise Unavailable(f"{deployed.name} cannot be called: {deployed.unavailable}")
        if request.upgrade and deployed.spec.kind != "server":
            raise NoWebSocket(
                f"{deployed.name} does not speak WebSocket: functions with a handle() take plain HTTP calls; "
                "deploy a program or an image that listens on a port"
            )
        return deployed

    def _asks_another_origin(self, call: "_Call", found: Deployed) -> bool:
        """Note what a page of another origin must be told; whether the call only asks for that."""
        answer = preflight(found.cors, call.request.method, call.head.passed)
        if answer is not None:
            status, said = answer
            call.preflight = Answer(status, said + call.ours)
            return True
        if found.cors is not None and (said := found.cors.allows(call.head.passed)):
            call.crossing = True
            call.ours += said
        return False

    # --- its place ---

    async def _carry(self, call: "_Call") -> tuple[AnswerHead, bytes, bool]:
        """
        Have it placed and run, again if its node refuses it before it takes anything of it.

        Return head and body of the answer, and whether that is all.
        """
        request = call.request
        if call.asked_size is not None:
            call.size = call.asked_size
        elif call.head.length > 0:
            call.size = call.head.length  # of a body that streams, no more is known
        placed = self._place(call)
        head = CallHead(
            call.public_id.decode("latin-1"), request.method, request.path, request.query, call.head.passed, call.mode,
            call.file, call.timeout_s,
        )  # fmt: skip
        while True:
            lease = call.lease = placed if isinstance(placed, Lease) else await self._granted(call, placed)
            if lease.within_s is not None:
                call.end_within(lease.within_s)
                head = msgspec.structs.replace(head, timeout_s=call.timeout_s)
            if call.passage is not None:
                call.passage.granted()
            try:
                exchange = call.exchange = self._node.call(lease, head, call.body)
                if call.error is not None:
                    exchange.fail(call.error)  # it came between the lease and here, where there was nothing to end
                call.queue_s = time.perf_counter() - call.began
                if call.stream is not None:
                    call.begin_stream(exchange)
                return await exchange.answer()
            except LeaseRefused:  # by the node, or by a worker that was gone before it took anything
                call.exchange = None
                if call.error is not None:
                    raise call.error from None  # it came after the refusal
                if call.stream is not None:
                    call.stream.end()
                placed = self._scheduler.again(call.id)
            except OutOfMemory:
                if not self._may_run_again(call):
                    raise
                placed = self._place(call)

    def _place(self, call: "_Call") -> "Lease | asyncio.Future[Lease]":
        assert call.deployed is not None
        left_s = call.ends - time.perf_counter()
        place, endless = self._scheduler.place, call.mode == UPGRADE
        try:
            return place(call.id, call.deployed.function_id, left_s, call.size, call.outer, endless)
        except UnknownFunction:
            # It was updated while its body came: the new revision answers.
            call.deployed = self._find(call.request)
            return place(call.id, call.deployed.function_id, left_s, call.size, call.outer, endless)

    async def _granted(self, call: "_Call", placed: "asyncio.Future[Lease]") -> Lease:
        """Wait for the lease."""
        while True:
            if call.passage is not None:
                try:
                    call.passage.wait()
                except GpufaasError:
                    placed.cancel()  # nobody will ask it
                    raise
            call.future = placed
            if call.watched or not self._suffix:
                # Where the scheduler is another process, every call waits for it, but few wait long.
                call.listen()
            try:
                lease = await placed
            except UnknownFunction:
                # It was updated meanwhile, and the scheduler is not in this process.
                newer = self._catalogue.find(call.request.name)
                if newer is None or newer is call.deployed or newer.unavailable or call.error is not None:
                    raise
                call.deployed = newer
                again = self._place(call)
                if isinstance(again, Lease):
                    return again
                placed = again
                continue
            call.future = None
            return lease

    def _may_run_again(self, call: "_Call") -> bool:
        """Whether a call that ran out of memory runs once more: its worker was given more room, if there is any."""
        assert call.deployed is not None
        again = call.deployed.idempotent and call.stream is None and not call.ran_out and call.error is None
        if again and call.mode != UPGRADE:
            call.ran_out, call.exchange = True, None
            self._scheduler.over(call.id)
            call.id = CallId(f"{new_call_id()}#{self._suffix}" if self._suffix else new_call_id())
            return True
        return False

    # --- its answer ---

    def _whole(self, call: "_Call", answer: AnswerHead, body: bytes) -> Answer:
        exchange = call.exchange
        assert exchange is not None
        call.lease, call.load_s, call.run_s, call.status = exchange.lease, exchange.load_s, answer.run_s, answer.status
        headers = self._headers(call, answer, exchange)
        call.exchange = None  # it has ended, and has nothing to be let go of
        if answer.status in BODILESS:
            body = b""
        elif call.request.method != "HEAD":
            headers.append((b"content-length", b"%d" % len(body)))
        elif answer.length >= 0:
            headers.append((b"content-length", b"%d" % answer.length))
        return Answer(answer.status, headers, body)

    def _streamed(self, call: "_Call", answer: AnswerHead, body: bytes, whole: bool) -> Answer:
        exchange = call.exchange
        assert exchange is not None
        call.lease, call.load_s, call.status = exchange.lease, exchange.load_s, answer.status
        if call.error is not None:
            raise call.error
        switched = bool(call.request.upgrade) and answer.status == SWITCHED
        if call.request.upgrade and answer.status < 300 and not switched:
            assert call.deployed is not None
            raise NoWebSocket(
                f"{call.deployed.name} answered a WebSocket handshake with {answer.status}: it does not speak "
                "WebSocket at this path; call it with plain HTTP"
            )
        stream = call.answered = AnswerStream(
            call, exchange, body, whole, switched=switched,
            on_cancel=lambda: self._scheduler.cancel(call.id), on_end=lambda: self._end(call),
        )  # fmt: skip
        if call.request.upgrade:
            if switched:
                call.stop_watching()
            headers = answer_headers(answer.headers, call.ours + placement_headers(exchange.lease))
            return Answer(answer.status, headers, stream=stream)
        call.listen()
        call.run_s = time.perf_counter() - call.began - call.queue_s - call.load_s
        headers = self._headers(call, answer, exchange)
        if answer.length >= 0 and answer.status not in BODILESS:
            headers.append((b"content-length", b"%d" % answer.length))
        call.at_caller = True
        exchange.keep_for(self._answers)
        return Answer(answer.status, headers, stream=stream)

    def _headers(self, call: "_Call", answer: AnswerHead, exchange: CallExchange) -> list[Header]:
        headers = call_headers(answer, call.head.passed, call.run_s)
        if call.crossing:
            headers = [pair for pair in headers if pair[0] != b"access-control-allow-origin"]
        headers += call.ours
        headers += placement_headers(exchange.lease)
        headers.append(timing(call.queue_s, call.load_s, call.run_s, exchange.phases))
        return headers

    def _refused(self, call: "_Call", exc: GpufaasError | asyncio.CancelledError) -> Answer:
        """Return the answer to a call that failed."""
        self._scheduler.cancel(call.id)
        if isinstance(exc, GpufaasError):
            error = exc
        elif call.was_cancelled_by_us():
            assert call.error is not None
            error = call.error
        else:
            call.status = status_of(CallCancelled())
            raise exc  # the server stops, or the one who called us gave up
        call.status = status_of(error)
        if isinstance(error, CallCancelled):
            raise error
        more = [*call.ours, timing(call.queue_s or time.perf_counter() - call.began, call.load_s, call.run_s)]
        if call.lease is not None:
            ran_s = time.perf_counter() - call.began - call.queue_s - call.load_s
            more += [(b"x-duration-seconds", b"%.6f" % ran_s), *placement_headers(call.lease)]
        return refusal(error, more)

    def _end(self, call: "_Call") -> None:
        """It is over: give up all that it had, and count it."""
        self._young.discard(call)
        self._older.discard(call)
        self._scheduler.over(call.id)
        if call.passage is not None:
            call.passage.leave()
        call.stop_watching()
        if call.exchange is not None:
            call.exchange.fail(_OVER)  # nothing, if it ended: only then a node elsewhere knows that nobody reads
            call.exchange.close()
        if call.file:
            remove(call.file)
        if call.deployed is not None:
            hit = None if call.lease is None else not call.lease.cold
            seconds = time.perf_counter() - call.began
            call.deployed.stats.observe(call.status, seconds, hit, call.queue_s, call.load_s, call.run_s)

    def _sweep(self) -> None:
        """Watch the calls that have run since before the last sweep."""
        older, self._older, self._young = self._older, self._young, set()
        for call in older:
            if not call.watched:
                call.watch()
        self._sweeping = self._loop.call_later(WATCH_AFTER_S, self._sweep) if self._older else None


class _Call(CallLife, eq=False, kw_only=True):
    """One call's state."""

    request: Request
    head: RequestHead
    public_id: bytes
    """X-Call-Id."""
    id: CallId
    """The scheduler's name for it."""
    ours: list[Header]
    """The headers that every answer to it has."""
    preflight: Answer | None = None
    crossing: bool = False
    """The platform, and not the function, says which origins may read the answer."""
    passage: Passage | None = None
    outer: Outer | None = None
    body: bytes = b""
    mode: int = INLINE
    file: str = ""
    size: float = 0.0
    """Of the request, as the scheduler is told; `asked_size` if its caller says it."""
    asked_size: float | None = None
    lease: Lease | None = None
    ran_out: bool = False
    """It runs for the second time, since it ran out of memory."""
    answered: AnswerStream | None = None
    """What is to end it, if its answer streams."""
