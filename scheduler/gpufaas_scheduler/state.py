"""
The cluster as the engine knows it: devices, functions, who holds what, who is idle. Policies see it by `view`.

Nothing here decides; the only writers are `engine.Engine` and these classes' own methods.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from math import exp, expm1, inf
from typing import Final, NamedTuple, TypeAlias, cast

from msgspec import Struct

from gpufaas_cache_manager.replacement import Replacement
from gpufaas_cache_manager.residency import Residency, Resident
from gpufaas_core.constraints import satisfied
from gpufaas_core.model import (
    Bytes,
    CallId,
    CopyId,
    Device,
    DeviceId,
    Function,
    FunctionId,
    Seconds,
    ServiceEstimate,
    copy_id,
)
from gpufaas_scheduler.backoff import Backoff
from gpufaas_scheduler.call_state import NEW
from gpufaas_scheduler.contract import WaitingCall, Why
from gpufaas_scheduler.costs import Costs
from gpufaas_scheduler.fit import NO_PROFILE, NOT_ALLOWED, Fit, Reason, fits
from gpufaas_scheduler.queue import IMPLICIT, FunctionQueue, GlobalQueue
from gpufaas_scheduler.times import SHARE

DEMAND_S: Final = 120.0
"""Time constant of the estimates of demand: two thirds of the weight is on the last two minutes."""

_LEAST_OBSERVED_S: Final = 3.0
"""The first call after the start is no thousand calls a second."""


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


class ReadyCopies:
    """
    The copies of a CPU function that are loaded and take calls, by how many they run: the next call goes to one that
    runs the fewest, of those to the one that has done so for longest. All of it is O(1), but `first`: O(slots).
    """

    __slots__ = ("_fewest", "_running")

    def __init__(self, models: Iterable[Model]) -> None:
        self._running: list[dict[Model, None]] = []
        """At each number of calls, the copies that run so many, in the order in which they came to."""
        self._fewest = 0
        """No copy runs fewer."""
        for model in models:
            self.add(model)

    def __iter__(self) -> Iterator[Model]:
        """By calls running; of equals, in the order in which they take the next."""
        return (model for row in self._running for model in row)

    def add(self, model: Model) -> None:
        running = model.running
        while len(self._running) <= running:
            self._running.append({})
        self._running[running][model] = None
        if running < self._fewest:
            self._fewest = running

    def discard(self, model: Model) -> None:
        if model.running < len(self._running):
            self._running[model.running].pop(model, None)

    def started(self, model: Model) -> None:
        """*model* runs one call more. No matter if it is not one of them."""
        running = model.running
        if running <= len(self._running) and model in (before := self._running[running - 1]):
            del before[model]
            self.add(model)

    def ended(self, model: Model) -> None:
        """*model* runs one call less. No matter if it is not one of them."""
        running = model.running
        if running + 1 < len(self._running) and model in (before := self._running[running + 1]):
            del before[model]
            self.add(model)

    def first(self, slots: int) -> Model | None:
        """Return where the next call goes; None: all run *slots* calls."""
        rows = self._running
        fewest, end = self._fewest, min(slots, len(rows))
        while fewest < end:
            if row := rows[fewest]:
                self._fewest = fewest
                return next(iter(row))
            fewest += 1
        self._fewest = fewest
        return None


class FunctionState:
    """A deployed revision: its limits and costs, its copies, and its calls."""

    __slots__ = (
        "_costs", "active", "backoff", "called", "called_at", "constraints", "declared", "desired", "digest",
        "draining", "eager", "excess", "exclusive", "fits", "fits_as_of", "holders", "id", "loading", "max_copies",
        "max_queue", "min_copies", "queue", "ready", "removed", "runs", "slots", "starved", "target", "touched",
        "waiting",
    )  # fmt: skip

    def __init__(self, function: Function) -> None:
        self.id = function.id
        self.exclusive = function.exclusive
        self.constraints = function.constraints
        self.queue: FunctionQueue[Call] = FunctionQueue()
        """Waiting calls: part of the global queue, or the FIFO of a CPU function."""
        self.active: dict[Model, DeviceState] = {}
        """Its copies and where they are, from the start of the load; without those that drain."""
        self.draining: dict[Model, DeviceState] = {}
        """Those that still run calls but take no new ones: they are surplus."""
        self.holders: dict[DeviceId, DeviceState] = {}
        """Of a model function, which has one copy per device: where `active` ones are. Policies choose from these."""
        self.ready: ReadyCopies | None = None
        """Of a CPU function: those of `active` that are loaded. None: it has one at most, which needs no choosing."""
        self.loading = 0
        """How many of `active` are loading."""
        self.touched = False
        """Its doc may be another one than was last taken."""
        self.waiting = 0
        """Calls in the global queue, FIFO and local queues."""
        self.runs: dict[Call, None] = {}
        """Its calls that have a lease, on whichever copy."""
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
        self._costs: dict[str, Costs | None] = {}
        self.starved: str | None = None
        """Why no device has enough memory for its load, since the last load that ran out."""
        self.backoff: Backoff | None = None
        """None: no load of it failed of late."""
        self.removed = False
        self.fits = False
        """Some device of the fleet `fits_as_of` is large enough."""
        self.fits_as_of = -1

    def scale(self, desired: int | None) -> None:
        """Let it have *desired* copies, within its bounds; None: as calls ask for them."""
        self.desired = desired
        wanted = desired or 0
        if self.max_copies:
            wanted = min(wanted, self.max_copies)
        self.target = max(self.min_copies, wanted)
        """So many copies are loaded without a call, if there is room."""

    def costs(self, kind: str) -> Costs | None:
        """None: it has no profile for devices of this kind, and cannot run there."""
        try:
            return self._costs[kind]
        except KeyError:
            pass
        try:
            costs = Costs(self.declared.profile(kind), self.declared.floor)
        except KeyError:
            costs = None
        self._costs[kind] = costs
        return costs

    def known_costs(self) -> Iterator[tuple[str, Costs]]:
        """By kind, of kinds that were asked for."""
        return ((kind, costs) for kind, costs in self._costs.items() if costs is not None)

    def allows(self, device: DeviceState) -> bool:
        """Whether *device* satisfies its constraints, and is not being drained."""
        return not device.closed and (not self.constraints or satisfied(self.constraints, device.device.labels))

    def need(self, device: DeviceState) -> Bytes | Reason:
        """Return what a copy is charged on *device*, or why it may not be there."""
        if not self.allows(device):
            return NOT_ALLOWED
        costs = self.costs(device.kind)
        return NO_PROFILE if costs is None else costs.occupation

    @property
    def running(self) -> int:
        return len(self.runs)

    @property
    def copies(self) -> int:
        """Without those that drain."""
        return len(self.active)

    def add(self, model: Model, device: DeviceState) -> None:
        """It takes calls from now on: it begins to load, or does not drain any more."""
        self.active[model] = device
        if self.exclusive:
            self.holders[device.id] = device
        elif self.ready is None:
            if len(self.active) > 1:
                self.ready = ReadyCopies(each for each in self.active if not each.loading)
        elif not model.loading:
            self.ready.add(model)

    def drop(self, model: Model) -> DeviceState:
        """It takes no more calls. Return where it is."""
        device = self.active.pop(model)
        if self.exclusive:
            del self.holders[device.id]
        elif self.ready is not None:
            self.ready.discard(model)
            if len(self.active) == 1:
                self.ready = None
        return device

    def free_copy(self) -> Model | None:
        """
        Return where the next call of a CPU function starts; None: it waits for a slot. A copy that loads counts only
        while none is ready: a call that waits for a slot starts no later than one that waits there for the load, and
        perhaps sooner.
        """
        if self.ready is not None and self.loading < len(self.active):
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
        over = max(0, len(self.active) - self.target)
        return min(over, self.excess) if self.exclusive and self.desired else over

    def load_s(self, kind: str) -> Seconds:
        costs = self.costs(kind)
        return inf if costs is None else costs.load_s

    def service_s(self, kind: str) -> Seconds:
        costs = self.costs(kind)
        return inf if costs is None else costs.service_s

    def estimate_s(self, kind: str, size: float) -> Seconds:
        costs = self.costs(kind)
        return inf if costs is None else costs.estimate_s(size)

    def service_estimate(self, kind: str, size: float, estimate_s: Seconds | None = None) -> ServiceEstimate | None:
        """For people. *estimate_s*: what was estimated once; None: as it is now."""
        costs = self.costs(kind)
        if costs is None:
            return None
        now_s, times = costs.estimate_s(size), costs.times
        mean_s = now_s if estimate_s is None else estimate_s
        shown = size if costs.sizes.predict_s(size) is not None else 0.0
        return ServiceEstimate(
            kind, mean_s, mean_s * times.quantile(0.5), mean_s * times.quantile(0.9), times.calls, shown
        )

    def service_cv(self, kind: str) -> float:
        costs = self.costs(kind)
        return 0.0 if costs is None else costs.times.cv

    def service_quantile_s(self, kind: str, share: float) -> Seconds:
        costs = self.costs(kind)
        return inf if costs is None else costs.service_s * costs.times.quantile(share)


class DeviceState:
    """One device: what is in its memory, what runs, what waits for it."""

    __slots__ = (
        "busy_s", "busy_since", "closed", "device", "evictions", "free_at", "hits", "id", "idle_key", "kind", "local",
        "local_s", "misses", "models", "noted_at", "order", "others", "preload", "run", "served", "starts",
        "touched",
    )  # fmt: skip

    def __init__(self, device: Device, order: int) -> None:
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
        self.touched = False
        """Its doc may be another one than was last taken."""
        self.served = 0
        self.hits = 0
        self.misses = 0
        self.evictions = 0

    @property
    def busy(self) -> bool:
        return self.run is not None or self.preload is not None

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
            costs = run.owner.costs(self.kind)
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


class Demand(NamedTuple):
    """What is known of the arrivals of all functions together."""

    first_call_at: Seconds | None
    offered_s: Seconds
    """Service times of the arrivals, weighted as `FunctionState.called`, as of `offered_at`."""
    offered_at: Seconds


class Cluster:
    """Everything that decisions are made from."""

    def __init__(self, replacement: Replacement, pass_limit: int) -> None:
        self.now: Seconds = 0.0
        self.queue: GlobalQueue[Call] = GlobalQueue(pass_limit)
        self.devices: dict[DeviceId, DeviceState] = {}
        self.functions: dict[FunctionId, FunctionState] = {}
        self.largest: dict[str, Bytes] = {}
        """Memory of the largest device, by kind."""
        self.fleet = 0
        """Counts changes of devices and profiles: what was concluded from an older fleet is asked again."""
        self.constrained = 0
        """How many of the functions have constraints, and of the devices are drained."""
        self.idle_devices: list[IdleKey] = []
        """Sorted; kept so as devices start and end, since sorting 1,000 of them per decision would be the decision."""
        self.replacement = replacement
        self.joined = 0
        """Devices that have joined so far."""
        self.asked: tuple[FunctionState, DeviceState] | None = None
        """For whom `fits` was answered last. Whoever changes pins or charges sets it to None."""
        self._answer: Fit[FunctionState] | Reason = NOT_ALLOWED
        self.orphaned: dict[FunctionId, FunctionState] = {}
        """Has every model function that waits and that no device holds, and some that are no longer so."""
        self.reserved_until: Seconds = -inf
        """See `contract.Start.reserved_s`."""
        self._first_call_at: Seconds | None = None
        self._observed: Seconds = _LEAST_OBSERVED_S
        self._observed_at: Seconds = -inf
        """When `_observed` was found: decisions ask for it many times at one instant."""
        self._offered_s = 0.0
        """Service times of the arrivals, weighted as `FunctionState.called`, as of `_offered_at`."""
        self._offered_at: Seconds = 0.0

    # --- demand ---

    def demand(self) -> Demand:
        return Demand(self._first_call_at, self._offered_s, self._offered_at)

    def restore_demand(self, demand: Demand) -> None:
        self._first_call_at, self._offered_s, self._offered_at = demand
        self._observed_at = -inf

    def note_call(self, owner: FunctionState) -> None:
        """A call arrives now. Those of CPU functions count for what their copies are worth, not as work of devices."""
        now = self.now
        if self._first_call_at is None:
            self._first_call_at = owner.called_at = self._offered_at = now
            self._observed_at = -inf
        owner.called = owner.called * exp((owner.called_at - now) / DEMAND_S) + 1.0
        owner.called_at = now
        if not owner.exclusive:
            return
        service_s = 0.0
        for kind in self.largest:
            costs = owner.costs(kind)
            if costs is not None:
                service_s = costs.service_s
                break
        self._offered_s = self._offered_s * exp((self._offered_at - now) / DEMAND_S) + service_s
        self._offered_at = now
        if not owner.holders and owner.waiting:
            self.orphaned[owner.id] = owner

    def note_orphan(self, owner: FunctionState) -> None:
        """One of its calls began to wait, or a device ceased to hold it."""
        if not owner.holders and owner.waiting and owner.exclusive:
            self.orphaned[owner.id] = owner

    def _observed_s(self) -> Seconds:
        """What the weights of one call a second since the first would add up to by now."""
        now = self.now
        if now != self._observed_at:
            self._observed_at = now
            since = 0.0 if self._first_call_at is None else now - self._first_call_at
            self._observed = max(_LEAST_OBSERVED_S, DEMAND_S * -expm1(-since / DEMAND_S))
        return self._observed

    def rate(self, owner: FunctionState) -> float:
        return owner.called * exp((owner.called_at - self.now) / DEMAND_S) / self._observed_s()

    @property
    def utilisation(self) -> float:
        offered_s = self._offered_s * exp((self._offered_at - self.now) / DEMAND_S)
        return offered_s / self._observed_s() / max(1, len(self.devices))

    @property
    def reserved(self) -> bool:
        return self.now < self.reserved_until

    # --- devices and residency ---

    def join(self, device: Device) -> DeviceState:
        """A device comes, empty and idle."""
        state = self.attach(device)
        self.set_idle(state)
        return state

    def attach(self, device: Device, order: int | None = None) -> DeviceState:
        """A device comes, and whether it is idle is for the caller to find out; as number *order*, or the next."""
        if order is None:
            order = self.joined
        self.joined = max(self.joined, order + 1)
        state = DeviceState(device, order)
        self.devices[device.id] = state
        self.largest[device.kind] = max(device.memory, self.largest.get(device.kind, 0))
        self.fleet += 1
        return state

    def leave(self, device: DeviceState) -> None:
        if device.idle_key is not None:
            self.set_busy(device)
        self.constrained -= device.closed
        for model in list(device.models):
            self.evict(device, model)
        del self.devices[device.id]
        self.largest = {}
        for each in self.devices.values():
            self.largest[each.kind] = max(each.device.memory, self.largest.get(each.kind, 0))
        self.fleet += 1

    def set_idle(self, device: DeviceState) -> None:
        device.idle_key = key = (-device.starts, device.order, device)
        insort(self.idle_devices, key)

    def set_busy(self, device: DeviceState) -> None:
        key = device.idle_key
        assert key is not None
        del self.idle_devices[bisect_left(self.idle_devices, key)]
        device.idle_key = None

    def insert(self, device: DeviceState, owner: FunctionState, memory: Bytes, load_s: Seconds) -> Model:
        copy = 0
        while copy_id(owner.id, copy) in device.models.models:
            copy += 1
        model: Model = Resident(owner, memory, self.now, self.now + load_s, copy)
        device.models.insert(model)
        owner.add(model, device)
        owner.loading += 1
        self.asked = None
        return model

    def evict(self, device: DeviceState, model: Model) -> None:
        """Take *model* off the lists and give its charge back, for whatever reason it goes."""
        owner = model.owner
        device.models.remove(model.key)
        if model in owner.active:
            owner.drop(model)
        else:
            del owner.draining[model]
        if model.loading:
            owner.loading -= 1
            if device.preload is model:
                device.preload = None
                device.busy_s += self.now - device.busy_since
        self.note_orphan(owner)
        self.asked = None

    def fits(
        self, device: DeviceState, owner: FunctionState, victims: tuple[CopyId, ...] | None = None
    ) -> Fit[FunctionState] | Reason:
        """
        Who leaves *device* so that one more copy of *owner* fits, or why it does not. *victims*: they leave; None: as
        many as it takes, in the replacement order. The view's answer serves the commit as well.
        """
        if victims is None and self.asked == (owner, device):
            return self._answer
        need = owner.need(device)
        leaving = self.replacement if victims is None else tuple(victims)
        found = need if isinstance(need, Reason) else fits(device.models, need, owner, leaving)
        if victims is None:
            self.asked, self._answer = (owner, device), found
        return found

    def room_for(
        self, owner: FunctionState, among: Iterable[DeviceState] | None = None
    ) -> tuple[DeviceState, tuple[Model, ...]] | None:
        """
        The device (of *among*, or any) for a copy that no policy places, and who leaves it.

        Without victims before with them; then one with fewer copies of *owner*, none at all if it is a model function;
        then the most free memory, or the victims that are cheapest to load again; ties by order of joining.
        O(devices x residents).
        """
        best: tuple[DeviceState, tuple[Model, ...]] | None = None
        best_key: tuple[bool, int, Seconds, Bytes, int] | None = None
        held = Counter(owner.active.values())
        for device in self.devices.values() if among is None else among:
            if owner.exclusive and owner.id in device.models.models:
                continue
            found = self.fits(device, owner)
            if isinstance(found, Reason):
                continue
            reload_s = sum(model.owner.load_s(device.kind) for model in found.victims)
            key = (bool(found.victims), held[device], reload_s, -device.models.free, device.order)
            if best_key is None or key < best_key:
                best, best_key = (device, found.victims), key
        return best

    def fits_somewhere(self, owner: FunctionState) -> bool:
        """Some device that it may be on is large enough for it, were it empty."""
        if owner.fits_as_of != self.fleet:
            owner.fits_as_of = self.fleet
            owner.fits = False
            for kind, memory in self.largest_for(owner).items():
                costs = owner.costs(kind)
                if costs is not None and costs.occupation <= memory:
                    owner.fits = True
                    break
        return owner.fits

    def largest_for(self, owner: FunctionState) -> dict[str, Bytes]:
        """As `largest`, of the devices that *owner* may be on."""
        if not owner.constraints:
            return self.largest
        largest: dict[str, Bytes] = {}
        for each in self.devices.values():
            if owner.allows(each):
                largest[each.kind] = max(each.device.memory, largest.get(each.kind, 0))
        return largest

    def idle_holder(self, call: WaitingCall) -> DeviceState | None:
        owner = cast(Call, call).owner
        holders = owner.holders
        if len(self.idle_devices) <= len(holders):
            for key in self.idle_devices:
                if key[2].id in holders:
                    return key[2]
            return None
        keys = [device.idle_key for device in holders.values() if device.idle_key is not None]
        return min(keys)[2] if keys else None

    def orphans(self, limit: int) -> list[WaitingCall]:
        found: list[WaitingCall] = []
        stale = []
        for owner in self.orphaned.values():
            call = None if owner.holders else self._first_of(owner)
            if call is None:
                stale.append(owner.id)
            elif len(found) < limit:
                found.append(call)
            else:
                break
        for function in stale:
            del self.orphaned[function]
        return found

    def _first_of(self, owner: FunctionState) -> Call | None:
        first = owner.queue.calls[0] if owner.queue.calls else None
        for call in self.queue.returned:
            if call.owner is owner and (first is None or call.number < first.number):
                return call
        return first
