"""
The order of the frames of a lane, as tables. Both its ends step the same state, with each frame that they send or get.
What a node says to a worker is no table: a batch, or a call ahead, begins when the worker does.

::

    FREE ──CALL──► CALLED ──HEAD──► STREAMS ─┐ CHUNK        CALLED and STREAMS have a twin while the body of
      ▲              │                 │ ▲───┘              the call comes in pieces: BODY_FOLLOWS goes there,
      │◄───ANSWER────┘◄──────END───────┘                    BODY_END back. Pieces of a call that has ended are
      │     LAID, REFUSED, ERROR, DROPPED                   skipped: who sends them does not know it yet.
      │
      │ a batch: BATCHED ──HEAD──► BATCH_STREAMS ─┐ CHUNK
      │           ▲ │ ▲ ◄──END────────┘   ▲───────┘
      │           └─┘ ANSWERS
      │
      └──ASK──► ASKED ─┐ CHUNK     ──REPLY, END, ERROR──► FREE
                 ▲─────┘

``lane.state = FROM_NODE[kind][lane.state]`` costs two looks into a dict.
"""

from collections.abc import Mapping
from typing import Final

from gpufaas_core.wire.kinds import Kind, name_of
from gpufaas_core.wire.prefix import BrokenFrame

FREE: Final = 0
"""The lane has no call."""
CALLED: Final = 1
"""Nothing of the answer has come."""
CALLED_BODY: Final = 2
"""As CALLED, and the body comes yet."""
STREAMS: Final = 3
"""The head of the answer has come, and its end has not."""
STREAMS_BODY: Final = 4
"""As STREAMS, and the body comes yet."""
BATCHED: Final = 5
"""Calls of its batch wait for their answers."""
BATCH_STREAMS: Final = 6
"""The answer of a call of its batch streams."""
ASKED: Final = 7
"""The lane has a query."""

_NAMES: Final = (
    "has no call", "waits for an answer", "waits for the body of its call, or an answer", "is in an answer",
    "is in an answer, and waits for the body of its call", "waits for answers of its batch",
    "is in an answer of its batch", "waits for a reply",
)  # fmt: skip


class After(dict[int, int]):
    """The state after a frame, by the state before it. :raises BrokenFrame: it may not come then"""

    def __init__(self, frame: str, after: Mapping[int, int]) -> None:
        super().__init__(after)
        self._frame = frame

    def __missing__(self, state: int) -> int:
        raise BrokenFrame(f"{self._frame} on a lane that {_NAMES[state]}")


class Says(dict[int, After]):
    """What one end says, by kind. :raises BrokenFrame: it never says that"""

    def __init__(self, end: str, table: Mapping[int, Mapping[int, int]]) -> None:
        super().__init__({kind: After(name_of(kind), after) for kind, after in table.items()})
        self._end = end

    def __missing__(self, kind: int) -> After:
        raise BrokenFrame(f"{name_of(kind)}, which {self._end} never says of a call")


def _stays(*states: int) -> dict[int, int]:
    return {state: state for state in states}


_ANSWERS: Final = {
    Kind.ROOM: _stays(CALLED, CALLED_BODY, STREAMS, STREAMS_BODY),
    Kind.ANSWER: {CALLED: FREE, CALLED_BODY: FREE},
    Kind.HEAD: {CALLED: STREAMS, CALLED_BODY: STREAMS_BODY, BATCHED: BATCH_STREAMS},
    Kind.CHUNK: _stays(STREAMS, STREAMS_BODY, BATCH_STREAMS, ASKED),
    Kind.END: {STREAMS: FREE, STREAMS_BODY: FREE, BATCH_STREAMS: BATCHED, ASKED: FREE},
}

FROM_GATEWAY: Final = Says("a gateway", {
    Kind.CALL: {FREE: CALLED},
    Kind.BODY: _stays(CALLED_BODY, STREAMS_BODY, FREE),
    Kind.BODY_END: {CALLED_BODY: CALLED, STREAMS_BODY: STREAMS, FREE: FREE},
    Kind.ASK: {FREE: ASKED},
    Kind.CANCEL: _stays(*range(len(_NAMES))),
    Kind.ROOM: _stays(*range(len(_NAMES))),
})  # fmt: skip
FROM_NODE: Final = Says("a node", _ANSWERS | {
    Kind.RUNS: _stays(CALLED, CALLED_BODY),
    Kind.REFUSED: {CALLED: FREE, CALLED_BODY: FREE},
    Kind.ERROR: dict.fromkeys((CALLED, CALLED_BODY, STREAMS, STREAMS_BODY, ASKED), FREE),
    Kind.REPLY: {ASKED: FREE},
})  # fmt: skip
"""To a gateway."""
FROM_WORKER: Final = Says("a worker", _ANSWERS | {
    Kind.LAID: {CALLED: FREE, CALLED_BODY: FREE},
    Kind.ANSWERS: _stays(BATCHED),
    Kind.DROPPED: {CALLED: FREE, BATCHED: FREE},
})  # fmt: skip
"""Of what it runs, from CALLED or BATCHED on: to drop what was taken back before is no step."""

BODY_FOLLOWS: Final = After("the begin of a body", {CALLED: CALLED_BODY})
"""After a CALL whose body comes in pieces."""
