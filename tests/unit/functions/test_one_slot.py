"""The only slot of a worker, over a real socket: where memory runs out, and what comes while a call runs."""

import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import msgspec
import pytest

from gpufaas_core.wire.bodies import STREAM
from gpufaas_core.wire.credit import PIECE_COST, WINDOW
from gpufaas_core.wire.heads import (
    AnswerHead,
    AnswersHead,
    BatchHead,
    CallHead,
    CancelHead,
    DroppedHead,
    EndHead,
    RoomHead,
)
from gpufaas_core.wire.kinds import Kind
from gpufaas_core.wire.prefix import FrameReader, encode_frame
from gpufaas_functions import connection
from gpufaas_functions.author import Context, Event
from gpufaas_functions.batches import BatchHandler
from gpufaas_functions.begun import Counts, is_taken, no_counts, taken
from gpufaas_functions.call_runner import Served
from gpufaas_functions.connection import NodeConnection
from gpufaas_functions.inbox import Shared
from gpufaas_functions.memory import CpuMemory
from gpufaas_functions.slot_threads import OneSlot

LARGE = b"x" * 200_000
LENGTHS = [
    (b"5 2 0 3", ""),
    (b"5 2 4", "ValueError: the answer is longer than its Content-Length, 5"),
    (b"5 2 2", "ValueError: the answer ended 1 bytes before its Content-Length, 5"),
]
"""What an answer declares and the sizes of its pieces, and with what it breaks off."""
OURS: ContextVar[str] = ContextVar("ours", default="nothing")


def call(name: str, body: bytes = b"", body_mode: int = 0, path: str = "/") -> bytes:
    return encode_frame(Kind.CALL, CallHead(name, "POST", path, b"", [], body_mode), body)


class Node:
    """The other end of the socket."""

    def __init__(self, sock: socket.socket, counts: Counts, entered: threading.Event, gate: threading.Event) -> None:
        self.sock = sock
        self.counts = counts
        self.entered = entered
        """A generator has begun that makes its first piece when the `gate` is open."""
        self.gate = gate
        self._reader = FrameReader()
        self._frames: list[tuple[int, bytes, bytes]] = []

    def send(self, *frames: bytes) -> None:
        self.sock.sendall(b"".join(frames))

    def frame(self, *kinds: int) -> tuple[bytes, bytes]:
        """Return header and body of the next frame of one of *kinds*."""
        while True:
            kind, header, body = self._next()
            if kind in kinds:
                return header, body

    def kind(self) -> int:
        """Return that of the next frame."""
        return self._next()[0]

    def _next(self) -> tuple[int, bytes, bytes]:
        while not self._frames:
            self._frames = list(self._reader.feed(self.sock.recv(1 << 20)))
        return self._frames.pop(0)

    def end(self) -> EndHead:
        """Read an answer to its end, and give room for what comes."""
        while True:
            kind, header, body = self._next()
            if kind == Kind.END:
                return msgspec.msgpack.decode(header, type=EndHead)
            if kind == Kind.CHUNK:
                self.send(encode_frame(Kind.ROOM, RoomHead(len(body) + PIECE_COST)))

    def answer(self) -> tuple[AnswerHead, bytes]:
        header, body = self.frame(Kind.ANSWER)
        return msgspec.msgpack.decode(header, type=AnswerHead), body


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """That of a worker which has no memory for bodies like `LARGE`."""

    def array(size: int) -> bytearray:
        if size >= len(LARGE):
            raise MemoryError
        return bytearray(size)

    ours, theirs = socket.socketpair()
    ours.settimeout(20)
    entered, gate = threading.Event(), threading.Event()

    def late() -> Iterator[bytes]:
        entered.set()
        assert gate.wait(20)
        yield b"late"

    def handle(event: Event, context: Context) -> Any:  # noqa: ARG001
        match event.path:
            case "/endless":
                return (b"x" * 1000 for _ in itertools.count())
            case "/large":
                return b"x" * (4 * WINDOW)
            case "/large-first":
                return iter((b"x" * (4 * WINDOW), b"end"))
            case "/late":
                return late()
            case "/declares":
                declared, *sizes = map(int, event.text.split())
                headers = {"content-length": str(declared)}
                return {"headers": headers, "body": (b"x" * each for each in sizes)}
            case "/ours":
                before = OURS.get()
                OURS.set(event.text)
                return (each for each in (before, " ", OURS.get()))
        return b"".join(event.stream())

    def handle_batch(events: list[Event], contexts: list[Context]) -> list[Any]:  # noqa: ARG001
        if events[0].path == "/ours":
            OURS.set("a batch")
        return [b"x" * (4 * WINDOW) if each.path == "/large" else each.body for each in events]

    served = Served("f", "cpu", handle, CpuMemory(1), BatchHandler(handle_batch))
    monkeypatch.setattr(connection, "bytearray", array, raising=False)
    counts = no_counts(1)
    thread = threading.Thread(target=OneSlot(served, NodeConnection(theirs), Shared(counts)).serve)
    thread.start()
    yield Node(ours, counts, entered, gate)
    gate.set()
    ours.close()
    thread.join(20)
    theirs.close()


@pytest.mark.parametrize(
    "frames",
    [
        lambda: (call("a", LARGE),),
        lambda: (call("a", LARGE, STREAM), encode_frame(Kind.BODY, None, b"b"), encode_frame(Kind.BODY_END)),
        lambda: (call("a", b"b", STREAM), encode_frame(Kind.BODY, None, LARGE), encode_frame(Kind.BODY_END)),
    ],
    ids=["whole", "first piece", "later piece"],
)
def test_a_body_without_room_fails_its_call_and_the_next_one_is_served(
    node: Node, frames: Callable[[], tuple[bytes, ...]]
) -> None:
    node.send(*frames(), call("next", b"body"))

    head, said = node.answer()
    assert (head.status, head.out_of_memory, said) == (500, True, b"MemoryError: for the body of the call")
    head, said = node.answer()
    assert (head.status, head.out_of_memory, said) == (200, False, b"body")


def test_a_batch_whose_bodies_have_no_room_together_fails_and_the_next_one_is_served(node: Node) -> None:
    node.send(encode_frame(Kind.BATCH, BatchHead(3)), call("a", b"a"), call("b", LARGE), call("c", b"c"))
    header, bodies = node.frame(Kind.ANSWERS)
    heads = [head for _, _, head in msgspec.msgpack.decode(header, type=AnswersHead).answers]
    assert [(each.status, each.out_of_memory) for each in heads] == [(500, True)] * 3
    assert bodies == b"MemoryError: for the body of the call" * 3

    node.send(encode_frame(Kind.BATCH, BatchHead(2)), call("a", b"1"), call("c", b"3"))
    assert node.frame(Kind.ANSWERS)[1] == b"13"


def test_who_leaves_in_the_middle_of_an_answer_of_a_batch_cuts_no_other_answer_of_it(node: Node) -> None:
    node.send(encode_frame(Kind.BATCH, BatchHead(2)), call("a", path="/large"), call("b", path="/large"))
    node.frame(Kind.CHUNK)

    node.send(encode_frame(Kind.CANCEL, CancelHead(0, 1)))

    assert node.end().error == "cancelled"
    assert node.end().error == ""


@pytest.mark.parametrize(("pieces", "says"), LENGTHS)
def test_an_answer_that_streams_has_as_many_bytes_as_it_declares_or_does_not_look_whole(
    node: Node, pieces: bytes, says: str
) -> None:
    node.send(call("a", pieces, path="/declares"))
    assert msgspec.msgpack.decode(node.frame(Kind.HEAD)[0], type=AnswerHead).length == 5
    assert node.end().error == says


@pytest.mark.parametrize("pieces", [b"5 6", b"5"])
def test_an_answer_whose_first_piece_is_too_long_or_that_has_none_fails_before_its_head(
    node: Node, pieces: bytes
) -> None:
    node.send(call("a", pieces, path="/declares"))
    head, said = node.answer()
    assert head.status == 500
    assert b"Content-Length, 5" in said


def test_an_answer_without_an_end_stops_when_its_caller_leaves(node: Node) -> None:
    node.send(call("a", path="/endless"))
    node.frame(Kind.CHUNK)

    node.send(encode_frame(Kind.CANCEL, CancelHead(0, 1)))

    header, _ = node.frame(Kind.END)
    assert msgspec.msgpack.decode(header, type=EndHead).error == "cancelled"
    node.send(call("next", b"body"))
    assert node.answer()[1] == b"body"


def test_who_leaves_before_the_first_piece_gets_none(node: Node) -> None:
    node.send(call("a", path="/late"))
    assert node.entered.wait(20)
    node.send(encode_frame(Kind.CANCEL, CancelHead(0, 1)))

    node.gate.set()

    header, _ = node.frame(Kind.END, Kind.CHUNK)
    assert msgspec.msgpack.decode(header, type=EndHead).error == "cancelled"
    node.send(call("next", b"body"))
    assert node.answer()[1] == b"body"


@pytest.mark.parametrize("path", ["/endless", "/large", "/large-first"])
def test_an_answer_waits_when_there_is_no_room_and_for_a_reader_who_leaves_it_ends(node: Node, path: str) -> None:
    node.send(call("a", path=path))
    sent = 0
    while sent < WINDOW:
        sent += len(node.frame(Kind.CHUNK)[1]) + PIECE_COST
    node.sock.settimeout(0.2)
    with pytest.raises(TimeoutError):
        node.frame(Kind.CHUNK)
    node.sock.settimeout(20)

    node.send(encode_frame(Kind.ROOM, RoomHead(sent)))
    node.frame(Kind.CHUNK)
    node.send(encode_frame(Kind.CANCEL, CancelHead(0, 1)))

    header, _ = node.frame(Kind.END)
    assert msgspec.msgpack.decode(header, type=EndHead).error == "cancelled"


def test_a_body_is_told_of_as_it_is_taken(node: Node) -> None:
    pieces = 8
    node.send(call("a", b"", STREAM))
    room = WINDOW
    for _ in range(pieces):
        if room <= 0:
            room += msgspec.msgpack.decode(node.frame(Kind.ROOM)[0], type=RoomHead).room
        node.send(encode_frame(Kind.BODY, None, b"x" * (len(LARGE) - 1)))
        room -= len(LARGE) - 1 + PIECE_COST
    node.send(encode_frame(Kind.BODY_END))

    header, _ = node.frame(Kind.HEAD)
    assert msgspec.msgpack.decode(header, type=AnswerHead).length == pieces * (len(LARGE) - 1)


def test_what_a_call_sets_in_its_context_lasts_to_the_end_of_its_stream_and_no_other_call_sees_it(node: Node) -> None:
    for each in ("a", "b"):
        node.send(call(each, each.encode(), path="/ours"))
        assert [node.frame(Kind.CHUNK)[1] for _ in range(3)] == [b"nothing", b" ", each.encode()]

    node.send(encode_frame(Kind.BATCH, BatchHead(1)), call("c", path="/ours"), call("d", path="/ours"))

    assert node.frame(Kind.CHUNK)[1] == b"nothing"


# --- a call ahead of the one that runs ---


def test_a_call_that_was_taken_back_is_not_run_and_those_around_it_are(node: Node) -> None:
    node.counts.taken[0] = taken(2, 1)
    node.send(call("a", b"a"), call("taken", b"taken"), call("c", b"c"))

    frames = [node.frame(Kind.ANSWER, Kind.DROPPED) for _ in range(3)]

    assert [body for _, body in frames] == [b"a", b"", b"c"]
    assert msgspec.msgpack.decode(frames[1][0], type=DroppedHead).number == 2
    assert node.counts.begun == [3]


def test_a_call_and_the_one_behind_it_can_be_taken_back(node: Node) -> None:
    node.counts.taken[0] = taken(2, 2)
    node.send(call("a", b"a"), call("b", b"b"), call("c", b"c"), call("d", b"d"))

    frames = [node.frame(Kind.ANSWER, Kind.DROPPED) for _ in range(4)]

    assert [body for _, body in frames] == [b"a", b"", b"", b"d"]
    assert [msgspec.msgpack.decode(header, type=DroppedHead).number for header, _ in frames[1:3]] == [2, 3]


@pytest.mark.parametrize("first", [1, 2, 7])
@pytest.mark.parametrize("calls", [1, 2])
def test_a_mark_names_one_call_or_two_and_no_other(first: int, calls: int) -> None:
    assert [each for each in range(12) if is_taken(each, taken(first, calls))] == [*range(first, first + calls)]
    assert not any(is_taken(each, 0) for each in range(12))


def test_memory_is_measured_after_what_has_run_and_not_after_what_was_taken_back(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA the first two measurements are of use, whatever they say."""
    monkeypatch.setattr(CpuMemory, "grown", lambda _: 1)
    node.counts.taken[0] = taken(2, 1)
    node.send(call("a", b"a"), call("taken", b"taken"), call("c", b"c"))

    found = [node.kind() for _ in range(5)]

    assert found == [Kind.ANSWER, Kind.MEASURED, Kind.DROPPED, Kind.ANSWER, Kind.MEASURED]


def test_a_call_that_is_marked_after_it_has_begun_is_run(node: Node) -> None:
    node.send(call("a", path="/endless"))
    node.frame(Kind.CHUNK)
    node.counts.taken[0] = taken(1, 1)
    node.send(call("b", b"b"), encode_frame(Kind.CANCEL, CancelHead(0, 1)))

    header, _ = node.frame(Kind.END, Kind.DROPPED)
    assert msgspec.msgpack.decode(header, type=EndHead).error == "cancelled"
    assert node.answer()[1] == b"b"


def test_a_batch_that_was_taken_back_is_not_run(node: Node) -> None:
    node.send(call("a", path="/endless"))
    node.frame(Kind.CHUNK)
    node.counts.taken[0] = taken(2, 1)
    node.send(encode_frame(Kind.BATCH, BatchHead(2)), call("b", b"b"), call("c", b"c"))
    node.send(encode_frame(Kind.CANCEL, CancelHead(0, 1)), call("d", b"d"))

    header, _ = node.frame(Kind.DROPPED)
    assert msgspec.msgpack.decode(header, type=DroppedHead).number == 2
    assert node.answer()[1] == b"d"


def test_cancel_stops_the_call_that_runs_or_the_one_behind_it_as_it_says(node: Node) -> None:
    node.send(call("a", path="/endless"))
    node.frame(Kind.CHUNK)
    node.send(call("b", path="/endless"), encode_frame(Kind.CANCEL, CancelHead(0, 2)))
    for _ in range(50):
        node.send(encode_frame(Kind.ROOM, RoomHead(len(node.frame(Kind.CHUNK)[1]) + PIECE_COST)))
    assert node.counts.begun == [1], "the first goes on"

    node.send(encode_frame(Kind.CANCEL, CancelHead(0, 1)), call("c", b"c"))

    ends = [node.frame(Kind.END)[0] for _ in range(2)]
    assert [msgspec.msgpack.decode(each, type=EndHead).error for each in ends] == ["cancelled"] * 2
    assert node.answer()[1] == b"c"


def test_a_cancel_that_comes_late_stops_no_other_call(node: Node) -> None:
    node.send(call("a", b"a"), call("b", path="/endless"))
    node.frame(Kind.CHUNK)
    node.send(encode_frame(Kind.CANCEL, CancelHead(0, 1)), call("c", b"c"))
    for _ in range(50):
        node.send(encode_frame(Kind.ROOM, RoomHead(len(node.frame(Kind.CHUNK)[1]) + PIECE_COST)))

    node.send(encode_frame(Kind.CANCEL, CancelHead(0, 2)))
    node.frame(Kind.END)
    assert node.answer()[1] == b"c"
