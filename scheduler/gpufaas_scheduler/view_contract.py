"""
The view of a policy on the cluster: functions, calls, devices and copies as a policy sees them. It can change nothing.

`contract` has the actions, and hands the names of this module on: a policy imports all from there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import inf
from typing import Protocol

from gpufaas_core.model import (
    Bytes,
    CallId,
    CopyId,
    DeviceId,
    FunctionId,
    NodeId,
    Offer,
    OrderId,
    PlacementPlan,
    Seconds,
)
from gpufaas_scheduler.view_nouns import DeviceView, FunctionView


class ResidentView(Protocol):
    """A copy of a function on a device, perhaps of a direct function (`owner.placed` is false)."""

    @property
    def id(self) -> CopyId: ...
    @property
    def owner(self) -> FunctionView: ...
    @property
    def memory(self) -> Bytes: ...
    @property
    def share(self) -> int:
        """The compute of its device that it holds for as long as it is there, in per cent; 0: none."""

    @property
    def loading(self) -> bool: ...
    @property
    def reserve(self) -> int:
        """Without a share: what a grant of it counts for while it runs, in per cent; 0: as its function says."""

    @property
    def slots(self) -> int:
        """The most grants that it runs at once; 0: as its function says."""

    @property
    def ready_at(self) -> Seconds:
        """When its load should end; in the past once it has."""

    @property
    def running(self) -> int:
        """The number of its grants."""

    @property
    def queued(self) -> int:
        """The number of calls that wait for it in the local queue of its device."""

    @property
    def batch(self) -> int:
        """The most calls of one grant; 0: as its function says."""


class WaitingCall(Protocol):
    @property
    def id(self) -> CallId: ...
    @property
    def function(self) -> FunctionId: ...
    @property
    def owner(self) -> FunctionView: ...
    @property
    def number(self) -> int:
        """The arrival number of the call."""

    @property
    def left(self) -> bool:
        """It left the queue before, and came back; or it came late, with the number of an earlier call."""

    note: int
    """A number of the policy's own, which the engine keeps with the call, also over a takeover; 0 at first."""

    @property
    def arrived_at(self) -> Seconds: ...
    @property
    def deadline(self) -> Seconds | None: ...
    @property
    def goal_s(self) -> Seconds | None:
        """It should be answered within this time of its arrival; None: neither it nor its function has a goal."""

    @property
    def promised_at(self) -> Seconds | None:
        """The time that the policy has promised (`Promise`); None: it promised nothing."""


class RunningCall(Protocol):
    @property
    def id(self) -> CallId: ...
    @property
    def owner(self) -> FunctionView: ...
    @property
    def grant(self) -> int:
        """The number of its grant; 0: an older engine made it."""

    @property
    def endless(self) -> bool:
        """The call may go on for ever, as a WebSocket may."""


class QueueView(Protocol):
    """
    The global queue in arrival order. `set_aside` leaves a call's function out until `rewind`.

    *before*: only calls with a lower arrival number. O(log of the waiting functions), whatever the number of calls.
    """

    def __len__(self) -> int: ...
    @property
    def count(self) -> int:
        """The number of calls, without the cost of `len`."""

    def first(self, before: int = ...) -> WaitingCall | None: ...
    def oldest(self, limit: int) -> Sequence[WaitingCall]:
        """
        Return the first waiting call of each of the *limit* functions that have waited longest, in arrival order.
        Functions that are set aside may be missing. O(1) if these are the same calls as at the last question.
        """

    def more_of(self, call: WaitingCall, limit: int) -> list[WaitingCall]:
        """Return up to *limit* other waiting calls of its function, in arrival order. O(limit)."""

    def set_aside(self, call: WaitingCall) -> None: ...
    @property
    def aside(self) -> Collection[FunctionId]:
        """The functions that are set aside."""

    def rewind(self) -> None: ...


class FleetView(Protocol):
    """The devices, and which of them are idle."""

    def devices(self) -> Collection[DeviceView]:
        """Return all devices, those that are drained too. O(1)."""

    def device(self, name: DeviceId) -> DeviceView | None: ...
    @property
    def device_count(self) -> int: ...
    @property
    def idle_count(self) -> int: ...
    def idle(self) -> Iterator[DeviceView]:
        """
        Yield the idle devices, those with the most starts first, ties by the order in which they joined. Devices that
        become busy drop out. Devices that no waiting call may run on are left out. Last come the full devices on which
        a call can join others of its function, in a slot of their copy: `can_start` says whose.
        """

    def can_start(self, device: DeviceView, call: WaitingCall) -> bool:
        """Whether the device has, or can get by evicting idle shares, the compute for one more grant. O(1) mostly."""

    def lacks(self, device: DeviceView, function: FunctionView) -> int:
        """Return what is not spare of the compute that a new copy or grant of it takes there, in per cent: 0 or less if
        there is enough. Where a plan has it, that is its share or reserve (`FunctionView.plan`)."""

    def least_used(self, function: FunctionView, limit: int) -> Sequence[DeviceView]:
        """
        Return up to *limit* idle devices that it may be on, fewest starts first. O(limit) without constraints; O(1),
        and the same list, if they are the same as at the last question.
        """

    def places(self, function: FunctionView, limit: int) -> list[tuple[DeviceView, Bytes]]:
        """
        Return the devices of `least_used` that do not hold the function and where it can run, each with the bytes that
        must be freed for a copy: 0 or less if there is room.
        """

    def running(self, device: DeviceView) -> Collection[RunningCall]:
        """Return the calls of placed functions that run on the device."""

    def devices_of(self, node: NodeId) -> list[DeviceView]:
        """Return the devices of *node*. O(devices)."""

    def allows(self, device: DeviceView, call: WaitingCall) -> bool:
        """Whether the call may run on the device: its function has a copy there, or may have one. O(constraints)."""

    @property
    def reserved(self) -> bool:
        """Whether the last `Start` with `reserved_s` was less than that time ago."""


class ResidencyView(Protocol):
    """Which devices hold which functions, and where there is room."""

    def holds(self, device: DeviceView, call: WaitingCall) -> bool: ...
    def held(self, call: WaitingCall) -> bool:
        """Whether some device holds the call's function, or loads it."""

    def holders(self, call: WaitingCall) -> Collection[DeviceView]: ...
    def idle_holder(self, call: WaitingCall) -> DeviceView | None:
        """Return the first idle device that holds the call's function. O(the fewer of idle devices and holders)."""

    def idle_holders(self, call: WaitingCall, limit: int) -> list[DeviceView]:
        """
        Return up to *limit* idle devices that hold the call's function, in the order of its holders, or of idle devices
        if these are as few. O(the fewer of both) if there are several. Devices on which the call can only join others
        are among them if there are no others.
        """

    def copies_of(self, function: FunctionView) -> list[tuple[ResidentView, DeviceView]]:
        """Return its copies that take calls, each with the device of its first part. O(copies)."""

    def find(self, copy: CopyId) -> ResidentView | None: ...
    def device_of(self, copy: CopyId) -> DeviceView | None:
        """Return the device of the copy's first part."""

    def residents(self, device: DeviceView) -> Collection[ResidentView]:
        """Return the copies on the device, least recently used first."""

    def free(self, device: DeviceView) -> Bytes: ...
    def occupation(self, device: DeviceView, function: FunctionView) -> Bytes | None:
        """Return the memory that a copy needs there; None: the function cannot, or may not, run there."""

    def evictable(self, device: DeviceView) -> list[ResidentView]:
        """
        Return the copies on the device that may all be evicted together, least recently used first: none is pinned, and
        each function keeps its minimum of copies.
        """

    def fits(self, device: DeviceView, call: WaitingCall) -> bool:
        """Whether a miss can start there: the device is allowed and large enough, and enough can be evicted. O(M)."""

    def can_stage(self, device: DeviceView, function: FunctionView) -> bool:
        """Whether the node of the device can bring the weights of the function into its host tier now."""


class CostsView(Protocol):
    """
    How long calls and loads take, how soon devices are free, and how much work arrives. Times of a function are
    infinite on devices where it cannot run.
    """

    def load_s(self, device: DeviceView, call: WaitingCall) -> Seconds:
        """Return the load time of the call's function on the device."""

    def estimate_s(self, call: WaitingCall, kind: str) -> Seconds:
        """Return the expected service time of this call: by its size if the function's times depend on it."""

    def finish_s(self, device: DeviceView) -> Seconds:
        """Return the estimated time until the device has nothing to do; a call past its estimate counts as 0."""

    def left_s(self, device: DeviceView) -> Seconds:
        """
        Return the expected time until the device has nothing to do. As `finish_s`, but a call that has run for t takes
        as much longer as the function's calls that had run for t did on average (E[X - t | X > t]), and at least half
        of t if none had. So it grows while a call overruns. 0.0 if idle. O(1); O(buckets) after a call has finished.
        """

    def overrun_s(self, device: DeviceView) -> Seconds:
        """Return how late the call or load on the device is, by its estimate; 0.0 if none is."""

    def soonest_holder(self, call: WaitingCall, late_s: Seconds = inf) -> tuple[DeviceView, Seconds] | None:
        """
        Return the busy holder with the least `finish_s`, and this time. Holders that should have finished *late_s* ago
        are left out. O(holders).
        """

    def soonest_left(self, call: WaitingCall) -> tuple[DeviceView, Seconds] | None:
        """Return the busy holder with the least `left_s`, and this time. O(holders)."""

    def unknown(self, function: FunctionView) -> bool:
        """Return whether none of its calls has ended yet, so that its times are guesses."""

    def rate(self, function: FunctionView) -> float:
        """Return its arrivals per second, exponentially weighted."""

    @property
    def utilisation(self) -> float:
        """The service time that arrives per second and device: 1 is all that devices can serve without loads."""


class AgendaView(Protocol):
    """Why the policy runs, and what it has asked for."""

    @property
    def causes(self) -> int:
        """The mask of `ARRIVAL`, `FINISH`, `LOADED`, `FLEET`, `WAKE` and `PLAN` that says why it runs."""

    @property
    def woken(self) -> Collection[str]:
        """The keys of the wakes that have come."""

    @property
    def wakes(self) -> Mapping[str, Seconds]:
        """The wakes that have not come, by key."""

    @property
    def placement(self) -> PlacementPlan | None:
        """The plan in force."""

    @property
    def offers(self) -> Mapping[str, Offer]:
        """The nodes that can be procured, by kind; empty where the platform can order none."""

    @property
    def ordered(self) -> Mapping[OrderId, str]:
        """The kinds of the nodes that were procured and have not joined, by order; the newest last."""

    @property
    def unmet(self) -> Mapping[str, str]:
        """Why the last order of a kind failed, by kind; without those of which a node has come since."""


class View(FleetView, ResidencyView, CostsView, AgendaView, Protocol):
    """
    The cluster after the last action that was done. M is the number of copies on a device.

    A helper of a policy that needs less takes one of the four views that this one consists of.
    """

    @property
    def now(self) -> Seconds: ...
    @property
    def queue(self) -> QueueView: ...
    def functions(self) -> Collection[FunctionView]:
        """Return the functions that are deployed. O(functions)."""

    def function(self, name: FunctionId) -> FunctionView | None: ...
    def variants(self, task: str) -> Collection[FunctionView]:
        """Return those of them that have this task. O(1); after a deployment O(functions)."""

    def first_hit(self, device: DeviceView) -> WaitingCall | None:
        """Return the first waiting call whose function the device holds. O(M)."""

    def oldest_hit(self, without: Collection[FunctionId]) -> WaitingCall | None:
        """
        Return the first waiting call that would be a hit on an idle device, without the functions *without*.
        O(functions that wait beside an idle holder).
        """

    def orphans(self, limit: int) -> list[WaitingCall]:
        """
        Return the first waiting call of each function that no device holds, of up to *limit* functions, in the order in
        which they lost their last holder or got their first call.
        """
