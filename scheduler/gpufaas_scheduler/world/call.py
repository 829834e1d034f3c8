"""A call, and the grant by which one or several calls run."""

from __future__ import annotations

from math import inf
from typing import Final

from gpufaas_core.model import Asked, CallId, CopyId, DeviceId, FunctionId, Seconds
from gpufaas_scheduler.contract import Why
from gpufaas_scheduler.world.call_state import NEW
from gpufaas_scheduler.world.conditions import Condition
from gpufaas_scheduler.world.device import DeviceState
from gpufaas_scheduler.world.function import Copy, FunctionState
from gpufaas_scheduler.world.light import Light

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
    asked: Asked | None = None
    """What its caller asks for beside the function; None: nothing."""
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
    granted: GrantState | None
    """While it runs, if its function is placed."""
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
    """When it started, if it is one of a direct function and has waited."""
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
        asked: Asked | None = None,
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
        if asked is not None:
            self.asked = asked
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
        asked = self.asked
        return self.owner.declared.need.latency_goal_s if asked is None or asked.goal_s is None else asked.goal_s


class GrantState(Light):
    """
    The right of one or several calls of a placed function to run on a copy, from the decision until the last of them
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
    """Its calls begin when the grant that runs on its copy ends, and it holds the compute then."""
    early: bool = False
    """It went ahead, and its node could take it back."""
    taken_back: bool = False
    """Its node was told to take it back, unless its worker has begun it."""

    @property
    def size(self) -> int:
        """The number of calls that it was made for."""
        return len(self.calls) + self.ended

    @property
    def condition(self) -> Condition:
        return Condition(self.size, self.copy.share, self.neighbours)
