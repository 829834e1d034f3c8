"""
Where a call stands at its gateway, as a table. Pure.

::

    READING ──PLACE──► WAITING ──BEGIN──► AT_NODE ──ANSWER──► ANSWERING
                        ▲ │ ▲                │ └─────JOIN───► JOINED
                  PLACE │ │ └─────PLACE──────┤                          any of these ──END──► ENDED
                        │ │ MOVE             │
                       MOVING ◄─────MOVE─────┘

What ends a call from outside (`Call.fail`) reaches it by what it waits for:

=========  ================================================  =======================================================
state      the call waits for                                its end
=========  ================================================  =======================================================
READING    the body from its caller                          its coroutine is cancelled where it waits
WAITING    a grant                                           the future of the grant raises the error
MOVING     the revision that serves instead of its own       `Placing` looks at `Call.error` before it places it there
AT_NODE    the answer, or its head                           its exchange raises the error
ANSWERING  its caller, who reads an answer that streams      its coroutine is cancelled where it waits
JOINED     the function, joined with its caller (WebSocket)  its exchange raises the error
ENDED      nothing                                           it has ended
=========  ================================================  =======================================================
"""

from functools import partial
from typing import Final

from gpufaas_core.steps import Step

READING: Final = 0
WAITING: Final = 1
MOVING: Final = 2
AT_NODE: Final = 3
ANSWERING: Final = 4
JOINED: Final = 5
ENDED: Final = 6

STREAMS: Final = ANSWERING
"""From this state on, the end of its `AnswerStream` ends the call."""
WITH_CALLER: Final = frozenset((READING, ANSWERING))

_NAMES: Final = ("is read", "waits", "moves", "is at its node", "is answered", "is joined", "has ended")
_step = partial(Step, "a call", _NAMES)

PLACE: Final = _step("be placed", dict.fromkeys((READING, WAITING, MOVING, AT_NODE), WAITING))
MOVE: Final = _step("move to another revision", {WAITING: MOVING, AT_NODE: MOVING})
BEGIN: Final = _step("begin", {WAITING: AT_NODE})
ANSWER: Final = _step("be answered in pieces", {AT_NODE: ANSWERING})
JOIN: Final = _step("be joined with its caller", {AT_NODE: JOINED})
END: Final = _step("end", dict.fromkeys((READING, WAITING, MOVING, AT_NODE, ANSWERING, JOINED), ENDED))
