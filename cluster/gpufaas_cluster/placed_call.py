"""A call of a gateway as the scheduler at the other end of a link knows it, with the grant that it has or waits for."""

import asyncio
from collections.abc import Callable
from enum import Enum, auto

from gpufaas_cluster import control
from gpufaas_core.messages import Grant, Outer
from gpufaas_core.model import CallId, FunctionId, Seconds


class State(Enum):
    """Where a call stands. One that has ended is in no table."""

    WAITING = auto()
    """It has no grant: the scheduler owes one."""
    GRANTED = auto()
    """It has a grant, and runs, or is about to."""
    GRANTED_AGAIN = auto()
    """The next grant came before the refusal of the one that it has."""
    KEPT = auto()
    """It has ended, and its grant waits for the next call of its function (`KeptGrants`)."""


class PlacedCall:
    """See module. Only `RemotePlacement` and its `KeptGrants` change it, but for `on_answer`."""

    __slots__ = (
        "answered", "asked", "begin", "calls", "deadline", "endless", "function", "future", "goal_s", "grant", "holder",
        "id", "is_new", "next_grant", "outer", "service_s", "since", "size", "stale", "state", "until",
    )  # fmt: skip

    def __init__(
        self,
        call: CallId,
        function: FunctionId,
        since: float,
        deadline: float,
        size: float,
        outer: Outer | None,
        endless: bool,
        goal_s: Seconds | None,
    ) -> None:
        """The parameters from *size* on are those of `Arrived`."""
        self.state = State.WAITING
        self.id = call
        """The scheduler's id of it: another one after each reconnection, since what it knows may be half over."""
        self.holder = call
        """The call of this gateway that has it: the one that asked, or the last that took its kept grant."""
        self.function = function
        self.since = since
        self.deadline = deadline
        self.size = size
        self.outer = outer
        self.endless = endless
        self.goal_s = goal_s
        self.future: asyncio.Future[Grant] | None = None
        """The gateway waits for the grant with it."""
        self.begin: Callable[[Grant], None] | None = None
        """See `RemotePlacement.on_grant`."""
        self.grant: Grant | None = None
        self.next_grant: Grant | None = None
        # What follows is of a grant that may be kept.
        self.until = 0.0
        """No call takes the grant after this time; 0.0: it is over with its call."""
        self.asked: tuple[float, float, Seconds | None] | None = None
        """Deadline, size and goal of a holder that took a kept grant."""
        self.calls = 1
        """How many calls began by the grant."""
        self.service_s: Seconds = 0.0
        """How long those ran that have ended."""
        self.answered = False
        """The node has answered the last of them, and did not report its end."""
        self.stale = False
        """The link over which the grant came is lost."""
        self.is_new = True
        """The grant was given up by its last call since the last tick of `KeptGrants`."""

    def message(self, now: float) -> control.PlaceCall:
        left_s, age_s = self.deadline - now, now - self.since
        return control.PlaceCall(
            self.id, self.function, left_s, age_s, self.size, self.outer, self.endless, self.goal_s
        )

    def waits(self, future: asyncio.Future[Grant]) -> None:
        """Have *future* get the grant that comes next."""
        self.state, self.future, self.begin, self.next_grant = State.WAITING, future, None, None

    def granted(self, grant: Grant, until: float = 0.0) -> None:
        """Give it *grant*, which may be kept *until* then."""
        self.state, self.grant, self.until = State.GRANTED, grant, until
        self.calls, self.service_s, self.answered, self.stale = 1, 0.0, False, False
        future, self.future, begin, self.begin = self.future, None, self.begin, None
        if future is not None and not future.done():
            if begin is not None:
                begin(grant)
            future.set_result(grant)

    def on_answer(self, run_s: Seconds) -> None:
        """Its node has answered the last call by its grant, and leaves the end of that to us."""
        self.answered = True
        self.service_s += run_s
