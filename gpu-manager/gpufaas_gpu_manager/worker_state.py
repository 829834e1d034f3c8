"""
The life of a worker, as a table. Pure.

::

    WAITING ──BEGIN──► STARTING ──BECOME_READY──► READY
       │                  │                         │
       └───────END────────┴─────────── END ─────────┴──► ENDING ──REAP──► GONE
                          └────────── REAP ─────────┘──────────────────►

A ready worker may be parked: READY ──► PARKING ──► PARKED. When memory is reserved for it again, it is STARTING once
more: it wakes. A worker that ends unasked goes straight to GONE: a load that failed, or a crash. Its memory is promised
again only in GONE, or once it is PARKED.
"""

from enum import IntEnum
from functools import partial
from typing import Final

from gpufaas_core.steps import Step


class WorkerState(IntEnum):
    WAITING = 0
    """It waits for memory."""
    STARTING = 1
    READY = 2
    PARKING = 3
    PARKED = 4
    ENDING = 5
    GONE = 6


_S: Final = WorkerState
PARKED_STATES: Final = frozenset((_S.PARKING, _S.PARKED))
"""Of a worker that is evicted, and does not end."""
_WITH_PROCESS: Final = (_S.STARTING, _S.READY, _S.PARKING, _S.PARKED, _S.ENDING)
_NAMES: Final = ("waits for memory", "loads", "is ready", "is being parked", "is parked", "ends", "is gone")
_step = partial(Step[WorkerState], "a worker", _NAMES)

BEGIN: Final = _step("begin", {_S.WAITING: _S.STARTING, _S.PARKED: _S.STARTING})
BECOME_READY: Final = _step("become ready", {_S.STARTING: _S.READY, _S.ENDING: _S.ENDING})
"""A worker may be told to end before it has said that it is ready."""
PARK: Final = _step("be parked", {_S.READY: _S.PARKING})
LEAVE_DEVICE: Final = _step("leave its device", {_S.PARKING: _S.PARKED, _S.ENDING: _S.ENDING})
"""Its process is stopped, and holds nothing of the device that it could give back."""
END: Final = _step("be told to end", dict.fromkeys(_WITH_PROCESS, _S.ENDING) | {_S.WAITING: _S.GONE})
REAP: Final = _step("be reaped", dict.fromkeys((_S.WAITING, *_WITH_PROCESS), _S.GONE))
"""The kernel has reclaimed its memory, or it will never have a process."""
