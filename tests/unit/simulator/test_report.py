"""The figures of a report, compared with counts by hand."""

import random

import numpy as np
import pytest

from gpufaas_simulator.report import estimate, latencies, overtakes


@pytest.mark.parametrize("seed", range(20))
def test_overtaken_counts_the_later_calls_that_started_before(seed: int) -> None:
    rng = random.Random(seed)
    calls = list(range(rng.randint(1, 60)))
    starts = rng.sample(calls, rng.randint(1, len(calls)))

    counted = overtakes(starts)

    assert counted == [
        sum(later > call for later in starts[:place]) for place, call in enumerate(starts)
    ]  # fmt: skip


def test_calls_in_their_order_overtake_nobody() -> None:
    assert overtakes(range(1000)) == [0] * 1000
    assert overtakes([]) == []


def test_a_confidence_interval_is_student_s() -> None:
    found = estimate([1.0, 2.0, 3.0, 4.0, 5.0])

    assert found.mean == 3.0
    assert found.half_width == pytest.approx(2.776 * (2.5**0.5) / 5**0.5)
    assert estimate([7.0]).half_width == 0


def test_latencies_of_nothing_are_zero() -> None:
    assert latencies(np.zeros(0)).p99 == 0
    assert latencies(np.array([1.0, 2.0, 3.0])).variance == pytest.approx(2 / 3)
