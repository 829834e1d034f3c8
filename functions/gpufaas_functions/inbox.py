"""
What comes over a worker's connection: its frames are made into work for the slots. No IO, but for files of bodies.

One thread at a time gives it frames, while others run what has come.
"""

import ctypes
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

import msgspec

from gpufaas_core.model import Bytes
from gpufaas_core.wire.bodies import FILE, STREAM
from gpufaas_core.wire.credit import Window
from gpufaas_core.wire.heads import AreaHead, BatchHead, CallHead, CancelHead, LimitHead, RoomHead
from gpufaas_core.wire.kinds import Kind
from gpufaas_core.wire.prefix import KIND, LANE, encode_frame
from gpufaas_functions.answers import Memory
from gpufaas_functions.areas import Area
from gpufaas_functions.author import Event
from gpufaas_functions.begun import Counts
from gpufaas_functions.body_file import BodyFile, take
from gpufaas_functions.connection import Absent, Body, Closed
from gpufaas_functions.parking import ModelParking
from gpufaas_functions.reply import Out, Reply

_decode_area: Final = msgspec.msgpack.Decoder(AreaHead).decode
_decode_batch: Final = msgspec.msgpack.Decoder(BatchHead).decode
_decode_call: Final = msgspec.msgpack.Decoder(CallHead).decode
_decode_cancel: Final = msgspec.msgpack.Decoder(CancelHead).decode
_decode_limit: Final = msgspec.msgpack.Decoder(LimitHead).decode
_decode_room: Final = msgspec.msgpack.Decoder(RoomHead).decode


class Shared(NamedTuple):
    """What a worker shares with its node, beside the connection."""

    counts: Counts
    """They say which calls each slot has begun (`begun`)."""
    areas: "ctypes.Array[ctypes.c_char] | None" = None
    """The memory that the node lends areas of; None: it lends none."""
    files: socket.socket | None = None
    """Open files of bodies come over it (`body_file`)."""


class BodyStream:
    """A body that comes in pieces, as far as it has come."""

    __slots__ = ("_first", "_pieces", "_whole", "_window")

    def __init__(self, first: Body) -> None:
        """:param first: the piece that came with the call, which takes no credit"""
        self._pieces: deque[Body | None] = deque((first,))
        """Those that were not taken. The last one is None, and stays."""
        self._first, self._whole = True, False
        self._window = Window()

    def put(self, piece: Body | None) -> None:
        """*piece* has come; None: the body is whole."""
        self._pieces.append(piece)
        self._whole = piece is None

    @property
    def is_there(self) -> bool:
        """Whether `take` has something to return."""
        return bool(self._pieces)

    def take(self) -> Body | None:
        """Return the next piece; None: there is none after the last one."""
        piece = self._pieces[0]
        if piece is not None:
            self._pieces.popleft()
            if not self._first:
                self._window.came(len(piece))
            self._first = False
        return piece

    def room(self) -> Bytes:
        """Return how much more the node may send now; 0: nothing has to be said."""
        return 0 if self._whole else self._window.room()


CallBody: TypeAlias = Body | BodyStream | Area | BodyFile


class Call(msgspec.Struct, eq=False):
    """One call of a slot."""

    head: CallHead
    body: CallBody
    area: Area | None = None
    """What it has of the memory shared with the node."""
    cancelled: bool = False
    """Its caller is gone."""

    def take_body(self) -> CallBody:
        """Return its body, and do not keep it: it is freed as soon as the handler has ended."""
        body, self.body = self.body, b""
        return body


class Work(msgspec.Struct, eq=False):
    """What a slot runs at once: a call, or the calls of a batch."""

    slot: "Slot"
    number: int
    """Of the calls and batches of its slot, from 1."""
    batch: int = 0
    """How many calls the batch has; 0: it is one call."""
    calls: list[Call] = []
    """Those that have come, by their place. Each work has a list of its own."""


class Slot:
    """What has come for one slot, and has not ended."""

    def __init__(self, index: int, reply: Reply, counts: Counts, tell: Callable[[], None]) -> None:
        """:param tell: is called when a piece of a body, room or a cancellation has come"""
        self.index = index
        self.reply = reply
        self._tell = tell
        self._counts = counts
        self._lock = threading.Lock()
        self._works: deque[Work] = deque()
        """The first one runs. The node sends others when that was answered, or ahead (`begun`)."""
        self._came = 0
        """The number of calls and batches that have come."""
        self._gathers: Work | None = None
        """A batch whose calls come."""
        self._stream: BodyStream | None = None
        """The body that comes in pieces: nothing comes behind it before it is whole."""
        self.area: Area | None = None
        """The area of the call that comes next."""

    # --- what comes ---

    def on_batch(self, calls: int) -> None:
        self._came += 1
        self._gathers = Work(self, self._came, calls)

    def on_call(self, head: CallHead, body: CallBody) -> Work | None:
        """Return what can run now that the call has come: it, or its batch; else None, and it waits."""
        area = self.area
        if area is not None:
            self.area = None
            body = body if (laid := area.body) is None else laid
        if head.body_mode == STREAM:
            assert isinstance(body, (bytes, Absent))
            body = self._stream = BodyStream(body)
        work = self._gathers
        if work is None:
            self._came += 1
            work = Work(self, self._came)
        work.calls.append(Call(head, body, area))
        if len(work.calls) < work.batch:
            return None
        self._gathers = None
        with self._lock:
            self._works.append(work)
            return work if len(self._works) == 1 else None

    def on_piece(self, piece: Body | None) -> None:
        """A piece of the body has come; None: its end. The call may have ended."""
        if self._stream is not None:
            self._stream.put(piece)
            self._tell()
        if piece is None:
            self._stream = None

    def on_room(self, room: Bytes) -> None:
        self.reply.credit.add(room)
        self._tell()

    def on_cancel(self, head: CancelHead) -> None:
        """The caller of a call is gone. That may have ended."""
        with self._lock:
            found = [each for each in self._works if each.number == head.number]
        for work in found:
            if head.place < len(work.calls):
                self.cancel(work.calls[head.place])

    def cancel(self, call: Call) -> None:
        """The caller of *call* is gone."""
        call.cancelled = True
        self._tell()

    # --- what runs ---

    def begin(self, work: Work) -> bool:
        """Count *work* as begun. Return whether the worker runs it: else the node has taken it back, and is told."""
        if self._counts.begin(self.index, work.number):
            return True
        work.calls.clear()  # with the files of their bodies
        self.reply.drop(work.number)
        return False

    def end(self) -> Work | None:
        """What ran has ended. Return what runs next; None: the slot is free."""
        with self._lock:
            self._works.popleft()
            return self._works[0] if self._works else None


class Inbox:
    """See module."""

    def __init__(
        self, slots: Sequence[Slot], out: Out, memory: Memory, shared: Shared, parking: ModelParking | None = None
    ) -> None:
        """:param out: what the node asks of the worker itself is answered there"""
        self._slots = slots
        self._out = out
        self._memory = memory
        self._shared = shared
        self._parking = parking

    def on_frame(self, kind: int, header: bytes, body: Body) -> Work | None:
        """
        Return what can run now that a frame has come.

        :param kind: kind and slot, as in `prefix.PREFIX`
        :raises Closed: no more files can come
        """
        slot = self._slots[kind >> LANE]
        kind &= KIND
        if kind == Kind.CALL:
            head = _decode_call(header)
            return slot.on_call(head, body if head.body_mode != FILE else self._file(head))
        if kind == Kind.BODY:
            slot.on_piece(body)
        elif kind == Kind.BODY_END:
            slot.on_piece(None)
        elif kind == Kind.BATCH:
            slot.on_batch(_decode_batch(header).calls)
        elif kind == Kind.AREA:
            assert self._shared.areas is not None
            slot.area = Area(self._shared.areas, _decode_area(header))
        elif kind == Kind.ROOM:
            slot.on_room(_decode_room(header).room)
        elif kind == Kind.CANCEL:
            slot.on_cancel(_decode_cancel(header))
        else:
            self._on_question(kind, header)
        return None

    def _on_question(self, kind: int, header: bytes) -> None:
        """Do what is asked of the worker itself."""
        if kind == Kind.PING:
            self._out.send(encode_frame(Kind.PONG))
            self._out.flush()
        elif kind == Kind.LIMIT:
            self._memory.limit(_decode_limit(header).memory)
        elif self._parking is not None and (answer := self._parking.answer(kind, header)) is not None:
            self._out.send(answer)

    def _file(self, head: CallHead) -> BodyFile:
        """Return the file with the body of the call that has come. :raises Closed: no more files can come"""
        assert self._shared.files is not None
        try:
            return take(self._shared.files, head)
        except OSError:
            raise Closed from None


def event_of(head: CallHead, body: CallBody, stream: Callable[[], Iterator[bytes]] | None = None) -> Event:
    """
    Return the event of a call.

    :param stream: yields what comes of a `BodyStream`
    :raises MemoryError: there was no room for the body
    """
    if isinstance(body, bytes):
        return Event(head.method, head.path, head.query, head.headers, body)
    if isinstance(body, Absent):
        raise no_room()
    if isinstance(body, BodyStream):
        return Event(head.method, head.path, head.query, head.headers, None, stream)
    return Event(head.method, head.path, head.query, head.headers, None, laid=body)


def no_room() -> MemoryError:
    """Return what a call fails with whose body has no room in memory."""
    return MemoryError("for the body of the call")
