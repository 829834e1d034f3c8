"""
The call protocol: what a gateway and a node say to each other about calls. Sans-IO.

Frames and their order are those between node and worker (`core/frames.py`), with the grant in front. A lane carries one
call, or one query, at a time. A connection has one lane, or is shared by several: then the frames say of which they
are, as those of a worker say the slot::

    → CALL (grant, call, body inline)      or  CALL with body_mode STREAM or UPGRADE, BODY*, BODY_END
                                           or  CALL with body_mode FILE, BODY*, BODY_END: the node keeps it in a file
    ← ROOM (bytes): so much of a streamed body may be sent; the first says that the node took the call
    ← RUNS, where the grant waits for a load: a worker has the call
    ← ANSWER (answer, body inline)         or  HEAD, CHUNK*, END
    ← REFUSED: nothing was taken           or  ERROR, instead of the rest
    → ROOM (bytes): so much more than `LANE_WINDOW` of the answer may be sent; on a shared connection only
    → CANCEL at any time: the caller is gone; the node still sends one of the above, then the lane is free

    → ASK (what, value)     ← REPLY (value)  or  CHUNK*, END  or  ERROR; not on a shared connection

The node's last frame (ANSWER, END, REFUSED, ERROR, REPLY) ends the call; it skips what still comes of the body. A
streamed body is limited by `ROOM` and not by a full socket, so that CANCEL never waits behind it. So are answers on a
shared connection, so that no slow reader holds up the other calls.
"""

from typing import Final

import msgspec

from gpufaas_core._types import Bytes, Seconds
from gpufaas_core.messages import Grant
from gpufaas_core.wire.heads import AnswerHead, CallHead

WINDOW: Final[Bytes] = 1024 * 1024
"""At most so many bytes of a streamed body are on their way to the worker, or wait for it at the node."""


LANES: Final = 256
"""So many lanes a shared connection has at most."""
LANE_WINDOW: Final[Bytes] = 128 * 1024
"""
Of an answer, so many bytes are on their way on a lane of a shared connection at most, and one piece more. Each piece
counts for `PIECE_COST` beside its bytes, since it costs that much memory.
"""


class NodeCallHead(msgspec.Struct, array_like=True, frozen=True):
    """Header of CALL."""

    grant: Grant | None
    """None: that of the last call of the connection, which the gateway keeps."""
    head: CallHead
    kept: int = 0
    """
    The gateway keeps the grant, and this is so many'th call by it: if it ends well and its answer is whole, the node
    does not report it, and says so in the answer. 0: the gateway does not keep it.
    """


class NodeAnswerHead(msgspec.Struct, array_like=True, frozen=True):
    """Header of ANSWER and HEAD."""

    head: AnswerHead
    load_s: Seconds = 0.0
    phases: tuple[tuple[str, Seconds], ...] = ()
    grant: Grant | None = None
    """The grant that the call ran under, if it is not the one that came with it."""
    tier: str = "disk"
    kept: bool = False
    """The node has not reported the end of the call: the grant is the gateway's."""


class ErrorHead(msgspec.Struct, array_like=True, frozen=True):
    """Header of REFUSED and ERROR; `name` as of `error_codes.error_name`."""

    name: str
    message: str
    retry_after_s: Seconds = 1.0
    load_s: Seconds = 0.0
    phases: tuple[tuple[str, Seconds], ...] = ()
    tier: str = "disk"


class QueryHead(msgspec.Struct, array_like=True, frozen=True):
    """Header of ASK; the body is the value, in msgpack."""

    what: str
