"""
The contract of a scheduling policy: the actions that it may propose, and the view that it decides from.

A policy is run when a model function's call waits and a device is idle. It looks at a read-only `View`, proposes one
`Action` at a time and is told at once whether the engine did it::

    refusal = yield Start(call.id, device.id)      # None: done, and the view shows it already

The engine checks every action against memory, pins and busy devices, so that a wrong policy is slow, never unsafe. A
policy keeps no clock (`view.now`), does no IO, and is deterministic: the same view gives the same actions. To add one,
write a class with the members of `SchedulingPolicy` and register its factory as an entry point of the group
``gpufaas.policies``.

CPU functions (slots instead of the whole device) never come here, see ``engine``.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator
from math import inf
from typing import Final, Protocol, TypeAlias, runtime_checkable

from msgspec import Struct

from gpufaas_core.model import Bytes, CallId, CopyId, DeviceId, FunctionId, Seconds

NEVER: Final = 1 << 62
"""An arrival number behind all others."""

# --- actions ----------------------------------------------------------------------------------------------------------
# The union may grow; a policy that never yields a new kind of action need not know it.


class Why(Struct, frozen=True):
    """What an action is explained with."""

    rule: str
    """In words, the condition that held."""
    options: tuple[Option, ...] = ()
    """What was weighed, the chosen one included."""


Option: TypeAlias = tuple[str, str, float]
"""(``hit`` | ``load`` | ``wait`` | ..., device or function, seconds by estimate). Only compared within one `Why`."""


class Start(Struct, frozen=True):
    """
    Start a waiting call on an idle device: a hit if it holds the function, else a miss.

    `victims` are who leaves for a miss; None: as many as it takes, in the engine's replacement order.
    """

    call: CallId
    device: DeviceId
    victims: tuple[CopyId, ...] | None = None
    why: Why | None = None
    reserved_s: Seconds = 0.0
    """For so long `View.reserved` is true: what a policy allows itself only now and then."""


class EnqueueLocal(Struct, frozen=True):
    """
    Let a waiting call wait for a busy device that holds its function.

    Once the device is late by `patience_s`, by its estimate, and this call is the first of its local queue, the whole
    local queue goes back to the global one, and a scheduling run follows.
    """

    call: CallId
    device: DeviceId
    why: Why | None = None
    patience_s: Seconds = inf


class Load(Struct, frozen=True):
    """
    Load a model function on an idle device without a call: a replica, a prefetch. The device is busy until it is
    loaded, as with a miss. Refused after a failed load, until a call has loaded the function.
    """

    function: FunctionId
    device: DeviceId
    victims: tuple[CopyId, ...] | None = None
    why: Why | None = None


class Promise(Struct, frozen=True):
    """Note with a waiting call by when its wait should be over, as `WaitingCall.promised_at`. Nothing else happens."""

    call: CallId
    at: Seconds


class CountPass(Struct, frozen=True):
    """A scan passed over every waiting call with an arrival number below `before`: count one more pass for each."""

    before: int


Action = Start | EnqueueLocal | Load | Promise | CountPass


class Refusal(Struct, frozen=True):
    """The engine did not do it; nothing changed."""

    action: Action
    reason: str


Plan = Generator[Action, Refusal | None, Seconds | None]
"""Returns when to plan again if no event comes before, on the clock of `View.now`; None: only after an event."""

# --- the view ---------------------------------------------------------------------------------------------------------


class FunctionView(Protocol):
    """A function. Times and sizes are of its profile: learnt live, given in a simulation."""

    @property
    def id(self) -> FunctionId: ...
    @property
    def exclusive(self) -> bool:
        """A model function: one of its calls has the device to itself. False: a CPU function, seen as a resident."""

    @property
    def slots(self) -> int:
        """Calls that one copy runs at once; 1 for a model function."""

    @property
    def copies(self) -> int:
        """From the start of the load. Of a model function, as many as devices that hold it."""

    @property
    def waiting(self) -> int:
        """Its calls that no device was started for."""

    @property
    def loading(self) -> int:
        """How many of its copies are loading."""

    def load_s(self, kind: str) -> Seconds:
        """Infinite where it cannot run."""

    def service_s(self, kind: str) -> Seconds:
        """The mean."""

    def service_cv(self, kind: str) -> float:
        """
        Coefficient of variation of the service times about their estimates: standard deviation over mean. 1 of a
        function that nobody has called yet; 0 where it cannot run.
        """

    def service_quantile_s(self, kind: str, share: float) -> Seconds:
        """What *share* (0 to 1) of its calls do not exceed; infinite where it cannot run. O(buckets)."""


class ResidentView(Protocol):
    """A copy of a function on a device. May be one of a CPU function too (`owner.exclusive` is false)."""

    @property
    def key(self) -> CopyId:
        """What it is called as a victim; of a model function, its id."""

    @property
    def owner(self) -> FunctionView: ...
    @property
    def memory(self) -> Bytes: ...
    @property
    def loading(self) -> bool: ...


class WaitingCall(Protocol):
    @property
    def id(self) -> CallId: ...
    @property
    def function(self) -> FunctionId: ...
    @property
    def owner(self) -> FunctionView: ...
    @property
    def number(self) -> int:
        """Arrival number."""

    @property
    def arrived_at(self) -> Seconds: ...

    @property
    def deadline(self) -> Seconds | None: ...
    @property
    def promised_at(self) -> Seconds | None:
        """As the policy said with `Promise`."""


class DeviceView(Protocol):
    @property
    def id(self) -> DeviceId: ...
    @property
    def kind(self) -> str: ...
    @property
    def busy(self) -> bool:
        """A model function's call runs on it, or a `Load` is under way."""

    @property
    def order(self) -> int:
        """How many joined before it."""

    @property
    def starts(self) -> int:
        """Calls of model functions that were started on it."""


class QueueView(Protocol):
    """The global queue in arrival order. Functions that cannot be placed are left out by `set_aside`."""

    def __len__(self) -> int: ...
    @property
    def functions(self) -> int:
        """At least as many functions as have calls waiting."""

    def first(self, before: int = ...) -> WaitingCall | None: ...
    def first_at_limit(self, before: int = ...) -> WaitingCall | None: ...
    def passes(self, call: WaitingCall) -> int: ...
    def set_aside(self, call: WaitingCall) -> None: ...
    def rewind(self) -> None: ...


class FleetView(Protocol):
    """Which devices there are, and which are idle."""

    @property
    def device_count(self) -> int: ...
    @property
    def idle_count(self) -> int: ...
    def idle(self) -> Iterator[DeviceView]:
        """
        Idle devices, most starts first, ties by the order in which they joined. Those that get busy drop out, and
        those that no waiting call may run on are left out.
        """

    def least_used(self, function: FunctionView, limit: int) -> list[DeviceView]:
        """Up to *limit* idle devices that the function may be on, fewest starts first. O(limit) without constraints."""

    def allows(self, device: DeviceView, call: WaitingCall) -> bool:
        """The device satisfies the constraints of the call's function. O(constraints)."""

    @property
    def reserved(self) -> bool:
        """The last call that was started with `Start.reserved_s` began no longer ago than that."""


class ResidencyView(Protocol):
    """Who holds what, and who fits where."""

    def holds(self, device: DeviceView, call: WaitingCall) -> bool: ...
    def holds_function(self, device: DeviceView, function: FunctionView) -> bool: ...
    def held(self, call: WaitingCall) -> bool:
        """Some device holds the call's function, if only from the start of its load."""

    def holders(self, call: WaitingCall) -> Collection[DeviceView]: ...
    def idle_holder(self, call: WaitingCall) -> DeviceView | None:
        """The first idle device, in their order, that holds the call's function. O(the fewer of idle and holders)."""

    def idle_holders(self, call: WaitingCall, limit: int) -> list[DeviceView]:
        """Up to *limit* idle devices that hold the call's function, among as many of its holders or idle devices."""

    def residents(self, device: DeviceView) -> Collection[ResidentView]:
        """What it holds, least recently used first."""

    def free(self, device: DeviceView) -> Bytes: ...
    def occupation(self, device: DeviceView, function: FunctionView) -> Bytes | None:
        """What a copy is charged on the device; None: it cannot, or may not, run there."""

    def evictable(self, resident: ResidentView, others: int = 0) -> bool:
        """It may be a victim, also if *others* of its function go: not pinned, nor within the minimum of copies."""

    def fits(self, device: DeviceView, call: WaitingCall) -> bool:
        """A miss could start on the device: allowed, large enough, and enough of it not pinned. O(M)."""


class CostsView(Protocol):
    """How long things take, how soon devices are free, and how much is asked of them."""

    def load_s(self, device: DeviceView, call: WaitingCall) -> Seconds:
        """Load time of the call's function on a device of this kind; infinite if it cannot be there."""

    def service_s(self, device: DeviceView, call: WaitingCall) -> Seconds: ...
    def estimate_s(self, call: WaitingCall, kind: str) -> Seconds:
        """
        Expected service time of this very call on devices of that kind: by its size where the function's times depend
        on it, else the mean; infinite where it cannot run.
        """

    def finish_s(self, device: DeviceView) -> Seconds:
        """Seconds until a busy device has nothing to do, by estimate."""

    def left_s(self, device: DeviceView) -> Seconds:
        """
        Expected seconds until a device has nothing to do: as `finish_s`, but a call that has run for t takes as much
        longer as calls of its function did on average that had run for t (E[X - t | X > t]); past all that was seen, at
        least half of t. So it grows while a call overruns. 0.0 if idle. O(1), O(buckets) after a call has finished.
        """

    def overrun_s(self, device: DeviceView) -> Seconds:
        """
        For how long the call or load that has a busy device should have ended by estimate; 0.0 if it is not late, or
        if the device is idle. `finish_s` and `soonest_holder` say of one that is late that it ends now.
        """

    def soonest_holder(self, call: WaitingCall, late_s: Seconds = inf) -> tuple[DeviceView, Seconds] | None:
        """
        The busy holder that finishes earliest by estimate, and in how many seconds; those that should have finished
        *late_s* ago are left out. O(holders).
        """

    def soonest_left(self, call: WaitingCall) -> tuple[DeviceView, Seconds] | None:
        """As `soonest_holder`, by `left_s`. O(holders)."""

    def rate(self, function: FunctionView) -> float:
        """Calls a second, by an exponentially weighted count of its arrivals."""

    @property
    def utilisation(self) -> float:
        """Service time of what arrives a second, over the devices: 1 is all that they can serve without loads."""


class View(FleetView, ResidencyView, CostsView, Protocol):
    """
    The cluster as it is after the last action that was done. Costs are of our engine: D devices, M models on one.

    A part of a policy that asks for less says so by the type of its argument: one of the three views that this one is.
    """

    @property
    def now(self) -> Seconds: ...
    @property
    def queue(self) -> QueueView: ...
    def first_hit(self, device: DeviceView) -> WaitingCall | None:
        """The first waiting call whose function *device* holds. O(M)."""

    def oldest_hit(self, without: Collection[FunctionId], limit: int | None) -> WaitingCall | None:
        """
        The first waiting call, not of a function in *without*, that could be a hit at once. *limit*: as far as
        `idle_holders` with that limit says; None: on any idle device. O(functions that wait + holders looked at).
        """

    def orphans(self, limit: int) -> list[WaitingCall]:
        """The first waiting calls of up to *limit* functions that no device holds, in the order they got there."""


class SchedulingPolicy(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def pass_limit(self) -> int:
        """What `QueueView.first_at_limit` asks about; 0 for policies that count no passes."""

    def plan(self, view: View) -> Plan:
        """One scheduling run; it ends when the generator returns."""


@runtime_checkable
class Explaining(Protocol):
    """A policy that can say more about a waiting call than what was noted when it passed by."""

    def weigh(self, view: View, call: WaitingCall) -> Why:
        """What could be done with *call* now, and why it is not done. Asked for by people, never on the path."""
