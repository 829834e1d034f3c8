"""
Noise on true times: factors of mean 1 for service and load times, drawn from a seed.

The factors are paired: the n-th call of a workload has the same factor under every policy, and so has the n-th load of
a function, in whatever order a policy starts them. With drift, the mean of the factors is not 1.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable
from functools import partial
from typing import Final

from gpufaas_core.model import FunctionId
from gpufaas_simulator.workload import Workload

Law = Callable[[random.Random], float]
"""Draws a factor above 0 of mean 1."""

PARETO_INDEX: Final = 1.5
PARETO_LARGEST: Final = 100.0
"""The cut-off of the Pareto law, in means."""
SHORT: Final = 0.1
LONG: Final = 90.1
"""The long time of the bimodal law: 99 % of the calls take 0.1 times the mean and 1 % take 90.1 times, which gives mean
1."""
_LONG_SHARE: Final = 0.01


def lognormal(cv: float) -> Law:
    """*cv* is the coefficient of variation: standard deviation over mean."""
    sigma = math.sqrt(math.log1p(cv * cv))
    shift = -sigma * sigma / 2
    return partial(_lognormal, sigma, shift)


def _lognormal(sigma: float, shift: float, rng: random.Random) -> float:
    return math.exp(rng.gauss(shift, sigma))


def pareto(index: float = PARETO_INDEX) -> Law:
    """
    The part of a Pareto law of this *index*, above 1, that is below 100 times its mean. By inversion.

    The coefficient of variation of index 1.5 is 2.2.
    """
    least = _least(index)
    above = 1 - (least / PARETO_LARGEST) ** index
    return partial(_pareto, index, least, above)


def _pareto(index: float, least: float, above: float, rng: random.Random) -> float:
    factor: float = least * (1 - rng.random() * above) ** (-1 / index)
    return factor


def _least(index: float) -> float:
    """Return the least value of the law for which its mean is 1, by bisection: the mean grows with it."""
    low, high = 0.0, 1.0
    for _ in range(60):
        least = (low + high) / 2
        ratio = least / PARETO_LARGEST
        mean = index / (index - 1) * least * (1 - ratio ** (index - 1)) / (1 - ratio**index)
        low, high = (least, high) if mean < 1 else (low, least)
    return low


def bimodal() -> Law:
    return _bimodal


def _bimodal(rng: random.Random) -> float:
    return LONG if rng.random() < _LONG_SHARE else SHORT


def service_noise(workload: Workload, law: Law | None, seed: int, drift: float = 1.0) -> array[float]:
    """
    Return a factor for each call of *workload*; law None: 1.

    Calls that arrive in the second half of the time up to the last arrival take *drift* times as long.
    """
    rng = random.Random(f"{seed}/service")
    half = workload.times[-1] / 2 if workload.times else 0.0
    return array(
        "d", [(law(rng) if law else 1.0) * (drift if arrives >= half else 1.0) for arrives in workload.times]
    )  # fmt: skip


def load_noise(law: Law, seed: int) -> Callable[[FunctionId], float]:
    """Return a function that draws the next factor of a function; each has a sequence of its own."""
    return partial(_next_factor, law, seed, {})


def _next_factor(law: Law, seed: int, sequences: dict[FunctionId, random.Random], function: FunctionId) -> float:
    if function not in sequences:
        sequences[function] = random.Random(f"{seed}/load/{function}")
    return law(sequences[function])
