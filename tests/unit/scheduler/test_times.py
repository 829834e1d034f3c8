"""Service times as distributions: what is left of a call that runs, and what few calls say."""

import random
from math import inf, isfinite, log, nan, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufaas_scheduler.times import HALF_LIFE, SHARE, ServiceTimes

RATIOS = st.floats(0.0, 1e12) | st.sampled_from([0.0, 1e-300, 1.0, 1.118, 1e300])


def seen(*ratios: float) -> ServiceTimes:
    times = ServiceTimes()
    for each in ratios:
        times.add(each)
    return times


def log_normal(cv: float, calls: int = 20_000) -> ServiceTimes:
    """Mean 1; drawn by quantiles in an order that mixes them, since the last calls weigh most."""
    draws = random.Random(7)
    sigma = sqrt(log(1 + cv * cv))
    times = ServiceTimes()
    for _ in range(calls):
        times.add(draws.lognormvariate(-sigma * sigma / 2, sigma))
    return times


# --- the time left ---


@pytest.mark.parametrize(
    ("cv", "left"),
    [
        (1.0, {0.0: 1.0, 0.5: 0.852, 1.0: 0.953, 2.0: 1.198, 5.0: 1.877}),
        (3.0, {0.0: 1.0, 0.5: 1.828, 1.0: 2.464, 2.0: 3.519, 5.0: 6.077}),
    ],
)
def test_what_is_left_is_the_mean_residual_life(
    monkeypatch: pytest.MonkeyPatch, cv: float, left: dict[float, float]
) -> None:
    """The analytical values of a log-normal distribution with mean 1, see specs/uncertainty.md."""
    monkeypatch.setattr("gpufaas_scheduler.times._GROWTH", 1.0)  # all draws count, or the sample would be too small
    times = log_normal(cv)
    for ran, expected in left.items():
        assert times.left(ran) == pytest.approx(expected, rel=0.1)


def test_equal_times_leave_exactly_what_is_missing() -> None:
    times = seen(*[1.0] * 20)
    assert [times.left(ran) for ran in (0.0, 0.25, 0.75, 1.0)] == [1.0, 0.75, 0.25, 0.0]


def test_a_call_that_is_late_is_not_about_to_end() -> None:
    for times in (seen(), seen(*[1.0] * 20), log_normal(1.0), log_normal(3.0)):
        for ran in (40.0, 400.0, 1e9):
            assert times.left(ran) >= 0.4 * ran
    assert seen(*[1.0] * 20).left(40.0) == SHARE * 40.0


def test_with_a_heavy_tail_more_is_left_the_longer_it_has_run() -> None:
    times = log_normal(3.0)
    left = [times.left(ran) for ran in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)]
    assert left == sorted(left)


def test_of_two_kinds_of_call_one_that_runs_longer_than_the_short_ones_is_a_long_one() -> None:
    times = seen(*([0.1] * 99 + [90.0]) * 3)
    assert times.left(0.0) == pytest.approx(1.0, rel=0.2)
    assert 60 < times.left(1.0) < 95


# --- few calls, and drift ---


def test_of_a_function_that_was_never_called_an_exponential_is_assumed_nearly() -> None:
    times = seen()
    assert (times.mean, times.cv, times.calls) == (1.0, 1.0, 0)
    assert 0.75 < times.left(1.0) < 1.05
    assert times.quantile(0.5) == pytest.approx(sqrt(0.5), rel=0.1)
    assert times.quantile(0.9) > 1.8


def test_the_prior_is_gone_after_ten_calls() -> None:
    assert [seen(*[1.0] * calls).cv == 0.0 for calls in (9, 10)] == [False, True]
    assert seen(*[1.0] * 4).weight == pytest.approx(4 + 3, rel=0.01)


def test_half_of_the_weight_is_on_the_last_calls() -> None:
    times = seen(*[1.0] * 5000, *[3.0] * HALF_LIFE)
    assert times.mean == pytest.approx(2.0)
    assert times.weight == pytest.approx(HALF_LIFE / log(2), rel=0.01)


def test_the_mean_follows_slowly_where_times_vary_much() -> None:
    assert seen(*[1.0] * 100).rate(0.25) == 0.25
    assert log_normal(0.3).rate(0.25) == 0.25
    assert 0.005 < log_normal(3.0).rate(0.25) < 0.1
    assert seen(0.1, 90.0).rate(0.25) == 0.25, "not before there are calls to vary"


# --- in general ---


@pytest.mark.parametrize("wrong", [nan, inf, -inf, -1.0])
def test_a_time_that_no_call_can_have_taken_is_ignored(wrong: float) -> None:
    times = seen(1.0, wrong)
    assert times.calls == 1
    assert isfinite(times.left(wrong) if wrong < 0 or wrong != wrong else times.left(1.0))


@given(ratios=st.lists(RATIOS, max_size=40), ran=st.floats(0.0, 1e15), share=st.floats(0.0, 1.0))
def test_what_is_said_is_always_a_time(ratios: list[float], ran: float, share: float) -> None:
    times = seen(*ratios)
    for each in (times.left(ran), times.quantile(share)):
        assert isfinite(each)
        assert each >= 0.0


@given(ratios=st.lists(RATIOS, max_size=40), shares=st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)))
def test_quantiles_grow(ratios: list[float], shares: tuple[float, float]) -> None:
    times = seen(*ratios)
    assert times.quantile(min(shares)) <= times.quantile(max(shares)) * (1 + 1e-9)


@given(ratios=st.lists(RATIOS, max_size=40), rans=st.tuples(st.floats(0.0, 1e4), st.floats(0.0, 1e4)))
def test_fewer_calls_take_longer_than_a_longer_time(ratios: list[float], rans: tuple[float, float]) -> None:
    times = seen(*ratios)
    times.left(1.0)
    (more, _), (fewer, _) = times._beyond(min(rans)), times._beyond(max(rans))
    assert fewer <= more * (1 + 1e-9)
    assert times._beyond(0.0)[0] == pytest.approx(times.weight), "none is lost"
