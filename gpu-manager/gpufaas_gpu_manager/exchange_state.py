"""
Where a call stands at its node, as a table. Pure.

::

    OPENED ──BEGIN_BODY──► COMING                     any of these and WAITING, QUEUED,
      │                      │                        RUNNING, UNSENT ──ABANDON──► ABANDONED
      └──────ARRIVE──────────┤                                                        │ END
                             ▼                                                        ▼
        QUEUED ◄──QUEUE── WAITING ──BIND──► RUNNING ──HOLD──► UNSENT              DISCARDED
          └──────LEAVE──────►                │ ◄────SEND────────┘
                                             └──END──► OVER

What ends before its call has come is UNCLAIMED: the call finds there why (ARRIVE: OVER).
"""

from functools import partial
from typing import Final

from gpufaas_core.steps import Step

OPENED: Final = 0
"""Its grant is open, and the call has not come."""
COMING: Final = 1
"""Its body is on its way here."""
WAITING: Final = 2
"""For a worker that is ready, or a slot that is free."""
QUEUED: Final = 3
"""For the device, with all of its body: no scheduler leads."""
RUNNING: Final = 4
"""Its worker has it, or a part of it."""
UNSENT: Final = 5
"""A slot has all of it, and its worker has nothing yet, or has certainly not begun."""
ABANDONED: Final = 6
"""Nobody waits for its answer, and its worker has not let go of it."""
OVER: Final = 7
"""Its worker is done with it."""
DISCARDED: Final = 8
"""As OVER, and nobody waits for the answer."""
UNCLAIMED: Final = 9
"""It was over before its call came."""

FINISHED: Final = OVER
"""From this on its worker has nothing to do with it."""
GIVEN_UP: Final = frozenset((ABANDONED, DISCARDED))
UNTOUCHED: Final = frozenset((COMING, QUEUED, UNSENT))
"""Nothing of it was taken, so that it can be placed again: a body in pieces can be sent only once."""

_NAMES: Final = (
    "is open", "is coming", "waits", "is queued", "runs", "is not sent", "is abandoned", "is over", "is discarded",
    "is over and unclaimed",
)  # fmt: skip
_step = partial(Step, "an exchange", _NAMES)

BEGIN_BODY: Final = _step("begin its body", {OPENED: COMING, COMING: COMING, UNCLAIMED: UNCLAIMED})
ARRIVE: Final = _step("arrive", {OPENED: WAITING, COMING: WAITING, UNCLAIMED: OVER})
QUEUE: Final = _step("be queued", {WAITING: QUEUED})
LEAVE: Final = _step("leave the queue", {QUEUED: WAITING, WAITING: WAITING})
BIND: Final = _step("be given to a slot", {WAITING: RUNNING})
HOLD: Final = _step("be held by its slot", {RUNNING: UNSENT})
SEND: Final = _step("be sent", {UNSENT: RUNNING, RUNNING: RUNNING})
ABANDON: Final = _step(
    "be abandoned",
    dict.fromkeys((OPENED, COMING, WAITING, QUEUED, RUNNING, UNSENT, ABANDONED), ABANDONED) | {UNCLAIMED: DISCARDED},
)
END: Final = _step(
    "end",
    {OPENED: UNCLAIMED, COMING: UNCLAIMED, ABANDONED: DISCARDED, DISCARDED: DISCARDED}
    | dict.fromkeys((WAITING, QUEUED, RUNNING, UNSENT), OVER),
)
