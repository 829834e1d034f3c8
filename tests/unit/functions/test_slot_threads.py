"""The threads of a worker with several slots: quick calls run in the one that waits for calls, and wait for none."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from tests.waiting import until

from gpufaas_core.frames import STREAM, AnswerHead, CallHead, FrameReader, Kind, encode_frame
from gpufaas_functions.author import Context, Event
from gpufaas_functions.memory import CpuMemory
from gpufaas_functions.pace import AGAIN
from gpufaas_functions.slot_server import SlotServer
from gpufaas_functions.slot_threads import LOOK_S, SlotThreads

SLOTS = 6
SLOW_S = 0.5


class Slot:
    """The node's end of the socket of a slot."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._reader = FrameReader()
        self._answers: list[str] = []

    def send(self, path: str, body: bytes = b"", body_mode: int = 0) -> None:
        head = CallHead("c", "POST", path, b"", [], body_mode)
        self.sock.sendall(encode_frame(Kind.CALL, head, body))

    def answer(self) -> str:
        """Return the body of the next answer, which fails unless it is a success."""
        while not self._answers:
            for kind, header, body in self._reader.feed(self.sock.recv(1 << 20)):
                if kind == Kind.ANSWER:
                    head = msgspec.msgpack.decode(header, type=AnswerHead)
                    assert head.status == 200, body
                    self._answers.append(body.decode())
        return self._answers.pop(0)

    def call(self, path: str) -> str:
        self.send(path)
        return self.answer()


class Worker:
    """A worker whose handler does what the path says. `slots` are the node's ends."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.gate = threading.Event()
        self.meet = threading.Barrier(SLOTS)
        self.slow_s = 0.0
        pairs = [socket.socketpair() for _ in range(SLOTS)]
        for ours, _ in pairs:
            ours.settimeout(20)
        self.slots = [Slot(ours) for ours, _ in pairs]
        memory = CpuMemory(SLOTS)
        servers = [SlotServer(theirs, self.handle, "f", "cpu", memory, alone=False) for _, theirs in pairs]
        self.ended = threading.Event()
        self.threads = SlotThreads(servers, self.ended.set)
        self.main = threading.Thread(target=self.threads.serve, name="main", daemon=True)
        self.main.start()

    def handle(self, event: Event, context: Context) -> Any:  # noqa: ARG002
        match event.path:
            case "/gate":
                self.begun.release()
                assert self.gate.wait(20)
            case "/meet":
                self.meet.wait(20)
            case "/body":
                return event.text
            case "/slow":
                time.sleep(SLOW_S)
            case _ if self.slow_s:
                time.sleep(self.slow_s)
        return threading.current_thread().name

    def settle(self) -> None:
        """Let the worker find out that its calls are quick."""
        until(lambda: len({slot.call("/") for slot in self.slots for _ in range(20)}) == 1, "one thread runs them all")


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.gate.set()
    for each in reversed(made.slots):
        each.sock.close()
    assert made.ended.wait(20), "the worker ends with its first slot"


def all_at_once(worker: Worker, path: str) -> list[str]:
    with ThreadPoolExecutor(SLOTS) as pool:
        return list(pool.map(lambda slot: slot.call(path), worker.slots))


def test_quick_calls_of_all_slots_run_in_one_thread(worker: Worker) -> None:
    assert len(set(all_at_once(worker, "/meet"))) == SLOTS, "it has a thread for each of them"

    until(lambda: len({name for _ in range(10) for name in all_at_once(worker, "/")}) == 1, "one runs all calls")


def test_as_many_slow_calls_run_beside_each_other_as_there_are_slots(worker: Worker) -> None:
    assert len(set(all_at_once(worker, "/meet"))) == SLOTS
    assert len(set(all_at_once(worker, "/meet"))) == SLOTS, "the threads are used again"
    assert threading.active_count() < 4 * SLOTS


def test_a_handler_that_becomes_slow_is_given_threads_and_one_that_is_quick_again_needs_none(worker: Worker) -> None:
    worker.settle()
    worker.slow_s = 0.05
    began = time.monotonic()
    names = all_at_once(worker, "/")

    assert len(set(names)) == SLOTS
    assert time.monotonic() - began < SLOTS * worker.slow_s / 2, "beside each other, not one after the other"
    worker.slow_s = 0.0
    worker.settle()


def test_no_quick_call_waits_for_a_slow_one(worker: Worker) -> None:
    worker.settle()
    waited = []
    slow, *quick = worker.slots
    for _ in range(3):
        slow.send("/slow")
        for each in quick * 4:
            began = time.monotonic()
            each.call("/")
            waited.append(time.monotonic() - began)
        slow.answer()

    assert max(waited) < SLOW_S / 4
    assert sum(waited) / len(waited) < 5 * LOOK_S


def test_a_call_that_blocks_in_the_leader_is_left_to_its_thread(worker: Worker) -> None:
    worker.settle()
    blocked = worker.slots[: SLOTS - 1]
    for each in blocked:
        each.send("/gate")
        assert worker.begun.acquire(timeout=20)
    free = worker.slots[-1]

    until(lambda: len({free.call("/") for _ in range(2 * AGAIN)}) == 1, "the one that is left")
    free.send("/gate")
    assert worker.begun.acquire(timeout=20), "the last slot has a thread, too"
    worker.gate.set()
    assert len({each.answer() for each in worker.slots}) == SLOTS


def test_a_body_that_comes_slowly_holds_up_its_own_call_only(worker: Worker) -> None:
    worker.settle()
    slow, *others = worker.slots
    slow.send("/body", b"one ", STREAM)

    assert len({each.call("/") for each in others}) <= len(others)
    slow.sock.sendall(encode_frame(Kind.BODY, None, b"two") + encode_frame(Kind.BODY_END))
    assert slow.answer() == "one two"


def test_what_comes_at_once_on_a_slot_is_served_at_once(worker: Worker) -> None:
    worker.settle()
    slot = worker.slots[1]
    call = encode_frame(Kind.CALL, CallHead("c", "POST", "/body", b"", []), b"x")

    slot.sock.sendall(encode_frame(Kind.CANCEL) + call + encode_frame(Kind.CANCEL) + call)

    assert [slot.answer(), slot.answer()] == ["x", "x"]


def test_a_slot_that_is_closed_ends_and_the_others_go_on(worker: Worker) -> None:
    worker.settle()
    worker.slots[2].sock.shutdown(socket.SHUT_WR)

    assert worker.slots[2].sock.recv(1) == b"", "the worker closes its end, too"
    for each in worker.slots[3:]:
        each.call("/")
    worker.slots[1].call("/slow")
    assert not worker.ended.is_set()
