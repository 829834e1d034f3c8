"""Asynchronous calls in etcd when gateways die, lose their lease, and meet each other."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.etcd_process import EtcdProcess
from tests.unit.async_calls.fakes import FakeCallbacks
from tests.waiting import LIMIT_S, eventually

from gpufaas_adapters.etcd.async_queue import EtcdAsyncQueue
from gpufaas_adapters.etcd.async_queue.records import BODIES, CALLS, DEAD, ENDED, GATEWAYS, MAX_BODY, PIECE
from gpufaas_adapters.etcd.client import Etcd, EtcdSettings
from gpufaas_async_calls.call import AcceptedCall, Body, Dead, Deliver, Done, KeptAnswer, Retry, Waiting
from gpufaas_async_calls.calls import AsyncCalls
from gpufaas_async_calls.retry import RetryPolicy
from gpufaas_core.errors import BodyTooLarge, StorageAway
from gpufaas_gateway.answering import Answer
from gpufaas_gateway.errors import status_of
from gpufaas_gateway.request import Request

F, G = "f.openfaas-fn", "g.openfaas-fn"


def accepted(name: str = "1", *, at: float = 100.0, function: str = F, body: Body = b"x") -> AcceptedCall:
    return AcceptedCall(name, function, "f", b"/a", b"q=1", ((b"x-one", b"\xff"),), None, int(at * 1e9), body)


class Gateway:
    """One gateway: its connection, its queue, and what it is told by it."""

    def __init__(self, etcd: Etcd, queue: EtcdAsyncQueue) -> None:
        self.etcd = etcd
        self.queue = queue
        self.found: list[Waiting] = []
        self.lost: list[tuple[int, str, bool]] = []
        self.news = asyncio.Event()
        self._task = asyncio.create_task(queue.follow(self._on_found, self._on_lost))

    def _on_found(self, waiting: Any) -> None:
        self.found += waiting
        self.news.set()

    def _on_lost(self, key: int, function: str, is_claimed: bool) -> None:
        self.lost.append((key, function, is_claimed))
        self.news.set()

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not done():
                self.news.clear()
                await self.news.wait()

    async def write(self, *args: Any) -> None:
        await asyncio.to_thread(self.queue.write, *args)

    async def claim(self, limit: int = 100, now: float = 1000.0, function: str = F) -> list[Any]:
        claimed, _ = await asyncio.to_thread(self.queue.claim, "queued", function, now, limit)
        return claimed

    async def state(self, call: str = "1") -> str | None:
        found = await asyncio.to_thread(self.queue.get, call)
        return found.state if found else None

    async def die(self) -> None:
        """As SIGKILL does: its lease is not kept alive, and nothing is given back."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.queue.owner.registration._task.cancel()
        await self.etcd.close()


@pytest.fixture
async def gateway(settings: EtcdSettings, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Start a gateway on the shared etcd, or on another. One whose lease is to end gets a short one: *ttl_s*."""
    opened: list[Gateway] = []

    async def start(name: str, where: EtcdSettings = settings, ttl_s: int = 600, **options: Any) -> Gateway:
        etcd = Etcd(where)
        queue = await EtcdAsyncQueue.open(etcd, name, tmp_path / f"{name}-{len(opened)}", ttl_s=ttl_s, **options)
        opened.append(Gateway(etcd, queue))
        return opened[-1]

    yield start
    for each in opened:
        await each.die()


async def test_the_calls_of_a_gateway_that_dies_are_anothers(gateway: Callable[..., Any]) -> None:
    first, second = await gateway("g1", ttl_s=2), await gateway("g2")
    file = first.queue.new_file()
    large = random.Random(1).randbytes(3 * PIECE + 17)
    file.write(large)
    await first.write([accepted("claimed"), accepted("large", at=101.0, body=file.keep())], [])
    await first.write([accepted("other", at=50.0, function=G)], [])
    (claimed,) = await first.claim(1)
    assert claimed.call.id == "claimed"
    assert await second.claim() == []

    await first.die()

    await second.until(lambda: sum(each.count for each in second.found) == 3)
    assert sorted(second.found, key=lambda each: each.function) == [
        Waiting("queued", F, 2, 100.0),
        Waiting("queued", G, 1, 50.0),
    ]
    small, big = await second.claim()
    assert (small.call, big.call.id) == (accepted("claimed"), "large")
    assert big.call.body.read_bytes() == large
    await second.write([], [Done(small.key, 500.0, 200, 1), Done(big.key, 500.0, 200, 1)])
    assert [await second.state(name) for name in ("claimed", "large", "other")] == ["done", "done", "queued"]
    assert not big.call.body.exists()


async def test_a_gateway_that_is_stopped_gives_its_calls_away_at_once(gateway: Callable[..., Any]) -> None:
    first, second = await gateway("g1"), await gateway("g2")
    await first.write([accepted()], [])

    await first.queue.stop()

    await second.until(lambda: second.found == [Waiting("queued", F, 1, 100.0)])
    assert [each.call.id for each in await second.claim()] == ["1"]


async def test_of_several_survivors_each_call_has_one(gateway: Callable[..., Any]) -> None:
    first, *others = [await gateway(f"g{number}") for number in range(4)]
    await first.write([accepted(str(number)) for number in range(150)], [])

    await first.queue.stop()
    await eventually(lambda: sum(each.count for other in others for each in other.found) == 150)

    claimed = [each.call.id for other in others for each in await other.claim(200)]
    assert sorted(claimed, key=int) == [str(number) for number in range(150)]


async def test_the_next_life_of_a_gateway_finds_what_the_last_one_left(gateway: Callable[..., Any]) -> None:
    first = await gateway("g1")
    await first.write([accepted("1"), accepted("2")], [])
    (claimed,) = await first.claim(1)
    await first.write([], [Done(claimed.key, 500.0, 200, 1)])
    await first.queue.stop()

    again = await gateway("g1")

    assert await asyncio.to_thread(again.queue.waiting) == [Waiting("queued", F, 1, 100.0)]
    assert [each.call.id for each in await again.claim()] == ["2"]


async def test_a_gateway_that_lost_its_lease_works_on_nothing_that_is_anothers(
    gateway: Callable[..., Any], etcd_server: EtcdProcess
) -> None:
    first, second = await gateway("g1", ttl_s=2), await gateway("g2")
    await first.write([accepted(str(number)) for number in range(5)], [])
    running = await first.claim(2)

    etcd_server.ctl("lease", "revoke", f"{first.queue.owner.registration.lease.id:x}")
    await second.until(lambda: sum(each.count for each in second.found) == 5)
    await first.until(lambda: len(first.lost) == 5)

    assert sorted(is_claimed for _, _, is_claimed in first.lost) == [False, False, False, True, True]
    assert await first.claim() == []
    again = await second.claim()
    await first.write([], [Dead(each.key, 500.0, 1, 500, "late") for each in running])
    assert [await second.state(str(number)) for number in range(5)] == ["running"] * 5
    await second.write([], [Done(each.key, 500.0, 200, 1) for each in again])
    assert [await first.state(str(number)) for number in range(5)] == ["done"] * 5
    await first.write([accepted("new")], [])
    assert [each.call.id for each in await first.claim()] == ["new"]


async def test_the_late_outcome_of_a_call_that_was_taken_over_is_dropped(gateway: Callable[..., Any]) -> None:
    """It had not heard yet that it is not its any more."""
    first, second = await gateway("g1"), await gateway("g2")
    await first.write([accepted()], [])
    (claimed,) = await first.claim()
    first._task.cancel()
    await first.queue.stop()
    await second.until(lambda: bool(second.found))

    await first.write([], [Retry(claimed.key, 2000.0, 1, 503, "late")])

    assert [(each.call.id, each.attempts) for each in await second.claim()] == [("1", 0)]


async def test_a_call_is_cancelled_through_any_gateway(gateway: Callable[..., Any]) -> None:
    first, second = await gateway("g1"), await gateway("g2")
    await first.write([accepted("runs"), accepted("waits", at=200.0)], [])
    (claimed,) = await first.claim(1)

    found = await asyncio.to_thread(second.queue.cancel, ["runs", "waits", "none"], 300.0)

    assert [[(each.function, each.is_ours) for each in one] for one in found] == [[(F, False)], [(F, False)], []]
    await first.until(lambda: len(first.lost) == 2)
    assert first.lost[0] == (claimed.key, F, True)
    await first.write([], [Done(claimed.key, 500.0, 200, 1)])
    assert [await first.state(name) for name in ("runs", "waits")] == ["cancelled", "cancelled"]
    assert await first.claim() == []


async def test_a_dead_letter_is_retried_through_any_gateway(gateway: Callable[..., Any]) -> None:
    first, second = await gateway("g1"), await gateway("g2")
    await first.write([accepted()], [])
    (claimed,) = await first.claim()
    await first.write([], [Dead(claimed.key, 300.0, 10, 500, "status 500")])
    assert [each.id for each in await asyncio.to_thread(second.queue.list_dead)] == ["1"]

    assert await asyncio.to_thread(second.queue.requeue, "1", 400.0) == Waiting("queued", F, 1, 400.0)

    assert await first.claim() == []
    (again,) = await second.claim()
    assert (again.call, again.attempts) == (accepted(), 0)


async def test_too_large_a_body_is_refused_with_the_limit(gateway: Callable[..., Any]) -> None:
    queue = (await gateway("g1")).queue
    file = queue.new_file()
    file.write(b"x" * MAX_BODY)

    with pytest.raises(BodyTooLarge, match=r"may have 8 MiB in a cluster") as refused:
        file.write(b"x")

    assert status_of(refused.value) == 413
    file.discard()


async def test_a_body_of_the_largest_size_is_kept(gateway: Callable[..., Any], etcd: Etcd) -> None:
    first, second = await gateway("g1"), await gateway("g2")
    body = random.Random(1).randbytes(MAX_BODY)
    file = first.queue.new_file()
    file.write(body)
    await first.write([accepted(body=file.keep())], [])
    (claimed,) = await first.claim()
    answer = first.queue.new_file()
    answer.write(body[::-1])
    await first.write([], [Deliver(claimed.key, 300.0, 1, KeptAnswer(200, (), answer.keep(), 0.1, 10))])
    assert len(await etcd.keys(BODIES)) == 2 * MAX_BODY // PIECE

    await first.queue.stop()
    await second.until(lambda: second.found == [Waiting("callback", F, 1, 300.0)])
    ((taken,), _) = await asyncio.to_thread(second.queue.claim, "callback", F, 1000.0, 1)

    assert taken.call.body.read_bytes() == body
    assert taken.answer.body.read_bytes() == body[::-1]
    await second.write([], [Done(taken.key, 500.0, 200, 1)])
    assert len(await etcd.keys(BODIES)) == 0


async def test_nothing_is_left_of_what_has_ended_but_its_status_for_a_while(
    gateway: Callable[..., Any], etcd: Etcd
) -> None:
    first = await gateway("g1")
    await first.write([accepted(str(number), body=b"x" * 300_000) for number in range(10)], [])
    for claimed in await first.claim():
        await first.write([], [Done(claimed.key, 500.0, 200, 1)])

    assert (len(await etcd.keys(CALLS)), len(await etcd.keys(BODIES))) == (0, 0)
    ended = (await etcd.range(ENDED)).items
    assert len(ended) == 10
    assert len({item.lease for item in ended} - {0}) == 1


async def test_pieces_of_a_body_without_a_call_are_removed(gateway: Callable[..., Any], etcd: Etcd) -> None:
    """Its gateway died before it could write the call."""
    first = await gateway("g1")
    await first.write([accepted("kept")], [])
    await etcd.put(f"{BODIES}{7 << 32 | 1:024x}/request/0000", b"orphan")

    await gateway("g2")

    assert len(await etcd.keys(BODIES)) == 1
    assert [each.call.body for each in await first.claim()] == [b"x"]


async def test_dead_letters_beyond_the_limit_are_forgotten(gateway: Callable[..., Any], etcd: Etcd) -> None:
    first = await gateway("g1", dead_kept=30)
    await first.write([accepted(str(number), at=float(number)) for number in range(100)], [])

    await first.write([], [Dead(each.key, 200.0 + each.call.accepted_at, 1, 500, "no") for each in await first.claim()])

    left = await asyncio.to_thread(first.queue.list_dead)
    assert [each.id for each in left] == [str(number) for number in range(70, 100)]
    assert (len(await etcd.keys(DEAD)), len(await etcd.keys(BODIES))) == (30, 30)


async def test_ids_of_callers_are_text_and_nothing_else(gateway: Callable[..., Any]) -> None:
    first = await gateway("g1")
    names = ["a", "a/b", "../a", "a%2Fb", "ä b"]
    await first.write([accepted(name) for name in names], [])

    (found,) = await asyncio.to_thread(first.queue.cancel, ["a"], 300.0)

    assert len(found) == 1
    assert [await first.state(name) for name in names] == ["cancelled", *["queued"] * 4]


async def test_etcd_has_what_was_acknowledged_and_nothing_else_after_a_kill(
    gateway: Callable[..., Any], make_etcd: Callable[..., EtcdProcess]
) -> None:
    server = make_etcd()
    first = await gateway("g1", EtcdSettings((server.endpoint,)), ttl_s=2)
    await first.write([accepted("kept"), accepted("works", at=200.0)], [])
    (claimed,) = await first.claim(1)

    server.kill()
    with pytest.raises(StorageAway, match=f"etcd at {server.endpoint}"):
        await first.write([accepted("refused")], [])
    with pytest.raises(StorageAway):
        await first.write([], [Done(claimed.key, 500.0, 200, 1)])
    server.start()

    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                await first.write([], [Done(claimed.key, 500.0, 200, 1)])
                break
            except StorageAway:
                await asyncio.sleep(0.02)
    assert [await first.state(name) for name in ("kept", "works", "refused")] == ["done", "queued", None]
    async with asyncio.timeout(LIMIT_S):  # until its lease is confirmed
        while not (left := await first.claim()):
            await asyncio.sleep(0.02)
    assert [each.call.id for each in left] == ["works"]


async def test_an_outcome_whose_answer_was_lost_is_not_lost(gateway: Callable[..., Any]) -> None:
    """etcd had written it when the connection broke: it is told again, and found."""
    first = await gateway("g1")
    await first.write([accepted()], [])
    (claimed,) = await first.claim()
    txn = first.etcd.txn

    async def broken(*args: Any) -> Any:
        await txn(*args)
        raise StorageAway("the answer was lost")

    first.etcd.txn = broken
    with pytest.raises(StorageAway):
        await first.write([], [Retry(claimed.key, 2000.0, 1, 503, "status 503")])
    first.etcd.txn = txn
    await first.write([], [Retry(claimed.key, 2000.0, 1, 503, "status 503")])

    assert first.lost == []
    assert [each.attempts for each in await first.claim(now=2000.0)] == [1]


# --- with those who use it ---


@asynccontextmanager
async def serving(gateway: Gateway, invoke: Callable[[str], Any]) -> AsyncIterator[AsyncCalls]:
    """The gateway's `AsyncCalls` on its queue, with functions that are *invoke*."""

    async def run(request: Request) -> Answer:
        return Answer(await invoke(dict(request.headers)[b"x-call-id"].decode()), [])

    policy = RetryPolicy(20, frozenset({503}), 0.01, 0.1)
    calls = AsyncCalls(gateway.queue, run, FakeCallbacks(), lambda _: policy)
    gateway._task.cancel()
    await asyncio.gather(gateway._task, return_exceptions=True)
    running = asyncio.create_task(calls.run())
    calls.begin()
    gateway._task = asyncio.create_task(gateway.queue.follow(calls.find, calls.lose))
    try:
        yield calls
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_what_a_gateway_accepted_is_executed_by_another_when_it_dies(gateway: Callable[..., Any]) -> None:
    first, second = await gateway("g1", ttl_s=2), await gateway("g2")
    hung = asyncio.Event()
    executed: list[str] = []

    async def hangs(_: str) -> int:
        hung.set()
        await asyncio.Event().wait()
        return 200

    async def answers(call: str) -> int:
        executed.append(call)
        return 200

    async with serving(second, answers) as others:
        async with serving(first, hangs) as calls:
            for number in range(40):
                calls.backlog.reserve(F)
                await calls.accept(accepted(str(number), at=float(number)))
            await hung.wait()
        await first.die()

        await eventually(lambda: len(executed) >= 40 and not others.backlog.counts())

    assert sorted(executed, key=int) == [str(number) for number in range(40)]
    assert {await second.state(str(number)) for number in range(40)} == {"done"}


async def test_a_running_call_is_aborted_when_it_is_cancelled_through_another_gateway(
    gateway: Callable[..., Any],
) -> None:
    first, second = await gateway("g1"), await gateway("g2")
    began, ended = asyncio.Event(), asyncio.Event()

    async def hangs(_: str) -> int:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return 200

    async with serving(first, hangs) as calls, serving(second, hangs) as others:
        calls.backlog.reserve(F)
        await calls.accept(accepted())
        await began.wait()

        assert await others.cancel("1") == "cancelled"

        await eventually(lambda: ended.is_set() and not calls.backlog.counts())
    assert (calls.backlog.counts(), others.backlog.counts()) == ({}, {})
    assert await first.state() == "cancelled"


async def test_a_gateway_says_that_it_is_there(gateway: Callable[..., Any], etcd: Etcd) -> None:
    await gateway("g1")

    (item,) = (await etcd.range(GATEWAYS)).items

    assert item.key.startswith(f"{GATEWAYS}g1-")
    assert item.lease


@pytest.mark.slow
async def test_nothing_that_was_acknowledged_is_lost_while_gateways_and_etcd_die(
    gateway: Callable[..., Any], make_etcd: Callable[..., EtcdProcess]
) -> None:
    """Under steady load; what is executed twice was running at a gateway that died or could not be seen."""
    server, rng = make_etcd(), random.Random(1)
    where = EtcdSettings((server.endpoint,), timeout_s=2.0)
    acknowledged: set[str] = set()
    executed: Counter[str] = Counter()
    flights: set[asyncio.Task[None]] = set()

    async def answers(call: str) -> int:
        await asyncio.sleep(rng.uniform(0.0, 0.02))
        executed[call] += 1
        return 503 if rng.random() < 0.05 else 200

    async def send(calls: AsyncCalls, call: str) -> None:
        calls.backlog.reserve(F)
        try:
            await calls.accept(accepted(call, at=time.time(), body=rng.randbytes(rng.choice((0, 10, 50_000)))))
            acknowledged.add(call)
        except StorageAway:
            pass

    async with AsyncExitStack() as stack:
        alive: list[tuple[Gateway, AsyncCalls]] = []

        async def begin(name: str) -> None:
            made = await gateway(name, where, ttl_s=2)
            alive.append((made, await stack.enter_async_context(serving(made, answers))))

        async def load() -> None:
            for number in range(10_000):
                task = asyncio.create_task(send(rng.choice(alive)[1], str(number)))
                flights.add(task)
                task.add_done_callback(flights.discard)
                await asyncio.sleep(0.01)

        for number in range(3):
            await begin(f"g{number}")

        async def more() -> None:
            before = len(acknowledged)
            await eventually(lambda: len(acknowledged) > before + 40, "so many calls are accepted")

        loading = asyncio.create_task(load())
        for number in range(2):
            await more()
            first, _ = alive.pop(0)
            await first.die()
            await begin(f"h{number}")
            await more()
            await asyncio.to_thread(server.kill)
            await asyncio.sleep(number * 3.0)  # the second time for longer than a lease
            await asyncio.to_thread(server.start)
        loading.cancel()

        async with asyncio.timeout(2 * LIMIT_S):
            while any(calls.backlog.counts() for _, calls in alive) or await alive[0][0].etcd.keys(CALLS):
                await asyncio.sleep(0.05)
        states = {call: await alive[0][0].state(call) for call in acknowledged}
        assert set(states.values()) == {"done"}
        assert acknowledged <= executed.keys()
        assert await alive[0][0].etcd.keys(BODIES) == []
