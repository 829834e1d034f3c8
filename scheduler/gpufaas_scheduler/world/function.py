"""A deployed revision with its copies and its calls. Calls and devices refer to it, so only mypy imports them here."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING, TypeAlias

from gpufaas_cache_manager import residency
from gpufaas_core.constraints import satisfied
from gpufaas_core.model import Bytes, DeviceId, Function, Replica, Seconds
from gpufaas_core.owners import PLAN
from gpufaas_scheduler.fit import NO_COMPUTE, NO_PROFILE, NOT_ALLOWED, Reason
from gpufaas_scheduler.view_nouns import DeviceView
from gpufaas_scheduler.world.changes import Changes
from gpufaas_scheduler.world.deployed import Revision
from gpufaas_scheduler.world.queue import Flow
from gpufaas_scheduler.world.ready import ReadyCopies

if TYPE_CHECKING:
    from gpufaas_scheduler.world.call import Call
    from gpufaas_scheduler.world.device import DeviceState


class FunctionState(Revision):
    """A deployed revision with its copies and its calls."""

    __slots__ = (
        "active", "after", "ahead_after", "before", "bound", "called", "called_at", "copies", "draining", "eager",
        "excess", "flow", "held", "holders", "idle_holders", "keeps_share_until", "loading", "nests", "number", "plan",
        "plan_version", "ready", "running", "waiting",
    )  # fmt: skip

    def __init__(self, function: Function, changes: Changes) -> None:
        super().__init__(function, changes)
        self.flow: Flow[Call] = Flow()
        """Waiting calls: part of the global queue, or the FIFO of a direct function."""
        self.active: dict[Copy, DeviceState] = {}
        """Its copies and their devices, loading ones included, draining ones not."""
        self.copies = 0
        """The length of `active`: a decision reads it many times."""
        self.draining: dict[Copy, DeviceState] = {}
        """Its copies that run calls but take no new ones."""
        self.holders: dict[DeviceId, DeviceState] = {}
        """The devices of the `active` copies of a placed function, which has one copy per device."""
        self.idle_holders: dict[DeviceId, DeviceState] = {}
        """The devices of `holders` that are idle and `listed`, in any order; see `hits`."""
        self.ready: ReadyCopies | None = None
        """The loaded ones of `active`, for a direct function with several copies; else None."""
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
        """The number of copies of a placed function that scaling asked for, no longer asks for, and that are still
        there."""
        self.held: tuple[Call, Seconds] | None = None
        """The call that was held back last for others of its batch, and since when."""
        self.plan: Mapping[DeviceId, Replica] = {}
        """What the plan in force has of it, by devices that are there and not drained. Empty: no plan owns it."""
        self.plan_version = 0
        self.bound = bool(self.constraints)
        """The function may not be on all devices: it has constraints, or a plan owns it."""

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

    @property
    def retry_at(self) -> Seconds:
        """When it may be loaded again for a plan, as its last load failed; 0.0: at once."""
        return 0.0 if self.backoff is None else self.backoff.retry_at

    @property
    def owned_by(self) -> str:
        """Who decides about its copies: one of `owners.OWNERS`."""
        return PLAN if self.plan else self.declared.owner

    def allows(self, device: DeviceState) -> bool:
        """Whether a new copy may be on *device*: it is not drained, has what it asks for, and its plan names it."""
        return not device.closed and (
            not self.bound or (self.suits(device) and (not self.plan or device.id in self.plan))
        )

    def suits(self, device: DeviceState) -> bool:
        """Whether *device* satisfies its constraints, and is not being drained."""
        return not device.closed and (not self.constraints or satisfied(self.constraints, device.device.labels))

    def takes(self, device: DeviceState) -> int:
        """
        Return what the next grant takes of the compute of *device*, or what a new copy with a share holds there. 0: the
        copy there holds a share.
        """
        if not self.limited:
            return self.wanted
        name = device.copies.get(self.id)
        if name is not None:
            copy = device.residency.copies[name]
            return 0 if copy.share else copy.reserve or self.reserves
        replica = self.plan.get(device.id)
        return self.wanted if replica is None else replica.share or replica.reserve or self.wanted

    def holds(self, device: DeviceState) -> int:
        """Return the share of the compute of *device* that a new copy holds there; 0: none."""
        replica = self.plan.get(device.id)
        return self.share if replica is None else replica.share

    def need(self, device: DeviceState) -> Bytes | Reason:
        """Return what a copy is charged on *device*, or why it may not be there."""
        if device.closed or (self.bound and not self.allows(device)):
            places = ", ".join(self.plan)
            said = f"plan {self.plan_version} has {{function}} on {places}, not on {{device}}"
            return Reason(said) if self.plan and self.suits(device) else NOT_ALLOWED
        wanted = self.takes(device) if self.limited else self.wanted
        if wanted > device.compute:
            return Reason(NO_COMPUTE, compute=wanted, spare=device.compute)
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
        if self.placed:
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
        if self.placed:
            del self.holders[device.id]
            self.idle_holders.pop(device.id, None)
        elif self.ready is not None:
            self.ready.discard(copy)
            if self.copies == 1:
                self.ready = None
        return device

    @property
    def surplus(self) -> int:
        """The number of copies that should go. Replicas of a policy stay, unless the function is scaled to zero."""
        if self.desired is None:  # beyond its bounds only: one was silent while another one was loaded for it
            bounded = self.max_copies and not self.placed
            return max(0, self.copies - max(self.min_copies, self.max_copies)) if bounded else 0
        over = max(0, self.copies - self.target)
        return min(over, self.excess) if self.placed and self.desired else over


Copy: TypeAlias = residency.Copy[FunctionState]
"""A function's copy on a device."""
