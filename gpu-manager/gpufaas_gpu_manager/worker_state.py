"""
The life of a worker, as a table. Pure.

::

    WAITING ──ReservationMade──► STARTING ──BecameReady──► READY
       │                            │                        │
       └──────EndRequested──────────┴─────── EndRequested ───┘──► ENDING ──Reaped──► GONE
                                    └──────────── Reaped ────┘────────────────────►

A ready worker may be parked: READY ──► PARKING ──► PARKED. When memory is reserved for it again, it is STARTING once
more: it wakes. A worker that ends unasked goes straight to GONE: a load that failed, or a crash. Its memory is promised
again only in GONE, or once it is PARKED.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Final


class WorkerState(Enum):
    WAITING = "waiting for memory"
    STARTING = "loading"
    READY = "ready"
    PARKING = "being parked"
    PARKED = "parked"
    ENDING = "ending"
    GONE = "gone"


PARKED_STATES: Final = frozenset((WorkerState.PARKING, WorkerState.PARKED))
"""Of a worker that is evicted, and does not end."""


class WorkerEvent(Enum):
    RESERVATION_MADE = "its memory is reserved and its process is asked for"
    BECAME_READY = "its model is loaded"
    PARK_REQUESTED = "it is evicted, and its process stays"
    LEFT_DEVICE = "its process is stopped, and holds nothing of the device that it could give back"
    END_REQUESTED = "it is evicted, or killed"
    REAPED = "the kernel has taken its memory back"


class IllegalTransition(Exception):
    def __init__(self, state: WorkerState, event: WorkerEvent) -> None:
        super().__init__(f"a worker that is {state.value} cannot meet: {event.value}")


_S, _E = WorkerState, WorkerEvent
_NEXT: Final[Mapping[tuple[WorkerState, WorkerEvent], WorkerState]] = {
    (_S.WAITING, _E.RESERVATION_MADE): _S.STARTING,
    (_S.WAITING, _E.END_REQUESTED): _S.GONE,  # it has no process and holds no memory
    (_S.STARTING, _E.BECAME_READY): _S.READY,
    (_S.STARTING, _E.END_REQUESTED): _S.ENDING,
    (_S.STARTING, _E.REAPED): _S.GONE,
    (_S.READY, _E.END_REQUESTED): _S.ENDING,
    (_S.READY, _E.REAPED): _S.GONE,
    (_S.READY, _E.PARK_REQUESTED): _S.PARKING,
    (_S.PARKING, _E.LEFT_DEVICE): _S.PARKED,
    (_S.PARKED, _E.RESERVATION_MADE): _S.STARTING,
    **{(state, _E.END_REQUESTED): _S.ENDING for state in (_S.PARKING, _S.PARKED)},
    **{(state, _E.REAPED): _S.GONE for state in (_S.PARKING, _S.PARKED)},
    (_S.ENDING, _E.LEFT_DEVICE): _S.ENDING,
    (_S.ENDING, _E.BECAME_READY): _S.ENDING,  # it said so before the signal reached it
    (_S.ENDING, _E.END_REQUESTED): _S.ENDING,
    (_S.ENDING, _E.REAPED): _S.GONE,
}


def advance(state: WorkerState, event: WorkerEvent) -> WorkerState:
    """Return the state after *event*; raise `IllegalTransition`, changing nothing, if there is none."""
    try:
        return _NEXT[state, event]
    except KeyError:
        raise IllegalTransition(state, event) from None
