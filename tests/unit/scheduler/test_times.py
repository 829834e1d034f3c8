"""Service times as distributions: the rest of a running call, and the weight of few calls."""

import random
from math import inf, isfinite, log, nan, sqrt
from statistics import fmean

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.compiled import python_only
from tests.unit.scheduler.world import World, world_of

from gpufaas_core import messages as m
from gpufaas_core.model import CallId, Function, FunctionId, Profile, SizesDoc, TimesDoc
from gpufaas_scheduler.world.costs import Costs
from gpufaas_scheduler.world.times import HALF_LIFE, MIN_SIZED, SHARE, BySize, ServiceTimes, steady

RATIOS = st.floats(0.0, 1e12) | st.sampled_from([0.0, 1e-300, 1.0, 1.118, 1e300])


def seen(*ratios: float) -> ServiceTimes:
    times = ServiceTimes()
    for each in ratios:
        times.add(each)
    return times


def sized(*calls: tuple[float, float]) -> BySize:
    by_size = BySize()
    for size, service_s in calls:
        by_size.add(size, service_s)
    return by_size


def log_normal(cv: float, calls: int = 20_000) -> ServiceTimes:
    """Mean 1; drawn by quantiles in an order that mixes them, since the last calls weigh most."""
    draws = random.Random(7)
    sigma = sqrt(log(1 + cv * cv))
    times = ServiceTimes()
    for _ in range(calls):
        times.add(draws.lognormvariate(-sigma * sigma / 2, sigma))
    return times


# --- the time left ---


@python_only  # a constant is changed
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
    """The analytical values of a log-normal distribution with mean 1."""
    monkeypatch.setattr("gpufaas_scheduler.world.times._GROWTH", 1.0)  # all draws count
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
    assert seen(*[1.0] * 99).add(1.0, 0.25) == 0.25
    assert log_normal(0.3).add(1.0, 0.25) == 0.25
    assert 0.005 < log_normal(3.0).add(1.0, 0.25) < 0.1
    assert seen(0.1).add(90.0, 0.25) == 0.25, "not before there are calls to vary"
    assert steady(0.25, 100.0, 1.0, 1.0 + 3.0**2) == pytest.approx(0.15 / 9)


def test_where_the_estimate_follows_the_calls_its_mean_is_theirs() -> None:
    """An estimate that came from a few short calls makes later ones look 50 times as long as they should be."""
    times = seen(1.0, 1.0, 3.0, 50.0, 1.0)
    assert times.left(0.0) > 5.0
    times = ServiceTimes()
    times.centred = True
    for each in (1.0, 1.0, 3.0, 50.0, 1.0):
        times.add(each)
    assert (times.left(0.0), times.mean) == (1.0, 1.0)
    assert times.left(4.0) > 2.0


@pytest.mark.parametrize(("cv", "after_twice"), [(1.0, 1.198), (3.0, 3.519)])
def test_where_the_mean_is_learnt_too_what_is_left_is_right_on_average(cv: float, after_twice: float) -> None:
    sigma = sqrt(log(1 + cv * cv))
    whole, left = [], []
    for seed in range(60):
        draws = random.Random(seed)
        costs = Costs(Profile(1.0, 7.0, 1))
        for _ in range(400):
            costs.learn_service(draws.lognormvariate(-sigma * sigma / 2, sigma), 0.0, 0.25)
        whole.append(costs.left_s(0.0, costs.service_s))
        left.append(costs.left_s(2.0, costs.service_s))
    assert fmean(whole) == pytest.approx(1.0, rel=0.15)
    assert fmean(left) == pytest.approx(after_twice, rel=0.35)


# --- by size ---


def test_where_the_size_explains_the_time_it_predicts_it() -> None:
    by_size = sized(*[(size, 0.5 + 0.01 * size) for size in (10, 20, 400, 30, 200, 50, 100, 70)])
    assert by_size.predict_s(300) == pytest.approx(3.5, rel=1e-6)


def test_a_size_that_explains_little_is_not_looked_at() -> None:
    draws = random.Random(3)
    assert sized(*[(draws.uniform(1, 100), draws.uniform(1, 100)) for _ in range(200)]).predict_s(50) is None
    assert sized(*[(7.0, draws.uniform(1, 100)) for _ in range(200)]).predict_s(7) is None, "it never varies"
    assert sized(*[(size, 2.0) for size in range(1, 100)]).predict_s(7) is None, "times never vary"


def test_few_calls_say_nothing_about_sizes() -> None:
    calls = [(float(size), float(size)) for size in range(1, MIN_SIZED + 1)]
    assert [sized(*calls[:count]).predict_s(3.0) is None for count in (MIN_SIZED - 2, MIN_SIZED)] == [True, False]


def test_what_is_predicted_is_within_twice_of_what_was_seen() -> None:
    by_size = sized(*[(float(size), float(size)) for size in range(10, 20)])
    assert by_size.predict_s(1e30) == 38.0
    assert by_size.predict_s(1e-9) == 5.0
    assert by_size.predict_s(0.0) is None, "it is not known"
    assert by_size.predict_s(nan) is None


SIZE = st.floats(0.0, 1e12) | st.sampled_from([nan, inf, -1.0, 1e300, 5e-324])


@given(st.lists(st.tuples(SIZE, SIZE), max_size=40), SIZE)
def test_a_prediction_is_always_a_time(calls: list[tuple[float, float]], size: float) -> None:
    predicted = sized(*calls).predict_s(size)
    assert predicted is None or (isfinite(predicted) and predicted > 0)


# --- kept ---


@given(st.lists(RATIOS, max_size=300), st.lists(st.tuples(SIZE, SIZE), max_size=20), st.floats(0.0, 1e4))
def test_what_is_kept_says_the_same_again(ratios: list[float], calls: list[tuple[float, float]], ran: float) -> None:
    times, by_size = seen(*ratios), sized(*calls)
    doc = times.doc(by_size.doc())
    kept = msgspec.json.decode(msgspec.json.encode(doc), type=TimesDoc | None)
    again, by_size_again = ServiceTimes.restored(kept), BySize.restored(None if kept is None else kept.sizes)
    for each in (times, again):
        each.add(2.0)
    assert (again.left(ran), again.quantile(0.9), again.calls) == (times.left(ran), times.quantile(0.9), times.calls)
    assert by_size_again.predict_s(3.0) == by_size.predict_s(3.0)


GOOD = seen(1.0, 2.0, 3.0).doc(None)
assert GOOD is not None


@pytest.mark.parametrize(
    "doc",
    [
        None,
        replace(GOOD, unit=0.0),
        replace(GOOD, unit=nan),
        replace(GOOD, calls=0),
        replace(GOOD, weights=()),
        replace(GOOD, weights=(nan,)),
        replace(GOOD, weights=(-1.0, 2.0)),
        replace(GOOD, weights=(1e300,)),
        replace(GOOD, sums=(inf, 1.0, 1.0)),
        replace(GOOD, sums=(0.0, 0.0, 0.0)),
        replace(GOOD, first=-1),
        replace(GOOD, first=80),
    ],
)
def test_what_no_calls_can_have_left_is_as_if_nothing_were_kept(doc: TimesDoc | None) -> None:
    assert ServiceTimes.restored(doc).calls == 0
    assert ServiceTimes.restored(GOOD).calls == 3


def test_the_same_of_sizes() -> None:
    assert BySize.restored(SizesDoc(1.0, nan, 1, 1, 1, 1, 1, 1, 1)).doc() is None
    assert BySize.restored(SizesDoc(0.0, 1, 1, 1, 1, 1, 1, 1, 1)).doc() is None


# --- in the engine ---


def busy_with(world, call: str = "long", size: float = 0.0) -> None:  # type: ignore[no-untyped-def]
    """f is on a, which runs *call*, from now on."""
    world.device("a")
    world.deploy("f", service_s=1.0)
    world.warm("f", "a")
    world.tell(m.Arrived(CallId(call), FunctionId("f"), None, 0.0, size))


def test_the_time_left_of_a_device_grows_while_its_call_overruns() -> None:
    world = World()
    busy_with(world)
    left = []
    for world.now in (1.0, 2.0, 4.0, 40.0):
        left.append(world.on("a").estimated_finish_s)
    assert left == sorted(left)
    assert left[-1] >= 0.4 * 40


def test_of_calls_that_all_took_as_long_what_is_left_is_what_is_missing() -> None:
    world = World()
    busy_with(world, "c0")
    for number in range(10):
        world.finish(f"c{number}", service_s=1.0)
        world.call(f"c{number + 1}", "f")
    world.now = 0.75
    assert world.on("a").estimated_finish_s == 0.25


def test_a_load_that_takes_longer_than_estimated_is_not_about_to_end() -> None:
    world = world_of("f", load_s=3.0, service_s=1.0)
    world.call("c", "f")
    assert world.on("a").estimated_finish_s == 4.0
    world.now = 63.0
    assert world.on("a").estimated_finish_s == 1.0 + 30.0
    world.loaded("f", "a")
    assert world.on("a").estimated_finish_s == 1.0


@pytest.mark.parametrize("learn", [False, True])
def test_how_times_vary_is_learnt_also_where_the_mean_is_given(learn: bool) -> None:
    world = World(learn=learn)
    busy_with(world, "c0")
    for number in range(20):
        world.finish(f"c{number}", service_s=2.8 if number % 3 == 2 else 0.1)
        world.call(f"c{number + 1}", "f")
    explained = world.engine.explain(CallId("c20"), world.now)
    assert explained.service.calls >= 20
    assert explained.service.p90_s > 2.0 > 0.5 > explained.service.p50_s
    if not learn:
        assert explained.service.estimate_s == 1.0


def test_a_call_is_estimated_by_its_size() -> None:
    world = World(learn=True)
    busy_with(world, "c0", 100.0)
    for number in range(20):
        size = 100.0 * (1 + number % 5)
        world.finish(f"c{number}", service_s=size / 100)
        world.tell(m.Arrived(CallId(f"c{number + 1}"), FunctionId("f"), None, 0.0, 100.0 * (1 + (number + 1) % 5)))
    world.finish("c20", service_s=1.0)
    world.tell(m.Arrived(CallId("large"), FunctionId("f"), None, 0.0, 450.0))

    service = world.engine.explain(CallId("large"), world.now).service

    assert service.estimate_s == pytest.approx(4.5, rel=0.1)
    assert service.size == 450.0
    assert world.on("a").estimated_finish_s == pytest.approx(4.5, rel=0.2)


def test_a_time_that_a_worker_cannot_mean_is_not_learnt() -> None:
    world = World(learn=True)
    busy_with(world, "c0")
    world.finish("c0", service_s=1.0)
    world.engine.take_learnt()
    for number, wrong in enumerate((nan, inf, -1.0)):
        world.call(f"wrong{number}", "f")
        world.finish(f"wrong{number}", service_s=wrong)
    assert world.engine.take_learnt() == []


def test_a_redeployed_bundle_goes_on_with_what_was_kept_of_it() -> None:
    world = World(learn=True)
    busy_with(world, "c0")
    for number in range(12):
        world.finish(f"c{number}", service_s=4.0 if number % 4 == 3 else 0.4)
        world.call(f"c{number + 1}", "f")
    (learnt,) = world.engine.take_learnt()

    other = World(learn=True)
    other.device("a")
    profile = msgspec.json.decode(msgspec.json.encode(learnt.profile), type=Profile)
    other.tell(m.FunctionDeployed(Function(FunctionId("f"), "digest of f", profiles={"gpu": profile})))
    other.call("c", "f")

    service = other.engine.explain(CallId("c"), other.now).service
    assert service == world.engine.explain(CallId("c12"), world.now).service


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
