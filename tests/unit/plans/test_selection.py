"""Which variant and which worker answer a query: INFaaS's selection, its states and their limits."""

import json
from dataclasses import astuple
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufaas_scheduler.plans import selection
from gpufaas_scheduler.plans.monitor import Seen, State, limits, next_state, without_answers
from gpufaas_scheduler.plans.problem import BadProblem, read
from gpufaas_scheduler.plans.selection import (
    Closest,
    Instance,
    NoneFits,
    Problem,
    Query,
    Result,
    Variant,
    Worker,
    solve,
)

CPU = Worker(id="c", kinds=("cpu",), utilisation=10)
GPU = Worker(id="g", kinds=("cpu", "gpu"), utilisation=5)


def variant(name: str, kind: str = "gpu", **more: Any) -> Variant:
    given: dict[str, Any] = {
        "model": "resnet", "app": "photos", "accuracy": 75, "max_batch": 8, "slope_ms": 1, "intercept_ms": 9,
        "cost_rate": 1, "sat_qps": 100,
    }  # fmt: skip
    return Variant(name=name, kind=kind, **{**given, **more})


def instance(name: str, worker: str = "g", state: str = "active", qps: float = 0) -> Instance:
    return Instance(variant=name, worker=worker, state=state, qps=qps)


def ask(
    *variants: Variant, running: tuple[Instance, ...] = (), workers: tuple[Worker, ...] = (CPU, GPU), **query: Any
) -> Any:
    return solve(Problem(Query(**{"app": "photos", **query}), variants, running, workers))


class TestSelection:
    def test_an_active_variant_is_taken_before_a_better_one_that_must_load(self) -> None:
        answer = ask(variant("better", cost_rate=0.1), variant("loaded"), running=(instance("loaded"),))

        assert answer == Result("loaded", "g", False, 10, {})

    def test_of_active_ones_the_cheapest_per_query_then_the_one_with_least_to_spare(self) -> None:
        all_run = tuple(map(instance, ("dear", "cheap", "slow")))
        of = (variant("dear", cost_rate=9), variant("cheap"), variant("slow", intercept_ms=90))

        assert ask(*of, running=all_run).variant == "slow"
        assert ask(*of, running=all_run, latency_ms=50).variant == "cheap"

    @pytest.mark.parametrize(("prefer", "chosen"), [("fastest", "quick"), ("accurate", "good"), ("cheapest", "cheap")])
    def test_the_query_says_what_it_prefers(self, prefer: str, chosen: str) -> None:
        of = variant("quick", intercept_ms=1), variant("good", accuracy=90), variant("cheap", cost_rate=0.5)

        assert ask(*of, running=tuple(map(instance, ("quick", "good", "cheap"))), prefer=prefer).variant == chosen

    @pytest.mark.parametrize("state", ["Overloaded", "interfered", "inactive"])
    def test_an_instance_that_is_not_well_is_skipped(self, state: str) -> None:
        answer = ask(variant("a"), variant("b", load_ms=5), running=(instance("a", state=state), instance("b")))

        assert (answer.variant, answer.cold) == ("b", False)

    def test_the_least_loaded_worker_answers(self) -> None:
        running = (instance("a", "c", qps=9), instance("a", "g", qps=3))

        assert ask(variant("a"), running=running).worker == "g"

    def test_a_cold_one_answers_soonest_on_the_least_used_worker_of_its_kind(self) -> None:
        of = variant("slow-load", load_ms=900), variant("slow-run", load_ms=10, intercept_ms=99, kind="cpu")

        assert ask(*of) == Result("slow-run", "g", True, 100, {})

    def test_an_engine_of_a_fixed_batch_takes_as_long_as_its_batch(self) -> None:
        answer = ask(variant("a", max_batch=64, fixed_batch=True), running=(instance("a"),))

        assert answer.predicted_ms == 9 + 32

    def test_why_each_other_was_left_out(self) -> None:
        of = (
            variant("ok"), variant("small", max_batch=1), variant("poor", accuracy=50), variant("slow", slope_ms=90),
            variant("dear", cost_rate=9), variant("nowhere", kind="tpu"), variant("other", app="else"),
        )  # fmt: skip

        answer = ask(*of, batch=2, min_accuracy=70, latency_ms=100, max_cost=5)

        assert answer.filtered == {
            "small": "takes batches of up to 1, not 2", "poor": "accuracy 50 is below 70",
            "slow": "takes 189 ms, more than 100 ms", "dear": "costs 9, more than 5", "nowhere": "no worker has tpu",
        }  # fmt: skip

    def test_when_none_fits_the_closest_are_named(self) -> None:
        of = variant("quick", accuracy=60), variant("good", accuracy=80, intercept_ms=99)

        assert ask(*of, min_accuracy=75, latency_ms=20) == NoneFits(Closest("good", "quick"))
        assert ask(*of, min_accuracy=99, latency_ms=1) == NoneFits(Closest(None, None))

    @given(st.data())
    def test_an_answer_meets_the_needs_and_a_fit_active_one_is_never_passed_over(self, data: st.DataObject) -> None:
        of = tuple(
            variant(f"v{i}", accuracy=data.draw(st.integers(60, 90)), intercept_ms=data.draw(st.integers(0, 50)))
            for i in range(data.draw(st.integers(1, 5)))
        )
        states = data.draw(st.lists(st.sampled_from(selection.STATES), min_size=len(of), max_size=len(of)))
        running = tuple(instance(each.name, state=state) for each, state in zip(of, states, strict=True))
        answer = ask(*of, running=running, min_accuracy=75, latency_ms=30)
        fit = [each for each in of if each.accuracy >= 75 and each.predicted(1) <= 30]

        assert isinstance(answer, Result) == bool(fit)
        if isinstance(answer, Result):
            assert answer.variant in [each.name for each in fit]
            well = [each.name for each, state in zip(of, states, strict=True) if state == "active" and each in fit]
            assert answer.cold == (not well)


NUMBERS = dict.fromkeys(("accuracy", "max_batch", "slope_ms", "intercept_ms", "cost_rate", "sat_qps"), 1)
GOOD = {"query": {"app": "a"}, "variants": [{"name": "v", "model": "m", "app": "a", "kind": "cpu", **NUMBERS}]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"query": {}}, "exactly one of `app`, `model` and `variant`"),
        ({"query": {"app": "a", "model": "m"}}, "exactly one"),
        ({"query": {"app": "b"}}, "no variant has app 'b'"),
        ({"query": {"app": "a", "prefer": "best"}}, 'query.prefer is "best": write one of accurate, cheapest, fastest'),
        ({"instances": [{"variant": "x", "worker": "w", "state": "active"}]}, "'x', which is not among `variants`"),
        ({"instances": [{"variant": "v", "worker": "w", "state": "active"}]}, "'w', which is not among `workers`"),
        ({"instances": [{"variant": "v", "worker": "w", "state": "well"}]}, "is 'well'"),
    ],
)
def test_bad_problems_are_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(BadProblem) as caught:
        read(json.dumps({**GOOD, **change}), Problem)

    assert said in str(caught.value)


class TestMonitor:
    @pytest.mark.parametrize(
        ("kind", "profiled", "replicas", "wanted"),
        [
            ("gpu", 4, 1, (15, 75, 200, 5)),
            ("gpu", 20, 1, (30, 15, 40, 25)),
            ("cpu", 200, 2, (500, 2.5, 8, 300)),
            ("cpu", 200, 1, (800, 5, 5.5, 300)),
        ],
    )
    def test_the_limits(self, kind: str, profiled: float, replicas: int, wanted: tuple[float, ...]) -> None:
        assert astuple(limits(kind, profiled, replicas)) == pytest.approx(wanted)

    @pytest.mark.parametrize(
        ("before", "seen", "after"),
        [
            (State.ACTIVE, Seen(10, 10, 0, 10), State.ACTIVE),
            (State.ACTIVE, Seen(31, 16, 0, 16), State.INTERFERED),
            (State.ACTIVE, Seen(31, 46, 0, 46), State.OVERLOADED),
            (State.ACTIVE, Seen(10, 10, 41, 10), State.OVERLOADED),
            (State.ACTIVE, Seen(31, 14, 0, 14), State.ACTIVE),
            (State.INTERFERED, Seen(27, 16, 0, 16), State.INTERFERED),
            (State.ACTIVE, Seen(27, 16, 0, 16), State.ACTIVE),
            (State.OVERLOADED, Seen(24, 16, 0, 16), State.ACTIVE),
            (State.INACTIVE, Seen(99, 99, 99, 99), State.INACTIVE),
        ],
    )
    def test_the_states(self, before: State, seen: Seen, after: State) -> None:
        """Of one GPU replica at 20 ms: flagged above 30 ms and 15 qps, or 40 waiting; cleared below 25 ms."""
        assert next_state(before, seen, limits("gpu", 20), saturation=50) is after

    def test_without_answers_the_mean_is_forgotten(self) -> None:
        assert [without_answers(20, kind) for kind in ("cpu", "gpu")] == [5, 18.5]
        assert without_answers(1, "gpu") == 0
