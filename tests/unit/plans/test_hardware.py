"""Which hardware serves a burst: golden values of PALDIA, ties, limits, and the closed form against a literal scan."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpufaas_scheduler.plans import hardware
from gpufaas_scheduler.plans.hardware import NodeType, Problem, solve
from gpufaas_scheduler.plans.problem import BadProblem, read
from gpufaas_scheduler.plans.split import Sharing, Split, split

MOTIVATION = Sharing(solo=80, batch=64, fbr=0.5)
SUPER_LINEAR = Sharing(solo=50, batch=64, fbr=0.5, p=2)
EXHAUSTED = Sharing(solo=59, batch=128, fbr=0.63)


def gpu(name: str, price: float, solo_ms: float, **more: object) -> NodeType:
    return NodeType(
        **{"name": name, "price": price, "kind": "gpu", "solo_ms": solo_ms, "batch": 64, "fbr": 0.5, **more}
    )


def cpu(name: str, price: float, solo_ms: float, batch: int = 8) -> NodeType:
    return NodeType(name=name, price=price, kind="cpu", solo_ms=solo_ms, batch=batch)


def ask(*types: NodeType, n: int = 64, slo_ms: float = 200) -> hardware.Result:
    return solve(Problem(n=n, slo_ms=slo_ms, types=types))


def literal_split(n: int, sharing: Sharing, goal: float) -> Split:
    """The definition, value by value."""
    allowed = [
        y for y in range(n + 1) if sharing.most_batches is None or -(-(n - y) // sharing.batch) <= sharing.most_batches
    ]
    if n <= sharing.batch:
        best: tuple[int, float] | None = (0, sharing.solo)
    else:
        best = None
        for y in allowed:
            if y < n and (best is None or sharing.last_ends(n, y) < best[1] - 1e-9):
                best = y, sharing.last_ends(n, y)
    if best and best[1] < goal - 1e-9:
        return Split(best[0], best[1], n)
    y = max(allowed, key=lambda y: (sharing.in_time(n, y, goal), -y))
    return Split(y, None, sharing.in_time(n, y, goal))


class TestSplit:
    @pytest.mark.parametrize(("y", "ends"), [(0, 160.0), (63, 199.375), (64, 200.0)])
    def test_the_motivating_example(self, y: int, ends: float) -> None:
        assert MOTIVATION.last_ends(256, y) == ends

    def test_a_goal_must_be_beaten(self) -> None:
        """T(0) is exactly the goal, so no split is feasible."""
        assert split(320, MOTIVATION, 200).ends is None

    @pytest.mark.parametrize(
        ("y", "ends"), [(0, 200.0), (64, 162.5), (96, 153.125), (128, 150.0), (192, 200.0), (256, 200.0)]
    )
    def test_super_linear_interference_has_its_best_split_inside(self, y: int, ends: float) -> None:
        assert SUPER_LINEAR.last_ends(256, y) == ends
        assert split(256, SUPER_LINEAR, 200) == Split(128, 150.0, 256)

    def test_when_not_all_can_be_in_time_most_are(self) -> None:
        assert EXHAUSTED.last_ends(700, 0) == pytest.approx(203.27, abs=0.01)
        assert [EXHAUSTED.in_time(700, y, 200) for y in (0, 700)] == [0, 433]
        assert split(700, EXHAUSTED, 200) == Split(12, None, 688)

    def test_interference_beyond_all_numbers_is_no_error(self) -> None:
        assert split(10**6, Sharing(80, 1, 1.5, p=1000), 1000) == Split(10**6, None, 12)

    def test_what_may_not_run_at_once_waits(self) -> None:
        found = split(256, Sharing(80, 64, 0.5, most_batches=2), 1000)

        assert (found.y, found.ends) == (128, 80 * 2 + 80)

    @settings(max_examples=700)
    @given(
        n=st.integers(0, 150),
        sharing=st.builds(
            Sharing, st.floats(1, 300), st.integers(1, 60), st.sampled_from([0, 0.2, 0.63, 1, 1.5]) | st.floats(0, 2),
            st.just(1.0) | st.floats(1, 3), st.none() | st.integers(1, 8),
        ),
        goal=st.floats(1, 1000),
    )  # fmt: skip
    def test_the_closed_form_is_the_scan(self, n: int, sharing: Sharing, goal: float) -> None:
        found, wanted = split(n, sharing, goal), literal_split(n, sharing, goal)

        assert found.in_time == wanted.in_time <= n
        assert (found.ends is None) == (wanted.ends is None)
        if found.ends is not None and wanted.ends is not None:
            assert found.ends == pytest.approx(wanted.ends, abs=1e-6)

    @given(n=st.integers(65, 2000), fbr=st.floats(0, 1))
    def test_without_super_linear_interference_waiting_never_helps(self, n: int, fbr: float) -> None:
        sharing = Sharing(80, 64, fbr)

        assert all(sharing.last_ends(n, y) <= sharing.last_ends(n, y + 1) + 1e-9 for y in range(n - 1))


class TestChoice:
    def test_the_cheapest_within_50_ms_of_the_fastest(self) -> None:
        assert ask(gpu("m60", 0.75, 150), gpu("k80", 0.9, 190), gpu("v100", 3.06, 60)).choice == "v100"
        assert ask(gpu("m60", 0.75, 105), gpu("k80", 0.9, 120), gpu("v100", 3.06, 60)).choice == "m60"

    def test_a_cpu_that_is_fast_enough_wins_over_a_cheaper_gpu(self) -> None:
        answer = ask(gpu("gpu", 0.1, 60), cpu("dear", 0.9, 100), cpu("cheap", 0.4, 190), n=8)

        assert (answer.choice, answer.y, answer.t_max_ms) == ("cheap", None, 190)

    def test_a_cpu_serves_batch_after_batch(self) -> None:
        answer = ask(cpu("c", 0.3, 90), n=17)

        assert (answer.t_max_ms, answer.feasible, answer.in_time) == (270, False, 16)

    def test_when_none_is_fast_enough_most_in_time_then_the_price_decide(self) -> None:
        none_in_time = [gpu("a", 3, 2000), gpu("b", 1, 2000), gpu("c", 1, 2000)]

        assert ask(*none_in_time, n=10).choice == "b"
        assert not ask(*none_in_time, n=10).feasible
        assert ask(*none_in_time, cpu("d", 9, 150), n=16).choice == "d"

    def test_ties_go_to_the_shorter_time_then_to_the_first(self) -> None:
        assert ask(gpu("slow", 1, 80), gpu("fast", 1, 60)).choice == "fast"
        assert ask(gpu("one", 1, 60), gpu("two", 1, 60)).choice == "one"

    def test_every_type_is_reported_in_the_order_of_the_problem(self) -> None:
        answer = ask(gpu("z", 1, 60), cpu("y", 1, 900), gpu("x", 1, 900))

        assert [(each.name, each.feasible, each.t_max_ms) for each in answer.candidates] == [
            ("z", True, 60), ("y", False, 7200), ("x", False, None),
        ]  # fmt: skip

    def test_the_working_says_why(self) -> None:
        asked = Problem(n=64, slo_ms=200, types=(gpu("m60", 0.75, 105), gpu("v100", 3.06, 60)))

        assert "m60: the cheapest within 50 ms of the fastest (60 ms)." in hardware.explain(asked, solve(asked))


GPU = {"name": "g", "price": 1, "kind": "gpu", "solo_ms": 60, "batch": 1, "fbr": 0.5}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n": 1.5}, "n is 1.5: write a whole number, 0 or more"),
        ({"slo_ms": -1}, "slo_ms is -1: write a number, more than 0"),
        ({"size": 2}, "unknown key 'size': there are n, slo_ms, types, rate"),
        ({"types": []}, "types is []: write a list of 1 or more"),
        ({"types": [{**GPU, "fbr": None}]}, "'g' has no `fbr`"),
        ({"types": [{**GPU, "solo_ms": 0}]}, "types[0].solo_ms is 0"),
        ({"types": [{**GPU, "p": 0.5}]}, "types[0].p is 0.5: write a number, 1 or more"),
        ({"types": [{**GPU, "kind": "tpu"}]}, 'types[0].kind is "tpu": write one of cpu, gpu'),
    ],
)
def test_bad_problems_are_refused_in_one_line(change: dict[str, object], said: str) -> None:
    with pytest.raises(BadProblem) as caught:
        read(json.dumps({"n": 1, "slo_ms": 200, "types": [GPU], **change}), Problem)

    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(BadProblem, match="problem:1: this is not JSON: Expecting property name"):
        read('{"n": 1,', Problem)


def test_two_types_of_one_name_are_refused() -> None:
    with pytest.raises(BadProblem, match="two node types are called 'a'"):
        ask(gpu("a", 1, 1), gpu("a", 2, 2))


def test_an_unlimited_peak_is_infinite() -> None:
    assert math.isinf(Sharing(80, 64, 0.9).peak())
