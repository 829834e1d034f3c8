"""
`Calls.run`: runs one call of a function. All fronts (HTTP, WebSocket, asynchronous calls) run their calls here.

Find the function, read the body, ask the scheduler for a grant, give head and body to the node, return the answer.
`placing` and `answering` have the steps; `call_state` says where a call stands. Nothing here polls, sleeps, asks a
database or parses a body. A quick call costs no task and no timer. One that takes longer is watched (`call.LongCalls`).

Every error becomes an answer in one place, `Calls._failed`; `errors` has the status of each.
"""

import asyncio
import time
from pathlib import Path
from typing import Final

import msgspec

from gpufaas_core.answer_spool import AnswerSpool
from gpufaas_core.errors import CallCancelled, GpufaasError
from gpufaas_core.messages import Grant
from gpufaas_core.wire.bodies import STREAM, UPGRADE
from gpufaas_gateway import answering
from gpufaas_gateway import call_state as states
from gpufaas_gateway.answer_stream import AnswerStream
from gpufaas_gateway.answering import Answer, Early, let_go
from gpufaas_gateway.body_memory import BodyMemory
from gpufaas_gateway.call import SHORT_S, Call, LongCalls
from gpufaas_gateway.call_body import BodyStream, read_rest, remove, too_large
from gpufaas_gateway.call_headers import new_call_id, read_head
from gpufaas_gateway.catalogue import Catalogue, ServedRevision
from gpufaas_gateway.cors import preflight
from gpufaas_gateway.errors import status_of
from gpufaas_gateway.placing import AGAIN, Placing
from gpufaas_gateway.ports import NodePort, PlacementPort
from gpufaas_gateway.request import Request

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
        here: bool = False,
    ) -> None:
        """
        :param spool: a directory for large bodies, emptied when the platform starts
        :param served_by: our product token, ``NAME/VERSION``
        :param call_suffix: ends the scheduler's ids of calls, so that those of several gateways differ
        :param here: *node* is in this process
        """
        self._scheduler = scheduler
        self._spool = spool
        self._memory = BodyMemory() if here else None
        self._answers = AnswerSpool(spool)
        self._served_by = (b"x-served-by", served_by.encode())
        self._suffix = call_suffix
        self._placing = Placing(catalogue, scheduler, node, call_suffix)
        self._serial = 0
        self._watching = LongCalls()

    async def run(self, request: Request, early: Early | None = None) -> Answer:
        """
        Run one call. Its errors become answers.

        :raises CallCancelled: the caller went away, so nobody gets an answer
        """
        call = self._new_call(request)
        self._watching.begin(call)
        try:
            deployed = self._placing.find(request)
            crosses = request.method == "OPTIONS" or deployed.cors is not None
            if crosses and (preflight := self._crossing(call, deployed)) is not None:
                return preflight
            self._admit(call, deployed)
            if request.body is None:
                await self._read(call, deployed)
            else:
                call.body, call.size = request.body, len(request.body)
            if call.size > deployed.max_body:
                raise too_large(deployed, len(call.body))
            if call.asked_size is not None:
                call.size = call.asked_size
            elif call.length > 0:
                call.size = call.length  # of a body that streams, no more is known
            placing = self._placing
            placed = placing.place(call)
            while True:
                try:
                    if isinstance(placed, Grant):
                        exchange = placing.begin(call, placed)
                    else:
                        exchange = await placing.wait(call, placed)
                    answer, said, whole = await exchange.answer()
                    break
                except AGAIN as exc:
                    placed = await placing.again(call, exc)
            if not whole or request.upgrade:
                stream = AnswerStream(call, answer.status, bytes(said), whole, self._scheduler.cancel, self._end)
                if stream.switched:
                    self._watching.end(call)  # its time limit was for the handshake
                return answering.streamed(call, answer, stream, self._answers)
            answered = answering.whole(call, answer, said, self._served_by, in_lines=early is not None)
            if early is not None:
                early(answered)
            return answered
        except (GpufaasError, asyncio.CancelledError) as exc:
            return self._failed(call, exc)
        finally:
            if call.state < states.STREAMS:
                self._end(call)

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

    def _admit(self, call: Call, deployed: ServedRevision) -> None:
        """:raises GpufaasError: the call cannot run, or not now"""
        request = call.request
        call.deployed = deployed
        deployed.stats.begun += 1
        if deployed.gate is not None:
            call.passage = deployed.gate.enter()
        call.passed = call.passed + call.ours[:2]  # not in place: the next request may have the same head
        call.exec_s = deployed.exec_s
        if request.upgrade:
            call.passed += request.upgrade  # this list is its own
            call.mode = UPGRADE
        elif call.length > deployed.max_body:
            raise too_large(deployed, call.length)
        call.asked = deployed.asked
        if call.told is not None:
            call.ask(call.told, deployed)
        call.ends, call.last = call.began + deployed.timeout_s, call.began + deployed.whole_s
        if deployed.timeout_s < SHORT_S or call.exec_s < SHORT_S:
            call.watched().attend()

    async def _read(self, call: Call, deployed: ServedRevision) -> None:
        """Read the body from the caller, or begin to stream it."""
        caller = call.request.caller
        assert caller is not None
        body, more = await caller.receive()
        if not more:
            call.body, call.size = body, len(body)
            return
        call.body, call.mode, call.file, call.size = await read_rest(
            body, caller, deployed, call.length, self._spool, self._memory
        )
        if call.mode == STREAM:
            call.stream = BodyStream(caller, deployed, len(call.body), call.fail)

    def _crossing(self, call: Call, found: ServedRevision) -> Answer | None:
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

    # --- its end ---

    def _failed(self, call: Call, exc: GpufaasError | asyncio.CancelledError) -> Answer:
        """
        Return the answer to a call that failed.

        :raises CallCancelled: nobody gets one
        :raises asyncio.CancelledError: the same: the server stops, or our task was cancelled from outside
        """
        self._scheduler.cancel(call.id)
        error = exc if isinstance(exc, GpufaasError) else call.error if call.was_cancelled_by_us() else None
        call.status = status_of(error or CallCancelled())
        if error is None or isinstance(error, CallCancelled):
            raise error or exc
        answer = answering.refused(call, error)
        let_go(exc)
        return answer

    def _end(self, call: Call) -> None:
        """Release all that the call has, and count it."""
        call.state = states.END[call.state]
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
