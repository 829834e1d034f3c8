"""When an asynchronous call is tried again."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufaas_async_calls.retry import (
    GiveUp,
    RetryPolicy,
    TryAgain,
    backoff_s,
    decide,
    parse_retry_after,
    read_policy,
)

POLICY = RetryPolicy(attempts=3, codes=frozenset((500, 503)), min_wait_s=1.0, max_wait_s=8.0)


def decided(status: int, *, internal: bool = False, retry_after_s: float | None = None, attempts: int = 0) -> object:
    return decide(POLICY, status, internal, retry_after_s, attempts, random.Random(1))


def test_defaults_are_those_of_openfaas() -> None:
    policy = read_policy(None)

    assert policy == RetryPolicy(10, frozenset((408, 429, 500, 502, 504)), 10.0, 120.0)


def test_annotations_override_them() -> None:
    policy = read_policy({
        "com.openfaas.retry.attempts": "5", "com.openfaas.retry.codes": "500, 503",
        "com.openfaas.retry.min_wait": "100ms", "com.openfaas.retry.max_wait": "2m",
    })  # fmt: skip

    assert policy == RetryPolicy(5, frozenset((500, 503)), 0.1, 120.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attempts", "many"), ("attempts", "-1"), ("attempts", ""), ("codes", "500,abc"), ("codes", "99"),
        ("codes", "500;503"), ("min_wait", "soon"), ("max_wait", "-5s"),
    ],
)  # fmt: skip
def test_a_value_that_is_none_falls_back_to_the_default(name: str, value: str) -> None:
    assert read_policy({f"com.openfaas.retry.{name}": value}) == RetryPolicy()


def test_no_attempt_at_all_is_one() -> None:
    assert read_policy({"com.openfaas.retry.attempts": "0"}).attempts == 1


def test_a_longest_wait_under_the_shortest_is_the_shortest() -> None:
    assert read_policy({"com.openfaas.retry.max_wait": "1s"}).max_wait_s == 10.0


@given(attempt=st.integers(1, 10_000), seed=st.integers())
def test_waits_are_between_nothing_and_the_doubled_minimum_up_to_the_maximum(attempt: int, seed: int) -> None:
    wait_s = backoff_s(attempt, 1.0, 120.0, random.Random(seed))

    assert 0.0 <= wait_s <= min(120.0, 2.0 ** min(attempt - 1, 10))


def test_waits_are_spread_over_all_of_it_and_the_same_for_a_seed() -> None:
    """Full jitter: its mean is half of the doubled minimum."""
    waits = [backoff_s(4, 1.0, 120.0, random.Random(seed)) for seed in range(2000)]

    assert 3.8 < sum(waits) / len(waits) < 4.2
    assert min(waits) < 0.1
    assert max(waits) > 7.9
    assert backoff_s(4, 1.0, 120.0, random.Random(7)) == backoff_s(4, 1.0, 120.0, random.Random(7))


@pytest.mark.parametrize("status", [200, 204, 301, 404, 501])
def test_what_the_function_answers_counts_unless_its_status_is_listed(status: int) -> None:
    assert decided(status) is None


def test_a_listed_status_is_tried_again_until_no_attempt_is_left() -> None:
    first, second, third = (decided(500, attempts=attempts) for attempts in range(3))

    assert isinstance(first, TryAgain)
    assert first.attempts == 1
    assert isinstance(second, TryAgain)
    assert third == GiveUp("the last of 3 attempts failed")


@pytest.mark.parametrize("status", [404, 502, 503, 504, 507])
def test_what_the_platform_answers_is_tried_again_listed_or_not(status: int) -> None:
    assert isinstance(decided(status, internal=True), TryAgain)


@pytest.mark.parametrize("status", [400, 405, 413, 422])
def test_what_the_platform_will_always_refuse_is_given_up_at_once(status: int) -> None:
    assert isinstance(decided(status, internal=True), GiveUp)


def test_a_full_queue_of_the_platform_uses_no_attempt_up() -> None:
    decision = decided(429, internal=True, attempts=2)

    assert isinstance(decision, TryAgain)
    assert decision.attempts == 2


def test_retry_after_replaces_the_wait_but_not_below_the_minimum() -> None:
    assert decided(503, retry_after_s=30.0) == TryAgain(30.0, 1)
    assert decided(503, retry_after_s=0.0) == TryAgain(1.0, 1)
    assert decided(503, retry_after_s=1e9) == TryAgain(3600.0, 1)
    other = decided(500, retry_after_s=30.0)
    assert isinstance(other, TryAgain)
    assert other.wait_s <= 1.0


def test_retry_after_is_seconds_or_a_date() -> None:
    assert parse_retry_after(" 7 ", 0.0) == 7.0
    assert parse_retry_after("Thu, 01 Jan 1970 00:01:40 GMT", 60.0) == 40.0
    assert parse_retry_after("Thu, 01 Jan 1970 00:00:40 GMT", 60.0) == 0.0
    assert parse_retry_after("soon", 60.0) is None
