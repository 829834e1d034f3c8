"""On a real etcd: the next leader finds the state of the last one, and only leaders write it."""

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable

import msgspec
import pytest
from tests.etcd_process import EtcdProcess

from gpufaas_adapters.etcd.client import Etcd, EtcdSettings, EtcdUnreachable
from gpufaas_adapters.etcd.election import campaign
from gpufaas_adapters.etcd.state import EtcdState, read_state
from gpufaas_cache_manager.replacement import Lru
from gpufaas_cache_manager.write_behind import WriteBehind
from gpufaas_core import messages as m
from gpufaas_core.model import CallId, Device, DeviceId, Function, FunctionId, Profile
from gpufaas_core.snapshot import DeviceDoc, EngineDoc
from gpufaas_scheduler.engine import Engine
from gpufaas_scheduler.policies import make_policy

DEVICE = Device(DeviceId("node-1/cuda:0"), "gpu", 100)
F = FunctionId("f.openfaas-fn@1")


def make_engine(epoch: int) -> Engine:
    return Engine(policy=make_policy("lalb-o3"), replacement=Lru(), epoch=epoch)


def writer(engine: Engine, state: EtcdState) -> WriteBehind:
    return WriteBehind(state, engine.take_changed, lambda key: engine.doc(key, 4.0), engine.epoch)


async def test_the_next_leader_finds_what_the_last_one_left(etcd: Etcd) -> None:
    leadership = await campaign(etcd, "one", "127.0.0.1:1")
    engine = make_engine(leadership.epoch)
    engine.handle(m.DeviceJoined(DEVICE), 0.0)
    engine.handle(m.FunctionDeployed(Function(F, "d", profiles={"*": Profile(3.0, 1.0, 10)})), 0.0)
    engine.handle(m.Arrived(CallId("running"), F), 1.0)
    engine.handle(m.Arrived(CallId("waiting"), F, 9.0), 2.0)
    behind = writer(engine, EtcdState(etcd, leadership.compare()))
    assert await behind.flush()

    found = await read_state(etcd, 5.0)

    assert found.elapsed_s == 5.0
    assert found.engine is not None
    assert (found.engine.epoch, found.engine.grant) == (leadership.epoch, 1)
    assert [(each.call, each.age_s, each.deadline_in_s) for each in found.engine.waiting] == [("waiting", 2.0, 5.0)]
    assert [(each.device, each.status, each.running[0].call) for each in found.devices] == [(DEVICE, "busy", "running")]
    assert [(each.function.id, each.holders) for each in found.functions] == [(F, ((DEVICE.id, 0),))]
    assert sorted([found.engine.seq, found.devices[0].seq, found.functions[0].seq]) == [1, 2, 3]

    engine.handle(m.DeviceLeft(DEVICE.id, "gone"), 4.0)
    assert await behind.flush()
    assert (await read_state(etcd)).devices == ()
    await leadership.resign()


async def test_anybody_can_read_it(etcd: Etcd, etcd_server: EtcdProcess, settings: EtcdSettings) -> None:
    leadership = await campaign(etcd, "one", "127.0.0.1:1")
    engine = make_engine(leadership.epoch)
    engine.handle(m.DeviceJoined(DEVICE), 0.0)
    await writer(engine, EtcdState(etcd, leadership.compare())).flush()

    said = etcd_server.ctl("get", "--print-value-only", f"{settings.prefix}/v1/state/devices/node-1/cuda:0")

    document = json.loads(said)
    assert (document["device"]["id"], document["status"], document["finish_s"]) == ("node-1/cuda:0", "idle", 0.0)
    await leadership.resign()


async def test_who_was_replaced_writes_nothing_more(etcd: Etcd) -> None:
    first = await campaign(etcd, "one", "127.0.0.1:1")
    old = make_engine(first.epoch)
    old.handle(m.DeviceJoined(DEVICE), 0.0)
    stale = writer(old, EtcdState(etcd, first.compare()))
    await first.resign()
    second = await campaign(etcd, "two", "127.0.0.1:2")

    assert not await stale.flush()

    assert stale.lost
    assert (await read_state(etcd)).devices == ()
    await second.resign()


async def test_what_cannot_be_read_is_left_out(etcd: Etcd, caplog: pytest.LogCaptureFixture) -> None:
    good = msgspec.json.encode(DeviceDoc(DEVICE, "idle", 0.0, (), 0))
    await etcd.put("v1/state/devices/node-1/cuda:0", good)
    await etcd.put("v1/state/devices/node-2/cuda:0", b"what is this")
    await etcd.put("v1/state/something/new", b"{}")

    with caplog.at_level(logging.WARNING):
        found = await read_state(etcd)

    assert [each.device for each in found.devices] == [DEVICE]
    assert "node-2" in caplog.text
    assert found.engine is None


async def test_etcd_comes_back_to_the_newest_state(make_etcd: Callable[..., EtcdProcess]) -> None:
    server = make_etcd()
    async with Etcd(EtcdSettings((server.endpoint,), timeout_s=3.0)) as etcd:
        leadership = await campaign(etcd, "one", "127.0.0.1:1")
        state = {"engine": 1}
        changed = ["engine"]

        def take() -> list[str]:
            keys = changed.copy()
            changed.clear()
            return keys

        behind = WriteBehind(
            EtcdState(etcd, leadership.compare()), take, lambda key: EngineDoc("p", state[key], 0), leadership.epoch
        )
        running = asyncio.ensure_future(behind.run())
        try:
            async with asyncio.timeout(30):
                while (await read_state(etcd)).engine is None:
                    await asyncio.sleep(0.01)
                server.kill()
                for value in range(2, 20):
                    state["engine"] = value
                    changed.append("engine")
                    behind.note()
                    await asyncio.sleep(0.01)
                while not behind.trouble:
                    await asyncio.sleep(0.01)
                server.start()
                while True:
                    with contextlib.suppress(EtcdUnreachable):  # the channel may still wait before it tries again
                        found = (await read_state(etcd)).engine
                        if found is not None and found.grant == 19:
                            break
                    await asyncio.sleep(0.01)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        assert behind.written <= 5, "not what it was in between"
        await leadership.abandon()
