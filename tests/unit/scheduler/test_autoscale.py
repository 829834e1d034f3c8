"""Copies from load, by example and by property."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufaas_core.scaling import TYPES, ScalingRule
from gpufaas_scheduler.autoscale import FunctionLoad, History, desired_copies, remember

QUIET = History(0.0)


@pytest.mark.parametrize(
    ("rule", "load", "copies"),
    [
        # The first is an example of OpenFaaS.
        (ScalingRule(type="capacity", target=5, target_proportion=1.0), FunctionLoad(inflight=15), 3),
        (ScalingRule(type="capacity", target=5, target_proportion=1.0), FunctionLoad(inflight=16), 4),
        (ScalingRule(type="rps"), FunctionLoad(rps=45, inflight=1), 1),
        (ScalingRule(type="rps"), FunctionLoad(rps=46, inflight=1), 2),
        (ScalingRule(type="cpu", target=500, target_proportion=0.5), FunctionLoad(cpu_millicores=900, inflight=1), 4),
        (ScalingRule(type="queue", target=10, target_proportion=1.0), FunctionLoad(queued=95), 10),
        (ScalingRule(type="rps", max=3), FunctionLoad(rps=1e6, inflight=1), 3),
        (ScalingRule(type="rps", min=2), FunctionLoad(rps=1, inflight=1), 2),
    ],
)
def test_the_load_of_the_function_over_the_aim_of_a_copy(rule: ScalingRule, load: FunctionLoad, copies: int) -> None:
    assert desired_copies(rule, load, 1, 0.0, QUIET) == copies


def test_up_at_once_and_down_when_the_window_is_over() -> None:
    rule = ScalingRule(type="capacity", target=1, target_proportion=1.0, down_window_s=30)
    copies, history, seen = 1, QUIET, []

    for now, inflight in enumerate([1, 8, 2, 4, *[1] * 40]):
        load = FunctionLoad(inflight=inflight)
        history = remember(rule, load, float(now), history)
        copies = desired_copies(rule, load, copies, float(now), history)
        seen.append(copies)

    assert seen == [1, *[8] * 30, 4, 4, *[1] * 11]


def test_without_a_window_it_follows_the_load() -> None:
    rule = ScalingRule(type="capacity", target=1, target_proportion=1.0, down_window_s=0)
    history = remember(rule, FunctionLoad(inflight=8), 0.0, QUIET)

    assert (
        desired_copies(rule, FunctionLoad(inflight=2), 8, 1.0, remember(rule, FunctionLoad(inflight=2), 1.0, history))
        == 2
    )


def test_to_zero_after_so_long_without_a_call() -> None:
    rule = ScalingRule(zero=True, zero_duration_s=60)
    history = remember(rule, FunctionLoad(arrived=True), 100.0, QUIET)

    assert desired_copies(rule, FunctionLoad(), 1, 159.0, history) == 1
    assert desired_copies(rule, FunctionLoad(), 1, 160.0, history) == 0
    assert desired_copies(rule, FunctionLoad(inflight=1), 1, 1000.0, history) == 1


def test_never_to_zero_where_that_is_not_allowed() -> None:
    assert desired_copies(ScalingRule(), FunctionLoad(), 1, 1e6, QUIET) == 1


def test_what_was_scaled_to_zero_stays_there_until_a_call_comes() -> None:
    rule = ScalingRule(min=2)

    assert desired_copies(rule, FunctionLoad(), 0, 0.0, QUIET) == 0
    assert desired_copies(rule, FunctionLoad(arrived=True), 0, 0.0, QUIET) == 2


def test_factor_0_switches_it_off_but_not_its_bounds() -> None:
    rule = ScalingRule(factor=0, max=5)

    assert desired_copies(rule, FunctionLoad(rps=1e6, inflight=9), 3, 0.0, QUIET) == 3
    assert desired_copies(rule, FunctionLoad(rps=1e6, inflight=9), 8, 0.0, QUIET) == 5


# --- properties -------------------------------------------------------------------------------------------------------

RULES = st.builds(
    lambda least, more, **rest: ScalingRule(min=least, max=max(1, least + more), **rest),
    st.integers(0, 5),
    st.integers(0, 30),
    zero=st.booleans(),
    zero_duration_s=st.sampled_from([1.0, 60.0]),
    type=st.sampled_from(TYPES),
    target=st.floats(0.1, 1000),
    target_proportion=st.floats(0.1, 1.0),
    factor=st.sampled_from([0, 20]),
    down_window_s=st.sampled_from([0.0, 5.0, 30.0]),
)
LOADS = st.builds(
    FunctionLoad,
    st.floats(0, 1e5),
    st.integers(0, 1000),
    st.floats(0, 1e6),
    st.integers(0, 10_000),
    arrived=st.booleans(),
)
STEPS = st.lists(st.tuples(st.sampled_from([0.5, 1.0, 20.0]), LOADS), max_size=30)


def past(rule: ScalingRule, steps: list[tuple[float, FunctionLoad]]) -> tuple[History, float]:
    history, now = QUIET, 0.0
    for seconds, load in steps:
        now += seconds
        history = remember(rule, load, now, history)
    return history, now


@given(RULES, STEPS, LOADS, st.integers(0, 100))
def test_bounds_are_respected(
    rule: ScalingRule, steps: list[tuple[float, FunctionLoad]], load: FunctionLoad, current: int
) -> None:
    history, now = past(rule, steps)

    copies = desired_copies(rule, load, current, now, history)

    if copies or not load.idle or (current and not rule.zero):
        assert rule.floor <= copies <= max(rule.floor, rule.max)


@given(RULES, STEPS, LOADS, LOADS, st.integers(0, 100))
def test_more_load_never_means_fewer_copies(
    rule: ScalingRule, steps: list[tuple[float, FunctionLoad]], one: FunctionLoad, other: FunctionLoad, current: int
) -> None:
    less = FunctionLoad(
        min(one.rps, other.rps), min(one.inflight, other.inflight), min(one.cpu_millicores, other.cpu_millicores),
        min(one.queued, other.queued), one.arrived and other.arrived,
    )  # fmt: skip
    more = FunctionLoad(
        max(one.rps, other.rps), max(one.inflight, other.inflight), max(one.cpu_millicores, other.cpu_millicores),
        max(one.queued, other.queued), one.arrived or other.arrived,
    )  # fmt: skip
    history, now = past(rule, steps)

    assert desired_copies(rule, less, current, now, history) <= desired_copies(rule, more, current, now, history)


@given(RULES, STEPS, LOADS, st.integers(0, 100))
def test_a_constant_load_comes_to_one_number_and_stays(
    rule: ScalingRule, steps: list[tuple[float, FunctionLoad]], load: FunctionLoad, copies: int
) -> None:
    history, now = past(rule, steps)
    seen = []
    for _ in range(200):
        now += 1.0
        history = remember(rule, load, now, history)
        copies = desired_copies(rule, load, copies, now, history)
        seen.append(copies)

    assert seen == sorted(seen, reverse=True), "up after down"
    assert len(set(seen[70:])) == 1
