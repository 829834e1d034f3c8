"""What a frame is: one set of numbers for both legs of a call. Who sends which, and when: `order`."""

from typing import Final


class Kind:
    """No enum: to look its members up takes twice as long, ten times in each call."""

    # What the end says that asks: a gateway to a node, a node to a worker.
    CALL: Final = 1
    BODY: Final = 2
    BODY_END: Final = 3
    CANCEL: Final = 4
    BATCH: Final = 5
    PING: Final = 6
    LIMIT: Final = 7
    PARK: Final = 8
    WAKE: Final = 9
    AREA: Final = 11
    ASK: Final = 32

    # What both say.
    ROOM: Final = 10

    # What the end says that answers.
    READY: Final = 16
    FAILED: Final = 17
    ANSWER: Final = 18
    HEAD: Final = 19
    CHUNK: Final = 20
    END: Final = 21
    MEASURED: Final = 22
    PONG: Final = 23
    ANSWERS: Final = 24
    PARKED: Final = 25
    WOKEN: Final = 26
    LAID: Final = 27
    DROPPED: Final = 28
    REFUSED: Final = 48
    ERROR: Final = 49
    REPLY: Final = 51
    RUNS: Final = 52


_NAMES: Final = {value: name for name, value in vars(Kind).items() if name.isupper()}
KINDS: Final = frozenset(_NAMES)


def name_of(kind: int) -> str:
    """Return what an error calls a frame of *kind*."""
    return f"a frame {_NAMES.get(kind, f'of kind {kind}')}"
