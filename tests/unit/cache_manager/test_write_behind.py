"""What the engine knows gets into the store: the newest of each key, not too often, and never under another's lead."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import pairwise

import msgspec
import pytest

from gpufaas_cache_manager.write_behind import BEAT_S, EVERY_S, WriteBehind
from gpufaas_core.errors import StorageFailed
from gpufaas_core.snapshot import EngineDoc


class Store:
    """Keeps what is written, with the moment; can be away, or another's."""

    def __init__(self, clock: "Clock") -> None:
        self.clock = clock
        self.kept: dict[str, EngineDoc] = {}
        self.writes: list[tuple[float, str, EngineDoc | None]] = []
        self.batches: list[int] = []
        self.away = False
        self.ours = True
        self.tries = 0

    async def write(self, puts: Mapping[str, bytes], deletes: Sequence[str]) -> bool:
        self.tries += 1
        if self.away:
            raise StorageFailed("the store does not answer")
        if not self.ours:
            return False
        self.batches.append(len(puts) + len(deletes))
        for key, value in puts.items():
            self.kept[key] = msgspec.json.decode(value, type=EngineDoc)
            self.writes.append((self.clock.now, key, self.kept[key]))
        for key in deletes:
            self.kept.pop(key, None)
            self.writes.append((self.clock.now, key, None))
        return True


class Clock:
    """Time passes when the test says so; who waits is woken at its time, or by its event."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waiting: list[tuple[float, asyncio.Event]] = []

    def __call__(self) -> float:
        return self.now

    async def wait(self, event: asyncio.Event, timeout_s: float) -> None:
        over = asyncio.Event()
        self.waiting.append((self.now + timeout_s, over))
        tasks = [asyncio.ensure_future(each.wait()) for each in (event, over)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            self.waiting = [each for each in self.waiting if each[1] is not over]

    async def advance(self, seconds: float) -> None:
        end = self.now + seconds
        await settle()
        while self.waiting and min(at for at, _ in self.waiting) <= end:
            at, over = min(self.waiting, key=lambda each: each[0])
            self.now = max(self.now, at)
            self.waiting.remove((at, over))
            over.set()
            await settle()
        self.now = end


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Rig:
    def __init__(self) -> None:
        self.clock = Clock()
        self.store = Store(self.clock)
        self.state: dict[str, int] = {}
        self.touched: dict[str, None] = {}
        self.behind = WriteBehind(self.store, self.changed, self.doc, 7, clock=self.clock, wait=self.clock.wait)
        self.task = asyncio.ensure_future(self.behind.run())

    def changed(self) -> list[str]:
        keys = list(self.touched)
        self.touched.clear()
        return keys

    def doc(self, key: str) -> EngineDoc | None:
        return EngineDoc("p", self.state[key], 0) if key in self.state else None

    def change(self, key: str, value: int | None) -> None:
        self.touched[key] = None
        if value is None:
            del self.state[key]
        else:
            self.state[key] = value
        self.behind.note()

    def values(self, key: str) -> list[int | None]:
        return [doc and doc.grant for _, each, doc in self.store.writes if each == key]


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    await settle()
    yield rig
    rig.task.cancel()
    await asyncio.gather(rig.task, return_exceptions=True)


async def test_a_change_after_a_quiet_time_is_written_at_once(rig: Rig) -> None:
    rig.change("devices/a", 1)
    await settle()

    assert rig.values("devices/a") == [1]
    assert rig.clock.now == 0.0


async def test_a_key_that_changes_all_the_time_is_written_twenty_times_a_second(rig: Rig) -> None:
    for value in range(1, 1001):
        rig.change("devices/a", value)
        await rig.clock.advance(0.001)
    await rig.clock.advance(EVERY_S)

    times = [at for at, *_ in rig.store.writes]
    assert 18 <= len(times) <= 22
    assert min(b - a for a, b in pairwise(times)) >= EVERY_S - 1e-9
    assert rig.values("devices/a")[-1] == 1000, "the newest is there in the end"


async def test_another_key_does_not_wait_for_one_that_was_just_written(rig: Rig) -> None:
    rig.change("devices/a", 1)
    await rig.clock.advance(0.01)
    rig.change("devices/a", 2)
    rig.change("devices/b", 1)
    await rig.clock.advance(0.005)

    assert rig.values("devices/b") == [1]
    assert rig.values("devices/a") == [1]
    await rig.clock.advance(EVERY_S)
    assert rig.values("devices/a") == [1, 2]


async def test_what_is_gone_is_deleted(rig: Rig) -> None:
    rig.change("devices/a", 1)
    await rig.clock.advance(1.0)
    rig.change("devices/a", None)
    await rig.clock.advance(1.0)

    assert rig.store.kept == {}


async def test_each_doc_says_whose_it_is_and_which_write_it_was(rig: Rig) -> None:
    for value in range(3):
        for key in ("devices/a", "functions/f"):
            rig.change(key, value)
        await rig.clock.advance(1.0)

    docs = [doc for _, _, doc in rig.store.writes if doc is not None]
    assert {doc.epoch for doc in docs} == {7}
    assert [doc.seq for doc in docs] == [1, 2, 3, 4, 5, 6]


async def test_a_store_that_comes_back_gets_the_newest_only(rig: Rig) -> None:
    rig.store.away = True
    for value in range(1, 101):
        rig.change("devices/a", value)
        await rig.clock.advance(0.5)
    assert rig.behind.trouble == "the store does not answer"
    assert rig.store.tries < 40, "it is not asked more often than every 2 s"

    rig.store.away = False
    await rig.clock.advance(2.0)

    assert rig.values("devices/a") == [100]
    assert rig.behind.trouble == ""
    assert rig.behind.behind == 0


async def test_nothing_is_written_once_another_leads(rig: Rig) -> None:
    rig.store.ours = False
    rig.change("devices/a", 1)
    await rig.clock.advance(1.0)
    rig.store.ours = True
    rig.change("devices/a", 2)
    await rig.clock.advance(1.0)

    assert rig.behind.lost
    assert rig.task.done()
    assert rig.store.kept == {}


async def test_a_fleet_is_written_in_turns_and_no_device_is_forgotten(rig: Rig) -> None:
    """5,000 devices that all change all the time: no more than 1,000 docs a second, each in its turn."""
    keys = [f"devices/{number}" for number in range(5_000)]
    for _ in range(60):
        for key in keys:
            rig.state[key] = 1
            rig.touched[key] = None
        rig.behind.note()
        await rig.clock.advance(0.1)

    counted = Counter(key for _, key, _ in rig.store.writes)
    assert 5_000 <= len(rig.store.writes) <= 6_200
    assert len(counted) == 5_000
    assert max(rig.store.batches) <= 64


async def test_the_engine_is_written_now_and_then_even_if_nothing_happens(rig: Rig) -> None:
    """Its moment is what the ages in the other docs are counted from."""
    rig.state["engine"] = 1
    await rig.clock.advance(3 * BEAT_S + 1.0)

    assert rig.values("engine") == [1, 1, 1]


async def test_what_is_left_is_written_at_the_end(rig: Rig) -> None:
    rig.change("devices/a", 1)
    await settle()
    rig.change("devices/a", 2)

    assert await rig.behind.flush()

    assert rig.values("devices/a") == [1, 2]
