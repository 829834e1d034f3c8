"""The state of a function and of a device. They refer to each other, so they are in one module."""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Final, TypeAlias

from gpufaas_cache_manager import residency
from gpufaas_cache_manager.residency import Residency
from gpufaas_core.constraints import satisfied
from gpufaas_core.model import ALL_COMPUTE, Bytes, CallId, CopyId, Device, DeviceId, Function, FunctionId, Part, Seconds
from gpufaas_scheduler.fit import NO_COMPUTE, NO_PROFILE, NOT_ALLOWED, Reason
from gpufaas_scheduler.world.backoff import Backoff
from gpufaas_scheduler.world.call import Call
from gpufaas_scheduler.world.changes import Changes, Marked, device_key, function_key
from gpufaas_scheduler.world.costs import Costed, CostsByKind
from gpufaas_scheduler.world.grant import Grant
from gpufaas_scheduler.world.hosts import HostTier
from gpufaas_scheduler.world.queue import Flow
from gpufaas_scheduler.world.ready import ReadyCopies
from gpufaas_scheduler.world.times import SHARE


class FunctionState(Costed):
    """A deployed revision: its limits and costs, its copies, and its calls."""

    __slots__ = (
        "active", "adaptive", "backoff", "batch_max", "batch_wait_s", "called", "called_at", "constraints", "copies",
        "costs", "declared", "desired", "digest", "draining", "eager", "excess", "fits", "fits_as_of", "flow",
        "held", "holders", "id", "idle_holders", "loading", "max_copies", "max_queue", "min_copies", "number",
        "queued", "ready", "removed", "reserves", "running", "share", "shared_hold", "slots", "staged", "starved",
        "target", "waiting", "wanted", "whole",
    )  # fmt: skip

    def __init__(self, function: Function, changes: Changes) -> None:
        super().__init__(function_key(function.id), changes)
        self.id = function.id
        self.queued = function.need.reserved > 0
        """Its calls reserve compute, and the policy places them. False: they start on a copy with a free slot."""
        self.constraints = function.constraints
        self.flow: Flow[Call] = Flow()
        """Waiting calls: part of the global queue, or the FIFO of a CPU function."""
        self.active: dict[Copy, DeviceState] = {}
        """Its copies and their devices, loading ones included, draining ones not."""
        self.copies = 0
        """The length of `active`: a decision reads it many times."""
        self.draining: dict[Copy, DeviceState] = {}
        """Its copies that run calls but take no new ones."""
        self.holders: dict[DeviceId, DeviceState] = {}
        """The devices of the `active` copies of a model function, which has one copy per device."""
        self.idle_holders: dict[DeviceId, DeviceState] = {}
        """Those of `holders` that are idle and `listed`, in any order; see `hits`."""
        self.ready: ReadyCopies | None = None
        """The loaded ones of `active`, for a CPU function with several copies; else None."""
        self.number = 0
        """Of its next copy. A number is never used again."""
        self.loading = 0
        """The number of its copies that load."""
        self.waiting = 0
        """Calls in the global queue, FIFO and local queues."""
        self.running = 0
        self.called = 0.0
        """Its arrivals, each weighted by e^-(age / `demand.DEMAND_S`), as of `called_at`."""
        self.called_at: Seconds = 0.0
        self.desired: int | None = None
        """The number of copies that `Scaled` set; None: its calls decide."""
        self.eager = False
        """Missing copies beyond the minimum may evict idle copies of others. It ends when one of its copies is evicted
        for others: otherwise two functions could evict each other in turns."""
        self.excess = 0
        """Of a model function: copies that scaling has asked for, asks for no more, and that are still there."""
        self.staged = {}
        self.held: tuple[Call, Seconds] | None = None
        """The call that was held back last for others of its batch, and since when."""
        self.deploy(function)

    def deploy(self, function: Function) -> None:
        """Take limits and profiles from *function*, and forget its past failures."""
        self.digest = function.digest
        need = function.need
        self.reserves = need.reserved
        """What its calls reserve of a device's compute while they run."""
        self.share = need.held
        """What each of its copies holds of a device's compute."""
        self.wanted = self.reserves or self.share
        """The compute that a device must have for it."""
        self.slots = 1 if need.sharing == "time" else max(1, need.slots)
        self.batch_max = max(1, need.batch_max)
        self.batch_wait_s = need.batch_wait_s
        self.adaptive = need.batch_adaptive and self.batch_max > 1 and need.latency_goal_s is not None
        self.shared_hold = self.slots > 1 and need.reserved > 0 and need.sharing != "spatial"
        """One hold of the compute is for all grants of a copy."""
        self.whole = 0 if self.shared_hold else self.reserves
        """`reserves`, if each grant has a hold of its own."""
        self.min_copies = function.min_copies
        self.max_copies = function.max_copies
        self.scale(self.desired)
        self.max_queue = function.max_queue
        self.declared = function
        """The function as it was deployed."""
        self.costs = CostsByKind(function, bool(self.staged))
        self.starved: str | None = None
        """Why no device has enough memory for its load; set when a load runs out of memory."""
        self.backoff: Backoff | None = None
        """None: none of its loads failed recently."""
        self.removed = False
        self.fits = False
        """Whether some device was large enough for it when `Cluster.fleet` was `fits_as_of`."""
        self.fits_as_of = -1

    def remove(self) -> None:
        """It takes no new calls, and is forgotten once its calls have ended."""
        self.removed = True
        self.min_copies = 0
        self.scale(None)

    def scale(self, desired: int | None) -> None:
        """Let it have *desired* copies, within its bounds; None: its calls decide."""
        self.desired = desired
        wanted = desired or 0
        if self.max_copies:
            wanted = min(wanted, self.max_copies)
        self.target = max(self.min_copies, wanted)
        """The number of copies that are loaded without a call, if there is room."""
        self.mark()

    def ask(self, copies: int) -> None:
        """It should have this number of copies; 0 has no effect while calls wait."""
        before = self.target
        self.scale(None if copies <= 0 and self.waiting else max(0, copies))
        self.excess = max(0, self.excess + before - self.target)
        self.eager = True

    def wake(self) -> None:
        """A call came while it was scaled to zero: its calls decide about its copies again."""
        self.scale(None)
        self.excess = 0

    def load_failed(self, now: Seconds) -> bool:
        """Count a failed load. Return whether the next one has to wait."""
        self.mark()
        self.backoff = self.backoff or Backoff()
        return self.backoff.failed(now)

    @property
    def compute(self) -> int:
        return self.declared.need.compute

    @property
    def goal_s(self) -> Seconds | None:
        return self.declared.need.latency_goal_s

    def allows(self, device: DeviceState) -> bool:
        """Whether *device* satisfies its constraints, and is not being drained."""
        return not device.closed and (not self.constraints or satisfied(self.constraints, device.device.labels))

    def need(self, device: DeviceState) -> Bytes | Reason:
        """Return what a copy is charged on *device*, or why it may not be there."""
        if device.closed or (self.constraints and not self.allows(device)):
            return NOT_ALLOWED
        if self.wanted > device.compute:
            return Reason(NO_COMPUTE, compute=self.wanted, spare=device.compute)
        costs = self.costs[device.kind]
        return NO_PROFILE if costs is None else costs.occupation

    def load_on(self, device: DeviceState) -> Seconds:
        """Return how long a load takes on *device*; infinite where it cannot run."""
        costs = self.costs[device.kind]
        if costs is None:
            return inf
        if not self.staged:
            return costs.load_s
        return costs.host_s if device.host.node in self.staged else costs.disk_s

    def add(self, copy: Copy, device: DeviceState) -> None:
        """The copy takes calls from now on: it begins to load, or does not drain any more."""
        if not self.marked:
            self.mark()
        if not device.marked:
            device.mark()
        self.active[copy] = device
        self.copies = len(self.active)
        if self.queued:
            self.holders[device.id] = device
            if device.listed:
                self.idle_holders[device.id] = device
        elif self.ready is None:
            if self.copies > 1:
                self.ready = ReadyCopies(each for each in self.active if not each.loading)
        elif not copy.loading:
            self.ready.add(copy)

    def drop(self, copy: Copy) -> DeviceState:
        """The copy takes no more calls. Return its device."""
        device = self.active.pop(copy)
        self.copies = len(self.active)
        if not self.marked:
            self.mark()
        if not device.marked:
            device.mark()
        if self.queued:
            del self.holders[device.id]
            self.idle_holders.pop(device.id, None)
        elif self.ready is not None:
            self.ready.discard(copy)
            if self.copies == 1:
                self.ready = None
        return device

    def drain(self, copy: Copy) -> DeviceState:
        """The copy takes no more calls, and is evicted once it is idle. Return its device."""
        self.draining[copy] = device = self.drop(copy)
        return device

    def revive(self) -> DeviceState | None:
        """Let a draining copy take calls again, and return its device; None: there is none that may."""
        for copy, device in self.draining.items():
            if not device.shut and not copy.split:
                self.add(copy, self.draining.pop(copy))
                return device
        return None

    def loaded(self, copy: Copy, device: DeviceState, now: Seconds) -> None:
        """*model* is ready."""
        self.mark()
        device.mark()
        copy.loading = False
        copy.ready_at = now
        self.loading -= 1
        if copy not in self.draining:
            self.add(copy, device)
        self.starved = None
        if self.backoff is not None:
            self.backoff.loaded(now)

    def adopt(self, copy: Copy, device: DeviceState, *, draining: bool) -> None:
        """*model* was found on *device*."""
        self.loading += copy.loading
        if draining:
            self.draining[copy] = device
            self.mark()
        else:
            self.add(copy, device)

    @property
    def mixed(self) -> bool:
        """Whether its calls may run beside others on a device, or its copies hold compute."""
        return 0 < self.wanted < ALL_COMPUTE or self.shared_hold

    def free_copy(self) -> Copy | None:
        """
        Return the copy for the next call of a CPU function; None: the call waits for a slot. A loading copy counts only
        while none is ready: a call in the FIFO takes the first slot that becomes free, also that of a copy just loaded.
        """
        if self.ready is not None and self.loading < self.copies:
            return self.ready.first(self.slots)
        best: Copy | None = None
        fewest = self.slots
        for copy in self.active:
            if copy.running < fewest:
                best, fewest = copy, copy.running
        return best

    @property
    def surplus(self) -> int:
        """The number of copies that should go. Replicas of a policy stay, unless the function is scaled to zero."""
        if self.desired is None:
            return 0
        over = max(0, self.copies - self.target)
        return min(over, self.excess) if self.queued and self.desired else over


class DeviceState(Marked):
    """One device: the copies in its memory, and the calls that run there or wait for it."""

    __slots__ = (
        "beside", "busy_s", "busy_since", "closed", "compute", "copies", "device", "direct", "evictions", "flows",
        "free_at", "gone", "hits", "holding", "host", "id", "idle_key", "kind", "listed", "local", "local_s", "misses",
        "noted_at",
        "order", "others", "part", "preload", "preloads", "reserved", "residency", "served", "shut", "starts",
    )  # fmt: skip

    def __init__(self, device: Device, order: int, changes: Changes, host: HostTier) -> None:
        super().__init__(device_key(device.id), changes)
        self.device = device
        self.host = host
        """Of its node."""
        host.devices.add(device.id)
        self.id = device.id
        self.kind = device.kind
        self.order = order
        """The number of devices that joined before it."""
        self.part = (Part(device.id, 0),)
        self.copies: dict[FunctionId, CopyId] = {}
        """See `view_contract.DeviceView`."""
        self.flows: dict[FunctionId, Flow[Call]] = {}
        """The waiting calls of the functions in `copies`."""
        self.residency: Residency[FunctionState] = Residency(device.memory, device.kind, device.compute)
        """The copies in its memory, and the ledger of it."""
        self.compute = device.compute
        self.reserved = 0
        """The compute that `holding` and `preload` hold."""
        self.holding: list[Grant] = []
        """The running grants that hold compute."""
        self.beside: dict[Grant, None] = {}
        """The running grants that hold none."""
        self.direct: dict[CallId, Call] = {}
        """The running calls of direct functions, which need no grant of their own here."""
        self.others: list[Grant] = []
        """Grants that wait on the node for compute: gateways sent their calls while there was no scheduler."""
        self.preload: Copy | None = None
        """The copy that a policy loads without a call. It holds compute until it is loaded."""
        self.preloads = 0
        """The compute that `preload` holds."""
        self.busy_since = 0.0
        """Since when some compute is held."""
        self.busy_s = 0.0
        """How long it was busy before that."""
        self.free_at = 0.0
        """When the last of `holding` and `preload` should end."""
        self.local: deque[Call] = deque()
        self.local_s = 0.0
        """The sum of the estimates of the calls in `local`."""
        self.noted_at = inf
        """See `overdue.Overdue`."""
        self.starts = 0
        """The number of calls of model functions started here: the paper's frequency of use."""
        self.idle_key: IdleKey | None = None
        self.listed = False
        """It is idle, and among the `idle_holders` of its functions."""
        self.closed = False
        """It is drained: it takes no new calls, and does not count as idle."""
        self.shut = False
        """It takes no new calls: it is drained, or cleared for one call (`clearing`)."""
        self.gone = False
        """It has left."""
        self.served = 0
        self.hits = 0
        self.misses = 0
        self.evictions = 0

    @property
    def busy(self) -> bool:
        return self.reserved > 0

    @property
    def spare(self) -> int:
        """The compute that nobody holds."""
        return self.compute - self.reserved - self.residency.shares

    def grants(self) -> list[Grant]:
        """Return the running grants, those that hold compute first."""
        return [*self.holding, *self.others, *self.beside]

    def can_join(self, owner: FunctionState) -> bool:
        """Whether a call of *owner* can run beside others on a copy here, which holds the compute for all of them."""
        if not owner.shared_hold or self.shut or self.id not in owner.holders:
            return False
        copy = self.residency.copies[self.copies[owner.id]]
        return 0 < copy.running < (copy.slots or owner.slots)

    @property
    def open(self) -> bool:
        """Whether one of the grants that hold its compute takes further ones beside it: see `can_join`."""
        return any(self.can_join(each.copy.owner) for each in self.holding)

    def runs(self) -> list[Call]:
        """
        Return the calls that run here, also on copies that were removed already because the call that they were loaded
        for was refused.
        """
        return [*(call for each in self.grants() for call in each.calls if call.granted is each), *self.direct.values()]

    def lacks(self, owner: FunctionState) -> int:
        """Return how much of the compute that a call or copy of *owner* takes is not spare; at most 0: nothing."""
        wanted = owner.reserves or owner.share
        return self.reserved + self.residency.shares + wanted - self.compute if wanted else 0

    def hold(self, compute: int, now: Seconds, free_at: Seconds) -> None:
        """A grant or load takes *compute*, and should end at *free_at*."""
        if not self.reserved:
            self.busy_since = now
            self.free_at = free_at
        elif free_at > self.free_at:
            self.free_at = free_at
        self.reserved += compute

    def let_go(self, compute: int, now: Seconds) -> None:
        """A grant or load that is not in `holding` or `preload` any more gives *compute* back."""
        self.reserved -= compute
        if not self.reserved:
            self.busy_s += now - self.busy_since
        elif self.holding:
            self.free_at = max(each.free_at for each in self.holding)

    def end_preload(self, now: Seconds) -> None:
        self.preload = None
        self.let_go(self.preloads, now)

    def finish_s(self, now: Seconds) -> Seconds:
        """Return the estimated seconds until it has nothing to do: what is left of the grants, plus `local`."""
        left = self.free_at - now if self.busy else 0.0
        return (left if left > 0.0 else 0.0) + self.local_s

    @property
    def overdue_at(self) -> Seconds:
        """When its local queue goes back to the global queue, if nothing changes; infinite: never."""
        return self.free_at + self.local[0].patience_s if self.local and self.busy else inf

    def overrun_s(self, now: Seconds) -> Seconds:
        """Return how long ago the call or load should have ended; 0.0 if it is not late, or idle."""
        return max(0.0, now - self.free_at) if self.busy else 0.0

    def left_s(self, now: Seconds) -> Seconds:
        """Return `finish_s`, but with the time left that calls had on average after they had run for this long."""
        holding = self.holding
        if holding:
            left = self._left_of(holding[0], now)
            if len(holding) > 1:
                left = max([self._left_of(each, now) for each in holding])
        elif self.preload is None:
            left = 0.0
        else:
            left = self.free_at - now
            if left < 0.0:
                left = -SHARE * left
        return left + self.local_s

    def _left_of(self, grant: Grant, now: Seconds) -> Seconds:
        began_at = grant.free_at - grant.estimate_s
        costs = grant.copy.owner.costs[self.kind]
        if costs is None or now <= began_at:
            return max(0.0, grant.free_at - now)
        if grant.copy.loading:
            return grant.estimate_s + SHARE * (now - began_at)  # its load takes longer than estimated
        return costs.left_s(now - began_at, grant.estimate_s)

    def free_for(self, owner: FunctionState) -> Seconds:
        """Return when the next call of *owner*, which a copy here holds, should be able to begin."""
        if owner.shared_hold:  # when the first of its slots is free
            return min([each.free_at for each in self.grants() if each.copy.owner is owner], default=self.free_at)
        compute = owner.reserves
        lacking = self.reserved + compute - self.compute
        if lacking <= 0 or len(self.holding) < 2:
            return self.free_at
        for each in sorted(self.holding, key=lambda each: each.free_at):
            lacking -= each.compute
            if lacking <= 0:
                return each.free_at
        return self.free_at


class Clearing:
    """The device that takes no calls until it has room for one that has waited long: see `clearing`."""

    __slots__ = ("call", "device", "pauses_until")

    def __init__(self) -> None:
        self.device: DeviceState | None = None
        self.call: Call | None = None
        self.pauses_until: Seconds = 0.0
        """No device is looked for before."""


Copy: TypeAlias = residency.Copy[FunctionState]
"""A function's copy on a device."""


def parts_of(copy: Copy, device: DeviceState) -> tuple[Part, ...]:
    """Return what *copy*, whose first device is *device*, has of devices."""
    if copy.split:
        first = Part(device.id, copy.memory, copy.share)
        return first, *(Part(name, each.memory, each.share) for name, each in copy.rest)
    if not copy.parts:
        copy.parts = (Part(device.id, copy.memory, copy.share),)
    return copy.parts


IdleKey: TypeAlias = "tuple[int, int, DeviceState]"
"""
(-starts, order, device): sorts idle devices in the order in which the scheduler considers them. Devices on which calls
can only join others come last, with `JOINED` as the first number.
"""
JOINED: Final = 1
