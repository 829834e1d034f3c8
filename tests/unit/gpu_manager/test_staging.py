"""What a node keeps in its host tier for its functions: memory files from real files, without workers."""

import asyncio
import os
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path

import pytest
from tests.waiting import eventually

from gpufaas_cache_manager.host_tier import HostTier
from gpufaas_core.bundle import Manifest, WeightsFile, WorkerSpec
from gpufaas_core.errors import UnknownArtifact
from gpufaas_core.messages import Event, Staged, Unstaged
from gpufaas_core.model import FunctionId, Need, NodeId
from gpufaas_core.units import KiB, MiB
from gpufaas_gpu_manager.host_cache import MOST_GIVEN, HostCache
from gpufaas_gpu_manager.staging import Staging

BUDGET = 16 * MiB
SIZE = 6 * MiB


class Rig:
    """A host tier of 16 MiB for at most 20 files, and functions whose bundles are here."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.manifests: dict[str, Manifest] = {}
        self.facts: list[Event] = []
        self.said: list[str] = []
        self.tier = HostTier[str, int](BUDGET, 20)
        self.cache = HostCache(self.tier, self.said.append)
        self.staging = Staging(NodeId("n"), self.cache, self, self.facts.append, None)

    def install(self, digest: str) -> Path:
        self.manifest(digest)
        return self.root

    def manifest(self, digest: str) -> Manifest:
        if digest not in self.manifests:
            raise UnknownArtifact(digest)
        return self.manifests[digest]

    def spec(self, name: str, sizes: tuple[int, ...] = (SIZE,)) -> WorkerSpec:
        """Return a function with files of *sizes*, which is deployed."""
        spec = WorkerSpec(FunctionId(f"{name}.ns@1"), name, "ns", name, "model", Need())
        weights = []
        for index, size in enumerate(sizes):
            data = os.urandom(size)
            (self.root / f"{name}{index}").write_bytes(data)
            weights.append(WeightsFile(f"{name}{index}", sha256(data).hexdigest(), size))
        self.manifests[name] = Manifest(kind="model", template="test", weights=tuple(weights))
        self.staging.specs[spec.function] = spec
        self.staging.know(spec, self.manifests[name].weights)
        return spec

    async def idle(self) -> None:
        """Return when nothing is filled any more."""
        await eventually(lambda: not self.cache._filling and not self.staging._tasks)

    @property
    def staged(self) -> list[str]:
        """The functions that the scheduler takes for staged."""
        found: list[str] = []
        for each in self.facts:
            if isinstance(each, Staged):
                found.append(each.function)
            elif isinstance(each, Unstaged) and each.function in found:
                found.remove(each.function)
        return found


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.staging.close()
    await rig.cache.close()


async def test_weights_of_a_function_that_is_removed_while_they_come_are_not_kept(rig: Rig) -> None:
    first, second = rig.spec("a"), rig.spec("b")
    for each in (first, second):
        rig.staging.loaded(each)
    await asyncio.sleep(0)
    for each in (second, first):  # the second one waits until the first one is filled
        rig.staging.forget(each.function)
    await rig.idle()
    assert (rig.tier.used, rig.cache.status().files, rig.facts) == (0, 0, [])


async def test_weights_of_a_function_that_drains_are_not_kept(rig: Rig) -> None:
    function = rig.spec("a")
    rig.staging.forget(function.function)
    rig.staging.loaded(function)  # a call that drains has started it again
    await rig.idle()
    assert (rig.tier.used, rig.facts) == (0, [])


async def test_the_scheduler_forgets_the_weights_of_a_function_that_is_removed(rig: Rig) -> None:
    function = rig.spec("a")
    rig.staging.loaded(function)
    await rig.idle()
    assert rig.staged == [function.function]
    rig.staging.forget(function.function)
    assert (rig.staged, rig.tier.used) == ([], 0)


async def test_a_stage_of_a_function_that_is_removed_meanwhile_is_answered(rig: Rig) -> None:
    function = rig.spec("a")
    rig.staging.stage(function.function)
    await asyncio.sleep(0)
    rig.staging.forget(function.function)
    await rig.idle()
    assert [type(each) for each in rig.facts] == [Unstaged]
    assert (rig.tier.used, rig.staging.snapshot()) == (0, ())


async def test_weights_that_another_function_has_stay(rig: Rig) -> None:
    first = rig.spec("a")
    rig.manifests["b"] = rig.manifests["a"]
    second = WorkerSpec(FunctionId("b.ns@1"), "b", "ns", "b", "model", Need())
    rig.staging.know(second, rig.manifests["b"].weights)
    rig.staging.loaded(first)
    await asyncio.sleep(0)
    rig.staging.forget(first.function)
    await rig.idle()
    assert (rig.tier.used, rig.staged) == (SIZE, [second.function])


async def test_files_that_do_not_fit_together_take_no_room_from_others(rig: Rig) -> None:
    large, small = rig.spec("large", (SIZE, SIZE, SIZE)), rig.spec("small")
    for _ in range(3):
        rig.staging.loaded(large)
    rig.staging.stage(large.function)
    rig.staging.loaded(small)
    await rig.idle()
    (why,) = (each.reason for each in rig.facts if isinstance(each, Unstaged))
    assert why == "large0 and 2 more files have 18 MiB, more than --host-cache 16 MiB"
    assert rig.said == [f"weights are not kept in host memory: {why}: starts read them from the disk"]
    assert (rig.tier.used, rig.staged) == (SIZE, [small.function])


async def test_more_files_than_a_node_may_have_open_for_weights(rig: Rig) -> None:
    many = rig.spec("many", (KiB,) * 21)
    rig.staging.loaded(many)
    await rig.idle()
    assert rig.tier.used == 0
    assert "many0 is one of 21 files of weights of a function, and at most 20 can be" in rig.said[0]


async def test_a_worker_with_many_connections_is_given_its_largest_weights(rig: Rig) -> None:
    """One message to a new worker carries them all; one that the kernel refuses would hold up those after it."""
    function = rig.spec("a", (KiB, MiB, 2 * KiB))
    rig.staging.loaded(function)
    await rig.idle()
    weights = rig.manifests["a"].weights
    assert rig.cache.attached(1, weights, MOST_GIVEN) == []
    for worker in (2, 3):
        given = rig.cache.attached(worker, weights, MOST_GIVEN - 2)
        assert [each.weights.bytes for each in given] == [MiB, 2 * KiB]
    assert len(rig.cache.attached(4, weights, MOST_GIVEN - 3)) == 3
    said = "a worker with 248 connections can be given 2 of its 3 files of weights, a0 among them: it reads the others"
    assert [line.startswith(said) for line in rig.said] == [False, True], "once"


async def test_weights_stay_for_a_new_revision_whose_bundle_is_not_here_yet(rig: Rig) -> None:
    old = rig.spec("a")
    rig.staging.loaded(old)
    await rig.idle()
    new = WorkerSpec(FunctionId("a.ns@2"), "a", "ns", "new", "model", Need(), weights=rig.manifests["a"].weights)
    rig.staging.know(new, new.weights)
    assert rig.staged == [old.function, new.function], "the scheduler knows before the first start"
    rig.staging.forget(old.function)
    assert (rig.staged, rig.tier.used) == ([new.function], SIZE)
    rig.staging.forget(new.function)
    assert (rig.staged, rig.tier.used) == ([], 0)


async def test_weights_of_the_revision_before_stay_for_a_rollback_until_the_next_update(rig: Rig) -> None:
    first, *later = [rig.spec(each) for each in "abc"]
    second, third = (WorkerSpec(FunctionId(f"a.ns@{2 + at}"), "a", "ns", each.digest, "model", Need())
                     for at, each in enumerate(later))  # fmt: skip
    for each in later:
        rig.staging.forget(each.function)  # their bundles are here; no function of theirs is
    rig.staging.loaded(first)
    await rig.idle()

    rig.staging.know(second, rig.manifests["b"].weights)
    rig.staging.forget(first.function)
    assert (rig.staged, rig.tier.used) == ([], SIZE)
    rolled_back = WorkerSpec(FunctionId("a.ns@9"), "a", "ns", "a", "model", Need())
    rig.staging.know(rolled_back, rig.manifests["a"].weights)
    assert rig.staged == [rolled_back.function], "a rollback finds them"
    rig.staging.forget(rolled_back.function)
    rig.staging.know(third, rig.manifests["c"].weights)
    rig.staging.forget(second.function)

    assert rig.tier.used == 0, "nothing of the revision before the last is kept"


async def test_a_tier_that_closes_while_it_is_filled_leaves_no_file_open(rig: Rig) -> None:
    before = _memory_files()
    function = rig.spec("a", (BUDGET,))
    rig.staging.stage(function.function)
    while _memory_files() == before:
        await asyncio.sleep(0)
    rig.staging.close()
    await rig.cache.close()
    assert _memory_files() == before


def _memory_files() -> int:
    names = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
    return sum(os.readlink(each).startswith("/memfd:") for each in names if os.path.islink(each))
