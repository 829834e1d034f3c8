"""A slot of a worker, over a real socket, where memory runs out and where its thread ends."""

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from gpufaas_core.frames import STREAM, AnswerHead, AnswersHead, BatchHead, CallHead, FrameReader, Kind, encode_frame
from gpufaas_functions import slot_server
from gpufaas_functions.author import Context, Event
from gpufaas_functions.batch_server import BatchServer
from gpufaas_functions.memory import CpuMemory
from gpufaas_functions.slot_server import SlotServer

LARGE = b"x" * 200_000


def call(name: str, body: bytes = b"", body_mode: int = 0) -> bytes:
    return encode_frame(Kind.CALL, CallHead(name, "POST", "/", b"", [], body_mode), body)


class Node:
    """The other end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._reader = FrameReader()
        self._frames: list[tuple[int, bytes, bytes]] = []

    def send(self, *frames: bytes) -> None:
        self.sock.sendall(b"".join(frames))

    def frame(self, *kinds: int) -> tuple[bytes, bytes]:
        """Return header and body of the next frame of one of *kinds*."""
        while True:
            while self._frames:
                kind, header, body = self._frames.pop(0)
                if kind in kinds:
                    return header, body
            self._frames = list(self._reader.feed(self.sock.recv(1 << 20)))

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

    def handle(event: Event, context: Context) -> Any:  # noqa: ARG001
        return b"".join(event.stream()) if event.path == "/" else None

    def handle_batch(events: list[Event], contexts: list[Context]) -> list[Any]:  # noqa: ARG001
        return [each.body for each in events]

    server = SlotServer(theirs, handle, "f", "cpu", CpuMemory(1), alone=True)
    server.serve_batch = BatchServer(server, handle_batch).serve
    monkeypatch.setattr(slot_server, "bytearray", array, raising=False)
    thread = threading.Thread(target=server.serve)
    thread.start()
    yield Node(ours)
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

    node.send(encode_frame(Kind.BATCH, BatchHead(2)), call("a", b"a"), call("c", b"c"))
    assert node.frame(Kind.ANSWERS)[1] == b"ac"
