"""Calls, grants, functions and devices: their state. They refer to each other, so they are in one module."""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Final, TypeAlias

from gpufaas_cache_manager import residency
from gpufaas_cache_manager.residency import Residency
from gpufaas_core.constraints import satisfied
from gpufaas_core.model import Bytes, CallId, CopyId, Device, DeviceId, Function, FunctionId, Part, Seconds
from gpufaas_scheduler.contract import Why
from gpufaas_scheduler.fit import NO_COMPUTE, NO_PROFILE, NOT_ALLOWED, Reason
from gpufaas_scheduler.view_contract import DeviceView
from gpufaas_scheduler.world.call_state import NEW
from gpufaas_scheduler.world.changes import Changes, Marked, device_key
from gpufaas_scheduler.world.conditions import Condition
from gpufaas_scheduler.world.deployed import Deployed
from gpufaas_scheduler.world.hosts import Host
from gpufaas_scheduler.world.light import Light
from gpufaas_scheduler.world.queue import Flow
from gpufaas_scheduler.world.ready import ReadyCopies

_NOWHERE: Final[frozenset[DeviceId]] = frozenset()


class Call:
    """
    One call, from its arrival to its end.

    A struct would be made sooner, but it costs more to set its fields, and many are set. It comes to the same, and such
    a class can be compiled (docs/adr/0045).
    """

    __slots__ = (
        "__dict__", "arrived_at", "cold", "copy", "deadline", "device", "ends", "estimate_s", "function", "grant",
        "granted", "id", "left", "note", "number", "owner", "patience_s", "promised_at", "size", "state", "victims",
        "why",
    )  # fmt: skip
    """What few calls have is in `__dict__`, and costs the others nothing."""

    # Described here, not where they are set: each text there is a step of each call.
    id: CallId
    function: FunctionId
    owner: FunctionState
    number: int
    """Arrival number. It orders the queue, and a call that comes back keeps it."""
    arrived_at: Seconds
    deadline: Seconds | None
    size: float
    """The size of its request; 0.0: not known."""
    endless: bool = False
    """Its deadline is for its start only."""
    own_goal_s: Seconds | None = None
    """As `Arrived.goal_s`."""
    left: bool
    """See `view_contract.WaitingCall.left`; so is `note`."""
    note: int
    state: int
    """See `call_state`."""
    refusals: int = 0
    grant: int
    """The number of its grant; 0: none yet, or one of an older scheduler."""
    # The following are set when it is placed; `device` also in a local queue.
    device: DeviceState | None
    copy: Copy | None
    granted: Grant | None
    """While it runs, if its function is queued."""
    cold: bool
    victims: tuple[tuple[FunctionId, int], ...]
    """The copies that were evicted for it."""
    promised_at: Seconds | None
    """See `contract.Promise`."""
    patience_s: Seconds
    """See `contract.Assign`."""
    estimate_s: Seconds
    """Its service time, estimated when it was put into a local queue or started."""
    aborted: bool = False
    preempted: bool = False
    """The policy has stopped it, and it waits again once its node has ended it."""
    started_at: Seconds | None = None
    """Of a call of a direct function that has waited."""
    parked: tuple[CopyId, ...] = ()
    """Those of `victims` that were parked."""
    outer: Call | None = None
    """The call that made it, and waits for it."""
    avoid: frozenset[DeviceId] = _NOWHERE
    """Devices that are held by calls that wait for this one."""
    ends: Seconds | None
    """Its deadline, if that comes from its outer call."""
    why: Why | None
    """What the policy said when it was placed."""

    def __init__(
        self,
        name: CallId,
        function: FunctionId,
        owner: FunctionState,
        number: int,
        arrived_at: Seconds,
        deadline: Seconds | None,
        size: float = 0.0,
        endless: bool = False,
        own_goal_s: Seconds | None = None,
    ) -> None:
        self.id = name
        self.function = function
        self.owner = owner
        self.number = number
        self.arrived_at = arrived_at
        self.deadline = deadline
        self.size = size
        if endless:
            self.endless = True
        if own_goal_s is not None:
            self.own_goal_s = own_goal_s
        self.left = False
        self.note = 0
        self.state = NEW
        self.grant = 0
        self.device = None
        self.copy = None
        self.granted = None
        self.cold = False
        self.victims = ()
        self.promised_at = None
        self.patience_s = inf
        self.estimate_s = 0.0
        self.ends = None
        self.why = None

    def __lt__(self, other: Call) -> bool:
        # In a heap of (time, number, call): a call that waited elsewhere may share its number with the one behind it.
        return self.id < other.id

    def __hash__(self) -> int:
        return id(self)  # a compiled class with an order has no hash of its own

    @property
    def goal_s(self) -> Seconds | None:
        """It should be answered within this time of its arrival; None: no goal."""
        return self.own_goal_s if self.own_goal_s is not None else self.owner.declared.need.latency_goal_s


class Grant(Light):
    """
    The right of one or several calls of a queued function to run on a copy, from the decision until the last of them
    has ended.
    """

    number: int
    calls: tuple[Call, ...]
    copy: Copy
    compute: int
    """What it holds of the device's compute; 0: nothing, or another grant of its copy holds it for both."""
    estimate_s: Seconds = 0.0
    """Its service time, estimated when it began."""
    free_at: Seconds = 0.0
    """When it should end, with the load before it."""
    alone: bool = False
    """Certainly: it is of one call, and holds all compute of the one device of its copy."""
    open: int = 1
    """The number of its calls that have not ended."""
    neighbours: int = 0
    """The most grants that ran beside it: of its own copy, and of others that held compute of the device."""
    adopted: bool = False
    """An older engine made it, or nobody: its number is not one of this engine's."""
    ended: int = 0
    """The number of its calls that had ended before it was adopted."""
    ahead: bool = False
    """It begins when the grant ends that runs on its copy, and holds the compute then."""
    early: bool = False
    """It went ahead, and its node could give it back."""
    recalled: bool = False
    """Its node was told to give it back, unless its worker has begun it."""

    @property
    def size(self) -> int:
        """The number of calls that it was made for."""
        return len(self.calls) + self.ended

    @property
    def condition(self) -> Condition:
        return Condition(self.size, self.copy.share, self.neighbours)


class FunctionState(Deployed):
    """A deployed revision with its copies and its calls."""

    __slots__ = (
        "active", "after", "ahead_after", "before", "called", "called_at", "copies", "draining", "eager", "excess",
        "flow", "held", "holders", "idle_holders", "keeps_share_until", "loading", "nests", "number", "ready",
        "running", "waiting",
    )  # fmt: skip

    def __init__(self, function: Function, changes: Changes) -> None:
        super().__init__(function, changes)
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
        """The devices of `holders` that are idle and `listed`, in any order; see `hits`."""
        self.ready: ReadyCopies | None = None
        """The loaded ones of `active`, for a CPU function with several copies; else None."""
        self.number = 0
        """The number of its next copy. A number is never used again."""
        self.loading = 0
        """The number of its copies that load."""
        self.waiting = 0
        """Calls in the global queue, FIFO and local queues."""
        self.before: FunctionState | None = None
        """The revision that it succeeds, until that one is removed and a copy of this one is loaded."""
        self.after: FunctionState | None = None
        """The revision that succeeds it, and to which it gives room, copy by copy: it gets none without a call."""
        self.running = 0
        self.called = 0.0
        """Its arrivals, each weighted by e^-(age / `demand.DEMAND_S`), as of `called_at`."""
        self.called_at: Seconds = 0.0
        self.eager = False
        """Missing copies beyond the minimum may evict idle copies of others. It ends when one of its copies is evicted
        for others: otherwise two functions could evict each other in turns."""
        self.nests = False
        """A call of it has made another call."""
        self.keeps_share_until = 0.0
        """A change of the share of one of its copies has failed."""
        self.ahead_after = 0.0
        """No call goes ahead before: one has come back since a call took longer than expected."""
        self.excess = 0
        """The number of copies of a model function that scaling asked for, no longer asks for, and that are still
        there."""
        self.held: tuple[Call, Seconds] | None = None
        """The call that was held back last for others of its batch, and since when."""

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

    @property
    def loadable(self) -> bool:
        """Whether one more copy may be loaded without a call that tries it."""
        return not self.removed and self.backoff is None and not 0 < self.max_copies <= self.copies

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

    def load_on(self, device: DeviceView) -> Seconds:
        """Return how long a load takes on *device*; infinite where it cannot run."""
        costs = self.costs[device.kind]
        if costs is None:
            return inf
        if not self.near:
            return costs.load_s
        if device.id in self.parked:
            return costs.parked_s
        return costs.host_s if device.node in self.staged else costs.disk_s

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
            if not (device.shut or copy.split or copy.silent):
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
    def surplus(self) -> int:
        """The number of copies that should go. Replicas of a policy stay, unless the function is scaled to zero."""
        if self.desired is None:  # beyond its bounds only: one was silent while another one was loaded for it
            bounded = self.max_copies and not self.queued
            return max(0, self.copies - max(self.min_copies, self.max_copies)) if bounded else 0
        over = max(0, self.copies - self.target)
        return min(over, self.excess) if self.queued and self.desired else over


class DeviceState(Marked):
    """One device: the copies in its memory, and the calls that run there or wait for it."""

    __slots__ = (
        "ahead", "beside", "busy_s", "busy_since", "closed", "compute", "copies", "device", "direct", "evictions",
        "flows", "free_at", "gone", "hits", "holding", "host", "id", "idle_key", "kind", "listed", "local", "local_s",
        "misses", "node", "noted_at", "order", "others", "part", "preload", "preloads", "reserved", "residency",
        "served", "shut", "silent", "starts",
    )  # fmt: skip

    def __init__(self, device: Device, order: int, changes: Changes, host: Host) -> None:
        super().__init__(device_key(device.id), changes)
        self.device = device
        self.host = host
        """The host tier of its node."""
        host.devices.add(device.id)
        self.id = device.id
        self.kind = device.kind
        self.node = host.node
        self.order = order
        """The number of devices that joined before it."""
        self.ahead = device.ahead
        """Its node takes calls ahead, and can give them back."""
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
        self.silent = 0
        """The number of silent copies of queued functions in its memory."""
        self.gone = False
        """It has left."""
        self.served = self.hits = self.misses = self.evictions = 0

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


Copy: TypeAlias = residency.Copy[FunctionState]
"""A function's copy on a device."""

IdleKey: TypeAlias = "tuple[int, int, DeviceState]"
"""(-starts, order, device): sorts idle devices as the scheduler considers them; those that calls only join are last."""
JOINED: Final = 1
"""The first number of these."""
