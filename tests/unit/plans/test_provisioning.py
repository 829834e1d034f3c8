"""What stands around a choice of hardware: the forecast, the patience, the batches, the containers."""

from hypothesis import given
from hypothesis import strategies as st

from gpufaas_scheduler.plans.provisioning import Containers, Forecast, Patience, form_batches


def test_the_forecast_is_an_exponentially_weighted_mean() -> None:
    forecast = Forecast()

    for rate in (100, 100, 400, 400):
        forecast.observe(rate)

    assert forecast.ahead() == 253


def test_a_trend_is_followed_and_never_below_nothing() -> None:
    forecast = Forecast(beta=1)
    for rate in (100, 90):
        forecast.observe(rate)

    assert forecast.ahead(horizon=10) == 97 - 3 * 10
    assert forecast.ahead(horizon=100) == 0


def test_a_switch_comes_with_the_third_mismatch_in_a_row() -> None:
    patience = Patience("m60")

    assert [patience.prefers(each) for each in ("v100", "v100", "v100")] == [False, False, True]


def test_a_match_in_between_starts_anew() -> None:
    patience = Patience("m60")

    assert not any(patience.prefers(each) for each in ("v100", "v100", "m60", "v100", "v100"))


def test_flapping_targets_count_unless_they_must_be_the_same() -> None:
    assert [Patience("a").prefers(each) for each in ("b",)] == [False]
    loose, strict = Patience("a"), Patience("a", same_target=True)

    assert [loose.prefers(each) for each in ("b", "c", "b")] == [False, False, True]
    assert not any(strict.prefers(each) for each in ("b", "c", "b", "c"))


@given(waiting=st.integers(0, 200), y=st.integers(0, 200), batch=st.integers(1, 40))
def test_batches_are_even_in_order_and_complete(waiting: int, y: int, batch: int) -> None:
    y = min(y, waiting)
    at_once, one_by_one = form_batches(range(waiting), y, batch)

    assert [each for group in (*at_once, *one_by_one) for each in group] == list(range(waiting))
    assert sum(map(len, one_by_one)) == y
    for group in (at_once, one_by_one):
        sizes = [len(each) for each in group]
        assert all(size <= batch for size in sizes)
        assert not sizes or max(sizes) - min(sizes) <= 1
    assert len(at_once) == -(-(waiting - y) // batch)


def test_containers_follow_what_runs_at_once_and_what_is_forecast() -> None:
    containers = Containers(least=1, most=4)

    assert [containers.wanted(n, batch=8) for n in (0, 1, 8, 9, 100)] == [1, 1, 1, 2, 4]
    assert containers.missing(alive=1, wanted=2, forecast=4) == 3
    assert containers.missing(alive=5, wanted=2, forecast=4) == 0


def test_nothing_is_stopped_before_it_was_surplus_for_ten_minutes() -> None:
    containers = Containers()

    assert containers.to_stop(["a", "b"], busy=0, wanted=1, forecast=1, now=0) == ()
    assert containers.to_stop(["a", "b"], busy=0, wanted=1, forecast=1, now=599) == ()
    assert containers.to_stop(["a", "b"], busy=0, wanted=1, forecast=1, now=600) == ("a",)


def test_one_that_was_needed_in_between_starts_anew() -> None:
    containers = Containers()
    containers.to_stop(["a"], busy=0, wanted=0, forecast=0, now=0)

    containers.to_stop(["a"], busy=0, wanted=0, forecast=1, now=300)

    assert containers.to_stop(["a"], busy=0, wanted=0, forecast=0, now=600) == ()
    assert containers.to_stop(["a"], busy=0, wanted=0, forecast=0, now=1200) == ("a",)


def test_a_busy_container_is_never_stopped() -> None:
    containers = Containers(keep_alive=0)

    assert containers.to_stop([], busy=3, wanted=0, forecast=0, now=0) == ()
