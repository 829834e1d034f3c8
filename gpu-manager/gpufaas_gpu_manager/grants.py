"""The open grants of a node, and the calls that arrive for them. Grant and call may arrive in either order."""

import asyncio
import contextlib
import math
import time
from collections.abc import Mapping

from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.errors import GrantRefused, Preempted, UnknownFunction, WorkerCrashed
from gpufaas_core.messages import Finished, Grant, NodeRefused
from gpufaas_core.model import CallId, DeviceId, FunctionId, Seconds, copy_id
from gpufaas_core.wire.bodies import FILE, STREAM, UPGRADE
from gpufaas_core.wire.heads import CallHead
from gpufaas_functions.body_file import opened
from gpufaas_gpu_manager import exchange_state as states
from gpufaas_gpu_manager.exchange import Exchange
from gpufaas_gpu_manager.room import WorkerDevice
from gpufaas_gpu_manager.supervisor import Supervisor
from gpufaas_gpu_manager.worker import Worker
from gpufaas_gpu_manager.worker_state import WorkerState


class Grants:
    """See module."""

    def __init__(
        self, devices: Mapping[DeviceId, WorkerDevice], specs: Mapping[FunctionId, WorkerSpec], host: Supervisor
    ) -> None:
        self.epoch = 0
        """The epoch of the newest scheduler heard. Grants of older ones are refused, unless they are open here."""
        self.closing = False
        """The node is stopping, and refuses grants."""
        self._devices = devices
        self._specs = specs
        self._host = host
        self._grants: dict[CallId, Exchange] = {}
        self._revoked: dict[CallId, float] = {}
        """The number of the last void grant, of calls that ended, or were stopped, before they arrived."""

    def open(self, grant: Grant) -> Exchange | None:
        """
        Open *grant* for all of its calls: on a miss, evict its victims and start its worker. Idempotent: the command
        opens it, or the call that comes first. Return the exchange of its first call.

        None: the grant was refused, and `NodeRefused` is reported.
        """
        call = grant.calls[0]  # not the property: each call passes here
        exchange = self._grants.get(call)
        if exchange is not None and not (exchange.finished and exchange.grant.number < grant.number):
            return exchange
        if self._revoked and call in self._revoked and grant.number <= self._revoked[call]:
            self._host.report(NodeRefused.of(grant, "the call was given up before its grant came"))
            return None
        device = self._devices.get(grant.parts[0].device)
        spec = self._specs.get(grant.function)
        if grant.epoch < self.epoch or device is None or spec is None or self.closing:
            self._host.report(NodeRefused.of(grant, "unknown device or function, or a grant of an older scheduler"))
            return None
        self.epoch = grant.epoch
        worker = device.workers.get(copy_id(grant.function, grant.copy))
        if grant.number < 0 and (worker is None or worker.state is not WorkerState.READY):
            # Without a leader nothing may be evicted or reserved for it.
            self._host.report(NodeRefused.of(grant, "its worker is not ready, and no scheduler leads"))
            return None
        if worker is None and grant.cold:
            worker = self._host.start(device, spec, grant)
        if worker is None:
            self._host.report(NodeRefused.of(grant, "its worker is not there any more"))
            return None
        exchange = self._add(call, grant, worker)
        if grant.cold:
            asyncio.get_running_loop().call_later(self._host.settings.untaken_s, self._expire, grant)
        if len(grant.calls) > 1:
            worker.calls.batches.expect(grant.number, 1 + self._open_others(grant, worker))
        return exchange

    def _open_others(self, grant: Grant, worker: Worker) -> int:
        """
        Open *grant* for its other calls, so that none of them loads again what fails before it comes. Return for how
        many of them.
        """
        opened = 0
        for call in grant.calls[1:]:
            known = self._grants.get(call)
            if known is not None and not (known.finished and known.grant.number < grant.number):
                continue
            if grant.number <= self._revoked.get(call, -math.inf):
                continue
            exchange = self._add(call, grant.of(call), worker)
            asyncio.get_running_loop().call_later(self._host.settings.untaken_s, self._expire, exchange.grant)
            opened += 1
        return opened

    def _add(self, call: CallId, grant: Grant, worker: Worker) -> Exchange:
        worker.used_at = now = time.monotonic()
        exchange = Exchange(grant, worker, worker.loop, now)
        self._grants[call] = worker.calls.exchanges[call] = exchange
        return exchange

    def open_for_body(self, grant: Grant) -> bool:
        """Open *grant* while the body of its call arrives, so that a miss loads meanwhile. False: it was refused."""
        exchange = self.open(grant)
        if exchange is not None:
            exchange.state = states.BEGIN_BODY[exchange.state]
        return exchange is not None

    def call(self, grant: Grant, head: CallHead, body: bytes | memoryview, kept: int = 0) -> Exchange:
        """
        Give the first call of *grant* to its worker and return the exchange. The other calls come on their own, each
        with a grant in which it is the first; they begin together once they are there (`batches`).

        :param kept: see `Exchange.kept`
        :raises GrantRefused: nothing was taken; the scheduler knows, and places the call again
        :raises StorageFailed: nothing was taken: its body lies in a file, which cannot be opened
        """
        file = opened(head) if head.body_mode == FILE else None
        exchange = self.open(grant)
        if exchange is None:
            raise GrantRefused(f"{grant.device} refused call {grant.call}")
        worker = exchange.worker
        exchange.kept, exchange.file = kept, file
        exchange.arrive(head, body)
        if exchange.state >= states.FINISHED:
            self._grants.pop(grant.call, None)
            return exchange  # its worker failed before the call came: the exchange has the reason
        if grant.number < 0 and not worker.device.has_compute_for(worker):
            if head.body_mode not in (STREAM, UPGRADE):  # pieces of these may come at once
                exchange.state = states.QUEUE[exchange.state]
            worker.device.unled.append(exchange)
        elif len(exchange.grant.calls) > 1:
            worker.calls.batches.arrived(exchange)
        elif worker.takes_calls:
            worker.calls.bind(exchange)
        else:
            worker.calls.unbound.append(exchange)
            if worker.state is WorkerState.READY:
                worker.device.admit()
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
        exchange = self._grants.get(call)
        if exchange is None:
            # Its caller went away before the grant arrived here: there is nothing to stop.
            self.settle(call, device)
            return
        worker = exchange.worker
        if exchange.abandoned:
            worker.calls.stopped.pop(exchange, None)  # it does not run again
            return
        exchange.state = states.ABANDON[exchange.state]
        removed = UnknownFunction(f"{worker.spec.name} was removed")
        exchange.fail(Preempted(f"{reason}: call again") if reason else removed)
        if exchange.slot is not None:
            worker.calls.cancel(exchange)
            return
        self._take_back(exchange)
        self._revoke(call, exchange.grant.number)
        self._host.report(Finished(call, exchange.grant.device, 0.0, ok=False, further=exchange.further))

    def requeue(self, call: CallId, number: int, reason: str, *, unbegun: bool = False) -> None:
        """
        Stop *call*, which runs by grant *number*, and report it as refused, so that it gets another grant. If it cannot
        run again, abort it.

        :param unbegun: only if its worker has not begun it
        """
        exchange = self._grants.get(call)
        if exchange is None or exchange.grant.number < number:
            self._revoke(call, number)  # it is refused when it comes; or it is over, and that is reported
        elif exchange.grant.number > number or exchange.abandoned or exchange.finished:
            return
        elif unbegun and exchange.state >= states.WAITING:
            exchange.worker.calls.give_back(exchange, reason)
        elif exchange.once:
            self.abort(call, exchange.grant.device, reason)
        elif exchange.slot is None:
            self._take_back(exchange)
            exchange.worker.calls.refuse(exchange, reason, blameless=True)
        else:
            exchange.state = states.ABANDON[exchange.state]
            exchange.worker.calls.stopped[exchange] = reason
            exchange.worker.calls.cancel(exchange)

    def _take_back(self, exchange: Exchange) -> None:
        """End an exchange that no slot has. Its worker may go on loading, for the next call."""
        with contextlib.suppress(ValueError):
            exchange.worker.calls.unbound.remove(exchange)
        exchange.worker.calls.exchanges.pop(exchange.grant.call, None)
        exchange.worker.calls.batches.left(exchange)
        self.over(exchange)

    def settle(self, call: CallId, device: DeviceId) -> None:
        """Report *call* as finished unless it runs here, and refuse its grants from now on. The scheduler asks this."""
        if call not in self._grants:
            self._revoke(call, math.inf)
            self._host.report(Finished(call, device, 0.0, ok=False))

    def over(self, exchange: Exchange) -> None:
        """Close the grant of *exchange*, which has no worker any more."""
        exchange.state = state = states.END[exchange.state]
        if state != states.UNCLAIMED:
            self._grants.pop(exchange.grant.calls[0], None)
        else:
            # It failed before its call arrived: without it, the call would open the grant, and load, once more.
            asyncio.get_running_loop().call_later(self._host.settings.untaken_s, self._forget_failed, exchange)
        worker = exchange.worker
        device = worker.device
        if worker.replaced:
            device.successions.end_replaced(worker)
        while device.unled:
            following = device.unled[0]
            waits = not following.finished and following.worker.state is WorkerState.READY
            if waits and not device.has_compute_for(following.worker):
                break
            device.unled.popleft()
            if waits:
                following.state = states.LEAVE[following.state]
                following.worker.calls.bind(following)

    def close(self) -> None:
        """Fail all calls: the node stops."""
        for exchange in list(self._grants.values()):
            exchange.fail(WorkerCrashed("the platform is stopping: call again when it is back"))
        self._grants.clear()

    def _forget_failed(self, exchange: Exchange) -> None:
        if self._grants.get(exchange.grant.call) is exchange:
            del self._grants[exchange.grant.call]

    def _expire(self, grant: Grant) -> None:
        """
        Abandon *grant* if its call did not arrive: its gateway died, or cannot reach this node.

        Most calls are over by then. So the timer has no exchange: that has a worker, which would be left as long.
        """
        exchange = self._grants.get(grant.call)
        if exchange is not None and exchange.grant is grant and exchange.state == states.OPENED:
            self.abort(grant.call, grant.device)

    def _revoke(self, call: CallId, number: float) -> None:
        """Refuse grants of *call* up to *number*: they may be on their way here."""
        self._revoked[call] = max(number, self._revoked.get(call, number))
        asyncio.get_running_loop().call_later(self._host.settings.untaken_s, self._revoked.pop, call, None)
