"""
A call, a function and a device as the engine knows them: they speak of each other.

Nothing here decides.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TypeAlias

from msgspec import Struct

from gpufaas_cache_manager.residency import Residency, Resident
from gpufaas_core.constraints import satisfied
from gpufaas_core.model import (
    Bytes,
    CallId,
    Device,
    DeviceId,
    Function,
    FunctionId,
    Seconds,
)
from gpufaas_scheduler.contract import Why
from gpufaas_scheduler.fit import NO_PROFILE, NOT_ALLOWED, Reason
from gpufaas_scheduler.world.backoff import Backoff
from gpufaas_scheduler.world.call_state import NEW
from gpufaas_scheduler.world.changes import Changes, Marked, device_key, function_key
from gpufaas_scheduler.world.costs import Costed, CostsByKind
from gpufaas_scheduler.world.queue import IMPLICIT, FunctionQueue
from gpufaas_scheduler.world.ready import ReadyCopies
from gpufaas_scheduler.world.times import SHARE


class Call(Struct, eq=False):
    """One invocation from arrival to its last fact. One is made for each call, so its constructor is not in Python."""

    id: CallId
    function: FunctionId
    owner: FunctionState
    number: int
    """Arrival number: the order of the queue, kept when the call comes back."""
    arrived_at: Seconds
    deadline: Seconds | None
    size: float = 0.0
    """Of its request; 0.0 if it is not known."""
    endless: bool = False
    """Its deadline is that of its start."""
    passes: int = IMPLICIT
    state: int = NEW
    """See `call_state`."""
    refusals: int = 0
    # The following have a meaning once it is placed, the device already in its local queue:
    device: DeviceState | None = None
    model: Model | None = None
    cold: bool = False
    victims: tuple[tuple[FunctionId, int], ...] = ()
    """Which copies left the device for it."""
    promised_at: Seconds | None = None
    """See `contract.Promise`."""
    patience_s: Seconds = inf
    """How late the device may be while this call is the first of its local queue, see `contract.EnqueueLocal`."""
    estimate_s: Seconds = 0.0
    """Its service time, as estimated when it was put into a local queue or started."""
    aborted: bool = False
    outer: Call | None = None
    """A call that made it, and waits for it."""
    avoid: frozenset[DeviceId] = frozenset()
    """Devices that are held by calls which wait for this one."""
    ends: Seconds | None = None
    """Its deadline, if that is its outer call's and not its own."""
    why: Why | None = None
    """What the policy said when it was placed."""


class FunctionState(Marked, Costed):
    """A deployed revision: its limits and costs, its copies, and its calls."""

    __slots__ = (
        "active", "backoff", "called", "called_at", "constraints", "copies", "costs", "declared", "desired", "digest",
        "draining", "eager", "excess", "exclusive", "fits", "fits_as_of", "holders", "id", "loading", "max_copies",
        "max_queue", "min_copies", "queue", "ready", "removed", "running", "runs", "slots", "starved", "target",
        "waiting",
    )  # fmt: skip

    def __init__(self, function: Function, changes: Changes) -> None:
        super().__init__(function_key(function.id), changes)
        self.id = function.id
        self.exclusive = function.exclusive
        self.constraints = function.constraints
        self.queue: FunctionQueue[Call] = FunctionQueue()
        """Waiting calls: part of the global queue, or the FIFO of a CPU function."""
        self.active: dict[Model, DeviceState] = {}
        """Its copies and where they are, from the start of the load; without those that drain."""
        self.copies = 0
        """How many of `active` there are: policies and replacement ask for it many times in a decision."""
        self.draining: dict[Model, DeviceState] = {}
        """Those that still run calls but take no new ones: they are surplus."""
        self.holders: dict[DeviceId, DeviceState] = {}
        """Of a model function, which has one copy per device: where `active` ones are. Policies choose from these."""
        self.ready: ReadyCopies | None = None
        """Of a CPU function: those of `active` that are loaded. None: it has one at most, which needs no choosing."""
        self.loading = 0
        """How many of `active` are loading."""
        self.waiting = 0
        """Calls in the global queue, FIFO and local queues."""
        self.running = 0
        self.runs: dict[Call, None] = {}
        """Of a CPU function: its calls that have a lease, on whichever copy. Those of a model function are found where
        they run, `DeviceState.runs`: to note them here as well would cost each of them more than it saves."""
        self.called = 0.0
        """Its arrivals, each weighted by e^-(age / `DEMAND_S`), as of `called_at`."""
        self.called_at: Seconds = 0.0
        self.desired: int | None = None
        """As `Scaled` asked; None: copies come and go with calls."""
        self.eager = False
        """Copies beyond the minimum that are missing may have the memory of idle ones. Until one of them is evicted for
        others: it comes back when there is room, or when calls wait for it, else two functions could evict in turns."""
        self.excess = 0
        """Of a model function: how many copies it was asked to give up, of those that it was asked to have."""
        self.deploy(function)

    def deploy(self, function: Function) -> None:
        """Take limits and profiles from *function*; its past failures are forgotten."""
        self.digest = function.digest
        self.slots = max(1, function.slots)
        self.min_copies = function.min_copies
        self.max_copies = function.max_copies
        self.scale(self.desired)
        self.max_queue = function.max_queue
        self.declared = function
        """As it was deployed."""
        self.costs = CostsByKind(function)
        self.starved: str | None = None
        """Why no device has enough memory for its load, since the last load that ran out."""
        self.backoff: Backoff | None = None
        """None: no load of it failed of late."""
        self.removed = False
        self.fits = False
        """Some device of the fleet `fits_as_of` is large enough."""
        self.fits_as_of = -1

    def remove(self) -> None:
        """It takes no new calls, and is forgotten once those that it has are over."""
        self.removed = True
        self.min_copies = 0
        self.scale(None)

    def scale(self, desired: int | None) -> None:
        """Let it have *desired* copies, within its bounds; None: as calls ask for them."""
        self.desired = desired
        wanted = desired or 0
        if self.max_copies:
            wanted = min(wanted, self.max_copies)
        self.target = max(self.min_copies, wanted)
        """So many copies are loaded without a call, if there is room."""
        self.mark()

    def ask(self, copies: int) -> None:
        """Somebody wants it to have so many copies."""
        before = self.target
        # Calls that wait are served: that is not a function at zero.
        self.scale(None if copies <= 0 and self.waiting else max(0, copies))
        self.excess = max(0, self.excess + before - self.target)
        self.eager = True

    def wake(self) -> None:
        """A call came while it was scaled to zero: from now on its copies follow its calls again."""
        self.scale(None)
        self.excess = 0

    def trimmed(self) -> None:
        """It has no copy that should go: as if it had never been asked to give one up."""
        if self.excess:
            self.excess = 0
            self.mark()

    def load_failed(self, now: Seconds) -> bool:
        """Count a load that failed. Return whether the next one has to wait."""
        self.mark()
        self.backoff = self.backoff or Backoff()
        return self.backoff.failed(now)

    def recovered(self) -> None:
        self.backoff = None
        self.mark()

    def allows(self, device: DeviceState) -> bool:
        """Whether *device* satisfies its constraints, and is not being drained."""
        return not device.closed and (not self.constraints or satisfied(self.constraints, device.device.labels))

    def need(self, device: DeviceState) -> Bytes | Reason:
        """Return what a copy is charged on *device*, or why it may not be there."""
        if device.closed or (self.constraints and not self.allows(device)):
            return NOT_ALLOWED
        costs = self.costs[device.kind]
        return NO_PROFILE if costs is None else costs.occupation

    def add(self, model: Model, device: DeviceState) -> None:
        """It takes calls from now on: it begins to load, or does not drain any more."""
        if not self.marked:
            self.mark()
        if not device.marked:
            device.mark()
        self.active[model] = device
        self.copies = len(self.active)
        if self.exclusive:
            self.holders[device.id] = device
        elif self.ready is None:
            if self.copies > 1:
                self.ready = ReadyCopies(each for each in self.active if not each.loading)
        elif not model.loading:
            self.ready.add(model)

    def drop(self, model: Model) -> DeviceState:
        """It takes no more calls. Return where it is."""
        device = self.active.pop(model)
        self.copies = len(self.active)
        if not self.marked:
            self.mark()
        if not device.marked:
            device.mark()
        if self.exclusive:
            del self.holders[device.id]
        elif self.ready is not None:
            self.ready.discard(model)
            if self.copies == 1:
                self.ready = None
        return device

    def drain(self, model: Model) -> None:
        """It takes no more calls, and is evicted once it is idle."""
        self.draining[model] = self.drop(model)

    def revive(self) -> bool:
        """Let a copy that drains take calls again; False: there is none that may."""
        for model, device in self.draining.items():
            if not device.closed:
                self.add(model, self.draining.pop(model))
                return True
        return False

    def loaded(self, model: Model, device: DeviceState, now: Seconds) -> None:
        """*model* is ready."""
        self.mark()
        device.mark()
        model.loading = False
        model.ready_at = now
        self.loading -= 1
        if model not in self.draining:
            self.add(model, device)
        self.starved = None
        if self.backoff is not None:
            self.backoff.loaded(now)

    def adopt(self, model: Model, device: DeviceState, *, draining: bool) -> None:
        """*model* was found on *device*."""
        self.loading += model.loading
        if draining:
            self.draining[model] = device
            self.mark()
        else:
            self.add(model, device)

    def free_copy(self) -> Model | None:
        """
        Return where the next call of a CPU function starts; None: it waits for a slot. A copy that loads counts only
        while none is ready: a call that waits for a slot starts no later than one that waits there for the load, and
        perhaps sooner.
        """
        if self.ready is not None and self.loading < self.copies:
            return self.ready.first(self.slots)
        best: Model | None = None
        fewest = self.slots
        for model in self.active:
            if model.running < fewest:
                best, fewest = model, model.running
        return best

    @property
    def surplus(self) -> int:
        """Copies that should go. Replicas that a policy made stay, but for a function that is scaled to zero."""
        if self.desired is None:
            return 0
        over = max(0, self.copies - self.target)
        return min(over, self.excess) if self.exclusive and self.desired else over


class DeviceState(Marked):
    """One device: what is in its memory, what runs, what waits for it."""

    __slots__ = (
        "busy_s", "busy_since", "closed", "device", "evictions", "free_at", "hits", "id", "idle_key", "kind", "local",
        "local_s", "misses", "models", "noted_at", "order", "others", "preload", "run", "served", "starts",
    )  # fmt: skip

    def __init__(self, device: Device, order: int, changes: Changes) -> None:
        super().__init__(device_key(device.id), changes)
        self.device = device
        self.id = device.id
        self.kind = device.kind
        self.order = order
        """How many joined before it."""
        self.models: Residency[FunctionState] = Residency(device.memory, device.kind)
        self.run: Call | None = None
        """The call of a model function that has the device to itself."""
        self.others: list[Call] = []
        """More of these, of which nobody knew when they were started: without a scheduler, each gateway is its own."""
        self.preload: Model | None = None
        """What a policy is loading here without a call, and has the device to itself for."""
        self.busy_since = 0.0
        """When `run` or `preload` was started."""
        self.busy_s = 0.0
        """How long it had one, without the current."""
        self.free_at = 0.0
        """When `run` should end, load included; or `preload`."""
        self.local: deque[Call] = deque()
        self.local_s = 0.0
        """Service time of `local`, by the estimates at the time of queueing."""
        self.noted_at = inf
        """See `overdue.Overdue`."""
        self.starts = 0
        """Calls of model functions started here: the paper's frequency of use."""
        self.idle_key: IdleKey | None = None
        self.closed = False
        """It is being drained: it takes no new calls, and nobody sees it as idle."""
        self.served = 0
        self.hits = 0
        self.misses = 0
        self.evictions = 0

    @property
    def busy(self) -> bool:
        return self.run is not None or self.preload is not None

    @property
    def runs(self) -> list[Call]:
        """The calls of model functions that run here."""
        return self.others if self.run is None else [self.run, *self.others]

    def finish_s(self, now: Seconds) -> Seconds:
        """Seconds until it has nothing to do, by estimate: time left of what runs plus its local queue (3.4)."""
        left = self.free_at - now if self.busy else 0.0
        return (left if left > 0.0 else 0.0) + self.local_s

    @property
    def overdue_at(self) -> Seconds:
        """When its local queue goes back to the global one, if nothing changes; infinite: never."""
        return self.free_at + self.local[0].patience_s if self.local and self.busy else inf

    def overrun_s(self, now: Seconds) -> Seconds:
        """For how long what has the device should have ended; 0.0 if it is not late, or idle."""
        return max(0.0, now - self.free_at) if self.busy else 0.0

    def left_s(self, now: Seconds) -> Seconds:
        """As `finish_s`, but what runs takes as long from here on as calls did on average that had run for so long."""
        run = self.run
        left = self.free_at - now
        if run is not None:
            began_at = self.free_at - run.estimate_s
            costs = run.owner.costs[self.kind]
            if costs is None or now <= began_at:
                left = max(0.0, left)
            elif run.model is not None and run.model.loading:
                left = run.estimate_s + SHARE * (now - began_at)  # it still loads, and that takes longer than estimated
            else:
                left = costs.left_s(now - began_at, run.estimate_s)
        elif self.preload is None:
            left = 0.0
        elif left < 0.0:
            left = -SHARE * left
        return left + self.local_s


Model: TypeAlias = Resident[FunctionState]
"""A function's copy on a device."""

IdleKey: TypeAlias = "tuple[int, int, DeviceState]"
"""(-starts, order, device): sorts idle devices as the scheduler takes them."""
