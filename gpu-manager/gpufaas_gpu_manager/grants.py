"""The open grants of a node, and the calls that arrive for them. Grant and call may arrive in either order."""

import asyncio
import math
import time
from collections.abc import Mapping

from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.errors import GrantRefused, Preempted, UnknownFunction
from gpufaas_core.messages import Finished, Grant, NodeRefused
from gpufaas_core.model import CallId, DeviceId, FunctionId, Seconds, copy_id
from gpufaas_core.wire.bodies import FILE
from gpufaas_core.wire.heads import CallHead
from gpufaas_functions.body_file import opened
from gpufaas_gpu_manager.exchange import Exchange
from gpufaas_gpu_manager.node_call import ABANDON, BEGIN_BODY, FINISHED, OPENED, WAITING
from gpufaas_gpu_manager.open_calls import OpenCalls
from gpufaas_gpu_manager.room import WorkerDevice
from gpufaas_gpu_manager.supervisor import Supervisor
from gpufaas_gpu_manager.worker import Worker
from gpufaas_gpu_manager.worker_state import WorkerState


class Grants:
    """See module."""

    def __init__(
        self, devices: Mapping[DeviceId, WorkerDevice], specs: Mapping[FunctionId, WorkerSpec], host: Supervisor,
        calls: OpenCalls,
    ) -> None:  # fmt: skip
        """:param calls: learns from *host* which calls are over"""
        self.epoch = 0
        """The epoch of the newest scheduler heard. Grants of older ones are refused, unless they are open here."""
        self.closing = False
        """The node is stopping, and refuses grants."""
        self._devices = devices
        self._specs = specs
        self._host = host
        self._calls = calls

    def open(self, grant: Grant) -> Exchange | None:
        """
        Open *grant* for all of its calls: on a miss, evict its victims and start its worker. Idempotent: the command
        opens it, or the call that comes first. Return the exchange of its first call.

        None: the grant was refused, and `NodeRefused` is reported.
        """
        exchange = self._calls.by(grant)
        if exchange is not None:
            return exchange
        worker = self._worker_of(grant)
        if isinstance(worker, str):
            self._host.report(NodeRefused.of(grant, worker))
            return None
        exchange = self._add(grant, worker)
        if grant.cold:
            asyncio.get_running_loop().call_later(self._host.settings.untaken_s, self._expire, grant)
        if len(grant.calls) > 1:
            worker.calls.waiting.expect(grant.number, 1 + self._open_others(grant, worker))
        return exchange

    def _worker_of(self, grant: Grant) -> Worker | str:
        """Return the worker of *grant*, which is started on a miss; or why the grant is refused."""
        if self._calls.revoked and self._calls.is_revoked(grant):
            return "the call was given up before its grant came"
        device = self._devices.get(grant.parts[0].device)
        spec = self._specs.get(grant.function)
        if grant.epoch < self.epoch or device is None or spec is None or self.closing:
            return "unknown device or function, or a grant of an older scheduler"
        self.epoch = grant.epoch
        worker = device.workers.get(copy_id(grant.function, grant.copy))
        if grant.number < 0 and (worker is None or worker.state is not WorkerState.READY):
            return "its worker is not ready, and no scheduler leads"  # nothing may be evicted or reserved for it
        if worker is None and grant.cold:
            return self._host.start(device, spec, grant)
        return worker or "its worker is not there any more"

    def _open_others(self, grant: Grant, worker: Worker) -> int:
        """
        Open *grant* for its other calls, so that none of them loads again what fails before it comes. Return for how
        many of them.
        """
        opened = 0
        for call in grant.calls[1:]:
            own = grant.of(call)
            if self._calls.by(own) is None and not self._calls.is_revoked(own):
                self._add(own, worker)
                asyncio.get_running_loop().call_later(self._host.settings.untaken_s, self._expire, own)
                opened += 1
        return opened

    def _add(self, grant: Grant, worker: Worker) -> Exchange:
        call = grant.calls[0]  # not the property: each call passes here
        worker.used_at = now = time.monotonic()
        exchange = Exchange(grant, worker.calls, worker.loop, now)
        self._calls[call] = worker.calls.exchanges[call] = exchange
        return exchange

    def open_for_body(self, grant: Grant) -> bool:
        """Open *grant* while the body of its call arrives, so that a miss loads meanwhile. False: it was refused."""
        exchange = self.open(grant)
        if exchange is not None:
            exchange.step(BEGIN_BODY)
        return exchange is not None

    def call(self, grant: Grant, head: CallHead, body: bytes | memoryview, kept: int = 0) -> Exchange:
        """
        Give the first call of *grant* to its worker and return the exchange. The other calls come on their own, each
        with a grant in which it is the first; they begin together once they are there (`waiting_room`).

        :param kept: see `NodeCall.kept`
        :raises GrantRefused: nothing was taken; the scheduler knows, and places the call again
        :raises StorageFailed: nothing was taken: its body lies in a file, which cannot be opened
        """
        file = opened(head) if head.body_mode == FILE else None
        exchange = self.open(grant)
        if exchange is None:
            raise GrantRefused(f"{grant.device} refused call {grant.call}")
        exchange.kept, exchange.file = kept, file
        exchange.arrive(head, body)
        if exchange.state >= FINISHED:
            self._calls.pop(grant.call, None)  # its worker failed before the call came: the exchange has the reason
        else:
            exchange.owner.come(exchange)
        return exchange

    def let_go(self, exchange: Exchange, run_s: Seconds) -> None:
        """Its gateway does not keep the grant of *exchange*, whose whole answer is here: the end of the call is its."""
        if exchange.finished:
            grant, further = exchange.grant, exchange.further
            exchange.kept = 0
            self._host.report(Finished(grant.call, grant.device, run_s, further=further))
        else:
            exchange.once = True  # the worker's side is told next, and reports it

    def abort(self, call: CallId, device: DeviceId, reason: str = "") -> None:
        """
        Abandon *call*: its caller is gone, or has an answer. Its slot is free when its worker has ended it.

        :param reason: the policy has stopped it, and its caller is told why
        """
        exchange = self._calls.get(call)
        if exchange is None:
            # Its caller went away before the grant arrived here: there is nothing to stop.
            self.settle(call, device)
            return
        if exchange.abandoned:
            exchange.stopped = ""  # it does not run again
            return
        owner, grant = exchange.owner, exchange.grant
        exchange.step(ABANDON)
        removed = UnknownFunction(f"{owner.worker.spec.name} was removed")
        exchange.fail(Preempted(f"{reason}: call again") if reason else removed)
        if exchange.slot is not None:
            owner.cancel(exchange)
            return
        owner.leave(exchange)
        self._calls.revoke(call, grant.number)
        self._host.report(Finished(call, grant.device, 0.0, ok=False, further=exchange.further))

    def take_back(self, call: CallId, number: int, reason: str, *, unbegun: bool = False) -> None:
        """
        Take back *call*, which has grant *number*: stop it, and report it as refused, so that it gets another grant. If
        it cannot run again, abort it.

        :param unbegun: only if its worker has not begun it
        """
        exchange = self._calls.get(call)
        if exchange is None or exchange.grant.number < number:
            self._calls.revoke(call, number)  # it is refused when it comes; or it is over, and that is reported
        elif exchange.grant.number > number or exchange.abandoned or exchange.finished:
            return
        elif unbegun and exchange.state >= WAITING:
            exchange.owner.take_back(exchange, reason)
        elif exchange.once:
            self.abort(call, exchange.grant.device, reason)
        elif exchange.slot is None:
            exchange.owner.leave(exchange)
            exchange.owner.refuse(exchange, reason, blameless=True)
        else:
            exchange.step(ABANDON)
            exchange.stopped = reason
            exchange.owner.cancel(exchange)

    def settle(self, call: CallId, device: DeviceId) -> None:
        """Report *call* as finished unless it runs here, and refuse its grants from now on. The scheduler asks this."""
        if call not in self._calls:
            self._calls.revoke(call, math.inf)
            self._host.report(Finished(call, device, 0.0, ok=False))

    def _expire(self, grant: Grant) -> None:
        """
        Abandon *grant* if its call did not arrive: its gateway died, or cannot reach this node.

        Most calls are over by then. So the timer has no exchange: that has a worker, which would be left as long.
        """
        exchange = self._calls.get(grant.call)
        if exchange is not None and exchange.grant is grant and exchange.state == OPENED:
            self.abort(grant.call, grant.device)
