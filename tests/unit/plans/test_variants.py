"""How many instances of which variants: golden values of INFaaS, brute force, ties, what is infeasible, limits."""

import itertools
import json
import math
import random

import pytest

from gpufaas_scheduler.plans import variants
from gpufaas_scheduler.plans.problem import BadProblem, read
from gpufaas_scheduler.plans.variants import Infeasible, Problem, Result, Variant, greedy, solve

RESNET = (("A", 1, 5, 200, 1), ("B", 3, 100, 20, 8), ("C", 16, 800, 15, 11))


def ask(load: float, slo_ms: float = 300, lam: float = 0.0, running: tuple[int, int, int] = (0, 0, 0)) -> Problem:
    made = tuple(
        Variant(name=name, cost=cost, qps=qps, latency_ms=latency, load_s=load_s, running=count)
        for (name, cost, qps, latency, load_s), count in zip(RESNET, running, strict=True)
    )
    return Problem(load=load, slo_ms=slo_ms, lambda_=lam, variants=made)


@pytest.mark.parametrize(
    ("problem", "delta", "objective"),
    [
        (ask(10), (2, 0, 0), 2),
        (ask(10, slo_ms=50), (0, 1, 0), 3),
        (ask(1000), (0, 2, 1), 22),
        (ask(1050), (0, 3, 1), 25),
        (ask(1000, lam=0.1), (0, 2, 1), 44.4),
        (ask(1000, lam=0.1, running=(0, 0, 1)), (0, 2, 0), 10.8),
        (ask(10, lam=0.1, running=(0, 0, 1)), (2, 0, -1), -13.8),
        (ask(100, lam=0.1, running=(2, 0, 0)), (-2, 1, 0), 3.4),
    ],
)
def test_the_worked_examples(problem: Problem, delta: tuple[int, int, int], objective: float) -> None:
    answer = solve(problem)

    assert isinstance(answer, Result)
    assert tuple(answer.delta.values()) == delta
    assert answer.objective == pytest.approx(objective)
    assert (answer.method, answer.gap) == ("exact", 0)


def test_two_stages_find_what_a_single_variant_misses() -> None:
    found = greedy(ask(1000))

    assert found == (0, 2, 1)


def test_slack_is_served_too() -> None:
    asked = Problem(load=10, slack=1, slo_ms=300, variants=ask(1).variants)

    assert solve(asked) == solve(ask(11))


def _brute(asked: Problem) -> float | None:
    ranges = [
        range(-each.running, (math.ceil(asked.wanted / each.qps) if asked.may_load(each) else 0) + 1)
        for each in asked.variants
    ]
    return min((asked.objective(d) for d in itertools.product(*ranges) if _serves(asked, d)), default=None)


def _serves(asked: Problem, delta: tuple[int, ...]) -> bool:
    after = [(each, each.running + change) for each, change in zip(asked.variants, delta, strict=True)]
    return (
        sum(each.qps * count for each, count in after) >= asked.wanted - 1e-9
        and all(count >= 0 for _, count in after)
        and all(change <= 0 or asked.may_load(each) for (each, _), change in zip(after, delta, strict=True))
        and all(
            sum(each.needs.get(name, 0) * count for each, count in after) <= total + 1e-9
            for name, total in asked.resources.items()
        )
    )


def _random(seed: int) -> Problem:
    rng = random.Random(seed)
    made = tuple(
        Variant(
            name=f"v{j}", cost=rng.choice([1, 2, 3, rng.uniform(0, 4)]), qps=rng.choice([5, 10, rng.uniform(5, 40)]),
            latency_ms=rng.choice([50, 80, 150]), load_s=rng.randint(0, 5), running=rng.randint(0, 2),
            needs={"cpu": rng.randint(0, 4)},
        )
        for j in range(rng.randint(1, 4))
    )  # fmt: skip
    resources = rng.choice([{}, {"cpu": float(rng.randint(1, 20))}])
    load = rng.choice([0, rng.randint(1, 60)])
    return Problem(load=load, slo_ms=100, lambda_=rng.choice([0, 0.1, 1]), resources=resources, variants=made)


@pytest.mark.parametrize("block", range(10))
def test_nothing_is_cheaper(block: int) -> None:
    """500 problems against every change; what `greedy` finds serves the load, and costs no less."""
    for seed in range(50 * block, 50 * (block + 1)):
        asked = _random(seed)
        answer, wanted, quick = solve(asked), _brute(asked), greedy(asked)

        assert isinstance(answer, Infeasible) == (wanted is None), seed
        if isinstance(answer, Result) and wanted is not None:
            assert _serves(asked, tuple(answer.delta.values())), seed
            assert answer.objective == pytest.approx(wanted, abs=1e-6), seed
            assert quick is None or asked.objective(quick) >= wanted - 1e-6, seed
        assert quick is None or _serves(asked, quick), seed


def test_the_quick_search_is_near_the_least() -> None:
    ratios = []
    for seed in range(60):
        rng = random.Random(seed)
        made = tuple(
            Variant(name=f"v{j}", cost=rng.uniform(1, 20), qps=rng.uniform(5, 200), latency_ms=1)
            for j in range(rng.randint(3, 10))
        )
        asked = Problem(load=rng.uniform(50, 2000), slo_ms=100, variants=made)
        found, least = greedy(asked), solve(asked)
        assert found is not None
        assert isinstance(least, Result)
        ratios.append(asked.objective(found) / least.objective)

    assert max(ratios) <= 1.1
    assert sum(ratios) / len(ratios) <= 1.01


def test_of_equals_fewest_loads_then_the_first() -> None:
    def equal(*names: str, qps: tuple[float, ...]) -> dict[str, int]:
        made = tuple(Variant(name=n, cost=q, qps=q, latency_ms=1) for n, q in zip(names, qps, strict=True))
        answer = solve(Problem(load=20, slo_ms=10, variants=made))
        assert isinstance(answer, Result)
        return answer.delta

    assert equal("small", "large", qps=(10, 20)) == {"small": 0, "large": 1}
    assert equal("first", "second", qps=(20, 20)) == {"first": 1, "second": 0}
    assert equal("a", "b", "c", qps=(5, 10, 15)) == {"a": 1, "b": 0, "c": 1}


def test_what_runs_and_costs_nothing_stays() -> None:
    made = tuple(Variant(name=name, cost=0, qps=1, latency_ms=1, running=2) for name in "ab")

    assert solve(Problem(load=0, slo_ms=10, variants=made)) == Result({"a": 0, "b": 0}, 0, "exact", 0)


def test_an_infeasible_problem_says_what_is_possible() -> None:
    slow = solve(ask(10, slo_ms=10))
    assert slow == Infeasible(
        "no variant answers within 10 ms: the fastest, C, takes 15 ms; what runs serves 0 of 10 qps"
    )
    full = solve(
        Problem(
            load=50, slo_ms=10, resources={"cpu": 8},
            variants=(Variant(name="a", cost=1, qps=10, latency_ms=1, needs={"cpu": 4}),),
        )
    )  # fmt: skip
    assert full == Infeasible("8 cpu serve at most 20 qps within 10 ms; 50 are wanted")


def test_when_time_is_over_the_quick_answer_and_how_far_it_may_be_are_given() -> None:
    rng = random.Random(1)
    made = tuple(
        Variant(
            name=f"v{j}", cost=rng.uniform(1, 20), qps=rng.uniform(5, 200), latency_ms=1, needs={"cpu": rng.random()}
        )
        for j in range(120)
    )
    asked = Problem(load=15000, slo_ms=100, resources={"cpu": 120}, variants=made)

    answer = solve(asked, time_limit=1e-6)

    assert isinstance(answer, Result)
    assert answer.method == "greedy"
    assert _serves(asked, tuple(answer.delta.values()))


GOOD = {"name": "a", "cost": 1, "qps": 1, "latency_ms": 1}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"load": -1}, "load is -1: write a number, 0 or more"),
        ({"variants": []}, "variants is []: write a list of 1 or more"),
        ({"variants": [{**GOOD, "qps": 0}]}, "variants[0].qps is 0"),
        ({"lamda": 1}, "unknown key 'lamda': did you mean 'lambda'?"),
        ({"variants": [GOOD, GOOD]}, "two variants are called 'a'"),
    ],
)
def test_bad_problems_are_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(BadProblem) as caught:
        read(json.dumps({"load": 1, "slo_ms": 1, "lambda": 0.1, "variants": [GOOD], **change}), variants.Problem)

    assert said in str(caught.value)
