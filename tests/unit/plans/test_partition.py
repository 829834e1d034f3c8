"""Where a model is cut: golden values, the exact search against every plan."""

import itertools
import json
import random

import pytest

from gpufaas_scheduler.plans import partition
from gpufaas_scheduler.plans.partition import Costs, Plan, best, measure, plan_table, ranges, waits
from gpufaas_scheduler.plans.problem import BadProblem, read

WORKED = Costs(0.0, (12.0, 12.0), (2.0, 2.0), (1.0,))
COUNTER = Costs(0.5, (4, 2, 6, 3, 5), (0.02, 0.01, 0.03, 0.015, 0.025), (0.004, 0.001, 0.008, 0.002))
TABLE = Costs(0.5, COUNTER.c, COUNTER.e, (0.5,) * 4)


def test_the_worked_example() -> None:
    assert measure(WORKED, (), 8, 2).t_avg == 34
    assert measure(WORKED, (0,), 8, 2) == Plan(8, (0,), 2, 24.0, 12.0, 2.0, 1.0)
    assert best(WORKED, 8, 2) == measure(WORKED, (0,), 8, 2)


@pytest.mark.parametrize(("requests", "pipelines", "waited"), [(8, 2, 12), (8, 1, 28), (100, 16, 264)])
def test_how_many_are_served_before(requests: int, pipelines: int, waited: int) -> None:
    assert waits(requests, pipelines) == waited


@pytest.mark.parametrize(
    ("requests", "cuts"), [(1, (1, 2, 3)), (39, (1, 2, 3)), (40, (2,)), (68, (2,)), (69, ()), (3000, ())]
)
def test_longer_queues_want_fewer_parts(requests: int, cuts: tuple[int, ...]) -> None:
    assert best(TABLE, requests, 4).cuts == cuts


@pytest.mark.parametrize(("requests", "t_avg"), [(1, 8.1), (30, 15.35), (60, 20.35), (3000, 58.05)])
def test_the_mean_times_of_the_table(requests: int, t_avg: float) -> None:
    assert best(TABLE, requests, 4).t_avg == pytest.approx(t_avg)


def test_ranges_say_from_where_on_a_plan_is_best() -> None:
    assert [(each.requests, each.cuts) for each in ranges(TABLE, 4)] == [(1, (1, 2, 3)), (40, (2,)), (69, ())]


def _every_plan(costs: Costs, requests: int, devices: int, most: int) -> Plan:
    plans = (
        measure(costs, cuts, requests, devices)
        for parts in range(1, min(len(costs.c), devices, most) + 1)
        for cuts in itertools.combinations(range(len(costs.c) - 1), parts - 1)
    )
    found = next(plans)
    for plan in plans:
        if plan.t_avg < found.t_avg * (1 - 1e-9):
            found = plan
    return found


@pytest.mark.parametrize("block", range(5))
def test_no_plan_is_better_and_ties_are_kept(block: int) -> None:
    """700 models, some of whole numbers, so that plans are equally good: fewest parts win, then the smallest cuts."""
    for seed in range(140 * block, 140 * (block + 1)):
        rng = random.Random(seed)
        layers = rng.randint(1, 8)
        draw = rng.choice(
            [rng.random, lambda rng=rng: float(rng.randint(0, 4)), lambda rng=rng: rng.choice([0.5, 1.0])]
        )
        c, e, n = ([draw() for _ in range(count)] for count in (layers, layers, layers - 1))
        costs = Costs(rng.choice([0.0, 0.5]), tuple(c), tuple(e), tuple(n))
        requests, devices, most = rng.choice([1, 2, 5, 30, 3000]), rng.randint(1, 9), rng.choice([1, 3, 8])

        assert best(costs, requests, devices, most) == _every_plan(costs, requests, devices, most), seed


def test_other_weights_of_the_same_size_keep_the_table() -> None:
    assert plan_table(COUNTER, 4) is plan_table(Costs(COUNTER.c0, COUNTER.c, COUNTER.e, COUNTER.n), 4)


GOOD = {"c": [1, 2], "e": [1, 1], "n": [0.5], "devices": 2, "requests": [1]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"e": [1]}, "`c` has 2 layers and `e` 1"),
        ({"n": []}, "`n` has 0 entries: 2 layers have 1 places to cut"),
        ({"c": [1, -2]}, "c[1] is -2: write a number, 0 or more"),
        ({"requests": [0]}, "requests[0] is 0: write a whole number, 1 or more"),
        ({"devices": 0}, "devices is 0"),
        ({"gpus": 2}, "unknown key 'gpus'"),
    ],
)
def test_bad_problems_are_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(BadProblem) as caught:
        read(json.dumps({**GOOD, **change}), partition.Problem)

    assert said in str(caught.value)


def test_parts_are_limited_by_layers_devices_and_the_limit() -> None:
    costs = Costs(0.0, (1.0,) * 6, (0.0,) * 6, (0.0,) * 5)

    assert [best(costs, 1, *limits).parts for limits in ((3, None), (6, 2), (9, 9))] == [3, 2, 6]
