"""What the policy of `gpufaas serve` keeps is there after a restart, for a policy of the same spec."""

import asyncio
from pathlib import Path

import pytest

from gpufaas_adapters.sqlite.plans import SqlitePlans
from gpufaas_apps import policy_state
from gpufaas_cache_manager.replacement import Lru
from gpufaas_core.messages import Arrived
from gpufaas_core.model import CallId, Device, DeviceId, Function, FunctionId, Profile
from gpufaas_scheduler.engine import Engine
from gpufaas_scheduler.journal import Header, Journal, replay
from gpufaas_scheduler.policies import PolicySpec, Stateful, make_policy
from gpufaas_scheduler.service import SchedulerService


class Node:
    def execute(self, command: object) -> None:
        pass


def run_of(policy: str, journal: Journal | None = None) -> SchedulerService:
    return SchedulerService(Engine(policy=make_policy(policy), replacement=Lru()), journal=journal)


def state_of(service: SchedulerService) -> bytes:
    policy = service.engine.policy
    assert isinstance(policy, Stateful)
    return policy.save()


async def one_run(service: SchedulerService, store: SqlitePlans, calls: int = 0) -> bytes:
    """Start and stop a platform that has *calls* calls in between; return what its policy keeps at the end."""
    policy_state.restore(service, store)
    stopped = asyncio.Event()
    keeping = asyncio.create_task(policy_state.keep(service, store, stopped))
    await asyncio.sleep(0)  # it has begun
    service.join(Node(), [Device(DeviceId(f"n/cpu:{number}"), "cpu", 100) for number in range(2)])
    for name in "ab":
        service.deploy(Function(FunctionId(name), name, profiles={"*": Profile(1.0, 0.1, 60)}))
    for number in range(calls):
        name = FunctionId("ab"[number % 5 == 4])
        service.handle(Arrived(CallId(f"{number}"), name, service.driver.now() + 60, 0.0))
    stopped.set()
    await keeping
    return state_of(service)


@pytest.fixture
def store(tmp_path: Path) -> SqlitePlans:
    return SqlitePlans(tmp_path / "plans.db")


async def test_a_policy_of_the_same_spec_goes_on_with_it_and_another_one_does_not(store: SqlitePlans) -> None:
    fresh = state_of(run_of("lalb-o3"))
    kept = await one_run(run_of("lalb-o3"), store, calls=40)
    assert kept != fresh, "calls passed over others"

    assert await one_run(run_of("lalb-o3"), store) == kept
    assert await one_run(run_of("lalb"), store) != kept


async def test_calls_are_numbered_on_since_the_policy_keeps_numbers(store: SqlitePlans) -> None:
    await one_run(run_of("lalb-o3"), store, calls=40)
    again = run_of("lalb-o3")

    await one_run(again, store)

    doc = again.driver.doc("engine")
    assert getattr(doc, "next_number", 0) == 40


async def test_a_policy_that_has_nothing_to_keep_leaves_the_store_alone(store: SqlitePlans) -> None:
    await one_run(run_of("lb"), store, calls=40)

    assert store.policy_state("lb") is None


@pytest.mark.parametrize("kept", [b"{", b"{}", b'{"policy":"lalb-o3","grant":0,"policy_state":"AAAA"}'])
async def test_what_cannot_be_read_any_more_is_passed_over_and_said(
    store: SqlitePlans, caplog: pytest.LogCaptureFixture, kept: bytes
) -> None:
    store.keep_policy_state("lalb-o3", kept)
    run, fresh = run_of("lalb-o3"), state_of(run_of("lalb-o3"))

    policy_state.restore(run, store)

    assert state_of(run) == fresh
    assert "policy.not_restored" in caplog.text


async def test_a_replay_of_the_journal_has_what_was_restored(store: SqlitePlans, tmp_path: Path) -> None:
    await one_run(run_of("lalb-o3"), store, calls=40)
    header = Header(policy=PolicySpec("lalb-o3"))
    journal = Journal(tmp_path / "journal", header)

    await one_run(run_of("lalb-o3", journal), store)
    journal.close()

    assert [type(event).__name__ for event, _ in replay(tmp_path / "journal")][:2] == ["Restored", "Serving"]
