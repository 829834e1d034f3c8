"""
What every `AsyncQueue` does: the fake that tests use, SQLite and etcd. Another adapter is added to `queue`; what only
one of them does stands below, and in test_etcd_async_queue.py.
"""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.unit.async_calls.fakes import MemoryAsyncQueue
from tests.waiting import LIMIT_S

from gpufaas_adapters.etcd.async_queue import EtcdAsyncQueue
from gpufaas_adapters.sqlite.async_queue import SqliteAsyncQueue
from gpufaas_async_calls.call import (
    AcceptedCall,
    Body,
    CallStatus,
    ClaimedCall,
    Dead,
    Deliver,
    Done,
    KeptAnswer,
    Outcome,
    Phase,
    Redeliver,
    Retry,
    Waiting,
)
from gpufaas_async_calls.ports import AsyncQueue
from gpufaas_core.errors import StorageFailed

F, G = "f.openfaas-fn", "g.openfaas-fn"
ANSWER = KeptAnswer(200, ((b"content-type", b"text/plain"),), b"fine", 0.25, 10)


@pytest.fixture(params=["memory", "sqlite", "etcd"])
def queue(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AsyncQueue]:
    made: AsyncQueue
    match request.param:
        case "memory":
            made = MemoryAsyncQueue(tmp_path)
        case "sqlite":
            made = SqliteAsyncQueue(tmp_path)
        case _:
            loop: asyncio.AbstractEventLoop = request.getfixturevalue("elsewhere")
            opening = EtcdAsyncQueue.open(request.getfixturevalue("etcd_elsewhere"), "g1", tmp_path)
            made = asyncio.run_coroutine_threadsafe(opening, loop).result(30)
    yield made
    if isinstance(made, SqliteAsyncQueue):
        made.close()
    elif isinstance(made, EtcdAsyncQueue):
        asyncio.run_coroutine_threadsafe(made.stop(), loop).result(30)


def accepted(name: str = "1", *, at: float = 100.0, function: str = F, body: Body = b"x") -> AcceptedCall:
    return AcceptedCall(
        id=name, function=function, name="f", path=b"/a%2Fb", query=b"q=1", headers=((b"x-one", b"\xff"),),
        callback_url="http://receiver/", start_ns=int(at * 1e9), body=body,
    )  # fmt: skip


def claim_one(queue: AsyncQueue, phase: Phase = "queued", now: float = 1000.0) -> ClaimedCall:
    (claimed,), _ = queue.claim(phase, F, now, 1)
    return claimed


def seen(queue: AsyncQueue, name: str = "1") -> CallStatus:
    found = queue.get(name)
    assert found is not None
    return found


def dead_letter(queue: AsyncQueue, name: str = "1", *, at: float = 200.0, function: str = F) -> None:
    queue.write([accepted(name, function=function)], [])
    (claimed,), _ = queue.claim("queued", function, 1000.0, 1)
    queue.write([], [Dead(claimed.key, at, 10, 500, "status 500")])


def spooled(queue: AsyncQueue, content: bytes) -> Path:
    file = queue.new_file()
    file.write(content)
    return file.keep()


def test_a_new_queue_is_empty(queue: AsyncQueue) -> None:
    assert queue.waiting() == []
    assert queue.list_dead() == []
    assert queue.get("1") is None
    assert queue.claim("queued", F, 1000.0, 5) == ([], None)


def test_a_call_comes_back_as_it_was(queue: AsyncQueue) -> None:
    queue.write([accepted()], [])

    claimed = claim_one(queue)

    assert claimed.call == accepted()
    assert (claimed.attempts, claimed.deliveries, claimed.answer, claimed.exhausted) == (0, 0, None, None)


def test_calls_are_claimed_once_the_longest_due_first(queue: AsyncQueue) -> None:
    queue.write([accepted("b", at=2.0), accepted("a", at=1.0), accepted("c", at=3.0), accepted("g", function=G)], [])

    first, next_due = queue.claim("queued", F, 10.0, 2)
    second, none_left = queue.claim("queued", F, 10.0, 2)

    assert [each.call.id for each in first] == ["a", "b"]
    assert [each.call.id for each in second] == ["c"]
    assert (next_due, none_left) == (3.0, None)


def test_what_is_not_due_is_not_claimed_and_says_when(queue: AsyncQueue) -> None:
    queue.write([accepted(at=50.0)], [])

    assert queue.claim("queued", F, 49.0, 5) == ([], 50.0)


def test_a_retry_is_claimed_again_when_it_is_due(queue: AsyncQueue) -> None:
    queue.write([accepted()], [])
    queue.write([], [Retry(claim_one(queue).key, 2000.0, 1, 503, "status 503")])

    assert queue.claim("queued", F, 1999.0, 5) == ([], 2000.0)
    assert claim_one(queue, now=2000.0).attempts == 1
    assert (seen(queue).state, seen(queue).status, seen(queue).reason) == ("running", 503, "status 503")


def test_an_answered_call_waits_for_its_callback_and_keeps_its_answer(queue: AsyncQueue) -> None:
    queue.write([accepted()], [])
    queue.write([], [Deliver(claim_one(queue).key, 300.0, 3, ANSWER, "exhausted")])

    assert queue.claim("queued", F, 1000.0, 5) == ([], None)
    claimed = claim_one(queue, "callback")
    assert (claimed.answer, claimed.exhausted, claimed.attempts) == (ANSWER, "exhausted", 3)
    assert claimed.call == accepted()
    assert seen(queue).state == "callback"


def test_a_callback_that_failed_is_claimed_again_when_it_is_due(queue: AsyncQueue) -> None:
    queue.write([accepted()], [])
    queue.write([], [Deliver(claim_one(queue).key, 300.0, 1, ANSWER)])
    queue.write([], [Redeliver(claim_one(queue, "callback").key, 400.0, 1, "refused")])

    assert queue.claim("callback", F, 399.0, 5) == ([], 400.0)
    claimed = claim_one(queue, "callback", 400.0)
    assert (claimed.deliveries, claimed.answer) == (1, ANSWER)


def test_a_done_call_can_be_asked_for_and_is_nobodys(queue: AsyncQueue) -> None:
    queue.write([accepted()], [])
    queue.write([], [Done(claim_one(queue).key, 500.0, 200, 1)])

    assert seen(queue) == CallStatus("1", F, "done", 1, 0, 200, None, 100.0, 500.0, None)
    assert queue.claim("queued", F, 1000.0, 5) == ([], None)
    assert queue.waiting() == []


def test_the_state_of_a_call_is_told_from_the_beginning(queue: AsyncQueue) -> None:
    queue.write([accepted()], [])
    before = seen(queue)
    claim_one(queue)

    assert (before.state, seen(queue).state) == ("queued", "running")


def test_one_id_may_name_several_calls_and_the_latest_is_told(queue: AsyncQueue) -> None:
    """Functions pass X-Call-Id on to the calls that they make."""
    queue.write([accepted("same"), accepted("same", function=G)], [])

    assert seen(queue, "same").function == G
    assert sum(each.count for each in queue.waiting()) == 2


def test_what_waits_is_counted_by_phase_and_function(queue: AsyncQueue) -> None:
    queue.write([accepted("1", at=5.0), accepted("2", at=4.0), accepted("3", at=3.0, function=G)], [])
    queue.write([], [Deliver(claim_one(queue).key, 9.0, 1, ANSWER)])

    assert sorted(queue.waiting(), key=lambda each: (each.phase, each.function)) == [
        Waiting("callback", F, 1, 9.0),
        Waiting("queued", F, 1, 5.0),
        Waiting("queued", G, 1, 3.0),
    ]


def test_dead_letters_are_listed_by_function_the_oldest_first(queue: AsyncQueue) -> None:
    dead_letter(queue, "late", at=300.0)
    dead_letter(queue, "early", at=200.0)
    dead_letter(queue, "other", at=100.0, function=G)

    assert [each.id for each in queue.list_dead()] == ["other", "early", "late"]
    assert [each.id for each in queue.list_dead(F)] == ["early", "late"]
    assert [each.id for each in queue.list_dead(limit=1)] == ["other"]
    assert queue.list_dead(F)[0] == CallStatus("early", F, "dead", 10, 0, 500, "status 500", 100.0, 200.0, None)


def test_a_dead_letter_that_is_retried_starts_anew(queue: AsyncQueue) -> None:
    dead_letter(queue)

    assert queue.requeue("1", 700.0) == Waiting("queued", F, 1, 700.0)

    assert queue.list_dead() == []
    claimed = claim_one(queue)
    assert (claimed.call, claimed.attempts) == (accepted(), 0)
    assert queue.requeue("1", 700.0) is None


def test_a_dead_letter_of_which_only_the_callback_is_missing_is_not_executed_again(queue: AsyncQueue) -> None:
    queue.write([accepted()], [])
    queue.write([], [Deliver(claim_one(queue).key, 300.0, 1, ANSWER)])
    queue.write([], [Dead(claim_one(queue, "callback").key, 400.0, 1, 200, "unreachable", undelivered=True)])

    assert queue.requeue("1", 700.0) == Waiting("callback", F, 1, 700.0)

    assert claim_one(queue, "callback").answer == ANSWER


def test_a_dead_letter_whose_callback_was_delivered_is_executed_again(queue: AsyncQueue) -> None:
    queue.write([accepted()], [])
    queue.write([], [Deliver(claim_one(queue).key, 300.0, 10, ANSWER, "exhausted")])
    queue.write([], [Dead(claim_one(queue, "callback").key, 400.0, 10, 500, "exhausted")])

    assert queue.requeue("1", 700.0) == Waiting("queued", F, 1, 700.0)

    assert claim_one(queue).exhausted is None


def test_dead_letters_are_discarded_others_are_not(queue: AsyncQueue) -> None:
    dead_letter(queue)
    queue.write([accepted("alive")], [])

    assert queue.discard("1")

    assert not queue.discard("1")
    assert not queue.discard("alive")
    assert queue.get("1") is None


def test_a_call_that_is_cancelled_is_claimed_no_more_and_its_status_is_kept(queue: AsyncQueue) -> None:
    queue.write([accepted("1"), accepted("2")], [])
    queue.write([], [Retry(claim_one(queue).key, 2000.0, 1, 503, "status 503")])

    assert [[each.function for each in found] for found in queue.cancel(["1", "2", "3"], 300.0)] == [[F], [F], []]

    assert queue.claim("queued", F, 9000.0, 5) == ([], None)
    assert queue.waiting() == []
    assert (seen(queue).state, seen(queue).attempts, seen(queue).ended_at) == ("cancelled", 1, 300.0)
    assert queue.cancel(["1"], 400.0) == [[]]
    assert queue.requeue("1", 400.0) is None


def test_what_has_ended_is_not_cancelled(queue: AsyncQueue) -> None:
    dead_letter(queue, "dead")
    queue.write([accepted("done")], [])
    queue.write([], [Done(claim_one(queue).key, 300.0, 200, 1)])

    assert queue.cancel(["dead", "done"], 400.0) == [[], []]
    assert (seen(queue, "dead").state, seen(queue, "done").state) == ("dead", "done")


def test_the_outcome_of_a_call_that_was_cancelled_meanwhile_is_dropped(queue: AsyncQueue) -> None:
    outcomes: list[Callable[[int], Outcome]] = [
        lambda key: Done(key, 400.0, 200, 1),
        lambda key: Retry(key, 400.0, 1, 500, "status 500"),
        lambda key: Deliver(key, 400.0, 1, ANSWER),
        lambda key: Dead(key, 400.0, 1, 500, "status 500"),
    ]
    for outcome in outcomes:
        queue.write([accepted()], [])
        claimed = claim_one(queue)
        ((cancelled,),) = queue.cancel(["1"], 300.0)

        queue.write([], [outcome(claimed.key)])

        assert (cancelled.key, cancelled.function, cancelled.is_claimed) == (claimed.key, F, True)
        assert (seen(queue).state, seen(queue).ended_at) == ("cancelled", 300.0)
        assert queue.waiting() == []


def test_the_files_of_a_cancelled_call_are_there_until_its_claim_ends(queue: AsyncQueue) -> None:
    body, waiting = spooled(queue, b"x" * 1000), spooled(queue, b"y")
    queue.write([accepted("1", body=body), accepted("2", at=200.0, body=waiting)], [])
    claimed = claim_one(queue)

    queue.cancel(["1", "2"], 300.0)
    assert (body.exists(), waiting.exists()) == (True, False)

    answer = spooled(queue, b"z")
    queue.write([], [Deliver(claimed.key, 400.0, 1, KeptAnswer(200, (), answer, 0.1, 10))])
    assert (body.exists(), answer.exists()) == (False, False)


def test_a_large_body_is_a_file_until_its_call_is_done(queue: AsyncQueue) -> None:
    file = spooled(queue, b"large")
    queue.write([accepted(body=file)], [])

    claimed = claim_one(queue)

    assert claimed.call.body == file
    assert file.read_bytes() == b"large"
    queue.write([], [Done(claimed.key, 500.0, 200, 1)])
    assert not file.exists()


def test_a_large_answer_is_a_file_until_it_is_delivered(queue: AsyncQueue) -> None:
    file = spooled(queue, b"large")
    queue.write([accepted()], [])
    queue.write([], [Deliver(claim_one(queue).key, 300.0, 1, KeptAnswer(200, (), file, 0.1, 10))])

    claimed = claim_one(queue, "callback")

    assert claimed.answer is not None
    assert claimed.answer.body == file
    queue.write([], [Done(claimed.key, 500.0, 200, 1)])
    assert not file.exists()


def test_a_discarded_dead_letter_takes_its_file_with_it(queue: AsyncQueue) -> None:
    file = spooled(queue, b"large")
    queue.write([accepted(body=file)], [])
    queue.write([], [Dead(claim_one(queue).key, 300.0, 1, 500, "no")])
    assert file.exists()

    queue.discard("1")

    assert not file.exists()


def test_a_body_that_is_given_up_leaves_nothing(queue: AsyncQueue) -> None:
    file = queue.new_file()
    file.write(b"half")
    kept = spooled(queue, b"whole")

    file.discard()

    assert list(kept.parent.iterdir()) == [kept]


# --- SQLite alone ---


def test_sqlite_gives_claimed_calls_back_when_it_is_opened_again(tmp_path: Path) -> None:
    first = SqliteAsyncQueue(tmp_path)
    first.write([accepted("1"), accepted("2")], [])
    first.write([], [Done(claim_one(first).key, 500.0, 200, 1)])
    claim_one(first)
    first.close()

    second = SqliteAsyncQueue(tmp_path)

    assert claim_one(second).call.id == "2"
    second.close()


def test_sqlite_does_not_bring_a_cancelled_call_back(tmp_path: Path) -> None:
    queue = SqliteAsyncQueue(tmp_path)
    queue.write([accepted("1"), accepted("2")], [])
    claim_one(queue)
    queue.cancel(["1", "2"], 300.0)
    queue.close()

    again = SqliteAsyncQueue(tmp_path)

    assert again.waiting() == []
    assert again.claim("queued", F, 1000.0, 5) == ([], None)
    assert seen(again).state == "cancelled"
    again.close()


def test_sqlite_removes_files_that_no_call_names_when_it_is_opened(tmp_path: Path) -> None:
    first = SqliteAsyncQueue(tmp_path)
    kept = spooled(first, b"kept")
    spooled(first, b"orphan")
    kept.with_name("half.part").write_bytes(b"half")
    first.write([accepted(body=kept)], [])
    first.close()

    second = SqliteAsyncQueue(tmp_path)

    assert list(kept.parent.iterdir()) == [kept]
    second.close()


def test_sqlite_has_what_it_acknowledged_after_a_kill(tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from gpufaas_async_calls.call import AcceptedCall
from gpufaas_adapters.sqlite.async_queue import SqliteAsyncQueue
queue = SqliteAsyncQueue(Path({str(tmp_path)!r}))
queue.write([AcceptedCall("1", {F!r}, "f", b"", b"", (), None, 100_000_000_000, b"x")], [])
os.kill(os.getpid(), signal.SIGKILL)
"""

    killed = subprocess.run([sys.executable, "-c", program], check=False, timeout=LIMIT_S)

    assert killed.returncode == -9
    queue = SqliteAsyncQueue(tmp_path)
    assert claim_one(queue).call.body == b"x"
    queue.close()


def test_sqlite_forgets_done_calls_after_a_while_and_dead_ones_later(tmp_path: Path) -> None:
    queue = SqliteAsyncQueue(tmp_path, done_kept_s=60.0, dead_kept_s=600.0)
    dead_letter(queue, "dead", at=100.0)
    queue.write([accepted("old"), accepted("new")], [])
    queue.write([], [Done(claim_one(queue).key, 100.0, 200, 1)])

    queue.write([], [Done(claim_one(queue).key, 161.0, 200, 1)])

    assert queue.get("old") is None
    assert [seen(queue, name).state for name in ("new", "dead")] == ["done", "dead"]
    queue.close()


def test_sqlite_keeps_at_most_so_many_that_ended(tmp_path: Path) -> None:
    queue = SqliteAsyncQueue(tmp_path, done_kept=10)
    for number in range(120):
        queue.write([accepted(str(number), at=float(number))], [])
        queue.write([], [Done(claim_one(queue).key, 200.0 + number, 200, 1)])

    left = [number for number in range(120) if queue.get(str(number))]

    assert left == list(range(90, 120))  # looked at every hundredth write
    queue.close()


def test_sqlite_changes_nothing_when_the_disk_is_full_and_says_what_to_do(tmp_path: Path) -> None:
    queue = SqliteAsyncQueue(tmp_path)
    queue.write([accepted()], [])
    claimed = claim_one(queue)
    # The same error as that of a full disk, without filling one.
    (pages,) = queue._file.db.execute("PRAGMA page_count").fetchone()
    queue._file.db.execute(f"PRAGMA max_page_count = {pages}")

    with pytest.raises(StorageFailed, match="full: free space"):
        queue.write([accepted("small"), accepted("large", body=b"x" * 200_000)], [Done(claimed.key, 500.0, 200, 1)])

    assert queue.get("small") is None
    assert seen(queue).state == "running"
    queue.write([], [Done(claimed.key, 500.0, 200, 1)])
    queue.close()


def test_sqlite_refuses_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "calls.db").write_text("no database" * 1000)

    with pytest.raises(StorageFailed, match="not a database"):
        SqliteAsyncQueue(tmp_path)


def test_the_fake_can_fail_like_the_real_one(tmp_path: Path) -> None:
    queue = MemoryAsyncQueue(tmp_path)
    queue.failure = "the disk is full"

    with pytest.raises(StorageFailed, match="full"):
        queue.write([accepted()], [])

    assert queue.waiting() == []
