"""A body in a file belongs to whoever has it open, and goes to a worker in the order of the calls."""

import contextlib
import gc
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.waiting import LIMIT_S, until

from gpufaas_core.errors import StorageFailed
from gpufaas_core.wire.bodies import FILE
from gpufaas_core.wire.heads import BatchHead, CallHead
from gpufaas_core.wire.kinds import Kind
from gpufaas_core.wire.prefix import FrameReader, encode_frame
from gpufaas_functions.author import Context, Event
from gpufaas_functions.batches import BatchHandler
from gpufaas_functions.begun import no_counts, taken
from gpufaas_functions.body_file import BodyFile, connected, give, opened, take
from gpufaas_functions.call_runner import Served
from gpufaas_functions.connection import NodeConnection
from gpufaas_functions.inbox import Shared
from gpufaas_functions.memory import CpuMemory
from gpufaas_functions.slot_threads import OneSlot

MOST = 2 * 240
"""Two batches of the largest size: one may be with the worker beside that which it runs."""


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = connected()
    with ours, theirs:
        yield ours, theirs


def call(path: Path, body: bytes = b"body") -> CallHead:
    path.write_bytes(body)
    return CallHead("c", "POST", "/", b"", [], FILE, str(path))


def open_below(folder: Path) -> list[str]:
    """The files there that this process has open."""
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(each))
    return [each for each in found if each.startswith(f"{folder}/")]


def test_a_body_can_be_read_whole_and_in_pieces_after_its_file_was_removed(tmp_path: Path) -> None:
    head = call(tmp_path / "body", b"x" * 600_000)
    event = Event("POST", "/", b"", [], None, laid=opened(head))
    os.unlink(head.body_path)

    pieces = list(event.stream())

    assert [len(each) for each in pieces] == [262_144, 262_144, 75_712]
    assert (b"".join(event.stream()), event.body) == (b"".join(pieces), b"x" * 600_000)


def test_files_of_two_of_the_largest_batches_go_to_a_worker_that_takes_none(
    ends: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    heads = [call(tmp_path / str(number), b"%d" % number) for number in range(MOST)]

    given = [give(ends[0], opened(each), each) for each in heads]

    assert {each.body_path for each in given} == {""}
    assert [take(ends[1], each).read(0, 9) for each in given] == [b"%d" % number for number in range(MOST)]


def test_a_file_that_could_not_be_sent_is_no_other_calls_body(
    ends: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    first, second, third = (call(tmp_path / name, name.encode()) for name in "abc")
    unsent = give(ends[0], BodyFile(-1), first)
    sent = give(ends[0], opened(second), second)

    missing, there = take(ends[1], unsent), take(ends[1], sent)

    assert there.read(0, 9) == b"b"
    with pytest.raises(OSError, match="too many open files"):
        len(missing)
    ends[1].shutdown(socket.SHUT_RDWR)
    with pytest.raises(OSError, match="closed"):
        take(ends[1], give(ends[0], opened(third), third))


def test_a_process_that_can_have_no_more_open_files_says_so(
    ends: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    head = call(tmp_path / "body")
    sent = give(ends[0], opened(head), head)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), hard))
    held = []
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        missing = take(ends[1], sent)
        with pytest.raises(StorageFailed, match="call again"):
            opened(head)
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    with pytest.raises(OSError, match="too many open files"):
        len(missing)


def test_a_file_is_closed_when_nobody_has_it_any_more(tmp_path: Path) -> None:
    file = opened(call(tmp_path / "body"))
    assert open_below(tmp_path)

    del file

    assert not open_below(tmp_path)


@pytest.mark.parametrize("read", [Event.json, lambda event: int(event.text)])
def test_the_body_of_a_call_that_failed_is_closed_without_a_collection(
    ends: tuple[socket.socket, socket.socket], tmp_path: Path, read: Callable[[Event], object]
) -> None:
    handler = BatchHandler(lambda events, _: [read(each) for each in events])
    node, theirs = socket.socketpair()
    served = Served("f.ns", "cpu", lambda *_: None, CpuMemory(), handler)
    slots = OneSlot(served, NodeConnection(theirs), Shared(no_counts(1), files=ends[1]))
    node.sendall(encode_frame(Kind.BATCH, BatchHead(3)))
    for name in "abc":
        head = call(tmp_path / name)
        node.sendall(encode_frame(Kind.CALL, give(ends[0], opened(head), head)))
    node.shutdown(socket.SHUT_WR)
    gc.disable()
    try:
        slots.serve()
        assert Kind.ANSWERS in [kind for kind, _, _ in FrameReader().feed(node.recv(1 << 16))]
        with pytest.raises(ValueError, match="body"):
            handler.one(Event("POST", "/", b"", [], None, laid=opened(call(tmp_path / "d"))), Context("c", "f", "cpu"))

        assert not open_below(tmp_path)
    finally:
        gc.enable()
        node.close()
        theirs.close()


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_worker_that_rests_has_no_body_open(
    ends: tuple[socket.socket, socket.socket], tmp_path: Path, is_dropped: bool
) -> None:
    node, theirs = socket.socketpair()
    counts = no_counts(1)
    served = Served("f.ns", "cpu", lambda event, _: event.body, CpuMemory())
    slots = OneSlot(served, NodeConnection(theirs), Shared(counts, files=ends[1]))
    serving = threading.Thread(target=slots.serve, daemon=True)
    serving.start()
    if is_dropped:
        counts.taken[0] = taken(1, 1)

    head = call(tmp_path / "body")
    node.sendall(encode_frame(Kind.CALL, give(ends[0], opened(head), head)))
    ((kind, _, body),) = FrameReader().feed(node.recv(1 << 16))
    assert (kind, body) == ((Kind.DROPPED, b"") if is_dropped else (Kind.ANSWER, b"body"))

    until(lambda: not open_below(tmp_path), "it is closed")
    node.close()
    serving.join(LIMIT_S)
    theirs.close()
