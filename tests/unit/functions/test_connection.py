"""A worker's end of its connection where the author's code has taken all memory: no frame is lost, or taken apart."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import until

from gpufaas_core.wire.kinds import Kind
from gpufaas_core.wire.prefix import encode_frame
from gpufaas_functions import connection as module
from gpufaas_functions.connection import Absent, Closed, NodeConnection
from gpufaas_functions.exit_hooks import flush_at_exit

SMALL, LARGE = 1000, 100_000


class Rig:
    def __init__(self) -> None:
        self.node, theirs = socket.socketpair()
        self.connection = NodeConnection(theirs)

    def send(self, size: int) -> None:
        self.node.sendall(encode_frame(Kind.BODY, None, b"x" * size))


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.node.close()
    made.connection.sock.close()


def no_memory(*_: Any) -> Any:
    raise MemoryError


def none_over(size: int, made: type) -> Any:
    def make(of: Any) -> Any:
        if (of if isinstance(of, int) else len(of)) > size:
            raise MemoryError
        return made(of)

    return make


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("lacks", [bytes, bytearray])
def test_a_body_without_room_is_absent_and_the_next_frame_is_read(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, size: int, lacks: type
) -> None:
    monkeypatch.setattr(module, lacks.__name__, none_over(SMALL // 2, lacks), raising=False)
    rig.send(size)
    rig.send(10)

    body = rig.connection.next()[2]

    assert isinstance(body, Absent) or (size, lacks) == (SMALL, bytearray)
    assert len(body) == size
    assert rig.connection.next() == (Kind.BODY, b"", b"x" * 10)


def test_a_lack_of_memory_for_answers_is_not_taken_for_one_of_the_body(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of that body a part has come: what follows would be read as a frame."""
    rig.node.sendall(encode_frame(Kind.BODY, None, b"x") + encode_frame(Kind.BODY, None, b"x" * LARGE)[: LARGE // 2])
    rig.connection.next()
    rig.connection.later(b"answer", 0.0)
    monkeypatch.setattr(rig.connection, "flush", no_memory)

    with pytest.raises(MemoryError):
        rig.connection.next()


def test_answers_that_cannot_be_joined_are_sent(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_join", no_memory)
    for _ in range(2):
        rig.send(10)
    rig.connection.next()
    assert rig.connection.unread, "so that answers wait for each other"
    for each in (b"one ", b"two ", b"three"):
        rig.connection.later(each, 0.0)

    rig.connection.flush()

    assert rig.node.recv(100) == b"one two three"


def test_a_fork_of_the_worker_has_no_part_in_its_connection(rig: Rig) -> None:
    rig.send(10)
    rig.send(20)
    assert len(rig.connection.next()[2]) == 10
    pid = os.fork()
    if not pid:
        status = 1
        try:
            rig.connection.leave()
            assert not rig.connection.unread
            with pytest.raises(Closed):
                rig.connection.later(b"child", 0.0)
            with pytest.raises(Closed):
                rig.connection.next()
            status = 0
        finally:
            os._exit(status)

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(rig.connection.next()[2]) == 20
    rig.connection.send(b"parent")
    assert rig.node.recv(100) == b"parent"


def test_a_fork_reads_nothing_while_a_thread_of_its_parent_waits(rig: Rig) -> None:
    waits = threading.Thread(target=rig.connection.next)
    waits.start()
    until(lambda: Path(f"/proc/self/task/{waits.native_id}/stat").read_text().rpartition(") ")[2][0] == "S")
    pid = os.fork()
    if not pid:
        status = 1
        try:
            rig.connection.leave()
            with pytest.raises(Closed):
                rig.connection.next()
            status = 0
        finally:
            os._exit(status)

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    rig.send(10)
    waits.join()


def test_answers_of_calls_that_have_ended_are_sent_when_the_next_call_ends_the_process(rig: Rig) -> None:
    for _ in range(2):
        rig.send(10)
    rig.connection.next()
    for forks in (False, True):
        pid = os.fork()
        if not pid:
            flush_at_exit(rig.connection.flush_at_exit)
            rig.connection.later(b"of a fork" if forks else b"answer", 0.0)
            if forks and not os.fork():
                os._exit(0)  # it ends before its parent, whose answer this is
            if forks:
                os.wait()
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(3)

        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == (-signal.SIGKILL if forks else 3)

    rig.connection.send(b", and the next")
    assert rig.node.recv(100) == b"answer, and the next"
