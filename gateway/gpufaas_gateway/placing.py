"""
The place of a call: the revision that serves it, a grant of the scheduler, and its begin at the node that the grant
names. Again, where the node did not take it; at another revision, where its own does not serve any more.
"""

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from math import inf

from gpufaas_core.driven import PAUSE
from gpufaas_core.errors import GpufaasError, GrantRefused, LoadFailed, NoRoom, OutOfMemory, UnknownFunction
from gpufaas_core.messages import Grant
from gpufaas_core.model import CallId
from gpufaas_core.wire.bodies import UPGRADE
from gpufaas_core.wire.heads import CallHead
from gpufaas_gateway import call_state as states
from gpufaas_gateway.call import Call
from gpufaas_gateway.call_headers import new_call_id
from gpufaas_gateway.catalogue import Catalogue, ServedRevision
from gpufaas_gateway.errors import METHODS, MethodNotAllowed, NoWebSocket
from gpufaas_gateway.ports import CallExchange, NodePort, PlacementPort
from gpufaas_gateway.request import Request

Placed = Grant | asyncio.Future[Grant]
AGAIN = (GrantRefused, OutOfMemory, LoadFailed, NoRoom, UnknownFunction)
"""Errors after which a call may run all the same: `Placing.again`."""


@dataclass(frozen=True, eq=False, slots=True)
class Placing:
    """See module. One event loop owns it."""

    catalogue: Catalogue
    scheduler: PlacementPort
    node: NodePort
    suffix: str
    """See `Calls`."""

    def find(self, request: Request) -> ServedRevision:
        """
        Return the revision that serves *request*. O(1).

        :raises GpufaasError: there is none, or it does not take such a request
        """
        deployed = self.catalogue.find(request.name)
        if deployed is None:
            raise self.catalogue.why_not(request.name)
        if request.method not in METHODS:
            raise MethodNotAllowed(f"{request.method} is not forwarded to functions: use one of {', '.join(METHODS)}")
        if deployed.unavailable is not None:
            raise self.catalogue.why_not(request.name)
        if request.upgrade and deployed.spec.kind != "server":
            raise NoWebSocket(
                f"{deployed.name} does not speak WebSocket: functions with a handle() take plain HTTP calls; "
                "deploy a program or an image that listens on a port"
            )
        return deployed

    def place(self, call: Call) -> Placed:
        """
        Ask for a grant.

        :raises GpufaasError: the scheduler refuses the call at once; the future raises the same when it does so later
        """
        assert call.deployed is not None
        call.state = states.PLACE[call.state]
        left_s = (call.last if call.exec_s == inf else min(call.last, call.ends + call.exec_s)) - time.perf_counter()
        place, endless = self.scheduler.place, call.mode == UPGRADE
        try:
            return place(call.id, call.deployed.function_id, left_s, call.size, call.outer, endless, call.asked)
        except UnknownFunction:
            # The function was updated while the body came: the new revision answers.
            call.deployed = self.find(call.request)
            return place(call.id, call.deployed.function_id, left_s, call.size, call.outer, endless, call.asked)
        except (LoadFailed, NoRoom, OutOfMemory) as exc:
            if call.deployed.trial is None:
                raise
            refused: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
            refused.set_exception(exc)
            return refused  # as what is refused later: the revision before takes the call, by `again`

    async def wait(self, call: Call, promised: asyncio.Future[Grant]) -> CallExchange:
        """Return the exchange of a call that has begun, by a grant that was *promised*."""
        if call.passage is not None:
            try:
                call.passage.wait()
            except GpufaasError:
                promised.cancel()  # so that the scheduler makes no grant
                raise
        call.future, driven = promised, call.request.driven
        if driven is not None and not promised.done():
            promised.add_done_callback(driven.awake)
        self.scheduler.on_grant(call.id, partial(self._begin_early, call))
        if call.watch is not None or not self.suffix:
            # If the scheduler is another process, every call waits for it, but few wait long.
            call.watched().listen()
        while driven is not None and not promised.done():
            await PAUSE
        grant = await promised
        call.future, refused, call.refused = None, call.refused, None
        if refused is not None:
            raise refused
        return self.begin(call, grant) if call.exchange is None else call.exchange

    def begin(self, call: Call, grant: Grant) -> CallExchange:
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
        exchange = call.exchange = self.node.call(grant, head, call.body)
        call.state = states.BEGIN[call.state]
        if request.driven is not None:
            exchange.resume = request.driven.resume
        if call.error is not None:
            exchange.fail(call.error)  # it came after the grant and before there was an exchange to fail
        call.queue_s = now - call.began
        if call.exec_s != inf:
            exchange.when_runs(call.run_begins)
        if call.stream is not None:
            call.begin_stream(exchange)
        elif call.watch is not None:
            call.watch.listen()  # while its body came, there was nothing to listen for
        return exchange

    def _begin_early(self, call: Call, grant: Grant) -> None:
        """The grant has come that *call* waits for: begin before its task runs, which is behind other calls' tasks."""
        driven, promised = call.request.driven, call.future
        try:
            exchange = self.begin(call, grant)
        except Exception as exc:
            call.refused = exc  # raised in its task
            return
        if driven is not None and promised is not None and exchange.silent:
            promised.remove_done_callback(driven.awake)  # it goes on when the answer comes: until then it would wait

    async def again(self, call: Call, error: GpufaasError) -> Placed:
        """
        Place a call again that ended with *error*, one of `AGAIN`.

        :raises GpufaasError: *error*, if the call may not run again; or the error that ended it meanwhile
        """
        too_large = isinstance(error, OutOfMemory) and call.future is not None  # no device has enough for its load
        if too_large or isinstance(error, LoadFailed | NoRoom | UnknownFunction):
            await self._move(call, error)
            return self._place_anew(call, call.began)
        if call.future is not None:
            raise error  # it is the scheduler that refuses
        if isinstance(error, GrantRefused):
            call.exchange = None
            if call.error is not None:
                raise call.error from None
            if call.stream is not None:
                call.stream.end()
            call.state = states.PLACE[call.state]
            call.waits(call.began)
            return self.scheduler.again(call.id)
        assert call.deployed is not None
        once = call.deployed.options.idempotent and call.stream is None and call.mode != UPGRADE
        if not once or call.ran_out or call.error is not None:
            raise error
        # Its worker has got more memory meanwhile, if the device had any.
        call.ran_out = True
        return self._place_anew(call, time.perf_counter())

    async def _move(self, call: Call, error: GpufaasError) -> None:
        """
        Give a call to the revision that serves instead: its own was on trial and did not load, or was removed. Of a
        removal, a gateway may learn after the scheduler, which is another process.

        :raises GpufaasError: as `again`
        """
        deployed = call.deployed
        assert deployed is not None
        removed = isinstance(error, UnknownFunction)
        if call.stream is not None or (not removed and deployed.trial is None):
            raise error
        call.state = states.MOVE[call.state]
        if removed or deployed.trial is None:
            await self.catalogue.replaced(deployed)
        else:
            await deployed.trial(str(error))
        newer = self.catalogue.find(call.request.name)
        if newer is None or newer is deployed or newer.unavailable:
            raise error
        if call.error is not None:
            raise call.error from None
        call.deployed = newer

    def _place_anew(self, call: Call, since: float) -> Placed:
        """Place a call for the scheduler as another one, which waits since *since*."""
        call.exchange = call.future = None
        call.waits(since)
        self.scheduler.over(call.id)
        call.id = CallId(f"{new_call_id()}#{self.suffix}" if self.suffix else new_call_id())
        return self.place(call)
