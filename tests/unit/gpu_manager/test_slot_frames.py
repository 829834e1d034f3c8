"""An author's code has the connection of its worker, and may write any bytes: only its own calls fail."""

import asyncio
from math import isfinite, nan
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.gpu_manager.world import Owner, Transport, exchange_of

from gpufaas_core.errors import BadAnswer, OutOfMemory
from gpufaas_core.wire.bodies import CHUNK_BYTES, FILE, INLINE, STREAM
from gpufaas_core.wire.credit import PIECE_COST, WINDOW
from gpufaas_core.wire.heads import (
    AnswerHead,
    AnswersHead,
    CallHead,
    CancelHead,
    DroppedHead,
    EndHead,
    FailedHead,
    MeasuredHead,
    ReadyHead,
    RoomHead,
)
from gpufaas_core.wire.kinds import KINDS, Kind
from gpufaas_core.wire.prefix import LANE, PREFIX, FrameReader, encode_frame
from gpufaas_functions.begun import UNKNOWN, no_counts, taken
from gpufaas_gpu_manager import node_call
from gpufaas_gpu_manager.exchange import Exchange
from gpufaas_gpu_manager.node_call import ABANDON, GO_AHEAD
from gpufaas_gpu_manager.worker_connection import WorkerConnection

OK = AnswerHead(200, [(b"content-type", b"text/plain")], 0.1)
READY = encode_frame(Kind.READY, ReadyHead(0, []))
MEASURED = encode_frame(Kind.MEASURED, MeasuredHead(7))

FIVE = encode_frame(Kind.HEAD, AnswerHead(200, [], length=5))
END = encode_frame(Kind.END, EndHead(0.5))


class Rig:
    """A worker that is ready, with one call in its first slot."""

    def __init__(self, *, slots: int = 1, ready: bool = True, method: str = "POST", body_mode: int = INLINE) -> None:
        self.owner, self.transport = Owner(), Transport()
        self.counts = no_counts(slots)
        self.begun = self.counts.begun
        """What the worker has begun in each slot."""
        self.connection = WorkerConnection(cast(Any, self.owner), self.counts)
        self.connection.connection_made(cast(Any, self.transport))
        self.slot = self.connection.slots[0]
        if ready:
            self.connection.data_received(READY)
        self.exchange = exchange_of("c", self.owner)
        self.exchange.arrive(CallHead("c", method, "/", b"", [], body_mode), b"")
        if ready:
            self.exchange.bind(self.slot, 0.0, True)

    def say(self, *frames: bytes) -> "Rig":
        self.connection.data_received(b"".join(frames))
        return self

    def die(self, *, begun: int | None = None) -> None:
        """The worker dies. :param begun: calls and batches that it has begun in its first slot"""
        if begun is not None:
            self.begun[0] = begun
        self.connection.connection_lost(None)
        self.connection.close()

    def bind(self, slot: int, name: str, body_mode: int = INLINE, buffer: int = 1, *, sent: bool = True) -> Exchange:
        """Give another call to *slot*. :param sent: this turn of the loop ends"""
        exchange = exchange_of(name, self.owner)
        exchange.arrive(CallHead(name, "POST", "/", b"", [], body_mode), b"")
        exchange.bind(self.connection.slots[slot], 0.0, buffer)
        if sent:
            self.connection.wire.flush()
        return exchange


async def test_an_honest_answer_goes_through() -> None:
    rig = Rig().say(encode_frame(Kind.ANSWER, OK, b"hello"))

    assert rig.exchange.take() == (OK, b"hello", True)
    assert (rig.owner.done, rig.owner.broken) == ([(0.1, 0, True)], "")


@pytest.mark.parametrize("caller_first", [True, False])
async def test_the_engine_learns_of_an_answer_first_where_others_may_wait_for_the_device(caller_first: bool) -> None:
    rig = Rig()
    rig.owner.caller_first = caller_first
    told: list[int] = []
    rig.exchange.resume = lambda: told.append(len(rig.owner.done))

    rig.say(encode_frame(Kind.ANSWER, OK, b"hello"))

    assert told == [0 if caller_first else 1]
    assert rig.exchange.take() == (OK, b"hello", True)
    assert rig.owner.done == [(0.1, 0, True)]


def slots_sent(transport: Transport) -> list[int]:
    """Return the slots of the frames that were sent, and forget them."""
    sent, transport.written, transport.writes = transport.written, b"", 0
    return [kind >> LANE for kind, _, _ in FrameReader(lanes=16).feed(sent)]


async def test_calls_for_a_busy_worker_go_out_together_at_the_end_of_the_turn() -> None:
    rig = Rig(slots=3)
    assert slots_sent(rig.transport) == [0], "it waited for this one"

    for slot in (1, 2):
        rig.bind(slot, f"c{slot}", sent=False)
    assert rig.transport.writes == 0
    await asyncio.sleep(0)
    assert rig.transport.writes == 1
    assert slots_sent(rig.transport) == [1, 2]

    rig.say(*(encode_frame(Kind.ANSWER, OK, b"", slot) for slot in range(3)))
    rig.bind(1, "alone", sent=False)
    assert slots_sent(rig.transport) == [1]


async def test_a_call_for_a_worker_with_one_slot_goes_out_at_once() -> None:
    rig = Rig()
    rig.begun[0] = 1
    rig.transport.written = b""
    behind = exchange_of("behind", rig.owner)
    behind.arrive(CallHead("behind", "POST", "/", b"", []), b"")

    behind.bind(rig.slot, 0.0, 1, GO_AHEAD)

    assert rig.transport.written, "no other call could go with it"


async def test_no_more_than_some_calls_wait_for_the_end_of_a_turn() -> None:
    rig = Rig(slots=12)
    for slot in range(1, 12):
        rig.bind(slot, f"c{slot}", sent=False)

    assert slots_sent(rig.transport) == list(range(9))


async def test_a_frame_that_is_sent_at_once_overtakes_no_call() -> None:
    rig = Rig(slots=2)
    held = rig.bind(1, "held", sent=False)
    rig.connection.slots[1].cancel(held)

    assert slots_sent(rig.transport) == [0, 1, 1]


async def test_a_call_that_was_held_when_its_worker_died_is_placed_again() -> None:
    rig = Rig(slots=2)
    held = rig.bind(1, "held", sent=False)
    rig.die(begun=1)

    assert held.untouched
    assert not rig.exchange.untouched


async def test_a_caller_who_cannot_be_told_keeps_no_slot() -> None:
    rig = Rig()
    rig.owner.caller_first = True

    def broken() -> None:
        raise RuntimeError("of the front")

    rig.exchange.resume = broken
    with pytest.raises(RuntimeError):
        rig.say(encode_frame(Kind.ANSWER, OK, b"hello"))

    assert rig.owner.done == [(0.1, 0, True)]


async def test_pieces_that_come_at_once_go_on_as_one() -> None:
    pieces = [encode_frame(Kind.CHUNK, None, b"%d" % (number % 10)) for number in range(1000)]
    rig = Rig().say(encode_frame(Kind.HEAD, OK), *pieces, encode_frame(Kind.END, EndHead(0.5)))

    rig.exchange.take()
    assert rig.exchange.take() == b"0123456789" * 100
    assert rig.exchange.take() is None
    assert rig.exchange.end == EndHead(0.5)


@pytest.mark.parametrize(
    "head",
    [
        AnswerHead(99, []),
        AnswerHead(600, []),
        AnswerHead(200, [(b"x", b"\r\n")]),
        AnswerHead(200, [(b"x", b"y" * 70_000)]),
    ],
)
@pytest.mark.parametrize("kind", [Kind.ANSWER, Kind.HEAD])
async def test_a_head_that_no_client_can_be_given_costs_that_call_and_no_worker(head: AnswerHead, kind: int) -> None:
    rig = Rig().say(encode_frame(kind, head, b""))
    if kind == Kind.HEAD:
        rig.say(encode_frame(Kind.CHUNK, None, b"more"), encode_frame(Kind.END, EndHead(0.1)))

    assert rig.exchange.take() is None
    assert isinstance(rig.exchange.error, BadAnswer)
    assert rig.owner.broken == ""
    assert len(rig.owner.done) == 1
    assert rig.exchange.abandoned or not rig.owner.done[0][2]  # nothing is learnt from it


@pytest.mark.parametrize(
    "frames",
    [
        [encode_frame(Kind.ANSWER, AnswerHead(200, [], nan))],
        [encode_frame(Kind.ANSWER, AnswerHead(200, [], -1.0))],
        [encode_frame(Kind.ANSWER, AnswerHead(200, [], 1e300))],
        [encode_frame(Kind.ANSWER, AnswerHead(200, [], 0.1, -5))],
        [encode_frame(Kind.ANSWER, AnswerHead(200, [], 0.1, 1 << 62))],
        [encode_frame(Kind.HEAD, OK), encode_frame(Kind.END, EndHead(nan))],
        [encode_frame(Kind.HEAD, OK), encode_frame(Kind.HEAD, OK)],
        [encode_frame(Kind.HEAD, OK), encode_frame(Kind.ANSWER, OK)],
        [encode_frame(Kind.CHUNK, None, b"early")],
        [encode_frame(Kind.END, EndHead(0.1))],
        [READY],
        [encode_frame(Kind.FAILED, FailedHead("", ""))],
        [encode_frame(Kind.CALL, None)],
        [PREFIX.pack(77, 0, 0)],
        [encode_frame(Kind.ANSWER, None)],
        [encode_frame(Kind.CHUNK, None, b"x" * 300_000)],
        [PREFIX.pack(Kind.ANSWER, 50_000, 0) + b"\x91" * 50_000],
        [b"GET / HTTP/1.1\r\n\r\n"],
    ],
)
async def test_frames_that_our_runner_never_sends_end_the_worker(frames: list[bytes]) -> None:
    rig = Rig().say(*frames)

    assert rig.owner.broken.startswith("it sent what it must not: ")
    assert rig.transport.closed
    assert rig.owner.done == []
    rig.say(encode_frame(Kind.ANSWER, OK))  # whatever comes after is not looked at
    assert rig.owner.done == []


async def test_what_a_call_needed_comes_once_and_after_its_answer() -> None:
    whole = Rig().say(encode_frame(Kind.ANSWER, OK), MEASURED)
    streamed = Rig().say(encode_frame(Kind.HEAD, OK), encode_frame(Kind.END, EndHead(0.1)), MEASURED)

    for rig in (whole, streamed):
        assert len(rig.owner.done) == 1
        assert (rig.owner.measured, rig.owner.broken) == ([7], "")
        assert rig.say(MEASURED).owner.broken
        assert rig.owner.measured == [7]


async def test_each_thread_of_a_worker_of_two_slots_may_say_late_what_a_call_needed() -> None:
    """There are three: one serves a slot again while the one that served it before measures yet."""
    rig = Rig(slots=2)
    for number in range(5):
        rig.say(encode_frame(Kind.ANSWER, OK))
        rig.bind(0, f"c{number}")

    assert rig.say(MEASURED, MEASURED, MEASURED).owner.broken == ""
    assert rig.owner.measured == [7, 7, 7]
    assert rig.say(MEASURED).owner.broken


@pytest.mark.parametrize("before", [(), (encode_frame(Kind.HEAD, OK),)])
async def test_what_a_call_needed_does_not_come_before_its_end(before: tuple[bytes, ...]) -> None:
    rig = Rig().say(*before, MEASURED)

    assert rig.owner.broken
    assert rig.owner.measured == []


@pytest.mark.parametrize("peak", [-1, 1 << 62, None])
async def test_an_impossible_need_ends_the_worker(peak: int | None) -> None:
    head = None if peak is None else MeasuredHead(peak)
    rig = Rig().say(encode_frame(Kind.ANSWER, OK), encode_frame(Kind.MEASURED, head))

    assert rig.owner.broken
    assert rig.owner.measured == []


async def test_a_load_is_told_before_all_else_and_as_it_can_have_been() -> None:
    assert Rig(ready=False).say(encode_frame(Kind.ANSWER, OK)).owner.broken
    assert Rig(ready=False).say(encode_frame(Kind.READY, ReadyHead(-1, []))).owner.spoken == []


class Batch(Rig):
    """A slot with a batch of three calls."""

    def __init__(self, *methods: str) -> None:
        super().__init__()
        self.say(encode_frame(Kind.ANSWER, OK))
        self.owner.done.clear()
        self.transport.written, self.transport.writes = b"", 0
        self.calls = [exchange_of(f"c{place}", self.owner) for place in range(3)]
        self.slot.begin_batch(3)
        for place, each in enumerate(self.calls):
            each.arrive(CallHead(f"c{place}", (*methods, "", "", "")[place] or "POST", "/", b"", []), b"%d" % place)
            each.bind(self.slot, 0.0, True)


def answers(*given: tuple[int, int, AnswerHead], body: bytes = b"") -> bytes:
    return encode_frame(Kind.ANSWERS, AnswersHead(list(given)), body)


async def test_a_batch_goes_out_in_the_order_of_its_calls() -> None:
    transport = Batch().transport
    sent = list(FrameReader().feed(transport.written))

    assert transport.writes == 1
    assert [kind for kind, _, _ in sent] == [Kind.BATCH, Kind.CALL, Kind.CALL, Kind.CALL]
    assert [body for _, _, body in sent[1:]] == [b"0", b"1", b"2"]


async def test_each_call_of_a_batch_gets_its_answer_after_all_are_reported() -> None:
    rig = Batch()
    heads = [AnswerHead(200 + place, [], 0.1, failed=place == 1) for place in range(3)]
    reported: list[int] = []
    for each in rig.calls:
        each.watcher = lambda: reported.append(len(rig.owner.done))

    rig.say(answers((2, 3, heads[2]), (0, 0, heads[0]), body=b"two"), answers((1, 3, heads[1]), body=b"one"))

    assert [each.take() for each in rig.calls] == [(heads[0], b"", True), (heads[1], b"one", True),
                                                   (heads[2], b"two", True)]  # fmt: skip
    assert [ok for _, _, ok in rig.owner.done] == [True, True, False]
    assert reported == [2, 2, 3], "the engine has the next calls before a caller is answered"
    assert rig.owner.broken == ""


async def test_large_answers_of_a_batch_stream_after_the_small_ones() -> None:
    rig = Batch("", "HEAD")
    head = AnswerHead(200, [], length=5)

    rig.say(answers((0, 1, OK), body=b"x"), encode_frame(Kind.HEAD, head), encode_frame(Kind.END, EndHead(0.1)))
    rig.say(encode_frame(Kind.HEAD, head), encode_frame(Kind.CHUNK, None, b"hello"))
    assert len(rig.owner.done) == 2, "it holds its slot until its end"
    rig.say(encode_frame(Kind.END, EndHead(0.1)), encode_frame(Kind.MEASURED, MeasuredHead(7)))

    assert (len(rig.owner.done), rig.owner.measured, rig.owner.broken) == (3, [7], "")
    assert [each.take()[0].length for each in rig.calls[1:]] == [5, 5]
    assert rig.calls[2].take() == b"hello"


async def test_a_worker_that_cancels_a_call_by_itself_has_broken_its_answer_off() -> None:
    rig = Batch()
    rig.calls[1].step(ABANDON)
    for _ in range(2):
        rig.say(encode_frame(Kind.HEAD, OK), encode_frame(Kind.END, EndHead(0.1, error="cancelled")))

    assert str(rig.calls[0].error) == "the function's answer broke off: cancelled"
    assert rig.calls[1].error is None


async def test_of_a_batch_only_an_answer_that_streams_is_cancelled() -> None:
    rig = Batch()
    rig.transport.written = b""
    for each in (rig.calls[0], rig.calls[2]):
        each.step(ABANDON)
        rig.slot.cancel(each)
    assert rig.transport.written == b"", "the handler goes on, for the others"

    rig.say(answers((0, 1, OK), (1, 1, OK), body=b"xy"), encode_frame(Kind.HEAD, OK))

    assert rig.transport.written == encode_frame(Kind.CANCEL, CancelHead(2, 2))
    assert [each.take() for each in rig.calls] == [None, (OK, b"y", True), None]


async def test_a_batch_whose_worker_died_before_it_had_begun_it_can_be_placed_again() -> None:
    waits, runs, answered = Batch(), Batch(), Batch().say(answers((0, 1, OK), body=b"x"))

    waits.die(begun=1)
    runs.die(begun=2)
    answered.die(begun=2)

    assert [each.untouched for each in waits.calls] == [True, True, True]
    assert not any(each.untouched for each in (*runs.calls, *answered.calls))


def ahead_of(rig: Batch) -> list[Exchange]:
    """Send two calls ahead."""
    calls = [exchange_of(f"n{place}", rig.owner) for place in range(2)]
    rig.slot.begin_batch(2)
    for each in calls:
        each.arrive(CallHead(each.grant.call, "POST", "/", b"", []), b"")
        each.bind(rig.slot, 0.0, 1, GO_AHEAD)
    return calls


async def test_answers_are_those_of_the_batch_before_until_all_of_it_are_there() -> None:
    rig = Batch()
    following = ahead_of(rig)
    assert [kind for kind, _, _ in FrameReader().feed(rig.transport.written)][4:] == [Kind.BATCH, Kind.CALL, Kind.CALL]

    rig.say(answers((0, 1, OK), (2, 1, OK), body=b"ac"))
    rig.say(FIVE, encode_frame(Kind.CHUNK, None, b"hello"), END)
    rig.say(answers((1, 1, OK), (0, 1, OK), body=b"yx"))

    assert rig.owner.broken == ""
    assert [each.take() for each in (rig.calls[0], rig.calls[2])] == [(OK, b"a", True), (OK, b"c", True)]
    assert [each.take() for each in following] == [(OK, b"x", True), (OK, b"y", True)]
    assert rig.say(answers((0, 0, OK))).owner.broken, "it has no call any more"


@pytest.mark.parametrize(("begun", "runs", "follows"), [(1, True, True), (2, False, True), (3, False, False)])
async def test_what_a_dead_worker_had_not_begun_can_be_placed_again(begun: int, runs: bool, follows: bool) -> None:
    rig = Batch()
    following = ahead_of(rig)

    rig.die(begun=begun)

    assert {each.untouched for each in rig.calls} == {runs}
    assert {each.untouched for each in following} == {follows}


@pytest.mark.parametrize("begun", [False, True])
async def test_a_batch_that_followed_can_be_placed_again_until_it_is_begun(begun: bool) -> None:
    rig = Batch()
    following = ahead_of(rig)
    rig.say(answers(*((place, 0, OK) for place in range(3))))

    rig.die(begun=2 + begun)

    assert {each.untouched for each in following} == {not begun}


async def test_behind_a_batch_that_went_ahead_cancel_says_which_it_means() -> None:
    rig = Batch()
    ahead_of(rig)
    rig.say(answers((0, 1, OK), (1, 1, OK), body=b"xy"), FIVE)
    rig.transport.written = b""

    rig.calls[2].step(ABANDON)
    rig.slot.cancel(rig.calls[2])

    assert rig.transport.written == encode_frame(Kind.CANCEL, CancelHead(2, 2))


async def test_what_is_no_answer_costs_its_call_and_not_the_batch() -> None:
    rig = Batch().say(answers((0, 0, AnswerHead(99, [])), (1, 0, AnswerHead(500, [], 0.1, 0, True, True)), (2, 0, OK)))

    assert isinstance(rig.calls[0].error, BadAnswer)
    assert isinstance(rig.calls[1].error, OutOfMemory)
    assert rig.calls[2].take() == (OK, b"", True)
    assert [ok for _, _, ok in rig.owner.done] == [False, False, True]


@pytest.mark.parametrize(
    "frames",
    [
        [answers((3, 0, OK))],
        [answers((-1, 0, OK))],
        [answers((0, 0, OK), (0, 0, OK))],
        [answers((0, 0, OK)), answers((0, 0, OK))],
        [answers((0, 2, OK), body=b"x")],
        [answers((0, -1, OK), (1, 2, OK), body=b"x")],
        [answers((0, 1, OK), body=b"xy")],
        [answers((0, 0, AnswerHead(200, [], nan)))],
        [encode_frame(Kind.ANSWERS, OK)],
        [encode_frame(Kind.ANSWER, OK)],
        [encode_frame(Kind.CHUNK, None, b"x")],
        [encode_frame(Kind.HEAD, OK), answers((1, 0, OK))],
        [answers(*((place, 0, OK) for place in range(3))), encode_frame(Kind.HEAD, OK)],
    ],
)
async def test_answers_that_are_not_those_of_the_batch_end_the_worker(frames: list[bytes]) -> None:
    rig = Batch().say(*frames)

    assert rig.owner.broken.startswith("it sent what it must not: ")
    assert rig.transport.closed
    assert len(rig.owner.done) in (0, 1, 3)


async def test_a_call_alone_has_no_answers_of_a_batch() -> None:
    assert Rig().say(answers((0, 0, OK))).owner.broken


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        ([FIVE, encode_frame(Kind.CHUNK, None, b"123456")], "longer than its Content-Length"),
        ([FIVE, encode_frame(Kind.CHUNK, None, b"1234"), END], "shorter than its Content-Length"),
        ([encode_frame(Kind.HEAD, OK), encode_frame(Kind.CHUNK)], "an empty piece"),
    ],
)
async def test_a_body_that_is_not_what_its_head_says_ends_its_worker(frames: list[bytes], said: str) -> None:
    rig = Rig().say(*frames)

    assert said in rig.owner.broken
    assert rig.exchange.end is None


async def test_an_answer_that_broke_off_and_one_to_head_may_be_shorter() -> None:
    broke_off = Rig().say(FIVE, encode_frame(Kind.END, EndHead(0.5, error="ValueError")))
    to_head = Rig(method="HEAD").say(FIVE, END)

    assert (broke_off.owner.broken, to_head.owner.broken) == ("", "")


async def test_a_slot_says_that_its_other_end_is_closed_but_not_when_we_closed_it() -> None:
    theirs, ours = Rig(), Rig()
    ours.connection.close()

    for each in (theirs, ours):
        each.connection.connection_lost(None)

    assert (theirs.owner.closed, ours.owner.closed) == (1, 0)


@pytest.mark.parametrize("body_mode", [INLINE, FILE])
async def test_a_call_whose_worker_died_before_it_had_begun_it_can_be_placed_again(body_mode: int) -> None:
    waits, runs, answering = (Rig(body_mode=body_mode) for _ in range(3))
    answering.say(encode_frame(Kind.HEAD, OK))

    waits.die(begun=0)
    runs.die(begun=1)
    answering.die(begun=0)  # it lies

    assert (waits.exchange.untouched, runs.exchange.untouched, answering.exchange.untouched) == (True, False, False)


async def test_a_call_with_a_body_that_streams_cannot_be_placed_again() -> None:
    rig = Rig(body_mode=STREAM)

    rig.die(begun=0)

    assert not rig.exchange.untouched


@pytest.mark.parametrize("begun", [5, 0xFFFFFFFF, 1 << 63, UNKNOWN])
async def test_a_count_that_cannot_be_or_is_not_there_is_taken_for_one_of_calls_that_were_begun(begun: int) -> None:
    rig = Rig()
    rig.say(encode_frame(Kind.ANSWER, OK))
    later = rig.bind(0, "later")

    rig.die(begun=begun)

    assert not later.untouched


async def test_of_many_calls_those_are_placed_again_that_a_dead_worker_had_not_begun() -> None:
    rig = Rig(slots=6)
    calls = [rig.exchange, *(rig.bind(slot, f"c{slot}") for slot in range(1, 6))]
    rig.begun[:] = [1, 0, 1, 0, 0, 1]

    rig.die()

    assert [each.untouched for each in calls] == [False, True, False, True, True, False]


# --- many calls on one connection ---


async def test_a_frame_of_a_slot_that_is_not_there_ends_the_worker() -> None:
    assert Rig(slots=2).say(encode_frame(Kind.ANSWER, OK, b"", 2)).owner.broken
    assert Rig(slots=2).say(encode_frame(Kind.ANSWER, OK, b"", 1)).owner.broken, "it has no call"


async def test_each_answer_is_that_of_the_call_in_its_slot() -> None:
    rig = Rig(slots=3)
    others = [rig.bind(slot, f"c{slot}") for slot in (1, 2)]

    rig.say(
        encode_frame(Kind.HEAD, OK, b"", 2), encode_frame(Kind.ANSWER, OK, b"first", 0),
        encode_frame(Kind.CHUNK, None, b"third", 2), encode_frame(Kind.ANSWER, OK, b"second", 1),
        encode_frame(Kind.END, EndHead(0.1), b"", 2),
    )  # fmt: skip

    assert rig.exchange.take() == (OK, b"first", True)
    assert others[0].take() == (OK, b"second", True)
    assert [others[1].take() for _ in range(3)] == [(OK, b"", False), b"third", None]
    assert rig.owner.broken == ""


def chunks_until_no_room(rig: Rig, slot: int) -> int:
    """Send pieces of an answer of *slot* as our runner does while nobody reads; return their bytes."""
    sent = 0
    while sent < WINDOW:
        rig.say(encode_frame(Kind.CHUNK, None, b"x" * CHUNK_BYTES, slot))
        sent += CHUNK_BYTES + PIECE_COST
    return sent


async def test_a_slow_reader_stops_its_own_answer_and_no_other() -> None:
    rig = Rig(slots=2)
    slow = rig.bind(1, "slow", buffer=CHUNK_BYTES)
    rig.say(encode_frame(Kind.HEAD, OK, b"", 1))
    rig.transport.written = b""
    sent = chunks_until_no_room(rig, 1)

    assert rig.transport.written == b"", "nobody has read anything"
    rig.say(encode_frame(Kind.ANSWER, OK, b"beside"))
    assert rig.exchange.take() == (OK, b"beside", True)
    while slow.take() is not None:
        pass
    ((kind, header, _),) = FrameReader(lanes=2).feed(rig.transport.written)
    assert kind == Kind.ROOM | 1 << LANE
    assert msgspec.msgpack.decode(header, type=RoomHead).room == sent, "all of it was read"


async def test_a_worker_that_sends_more_than_there_is_room_for_is_ended() -> None:
    rig = Rig(slots=2)
    rig.bind(1, "slow", buffer=CHUNK_BYTES)
    rig.say(encode_frame(Kind.HEAD, OK, b"", 1))
    chunks_until_no_room(rig, 1)
    assert not rig.owner.broken

    rig.say(encode_frame(Kind.CHUNK, None, b"x", 1))

    assert "no room" in rig.owner.broken


async def test_a_body_is_sent_as_far_as_its_call_has_room_for_it() -> None:
    rig = Rig(body_mode=STREAM)
    sending = asyncio.ensure_future(_send_pieces(rig.exchange, 4))
    await asyncio.sleep(0.01)
    sent = sum(kind == Kind.BODY for kind, _, _ in FrameReader().feed(rig.transport.written))
    assert sent == WINDOW // (CHUNK_BYTES + PIECE_COST) + 1

    rig.say(encode_frame(Kind.ROOM, RoomHead(sent * (CHUNK_BYTES + PIECE_COST))))
    await sending

    assert rig.owner.broken == ""
    assert rig.say(encode_frame(Kind.ROOM, RoomHead(WINDOW * 2))).owner.broken, "it has not been sent so much"


@pytest.mark.parametrize("end", ["answer", "cancel", "die"])
async def test_who_waits_to_send_a_body_goes_on_when_the_call_ends(end: str) -> None:
    rig = Rig(body_mode=STREAM)
    sending = asyncio.ensure_future(_send_pieces(rig.exchange, 4))
    await asyncio.sleep(0.01)
    assert not sending.done()

    if end == "answer":
        rig.say(encode_frame(Kind.ANSWER, OK))
    elif end == "cancel":
        rig.exchange.step(ABANDON)
        rig.slot.cancel(rig.exchange)
    else:
        rig.die()

    async with asyncio.timeout(20):
        await sending


async def test_who_waits_to_send_a_body_sends_nothing_of_it_to_the_next_call_of_its_slot() -> None:
    rig = Rig(body_mode=STREAM)
    sending = asyncio.ensure_future(_send_pieces(rig.exchange, 4))
    await asyncio.sleep(0.01)
    rig.transport.written = b""

    rig.say(encode_frame(Kind.ANSWER, OK))
    rig.exchange.step(node_call.END)
    following = rig.bind(0, "next", STREAM)  # before the sender has looked
    async with asyncio.timeout(20):
        await sending
    await following.send_body(b"its own")

    sent = [body for kind, _, body in FrameReader().feed(rig.transport.written) if kind == Kind.BODY]
    assert sent == [b"its own"]


async def _send_pieces(exchange: Exchange, count: int) -> None:
    for _ in range(count):
        await exchange.send_body(b"x" * CHUNK_BYTES)


async def test_a_sign_of_life_comes_only_when_it_is_asked_for() -> None:
    asked, unasked = Rig(), Rig()
    asked.connection.wire.ping()
    assert asked.transport.written.endswith(encode_frame(Kind.PING))

    for each in (asked, unasked):
        each.say(encode_frame(Kind.PONG))

    assert (asked.connection.wire.pings, asked.owner.broken) == (0, "")
    assert unasked.owner.broken
    asked.say(encode_frame(Kind.ANSWER, OK, b"hello"))
    assert asked.exchange.take() == (OK, b"hello", True), "its call went on"


# --- whatever comes ---

FLOATS = st.floats() | st.sampled_from([0.0, 0.5, -0.0])
INTS = st.integers(-(1 << 63), (1 << 64) - 1) | st.sampled_from([0, 200, 404, 1 << 20])
HEADERS = st.lists(st.tuples(st.binary(max_size=5) | st.just(b"x-a"), st.binary(max_size=5)), max_size=3)
HEADS = (
    st.builds(AnswerHead, INTS, HEADERS, FLOATS, INTS, st.booleans(), st.booleans(), INTS)
    | st.builds(EndHead, FLOATS, INTS, st.text(max_size=5), st.booleans())
    | st.builds(ReadyHead, INTS, st.lists(st.tuples(st.text(max_size=5), FLOATS), max_size=3), INTS)
    | st.builds(MeasuredHead, INTS)
    | st.builds(FailedHead, st.text(max_size=5), st.text(max_size=5), st.booleans())
    | st.none() | st.just(OK) | INTS | st.text(max_size=3)
)  # fmt: skip
FRAMES = st.builds(
    encode_frame,
    st.sampled_from([Kind.HEAD, Kind.CHUNK, Kind.END, Kind.ANSWER, *sorted(KINDS)]) | st.integers(0, 255),
    HEADS,
    st.binary(max_size=20),
)


@given(
    st.lists(FRAMES | st.binary(max_size=40), max_size=6),
    st.lists(st.tuples(INTS, st.integers(0, 255)), max_size=3),
    st.integers(1, 64),
    st.booleans(),
)
def test_no_bytes_raise_or_are_believed(
    frames: list[bytes], flips: list[tuple[int, int]], cut: int, ready: bool
) -> None:
    stream = bytearray(b"".join(frames))
    for at, byte in flips:
        if stream:
            stream[at % len(stream)] = byte

    async def receive() -> Rig:
        rig = Rig(ready=ready)
        for at in range(0, len(stream), cut):
            rig.connection.data_received(bytes(stream[at : at + cut]))
        rig.die()
        return rig

    rig = asyncio.run(receive())

    assert len(rig.owner.done) <= 1
    for run_s, peak, _ in rig.owner.done:
        assert isfinite(run_s)
        assert run_s >= 0
        assert peak >= 0
    assert all(peak >= 0 for peak in rig.owner.measured)
    if rig.owner.broken:
        assert rig.transport.closed, "its worker is ended, and with it the call"
    first = rig.exchange.take()
    if isinstance(first, tuple):
        assert 200 <= first[0].status <= 599
        assert not any(b"\n" in value for _, value in first[0].headers)


# --- a call ahead of the one that runs ---


def dropped(number: int) -> bytes:
    return encode_frame(Kind.DROPPED, DroppedHead(number))


class Ahead(Rig):
    """A worker that runs a call, and has another one behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.begun[0] = 1
        self.behind = exchange_of("behind", self.owner)
        self.behind.arrive(CallHead("behind", "POST", "/", b"", []), b"")
        assert self.slot.can_wait(self.behind)
        self.behind.bind(self.slot, 0.0, 1, GO_AHEAD)
        self.connection.wire.flush()
        self.transport.written = b""


async def test_a_call_that_went_ahead_gets_the_answer_after_that_of_the_one_before() -> None:
    rig = Ahead()

    rig.say(encode_frame(Kind.HEAD, OK), encode_frame(Kind.CHUNK, None, b"first"), END)
    rig.say(encode_frame(Kind.ANSWER, OK, b"second"), MEASURED)

    assert [rig.exchange.take() for _ in range(2)] == [(OK, b"", False), b"first"]
    assert rig.behind.take() == (OK, b"second", True)
    assert (len(rig.owner.done), rig.owner.broken) == (2, "")
    assert rig.say(encode_frame(Kind.ANSWER, OK)).owner.broken, "it has no call any more"


async def test_the_caller_has_an_answer_first_where_the_device_runs_the_next_call_already() -> None:
    rig = Ahead()
    told: list[int] = []
    rig.exchange.resume = rig.behind.resume = lambda: told.append(len(rig.owner.done))

    rig.say(encode_frame(Kind.ANSWER, OK))
    rig.say(encode_frame(Kind.ANSWER, OK))

    assert told == [0, 2], "behind the second one there was none"
    assert len(rig.owner.done) == 2


@pytest.mark.parametrize("runs", [False, True])
async def test_cancel_names_the_call_that_runs(runs: bool) -> None:
    rig = Ahead()
    if not runs:
        rig.say(encode_frame(Kind.ANSWER, OK))

    rig.slot.cancel(rig.exchange)
    rig.slot.cancel(rig.behind)

    assert rig.transport.written == encode_frame(Kind.CANCEL, CancelHead(0, 1 if runs else 2))


async def test_a_call_that_begins_after_its_caller_has_left_is_cancelled() -> None:
    rig = Ahead()
    rig.behind.step(ABANDON)

    rig.say(encode_frame(Kind.ANSWER, OK))

    assert rig.transport.written == encode_frame(Kind.CANCEL, CancelHead(0, 2))


async def test_a_call_whose_body_streams_is_not_taken_back_as_its_parts_are_with_the_worker_alone() -> None:
    rig = Rig(body_mode=STREAM)
    rig.begun[0] = 0

    assert not rig.slot.mark(all_of_it=True)
    assert not rig.slot.take_back()
    assert rig.slot.turns.busy


async def test_what_the_worker_had_not_begun_when_it_was_marked_is_the_node_s_again() -> None:
    rig = Ahead()
    assert rig.slot.mark()
    assert rig.counts.taken == [taken(2, 1)]

    assert rig.slot.take_back()
    assert not rig.slot.take_back(), "once"
    rig.say(encode_frame(Kind.ANSWER, OK))
    later = rig.bind(0, "later")
    rig.say(dropped(2), encode_frame(Kind.ANSWER, OK, b"later"))

    assert (rig.owner.drops, rig.owner.broken, rig.connection.wire.running) == (0, "", 0)
    assert later.take() == (OK, b"later", True)
    assert not rig.slot.turns.marked


async def test_what_the_worker_had_begun_when_it_was_marked_runs() -> None:
    rig = Ahead()
    rig.slot.mark()
    rig.begun[0] = 2

    assert not rig.slot.take_back()
    rig.say(encode_frame(Kind.ANSWER, OK))
    assert rig.slot.turns.marked
    rig.say(encode_frame(Kind.ANSWER, OK, b"ran"))

    assert rig.behind.take() == (OK, b"ran", True)
    assert not rig.slot.turns.marked
    assert rig.say(dropped(2)).owner.broken


async def test_what_the_worker_says_it_has_dropped_is_no_call_of_the_slot_any_more() -> None:
    rig = Ahead()
    rig.slot.mark()
    rig.begun[0] = 2  # that it begins is counted before it finds the mark

    assert not rig.slot.take_back()
    rig.say(encode_frame(Kind.ANSWER, OK), dropped(2))

    assert (rig.owner.drops, rig.owner.broken, rig.slot.turns.busy, rig.connection.wire.running) == (1, "", False, 0)
    assert rig.say(dropped(2)).owner.broken, "once"


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("marked", [False, True])
async def test_a_worker_that_drops_what_was_not_marked_is_ended(number: int, marked: bool) -> None:
    rig = Ahead()
    if marked:
        rig.slot.mark()

    assert rig.say(dropped(number)).owner.broken


@pytest.mark.parametrize("number", [0, 1])
async def test_a_worker_cannot_mark_a_call_itself(number: int) -> None:
    rig = Ahead()
    rig.slot.mark()
    rig.counts.taken[0] = number  # the worker can write there

    assert rig.say(dropped(number)).owner.broken
    assert rig.owner.drops == 0, "what runs is not let go"


async def test_a_worker_that_drops_a_call_before_it_has_answered_the_one_that_runs_is_ended() -> None:
    rig = Ahead()
    rig.slot.mark()

    assert rig.say(dropped(2)).owner.broken
    assert rig.owner.drops == 0


async def test_a_worker_that_drops_what_it_has_answered_in_part_is_ended() -> None:
    rig = Ahead()
    rig.slot.mark()
    rig.say(encode_frame(Kind.ANSWER, OK), encode_frame(Kind.HEAD, OK))

    assert rig.say(dropped(2)).owner.broken


@pytest.mark.parametrize(("begun", "untouched"), [(0, (True, True)), (1, (False, True)), (2, (False, False))])
@pytest.mark.parametrize("marked", [False, True])
async def test_a_call_behind_that_of_a_dead_worker_can_be_placed_again_unless_it_was_begun(
    begun: int, untouched: tuple[bool, bool], marked: bool
) -> None:
    rig = Ahead()
    if marked:
        rig.slot.mark()

    rig.die(begun=begun)

    assert (rig.exchange.untouched, rig.behind.untouched) == untouched


@pytest.mark.parametrize("begun", [1, 2])
async def test_what_was_taken_back_does_not_change_what_a_dead_worker_had_begun(begun: int) -> None:
    runs, later = Ahead(), Ahead()
    for rig in (runs, later):
        rig.slot.mark()
        assert rig.slot.take_back()
    runs.die(begun=1)
    assert not runs.exchange.untouched

    later.say(encode_frame(Kind.ANSWER, OK))
    following = later.bind(0, "following")
    later.die(begun=begun)

    assert following.untouched


async def test_all_that_a_silent_worker_had_not_begun_is_the_node_s_again() -> None:
    rig = Ahead()
    rig.begun[0] = 0
    assert rig.slot.turns.unbegun
    assert rig.slot.mark(all_of_it=True)
    assert rig.counts.taken == [taken(1, 2)]
    assert not rig.slot.mark(all_of_it=True), "once"

    assert rig.slot.take_back() == [rig.exchange, rig.behind]
    assert not (rig.slot.turns.busy)
    assert not (rig.slot.turns.unbegun)
    assert not (rig.connection.wire.running)
    later = rig.bind(0, "later")
    rig.say(dropped(1), dropped(2), encode_frame(Kind.ANSWER, OK, b"later"))

    assert (rig.owner.drops, rig.owner.broken, bool(rig.slot.turns.marked)) == (0, "", False)
    assert later.take() == (OK, b"later", True)


async def test_of_two_the_first_may_be_marked_after_the_second_was_taken_back() -> None:
    rig = Ahead()
    rig.begun[0] = 0
    assert rig.slot.mark()
    assert rig.slot.take_back() == [rig.behind]

    assert rig.slot.mark(all_of_it=True)
    assert rig.counts.taken == [taken(1, 2)], "the second one is dropped yet"
    assert rig.slot.take_back() == [rig.exchange]
    assert rig.say(dropped(1), dropped(2)).owner.broken == ""


async def test_a_worker_that_goes_on_before_the_node_has_looked_runs_what_it_had_begun_and_drops_the_rest() -> None:
    rig = Ahead()
    rig.begun[0] = 0
    rig.slot.mark(all_of_it=True)
    rig.begun[0] = 1

    assert rig.slot.take_back() == [rig.behind]
    rig.say(encode_frame(Kind.ANSWER, OK, b"ran"), dropped(2))

    assert rig.exchange.take() == (OK, b"ran", True)
    assert (rig.owner.drops, rig.owner.broken, rig.slot.turns.busy, bool(rig.slot.turns.marked)) == (
        0,
        "",
        False,
        False,
    )


async def test_a_worker_that_says_first_that_it_dropped_all_has_no_call_any_more() -> None:
    rig = Ahead()
    rig.begun[0] = 0
    rig.slot.mark(all_of_it=True)
    rig.begun[0] = 2

    rig.say(dropped(1), dropped(2), MEASURED)

    assert (rig.owner.drops, rig.owner.broken, rig.slot.turns.busy, rig.connection.wire.running) == (2, "", False, 0)
    assert rig.slot.take_back() == []


async def test_calls_that_could_not_be_taken_back_do_not_wait_at_the_worker() -> None:
    large, streams = (exchange_of(name, Owner()) for name in ("large", "streams"))
    large.arrive(CallHead("large", "POST", "/", b"", []), b"x" * 2**21)
    streams.arrive(CallHead("streams", "POST", "/", b"", [], STREAM), b"")
    small = exchange_of("small", Owner())
    small.arrive(CallHead("small", "POST", "/", b"", []), b"")
    rig, streaming, unknown = Rig(), Rig(body_mode=STREAM), Rig()
    unknown.begun[0] = UNKNOWN

    assert [rig.slot.can_wait(each) for each in (small, large, streams)] == [True, False, False]
    assert not streaming.slot.can_wait(small), "pieces of the body before it come yet"
    assert not unknown.slot.can_wait(small)
    assert not unknown.slot.mark()
