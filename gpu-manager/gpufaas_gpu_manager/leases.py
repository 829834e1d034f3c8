"""The open leases of a node, and the calls that arrive for them. Lease and call may arrive in either order."""

import asyncio
import contextlib
import math
import time
from collections.abc import Mapping

from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.errors import LeaseRefused, UnknownFunction, WorkerCrashed
from gpufaas_core.frames import STREAM, UPGRADE, CallHead
from gpufaas_core.messages import Finished, Lease, NodeRefused
from gpufaas_core.model import CallId, DeviceId, FunctionId, copy_id
from gpufaas_gpu_manager import exchange_state as states
from gpufaas_gpu_manager.exchange import Exchange
from gpufaas_gpu_manager.room import WorkerDevice
from gpufaas_gpu_manager.supervisor import Supervisor
from gpufaas_gpu_manager.worker_state import WorkerState


class Leases:
    """See module."""

    def __init__(
        self, devices: Mapping[DeviceId, WorkerDevice], specs: Mapping[FunctionId, WorkerSpec], host: Supervisor
    ) -> None:
        self.epoch = 0
        """The epoch of the newest scheduler heard. Leases of older ones are refused, unless they are open here."""
        self.closing = False
        """The node is stopping, and refuses leases."""
        self._devices = devices
        self._specs = specs
        self._host = host
        self._leases: dict[CallId, Exchange] = {}
        self._revoked: dict[CallId, float] = {}
        """The number of the last void lease, of calls that were reported as finished before they arrived."""

    def open(self, lease: Lease) -> Exchange | None:
        """
        Open *lease*: on a miss, evict its victims and start its worker. Idempotent: the command opens it, or the call.

        None: the lease was refused, and `NodeRefused` is reported.
        """
        exchange = self._leases.get(lease.call)
        if exchange is not None and not (exchange.finished and exchange.lease.number < lease.number):
            return exchange
        if lease.call in self._revoked and lease.number <= self._revoked[lease.call]:
            self._host.report(NodeRefused(lease.call, lease.device, "the call was given up before its lease came"))
            return None
        device = self._devices.get(lease.device)
        spec = self._specs.get(lease.function)
        if lease.epoch < self.epoch or device is None or spec is None or self.closing:
            self._host.report(
                NodeRefused(lease.call, lease.device, "unknown device or function, or a lease of an older scheduler")
            )
            return None
        self.epoch = lease.epoch
        worker = device.workers.get(copy_id(lease.function, lease.copy))
        if lease.number < 0 and (worker is None or worker.state is not WorkerState.READY):
            # Without a leader nothing may be evicted or reserved for it.
            self._host.report(NodeRefused(lease.call, lease.device, "its worker is not ready, and no scheduler leads"))
            return None
        if worker is None and lease.cold:
            worker = self._host.start(device, spec, lease)
        if worker is None:
            self._host.report(NodeRefused(lease.call, lease.device, "its worker is not there any more"))
            return None
        worker.used_at = now = time.monotonic()
        exchange = Exchange(lease, worker, asyncio.get_running_loop(), now)
        self._leases[lease.call] = exchange
        worker.calls.exchanges[lease.call] = exchange
        if lease.cold:
            asyncio.get_running_loop().call_later(self._host.settings.untaken_s, self._expire, exchange)
        return exchange

    def open_for_body(self, lease: Lease) -> bool:
        """Open *lease* while the body of its call arrives, so that a miss loads meanwhile. False: it was refused."""
        exchange = self.open(lease)
        if exchange is not None:
            exchange.state = states.BEGIN_BODY[exchange.state]
        return exchange is not None

    def call(self, lease: Lease, head: CallHead, body: bytes | memoryview) -> Exchange:
        """
        Give the call to its worker and return the exchange.

        :raises LeaseRefused: nothing was taken; the scheduler knows, and places the call again
        """
        exchange = self.open(lease)
        if exchange is None:
            raise LeaseRefused(f"{lease.device} refused call {lease.call}")
        worker = exchange.worker
        exchange.arrive(head, body)
        if exchange.state >= states.FINISHED:
            self._leases.pop(lease.call, None)
            return exchange  # its worker failed before the call came: the exchange has the reason
        if lease.number < 0 and worker.exclusive and worker.device.busy:
            if head.body_mode not in (STREAM, UPGRADE):  # pieces of these may come at once
                exchange.state = states.QUEUE[exchange.state]
            worker.device.unled.append(exchange)
        elif worker.takes_calls:
            worker.calls.bind(exchange)
        else:
            worker.calls.unbound.append(exchange)
            if worker.state is WorkerState.READY:
                worker.device.admit()
        return exchange

    def abort(self, call: CallId, device: DeviceId) -> None:
        """Abandon *call*: its caller is gone, or has an answer. Its slot is free when its worker has ended it."""
        exchange = self._leases.get(call)
        if exchange is None:
            # Its caller went away before the lease arrived here: there is nothing to stop.
            self.settle(call, device)
            return
        if exchange.abandoned:
            return
        exchange.state = states.ABANDON[exchange.state]
        worker = exchange.worker
        exchange.fail(UnknownFunction(f"{worker.spec.name} was removed while the call ran"))
        if exchange.slot is not None:
            exchange.slot.cancel()
            worker.calls.watch_abandoned()
            return
        # No slot has it yet, so it is over now. Its worker may go on loading, for the next call.
        with contextlib.suppress(ValueError):
            worker.calls.unbound.remove(exchange)
        worker.calls.exchanges.pop(call, None)
        self.over(exchange)
        self._revoke(call, exchange.lease.number)
        self._host.report(Finished(call, exchange.lease.device, 0.0, ok=False))

    def settle(self, call: CallId, device: DeviceId) -> None:
        """Report *call* as finished unless it runs here, and refuse its leases from now on. The scheduler asks this."""
        if call not in self._leases:
            self._revoke(call, math.inf)
            self._host.report(Finished(call, device, 0.0, ok=False))

    def over(self, exchange: Exchange) -> None:
        """Close the lease of *exchange*, which has no worker any more."""
        exchange.state = states.END[exchange.state]
        if exchange.state != states.UNCLAIMED:
            self._leases.pop(exchange.lease.call, None)
        else:
            # It failed before its call arrived: without it, the call would open the lease, and load, once more.
            asyncio.get_running_loop().call_later(self._host.settings.untaken_s, self._forget_failed, exchange)
        device = exchange.worker.device
        while device.unled and not device.busy:
            following = device.unled.popleft()
            if not following.finished and following.worker.state is WorkerState.READY:
                following.state = states.LEAVE[following.state]
                following.worker.calls.bind(following)

    def close(self) -> None:
        """Fail all calls: the node stops."""
        for exchange in list(self._leases.values()):
            exchange.fail(WorkerCrashed("the platform is stopping: call again when it is back"))
        self._leases.clear()

    def _forget_failed(self, exchange: Exchange) -> None:
        if self._leases.get(exchange.lease.call) is exchange:
            del self._leases[exchange.lease.call]

    def _expire(self, exchange: Exchange) -> None:
        """Abandon a lease whose call did not arrive: its gateway died, or cannot reach this node."""
        if exchange.state == states.OPENED:
            self.abort(exchange.lease.call, exchange.lease.device)

    def _revoke(self, call: CallId, number: float) -> None:
        """Refuse leases of *call* up to *number*: they may be on their way here."""
        self._revoked[call] = number
        asyncio.get_running_loop().call_later(self._host.settings.untaken_s, self._revoked.pop, call, None)
