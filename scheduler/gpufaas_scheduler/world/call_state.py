"""
Where a call stands, as a table. Pure.

::

    NEW ──WAIT──► WAITING ──ENQUEUE──► LOCAL
     │               ▲ ◄────RETURN────── │
     │               │ └──────START────┐ │
     │              WAIT               ▼ ▼ START
     └────ADOPT──────┼────────────► RUNNING
                     │                 │ END
                     └── ENDED ◄───────┘        (WAITING, LOCAL ──LEAVE──► ENDED)

A call that a node refused, or that ended with its worker, waits again; one that ended for an engine that was told of it
anew by a node may be adopted. Both begin in ENDED.
"""

from typing import Final

WAITING: Final = 0
"""In the global queue, or in the FIFO of a CPU function."""
LOCAL: Final = 1
"""In a device's local queue."""
RUNNING: Final = 2
"""Has a lease."""
ENDED: Final = 3
"""Neither waits nor runs. Its worker may have ended before it was begun: then it may still wait again."""
NEW: Final = 4
"""Not entered yet."""

_NAMES: Final = ("waits", "waits in a local queue", "runs", "is over", "is new")


class IllegalStep(Exception):
    def __init__(self, state: int, step: str) -> None:
        super().__init__(f"a call that {_NAMES[state]} cannot {step}")


class Step(dict[int, int]):
    """
    ``call.state = STEP[call.state]``: the state after the step.

    A dict, and not a function that looks into one: several steps are taken with each call.

    :raises IllegalStep: the step leads nowhere from that state
    """

    def __init__(self, name: str, after: dict[int, int]) -> None:
        super().__init__(after)
        self._name = name

    def __missing__(self, state: int) -> int:
        raise IllegalStep(state, self._name)


WAIT: Final = Step("begin to wait", {NEW: WAITING, ENDED: WAITING})
ENQUEUE: Final = Step("be put into a local queue", {WAITING: LOCAL})
RETURN: Final = Step("go back to the global queue", {LOCAL: WAITING})
START: Final = Step("start", {WAITING: RUNNING, LOCAL: RUNNING})
ADOPT: Final = Step("be found running", {NEW: RUNNING, ENDED: RUNNING})
END: Final = Step("end", {RUNNING: ENDED})
LEAVE: Final = Step("stop waiting", {WAITING: ENDED, LOCAL: ENDED})
