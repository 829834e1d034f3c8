"""Large bodies and answers in the memory that a node shares with a worker: both ends, and a worker that lies."""

import asyncio
import ctypes
import errno
import gc
import os
from collections.abc import AsyncIterator
from typing import Any, cast

import msgspec
import pytest
from tests.unit.gpu_manager.world import Owner, Transport, exchange_of
from tests.waiting import eventually

from gpufaas_core.units import MiB
from gpufaas_core.wire.heads import AnswerHead, AreaHead, CallHead, EndHead, LaidHead
from gpufaas_core.wire.kinds import Kind
from gpufaas_core.wire.prefix import FrameReader, encode_frame
from gpufaas_functions.areas import Area as WorkersArea
from gpufaas_functions.areas import _Used, keep_bodies, leave_areas
from gpufaas_functions.author import BadBody, Event
from gpufaas_functions.begun import AREAS_BYTES, open_counts, shared_in
from gpufaas_functions.staged import HUGE
from gpufaas_gpu_manager import areas as module
from gpufaas_gpu_manager.areas import Areas
from gpufaas_gpu_manager.exchange import Exchange
from gpufaas_gpu_manager.node_call import BIND, GO_AHEAD
from gpufaas_gpu_manager.worker_connection import WorkerConnection

LARGE = bytes(range(256)) * 4096 * 3
"""3 MiB."""
OK = AnswerHead(200, [])
RAW = msgspec.Raw(msgspec.msgpack.encode(OK))


class Rig:
    """A node, and a worker that says what the test has it say. Both have the memory mapped."""

    def __init__(self) -> None:
        counts = open_counts(2)
        begun, shared = shared_in(counts, 2)
        self.workers = shared_in(counts, 2)[1]
        os.close(counts)
        self.held = [0]
        self.areas = Areas(shared, self.held.append)
        self.owner, self.transport = Owner(), Transport()
        self.connection = WorkerConnection(cast(Any, self.owner), begun, self.areas)
        self.connection.connection_made(cast(Any, self.transport))

    def call(self, body: bytes | memoryview = b"", method: str = "POST", slot: int = 0) -> Exchange:
        exchange = exchange_of("c", self.owner)
        exchange.arrive(CallHead("c", method, "/", b"", []), body)
        carrier = self.connection.slots[slot]
        exchange.bind(carrier, 0.0, 1, GO_AHEAD if carrier.turns.busy else BIND)
        return exchange

    def frames(self) -> list[tuple[int, bytes, bytes]]:
        self.connection.wire.flush()
        written, self.transport.written = self.transport.written, b""
        return [(kind & 0xFF, header, body) for kind, header, body in FrameReader(lanes=2).feed(written)]

    def received(self) -> tuple[WorkersArea | None, bytes]:
        """Return what the worker has got: the area of the call, and the body in its frame."""
        *before, (kind, _, body) = self.frames()
        assert kind == Kind.CALL
        if not before:
            return None, body
        ((kind, header, _),) = before
        assert kind == Kind.AREA
        return WorkersArea(self.workers, msgspec.msgpack.decode(header, type=AreaHead)), body

    def area(self) -> WorkersArea:
        """That of the call, at its worker."""
        area, _ = self.received()
        assert area is not None
        return area

    def say(self, kind: int, head: Any = None, body: bytes = b"") -> None:
        self.connection.data_received(encode_frame(kind, head, body))

    def lay(self, area: WorkersArea, answer: bytes) -> None:
        area.lay(answer)
        self.say(Kind.LAID, LaidHead(len(answer), RAW))

    async def made(self, areas: int = 1) -> None:
        """Wait until so many areas are free."""
        await eventually(lambda: len(self.areas._free) >= areas)

    async def with_answers_of(self, size: int) -> None:
        """Its answers are so large, and there is an area for one."""
        exchange = self.call()
        self.say(Kind.HEAD, AnswerHead(200, [], length=size))
        self.say(Kind.END, EndHead(0.1, error="enough"))
        exchange.close()
        self.call()
        self.say(Kind.ANSWER, OK)
        await self.made()
        self.frames()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    before = module._Held.bytes
    made = Rig()
    yield made
    made.connection.close()
    await asyncio.sleep(0)
    gc.collect()
    while made.areas._making:
        await asyncio.sleep(0.002)
    assert module._Held.bytes == before, "all memory was given back"


async def test_a_large_body_goes_through_an_area_once_there_is_one(rig: Rig) -> None:
    rig.call(LARGE)
    assert rig.received() == (None, LARGE), "nothing waits until the pages of an area are made"
    rig.say(Kind.ANSWER, OK)
    await rig.made()

    rig.call(memoryview(bytearray(LARGE)))

    area, in_frame = rig.received()
    assert area is not None
    assert (len(area), area.read(0, len(area)), in_frame) == (len(LARGE), LARGE, b"")


async def test_a_body_of_up_to_64_kib_goes_in_its_frame(rig: Rig) -> None:
    for _ in range(2):
        rig.call(b"x" * 65536)
        assert rig.received() == (None, b"x" * 65536)
        rig.say(Kind.ANSWER, OK)
    assert rig.areas._free == []


async def test_a_large_answer_lies_in_an_area_that_is_free_when_nobody_has_it(rig: Rig) -> None:
    await rig.with_answers_of(len(LARGE))
    exchange = rig.call(b"small")
    area, in_frame = rig.received()
    assert area is not None
    assert (area.body, in_frame) == (None, b"small")

    rig.lay(area, LARGE)

    _, said, whole = cast("tuple[AnswerHead, memoryview, bool]", exchange.take())
    assert (bytes(said), whole, rig.owner.broken) == (LARGE, True, "")
    assert rig.areas._free == []
    part = said[100:200]
    del said
    assert rig.areas._free == [], "a part of it waits for its reader"
    del part
    assert len(rig.areas._free) == 1


@pytest.mark.parametrize("lent", [True, False])
@pytest.mark.parametrize(
    ("laid", "body"),
    [(LaidHead(0, RAW), b""), (LaidHead(-1, RAW), b""), (LaidHead(1 << 40, RAW), b""), (LaidHead(5, RAW), b"12345")],
    ids=["empty", "negative", "too large", "with a body"],
)
async def test_an_answer_that_cannot_lie_there_ends_the_worker(
    rig: Rig, laid: LaidHead, body: bytes, lent: bool
) -> None:
    if lent:
        await rig.with_answers_of(len(LARGE))
    exchange = rig.call()
    done = len(rig.owner.done)

    rig.say(Kind.LAID, laid, body)

    assert rig.owner.broken.startswith("it sent what it must not: an answer of ")
    assert (rig.transport.closed, len(rig.owner.done), exchange.take()) == (True, done, None)


async def test_an_answer_in_memory_that_was_not_lent_ends_the_worker(rig: Rig) -> None:
    rig.call()
    rig.say(Kind.LAID, LaidHead(100_000, RAW))
    assert rig.owner.broken


@pytest.mark.parametrize("head", [b"\xc1", b"\x91\x91", msgspec.msgpack.encode([200, [], -1.0])])
async def test_an_answer_there_has_a_head_as_others_have(rig: Rig, head: bytes) -> None:
    await rig.with_answers_of(len(LARGE))
    rig.call()
    rig.say(Kind.LAID, LaidHead(100_000, msgspec.Raw(head)))
    assert rig.owner.broken


async def test_an_answer_to_head_has_no_body_there_either(rig: Rig) -> None:
    await rig.with_answers_of(len(LARGE))
    rig.call(method="HEAD")
    rig.say(Kind.LAID, LaidHead(100_000, RAW))
    assert rig.owner.broken


async def test_a_worker_cannot_change_the_size_of_the_memory(rig: Rig) -> None:  # noqa: ARG001
    counts = open_counts(1)
    try:
        for size in (0, 4096, 1 << 30):
            with pytest.raises(PermissionError):
                os.ftruncate(counts, size)
    finally:
        os.close(counts)


async def test_a_worker_that_dies_gives_back_what_its_calls_had(rig: Rig) -> None:
    await rig.with_answers_of(len(LARGE))
    rig.call(LARGE)
    assert rig.received()[0] is not None
    held = module._Held.bytes

    rig.connection.connection_lost(None)
    rig.connection.close()

    assert module._Held.bytes == held - len(LARGE) - HUGE // 2


async def test_an_answer_outlives_its_worker(rig: Rig) -> None:
    await rig.with_answers_of(len(LARGE))
    exchange = rig.call()
    area = rig.area()
    rig.lay(area, LARGE)

    rig.connection.connection_lost(None)
    rig.connection.close()

    _, said, _ = cast("tuple[AnswerHead, memoryview, bool]", exchange.take())
    assert bytes(said) == LARGE


async def test_calls_of_two_slots_have_areas_of_their_own(rig: Rig) -> None:
    await rig.with_answers_of(len(LARGE))
    rig.call(LARGE, slot=0)
    first, _ = rig.received()
    rig.call(LARGE, slot=1)
    assert rig.received() == (None, LARGE), "another one is being made"
    assert first is not None
    await rig.made()
    rig.connection.data_received(encode_frame(Kind.ANSWER, OK, lane=1))
    other = bytes(reversed(LARGE))
    rig.call(other, slot=1)
    second, _ = rig.received()

    assert second is not None
    assert (first.read(0, len(first)), second.read(0, len(second))) == (LARGE, other)


async def test_a_call_that_waits_for_another_one_has_an_area_of_its_own(rig: Rig) -> None:
    await rig.with_answers_of(len(LARGE))
    rig.call()
    rig.call()
    await rig.made()
    rig.say(Kind.ANSWER, OK)
    rig.say(Kind.ANSWER, OK)
    rig.frames()

    first = rig.call()
    area, _ = rig.received()
    behind = rig.call()
    other, _ = rig.received()

    assert area is not None
    assert other is not None
    rig.lay(area, LARGE)
    rig.lay(other, LARGE[::-1])
    assert rig.owner.broken == ""
    assert [bytes(cast(Any, each.take())[1]) for each in (first, behind)] == [LARGE, LARGE[::-1]]


async def test_after_a_hundred_calls_there_is_one_area(rig: Rig) -> None:
    body = LARGE[:100_000]
    await rig.with_answers_of(len(body))
    held = module._Held.bytes
    for _ in range(100):
        exchange = rig.call(body)
        area = rig.area()
        rig.lay(area, area.read(0, len(area))[::-1])
        _, said, _ = cast("tuple[AnswerHead, memoryview, bool]", exchange.take())
        assert said[:10].tobytes() == body[::-1][:10]
        del said, exchange
    assert (len(rig.areas._free), module._Held.bytes) == (1, held)


async def test_after_some_small_answers_no_area_is_lent_for_them(rig: Rig) -> None:
    await rig.with_answers_of(len(LARGE))
    lent = 0
    for _ in range(20):
        rig.call()
        lent += rig.received()[0] is not None
        rig.say(Kind.ANSWER, OK)
    assert 0 < lent < 20
    assert rig.connection.wire.areas.small > 0


async def test_what_is_not_used_goes_back_to_the_kernel(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.with_answers_of(len(LARGE))
    assert rig.held[-1] == 2 * HUGE
    monkeypatch.setattr(module, "IDLE_S", -1.0)

    rig.areas._sweep()

    assert (rig.held[-1], rig.areas._free) == (0, [])


async def test_there_is_a_limit_for_one_worker_and_for_all(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rig.areas.take(AREAS_BYTES + 1) is None
    assert not rig.areas._making
    monkeypatch.setattr(module, "ALL_BYTES", module._Held.bytes + 4 * MiB)
    assert rig.areas.take(6 * MiB) is None
    assert not rig.areas._making
    assert rig.areas.take(4 * MiB) is None
    await rig.made()
    area = rig.areas.take(1 * MiB)
    assert area is not None
    rig.areas.give_back(area)


async def test_an_area_that_is_too_small_makes_room_for_a_larger_one(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ALL_BYTES", module._Held.bytes + 4 * MiB)
    rig.areas.take(1 * MiB)
    await rig.made()
    rig.areas.take(3 * MiB)
    assert rig.areas._making
    await eventually(lambda: not rig.areas._making)
    assert [each.size for each in rig.areas._free] == [4 * MiB]


async def test_a_body_can_be_read_until_its_call_has_ended(rig: Rig) -> None:
    rig.call(LARGE)
    rig.frames()
    rig.say(Kind.ANSWER, OK)
    await rig.made()
    rig.call(LARGE)
    area = rig.area()
    assert area.body is area
    whole, piecewise, late = (Event("POST", "/", b"", [], None, laid=area) for _ in range(3))

    assert whole.body == LARGE
    assert b"".join(piecewise.stream()) == LARGE
    area.end()
    assert whole.body == LARGE
    with pytest.raises(BadBody, match="its call has ended"):
        _ = late.body
    with pytest.raises(BadBody, match="its call has ended"):
        next(late.stream())


@pytest.fixture
async def mapped(rig: Rig) -> WorkersArea:
    """That of a call with a large body, at its worker."""
    rig.call(LARGE)
    rig.frames()
    rig.say(Kind.ANSWER, OK)
    await rig.made()
    rig.call(LARGE)
    return rig.area()


async def test_a_body_whose_call_ends_while_a_thread_reads_it_is_gone(
    mapped: WorkersArea, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(address: int, size: int) -> bytes:  # noqa: ARG001
        mapped.end()
        return b"of the next call"

    monkeypatch.setattr("gpufaas_functions.areas.ctypes.string_at", slowly)

    with pytest.raises(FileNotFoundError):
        mapped.read(0, len(mapped))


@pytest.mark.parametrize("room", [True, False], ids=["room", "no room"])
async def test_a_child_of_the_worker_reads_a_copy_or_nothing(
    mapped: WorkersArea, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    def nothing(address: int, size: int) -> bytes:  # noqa: ARG001
        raise MemoryError

    with monkeypatch.context() as patched:
        if not room:
            patched.setattr("gpufaas_functions.areas.ctypes.string_at", nothing)
        keep_bodies()
    leave_areas()

    event = Event("POST", "/", b"", [], None, laid=mapped)
    if room:
        assert b"".join(event.stream()) == event.body == LARGE
    else:
        with pytest.raises(BadBody, match="its call has ended"):
            _ = event.body


def test_what_is_lent_is_no_part_of_the_peak_of_a_worker_and_what_it_had_before_stays_one() -> None:
    used = _Used()
    assert used.peak_without(500) == 500
    used.add(0, 2 * MiB)
    now = used.peak_without(0)
    assert now > 10 * MiB, "its own peak, before"

    used.add(1 * MiB, 2 * MiB)

    assert used.peak_without(now + 3 * MiB) == now, "what two areas had in common counts once"
    assert used.peak_without(now + 20 * MiB) == now + 17 * MiB


async def test_a_machine_without_room_for_a_thread_sends_bodies_as_before(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(asyncio.get_running_loop(), "run_in_executor", full)
        assert rig.areas.take(MiB) is None
        assert rig.held[-1] == 0
    assert rig.areas.take(MiB) is None
    await rig.made()
    area = rig.areas.take(MiB)
    assert area is not None
    rig.areas.give_back(area)


async def test_a_machine_without_memory_for_an_area_sends_bodies_as_before(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To write there would be the end of the node."""

    def full(*_: object) -> int:
        ctypes.set_errno(errno.EFAULT)
        return -1

    with monkeypatch.context() as patched:
        patched.setattr(module._libc, "madvise", full)
        assert rig.areas.take(MiB) is None
        await eventually(lambda: not rig.areas._making)
        assert rig.held[-1] == 0
    assert rig.areas.take(MiB) is None
    await rig.made()


async def test_an_answer_for_which_no_area_has_room_lets_bodies_have_theirs(rig: Rig) -> None:
    rig.areas.answered(AREAS_BYTES + 1)
    assert rig.areas.expects == 0
    rig.areas.answered(AREAS_BYTES)
    assert rig.areas.expects == AREAS_BYTES
