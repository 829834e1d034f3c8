"""
The states of a call, and the steps between them.

::

    NEW ──WAIT──► WAITING ──ENQUEUE──► LOCAL
     │               ▲ ◄────RETURN────── │
     │               │ └──────START────┐ │
     │              WAIT               ▼ ▼ START
     └────ADOPT──────┼────────────► RUNNING
                     │                 │ END
                     └── ENDED ◄───────┘        (WAITING, LOCAL ──LEAVE──► ENDED)

A call that a node refused, or that ended with its worker, waits again. An ended call that a node reports as running is
adopted. Both steps begin in ENDED.
"""

from functools import partial
from typing import Final

from gpufaas_core.steps import Step

WAITING: Final = 0
"""In the global queue, or in the FIFO of a direct function."""
LOCAL: Final = 1
"""In a device's local queue."""
RUNNING: Final = 2
"""Has a grant."""
ENDED: Final = 3
"""Neither waits nor runs. If its worker ended before the call began, it may wait again."""
NEW: Final = 4
"""The call is not in the call book yet."""

_NAMES: Final = ("waits", "waits in a local queue", "runs", "is over", "is new")
_step = partial(Step, "a call", _NAMES)

WAIT: Final = _step("begin to wait", {NEW: WAITING, ENDED: WAITING})
ENQUEUE: Final = _step("be put into a local queue", {WAITING: LOCAL})
RETURN: Final = _step("go back to the global queue", {LOCAL: WAITING})
START: Final = _step("start", {WAITING: RUNNING, LOCAL: RUNNING})
ADOPT: Final = _step("be found running", {NEW: RUNNING, ENDED: RUNNING})
END: Final = _step("end", {RUNNING: ENDED})
LEAVE: Final = _step("stop waiting", {WAITING: ENDED, LOCAL: ENDED})
