"""What comes over a worker's connection becomes work, in order, whoever runs it."""

import ctypes
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufaas_core.wire.bodies import STREAM
from gpufaas_core.wire.credit import PIECE_COST, WINDOW
from gpufaas_core.wire.heads import AreaHead, BatchHead, CallHead, CancelHead, DroppedHead, LimitHead, RoomHead
from gpufaas_core.wire.kinds import Kind
from gpufaas_core.wire.prefix import KIND, LANE, FrameReader
from gpufaas_functions.areas import AREAS_AT
from gpufaas_functions.begun import no_counts, taken
from gpufaas_functions.connection import Absent, Body
from gpufaas_functions.inbox import BodyStream, Call, Inbox, Shared, Slot, Work, event_of
from gpufaas_functions.memory import CpuMemory
from gpufaas_functions.reply import Reply

SLOTS = 2


class News:
    """Counts what a slot tells who runs its call."""

    said = 0

    def tell(self) -> None:
        self.said += 1


class Rig:
    """An inbox, what it is told, and what it says."""

    def __init__(self, areas: Any = None) -> None:
        self.counts = no_counts(SLOTS)
        self.said: list[tuple[int, int, bytes]] = []
        """Kind, slot and head."""
        self.news = [News() for _ in range(SLOTS)]
        self.memory = CpuMemory()
        self.slots = [
            Slot(index, Reply(index, self, self.memory), self.counts, news.tell) for index, news in enumerate(self.news)
        ]
        self.inbox = Inbox(self.slots, self, self.memory, Shared(self.counts, areas))

    def send(self, *frame: bytes | memoryview) -> None:
        for kind, header, _ in FrameReader(lanes=SLOTS).feed(b"".join(frame)):
            self.said.append((kind & KIND, kind >> LANE, header))

    def later(self, frame: bytes, now: float) -> None:  # noqa: ARG002 - the port's
        self.send(frame)

    def flush(self) -> None:
        """All was sent."""

    def comes(self, kind: int, head: msgspec.Struct | None = None, body: Body = b"", slot: int = 0) -> Work | None:
        header = b"" if head is None else msgspec.msgpack.encode(head)
        return self.inbox.on_frame(kind | slot << LANE, header, body)

    def call(self, name: str, body: Body = b"", mode: int = 0, slot: int = 0) -> Work | None:
        return self.comes(Kind.CALL, CallHead(name, "POST", "/", b"", [], mode), body, slot)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def names(work: Work | None) -> list[str]:
    return [] if work is None else [each.head.call for each in work.calls]


def streamed(work: Work) -> BodyStream:
    body = work.calls[0].body
    assert isinstance(body, BodyStream)
    return body


def test_a_slot_has_one_work_at_a_time_and_the_next_ones_follow_in_their_order(rig: Rig) -> None:
    first = rig.call("a")
    assert (names(first), rig.call("b"), rig.call("c")) == (["a"], None, None)
    assert names(rig.call("beside", slot=1)) == ["beside"], "another slot is free"

    found = [rig.slots[0].end() for _ in range(3)]

    assert [names(each) for each in found] == [["b"], ["c"], []]
    assert names(rig.call("d")) == ["d"]


def test_a_batch_begins_when_all_its_calls_have_come_and_a_call_after_it_is_none_of_it(rig: Rig) -> None:
    rig.comes(Kind.BATCH, BatchHead(2))
    assert rig.call("a") is None
    batch = rig.call("b")
    assert batch is not None
    assert (names(batch), batch.batch, batch.number) == (["a", "b"], 2, 1)

    assert rig.call("c") is None
    following = rig.slots[0].end()
    assert following is not None
    assert (names(following), following.batch, following.number) == (["c"], 0, 2)


@given(st.data())
def test_a_cancel_is_for_the_call_that_it_names_and_for_no_other(data: st.DataObject) -> None:
    rig, works = Rig(), []
    sizes = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    for number, size in enumerate(sizes, 1):
        if size:
            rig.comes(Kind.BATCH, BatchHead(size))
        for _ in range(size or 1):
            rig.call("c")
        works.append(rig.slots[0]._works[-1])
        assert works[-1].number == number
    ended = data.draw(st.integers(0, len(sizes) - 1))
    for _ in range(ended):
        rig.slots[0].end()
    number, place = data.draw(st.integers(1, len(sizes) + 1)), data.draw(st.integers(0, 3))

    rig.comes(Kind.CANCEL, CancelHead(place, number))

    expected = [(number, place)] if ended < number <= len(sizes) and place < len(works[number - 1].calls) else []
    assert [
        (work.number, at) for work in works for at, each in enumerate(work.calls) if each.cancelled
    ] == expected  # fmt: skip
    assert bool(rig.news[0].said) == bool(expected)


def test_what_was_taken_back_is_dropped_with_its_bodies_and_what_follows_is_run(rig: Rig) -> None:
    rig.counts.taken[1] = taken(1, 1)
    first = rig.call("a", b"body", slot=1)
    assert first is not None
    rig.call("b", slot=1)

    assert not rig.slots[1].begin(first)
    assert not first.calls
    assert [(kind, slot) for kind, slot, _ in rig.said] == [(Kind.DROPPED, 1)]
    assert msgspec.msgpack.decode(rig.said[0][2], type=DroppedHead).number == 1
    rig.comes(Kind.CANCEL, CancelHead(0, 1), slot=1)
    following = rig.slots[1].end()
    assert following is not None
    assert rig.slots[1].begin(following)
    assert rig.counts.begun == [0, 2]


def test_a_body_that_streams_is_taken_in_pieces_and_its_end_stays(rig: Rig) -> None:
    work = rig.call("a", b"one", STREAM)
    assert work is not None
    stream = streamed(work)
    assert stream.take() == b"one"
    assert not stream.is_there
    rig.comes(Kind.BODY, None, b"two")
    rig.comes(Kind.BODY_END)

    assert rig.news[0].said == 2
    assert [stream.take() for _ in range(3)] == [b"two", None, None]


def test_pieces_that_come_late_are_of_no_other_call(rig: Rig) -> None:
    rig.call("a", b"", STREAM)
    rig.comes(Kind.BODY_END)
    rig.slots[0].end()
    work = rig.call("b", b"b", STREAM)
    assert work is not None
    rig.comes(Kind.BODY_END)
    rig.comes(Kind.BODY, None, b"late")

    assert [streamed(work).take() for _ in range(2)] == [b"b", None]


def test_room_is_given_for_what_was_taken_but_the_piece_that_came_with_the_call_and_none_once_all_has_come() -> None:
    stream = BodyStream(b"x" * WINDOW)
    piece = b"x" * (WINDOW // 4)
    assert stream.take()
    assert not stream.room()
    rooms = []
    for _ in range(4):
        stream.put(piece)
        stream.take()
        rooms.append(stream.room())
    assert rooms == [0, WINDOW // 2 + 2 * PIECE_COST] * 2
    for _ in range(2):
        stream.put(piece)
    stream.put(None)
    assert [stream.take() for _ in range(3)] == [piece, piece, None]
    assert not stream.room()


def test_room_for_answers_is_the_slots_and_may_come_after_the_call(rig: Rig) -> None:
    reply = rig.slots[1].reply
    while reply.credit.is_left:
        reply.piece(b"x" * (WINDOW // 4))

    rig.comes(Kind.ROOM, RoomHead(WINDOW // 4), slot=1)

    assert reply.credit.is_left
    assert (rig.news[0].said, rig.news[1].said) == (0, 1)


def test_an_area_is_for_the_next_call_of_its_slot_and_for_no_later_one() -> None:
    areas = ctypes.create_string_buffer(AREAS_AT + 4096)
    areas[AREAS_AT : AREAS_AT + 4] = b"laid"
    rig = Rig(areas)
    rig.comes(Kind.AREA, AreaHead(0, 4096, 4), slot=1)
    other, work = rig.call("a", b"a"), rig.call("b", slot=1)
    rig.call("c", b"c", slot=1)
    following = rig.slots[1].end()
    assert other is not None
    assert work is not None
    assert following is not None

    assert other.calls[0].area is None
    assert (work.calls[0].body, work.calls[0].area is not None) == (b"laid", True)
    assert (following.calls[0].body, following.calls[0].area) == (b"c", None)


def test_a_body_is_not_kept_by_its_call_and_one_without_room_has_no_event() -> None:
    call = Call(CallHead("a", "POST", "/", b"", []), b"body", None)
    assert event_of(call.head, call.take_body()).body == b"body"
    assert call.body == b""
    with pytest.raises(MemoryError, match="for the body of the call"):
        event_of(call.head, Absent(5))


def test_what_is_asked_of_the_worker_itself_is_answered_beside_calls(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []
    monkeypatch.setattr(CpuMemory, "limit", lambda _, memory: limits.append(memory))
    rig.call("a")

    assert rig.comes(Kind.PING) is None
    assert rig.comes(Kind.LIMIT, LimitHead(7)) is None

    assert [kind for kind, _, _ in rig.said] == [Kind.PONG]
    assert limits == [7]
