"""Our client of etcd, with a real one that is killed, cut off, full, compacted, restored, locked."""

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.etcd_process import EtcdProcess, etcd_cluster
from tests.waiting import LIMIT_S

from gpufaas_adapters.etcd.client import (
    META,
    Change,
    Deleted,
    DoDelete,
    DoGet,
    DoPut,
    Etcd,
    EtcdFull,
    EtcdRefused,
    EtcdSettings,
    EtcdUnreachable,
    ForeignKeys,
    LeaseHold,
    Listed,
    Put,
    absent,
    created_at,
    open_store,
    present,
    unchanged,
)
from gpufaas_core.errors import InvalidSpec, StorageFailed

MakeEtcd = Callable[..., EtcdProcess]


class Watcher:
    """Follows a prefix in a task; `until` waits for what a test says."""

    def __init__(self) -> None:
        self.seen: list[Change] = []
        self.trouble: list[StorageFailed] = []
        self.failure: BaseException | None = None
        self._news = asyncio.Condition()

    async def run(self, etcd: Etcd, prefix: str, exact: bool) -> None:
        try:
            async with aclosing(etcd.watch(prefix, exact=exact, on_trouble=self._troubled)) as changes:
                async for change in changes:
                    async with self._news:
                        self.seen.append(change)
                        self._news.notify_all()
        except StorageFailed as exc:
            async with self._news:
                self.failure = exc
                self._news.notify_all()

    def _troubled(self, exc: StorageFailed) -> None:
        self.trouble.append(exc)

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S), self._news:
            await self._news.wait_for(done)

    @property
    def listings(self) -> int:
        return sum(isinstance(each, Listed) for each in self.seen)

    @property
    def state(self) -> dict[str, bytes]:
        """What somebody who only listens to it takes to be there."""
        there: dict[str, bytes] = {}
        for change in self.seen:
            match change:
                case Put(item):
                    there[item.key] = item.value
                case Deleted(key):
                    del there[key]
        return there


@asynccontextmanager
async def watching(etcd: Etcd, prefix: str, *, exact: bool = False) -> AsyncIterator[Watcher]:
    watcher = Watcher()
    task = asyncio.create_task(watcher.run(etcd, prefix, exact))
    try:
        await watcher.until(lambda: watcher.listings > 0 or watcher.failure is not None)
        yield watcher
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def eventually(attempt: Callable[[], Awaitable[object]]) -> None:
    """Until etcd answers again."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                await attempt()
                return
            except EtcdUnreachable:
                await asyncio.sleep(0.02)


# --- keys ---


async def test_a_key_comes_back_as_it_was_written_and_says_when(etcd: Etcd) -> None:
    assert await etcd.get("v1/a") is None

    first = await etcd.put("v1/a", b"1")
    second = await etcd.put("v1/a", b"\x00\xff")

    item = await etcd.get("v1/a")
    assert item is not None
    assert (item.key, item.value, item.create_revision, item.mod_revision) == ("v1/a", b"\x00\xff", first, second)
    assert (await etcd.delete("v1/a"), await etcd.delete("v1/a")) == (True, False)


async def test_a_range_is_what_begins_with_the_prefix_in_order(etcd: Etcd) -> None:
    for key in ("v1/x/b", "v1/x/a", "v1/xylophone", "v1/x", "v1/y/a"):
        await etcd.put(key, b"")

    assert [item.key for item in (await etcd.range("v1/x/")).items] == ["v1/x/a", "v1/x/b"]
    assert await etcd.keys("v1/x") == ["v1/x", "v1/x/a", "v1/x/b", "v1/xylophone"]
    assert (await etcd.keys("v1/x", limit=1), len(await etcd.keys("v1/x/"))) == (["v1/x"], 2)
    assert await etcd.delete("v1/x/", below=True) == 2
    assert await etcd.keys("v1/") == ["v1/x", "v1/xylophone", "v1/y/a"]


async def test_a_range_of_many_pages_is_of_one_moment(etcd: Etcd) -> None:
    """1,100 keys are three pages; what is written between two of them is not in it."""
    for start in range(0, 1100, 100):
        await etcd.txn((), [DoPut(f"v1/many/{number:04}", b"x") for number in range(start, start + 100)])
    listing = asyncio.ensure_future(etcd.range("v1/many/"))
    while not listing.done():
        await etcd.txn((), [DoPut("v1/many/9999", b"late"), DoDelete("v1/many/1099")])

    found = await listing

    items = (await etcd.range("v1/many/")).items
    assert len(items) == 1100
    assert items[-1].key == "v1/many/9999"
    assert len(found.items) == 1100
    assert all(item.mod_revision <= found.revision for item in found.items)


async def test_of_twenty_who_create_a_key_at_once_one_wins(etcd: Etcd, settings: EtcdSettings) -> None:
    async with Etcd(settings) as other:
        tries = [
            (other if number % 2 else etcd).txn((absent("v1/one"),), (DoPut("v1/one", b"%d" % number),))
            for number in range(20)
        ]

        won = [number for number, done in enumerate(await asyncio.gather(*tries)) if done.succeeded]

    item = await etcd.get("v1/one")
    assert item is not None
    assert [int(item.value)] == won


async def test_a_transaction_does_all_or_the_other_thing(etcd: Etcd) -> None:
    at = await etcd.put("v1/a", b"1")

    done = await etcd.txn(
        (unchanged("v1/a", at), created_at("v1/a", at), present("v1/a"), absent("v1/b")),
        (DoPut("v1/a", b"2"), DoPut("v1/b", b"3"), DoGet("v1/", below=True)),
        (DoGet("v1/a"),),
    )

    assert done.succeeded
    assert [(item.key, item.value) for item in done.found[2]] == [("v1/a", b"2"), ("v1/b", b"3")]
    assert {item.mod_revision for item in done.found[2]} == {done.revision}
    refused = await etcd.txn(
        (unchanged("v1/a", at),), (DoDelete("v1/", below=True),), (DoGet("v1/a"), DoGet("v1/gone"))
    )
    assert (refused.succeeded, refused.found[1]) == (False, ())
    assert refused.found[0][0].value == b"2"
    assert not (await etcd.txn((absent("v1/a"),), ())).succeeded


async def test_what_is_too_large_for_etcd_is_refused_in_words(etcd: Etcd) -> None:
    with pytest.raises(EtcdRefused, match=r"cannot write v1/large in etcd at .*larger than max.*: write less"):
        await etcd.put("v1/large", b"x" * 3_000_000)
    with pytest.raises(EtcdRefused, match=r"cannot change v1/0 in etcd .*too many operations in txn request"):
        await etcd.txn((), [DoPut(f"v1/{number}", b"") for number in range(200)])


# --- leases ---


async def test_what_is_under_a_lease_goes_with_it(etcd: Etcd) -> None:
    lease = await etcd.grant(5)
    await etcd.put("v1/here", b"", lease.id)
    item = await etcd.get("v1/here")
    assert item is not None
    assert item.lease == lease.id

    await lease.revoke()

    assert await etcd.get("v1/here") is None
    assert lease.lost.is_set()
    assert not lease.hold.holds(etcd.clock())


async def test_a_lease_is_kept_until_its_process_stops_doing_so(etcd: Etcd) -> None:
    """The other one is of the same age: when it has ended, the kept one would have too."""
    kept, left = await etcd.grant(4), await etcd.grant(4)
    await etcd.put("v1/kept", b"", kept.id)
    await etcd.put("v1/left", b"", left.id)
    async with watching(etcd, "v1/") as watcher:
        await left.abandon()

        await watcher.until(lambda: "v1/left" not in watcher.state)

        assert watcher.state == {"v1/kept": b""}
        assert await kept.confirm()
        assert kept.hold.holds(etcd.clock())
        assert kept.hold.confirmed(etcd.clock())
    await kept.revoke()


async def test_a_lease_that_etcd_has_ended_is_lost(etcd: Etcd, etcd_server: EtcdProcess) -> None:
    lease = await etcd.grant(3)

    etcd_server.ctl("lease", "revoke", f"{lease.id:x}")

    async with asyncio.timeout(30):
        await lease.lost.wait()
    assert not await lease.confirm()
    with pytest.raises(EtcdRefused, match="the lease has ended"):
        await etcd.put("v1/a", b"", lease.id)


async def test_a_lease_outlives_an_etcd_that_is_killed(make_etcd: MakeEtcd) -> None:
    server = make_etcd()
    async with Etcd(EtcdSettings((server.endpoint,))) as etcd:
        lease = await etcd.grant(5)
        await etcd.put("v1/a", b"", lease.id)

        server.kill()
        with pytest.raises(EtcdUnreachable):
            await lease.confirm()
        assert lease.hold.holds(etcd.clock())
        server.start()

        await eventually(lease.confirm)
        assert not lease.lost.is_set()
        assert await etcd.get("v1/a") is not None


def test_a_hold_ends_when_its_process_stood_still() -> None:
    hold = LeaseHold(5.0, asked_at=100.0)
    assert hold.holds(104.9)

    assert not hold.holds(105.0)  # nothing was heard, and nothing was tried
    assert not hold.holds(105.1)


def test_a_hold_lasts_while_etcd_is_asked_in_vain() -> None:
    hold = LeaseHold(5.0, asked_at=100.0)
    for now in (102.0, 104.0, 106.0, 108.0):
        hold.failed(now)

    assert hold.holds(112.9)
    assert not hold.confirmed(112.9)


def test_what_fails_after_a_standstill_proves_nothing() -> None:
    """The request that was under way when the process was stopped fails when it wakes up."""
    hold = LeaseHold(5.0, asked_at=100.0)
    hold.failed(106.0)

    assert not hold.holds(106.0)
    hold.renewed(asked_at=107.0)
    assert hold.holds(111.9)


def test_a_hold_that_etcd_ended_does_not_come_back() -> None:
    hold = LeaseHold(5.0, asked_at=100.0)
    hold.ended()

    hold.renewed(asked_at=101.0)

    assert not hold.holds(101.0)
    assert not hold.confirmed(101.0)


# --- watches ---


async def test_a_watch_tells_what_is_there_and_then_what_happens(etcd: Etcd) -> None:
    await etcd.put("v1/x/a", b"1")
    await etcd.put("v1/x/b", b"1")
    async with watching(etcd, "v1/x/") as watcher:
        assert [type(each) for each in watcher.seen] == [Put, Put, Listed]

        await etcd.put("v1/x/a", b"2")
        await etcd.delete("v1/x/b")
        await etcd.put("v1/xx", b"not this one")
        await etcd.put("v1/x/c", b"3")

        await watcher.until(lambda: "v1/x/c" in watcher.state)
        assert watcher.state == {"v1/x/a": b"2", "v1/x/c": b"3"}
        assert watcher.listings == 1


async def test_a_watch_of_one_key_sees_no_other(etcd: Etcd) -> None:
    async with watching(etcd, "v1/a", exact=True) as watcher:
        await etcd.put("v1/ab", b"1")
        await etcd.put("v1/a", b"2")

        await watcher.until(lambda: "v1/a" in watcher.state)
        assert watcher.state == {"v1/a": b"2"}


async def test_a_watch_misses_nothing_while_etcd_is_killed_and_started_again(make_etcd: MakeEtcd) -> None:
    server = make_etcd()
    async with (
        Etcd(EtcdSettings((server.endpoint,))) as etcd,
        watching(etcd, "v1/x/") as watcher,
        watching(etcd, "v1/y", exact=True) as single,
    ):
        written = 0
        for _ in range(3):
            for _ in range(20):
                written += 1
                await etcd.put(f"v1/x/{written}", b"ours")
            server.kill()
            with pytest.raises(
                EtcdUnreachable, match=rf"cannot write v1/x/no in etcd at {server.endpoint}: .*start it"
            ):
                await etcd.put("v1/x/no", b"")
            server.start()
            # Before our connection is back: what a watch that only listens from then on does not hear.
            server.ctl("put", f"/gpufaas/v1/x/foreign-{written}", "foreign")
            server.ctl("put", "/gpufaas/v1/y", str(written))
            await eventually(lambda: etcd.get("v1/y"))

        await watcher.until(lambda: f"v1/x/foreign-{written}" in watcher.state)
        await single.until(lambda: single.state == {"v1/y": b"60"})
        listed = await etcd.range("v1/x/")
        assert watcher.state == {item.key: item.value for item in listed.items}
        assert len(watcher.state) == 63
        assert watcher.listings == 1
        assert all(server.endpoint in str(each) for each in watcher.trouble)


async def test_a_watch_that_missed_what_was_compacted_lists_again(make_etcd: MakeEtcd) -> None:
    server = make_etcd()
    async with Etcd(EtcdSettings((server.endpoint,))) as etcd:
        for name in ("stays", "goes", "changes"):
            await etcd.put(f"v1/{name}", b"1")
        async with watching(etcd, "v1/") as watcher:
            # All of this blocks the loop, and with it the watch, which finds etcd gone when all is over.
            server.kill()
            server.start()
            server.ctl("del", "/gpufaas/v1/goes")
            server.ctl("put", "/gpufaas/v1/changes", "2")
            fields = server.ctl("get", "/gpufaas/v1/changes", "-w", "fields")
            server.ctl("compact", fields.split('"ModRevision" : ')[1].split()[0])

            await watcher.until(lambda: watcher.state == {"v1/stays": b"1", "v1/changes": b"2"})

            await watcher.until(lambda: watcher.listings == 2)
            told = [each.item.key for each in watcher.seen if isinstance(each, Put)]
            assert told.count("v1/stays") == 1  # nothing happened to it


async def test_a_watch_notices_that_etcd_was_restored_from_a_backup(make_etcd: MakeEtcd) -> None:
    """Its revisions are those of the backup then: who waits for the next one would wait for long."""
    server = make_etcd()
    async with Etcd(EtcdSettings((server.endpoint,))) as etcd:
        for number in range(10):
            await etcd.put(f"v1/{number}", b"1")
        async with watching(etcd, "v1/") as watcher:
            server.kill()
            shutil.rmtree(server.folder / "data")
            server.start()
            server.ctl("put", "/gpufaas/v1/7", "restored")

            await watcher.until(lambda: watcher.state == {"v1/7": b"restored"})


async def test_a_hundred_watches_at_once(etcd: Etcd) -> None:
    async with asyncio.TaskGroup() as tasks, asyncio.timeout(30):
        seen = [asyncio.Event() for _ in range(100)]

        async def follow(number: int) -> None:
            async with aclosing(etcd.watch(f"v1/{number}/")) as changes:
                async for change in changes:
                    if isinstance(change, Put):
                        seen[number].set()
                        break

        for number in range(100):
            tasks.create_task(follow(number))
        for number in range(100):
            await etcd.put(f"v1/{number}/a", b"")

    assert all(each.is_set() for each in seen)


# --- etcd that does not answer ---


async def test_an_etcd_that_is_not_there_is_named_with_what_to_do() -> None:
    async with Etcd(EtcdSettings(("127.0.0.1:1",))) as etcd:
        with pytest.raises(
            EtcdUnreachable, match=r"cannot read v1/a in etcd at 127.0.0.1:1: Connection refused: start it"
        ) as refused:
            await etcd.get("v1/a")

    assert not refused.value.maybe_done


async def test_an_etcd_that_stands_still_is_waited_for_until_the_time_limit(make_etcd: MakeEtcd) -> None:
    server = make_etcd()
    async with Etcd(EtcdSettings((server.endpoint,), timeout_s=0.3)) as etcd:
        await eventually(lambda: etcd.put("v1/a", b"1"))
        server.pause()

        with pytest.raises(EtcdUnreachable, match="no answer in time") as failed:
            await etcd.put("v1/a", b"2")

        assert failed.value.maybe_done
        server.resume()
        await eventually(lambda: etcd.put("v1/a", b"3"))


async def test_with_several_endpoints_the_next_one_answers(make_etcd: MakeEtcd) -> None:
    server = make_etcd()
    settings = EtcdSettings(("127.0.0.1:1", server.endpoint, "127.0.0.1:2"))
    async with Etcd(settings) as etcd:
        await open_store(etcd, pytest.fail)
        await etcd.put("v1/a", b"1")
        async with watching(etcd, "v1/a", exact=True) as watcher:
            assert etcd.endpoint == server.endpoint
            server.kill()
            with pytest.raises(EtcdUnreachable):
                await etcd.get("v1/a")
            server.start()
            server.ctl("put", "/gpufaas/v1/a", "2")

            await watcher.until(lambda: watcher.state == {"v1/a": b"2"})


@pytest.mark.usefixtures("etcd_server")  # skips where there is none
async def test_with_three_members_one_may_be_lost_and_two_may_not() -> None:
    with etcd_cluster(3) as members:
        several = EtcdSettings(tuple(each.endpoint for each in members), timeout_s=3.0)
        async with Etcd(several) as etcd, watching(etcd, "v1/") as watcher:
            lease = await etcd.grant(30)
            await etcd.put("v1/a", b"1", lease.id)
            used = next(each for each in members if each.endpoint == etcd.endpoint)
            other, last = (each for each in members if each is not used)

            used.kill()
            await eventually(lambda: etcd.put("v1/a", b"2", lease.id))
            await watcher.until(lambda: watcher.state == {"v1/a": b"2"})
            assert await lease.confirm()

            other.kill()
            with pytest.raises(EtcdUnreachable):
                await etcd.put("v1/a", b"3", lease.id)
            assert lease.hold.holds(etcd.clock())

            used.start(wait=False)
            other.start(wait=False)
            await eventually(lambda: etcd.put("v1/a", b"4", lease.id))
            await watcher.until(lambda: watcher.state == {"v1/a": b"4"})
            assert await lease.confirm()
            assert last.pid


@pytest.mark.slow
@pytest.mark.usefixtures("etcd_server")
async def test_a_member_that_falls_silent_is_left_for_another() -> None:
    """Its connections stay open: only that it answers no ping tells."""
    with etcd_cluster(3) as members:
        several = EtcdSettings(tuple(each.endpoint for each in members), timeout_s=2.0)
        async with Etcd(several) as etcd, Etcd(several) as other, watching(etcd, "v1/") as watcher:
            used = next(each for each in members if each.endpoint == etcd.endpoint)

            used.pause()
            await eventually(lambda: other.put("v1/a", b"1"))

            await watcher.until(lambda: watcher.state == {"v1/a": b"1"})
            assert etcd.endpoint != used.endpoint


async def test_a_closed_client_says_so(settings: EtcdSettings) -> None:
    etcd = Etcd(settings)
    await etcd.put("v1/a", b"1")
    await etcd.close()

    with pytest.raises(StorageFailed, match="is closed"):
        await etcd.get("v1/a")


async def test_whoever_waits_when_a_client_is_closed_is_told(make_etcd: MakeEtcd) -> None:
    server = make_etcd()
    etcd = Etcd(EtcdSettings((server.endpoint,)))
    await etcd.put("v1/a", b"1")
    async with watching(etcd, "v1/") as watcher:
        server.pause()
        waiting = asyncio.create_task(etcd.get("v1/a"))
        await asyncio.sleep(0.01)  # gRPC has begun it: else it hears of `close` at its time limit only, 5 s later

        await etcd.close()

        with pytest.raises(StorageFailed, match="is closed: this process is stopping"):
            await waiting
        await watcher.until(lambda: watcher.failure is not None)


async def test_a_list_goes_on_when_its_history_is_compacted_meanwhile(etcd: Etcd, etcd_server: EtcdProcess) -> None:
    for start in range(0, 1200, 100):
        await etcd.txn((), [DoPut(f"v1/many/{number:04}", b"x") for number in range(start, start + 100)])
    asked = etcd._connection.call
    pages = 0

    async def compact_after_the_first(*args: Any, **kwargs: Any) -> Any:
        nonlocal pages
        page = await asked(*args, **kwargs)
        pages += 1
        if pages == 1:
            etcd_server.ctl("put", "/elsewhere", "later")
            etcd_server.ctl("compact", str(page.header.revision + 1))
        return page

    etcd._connection.call = compact_after_the_first  # type: ignore[method-assign]

    found = await etcd.range("v1/many/")

    assert [item.key for item in found.items] == [f"v1/many/{number:04}" for number in range(1200)]
    assert pages == 4


async def test_a_full_etcd_is_read_and_says_how_to_make_room(make_etcd: MakeEtcd) -> None:
    server = make_etcd(f"--quota-backend-bytes={16 * 1024 * 1024}")
    async with Etcd(EtcdSettings((server.endpoint,))) as etcd:
        await etcd.put("v1/kept", b"1")

        async def fill() -> None:
            for number in range(100):
                await etcd.put(f"v1/{number}", b"x" * 1_000_000)

        with pytest.raises(EtcdFull, match=r"database is full \(alarm NOSPACE\): compact and defragment it"):
            await fill()

        item = await etcd.get("v1/kept")
        assert item is not None
        assert item.value == b"1"


# --- TLS ---


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """A CA, etcd's certificate for 127.0.0.1, a client's, and a CA that signed neither."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=tmp_path, check=True, capture_output=True)

    ec = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ca", "stranger"):
        openssl("req", "-x509", *ec, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
    (tmp_path / "san").write_text("subjectAltName=IP:127.0.0.1")
    for name in ("server", "client"):
        openssl("req", *ec, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                "-out", f"{name}.pem", "-extfile", "san")  # fmt: skip
    return tmp_path


async def test_over_tls_with_a_client_certificate(make_etcd: MakeEtcd, certificates: Path) -> None:
    server = make_etcd(
        f"--cert-file={certificates / 'server.pem'}", f"--key-file={certificates / 'server.key'}",
        f"--trusted-ca-file={certificates / 'ca.pem'}", "--client-cert-auth", scheme="https",
    )  # fmt: skip
    right = EtcdSettings(
        (server.endpoint,), ca=certificates / "ca.pem",
        cert=certificates / "client.pem", key=certificates / "client.key",
    )  # fmt: skip
    async with Etcd(right) as etcd:
        await open_store(etcd, pytest.fail)
        async with watching(etcd, "v1/x") as watcher:
            await etcd.put("v1/x", b"1")
            await watcher.until(lambda: watcher.state == {"v1/x": b"1"})
            lease = await etcd.grant(5)
            assert await lease.confirm()
            server.kill()
            server.start()
            await eventually(lambda: etcd.put("v1/x", b"2"))
            await watcher.until(lambda: watcher.state == {"v1/x": b"2"})

    async with Etcd(replace(right, ca=certificates / "stranger.pem", timeout_s=2.0)) as etcd:
        with pytest.raises(EtcdUnreachable, match=rf"{server.endpoint}: no TLS connection .*certificate"):
            await etcd.get("v1/x")
    async with Etcd(replace(right, cert=None, key=None, timeout_s=2.0)) as etcd:
        with pytest.raises(EtcdUnreachable, match=server.endpoint):
            await etcd.get("v1/x")
    async with Etcd(EtcdSettings((server.endpoint,), timeout_s=2.0)) as etcd:
        with pytest.raises(EtcdUnreachable, match="with certificates, if it speaks TLS"):
            await etcd.get("v1/x")


def test_a_certificate_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match=r"the CA certificate .*none.pem cannot be read: No such file"):
        Etcd(EtcdSettings(ca=tmp_path / "none.pem"))


# --- users ---


@pytest.fixture
def locked(make_etcd: MakeEtcd) -> EtcdProcess:
    """It knows root, and ``gpufaas``, who may do everything below /gpufaas/ and nothing else."""
    server = make_etcd()
    for command in (
        "user add root:root-secret", "user grant-role root root", "role add gpufaas",
        "role grant-permission gpufaas --prefix=true readwrite /gpufaas/", "user add gpufaas:right",
        "user grant-role gpufaas gpufaas",
    ):  # fmt: skip
        try:
            server.ctl(*command.split())
        except RuntimeError as exc:
            if "role name not found" not in str(exc) and "root" not in command:
                raise
    server.ctl("auth", "enable")
    return server


async def test_with_a_user_who_may_use_our_prefix(locked: EtcdProcess) -> None:
    settings = EtcdSettings((locked.endpoint,), user="gpufaas", password="right")
    async with Etcd(settings) as etcd:
        await open_store(etcd, pytest.fail)
        async with watching(etcd, "v1/x") as watcher:
            lease = await etcd.grant(5)
            await etcd.put("v1/x", b"1", lease.id)
            # It forgets the tokens that it gave.
            locked.kill()
            locked.start()
            await eventually(lambda: etcd.put("v1/x", b"2", lease.id))
            await watcher.until(lambda: watcher.state == {"v1/x": b"2"})
            assert await lease.confirm()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"user": "", "password": ""}, "it asks for a user: give one with its password"),
        ({"password": "wrong"}, "does not know the user gpufaas, or not by that password"),
        ({"user": "nobody"}, "does not know the user nobody"),
        ({"prefix": "/elsewhere"}, "the user gpufaas may not: grant a role that reads and writes /elsewhere/"),
    ],
)
async def test_who_may_not_is_told_what_is_missing(locked: EtcdProcess, changed: dict[str, Any], message: str) -> None:
    settings = replace(EtcdSettings((locked.endpoint,), user="gpufaas", password="right"), **changed)
    async with Etcd(settings) as etcd:
        with pytest.raises(EtcdRefused, match=message):
            await open_store(etcd, pytest.fail)
        async with watching(etcd, "v1/x") as watcher:
            assert isinstance(watcher.failure, EtcdRefused)
        assert "wrong" not in str(watcher.failure)


async def test_a_user_is_no_harm_where_etcd_asks_for_none(etcd: Etcd, settings: EtcdSettings) -> None:
    """So that all services can be told their user before etcd is locked."""
    async with Etcd(replace(settings, user="gpufaas", password="early")) as early:
        await early.put("v1/a", b"1")

    assert await etcd.get("v1/a") is not None


# --- whose keys these are ---


async def test_an_empty_prefix_becomes_ours_once(etcd: Etcd, settings: EtcdSettings) -> None:
    async with Etcd(settings) as other:
        await asyncio.gather(*(open_store(each, pytest.fail) for each in (etcd, other) * 5))

    meta = await etcd.get(META)
    assert meta is not None
    assert (meta.value, meta.create_revision) == (b'{"product":"gpufaas","version":2}', meta.mod_revision)
    await etcd.put("v1/functions/openfaas-fn/echo", b"{}")
    await open_store(etcd, pytest.fail)


async def test_somebody_elses_keys_are_left_alone(etcd: Etcd, settings: EtcdSettings) -> None:
    await etcd.put("registry/pods/a", b"{}")

    with pytest.raises(ForeignKeys, match=rf"below {settings.prefix} that are not ours \({settings.prefix}/registry"):
        await open_store(etcd, pytest.fail)

    assert await etcd.keys("") == ["registry/pods/a"]


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        (b'{"product":"gpufaas","version":3}', "newer version .keys of version 3, this one knows 2"),
        (
            b'{"product":"gpufaas","version":1}',
            "older version .keys of version 1, this one writes 2.: give another prefix, or delete these keys",
        ),
        (b'{"product":"tomatoes","version":1}', "says tomatoes: give another prefix"),
        (b"tomatoes", "says something else"),
    ],
)
async def test_what_we_do_not_know_is_refused(etcd: Etcd, meta: bytes, message: str) -> None:
    await etcd.put(META, meta)

    with pytest.raises(ForeignKeys, match=message):
        await open_store(etcd, pytest.fail)


async def test_the_start_waits_for_an_etcd_that_is_not_there_yet_and_says_so(make_etcd: MakeEtcd) -> None:
    server = make_etcd(start=False)
    lines: list[str] = []
    asked = asyncio.Event()

    def on_wait(line: str) -> None:
        lines.append(line)
        asked.set()

    async with Etcd(EtcdSettings((server.endpoint,))) as etcd:
        opening = asyncio.create_task(open_store(etcd, on_wait, retry_s=(0.01, 0.05)))
        await asked.wait()
        await asyncio.sleep(0.01)
        server.start()
        async with asyncio.timeout(30):
            await opening

        assert await etcd.get(META) is not None
    assert all(server.endpoint in line and "trying again in 0.0" in line for line in lines)


# --- settings ---


def test_endpoints_are_taken_as_people_write_them() -> None:
    assert not EtcdSettings(("a:1", "http://b:2379/")).tls
    assert EtcdSettings(("https://a:1",)).tls


@pytest.mark.parametrize("text", ["", "etcd", "etcd:", "etcd:70000", "http://etcd", "etcd:2379/path"])
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(InvalidSpec, match="HOST:PORT"):
        EtcdSettings((text,))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cert": Path("a")}, "certificate and its key go together"),
        ({"user": "a"}, "user and a password go together"),
        ({"prefix": "/"}, "no prefix for our keys"),
        ({"prefix": "/a/"}, "no prefix for our keys"),
        ({"endpoints": ()}, "no endpoint"),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSpec, match=message):
        EtcdSettings(**fields)


def test_a_password_is_in_no_log() -> None:
    assert "hush" not in repr(EtcdSettings(user="a", password="hush"))
