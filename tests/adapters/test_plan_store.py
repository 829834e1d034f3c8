"""What every `PlanStore` does: the fake that tests use, SQLite and etcd; below, what only one of them does."""

import asyncio
import itertools
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import pytest
from tests.unit.planner.fakes import MemoryPlans

from gpufaas_adapters.etcd.client import Etcd, EtcdSettings
from gpufaas_adapters.etcd.plans import EtcdPlans
from gpufaas_adapters.sqlite.plans import SqlitePlans
from gpufaas_core.model import DeviceId, Replica
from gpufaas_core.plans import KEPT, PlanVersion

Store: TypeAlias = MemoryPlans | SqlitePlans | EtcdPlans


@pytest.fixture(params=["memory", "sqlite", "etcd"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made: Store
    match request.param:
        case "memory":
            made = MemoryPlans()
        case "sqlite":
            made = SqlitePlans(tmp_path / "plans.db")
        case _:
            made = EtcdPlans(request.getfixturevalue("etcd_elsewhere"))
    yield made
    if isinstance(made, SqlitePlans):
        made.close()


def plan(version: int, by: str = "alice") -> PlanVersion:
    replica = Replica("one.ns", DeviceId("n1/a"), 40, slots=2, batch=4, wait_s=0.02, pinned=True)
    return PlanVersion(version, (replica,) * (version % 3), by, 1000.25, "try", {"calls_per_s": 20.0}, ("note",))


def test_a_new_store_has_no_plan(store: Store) -> None:
    assert store.history() == []


def test_a_plan_comes_back_as_it_was(store: Store) -> None:
    assert store.add(plan(1))
    assert store.add(plan(2))

    assert store.history() == [plan(2), plan(1)]


@pytest.mark.parametrize("version", [1, 2, 4])
def test_only_the_version_after_the_latest_can_be_added(store: Store, version: int) -> None:
    store.add(plan(1))
    store.add(plan(2))

    assert not store.add(plan(version, by="bob"))

    assert store.history() == [plan(2), plan(1)]


def test_the_first_version_is_one(store: Store) -> None:
    assert not store.add(plan(2))
    assert store.history() == []


def test_only_the_last_ones_are_kept(store: Store) -> None:
    for version in range(1, KEPT + 4):
        assert store.add(plan(version))

    assert [each.version for each in store.history()] == list(range(KEPT + 3, 3, -1))


def test_of_several_who_add_at_once_one_wins(store: Store) -> None:
    barrier = threading.Barrier(4)

    def add(number: int) -> bool:
        barrier.wait()
        return store.add(plan(1, by=f"{number}"))

    with ThreadPoolExecutor(4) as threads:
        won = list(threads.map(add, range(4)))

    assert won.count(True) == 1
    assert store.history() == [plan(1, by=f"{won.index(True)}")]


# --- SQLite ---

_ADDS = """
import sys
from pathlib import Path
from tests.adapters.test_plan_store import plan
from gpufaas_adapters.sqlite.plans import SqlitePlans

store = SqlitePlans(Path(sys.argv[1]))
version = max((each.version for each in store.history()), default=0)
while True:
    print(version, flush=True)
    version += 1
    store.add(plan(version))
"""


def test_a_process_that_is_killed_leaves_the_one_plan_or_the_next_whole(tmp_path: Path) -> None:
    path, chance = tmp_path / "plans.db", random.Random(34)
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", _ADDS, str(path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        said = [int(each) for each in itertools.islice(process.stdout, chance.randint(1, 30))]
        process.kill()
        said += [int(each) for each in process.communicate()[0].split()]

        store = SqlitePlans(path)
        kept = store.history()
        store.close()

        version = kept[0].version if kept else 0
        assert version - said[-1] in (0, 1)
        assert kept == [plan(each) for each in range(version, max(0, version - KEPT), -1)]


def test_what_a_policy_keeps_is_there_for_one_of_the_same_spec(tmp_path: Path) -> None:
    store = SqlitePlans(tmp_path / "plans.db")
    store.keep_policy_state("lalb-o3", b"old")
    store.keep_policy_state("lalb-o3", b"new")
    store.close()

    store = SqlitePlans(tmp_path / "plans.db")
    assert (store.policy_state("lalb-o3"), store.policy_state("lb")) == (b"new", None)
    store.close()


# --- etcd ---


async def test_who_follows_hears_of_the_plan_in_force_and_of_each_that_comes(
    etcd: Etcd, settings: EtcdSettings, open_etcd: Callable[[EtcdSettings], Etcd]
) -> None:
    other, known = EtcdPlans(open_etcd(settings)), asyncio.Event()
    for version in range(1, 13):
        await asyncio.to_thread(other.add, plan(version))
    heard: asyncio.Queue[PlanVersion] = asyncio.Queue()
    follows = asyncio.create_task(EtcdPlans(etcd).follow(heard.put_nowait, known))

    await known.wait()
    first = [await heard.get(), heard.qsize()]
    await asyncio.to_thread(other.add, plan(13))

    assert first == [plan(12), 0]
    assert await heard.get() == plan(13)
    follows.cancel()


async def test_who_follows_knows_when_there_is_no_plan(etcd: Etcd) -> None:
    heard: list[PlanVersion] = []
    known = asyncio.Event()
    follows = asyncio.create_task(EtcdPlans(etcd).follow(heard.append, known))

    await known.wait()

    assert heard == []
    follows.cancel()


async def test_a_plan_that_cannot_be_read_is_never_replaced(
    etcd: Etcd, settings: EtcdSettings, open_etcd: Callable[[EtcdSettings], Etcd]
) -> None:
    """A later release may have written it."""
    store = EtcdPlans(open_etcd(settings))
    await asyncio.to_thread(store.add, plan(1))
    await etcd.put("v1/plans/2", b'{"version": "next"}')

    assert await asyncio.to_thread(store.history) == [plan(1)]
    assert not await asyncio.to_thread(store.add, plan(2))
