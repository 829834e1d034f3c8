"""The threads of a worker with several slots: quick calls run in the one that waits for calls, and wait for none."""

import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest
from tests.waiting import LIMIT_S, until

from gpufaas_core.wire.bodies import CHUNK_BYTES, STREAM
from gpufaas_core.wire.credit import PIECE_COST, WINDOW
from gpufaas_core.wire.heads import AnswerHead, CallHead, CancelHead, EndHead, RoomHead
from gpufaas_core.wire.kinds import Kind
from gpufaas_core.wire.prefix import KIND, LANE, FrameReader, encode_frame
from gpufaas_functions.author import Context, Event
from gpufaas_functions.begun import open_counts, shared_in, taken
from gpufaas_functions.call_runner import Served
from gpufaas_functions.connection import NodeConnection
from gpufaas_functions.inbox import Shared, Work
from gpufaas_functions.memory import CpuMemory
from gpufaas_functions.pace import AGAIN
from gpufaas_functions.slot_threads import SlotThreads

SLOTS = 6


class Slot:
    """A slot, as its node sees it."""

    def __init__(self, index: int, sock: socket.socket) -> None:
        self.index = index
        self.frames: SimpleQueue[tuple[int, bytes, bytes]] = SimpleQueue()
        self._sock = sock

    def send(self, kind: int, head: msgspec.Struct | None = None, body: bytes = b"") -> None:
        self._sock.sendall(encode_frame(kind, head, body, self.index))

    def begin(self, path: str, body: bytes = b"", body_mode: int = 0) -> None:
        self.send(Kind.CALL, CallHead("c", "POST", path, b"", [], body_mode), body)

    def next(self, wanted: int) -> tuple[bytes, bytes]:
        """Return header and body of the next frame, which is of that kind."""
        kind, header, body = self.frames.get(timeout=LIMIT_S)
        assert kind == wanted, (kind, header, body)
        return header, body

    def answer(self) -> str:
        """Return the body of the answer, which is a success."""
        header, body = self.next(Kind.ANSWER)
        assert msgspec.msgpack.decode(header, type=AnswerHead).status == 200, body
        return body.decode()

    def call(self, path: str) -> str:
        self.begin(path)
        return self.answer()

    def end(self) -> str:
        """Read an answer that streams to its end, and return with what it broke off."""
        while True:
            kind, header, _ = self.frames.get(timeout=LIMIT_S)
            if kind == Kind.END:
                return msgspec.msgpack.decode(header, type=EndHead).error
            assert kind == Kind.CHUNK


class Worker:
    """A worker whose handler does what the path says, and its node. `begun` is what the node reads."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.gate = threading.Event()
        self.meet = threading.Barrier(SLOTS)
        self.slow_s = 0.0
        self.lock = threading.Lock()
        self.at_once = self.most = 0
        """Slow calls: now, and at most."""
        self.node, theirs = socket.socketpair()
        self.slots = [Slot(index, self.node) for index in range(SLOTS)]
        counts = open_counts(SLOTS)
        self.begun, self.taken = shared_in(counts, SLOTS)[0]
        served = Served("f", "cpu", self.handle, CpuMemory(SLOTS))
        self.threads = SlotThreads(served, NodeConnection(theirs), Shared(shared_in(counts, SLOTS)[0]))
        os.close(counts)
        self.main = threading.Thread(target=self.threads.serve, name="main", daemon=True)
        self.main.start()
        self.reading = threading.Thread(target=self._read, daemon=True)
        self.reading.start()

    def _read(self) -> None:
        reader = FrameReader(lanes=SLOTS)
        while data := self.node.recv(1 << 20):
            for kind, header, body in reader.feed(data):
                if kind != Kind.MEASURED:
                    self.slots[kind >> LANE].frames.put((kind & KIND, header, body))

    def handle(self, event: Event, context: Context) -> Any:  # noqa: ARG002
        match event.path:
            case "/gate":
                self.entered.release()
                assert self.gate.wait(LIMIT_S)
            case "/meet":
                self.meet.wait(LIMIT_S)
            case "/body":
                return event.text
            case "/endless":
                return (b"x" * CHUNK_BYTES for _ in itertools.count())
            case "/tokens":
                return self.tokens()
            case _ if self.slow_s:
                with self.lock:
                    self.at_once += 1
                    self.most = max(self.most, self.at_once)
                time.sleep(self.slow_s)
                with self.lock:
                    self.at_once -= 1
        return threading.current_thread().name

    def tokens(self) -> Iterator[str]:
        yield "first"
        assert self.gate.wait(LIMIT_S)
        yield "last"

    def settle(self) -> None:
        """Let the worker find out that its calls are quick."""
        until(lambda: len({slot.call("/") for slot in self.slots for _ in range(20)}) == 1, "one thread runs them all")


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.gate.set()
    made.node.shutdown(socket.SHUT_RDWR)
    made.main.join(LIMIT_S)
    assert not made.main.is_alive(), "the worker ends with its connection, whichever thread leads"
    made.reading.join(LIMIT_S)
    made.node.close()


def all_at_once(worker: Worker, path: str) -> list[str]:
    with ThreadPoolExecutor(SLOTS) as pool:
        return list(pool.map(lambda slot: slot.call(path), worker.slots))


def test_quick_calls_of_all_slots_run_in_one_thread(worker: Worker) -> None:
    assert len(set(all_at_once(worker, "/meet"))) == SLOTS, "it has a thread for each of them"

    until(lambda: len({name for _ in range(10) for name in all_at_once(worker, "/")}) == 1, "one runs all calls")


def test_as_many_slow_calls_run_beside_each_other_as_there_are_slots(worker: Worker) -> None:
    before = threading.active_count()
    for _ in range(100):
        assert len(set(all_at_once(worker, "/meet"))) == SLOTS

    assert threading.active_count() <= before + SLOTS + 1, "the threads are used again"


def test_a_handler_that_becomes_slow_is_given_threads_and_one_that_is_quick_again_needs_none(worker: Worker) -> None:
    worker.settle()
    worker.slow_s = 0.1
    until(lambda: all_at_once(worker, "/") and worker.most > SLOTS // 2, "they run beside each other")
    worker.slow_s = 0.0
    worker.settle()


def test_an_answer_does_not_wait_for_a_call_that_was_read_with_its_own_and_blocks(worker: Worker) -> None:
    worker.settle()
    quick, slow = worker.slots[:2]
    calls = [encode_frame(Kind.CALL, CallHead("c", "POST", path, b"", []), b"", slot)
             for slot, path in ((0, "/"), (1, "/gate"))]  # fmt: skip

    worker.node.sendall(b"".join(calls))

    assert quick.answer()
    worker.gate.set()
    assert slow.answer()


def test_a_call_that_was_taken_back_is_not_run(worker: Worker) -> None:
    worker.settle()
    slot, before = worker.slots[0], worker.begun[0]
    worker.taken[0] = taken(before + 2, 1)

    assert slot.call("/")
    slot.begin("/gate")
    slot.next(Kind.DROPPED)
    assert slot.call("/")

    assert worker.begun[0] - before == 3


def test_a_call_that_blocks_in_the_leader_is_left_to_its_thread(worker: Worker) -> None:
    worker.settle()
    blocked = worker.slots[: SLOTS - 1]
    for each in blocked:
        each.begin("/gate")
        assert worker.entered.acquire(timeout=LIMIT_S)
    free = worker.slots[-1]

    until(lambda: len({free.call("/") for _ in range(2 * AGAIN)}) == 1, "the one that is left")
    free.begin("/gate")
    assert worker.entered.acquire(timeout=LIMIT_S), "the last slot has a thread, too"
    worker.gate.set()
    assert len({each.answer() for each in worker.slots}) == SLOTS


def test_a_body_that_comes_slowly_holds_up_its_own_call_only(worker: Worker) -> None:
    worker.settle()
    slow, *others = worker.slots
    slow.begin("/body", b"one ", STREAM)

    for each in others:
        each.call("/")
    slow.send(Kind.BODY, None, b"two")
    slow.send(Kind.BODY_END)
    assert slow.answer() == "one two"


def test_a_reader_who_reads_nothing_stops_his_own_answer_and_no_other(worker: Worker) -> None:
    slow, *others = worker.slots
    slow.begin("/endless")
    slow.next(Kind.HEAD)
    sent = 0
    while sent < WINDOW:
        sent += len(slow.next(Kind.CHUNK)[1]) + PIECE_COST

    for each in others * 20:
        each.call("/")
    assert slow.frames.empty(), "there is no room for more of it"
    slow.send(Kind.ROOM, RoomHead(sent))
    slow.next(Kind.CHUNK)
    slow.send(Kind.CANCEL, CancelHead(0, 1))
    assert slow.end() == "cancelled"
    assert slow.call("/"), "the slot takes the next call"


@pytest.mark.parametrize("waits_for", ["room", "body"])
def test_a_call_that_waits_when_the_connection_ends_does_not_keep_the_worker(worker: Worker, waits_for: str) -> None:
    """The first call runs in the main thread, with which the worker ends, as its fixture sees."""
    slot = worker.slots[0]
    if waits_for == "body":
        slot.begin("/body", b"one", STREAM)
        until(lambda: worker.begun[0] == 1)
        return
    slot.begin("/endless")
    slot.next(Kind.HEAD)
    sent = 0
    while sent < WINDOW:
        sent += len(slot.next(Kind.CHUNK)[1]) + PIECE_COST


def test_of_many_answers_that_stream_one_is_cancelled(worker: Worker) -> None:
    first, *others, beside = worker.slots
    for each in (first, *others):
        each.begin("/tokens")
        each.next(Kind.HEAD)
        assert each.next(Kind.CHUNK)[1] == b"first"

    first.send(Kind.CANCEL, CancelHead(0, 1))
    beside.call("/")  # what was sent before is read
    worker.gate.set()

    assert first.end() == "cancelled"
    for each in others:
        assert each.next(Kind.CHUNK)[1] == b"last"
        assert each.end() == ""


def test_a_cancel_that_comes_late_is_not_for_the_next_call(worker: Worker) -> None:
    slot = worker.slots[1]
    slot.call("/")
    slot.send(Kind.CANCEL, CancelHead(0, 1))
    slot.begin("/body", b"", STREAM)
    slot.send(Kind.BODY, None, b"next")
    slot.send(Kind.BODY_END)

    assert slot.answer() == "next"


def test_what_was_begun_is_counted_before_the_handler_runs(worker: Worker) -> None:
    before = list(worker.begun)
    for each in worker.slots[:2]:
        each.begin("/gate")
        assert worker.entered.acquire(timeout=LIMIT_S)

    assert [now - then for now, then in zip(worker.begun, before, strict=True)] == [1, 1, 0, 0, 0, 0]


def test_a_thread_that_does_not_lead_any_more_leaves_the_lead_to_the_next_call_of_its_slot(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer was sent by another thread, and the next call came before this one had looked whether it leads."""
    threads = worker.threads
    worker.settle()
    until(lambda: not threads._running, "the leader has seen that the last call, which is answered, has ended")
    slot = threads.slots[0]
    mine, following = Work(slot, 1), Work(slot, 2)
    slot._works.append(mine)

    def run(_: Work) -> float:
        threads._running.remove(mine)  # as the watch does
        threads._running.append(following)
        return -1.0

    with monkeypatch.context() as patched:
        patched.setattr(threads, "run", run)
        leads = threads._run_one(mine)

    assert not leads
    assert threads._running == [following]
    threads._running.clear()


def test_a_call_that_waits_where_no_thread_can_be_started_runs_out_of_memory_and_others_go_on(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:  # noqa: ARG001 - the one of threads
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    uploads, reads, other = worker.slots[:3]
    for _ in range(2):
        uploads.begin("/body", b"one ", STREAM)
        header, body = uploads.next(Kind.ANSWER)
        assert msgspec.msgpack.decode(header, type=AnswerHead).out_of_memory, body
        uploads.send(Kind.BODY, None, b"two")
        uploads.send(Kind.BODY_END)
        reads.begin("/endless")
        reads.next(Kind.HEAD)
        assert reads.end().startswith("MemoryError")

        assert other.call("/") == "main"
        assert uploads.call("/") == "main"
