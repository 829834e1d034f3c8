"""
One call at its node: where it stands, as a table, and what is known of it. Pure.

::

    OPENED ──BEGIN_BODY──► COMING                           any state before OVER ──ABANDON──► ABANDONED
      │                      │                                                                     │ END
      └──────ARRIVE──────────┤                                                                     ▼
                             ▼                                                                 DISCARDED
        QUEUED ◄──QUEUE── WAITING ──BIND──► RUNNING ──HOLD──► UNSENT
          └──────LEAVE──────► │               ▲  ▲ └───END──► OVER
                              └──GO_AHEAD──►AHEAD└─────SEND─────┘

A call that is AHEAD becomes RUNNING by FOLLOW. If its caller leaves, it is LEFT_AHEAD, and then ABANDONED by FOLLOW.
What ends before its call has come is UNCLAIMED: the call finds there why (ARRIVE: OVER).
"""

from functools import partial
from typing import Final

from gpufaas_core.messages import Grant
from gpufaas_core.model import CallId, Seconds
from gpufaas_core.steps import Step
from gpufaas_core.wire.heads import CallHead

OPENED: Final = 0
"""Its grant is open, and the call has not come."""
COMING: Final = 1
"""Its body is on its way here."""
WAITING: Final = 2
"""It waits for a worker that is ready, or for a slot that is free."""
QUEUED: Final = 3
"""It waits for the device, with all of its body: no scheduler leads."""
AHEAD: Final = 4
"""Its worker has it behind what it runs, and has certainly not begun it."""
LEFT_AHEAD: Final = 5
"""As AHEAD, but nobody waits for the answer."""
RUNNING: Final = 6
"""Its worker has it, or a part of it."""
UNSENT: Final = 7
"""A slot has all of it, and its worker has nothing yet, or has certainly not begun."""
ABANDONED: Final = 8
"""Nobody waits for its answer, and its worker has not let go of it."""
OVER: Final = 9
"""Its worker is done with it."""
DISCARDED: Final = 10
"""As OVER, but nobody waits for the answer."""
UNCLAIMED: Final = 11
"""The exchange was over before its call came."""

FINISHED: Final = OVER
"""From this state on its worker has nothing to do with it."""
GIVEN_UP: Final = frozenset((LEFT_AHEAD, ABANDONED, DISCARDED))
UNTOUCHED: Final = frozenset((COMING, QUEUED, AHEAD, UNSENT))
"""Nothing of it was taken, so that it can be placed again: a body in pieces can be sent only once."""

_NAMES: Final = (
    "is open", "is coming", "waits", "is queued", "is ahead", "was left ahead", "runs", "is not sent", "is abandoned",
    "is over", "is discarded", "is over and unclaimed",
)  # fmt: skip
_step = partial(Step, "a call", _NAMES)

BEGIN_BODY: Final = _step("begin its body", {OPENED: COMING, COMING: COMING, UNCLAIMED: UNCLAIMED})
ARRIVE: Final = _step("arrive", {OPENED: WAITING, COMING: WAITING, UNCLAIMED: OVER})
QUEUE: Final = _step("be queued", {WAITING: QUEUED})
LEAVE: Final = _step("leave the queue", {QUEUED: WAITING, WAITING: WAITING})
BIND: Final = _step("be given to a slot", {WAITING: RUNNING})
GO_AHEAD: Final = _step("go ahead", {WAITING: AHEAD})
FOLLOW: Final = _step("follow what ran before it", {AHEAD: RUNNING, LEFT_AHEAD: ABANDONED})
HOLD: Final = _step("be held by its slot", {RUNNING: UNSENT, AHEAD: AHEAD})
SEND: Final = _step("be sent", {UNSENT: RUNNING, RUNNING: RUNNING})
ABANDON: Final = _step(
    "be abandoned",
    dict.fromkeys((OPENED, COMING, WAITING, QUEUED, RUNNING, UNSENT, ABANDONED), ABANDONED)
    | {AHEAD: LEFT_AHEAD, LEFT_AHEAD: LEFT_AHEAD, UNCLAIMED: DISCARDED},
)
END: Final = _step(
    "end",
    dict.fromkeys((OPENED, COMING), UNCLAIMED)
    | dict.fromkeys((WAITING, QUEUED, AHEAD, RUNNING, UNSENT), OVER)
    | dict.fromkeys((LEFT_AHEAD, ABANDONED, DISCARDED), DISCARDED),
)


class NodeCall:
    """See module. It has no `__slots__`, since its shell, `Exchange`, has them: only one base of a class can."""

    def __init__(self, grant: Grant, now: Seconds) -> None:
        self.grant = grant
        self.state: int = OPENED
        """One of the states of this module. Only steps change it."""
        self.head: CallHead | None = None
        """The call, from its arrival until a slot takes it."""
        self.body: bytes | memoryview = b""
        """The body, if it lies in no file, until a slot takes it."""
        self.name = grant.calls[0]
        """The name of the call for its worker. Before the call comes, that of its grant."""
        self.kept = 0
        """The gateway keeps its grant, and it is so many'th call by it. 0: the end of the call is that of the grant."""
        self.once = False
        """It cannot run again: its body streams, or its answer does and has begun."""
        self.bodiless = False
        """Its answer has no body: it is a HEAD request."""
        self.stopped = ""
        """Why the policy has stopped it: it runs again elsewhere once its worker has let go. Empty: it has not."""
        self.opened_at = self.bound_at = now
        self.timeout_s: Seconds = 0.0
        """The time limit of its call, about from `bound_at`; 0.0: it is not known."""

    def step(self, step: Step[int]) -> None:
        """:raises IllegalStep: the step is not allowed in this state; nothing was changed"""
        self.state = step[self.state]

    def arrive(self, head: CallHead, body: bytes | memoryview) -> None:
        """Take its call, which has come."""
        self.state = ARRIVE[self.state]
        self.head, self.body, self.name, self.timeout_s = head, body, CallId(head.call), head.timeout_s
        self.bodiless = head.method == "HEAD"

    @property
    def ahead(self) -> bool:
        """Whether its worker has it behind what it runs."""
        return self.state in (AHEAD, LEFT_AHEAD)

    @property
    def finished(self) -> bool:
        """Whether its worker has finished it, or is gone."""
        return self.state >= FINISHED

    @property
    def abandoned(self) -> bool:
        """Whether nobody waits for its answer."""
        return self.state in GIVEN_UP

    @property
    def untouched(self) -> bool:
        """Whether its call can be placed again."""
        return self.state in UNTOUCHED

    @property
    def further(self) -> int:
        """How many calls ran before it by its grant."""
        return self.kept - 1 if self.kept else 0
