"""
The control protocol: the messages between gateways, schedulers and nodes. Sans-IO.

A message is a msgpack array whose first item is its number, behind a length of 4 bytes (little endian). Numbers and the
order of fields are the protocol: fields are only added at the end, with a default, and a message that is not known is
skipped; anything else is a new `PROTOCOL`.

A connection begins with a handshake (`Challenge`, `ClientHello`, `Welcome` or `Turned`): both ends prove that they have
the cluster's token without sending it. After that a gateway or node talks to the scheduler that leads. Calls themselves
go from gateway to node (`core/wire`), and never through here.
"""

import hashlib
import hmac
import struct
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, Union

import msgspec
from msgspec import Meta, Struct, field

from gpufaas_core._types import Bytes, Seconds
from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.messages import Command, Event, Grant, Outer
from gpufaas_core.model import Asked, CallId, DeviceId, EngineStatus, FunctionId, NodeId, NodeView

PROTOCOL: Final = 4
"""Both ends must have the same number. A release that changes what messages mean increments it."""
MAX_MESSAGE: Final[Bytes] = 64 * 1024 * 1024
BEAT_S: Final[Seconds] = 0.5
"""An end that sends nothing else sends a heartbeat so often."""
SILENCE_S: Final[Seconds] = 2.5
"""A peer that sends nothing for so long, five heartbeats, is gone."""

MAX_HELLO: Final[Bytes] = 4096
"""At most so much is read from a peer that has not proved to have the token."""

Role = Literal["gateway", "node", "scheduler"]
Name = Annotated[str, Meta(pattern=r"\A[-.a-zA-Z0-9]{1,64}\Z")]
"""The name of a process, or of its run. It is part of logs, of keys and of the ids of calls."""


class Message(Struct, frozen=True, array_like=True, tag=0):
    """Base of all. Numbers below 16 are the handshake's, those of gateways begin at 32, those of nodes at 64."""


# --- handshake --------------------------------------------------------------------------------------------------------


class Challenge(Message, frozen=True, array_like=True, tag=1):
    """The listening end's first message."""

    product: str
    protocol: int
    nonce: bytes


class ClientHello(Message, frozen=True, array_like=True, tag=2):
    """The connecting end's answer."""

    protocol: int
    role: Role
    id: Name
    boot: Name
    """A random text of this run of the process: after a restart it is another one."""
    nonce: bytes
    proof: bytes
    version: Annotated[str, Meta(max_length=64)] = ""
    """The version of the release, for people."""
    window: Annotated[Bytes, Meta(ge=0)] | Literal[False] = False
    """
    After the welcome, this connection carries calls, whose answers have this credit each. False: it carries messages;
    protocol 3 reads that, too, and logs whom it turns away.
    """


class Welcome(Message, frozen=True, array_like=True, tag=3):
    epoch: int
    """The epoch of the engine; 0: a node, which has none."""
    proof: bytes
    id: str = ""


class Turned(Message, frozen=True, array_like=True, tag=4):
    """The peer is turned away; the connection is closed."""

    code: Literal["token", "protocol", "not_leader", "duplicate", "stopping"]
    message: str
    leader: str = ""
    """The address of the scheduler that leads, if it is known."""


class Beat(Message, frozen=True, array_like=True, tag=5):
    pass


# --- gateways ---------------------------------------------------------------------------------------------------------


class RunningCalls(Message, frozen=True, array_like=True, tag=32):
    """A gateway's first message: its calls that have a grant. The scheduler forgets all others of its calls."""

    running: list[CallId]


class PlaceCall(Message, frozen=True, array_like=True, tag=33):
    """
    Asks for a grant. `age_s`: how long the call has waited already, under another scheduler or over another connection;
    the fields after it as in `Arrived`.
    """

    call: CallId
    function: FunctionId
    timeout_s: Seconds
    age_s: Seconds = 0.0
    size: float = 0.0
    outer: Outer | None = None
    endless: bool = False
    goal_s: Seconds | None = None
    """`Asked.goal_s`, for schedulers of a release without `asked`, and from gateways of one."""
    asked: Asked | None = None


class CancelCall(Message, frozen=True, array_like=True, tag=34):
    call: CallId


class PlaceAgain(Message, frozen=True, array_like=True, tag=35):
    """The node refused the grant of this call; the gateway waits for the next one."""

    call: CallId


class NodeUnreachable(Message, frozen=True, array_like=True, tag=36):
    """The gateway did not reach the node of a grant. Nothing was sent, as if the node had refused."""

    call: CallId
    device: str
    reason: str
    epoch: int = 0
    number: int = 0
    """The number of the grant."""


class ScaleFunction(Message, frozen=True, array_like=True, tag=39):
    function: FunctionId
    copies: int


class CallCounts(Message, frozen=True, array_like=True, tag=40):
    """Calls of functions that have a scaling rule: (begun, finished, in flight, asynchronous calls that wait)."""

    functions: dict[str, tuple[int, int, int, int]]


class Query(Message, frozen=True, array_like=True, tag=41):
    """
    Answered by the `QueryReply` of the same number. `what`: ``explain``, ``drain``, ``undrain``, ``planner``; or
    ``probe``, ``end_probe``, ``profiled``.
    """

    number: int
    what: str
    value: str = ""


class UnreachedNodes(Message, frozen=True, array_like=True, tag=42):
    """The nodes of the view that this gateway does not reach; sent as it connects, and after each change."""

    nodes: list[NodeId]


class ReturnGrant(Message, frozen=True, array_like=True, tag=43):
    """
    A grant that the gateway has kept is over. `calls` ran by it, which took `service_s` together, and its node has
    reported the end of none.
    """

    call: CallId
    """The first of them, to which it was granted."""
    device: DeviceId
    calls: int
    service_s: Seconds


class Granted(Message, frozen=True, array_like=True, tag=48):
    grant: Grant
    keep_s: Seconds = 0.0
    """
    How long the gateway may keep it: when its call has ended, another call of the function may run by it, and so on,
    until the gateway gives it back (`ReturnGrant`). 0.0: it is over with its call.
    """


class CallRejected(Message, frozen=True, array_like=True, tag=49):
    call: CallId
    code: str
    message: str
    retry_after_s: Seconds = 0.0
    details: dict[str, Any] | None = None
    """What its caller is told in JSON beside the message."""


class CallUnknown(Message, frozen=True, array_like=True, tag=50):
    """The scheduler does not know the call (any more): place it as a new one."""

    call: CallId


class ClusterState(Message, frozen=True, array_like=True, tag=51):
    """The state of the cluster; sent when it changes, at most every half second."""

    nodes: list[NodeView]
    status: EngineStatus


class QueryReply(Message, frozen=True, array_like=True, tag=52):
    number: int
    value: bytes = b""
    """The answer as JSON."""
    error: str = ""


# --- nodes ------------------------------------------------------------------------------------------------------------


class NodeJoins(Message, frozen=True, array_like=True, tag=64):
    """A node's first message. `snapshot`: msgpack of a `snapshot.NodeSnapshot`."""

    address: str
    snapshot: msgspec.Raw
    wall: float = 0.0
    """Its clock, Unix seconds: shown if it is off, and used for no decision."""
    makes: str = ""
    """See `NodeView`."""
    order: str = ""
    """The order for which it was started; empty: none."""


class NodeEvent(Message, frozen=True, array_like=True, tag=65):
    event: Event


class CpuUsed(Message, frozen=True, array_like=True, tag=66):
    """CPU time of its living workers, by function, in seconds; sent when it changed."""

    cpu_s: dict[FunctionId, Seconds]


class NodeNote(Message, frozen=True, array_like=True, tag=67):
    """A note for ``gpufaas node describe``; empty: no note any more."""

    note: str


class NodeHoldings(Message, frozen=True, array_like=True, tag=68):
    """The answer to the `CheckNode` of that number. `snapshot`: as in `NodeJoins`."""

    number: int
    snapshot: msgspec.Raw
    makes: str = ""
    """See `NodeView`."""


class DefineFunction(Message, frozen=True, array_like=True, tag=80):
    """Grants of this revision may come. `fetch`: get its bundle soon, so that it survives the loss of other nodes."""

    worker: WorkerSpec
    fetch: bool = False


class ForgetFunction(Message, frozen=True, array_like=True, tag=81):
    function: FunctionId


class ExecuteCommand(Message, frozen=True, array_like=True, tag=82):
    command: Command


class CheckNode(Message, frozen=True, array_like=True, tag=83):
    """
    Asks what the node holds, after all earlier messages. `doubted`: calls that the last answers lacked, with their
    devices. Those that are not there have ended: the node refuses a grant of theirs that comes later.
    """

    number: int
    doubted: list[tuple[CallId, DeviceId]] = field(default_factory=list)


_MESSAGES: Final = tuple(Message.__subclasses__())

_LENGTH: Final = struct.Struct("<I")
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Union[_MESSAGES]).decode  # noqa: UP007 - of a tuple
_KNOWN: Final = frozenset(each.__struct_config__.tag for each in _MESSAGES)


class BrokenMessage(Exception):
    """The other end sent what is no message: close the connection."""


def encode(message: Message) -> bytes:
    data = _encode(message)
    return _LENGTH.pack(len(data)) + data


class MessageReader:
    """Turns bytes, in pieces of any size, into messages."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = bytearray()

    def feed(self, data: bytes) -> Iterator[object]:
        """:raises BrokenMessage: the bytes are no message"""
        left = self._left
        if left:
            # Nothing is copied before the first message is whole: it may come in a thousand pieces.
            left += data
            if len(left) < 4 or len(left) < 4 + _length(left, 0):
                return
            data = bytes(left)
            left.clear()
        at, size = 0, len(data)
        while size - at >= 4:
            end = at + 4 + _length(data, at)
            if end > size:
                break
            piece = data[at + 4 : end]
            at = end
            try:
                yield _decode(piece)
            except msgspec.DecodeError as exc:
                if _is_newer(piece):
                    continue
                raise BrokenMessage(str(exc)) from exc
        if at < size:
            left += data[at:]


def _length(data: bytes | bytearray, at: int) -> int:
    (length,) = _LENGTH.unpack_from(data, at)
    if length > MAX_MESSAGE:
        raise BrokenMessage(f"a message of {length} bytes")
    return int(length)


def _is_newer(piece: bytes) -> bool:
    """Whether *piece* is a message of a number that this release does not know."""
    try:
        items = msgspec.msgpack.decode(piece)
    except msgspec.DecodeError:
        return False
    return isinstance(items, list) and bool(items) and isinstance(items[0], int) and items[0] not in _KNOWN


def proof(token: bytes, nonce: bytes, role: str, id_: str) -> bytes:
    """Return the proof of having *token*, for a peer that chose *nonce*."""
    return hmac.digest(token, b"gpufaas\0" + nonce + b"\0" + role.encode() + b"\0" + id_.encode(), hashlib.sha256)


def proves(token: bytes, nonce: bytes, role: str, id_: str, given: bytes) -> bool:
    return hmac.compare_digest(proof(token, nonce, role, id_), given)
