"""
A call of a gateway as the scheduler at the other end of a link knows it, with the grant that it has or waits for.

::

    WAITING ◄────► GRANTED ◄────► KEPT
       ▲              ▼
       └─────── GRANTED_AGAIN                 A call that has ended is in no table.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gpufaas_cluster import control
from gpufaas_core.messages import Grant, Outer
from gpufaas_core.model import Asked, CallId, FunctionId, Seconds

WAITING: Final = 0
"""The call has no grant: the scheduler owes one."""
GRANTED: Final = 1
"""The call has a grant, and runs, or is about to."""
GRANTED_AGAIN: Final = 2
"""The next grant came before the refusal of the one that it has."""
KEPT: Final = 3
"""The call has ended, and its grant waits for the next call of its function (`KeptGrants`)."""


@dataclass(slots=True, eq=False)
class PlacedCall:
    """
    See module. Only `RemotePlacement` and its `KeptGrants` change it, but for `on_answer`. The fields from `size` to
    `asked` are those of `Arrived`.
    """

    id: CallId
    """The scheduler's id of it: another one after each reconnection, since what it knows may be half over."""
    holder: CallId
    """The call of this gateway that has the grant or waits for it: the one that asked, or that took it; empty: none."""
    function: FunctionId
    since: float
    deadline: float
    size: float = 0.0
    outer: Outer | None = None
    endless: bool = False
    asked: Asked | None = None
    state: int = WAITING
    future: asyncio.Future[Grant] | None = None
    """The gateway waits for the grant with it."""
    begin: Callable[[Grant], None] | None = None
    """See `RemotePlacement.on_grant`."""
    grant: Grant | None = None
    next_grant: Grant | None = None
    # What follows is of a grant that may be kept.
    until: float = 0.0
    """No call takes the grant after this time; 0.0: it is over with its call."""
    took: tuple[float, float, Asked | None] | None = None
    """Deadline, size and `Arrived.asked` of a holder that took a kept grant."""
    calls: int = 1
    """How many calls began by the grant."""
    service_s: Seconds = 0.0
    """How long those ran that have ended."""
    answered: bool = False
    """The node has answered the last of them, and did not report its end."""
    stale: bool = False
    """The link over which the grant came is lost."""
    is_new: bool = True
    """The grant was given up by its last call since the last tick of `KeptGrants`."""

    def message(self, now: float) -> control.PlaceCall:
        left_s, age_s, asked = self.deadline - now, now - self.since, self.asked
        return control.PlaceCall(
            self.id, self.function, left_s, age_s, self.size, self.outer, self.endless,
            None if asked is None else asked.goal_s, asked,
        )  # fmt: skip

    def waits(self, future: asyncio.Future[Grant]) -> None:
        """Have *future* get the grant that comes next."""
        self.state, self.future, self.begin, self.next_grant = WAITING, future, None, None

    def granted(self, grant: Grant, until: float = 0.0) -> None:
        """Give it *grant*, which may be kept *until* then."""
        self.state, self.grant, self.until = GRANTED, grant, until
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
