"""
The frames on the unix socket between a node and a worker. No IO here.

A worker has one connection, which carries the calls of all its slots. A frame is a 16-byte prefix, a msgpack header and
a raw body::

    kind u8 · 0 u8 · slot u16 · header bytes u32 · body bytes u64   (little endian)

A slot has one call, or batch, at a time. A call, seen from the node::

    → CALL (head, body inline)                          or  CALL with body_mode STREAM, BODY*, BODY_END
                                                        or  CALL with body_mode FILE: the body is an open file, which
                                                            came before it (`gpufaas_functions.body_file`)
    ← ANSWER (head, body inline)                        or  HEAD, CHUNK*, END
    → AREA before a CALL: memory that both ends have mapped, for its body, and for its answer
    ← LAID in place of ANSWER: the body of the answer lies in that area
    → CANCEL at any time: the caller is gone; the worker stops at its next chunk and still answers END. It says the
      number of the call on its slot, since another one may be behind it already
    → ROOM while an answer streams, ← ROOM while a body does: so much more may be sent

Pieces of bodies, BODY and CHUNK, may be sent while there is room, `WINDOW` at first; each takes as many bytes of it as
it has, and `PIECE_COST`. So no call has to wait for the reader of another one. Nothing else is held up.

A batch::

    → BATCH, then CALL for each of its calls; their place is their number in this order, from 0
    ← ANSWERS: small answers, each with the place of its call; as often as needed
    ← HEAD, CHUNK*, END for each call that ANSWERS left out, in their order

A worker with one slot, that is no event loop, may have a call or batch ahead of the one that it runs. The node can mark
it in memory that both share (`gpufaas_functions.begun`)::

    ← DROPPED in place of an answer: the call or batch was marked, and is not run

Of the worker, with slot 0::

    ← READY or FAILED before all calls, once
    ← MEASURED after a call, if the memory of the worker grew; always after its first call
    → LIMIT at any time, on a GPU: how much of its memory the worker may occupy
    → PARK while it has no call   ← PARKED, and the process is stopped
    → WAKE after that             ← WOKEN
    → PING at any time, if READY says that the worker has a loop   ← PONG, from the loop itself
"""

import struct
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from gpufaas_core._types import Bytes, Seconds

PREFIX: Final = struct.Struct("<IIQ")
"""The first number has the kind in its lowest 8 bits, the slot in its highest 16."""
KIND: Final = 0xFF
SLOT: Final = 16
"""The place of the slot's bits."""
CHUNK_BYTES: Final = 256 * 1024
"""The largest piece of a body in one frame. Larger ones would only cost memory at both ends."""
MAX_HEADER: Final = 4 * 1024 * 1024
MAX_SAID: Final = 256 * 1024
"""The largest header of a worker: to read it takes 8 ms. One of 4 MiB would hold up the node's other calls for 130."""
MAX_BODY: Final = 64 * 1024 * 1024
"""Larger frames are errors: the other end is not a worker, or is out of step."""


WINDOW: Final[Bytes] = 512 * 1024
"""Of a body or an answer that streams, so much may be on its way, or wait at its reader's end."""
PIECE_COST: Final[Bytes] = 64
"""Memory of each piece beside its bytes: single bytes may be sent."""


class Kind:
    """What a frame is. No enum: to look its members up takes twice as long, ten times in each call."""

    CALL: Final = 1
    BODY: Final = 2
    BODY_END: Final = 3
    CANCEL: Final = 4
    BATCH: Final = 5
    PING: Final = 6
    LIMIT: Final = 7
    PARK: Final = 8
    WAKE: Final = 9
    ROOM: Final = 10
    AREA: Final = 11
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


KINDS: Final = frozenset(value for name, value in vars(Kind).items() if name.isupper())

INLINE: Final = 0
STREAM: Final = 1
FILE: Final = 2
UPGRADE: Final = 3
"""
The call asks to switch protocols. No frame has this mode: only workers that speak HTTP accept such calls. Once one has
answered 101, bodies are the bytes of that protocol, both ways, and the answer ends with the connection.
"""


class CallHead(msgspec.Struct, array_like=True, frozen=True):
    """
    `headers` are the caller's, with names in lower case; `path` begins with ``/`` and is still percent-encoded.
    `body_path` is the file with the body. A worker gets that open, and no path: with one, the file does not come.
    """

    call: str
    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body_mode: int = INLINE
    body_path: str = ""
    timeout_s: Seconds = 0.0
    """The time that it may run; 0.0: it is not known."""


class BatchHead(msgspec.Struct, array_like=True, frozen=True):
    """So many calls run together: the next ones."""

    calls: int


class CancelHead(msgspec.Struct, array_like=True, frozen=True):
    """
    The caller of the call at `place` is gone: its place in its batch, else 0. `number` is that of the call or batch on
    its slot, from 1.
    """

    place: int
    number: int = 0


class DroppedHead(msgspec.Struct, array_like=True, frozen=True):
    """`number` is as in CANCEL."""

    number: int


class AreaHead(msgspec.Struct, array_like=True, frozen=True):
    """
    The call that follows has `size` bytes of the memory file of its worker, from `at` on, until its answer has ended.
    The first `body` bytes are its body, whose frame has none then; 0: its body is in its frame, as always.
    """

    at: Bytes
    size: Bytes
    body: Bytes


class RoomHead(msgspec.Struct, array_like=True, frozen=True):
    """So much more of the body or the answer of its call may be sent."""

    room: Bytes


class LimitHead(msgspec.Struct, array_like=True, frozen=True):
    """From now on a worker on a GPU may occupy `memory` bytes there: its allocator holds it to that."""

    memory: Bytes


class AnswerHead(msgspec.Struct, array_like=True, frozen=True):
    """The head of ANSWER and HEAD. `run_s` and `peak` are those of the whole call in ANSWER, and 0 in HEAD."""

    status: int
    headers: list[tuple[bytes, bytes]]
    run_s: Seconds = 0.0
    peak: Bytes = 0
    """The worker's peak occupation if the call ran out of memory, else 0: MEASURED says it."""
    out_of_memory: bool = False
    failed: bool = False
    """The handler raised, and the answer shows its exception."""
    length: int = -1
    """Content-Length of a body that streams, or that an answer to HEAD leaves out. -1: the function did not declare
    it."""


class LaidHead(msgspec.Struct, array_like=True, frozen=True):
    """An answer whose body is the first `size` bytes of the area of its call. `head` is the header of an ANSWER."""

    size: Bytes
    head: msgspec.Raw


class AnswersHead(msgspec.Struct, array_like=True, frozen=True):
    """The head of ANSWERS, whose body is the bodies of all of them."""

    answers: list[tuple[int, Bytes, AnswerHead]]
    """For each: the place of its call, and the length of its body."""


class EndHead(msgspec.Struct, array_like=True, frozen=True):
    """`error` is set if the answer broke off after its head was sent."""

    run_s: Seconds
    peak: Bytes = 0
    error: str = ""
    out_of_memory: bool = False


class MeasuredHead(msgspec.Struct, array_like=True, frozen=True):
    """`peak` is the worker's peak occupation, which grew during the call before this frame; `held` as in READY."""

    peak: Bytes
    held: Bytes = 0


WARM: Final = "warm"
"""The phase of a load in which the author's ``warm_up`` ran: no part of what a load takes when a call waits for it."""


class Imported(msgspec.Struct, array_like=True, frozen=True):
    """What a new worker has imported but for the author's own modules, in order, and variables that these have set."""

    seconds: Seconds
    """What its imports took at most: that of the handler, with all of the load that is neither read nor transfer."""
    modules: list[str]
    env: dict[str, str]


class ReadyHead(msgspec.Struct, array_like=True, frozen=True):
    """`phases`: seconds by name (read, transfer, init, warm), in order."""

    occupation: Bytes
    phases: list[tuple[str, Seconds]]
    data_base: Bytes = 0
    """Private writable memory at the fork point. A limit is this plus the reservation."""
    loop: bool = False
    """It answers PING while calls run: its event loop does, or the thread that waits for calls."""
    held: Bytes = 0
    """What it holds now by its own account, `occupation` being the peak; 0: the device's driver says no more."""
    staged: int = 0
    """Files of weights that it has read from host memory."""
    parks: bool = False
    """Its model can leave the device, and come back (PARK, WAKE)."""
    imported: Imported | None = None
    """Where that took long."""


class ParkedHead(msgspec.Struct, array_like=True, frozen=True):
    """`held` is what it holds of its device yet, without what only the device's driver counts."""

    held: Bytes
    failed: str = ""
    """Why it could not give the rest back."""


class WakeHead(msgspec.Struct, array_like=True, frozen=True):
    """`moves`: the model moves to the device. False: the driver has brought it there."""

    moves: bool = True


class WokenHead(msgspec.Struct, array_like=True, frozen=True):
    """`failed`: why it cannot be used, or that its check answers otherwise now; empty: it can. `phases`: see READY."""

    failed: str
    phases: list[tuple[str, Seconds]]


class FailedHead(msgspec.Struct, array_like=True, frozen=True):
    """`text` is the whole traceback, `summary` the type and message of the exception."""

    summary: str
    text: str
    out_of_memory: bool = False


class BrokenFrame(Exception):
    """The other end sent bytes that are no frame: close the connection."""


_EMPTY: Final = b""
_encode: Final = msgspec.msgpack.Encoder().encode
_pack: Final = PREFIX.pack
_unpack: Final = PREFIX.unpack_from


def encode_frame(
    kind: int, head: msgspec.Struct | None = None, body: bytes | bytearray | memoryview = b"", slot: int = 0
) -> bytes:
    """Return the whole frame, for small bodies. For large ones send `encode_prefix`, then the body."""
    header = _EMPTY if head is None else _encode(head)
    return _pack(kind | slot << SLOT, len(header), len(body)) + header + body


def encode_prefix(kind: int, head: msgspec.Struct | None, body_bytes: Bytes, slot: int = 0) -> bytes:
    """Return prefix and header. The caller then sends the body, of *body_bytes* bytes, without copying it."""
    header = _EMPTY if head is None else _encode(head)
    return _pack(kind | slot << SLOT, len(header), body_bytes) + header


class FrameReader:
    """
    Makes frames ``(kind, header, body)`` of bytes as they come. A frame that comes whole costs two slices. The slot is
    in the kind, as in `PREFIX`.
    """

    __slots__ = ("_end", "_left", "_max_body", "_max_header")

    def __init__(self, max_body: Bytes = MAX_BODY, slots: int = 1, max_header: Bytes = MAX_HEADER) -> None:
        """:param slots: whose frames may come"""
        self._left = bytearray()
        self._max_body = max_body
        self._max_header = max_header
        self._end = slots << SLOT

    def feed(self, data: bytes) -> Iterable[tuple[int, bytes, bytes]]:
        """:raises BrokenFrame: the bytes are no frame"""
        if not self._left and (size := len(data)) >= 16:
            kind, header_bytes, body_bytes = self._prefix(data, 0)
            body_at = 16 + header_bytes
            if body_at + body_bytes == size:
                return ((kind, data[16:body_at], data[body_at:]),)  # nearly always: no generator
        return self._feed(data)

    def _feed(self, data: bytes) -> Iterator[tuple[int, bytes, bytes]]:
        left = self._left
        if left:
            left += data
            # Wait for the whole first frame before anything is copied out of the buffer.
            if len(left) < 16 or len(left) < 16 + sum(self._prefix(left, 0)[1:]):
                return
            data = bytes(left)
            left.clear()
        at, size = 0, len(data)
        while size - at >= 16:
            kind, header_bytes, body_bytes = self._prefix(data, at)
            body_at = at + 16 + header_bytes
            end = body_at + body_bytes
            if end > size:
                break
            yield kind, data[at + 16 : body_at], data[body_at:end]
            at = end
        if at < size:
            left += data[at:]

    def _prefix(self, data: bytes | bytearray, at: int) -> tuple[int, int, int]:
        kind, header_bytes, body_bytes = found = _unpack(data, at)
        if header_bytes > self._max_header or body_bytes > self._max_body or kind & 0xFF00 or kind >= self._end:
            raise BrokenFrame(f"no frame: kind {kind:x}, lengths {header_bytes} and {body_bytes}")
        return found
