"""The calls of an async handler, over a real socket: what waits holds up nothing beside it."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
from tests.waiting import LIMIT_S

from gpufaas_core.wire.bodies import STREAM
from gpufaas_core.wire.credit import PIECE_COST, WINDOW
from gpufaas_core.wire.heads import AnswerHead, CallHead, CancelHead, EndHead, RoomHead
from gpufaas_core.wire.kinds import Kind
from gpufaas_core.wire.prefix import KIND, LANE, FrameReader, encode_frame
from gpufaas_functions import async_server
from gpufaas_functions.async_server import AsyncServer
from gpufaas_functions.author import Context, Event
from gpufaas_functions.begun import Counts, no_counts, taken
from gpufaas_functions.call_runner import Served
from gpufaas_functions.inbox import Shared
from gpufaas_functions.memory import CpuMemory

SLOTS = 3


class Node:
    """The other end of the socket."""

    def __init__(self, sock: socket.socket, counts: Counts) -> None:
        self.sock = sock
        self.counts = counts
        self.ran: list[bytes] = []
        """Bodies that the handler has got."""
        self._reader = FrameReader(lanes=SLOTS)
        self._frames: list[tuple[int, int, bytes, bytes]] = []

    def send(self, kind: int, head: msgspec.Struct | None = None, body: bytes = b"", slot: int = 0) -> None:
        self.sock.sendall(encode_frame(kind, head, body, slot))

    def call(self, path: str, body: bytes = b"", mode: int = 0, slot: int = 0) -> None:
        self.send(Kind.CALL, CallHead("c", "POST", path, b"", [], mode), body, slot)

    def next(self, slot: int = 0) -> tuple[int, bytes, bytes]:
        """Return kind, header and body of the next frame of *slot*; MEASURED is left out."""
        while True:
            for at, (kind, lane, header, body) in enumerate(self._frames):
                if lane == slot:
                    del self._frames[at]
                    return kind, header, body
            for kind, header, body in self._reader.feed(self.sock.recv(1 << 20)):
                if kind & KIND != Kind.MEASURED:
                    self._frames.append((kind & KIND, kind >> LANE, header, body))

    def answer(self, slot: int = 0) -> tuple[int, bytes]:
        """Return status and body of a whole answer."""
        kind, header, body = self.next(slot)
        assert kind == Kind.ANSWER
        return msgspec.msgpack.decode(header, type=AnswerHead).status, body

    def end(self, slot: int = 0) -> str:
        """Read an answer to its end, and return with what it broke off."""
        while True:
            kind, header, _ = self.next(slot)
            if kind == Kind.END:
                return msgspec.msgpack.decode(header, type=EndHead).error
            assert kind == Kind.CHUNK


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(async_server, "limit", lambda: None)  # it would end this process
    ours, theirs = socket.socketpair()
    ours.settimeout(LIMIT_S)
    made = Node(ours, no_counts(SLOTS))

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 1000

    async def sized(sizes: list[int]) -> AsyncIterator[bytes]:
        for each in sizes:
            yield b"x" * each

    async def handle(event: Event, context: Context) -> Any:  # noqa: ARG001
        made.ran.append(event.body)
        match event.path:
            case "/endless":
                return endless()
            case "/declares":
                declared, *sizes = map(int, event.text.split())
                return {"headers": {"content-length": str(declared)}, "body": sized(sizes)}
            case "/wait":
                await asyncio.sleep(LIMIT_S)
        return event.body

    server = AsyncServer(Served("f", "cpu", handle, CpuMemory(SLOTS)), Shared(made.counts))
    thread = threading.Thread(target=server.serve, args=(theirs, encode_frame(Kind.PONG)))
    thread.start()
    assert made.next()[0] == Kind.PONG, "it is ready"
    yield made
    ours.close()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "it ends with its connection, whatever runs"
    theirs.close()


def test_an_answer_waits_when_there_is_no_room_and_for_a_reader_who_leaves_it_ends(node: Node) -> None:
    node.call("/endless")
    assert node.next()[0] == Kind.HEAD
    sent = 0
    while sent < WINDOW:
        sent += len(node.next()[2]) + PIECE_COST
    node.call("/", b"beside", slot=1)
    assert node.answer(1) == (200, b"beside")
    node.send(Kind.PING)
    assert node.next()[0] == Kind.PONG, "there is no piece before it"

    node.send(Kind.ROOM, RoomHead(sent))
    assert node.next()[0] == Kind.CHUNK
    node.send(Kind.CANCEL, CancelHead(0, 1))

    assert node.end() == "cancelled"
    node.call("/", b"next")
    assert node.answer() == (200, b"next")


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        (b"5 2 0 3", ""),
        (b"5 2 4", "ValueError: the answer is longer than its Content-Length, 5"),
        (b"5 2 2", "ValueError: the answer ended 1 bytes before its Content-Length, 5"),
    ],
)
def test_an_answer_that_streams_has_as_many_bytes_as_it_declares_or_does_not_look_whole(
    node: Node, pieces: bytes, says: str
) -> None:
    node.call("/declares", pieces)
    assert node.next()[0] == Kind.HEAD
    assert node.end() == says


@pytest.mark.parametrize("pieces", [b"5 6", b"5"])
def test_an_answer_whose_first_piece_is_too_long_or_that_has_none_fails_before_its_head(
    node: Node, pieces: bytes
) -> None:
    node.call("/declares", pieces)
    status, said = node.answer()
    assert status == 500
    assert b"Content-Length, 5" in said


def test_a_body_that_streams_is_taken_as_it_comes_and_its_handler_begins_when_it_is_whole(node: Node) -> None:
    piece = b"x" * (WINDOW // 2)
    node.call("/", b"first", STREAM)
    for _ in range(4):
        node.send(Kind.BODY, None, piece)
        kind, header, _ = node.next()
        assert kind == Kind.ROOM
        assert msgspec.msgpack.decode(header, type=RoomHead).room == len(piece) + PIECE_COST
    assert not node.ran
    assert node.counts.begun[0] == 0, "it could be placed again"

    node.send(Kind.BODY_END)

    assert node.next()[0] == Kind.HEAD
    assert node.ran == [b"first" + 4 * piece]


def test_who_leaves_before_his_body_is_whole_has_no_handler_run(node: Node) -> None:
    node.call("/", b"first", STREAM)
    node.send(Kind.CANCEL, CancelHead(0, 1))

    assert node.answer()[0] == 500
    assert not node.ran
    node.call("/", b"next")
    assert node.answer() == (200, b"next")


def test_a_coroutine_that_waits_is_cancelled_and_another_one_is_not(node: Node) -> None:
    for slot in range(2):
        node.call("/wait", slot=slot)
    node.call("/", b"beside", slot=2)
    assert node.answer(2) == (200, b"beside")

    node.send(Kind.CANCEL, CancelHead(0, 1))

    assert node.answer()[0] == 500
    node.send(Kind.PING)
    assert node.next()[0] == Kind.PONG
    assert not node._frames, "the other one waits"


def test_a_call_that_was_taken_back_is_not_run(node: Node) -> None:
    node.counts.taken[1] = taken(1, 1)

    node.call("/", b"taken", slot=1)
    assert node.next(1)[0] == Kind.DROPPED
    node.call("/", b"next", slot=1)

    assert node.answer(1) == (200, b"next")
    assert node.ran == [b"next"]
