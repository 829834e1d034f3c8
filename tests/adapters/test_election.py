"""One scheduler leads, and all services learn which: with a real etcd, and processes that are killed and stopped."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.etcd_process import EtcdProcess
from tests.waiting import LIMIT_S, eventually

from gpufaas_adapters.etcd.client import Change, DoPut, Etcd, EtcdSettings, EtcdUnreachable
from gpufaas_adapters.etcd.election import LEADER, KnownLeader, Leadership, NameInUse, campaign, register, watch_leader

LONG_S = 600
"""The time of a lease that does not end while a test waits."""
MakeEtcd = Callable[..., EtcdProcess]

CANDIDATE = """
import asyncio, sys
from gpufaas_adapters.etcd.election import campaign
from gpufaas_adapters.etcd.client import Etcd, EtcdSettings

async def main():
    endpoint, prefix, name = sys.argv[1:]
    asked = asyncio.Queue()
    asyncio.get_running_loop().add_reader(0, lambda: asked.put_nowait(sys.stdin.readline()))
    async with Etcd(EtcdSettings((endpoint,), prefix=prefix)) as etcd:
        leadership = await campaign(etcd, name, name + ":7070", ttl_s=4)
        print("leads", leadership.epoch, flush=True)
        while await asked.get():
            print("mine" if leadership.still_mine(etcd.clock()) else "doubtful", flush=True)
            print("lost" if not await leadership.confirm() else "confirmed", flush=True)

asyncio.run(main())
"""


@dataclass
class Candidate:
    process: asyncio.subprocess.Process

    async def line(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(LIMIT_S):
            return (await self.process.stdout.readline()).decode().strip()

    async def ask(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"?\n")
        await self.process.stdin.drain()

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)


@asynccontextmanager
async def candidate(settings: EtcdSettings, name: str) -> AsyncIterator[Candidate]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CANDIDATE, settings.endpoints[0], settings.prefix, name,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield Candidate(process)
    finally:
        if process.returncode is None:
            process.kill()
            process.send_signal(signal.SIGCONT)
        await process.communicate()


@dataclass
class Onlooker:
    """Sees leaders come and go, as a gateway does."""

    seen: list[KnownLeader | None] = field(default_factory=list)
    news: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def until(self, name: str | None) -> KnownLeader | None:
        async with asyncio.timeout(LIMIT_S), self.news:
            await self.news.wait_for(lambda: self.seen and (self.seen[-1].id if self.seen[-1] else None) == name)
            return self.seen[-1]


@asynccontextmanager
async def onlooking(etcd: Etcd) -> AsyncIterator[Onlooker]:
    onlooker = Onlooker()

    async def follow() -> None:
        async with aclosing(watch_leader(etcd)) as leaders:
            async for leader in leaders:
                async with onlooker.news:
                    onlooker.seen.append(leader)
                    onlooker.news.notify_all()

    task = asyncio.create_task(follow())
    try:
        yield onlooker
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def elected(campaigning: "asyncio.Task[Leadership]") -> Leadership:
    async with asyncio.timeout(LIMIT_S):
        return await campaigning


async def test_the_first_who_asks_leads_and_everybody_sees_it(etcd: Etcd) -> None:
    async with onlooking(etcd) as onlooker:
        assert await onlooker.until(None) is None

        leadership = await campaign(etcd, "s1", "10.0.0.1:7070")

        assert leadership.still_mine(etcd.clock())
        assert await onlooker.until("s1") == KnownLeader("s1", "10.0.0.1:7070", leadership.epoch) == leadership.leader
        item = await etcd.get(LEADER)
        assert item is not None
        assert json.loads(item.value) == {"id": "s1", "address": "10.0.0.1:7070"}
        await leadership.resign()


async def test_who_resigns_is_followed_at_once_by_one_that_waits(etcd: Etcd, settings: EtcdSettings) -> None:
    async with Etcd(settings) as other, onlooking(etcd) as onlooker:
        first = await campaign(etcd, "s1", "a:1", ttl_s=LONG_S)
        waiting = asyncio.create_task(campaign(other, "s2", "b:1", ttl_s=LONG_S))
        await onlooker.until("s1")
        assert not waiting.done()

        await first.resign()
        second = await elected(waiting)

        assert second.epoch > first.epoch
        assert (first.lost.is_set(), first.still_mine(etcd.clock())) == (True, False)
        await onlooker.until("s2")
        await second.resign()


async def test_of_many_candidates_one_leads_and_then_another(settings: EtcdSettings) -> None:
    clients = [Etcd(settings) for _ in range(8)]
    waiting = {
        asyncio.create_task(campaign(each, f"s{n}", f"a:{n + 1}", ttl_s=LONG_S)) for n, each in enumerate(clients)
    }
    epochs = []
    while waiting:
        async with asyncio.timeout(LIMIT_S):
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        (leadership,) = (task.result() for task in done)  # never two
        epochs.append(leadership.epoch)
        await leadership.resign()

    assert epochs == sorted(set(epochs))
    assert len(epochs) == 8
    for each in clients:
        await each.close()


async def test_a_leader_that_is_killed_is_followed_when_its_lease_ends(etcd: Etcd, settings: EtcdSettings) -> None:
    async with candidate(settings, "s1") as first, onlooking(etcd) as onlooker:
        assert (await first.line()).startswith("leads")
        waiting = asyncio.create_task(campaign(etcd, "s2", "b:1", ttl_s=LONG_S))

        first.send(signal.SIGKILL)
        second = await elected(waiting)

        await onlooker.until("s2")
        assert second.still_mine(etcd.clock())
        await second.resign()


async def test_a_leader_that_was_stopped_finds_out_before_it_acts(etcd: Etcd, settings: EtcdSettings) -> None:
    """The question was put to it while it was stopped; it is the first thing that it looks at."""
    async with candidate(settings, "s1") as first:
        epoch = int((await first.line()).split()[1])
        await first.ask()
        assert [await first.line(), await first.line()] == ["mine", "confirmed"]

        first.send(signal.SIGSTOP)
        second = await campaign(etcd, "s2", "b:1")
        await first.ask()
        first.send(signal.SIGCONT)

        assert second.epoch > epoch
        assert [await first.line(), await first.line()] == ["doubtful", "lost"]
        await second.resign()


async def test_a_leader_stays_while_etcd_is_down_and_after(make_etcd: MakeEtcd) -> None:
    server = make_etcd()
    settings = EtcdSettings((server.endpoint,))
    async with Etcd(settings) as etcd, Etcd(settings) as other, onlooking(other) as onlooker:
        leadership = await campaign(etcd, "s1", "a:1", ttl_s=4)
        waiting = asyncio.create_task(campaign(other, "s2", "b:1", ttl_s=4))
        await onlooker.until("s1")
        server.kill()

        # Longer than its lease: what passes is counted by what the leader itself hears of etcd.
        down_at = etcd.clock()
        while etcd.clock() < down_at + 5.0:
            with pytest.raises(EtcdUnreachable):
                await leadership.confirm()
            assert leadership.still_mine(etcd.clock())
            await asyncio.sleep(0.1)
        server.start()

        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    assert await leadership.confirm()
                    break
                except EtcdUnreachable:
                    await asyncio.sleep(0.05)
        assert not waiting.done()
        assert [each for each in onlooker.seen if each is not None] == [leadership.leader] == onlooker.seen[-1:]
        await leadership.resign()
        await (await elected(waiting)).resign()


async def test_a_leader_steps_down_when_etcd_comes_back_with_another(make_etcd: MakeEtcd) -> None:
    server = make_etcd()
    async with Etcd(EtcdSettings((server.endpoint,))) as etcd:
        leadership = await campaign(etcd, "s1", "a:1", ttl_s=2)
        server.pause()
        with pytest.raises(EtcdUnreachable):
            await leadership.confirm()

        # As somebody does who reaches etcd while this one does not.
        server.resume()
        server.ctl("put", "/gpufaas/v1/scheduler/leader", '{"id":"s2","address":"b:1"}')
        server.ctl("del", "/gpufaas/v1/scheduler/leader")
        server.ctl("put", "/gpufaas/v1/scheduler/leader", '{"id":"s2","address":"b:1"}')

        await eventually(leadership.lost.is_set)
        assert not leadership.still_mine(etcd.clock())
        assert not await leadership.confirm()
        await leadership.abandon()


async def test_a_leader_whose_key_is_deleted_by_hand_leads_no_more(etcd: Etcd, etcd_server: EtcdProcess) -> None:
    """Even in the moment in which it was elected."""
    key = f"{etcd.settings.prefix}/{LEADER}"
    first = await campaign(etcd, "s1", "a:1")
    etcd_server.ctl("del", key)  # blocks the loop: before anything of the leader's has run
    await eventually(first.lost.is_set)
    second = await campaign(etcd, "s1", "a:1")
    assert await second.confirm()

    etcd_server.ctl("del", key)

    await eventually(second.lost.is_set)
    assert second.epoch > first.epoch
    await first.abandon()
    await second.abandon()


async def test_what_an_earlier_leader_writes_is_refused(etcd: Etcd) -> None:
    first = await campaign(etcd, "s1", "a:1")
    await first.resign()
    second = await campaign(etcd, "s2", "b:1")

    late = await etcd.txn((first.compare(),), (DoPut("v1/state/engine", b"old"),))
    done = await etcd.txn((second.compare(),), (DoPut("v1/state/engine", b"new"),))

    assert (late.succeeded, done.succeeded) == (False, True)
    await second.resign()


async def test_who_gives_up_waiting_leaves_nothing_behind(etcd: Etcd) -> None:
    leadership = await campaign(etcd, "s1", "a:1")
    watch, sees = etcd.watch, asyncio.Event()

    async def seen(*args: Any, **kwargs: Any) -> AsyncIterator[Change]:
        async with aclosing(watch(*args, **kwargs)) as changes:
            async for change in changes:
                sees.set()
                yield change

    etcd.watch = seen  # type: ignore[method-assign, assignment]
    waiting = asyncio.create_task(campaign(etcd, "s2", "b:1"))
    await sees.wait()

    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await leadership.resign()

    assert await etcd.get(LEADER) is None


async def test_an_unreadable_leader_is_nobody(etcd: Etcd) -> None:
    await etcd.put(LEADER, b"tomatoes")

    async with aclosing(watch_leader(etcd)) as leaders:
        assert await anext(leaders) is None


# --- registrations ---


async def test_what_is_registered_is_there_until_it_is_closed(etcd: Etcd) -> None:
    registration = await register(etcd, "v1/nodes/n1", b'{"id":"n1"}')
    await registration.put("v1/artifacts/abc/n1", b'{"url":"http://n1"}')
    await registration.put("v1/nodes/n1", b'{"id":"n1","devices":1}')

    items = (await etcd.range("v1/")).items

    assert [(item.key, item.value, item.lease) for item in items] == [
        ("v1/artifacts/abc/n1", b'{"url":"http://n1"}', registration.lease.id),
        ("v1/nodes/n1", b'{"id":"n1","devices":1}', registration.lease.id),
    ]
    await registration.close()
    assert await etcd.keys("v1/") == []


async def test_what_is_registered_is_put_again_when_its_lease_was_lost(etcd: Etcd, etcd_server: EtcdProcess) -> None:
    registration = await register(etcd, "v1/nodes/n1", b"1", ttl_s=2)
    await registration.put("v1/artifacts/abc/n1", b"2")
    lease = registration.lease.id

    etcd_server.ctl("lease", "revoke", f"{lease:x}")
    await eventually(lambda: registration.lease.id != lease and not registration.lost.is_set())

    assert await etcd.keys("v1/") == ["v1/artifacts/abc/n1", "v1/nodes/n1"]
    await registration.close()


async def test_what_is_put_while_etcd_is_away_is_there_when_it_is_back(make_etcd: MakeEtcd) -> None:
    server = make_etcd()
    async with Etcd(EtcdSettings((server.endpoint,))) as etcd:
        registration = await register(etcd, "v1/nodes/n1", b"1", ttl_s=2)
        server.kill()

        await registration.put("v1/artifacts/abc/n1", b"late")
        server.start()

        await eventually(lambda: not registration.lost.is_set() and not registration.lease.lost.is_set())
        assert await etcd.keys("v1/") == ["v1/artifacts/abc/n1", "v1/nodes/n1"]
        await registration.close()


async def test_a_name_that_is_in_use_is_refused(etcd: Etcd, settings: EtcdSettings) -> None:
    async with Etcd(settings) as other:
        registration = await register(etcd, "v1/nodes/n1", b'{"address":"a:1"}', ttl_s=LONG_S)

        with pytest.raises(NameInUse, match=r"v1/nodes/n1 is in use .*a:1.*give this one another id"):
            await register(other, "v1/nodes/n1", b'{"address":"b:1"}', ttl_s=2)

        item = await etcd.get("v1/nodes/n1")
        assert item is not None
        assert item.value == b'{"address":"a:1"}'
        await registration.close()


async def test_a_process_takes_its_name_from_its_predecessor(etcd: Etcd, settings: EtcdSettings) -> None:
    """At once if the value tells that this is who it was, else when the lease has ended."""
    async with Etcd(settings) as dead:
        await register(dead, "v1/nodes/n1", b'{"address":"a:1"}', ttl_s=LONG_S)
    async with Etcd(settings) as dead:
        await register(dead, "v1/nodes/n2", b'{"address":"a:1"}', ttl_s=2)

    is_same = lambda value: b"a:1" in value  # noqa: E731
    same = await register(etcd, "v1/nodes/n1", b'{"address":"a:1"}', same=is_same, ttl_s=LONG_S)
    later = await register(etcd, "v1/nodes/n2", b'{"address":"b:1"}', ttl_s=LONG_S)

    assert [item.lease for item in (await etcd.range("v1/nodes/")).items] == [same.lease.id, later.lease.id]
    await same.close()
    await later.close()
