"""The dispatcher of asynchronous calls, over fakes: what it executes, when, and what becomes of it."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.async_calls.fakes import FakeCallbacks, MemoryAsyncQueue
from tests.waiting import LIMIT_S, eventually

from gpufaas_async_calls.call import INLINE_ANSWER, AcceptedCall, Body, CallStatus
from gpufaas_async_calls.callbacks import CallbackFailed, CallbackRefused
from gpufaas_async_calls.calls import AsyncCalls
from gpufaas_async_calls.retry import RetryPolicy
from gpufaas_async_calls.settings import AsyncSettings, QueueSettings
from gpufaas_core.errors import Overloaded, StorageFailed
from gpufaas_gateway.answering import Answer
from gpufaas_gateway.request import Request

F, G, H = "f.openfaas-fn", "g.openfaas-fn", "h.openfaas-fn"
AT_ONCE = RetryPolicy(attempts=3, min_wait_s=0.0, max_wait_s=0.0)


class Functions:
    """The invocation path: answers *status* and what `answer` says; with `gate` set, when that is set."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.bodies: list[bytes] = []
        self.requests: list[Request] = []
        self.statuses: list[int] = []
        """Of the next answers; then 200."""
        self.pieces: list[bytes] = [b"fine"]
        self.headers: list[tuple[bytes, bytes]] = []
        self.gate: asyncio.Event | None = None
        self.error: Exception | None = None
        self.at_once = self.most_at_once = 0
        self.ended = asyncio.Event()

    async def run(self, request: Request) -> Answer:
        self.requests.append(request)
        self.called.append(request.name)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            body, more = request.body or b"", request.body is None
            while more:
                assert request.caller is not None
                piece, more = await request.caller.receive()
                body += piece
            self.bodies.append(body)
            if self.gate is not None:
                await self.gate.wait()
            status = self.statuses.pop(0) if self.statuses else 200
            return Answer(status, self.headers, stream=Pieces(self))  # type: ignore[arg-type]
        finally:
            self.at_once -= 1


class Pieces:
    """The answer of `Functions`, in pieces."""

    def __init__(self, functions: Functions) -> None:
        self._pieces = list(functions.pieces)
        self._error = functions.error

    async def chunk(self) -> bytes | None:
        if self._error is not None:
            raise self._error
        return self._pieces.pop(0) if self._pieces else None

    def __enter__(self) -> "Pieces":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Rig:
    def __init__(self, folder: Path, settings: AsyncSettings) -> None:
        self.queue = MemoryAsyncQueue(folder)
        self.functions = Functions()
        self.callbacks = FakeCallbacks()
        self.policies: dict[str, RetryPolicy] = {}
        self.queues: dict[str, str] = {}
        self.calls = AsyncCalls(
            self.queue, self.functions.run, self.callbacks,
            lambda name: self.policies.get(name, AT_ONCE), settings,
            queue_of=lambda name: self.queues.get(name, "faas-request"), rng=random.Random(1), clock=lambda: 1000.0,
        )  # fmt: skip

    async def send(self, name: str = "1", function: str = F, callback: str | None = None, body: Body = b"x") -> None:
        self.calls.backlog.reserve(function)
        await self.calls.accept(
            AcceptedCall(name, function, "f", b"/p", b"q=1", ((b"x-mine", b"1"),), callback, 1_000_000_000_000, body)
        )

    async def send_held(self, *names: str, **how: Any) -> None:
        """Send calls that run until the gate opens."""
        self.functions.gate = asyncio.Event()
        for name in names or ("1",):
            await self.send(name, **how)

    def seen(self, name: str = "1") -> CallStatus:
        found = self.queue.get(name)
        assert found is not None
        return found

    async def becomes(self, state: str, *names: str) -> None:
        async with asyncio.timeout(LIMIT_S):
            while any(self.seen(name).state != state for name in names or ("1",)):
                await asyncio.sleep(0)

    async def ends(self) -> None:
        """Wait until nothing is left to be done: what is written is counted a moment later."""
        async with asyncio.timeout(LIMIT_S):
            while self.calls.backlog.counts() or any(each.running for each in self.calls.queues().values()):
                await asyncio.sleep(0)


SETTINGS = AsyncSettings(
    max_queue=5, queue_limit=8, at_once=4, at_once_per_function=3, grace_s=0.05,
    queues={"slow": QueueSettings(1, 2)}, at_once_in_named=2, callback_retry=RetryPolicy(3, frozenset(), 0.0, 0.0),
)  # fmt: skip


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path, SETTINGS)
    running = asyncio.create_task(made.calls.run())
    made.calls.begin()
    yield made
    made.calls.finish()
    async with asyncio.timeout(LIMIT_S):
        await running


async def test_an_accepted_call_is_in_the_queue_and_then_executed_as_it_came(rig: Rig) -> None:
    await rig.send(body=b"hello")
    await rig.becomes("done")

    (request,) = rig.functions.requests
    assert (request.method, request.name, request.path, request.query) == ("POST", "f.openfaas-fn", "/p", b"q=1")
    assert request.headers == [(b"x-mine", b"1"), (b"x-call-id", b"1"), (b"content-length", b"5")]
    assert rig.functions.bodies == [b"hello"]
    assert (rig.seen().attempts, rig.seen().status) == (1, 200)
    await eventually(lambda: not rig.calls.backlog.counts())


async def test_calls_that_come_together_share_a_write(rig: Rig) -> None:
    await asyncio.gather(*(rig.send(str(number)) for number in range(5)))

    assert rig.queue.writes[0] == 5


async def test_no_more_calls_run_at_once_than_the_bounds_say_and_one_function_leaves_room_for_another(rig: Rig) -> None:
    await rig.send_held("f0", "f1", "f2", "f3")
    await rig.send("g", G)

    await rig.becomes("running", "f0", "f1", "f2", "g")

    assert rig.seen("f3").state == "queued"
    rig.functions.gate.set()
    await rig.becomes("done", "f0", "f1", "f2", "f3", "g")
    assert rig.functions.most_at_once == 4


async def test_a_full_queue_refuses_until_a_call_has_ended(rig: Rig) -> None:
    await rig.send_held(*"01234")

    with pytest.raises(Overloaded, match=r"f\.openfaas-fn is full: 5"):
        rig.calls.backlog.reserve(F)
    for _ in range(3):
        rig.calls.backlog.reserve(G)
    with pytest.raises(Overloaded, match="full: 8"):
        rig.calls.backlog.reserve(G)

    rig.calls.backlog.release(G)
    rig.functions.gate.set()
    await rig.becomes("done", *map(str, range(5)))
    rig.calls.backlog.reserve(F)


async def test_what_is_not_written_is_not_accepted_and_holds_no_place(rig: Rig) -> None:
    rig.queue.failure = "the disk is full"

    with pytest.raises(StorageFailed, match="full"):
        await rig.send()

    assert rig.calls.backlog.counts() == {}
    rig.queue.failure = None
    await rig.send()
    await rig.becomes("done")


async def test_an_outcome_that_cannot_be_written_is_written_later(rig: Rig) -> None:
    await rig.send_held()
    await rig.becomes("running")
    rig.queue.failure = "the disk is full"
    rig.functions.gate.set()
    with pytest.raises(StorageFailed):
        await rig.send("2")

    rig.queue.failure = None

    await rig.becomes("done")
    assert rig.functions.called == ["f.openfaas-fn"]


async def test_what_cannot_be_claimed_is_accepted_all_the_same(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue that is elsewhere may be written to, and be away when it is read from."""
    claim = rig.queue.claim
    failures = [StorageFailed("it went away")]

    def fails_once(*args: Any) -> Any:
        if failures:
            raise failures.pop()
        return claim(*args)

    monkeypatch.setattr(rig.queue, "claim", fails_once)

    await rig.send()

    assert failures == []
    assert (rig.calls.backlog.counts(), rig.seen().state) == ({F: 1}, "queued")  # it is due again a second later


async def test_calls_that_are_found_are_executed_and_counted(rig: Rig) -> None:
    """As those of a gateway that died."""
    rig.queue.write([AcceptedCall("1", F, "f", b"", b"", (), None, 0, b"x")], [])

    rig.calls.find(rig.queue.waiting())

    await rig.becomes("done")
    await rig.ends()


async def test_a_call_that_is_lost_is_aborted_and_counted_no_more(rig: Rig) -> None:
    await rig.send_held()
    await rig.becomes("running")
    ((cancelled,),) = rig.queue.cancel(["1"], 300.0)

    rig.calls.lose(cancelled.key, F, is_claimed=True)

    assert rig.calls.backlog.counts() == {}
    await eventually(lambda: not rig.functions.at_once)
    await rig.send("2")
    rig.functions.gate.set()
    await rig.becomes("done", "2")
    await rig.ends()


async def test_the_answer_is_delivered_with_openfaas_headers(rig: Rig) -> None:
    rig.functions.headers = [(b"content-type", b"text/x"), (b"x-start-time", b"7"), (b"transfer-encoding", b"chunked")]
    rig.functions.statuses = [404]

    await rig.send(callback="http://receiver/")
    await rig.becomes("done")

    ((url, headers, body),) = rig.callbacks.delivered
    assert (url, body) == ("http://receiver/", b"fine")
    assert float(headers.pop("x-duration-seconds")) >= 0
    assert headers == {
        "content-type": "text/x", "x-call-id": "1", "x-start-time": "1000000000000", "x-function-name": "f",
        "x-function-status": "404", "x-retry": "1", "x-retry-max": "3",
    }  # fmt: skip


async def test_a_large_answer_goes_through_a_file_that_is_gone_afterwards(rig: Rig, tmp_path: Path) -> None:
    rig.functions.pieces = [b"x" * 300_000] * 5
    assert sum(map(len, rig.functions.pieces)) > INLINE_ANSWER

    await rig.send(callback="http://receiver/")
    await rig.becomes("done")

    assert len(rig.callbacks.delivered[0][2]) == 1_500_000
    assert list(tmp_path.iterdir()) == []


async def test_an_answer_without_end_is_kept_up_to_a_bound(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpufaas_async_calls.attempts.MAX_ANSWER", 2_000_000)
    rig.functions.pieces = [b"x" * 300_000] * 10

    await rig.send(callback="http://receiver/")
    await rig.becomes("dead")

    assert "more than the 2 MiB that are kept for a callback" in rig.seen().reason
    assert list(tmp_path.iterdir()) == []


async def test_an_answer_that_nobody_wants_is_not_kept(rig: Rig, tmp_path: Path) -> None:
    rig.functions.pieces = [b"x" * 300_000] * 5

    await rig.send()
    await rig.becomes("done")

    assert list(tmp_path.iterdir()) == []


async def test_a_large_body_comes_from_its_file(rig: Rig) -> None:
    file = rig.calls.new_file()
    file.write(b"x" * 600_000)

    await rig.send(body=file.keep())
    await rig.becomes("done")

    assert rig.functions.bodies == [b"x" * 600_000]
    assert rig.functions.requests[0].headers[-1] == (b"content-length", b"600000")


async def test_a_failure_is_tried_again(rig: Rig) -> None:
    rig.functions.statuses = [500, 500]

    await rig.send(callback="http://receiver/")
    await rig.becomes("done")

    assert len(rig.functions.called) == 3
    assert rig.seen().attempts == 3
    assert len(rig.callbacks.delivered) == 1


async def test_the_last_failure_is_delivered_and_the_call_a_dead_letter(rig: Rig) -> None:
    rig.functions.statuses = [500, 500, 500]

    await rig.send(callback="http://receiver/")
    await rig.becomes("dead")

    assert rig.callbacks.delivered[0][1]["x-function-status"] == "500"
    assert "last of 3 attempts" in str(rig.seen().reason)
    assert await rig.calls.retry("1")
    await rig.becomes("done")
    assert len(rig.functions.called) == 4


async def test_an_answer_that_breaks_off_is_a_failure_of_the_platform(rig: Rig) -> None:
    rig.functions.error = RuntimeError("cut")
    rig.policies[F] = RetryPolicy(attempts=1, codes=frozenset())

    await rig.send()
    await rig.becomes("dead")

    assert rig.seen().status == 502


async def test_a_callback_is_tried_again_without_the_function(rig: Rig) -> None:
    rig.callbacks.failures = [CallbackFailed("down"), CallbackFailed("down")]

    await rig.send(callback="http://receiver/")
    await rig.becomes("done")

    assert (len(rig.functions.called), len(rig.callbacks.delivered)) == (1, 1)


@pytest.mark.parametrize("failures", [[CallbackFailed("down")] * 3, [CallbackRefused("no")]])
async def test_a_callback_that_is_never_taken_makes_a_dead_letter_that_keeps_its_answer(
    rig: Rig, failures: list[Exception]
) -> None:
    rig.callbacks.failures = list(failures)  # type: ignore[arg-type]
    await rig.send(callback="http://receiver/")
    await rig.becomes("dead")

    assert await rig.calls.retry("1")
    await rig.becomes("done")

    assert len(rig.functions.called) == 1
    assert rig.callbacks.delivered[0][2] == b"fine"


async def test_dead_letters_are_listed_and_discarded(rig: Rig) -> None:
    rig.functions.statuses = [500] * 3
    await rig.send()
    await rig.becomes("dead")

    assert [each.id for each in await rig.calls.dead(F, 10)] == ["1"]
    assert await rig.calls.discard("1")
    assert not await rig.calls.discard("1")
    assert not await rig.calls.retry("1")


async def test_nothing_is_executed_before_functions_can_be_called(tmp_path: Path) -> None:
    rig = Rig(tmp_path, SETTINGS)
    running = asyncio.create_task(rig.calls.run())
    await rig.send()

    assert rig.seen().state == "queued"
    rig.calls.begin()
    await rig.becomes("done")
    rig.calls.finish()
    await running


async def test_what_the_queue_has_at_the_start_is_executed(tmp_path: Path) -> None:
    rig = Rig(tmp_path, SETTINGS)
    rig.queue.write([AcceptedCall("1", F, "f", b"", b"", (), None, 1_000_000_000_000)], [])
    running = asyncio.create_task(rig.calls.run())
    rig.calls.begin()

    await rig.becomes("done")

    rig.calls.finish()
    await running


async def test_a_stop_lets_what_runs_end_and_leaves_the_rest(tmp_path: Path) -> None:
    rig = Rig(tmp_path, AsyncSettings(at_once=1))
    running = asyncio.create_task(rig.calls.run())
    rig.calls.begin()
    await rig.send_held("1", "2")
    await rig.becomes("running", "1")

    rig.calls.stop()
    await rig.send("3")
    rig.calls.finish()
    rig.functions.gate.set()
    await running

    assert [rig.seen(name).state for name in "123"] == ["done", "queued", "queued"]


async def test_what_does_not_end_within_the_grace_stays_queued(tmp_path: Path) -> None:
    rig = Rig(tmp_path, SETTINGS)
    running = asyncio.create_task(rig.calls.run())
    rig.calls.begin()
    await rig.send_held()
    await rig.becomes("running")

    rig.calls.finish()
    await running

    assert rig.queue.waiting()[0].count == 1
    assert rig.functions.at_once == 0


# --- taking calls back ---


async def test_a_call_that_waits_is_cancelled_and_never_executed(rig: Rig) -> None:
    await rig.send_held(*"0123")
    await rig.becomes("running", "0", "1", "2")

    assert await rig.calls.cancel("3") == "cancelled"
    rig.functions.gate.set()
    await rig.becomes("done", "0", "1", "2")

    assert rig.seen("3").state == "cancelled"
    assert len(rig.functions.called) == 3
    await rig.ends()


async def test_a_call_that_runs_is_aborted_and_its_place_is_free(rig: Rig) -> None:
    await rig.send_held(*"0123", callback="http://receiver/")
    await rig.becomes("running", "0", "1", "2")

    assert await rig.calls.cancel("1") == "cancelled"

    await rig.becomes("running", "3")
    rig.functions.gate.set()
    await rig.becomes("done", "0", "2", "3")
    assert rig.seen("1").state == "cancelled"
    assert sorted(headers["x-call-id"] for _, headers, _ in rig.callbacks.delivered) == ["0", "2", "3"]
    await rig.ends()


async def test_a_call_that_waits_for_a_retry_is_cancelled(rig: Rig) -> None:
    rig.policies[F] = RetryPolicy(attempts=3, min_wait_s=3600.0, max_wait_s=3600.0)
    rig.functions.statuses = [500]
    await rig.send()
    async with asyncio.timeout(LIMIT_S):
        while rig.seen().attempts != 1:
            await asyncio.sleep(0)

    assert await rig.calls.cancel("1") == "cancelled"

    assert (rig.seen().state, rig.seen().due_at, rig.calls.backlog.counts()) == ("cancelled", None, {})


async def test_a_callback_that_is_due_again_is_not_made_once_its_call_is_cancelled(rig: Rig, tmp_path: Path) -> None:
    rig.functions.pieces = [b"x" * 300_000] * 5
    rig.callbacks.failures = [CallbackFailed("down")]
    rig.callbacks.held = asyncio.Event()
    await rig.send(callback="http://receiver/")
    await rig.becomes("callback")

    assert await rig.calls.cancel("1") == "cancelled"

    await eventually(lambda: not list(tmp_path.iterdir()))
    assert rig.callbacks.delivered == []
    assert rig.seen().state == "cancelled"


async def test_what_has_ended_is_not_cancelled_but_may_be_twice(rig: Rig) -> None:
    rig.functions.statuses = [200, 500, 500, 500]
    await rig.send("done")
    await rig.becomes("done", "done")
    await rig.send("dead")
    await rig.becomes("dead", "dead")
    await rig.send_held("live")

    states = [await rig.calls.cancel(name) for name in ("done", "dead", "live", "live", "nobody")]

    assert states == ["done", "dead", "cancelled", "cancelled", None]


async def test_calls_that_share_an_id_are_cancelled_together(rig: Rig) -> None:
    await rig.send_held("one")
    await rig.send("one", G)

    assert await rig.calls.cancel("one") == "cancelled"

    assert rig.calls.backlog.counts() == {}
    assert rig.queue.waiting() == []


async def test_what_cannot_be_written_is_not_cancelled(rig: Rig) -> None:
    await rig.send_held()
    await rig.becomes("running")
    rig.queue.failure = "the disk is full"

    with pytest.raises(StorageFailed):
        await rig.calls.cancel("1")

    rig.queue.failure = None
    rig.functions.gate.set()
    await rig.becomes("done")


# --- queues ---


async def test_a_queue_has_a_concurrency_of_its_own_and_a_flooded_one_holds_no_other_up(rig: Rig) -> None:
    rig.queues = {F: "slow", G: "other"}
    await rig.send_held("f0", "f1")
    for number in range(3):
        await rig.send(f"g{number}", G)
    await rig.send("h", H)

    await rig.becomes("running", "f0", "g0", "g1", "h")

    assert [rig.seen(name).state for name in ("f1", "g2")] == ["queued", "queued"]
    queues = rig.calls.queues()
    assert {name: (each.concurrency, each.pending, each.running) for name, each in queues.items()} == {
        "faas-request": (4, 1, 1), "other": (2, 3, 2), "slow": (1, 2, 1),
    }  # fmt: skip
    rig.functions.gate.set()
    await rig.becomes("done", "f0", "f1", "g0", "g1", "g2", "h")


async def test_a_full_queue_refuses_its_own_functions_only(rig: Rig) -> None:
    rig.queues = {F: "slow", G: "slow"}
    rig.calls.backlog.reserve(F)
    rig.calls.backlog.reserve(F)

    with pytest.raises(Overloaded, match="queue slow is full: 2"):
        rig.calls.backlog.reserve(G)
    rig.calls.backlog.reserve(H)

    rig.calls.backlog.release(F)
    rig.calls.backlog.reserve(G)


async def test_a_function_that_goes_over_to_another_queue_takes_its_backlog_along(rig: Rig) -> None:
    rig.queues = {F: "slow", G: "slow"}
    await rig.send_held("f")
    await rig.becomes("running", "f")
    await rig.send("g", G)
    assert rig.seen("g").state == "queued"

    rig.queues[G] = "other"
    await rig.send("h", H)

    await rig.becomes("running", "g", "h")
    rig.functions.gate.set()
    await rig.becomes("done", "f", "g", "h")
    await rig.ends()
    assert rig.calls.queues().keys() == {"faas-request", "slow"}
