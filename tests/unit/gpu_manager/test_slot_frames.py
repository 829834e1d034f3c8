"""An author's code has the sockets of its worker, and may write any bytes: only its own calls fail."""

import asyncio
import struct
from collections.abc import Iterator
from math import isfinite, nan
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufaas_core.errors import BadAnswer, OutOfMemory
from gpufaas_core.frames import (
    FILE,
    INLINE,
    KINDS,
    STREAM,
    AnswerHead,
    AnswersHead,
    CallHead,
    CancelHead,
    EndHead,
    FailedHead,
    FrameReader,
    Kind,
    MeasuredHead,
    ReadyHead,
    encode_frame,
)
from gpufaas_core.messages import Grant
from gpufaas_core.model import CallId, DeviceId, FunctionId, Part
from gpufaas_gpu_manager import exchange_state as states
from gpufaas_gpu_manager.exchange import Exchange
from gpufaas_gpu_manager.slot_protocol import SlotProtocol

OK = AnswerHead(200, [(b"content-type", b"text/plain")], 0.1)
READY = encode_frame(Kind.READY, ReadyHead(0, []))
MEASURED = encode_frame(Kind.MEASURED, MeasuredHead(7))

FIVE = encode_frame(Kind.HEAD, AnswerHead(200, [], length=5))
END = encode_frame(Kind.END, EndHead(0.5))


class Transport:
    def __init__(self) -> None:
        self.written = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Owner:
    """The worker: keeps what it was told."""

    def __init__(self) -> None:
        self.done: list[tuple[float, int, bool]] = []
        self.measured: list[int] = []
        self.on_measured = lambda *sizes: self.measured.append(sizes[0])
        self.broken = ""
        self.spoken: list[ReadyHead | FailedHead] = []
        self.watched = self.pongs = 0
        self.closed = 0
        self.on_ready = self.on_failed = self.spoken.append

    def on_done(self, _: Any, __: Any, run_s: float, peak: int, out_of_memory: bool, ok: bool) -> None:  # noqa: ARG002
        self.done.append((run_s, peak, ok))

    def ran_out(self, said: bytes) -> OutOfMemory:
        return OutOfMemory(said.decode())

    def on_broken(self, reason: str) -> None:
        assert not self.broken, "told once"
        self.broken = reason

    def on_slot_lost(self) -> None: ...

    def on_pong(self) -> None:
        self.pongs += 1

    def on_slot_closed(self) -> None:
        self.closed += 1

    def watch_abandoned(self) -> None:
        self.watched += 1


def grant(call: str) -> Grant:
    return Grant(1, 1, (CallId(call),), FunctionId("f"), "d", (Part(DeviceId("n/cpu:0"), 1),), False)


class Rig:
    """A slot whose worker is ready, with one call."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        index: int = 0,
        ready: bool = True,
        method: str = "POST",
        body_mode: int = INLINE,
    ) -> None:
        self.owner, self.transport = Owner(), Transport()
        self.slot = SlotProtocol(cast(Any, self.owner), index)
        self.slot.connection_made(cast(Any, self.transport))
        if ready:
            self.slot.data_received(READY)
        self.exchange = Exchange(grant("c"), self.owner, loop, 0.0)
        self.exchange.arrive(CallHead("c", method, "/", b"", [], body_mode), b"")
        if ready:
            self.exchange.bind(self.slot, 0.0, True)

    def say(self, *frames: bytes) -> "Rig":
        self.slot.data_received(b"".join(frames))
        return self


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


def test_an_honest_answer_goes_through(loop: asyncio.AbstractEventLoop) -> None:
    rig = Rig(loop).say(encode_frame(Kind.ANSWER, OK, b"hello"))

    assert rig.exchange.take() == (OK, b"hello", True)
    assert (rig.owner.done, rig.owner.broken) == ([(0.1, 0, True)], "")


def test_pieces_that_come_at_once_go_on_as_one(loop: asyncio.AbstractEventLoop) -> None:
    pieces = [encode_frame(Kind.CHUNK, None, b"%d" % (number % 10)) for number in range(1000)]
    rig = Rig(loop).say(encode_frame(Kind.HEAD, OK), *pieces, encode_frame(Kind.END, EndHead(0.5)))

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
def test_a_head_that_no_client_can_be_given_costs_that_call_and_no_worker(
    loop: asyncio.AbstractEventLoop, head: AnswerHead, kind: int
) -> None:
    rig = Rig(loop).say(encode_frame(kind, head, b""))
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
        [struct.pack("<BBHIQ", 77, 0, 0, 0, 0)],
        [encode_frame(Kind.ANSWER, None)],
        [encode_frame(Kind.CHUNK, None, b"x" * 300_000)],
        [struct.pack("<BBHIQ", Kind.ANSWER, 0, 0, 50_000, 0) + b"\x91" * 50_000],
        [b"GET / HTTP/1.1\r\n\r\n"],
    ],
)
def test_frames_that_our_runner_never_sends_end_the_worker(
    loop: asyncio.AbstractEventLoop, frames: list[bytes]
) -> None:
    rig = Rig(loop).say(*frames)

    assert rig.owner.broken.startswith("it sent what it must not: ")
    assert rig.transport.closed
    assert rig.owner.done == []
    rig.say(encode_frame(Kind.ANSWER, OK))  # whatever comes after is not looked at
    assert rig.owner.done == []


def test_what_a_call_needed_comes_once_and_after_its_answer(loop: asyncio.AbstractEventLoop) -> None:
    whole = Rig(loop).say(encode_frame(Kind.ANSWER, OK), MEASURED)
    streamed = Rig(loop).say(encode_frame(Kind.HEAD, OK), encode_frame(Kind.END, EndHead(0.1)), MEASURED)

    for rig in (whole, streamed):
        assert len(rig.owner.done) == 1
        assert (rig.owner.measured, rig.owner.broken) == ([7], "")
        assert rig.say(MEASURED).owner.broken
        assert rig.owner.measured == [7]


@pytest.mark.parametrize("before", [(), (encode_frame(Kind.HEAD, OK),)])
def test_what_a_call_needed_does_not_come_before_its_end(
    loop: asyncio.AbstractEventLoop, before: tuple[bytes, ...]
) -> None:
    rig = Rig(loop).say(*before, MEASURED)

    assert rig.owner.broken
    assert rig.owner.measured == []


@pytest.mark.parametrize("peak", [-1, 1 << 62, None])
def test_an_impossible_need_ends_the_worker(loop: asyncio.AbstractEventLoop, peak: int | None) -> None:
    head = None if peak is None else MeasuredHead(peak)
    rig = Rig(loop).say(encode_frame(Kind.ANSWER, OK), encode_frame(Kind.MEASURED, head))

    assert rig.owner.broken
    assert rig.owner.measured == []


def test_only_the_first_slot_says_how_the_load_went_and_once(loop: asyncio.AbstractEventLoop) -> None:
    assert Rig(loop, index=1, ready=False).say(READY).owner.broken
    assert Rig(loop, ready=False).say(encode_frame(Kind.ANSWER, OK)).owner.broken
    assert Rig(loop, ready=False).say(encode_frame(Kind.READY, ReadyHead(-1, []))).owner.spoken == []


class Batch(Rig):
    """A slot with a batch of three calls."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *methods: str) -> None:
        super().__init__(loop)
        self.say(encode_frame(Kind.ANSWER, OK))
        self.owner.done.clear()
        self.transport.written = b""
        self.calls = [Exchange(grant(f"c{place}"), self.owner, loop, 0.0) for place in range(3)]
        self.slot.begin_batch(3)
        for place, each in enumerate(self.calls):
            each.arrive(CallHead(f"c{place}", (*methods, "", "", "")[place] or "POST", "/", b"", []), b"%d" % place)
            each.bind(self.slot, 0.0, True)


def answers(*given: tuple[int, int, AnswerHead], body: bytes = b"") -> bytes:
    return encode_frame(Kind.ANSWERS, AnswersHead(list(given)), body)


def test_a_batch_goes_out_in_the_order_of_its_calls(loop: asyncio.AbstractEventLoop) -> None:
    sent = list(FrameReader().feed(Batch(loop).transport.written))

    assert [kind for kind, _, _ in sent] == [Kind.BATCH, Kind.CALL, Kind.CALL, Kind.CALL]
    assert [body for _, _, body in sent[1:]] == [b"0", b"1", b"2"]


def test_each_call_of_a_batch_gets_its_answer_after_all_are_reported(loop: asyncio.AbstractEventLoop) -> None:
    rig = Batch(loop)
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


def test_large_answers_of_a_batch_stream_after_the_small_ones(loop: asyncio.AbstractEventLoop) -> None:
    rig = Batch(loop, "", "HEAD")
    head = AnswerHead(200, [], length=5)

    rig.say(answers((0, 1, OK), body=b"x"), encode_frame(Kind.HEAD, head), encode_frame(Kind.END, EndHead(0.1)))
    rig.say(encode_frame(Kind.HEAD, head), encode_frame(Kind.CHUNK, None, b"hello"))
    assert len(rig.owner.done) == 2, "it holds its slot until its end"
    rig.say(encode_frame(Kind.END, EndHead(0.1)), encode_frame(Kind.MEASURED, MeasuredHead(7)))

    assert (len(rig.owner.done), rig.owner.measured, rig.owner.broken) == (3, [7], "")
    assert rig.calls[1].take() == (head, b"", False)
    assert rig.calls[2].take() == (head, b"", False)
    assert rig.calls[2].take() == b"hello"


def test_of_a_batch_only_an_answer_that_streams_is_cancelled(loop: asyncio.AbstractEventLoop) -> None:
    rig = Batch(loop)
    rig.transport.written = b""
    for each in (rig.calls[0], rig.calls[2]):
        each.state = states.ABANDON[each.state]
        rig.slot.cancel(each)
    assert rig.transport.written == b"", "the handler goes on, for the others"

    rig.say(answers((0, 1, OK), (1, 1, OK), body=b"xy"), encode_frame(Kind.HEAD, OK))

    assert rig.transport.written == encode_frame(Kind.CANCEL, CancelHead(2))
    assert [each.take() for each in rig.calls] == [None, (OK, b"y", True), None]


def test_a_batch_whose_worker_died_before_it_had_read_it_can_be_placed_again(loop: asyncio.AbstractEventLoop) -> None:
    unread, read, begun = Batch(loop), Batch(loop), Batch(loop).say(answers((0, 1, OK), body=b"x"))

    unread.slot.connection_lost(ConnectionResetError())
    read.slot.connection_lost(None)
    begun.slot.connection_lost(ConnectionResetError())  # a CANCEL that it did not read

    assert [each.untouched for each in unread.calls] == [True, True, True]
    assert not any(each.untouched for each in (*read.calls, *begun.calls))


def ahead_of(rig: Batch, loop: asyncio.AbstractEventLoop) -> list[Exchange]:
    """Send two calls ahead."""
    calls = [Exchange(grant(f"n{place}"), rig.owner, loop, 0.0) for place in range(2)]
    rig.slot.begin_batch(2)
    for each in calls:
        each.arrive(CallHead(each.grant.call, "POST", "/", b"", []), b"")
        each.send_ahead(rig.slot, 0.0, 1)
    return calls


def test_answers_are_those_of_the_batch_before_until_all_of_it_are_there(loop: asyncio.AbstractEventLoop) -> None:
    rig = Batch(loop)
    following = ahead_of(rig, loop)
    assert [kind for kind, _, _ in FrameReader().feed(rig.transport.written)][4:] == [Kind.BATCH, Kind.CALL, Kind.CALL]

    rig.say(answers((0, 1, OK), (2, 1, OK), body=b"ac"))
    rig.say(FIVE, encode_frame(Kind.CHUNK, None, b"hello"), END)
    rig.say(answers((1, 1, OK), (0, 1, OK), body=b"yx"))

    assert rig.owner.broken == ""
    assert [each.take() for each in (rig.calls[0], rig.calls[2])] == [(OK, b"a", True), (OK, b"c", True)]
    assert [each.take() for each in following] == [(OK, b"x", True), (OK, b"y", True)]
    assert rig.say(answers((0, 0, OK))).owner.broken, "it has no call any more"


def test_what_went_ahead_is_untouched_until_it_follows(loop: asyncio.AbstractEventLoop) -> None:
    rig = Batch(loop)
    following = ahead_of(rig, loop)

    rig.slot.connection_lost(ConnectionResetError())  # what went ahead is not read

    assert not any(each.untouched for each in rig.calls)
    assert all(each.untouched for each in following)
    following[0].follow(1.0)
    assert not following[0].untouched


def test_a_batch_that_followed_and_was_not_read_can_be_placed_again(loop: asyncio.AbstractEventLoop) -> None:
    rig = Batch(loop)
    following = ahead_of(rig, loop)
    rig.say(answers(*((place, 0, OK) for place in range(3))))
    for each in following:
        each.follow(1.0)

    rig.slot.connection_lost(ConnectionResetError())

    assert all(each.untouched for each in following)


def test_a_limit_behind_a_batch_that_went_ahead_is_no_sign_that_it_was_not_read(
    loop: asyncio.AbstractEventLoop,
) -> None:
    rig = Batch(loop)
    following = ahead_of(rig, loop)
    rig.slot.limit(1 << 30)
    rig.say(answers(*((place, 0, OK) for place in range(3))))
    for each in following:
        each.follow(1.0)

    rig.slot.connection_lost(ConnectionResetError())

    assert not any(each.untouched for each in following)


def test_no_cancel_is_sent_behind_a_batch_that_went_ahead(loop: asyncio.AbstractEventLoop) -> None:
    rig = Batch(loop)
    ahead_of(rig, loop)
    rig.say(answers((0, 1, OK), (1, 1, OK), body=b"xy"), FIVE)
    rig.transport.written = b""

    rig.calls[2].state = states.ABANDON[rig.calls[2].state]
    rig.slot.cancel(rig.calls[2])

    assert rig.transport.written == b""


def test_what_is_no_answer_costs_its_call_and_not_the_batch(loop: asyncio.AbstractEventLoop) -> None:
    rig = Batch(loop).say(
        answers((0, 0, AnswerHead(99, [])), (1, 0, AnswerHead(500, [], 0.1, 0, True, True)), (2, 0, OK))
    )

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
def test_answers_that_are_not_those_of_the_batch_end_the_worker(
    loop: asyncio.AbstractEventLoop, frames: list[bytes]
) -> None:
    rig = Batch(loop).say(*frames)

    assert rig.owner.broken.startswith("it sent what it must not: ")
    assert rig.transport.closed
    assert len(rig.owner.done) in (0, 1, 3)


def test_a_call_alone_has_no_answers_of_a_batch(loop: asyncio.AbstractEventLoop) -> None:
    assert Rig(loop).say(answers((0, 0, OK))).owner.broken


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        ([FIVE, encode_frame(Kind.CHUNK, None, b"123456")], "longer than its Content-Length"),
        ([FIVE, encode_frame(Kind.CHUNK, None, b"1234"), END], "shorter than its Content-Length"),
        ([encode_frame(Kind.HEAD, OK), encode_frame(Kind.CHUNK)], "an empty piece"),
    ],
)
def test_a_body_that_is_not_what_its_head_says_ends_its_worker(
    loop: asyncio.AbstractEventLoop, frames: list[bytes], said: str
) -> None:
    rig = Rig(loop).say(*frames)

    assert said in rig.owner.broken
    assert rig.exchange.end is None


def test_an_answer_that_broke_off_and_one_to_head_may_be_shorter(loop: asyncio.AbstractEventLoop) -> None:
    broke_off = Rig(loop).say(FIVE, encode_frame(Kind.END, EndHead(0.5, error="ValueError")))
    to_head = Rig(loop, method="HEAD").say(FIVE, END)

    assert (broke_off.owner.broken, to_head.owner.broken) == ("", "")


def test_a_slot_says_that_its_other_end_is_closed_but_not_when_we_closed_it(loop: asyncio.AbstractEventLoop) -> None:
    theirs, ours = Rig(loop), Rig(loop)
    ours.slot.close()

    for each in (theirs, ours):
        each.slot.connection_lost(None)

    assert (theirs.owner.closed, ours.owner.closed) == (1, 0)


@pytest.mark.parametrize("body_mode", [INLINE, FILE])
def test_a_call_whose_worker_died_before_it_had_read_it_can_be_placed_again(
    loop: asyncio.AbstractEventLoop, body_mode: int
) -> None:
    unread, read, answering = (Rig(loop, body_mode=body_mode) for _ in range(3))
    answering.say(encode_frame(Kind.HEAD, OK))

    unread.slot.connection_lost(ConnectionResetError())
    read.slot.connection_lost(None)
    answering.slot.connection_lost(ConnectionResetError())  # a CANCEL that it did not read

    assert (unread.exchange.untouched, read.exchange.untouched, answering.exchange.untouched) == (True, False, False)


def test_a_limit_that_a_busy_worker_has_not_read_does_not_make_its_call_one_that_it_had_not_read(
    loop: asyncio.AbstractEventLoop,
) -> None:
    rig, following = Rig(loop), Rig(loop, ready=False)
    rig.slot.limit(1 << 30)
    following.slot.data_received(READY)
    following.slot.limit(1 << 30)
    following.exchange.bind(following.slot, 0.0, True)

    rig.slot.connection_lost(ConnectionResetError())
    following.slot.connection_lost(ConnectionResetError())

    assert not rig.exchange.untouched
    assert following.exchange.untouched, "the limit came before it"


def test_a_call_with_a_body_that_streams_may_have_begun_though_not_all_was_read(
    loop: asyncio.AbstractEventLoop,
) -> None:
    rig = Rig(loop, body_mode=STREAM)

    rig.slot.connection_lost(ConnectionResetError())

    assert not rig.exchange.untouched


def test_a_sign_of_life_comes_only_when_it_is_asked_for(loop: asyncio.AbstractEventLoop) -> None:
    asked, unasked = Rig(loop), Rig(loop)
    asked.slot.ping()
    assert asked.transport.written.endswith(encode_frame(Kind.PING))

    for each in (asked, unasked):
        each.say(encode_frame(Kind.PONG))

    assert (asked.owner.pongs, asked.owner.broken) == (1, "")
    assert (unasked.owner.pongs, bool(unasked.owner.broken)) == (0, True)
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
    loop = asyncio.new_event_loop()
    try:
        rig = Rig(loop, ready=ready)
        for at in range(0, len(stream), cut):
            rig.slot.data_received(bytes(stream[at : at + cut]))
        rig.slot.connection_lost(None)
    finally:
        loop.close()

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
