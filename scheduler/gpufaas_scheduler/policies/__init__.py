"""
The contract of a scheduling policy, and the table of those that there are.

A policy is run when a model function's call waits and a device is idle. It looks at a read-only `View`, proposes one
`Action` at a time and is told at once whether the engine did it::

    refusal = yield Start(call.id, device.id)      # None: done, and the view shows it already

The engine checks every action against memory, pins and busy devices, so that a wrong policy is slow, never unsafe. A
policy keeps no clock (`view.now`), does no IO, and is deterministic: the same view gives the same actions. To add one,
write a class with the members of `SchedulingPolicy` and register its factory as an entry point of the group
``gpufaas.policies``.

CPU functions (slots instead of the whole device) never come here, see ``engine``.
"""

from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from typing import Final, Protocol

from msgspec import Struct

from gpufaas_core.errors import InvalidSpec
from gpufaas_core.model import CallId, DeviceId, FunctionId, Seconds

# --- actions ----------------------------------------------------------------------------------------------------------
# Room is left in the union for Load (prefetch), Evict, Reject and Timer; a policy that never yields them need not know.


class Start(Struct, frozen=True):
    """Start a waiting call on an idle device: a hit if it holds the function, else a miss with its victims."""

    call: CallId
    device: DeviceId


class EnqueueLocal(Struct, frozen=True):
    """Let a waiting call wait for a busy device that holds its function."""

    call: CallId
    device: DeviceId


class CountPass(Struct, frozen=True):
    """A scan passed over every waiting call with an arrival number below `before`: count one more pass for each."""

    before: int


Action = Start | EnqueueLocal | CountPass


class Refusal(Struct, frozen=True):
    """The engine did not do it; nothing changed."""

    action: Action
    reason: str


Plan = Generator[Action, Refusal | None, None]

# --- the view ---------------------------------------------------------------------------------------------------------


class WaitingCall(Protocol):
    @property
    def id(self) -> CallId: ...
    @property
    def function(self) -> FunctionId: ...
    @property
    def number(self) -> int:
        """Arrival number."""

    @property
    def deadline(self) -> Seconds | None: ...


class DeviceView(Protocol):
    @property
    def id(self) -> DeviceId: ...
    @property
    def kind(self) -> str: ...
    @property
    def busy(self) -> bool:
        """A model function's call runs on it."""

    @property
    def starts(self) -> int:
        """Calls of model functions that were started on it."""


class QueueView(Protocol):
    """The global queue in arrival order. Functions that cannot be placed are left out by `set_aside`."""

    def __len__(self) -> int: ...
    def first(self, before: int = ...) -> WaitingCall | None: ...
    def first_at_limit(self, before: int = ...) -> WaitingCall | None: ...
    def passes(self, call: WaitingCall) -> int: ...
    def set_aside(self, call: WaitingCall) -> None: ...
    def rewind(self) -> None: ...


class View(Protocol):
    """The cluster as it is after the last action that was done. Costs are of our engine, D devices, M models on one."""

    @property
    def now(self) -> Seconds: ...
    @property
    def queue(self) -> QueueView: ...

    def idle(self) -> Iterator[DeviceView]:
        """
        Idle devices, most starts first, ties by the order in which they joined. Those that get busy drop out, and
        those that no waiting call may run on are left out.
        """

    def first_hit(self, device: DeviceView) -> WaitingCall | None:
        """The first waiting call whose function *device* holds. O(M)."""

    def holds(self, device: DeviceView, call: WaitingCall) -> bool: ...

    def held(self, call: WaitingCall) -> bool:
        """Some device holds the call's function, if only from the start of its load."""

    def holders(self, call: WaitingCall) -> Collection[DeviceView]: ...

    def idle_holder(self, call: WaitingCall) -> DeviceView | None:
        """The first idle device, in their order, that holds the call's function. O(the fewer of idle and holders)."""

    def soonest_holder(self, call: WaitingCall) -> tuple[DeviceView, Seconds] | None:
        """The busy holder that finishes earliest by estimate, and in how many seconds. O(holders)."""

    def allows(self, device: DeviceView, call: WaitingCall) -> bool:
        """The device satisfies the constraints of the call's function. O(constraints)."""

    def fits(self, device: DeviceView, call: WaitingCall) -> bool:
        """A miss could start on the device: allowed, large enough, and enough of it not pinned. O(M)."""

    def load_s(self, device: DeviceView, call: WaitingCall) -> Seconds:
        """Load time of the call's function on a device of this kind; infinite if it cannot be there."""

    def service_s(self, device: DeviceView, call: WaitingCall) -> Seconds: ...


class SchedulingPolicy(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def pass_limit(self) -> int:
        """What `QueueView.first_at_limit` asks about; 0 for policies that count no passes."""

    def plan(self, view: View) -> Plan:
        """One scheduling run; it ends when the generator returns."""


# --- the table --------------------------------------------------------------------------------------------------------

ENTRY_POINTS: Final = "gpufaas.policies"

DEFAULT_POLICY: Final = "lalb-o3"
"""Of `serve`, of the simulator, and of journals that name none."""
DEFAULT_O3_LIMIT: Final = 25
"""The paper's."""


def _lb(_: int) -> SchedulingPolicy:
    from gpufaas_scheduler.policies.load_balance import LoadBalance

    return LoadBalance()


def _lalb(_: int) -> SchedulingPolicy:
    from gpufaas_scheduler.policies.locality import Locality

    return Locality("lalb", limit=0)


def _lalb_o3(limit: int) -> SchedulingPolicy:
    from gpufaas_scheduler.policies.locality import Locality

    return Locality("lalb-o3", limit=limit)


POLICIES: Final[Mapping[str, Callable[[int], SchedulingPolicy]]] = {"lb": _lb, "lalb": _lalb, "lalb-o3": _lalb_o3}
"""Name to factory; the argument is the O3 limit. Imported on use, since each policy imports this module."""


def make_policy(name: str, *, o3_limit: int = DEFAULT_O3_LIMIT) -> SchedulingPolicy:
    """
    Return the policy called *name*: one of `POLICIES`, or of the entry points ``gpufaas.policies`` (called without
    arguments). `o3_limit` is for lalb-o3 only; 25 is the paper's default.

    :raises InvalidSpec: there is none; says which there are
    """
    if o3_limit < 0:
        raise InvalidSpec(f"the O3 limit is a number of calls, 0 or more, not {o3_limit}")
    if name in POLICIES:
        return POLICIES[name](o3_limit)
    from importlib.metadata import entry_points  # 15 ms that only a foreign policy costs

    plugins = {each.name: each for each in entry_points(group=ENTRY_POINTS)}
    if name not in plugins:
        raise InvalidSpec(f"no policy is called {name!r}: choose one of {', '.join([*POLICIES, *sorted(plugins)])}")
    policy: SchedulingPolicy = plugins[name].load()()
    return policy
