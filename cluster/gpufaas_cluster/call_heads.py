"""The headers of what a gateway and a node say to each other about calls (`core/wire`)."""

from typing import Final

import msgspec

from gpufaas_core._types import Bytes, Seconds
from gpufaas_core.messages import Grant
from gpufaas_core.wire.heads import AnswerHead, CallHead

BODY_WINDOW: Final[Bytes] = 1024 * 1024
"""
The credit of a body that comes in pieces. The node gives it when it takes the call, or when a worker takes it, if the
body streams: the call may be placed again until then.
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
    """Header of REFUSED and ERROR; its first three fields as of `error_codes.told`."""

    name: str
    message: str
    retry_after_s: Seconds = 1.0
    load_s: Seconds = 0.0
    phases: tuple[tuple[str, Seconds], ...] = ()
    tier: str = "disk"


class QueryHead(msgspec.Struct, array_like=True, frozen=True):
    """Header of ASK; the body is the value, in msgpack."""

    what: str
