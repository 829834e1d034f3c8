"""The LRU lists of devices, and the choice of victims."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufaas_cache_manager.eviction import victims
from gpufaas_cache_manager.replacement import CostAware, Lru, Replacement
from gpufaas_cache_manager.residency import Copy, Residency
from gpufaas_core.model import FunctionId


@dataclass
class Owner:
    id: FunctionId
    copies: int = 1
    min_copies: int = 0
    reload_s: float = 1.0
    share: int = 0
    before: "Owner | None" = None

    def load_s(self, kind: str) -> float:
        assert kind == "gpu"
        return self.reload_s


def holding(
    *models: tuple[str, int], memory: int = 100, copies: dict[str, int] | None = None, reload_s: float = 1.0
) -> Residency[Owner]:
    """A device that holds *models* of the given sizes, ready and idle, the least recently used first."""
    residency: Residency[Owner] = Residency(memory, "gpu")
    for at, (name, size) in enumerate(models):
        resident = Copy(Owner(FunctionId(name), (copies or {}).get(name, 1), reload_s=reload_s), size, at, at)
        resident.loading = False
        residency.insert(resident)
    return residency


def names(chosen: tuple[Copy[Owner], ...] | None) -> list[str] | None:
    return None if chosen is None else [each.owner.id for each in chosen]


def test_nobody_is_evicted_while_there_is_room() -> None:
    assert victims(Lru(), holding(("x", 40)), 60) == ()


def test_the_least_recently_used_go_first() -> None:
    residency = holding(("x", 40), ("y", 30), ("z", 30))

    assert names(victims(Lru(), residency, 50)) == ["x", "y"]


def test_a_use_makes_a_model_the_most_recent() -> None:
    residency = holding(("x", 40), ("y", 30))

    residency.touch(residency.copies["x#0"], 7.0)

    assert [(each.id, each.last_used) for each in residency] == [("y#0", 1), ("x#0", 7.0)]


def test_what_is_larger_than_the_device_evicts_nobody() -> None:
    assert victims(Lru(), holding(("x", 40)), 101) is None


@pytest.mark.parametrize("pin", ["loading", "running", "queued"])
def test_a_model_that_loads_runs_or_has_local_work_is_spared(pin: str) -> None:
    residency = holding(("x", 40), ("y", 40))
    setattr(residency.copies["x#0"], pin, True)

    assert names(victims(Lru(), residency, 60)) == ["y"]
    assert victims(Lru(), residency, 61) is None


def test_a_copy_within_its_minimum_is_spared() -> None:
    residency = holding(("x", 40), ("y", 40))
    residency.copies["x#0"].owner.min_copies = 1

    assert names(victims(Lru(), residency, 50)) == ["y"]


def test_cost_aware_takes_duplicates_before_last_copies() -> None:
    residency = holding(("last", 40), ("copied", 40), copies={"copied": 2})

    assert names(victims(CostAware(), residency, 40)) == ["copied"]


def test_cost_aware_takes_what_frees_most_memory_for_a_second_of_reload() -> None:
    residency = holding(("small", 20), ("large", 80))

    assert names(victims(CostAware(), residency, 20)) == ["large"]


def test_cost_aware_falls_back_on_recency() -> None:
    residency = holding(("x", 40), ("y", 40))

    assert names(victims(CostAware(), residency, 40)) == ["x"]


def copies_of(owner: Owner, number: int, size: int, memory: int = 100) -> Residency[Owner]:
    """A device that holds *number* copies of *owner*, ready and idle."""
    residency: Residency[Owner] = Residency(memory, "gpu")
    for copy in range(number):
        resident = Copy(owner, size, copy, copy, copy)
        resident.loading = False
        residency.insert(resident)
    return residency


@pytest.mark.parametrize("replacement", [Lru(), CostAware()])
def test_copies_of_one_function_on_a_device_go_one_by_one_down_to_its_minimum(replacement: Replacement) -> None:
    residency = copies_of(Owner(FunctionId("x"), copies=4, min_copies=2), 4, size=25)

    chosen = victims(replacement, residency, 50)

    assert chosen is not None
    assert [each.id for each in chosen] == ["x#0", "x#1"]
    assert victims(replacement, residency, 51) is None


def test_the_other_copies_of_a_function_make_no_room_for_its_next() -> None:
    owner = Owner(FunctionId("x"), copies=3)
    residency = copies_of(owner, 3, size=30)

    assert victims(Lru(), residency, 30, owner) is None
    assert victims(Lru(), residency, 10, owner) == ()


def test_the_last_copy_of_all_is_spared_while_another_function_has_one_too_many() -> None:
    several = Owner(FunctionId("x"), copies=2)
    residency = copies_of(several, 2, size=25)
    resident = Copy(Owner(FunctionId("y"), copies=2), 50, 9.0, 9.0)
    resident.loading = False
    residency.insert(resident)

    chosen = victims(CostAware(), residency, 75)

    assert chosen is not None
    assert sorted(each.id for each in chosen) == ["x#0", "y#0"]


@given(
    st.sampled_from([Lru(), CostAware()]),
    st.lists(st.tuples(st.integers(1, 30), st.booleans(), st.integers(1, 3), st.integers(0, 3)), max_size=8),
    st.integers(1, 200),
)
def test_victims_make_room_and_are_free_to_go(
    replacement: Replacement, models: list[tuple[int, bool, int, int]], need: int
) -> None:
    residency: Residency[Owner] = Residency(120, "gpu")
    for at, (size, running, copies, minimum) in enumerate(models):
        if size <= residency.free:
            resident = Copy(Owner(FunctionId(f"f{at}"), copies, minimum), size, 0.0, 0.0)
            resident.loading = False
            resident.running = int(running)
            residency.insert(resident)
    evictable = [each for each in residency if not each.running and each.owner.copies > each.owner.min_copies]

    chosen = victims(replacement, residency, need)

    if chosen is None:
        assert residency.free + sum(each.memory for each in evictable) < need
        return
    assert all(each in evictable for each in chosen)
    assert len(set(map(id, chosen))) == len(chosen)
    for each in chosen:
        residency.remove(each.id)
    assert residency.free >= need
    if chosen:
        assert residency.free - chosen[-1].memory < need, "the last victim was not needed"


def test_memory_is_accounted_to_the_byte() -> None:
    residency = holding(("x", 40), ("y", 30))
    assert residency.free == 30

    residency.resize(residency.copies["x#0"], 60, 60)
    assert residency.free == 10
    residency.remove("x#0")

    assert residency.free == 70
    assert len(residency) == 1


def test_what_is_lent_is_free_while_its_holder_is_idle() -> None:
    residency = holding(("x", 40), ("y", 30))
    x, y = residency.copies.values()
    residency.resize(x, 40, 70)
    assert (residency.free, residency.unpromised) == (30, 0)

    x.running = 1
    residency.hold(x)
    assert (residency.free, residency.held, residency.room_of(x), residency.room_of(y)) == (0, 30, 70, 30)
    assert residency.reclaim(20) == []

    x.running = 0
    residency.let_go(x)
    assert residency.room_of(y) == 60
    assert residency.reclaim(20) == [x]  # and no more than is lacking
    assert (x.memory, x.limit, residency.free, residency.unpromised) == (40, 50, 30, 20)
    residency.remove(x.id)
    assert (residency.free, residency.unpromised) == (70, 70)
