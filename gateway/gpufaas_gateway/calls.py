"""
`Calls.run`: runs one call of a function. All fronts (HTTP, WebSocket, asynchronous calls) run their calls here.

Find the function, read the body, ask the scheduler for a grant, give head and body to the node, return the answer.
Nothing here polls, sleeps, asks a database or parses a body. A quick call costs no task and no timer. One that takes
longer is watched (`watching`): `call_life` listens to its caller and counts its time limit.

Every error becomes an answer in one place, `Calls._refused`; `errors` has the status of each.
"""

import asyncio
import time
from functools import partial
from math import inf
from pathlib import Path
from typing import Final

import msgspec

from gpufaas_core.answer_spool import AnswerSpool
from gpufaas_core.driven import PAUSE
from gpufaas_core.errors import CallCancelled, GpufaasError, GrantRefused, LoadFailed, OutOfMemory, UnknownFunction
from gpufaas_core.messages import Grant
from gpufaas_core.model import CallId, Seconds
from gpufaas_core.units import Bytes
from gpufaas_core.wire.bodies import STREAM, UPGRADE
from gpufaas_core.wire.heads import AnswerHead, CallHead
from gpufaas_gateway.call import Call
from gpufaas_gateway.call_body import BodyStream, read_rest, remove, too_large
from gpufaas_gateway.call_headers import (
    BODILESS,
    MAX_TEMPLATES,
    Header,
    answer_headers,
    call_headers,
    head_template,
    keep_template,
    new_call_id,
    placement_headers,
    read_head,
    timing,
)
from gpufaas_gateway.catalogue import Catalogue, Deployed
from gpufaas_gateway.cors import preflight
from gpufaas_gateway.errors import METHODS, MethodNotAllowed, NoWebSocket, status_of
from gpufaas_gateway.large_body import BodyMemory
from gpufaas_gateway.ports import CallExchange, NodePort, PlacementPort
from gpufaas_gateway.request import SWITCHED, Answer, AnswerStream, Request, let_go, refusal
from gpufaas_gateway.watching import SHORT_S, Watching

_OVER: Final = CallCancelled("the call is over")
_MOST_LINES: Final = 12
"""An answer with more headers has no template."""


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
        here: bool = False,
    ) -> None:
        """
        :param spool: a directory for large bodies, emptied when the platform starts
        :param served_by: our product token, ``NAME/VERSION``
        :param call_suffix: ends the scheduler's ids of calls, so that those of several gateways differ
        :param here: *node* is in this process
        """
        self._catalogue = catalogue
        self._scheduler = scheduler
        self._node = node
        self._spool = spool
        self._memory = BodyMemory() if here else None
        self._answers = AnswerSpool(spool)
        self._served_by = (b"x-served-by", served_by.encode())
        self._suffix = call_suffix
        self._serial = 0
        self._watching = Watching()

    async def run(self, request: Request) -> Answer:
        """
        Run one call. Its errors become answers.

        :raises CallCancelled: the caller went away, so nobody gets an answer
        """
        call = self._new_call(request)
        self._watching.begin(call)
        try:
            deployed = self._find(request)
            crosses = request.method == "OPTIONS" or deployed.cors is not None
            if crosses and (preflight := self._crossing(call, deployed)) is not None:
                return preflight
            self._admit(call, deployed)
            body, more = request.body, False
            if body is None:
                assert call.caller is not None
                body, more = await call.caller.receive()
            if more:
                await self._read_rest(call, body)
            else:
                call.body, call.size = body, len(body)
            if call.size > deployed.max_body:
                raise too_large(deployed, len(body))
            call.at_caller = False
            if call.asked_size is not None:
                call.size = call.asked_size
            elif call.length > 0:
                call.size = call.length  # of a body that streams, no more is known
            placed = self._place(call)
            while True:
                grant = placed if isinstance(placed, Grant) else await self._granted(call, placed)
                try:
                    exchange = self._begin(call, grant) if call.begun is None else call.has_begun()
                    answer, said, whole = await exchange.answer()
                    break
                except (GrantRefused, OutOfMemory) as exc:
                    placed = self._place_again(call, exc)
                except (LoadFailed, UnknownFunction) as exc:
                    placed = await self._place_at_another(call, exc)
            if whole and not request.upgrade:
                answered = self._whole(call, exchange, answer, said)
                if request.send is not None:
                    request.send(answered)
                return answered
            return self._streamed(call, exchange, answer, bytes(said), whole)
        except (GpufaasError, asyncio.CancelledError) as exc:
            refused = self._refused(call, exc)
            let_go(exc)
            return refused
        finally:
            if not call.streams:
                self._end(call)

    # --- before it is placed ---

    def _new_call(self, request: Request) -> Call:
        """Give the call an id. The caller may choose it; the scheduler's is unique even if two choose the same."""
        began, started_ns = time.perf_counter(), time.time_ns()
        read = request.read or read_head(request.headers, request.client)
        public_id = read[1]
        outer = request.outer
        if public_id:
            self._serial += 1
            name = public_id.decode("latin-1")
            call_id = f"{name}#{self._serial}{self._suffix}"
            if outer is not None:
                outer = msgspec.structs.replace(outer, call=name)
        else:
            name = new_call_id()
            public_id = name.encode()
            call_id = f"{name}#{self._suffix}" if self._suffix else name
        ours = [(b"x-call-id", public_id), (b"x-start-time", b"%d" % started_ns), self._served_by]
        return Call(request, began, read, name, call_id, outer, ours)

    def _admit(self, call: Call, deployed: Deployed) -> None:
        """:raises GpufaasError: the call cannot run, or not now"""
        request = call.request
        call.deployed = deployed
        deployed.stats.started()
        if deployed.gate is not None:
            call.passage = deployed.gate.enter()
        call.passed = call.passed + call.ours[:2]  # not in place: the next request may have the same head
        call.exec_s = deployed.exec_s
        if request.upgrade:
            call.passed += request.upgrade  # this list is its own
            call.what = "did not answer a WebSocket handshake"
            call.mode = UPGRADE
        else:
            if call.length > deployed.max_body:
                raise too_large(deployed, call.length)
        if call.asked is not None:
            call.ask(call.asked)
        call.ends, call.last = call.began + deployed.timeout_s, call.began + deployed.whole_s
        if deployed.timeout_s < SHORT_S or call.exec_s < SHORT_S:
            call.watch()

    async def _read_rest(self, call: Call, first: bytes) -> None:
        """Read a body that did not come in one piece, or begin to stream it."""
        assert call.deployed is not None
        assert call.caller is not None
        call.body, call.mode, call.file, call.size = await read_rest(
            first, call.caller, call.deployed, call.length, self._spool, self._memory
        )
        if call.mode == STREAM:
            call.stream = BodyStream(call.caller, call.deployed, len(call.body), call.fail)

    def _find(self, request: Request) -> Deployed:
        deployed = self._catalogue.find(request.name)
        if deployed is None:
            raise self._catalogue.why_not(request.name)
        if request.method not in METHODS:
            raise MethodNotAllowed(f"{request.method} is not forwarded to functions: use one of {', '.join(METHODS)}")
        if deployed.unavailable is not None:
            raise self._catalogue.why_not(request.name)
        if request.upgrade and deployed.spec.kind != "server":
            raise NoWebSocket(
                f"{deployed.name} does not speak WebSocket: functions with a handle() take plain HTTP calls; "
                "deploy a program or an image that listens on a port"
            )
        return deployed

    def _crossing(self, call: Call, found: Deployed) -> Answer | None:
        """Note the headers for a page of another origin (CORS); return the answer if the call only asks for them."""
        if call.request.upgrade or (found.cors is None and found.spec.kind == "server"):
            return None
        answer = preflight(found.cors, call.request.method, call.passed)
        if answer is not None:
            status, said = answer
            return Answer(status, said + call.ours)
        if found.cors is not None and (said := found.cors.allows(call.passed)):
            call.crossing = True
            call.ours += said
        return None

    # --- its place ---

    def _place(self, call: Call) -> "Grant | asyncio.Future[Grant]":
        assert call.deployed is not None
        left_s = (call.last if call.exec_s == inf else min(call.last, call.ends + call.exec_s)) - time.perf_counter()
        place, endless = self._scheduler.place, call.mode == UPGRADE
        try:
            return place(call.id, call.deployed.function_id, left_s, call.size, call.outer, endless, call.goal_s)
        except UnknownFunction:
            # The function was updated while the body came: the new revision answers.
            call.deployed = self._find(call.request)
            return place(call.id, call.deployed.function_id, left_s, call.size, call.outer, endless, call.goal_s)

    async def _granted(self, call: Call, placed: "Grant | asyncio.Future[Grant]") -> Grant:
        """Return the grant that *placed* promises."""
        while not isinstance(placed, Grant):
            if call.passage is not None:
                try:
                    call.passage.wait()
                except GpufaasError:
                    placed.cancel()  # so that the scheduler makes no grant
                    raise
            call.future = placed
            driven = call.request.driven
            if driven is not None and not placed.done():
                placed.add_done_callback(driven.awake)
            self._scheduler.on_grant(call.id, partial(self._begin_early, call))
            if call.watched or not self._suffix:
                # If the scheduler is another process, every call waits for it, but few wait long.
                call.listen()
            while driven is not None and not placed.done():
                await PAUSE
            try:
                placed = await placed
            except (LoadFailed, UnknownFunction) as exc:
                placed = await self._place_at_another(call, exc)
        call.future = None
        return placed

    def _begin(self, call: Call, grant: Grant) -> CallExchange:
        """:raises GrantRefused: the node took nothing of the call"""
        call.grant, request = grant, call.request
        if grant.within_s is not None:
            call.end_within(grant.within_s)
        if call.passage is not None:
            call.passage.granted()
        now = time.perf_counter()
        left_s = call.last - now if call.exec_s == inf else min(call.exec_s, call.last - now)
        head = CallHead(
            call.name, request.method, request.path, request.query, call.passed, call.mode, call.file, left_s
        )
        exchange = call.exchange = self._node.call(grant, head, call.body)
        if request.driven is not None:
            exchange.resume = request.driven.resume
        if call.error is not None:
            exchange.fail(call.error)  # it came after the grant and before there was an exchange to fail
        call.queue_s = now - call.began
        if call.exec_s != inf:
            exchange.when_runs(call.run_begins)
        if call.stream is not None:
            call.begin_stream(exchange)
        elif call.watched:
            call.listen()  # while its body came, `watch` had nothing to listen for
        return exchange

    def _begin_early(self, call: Call, grant: Grant) -> None:
        """The grant has come that *call* waits for: begin before its task runs, which is behind other calls' tasks."""
        driven, placed = call.request.driven, call.future
        try:
            call.begun = exchange = self._begin(call, grant)
        except Exception as exc:
            call.begun = exc  # raised in its task
            return
        if driven is not None and placed is not None and exchange.silent:
            placed.remove_done_callback(driven.awake)  # it goes on when the answer comes: until then it would wait

    def _place_again(self, call: Call, error: GrantRefused | OutOfMemory) -> "Grant | asyncio.Future[Grant]":
        """
        Place a call again that its node or worker did not take, or that ran out of memory.

        :raises GpufaasError: *error*, if the call may not run again; or the error that ended the call meanwhile
        """
        assert call.deployed is not None
        if isinstance(error, GrantRefused):
            call.exchange = None
            if call.error is not None:
                raise call.error from None
            if call.stream is not None:
                call.stream.end()
            call.waits(call.began)
            return self._scheduler.again(call.id)
        once = call.deployed.idempotent and call.stream is None and call.mode != UPGRADE
        if not once or call.ran_out or call.error is not None:
            raise error
        # Its worker has got more memory meanwhile, if the device had any.
        call.ran_out = True
        return self._place_anew(call, time.perf_counter())

    async def _place_at_another(
        self, call: Call, error: LoadFailed | UnknownFunction
    ) -> "Grant | asyncio.Future[Grant]":
        """
        Place a call at the revision that serves instead: its own was on trial and did not load, or was removed. Of a
        removal, a gateway may learn after the scheduler, which is another process.

        :raises GpufaasError: *error*, if there is none; or the error that ended the call meanwhile
        """
        deployed = call.deployed
        assert deployed is not None
        if call.stream is not None or (isinstance(error, LoadFailed) and deployed.trial is None):
            raise error
        if isinstance(error, LoadFailed) and deployed.trial is not None:
            await deployed.trial(str(error))
        else:
            await self._catalogue.replaced(deployed)
        newer = self._catalogue.find(call.request.name)
        if newer is None or newer is deployed or newer.unavailable:
            raise error
        if call.error is not None:
            raise call.error from None
        call.deployed = newer
        return self._place_anew(call, call.began)

    def _place_anew(self, call: Call, since: float) -> "Grant | asyncio.Future[Grant]":
        """Place a call for the scheduler as another one, which waits since *since*."""
        call.exchange = None
        call.waits(since)
        self._scheduler.over(call.id)
        call.id = CallId(f"{new_call_id()}#{self._suffix}" if self._suffix else new_call_id())
        return self._place(call)

    # --- its answer ---

    def _whole(
        self, call: Call, exchange: CallExchange, answer: AnswerHead, body: bytes | memoryview
    ) -> Answer:  # fmt: skip
        call.grant, call.load_s, call.run_s, call.status = exchange.grant, exchange.load_s, answer.run_s, answer.status
        call.exchange = None  # it has ended, and has nothing to release
        if call.request.send is not None and (lines := self._lines(call, answer, exchange, len(body))):
            return Answer(answer.status, [], body, lines=lines)
        headers = self._headers(call, answer, exchange)
        if answer.status in BODILESS:
            body = b""
        elif call.request.method != "HEAD":
            headers.append((b"content-length", b"%d" % len(body)))
        elif answer.length >= 0:
            headers.append((b"content-length", b"%d" % answer.length))
        return Answer(answer.status, headers, body)

    def _lines(self, call: Call, answer: AnswerHead, exchange: CallExchange, size: Bytes) -> bytes:
        """Return the headers of an answer as lines, from a template; empty if it is not of the common kind."""
        given, grant, deployed = answer.headers, exchange.grant, call.deployed
        assert deployed is not None
        if not 0 < len(given) <= _MOST_LINES or call.crossing:
            return b""
        if call.request.method == "HEAD" or answer.status in BODILESS:
            return b""
        if grant.cold or exchange.phases or grant.held_s or grant.load_s or len(grant.calls) > 1:
            return b""
        part = grant.parts[0]
        alone = len(given) == 1
        key = given[0] if alone else tuple(given), part.device, part.share
        template = deployed.templates.get(key)
        if template is None:
            if not alone and len(deployed.templates) >= MAX_TEMPLATES:
                return b""  # one of the headers is another one each time
            template = head_template(given, self._served_by, placement_headers(grant))
            keep_template(deployed.templates, key, template)
        if not template:
            return b""
        run_s, ours = call.run_s, call.ours
        times = (call.queue_s * 1e3, call.load_s * 1e3, run_s * 1e3)
        return template % (run_s, ours[0][1], ours[1][1], *times, size)

    def _streamed(self, call: Call, exchange: CallExchange, answer: AnswerHead, body: bytes, whole: bool) -> Answer:
        call.grant, call.load_s, call.status = exchange.grant, exchange.load_s, answer.status
        if call.error is not None:
            raise call.error
        switched = bool(call.request.upgrade) and answer.status == SWITCHED
        if call.request.upgrade and answer.status < 300 and not switched:
            assert call.deployed is not None
            raise NoWebSocket(
                f"{call.deployed.name} answered a WebSocket handshake with {answer.status}: it does not speak "
                "WebSocket at this path; call it with plain HTTP"
            )
        call.streams = True
        stream = AnswerStream(
            call, exchange, body, whole, switched=switched,
            on_cancel=lambda: self._scheduler.cancel(call.id), on_end=lambda: self._end(call),
        )  # fmt: skip
        if call.request.upgrade:
            if switched:
                self._watching.end(call)
            headers = answer_headers(answer.headers, [*call.ours, *placement_headers(exchange.grant, exchange.tier)])
            return Answer(answer.status, headers, stream=stream)
        call.listen()
        call.run_s = time.perf_counter() - call.began - call.queue_s - call.load_s
        headers = self._headers(call, answer, exchange)
        if answer.length >= 0 and answer.status not in BODILESS:
            headers.append((b"content-length", b"%d" % answer.length))
        call.at_caller = True
        exchange.keep_for(self._answers)
        return Answer(answer.status, headers, stream=stream)

    def _headers(self, call: Call, answer: AnswerHead, exchange: CallExchange) -> list[Header]:
        headers = call_headers(answer, call.passed, call.run_s)
        if call.crossing:
            headers = [pair for pair in headers if pair[0] != b"access-control-allow-origin"]
        headers += call.ours
        headers += placement_headers(exchange.grant, exchange.tier)
        grant = exchange.grant
        headers.append(timing(call.queue_s, call.load_s, call.run_s, exchange.phases, grant.held_s, grant.load_s))
        return headers

    def _refused(self, call: Call, exc: GpufaasError | asyncio.CancelledError) -> Answer:
        """Return the answer to a call that failed."""
        self._scheduler.cancel(call.id)
        if isinstance(exc, GpufaasError):
            error = exc
        elif call.was_cancelled_by_us():
            assert call.error is not None
            error = call.error
        else:
            call.status = status_of(CallCancelled())
            raise exc  # the server stops, or our task was cancelled from outside
        call.status = status_of(error)
        if isinstance(error, CallCancelled):
            raise error
        phases: tuple[tuple[str, Seconds], ...] = ()
        tier = "disk"
        if call.exchange is not None:
            phases, tier = call.exchange.phases, call.exchange.tier
            call.load_s = call.exchange.load_s or call.load_s  # of a load that goes on, the time so far
        more = [*call.ours, timing(call.queue_s or time.perf_counter() - call.began, call.load_s, call.run_s, phases)]
        if call.grant is not None:
            ran_s = time.perf_counter() - call.began - call.queue_s - call.load_s
            more += [(b"x-duration-seconds", b"%.6f" % ran_s), *placement_headers(call.grant, tier)]
        return refusal(error, more)

    def _end(self, call: Call) -> None:
        """Release all that the call has, and count it."""
        call.body = b""  # what refers to the call may live until the garbage is collected
        self._watching.end(call)
        call.stream = None  # it refers to the call
        self._scheduler.over(call.id)
        if call.passage is not None:
            call.passage.leave()
        if call.exchange is not None:
            call.exchange.fail(_OVER)  # nothing, if it ended: only then a node elsewhere knows that nobody reads
            call.exchange.close()
        if call.file:
            remove(call.file)
        if call.deployed is not None:
            if call.run_s and call.deployed.trial is not None:
                call.deployed.trial("")
            hit = None if call.grant is None else not call.grant.cold
            seconds = time.perf_counter() - call.began
            call.deployed.stats.observe(call.status, seconds, hit, call.queue_s, call.load_s, call.run_s)
            if (grant := call.grant) is not None and (len(grant.calls) > 1 or grant.held_s):
                call.deployed.stats.observe_batch(len(grant.calls), min(grant.held_s, call.queue_s))
