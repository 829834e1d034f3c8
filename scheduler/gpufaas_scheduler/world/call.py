"""
One call, from its arrival to its end.

A struct would be made sooner, but it costs more to set its fields, and many are set. It comes to the same, and such a
class can be compiled (docs/adr/0045).
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from gpufaas_core.model import CallId, DeviceId, FunctionId, Seconds
from gpufaas_scheduler.contract import Why
from gpufaas_scheduler.world.call_state import NEW

if TYPE_CHECKING:
    from gpufaas_scheduler.world.grant import Grant
    from gpufaas_scheduler.world.state import Copy, DeviceState, FunctionState

_NOWHERE: Final[frozenset[DeviceId]] = frozenset()


class Call:
    """One call, from its arrival to its end."""

    __slots__ = (
        "aborted", "arrived_at", "avoid", "cold", "copy", "deadline", "device", "endless", "ends", "estimate_s",
        "function", "grant", "granted", "id", "left", "note", "number", "outer", "own_goal_s", "owner", "patience_s",
        "preempted", "promised_at", "refusals", "size", "state", "victims", "why",
    )  # fmt: skip

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
        """Arrival number. It orders the queue, and a call that comes back keeps it."""
        self.arrived_at = arrived_at
        self.deadline = deadline
        self.size = size
        """Of its request; 0.0: not known."""
        self.endless = endless
        """Its deadline is for its start only."""
        self.own_goal_s = own_goal_s
        """As `Arrived.goal_s`."""
        self.left = False
        """See `view_contract.WaitingCall.left`; so is `note`."""
        self.note = 0
        self.state = NEW
        """See `call_state`."""
        self.refusals = 0
        self.grant = 0
        """The number of its grant; 0: none yet, or one of an older scheduler."""
        # The following are set when it is placed; `device` also in a local queue.
        self.device: DeviceState | None = None
        self.copy: Copy | None = None
        self.granted: Grant | None = None
        """While it runs, if its function is queued."""
        self.cold = False
        self.victims: tuple[tuple[FunctionId, int], ...] = ()
        """The copies that were evicted for it."""
        self.promised_at: Seconds | None = None
        """See `contract.Promise`."""
        self.patience_s: Seconds = inf
        """See `contract.Assign`."""
        self.estimate_s: Seconds = 0.0
        """Its service time, estimated when it was put into a local queue or started."""
        self.aborted = False
        self.preempted = False
        """The policy has stopped it, and it waits again once its node has ended it."""
        self.outer: Call | None = None
        """The call that made it, and waits for it."""
        self.avoid = _NOWHERE
        """Devices that are held by calls that wait for this one."""
        self.ends: Seconds | None = None
        """Its deadline, if that comes from its outer call."""
        self.why: Why | None = None
        """What the policy said when it was placed."""

    def __lt__(self, other: Call) -> bool:
        # In a heap of (time, number, call): a call that waited elsewhere may share its number with the one behind it.
        return self.id < other.id

    def __hash__(self) -> int:
        return id(self)  # a compiled class with an order has no hash of its own

    @property
    def goal_s(self) -> Seconds | None:
        """It should be answered within this time of its arrival; None: no goal."""
        return self.own_goal_s if self.own_goal_s is not None else self.owner.declared.need.latency_goal_s
