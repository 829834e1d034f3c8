"""
Workloads drawn from a seed: the published one by a power law, Poisson arrivals, bursts, and days.

All have the published set-up: each function has a model of its own with the costs of one of the 22 models of table 1
of GPU-FaaS, in shuffled order (function 23 has the costs of function 1, and another model). Popularity is
``rank ** -skew``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Final

from gpufaas_core.cost import Cost
from gpufaas_core.model import Bytes, DeviceId, Seconds
from gpufaas_simulator.workload import (
    ANY_KIND,
    DEFAULT_NAMESPACE,
    MB,
    BadWorkload,
    SimulatedDevice,
    SimulatedFunction,
    Workload,
    all_fit,
    arrivals,
)

TABLE_1: Final[Mapping[str, tuple[int, float, float]]] = {
    "squeezenet1.1": (1269, 2.41, 1.28), "resnet18": (1313, 2.52, 1.25), "resnet34": (1357, 2.60, 1.25),
    "squeezenet1.0": (1435, 2.32, 1.33), "alexnet": (1437, 2.81, 1.25), "resnext50_32x4d": (1555, 2.64, 1.29),
    "densenet121": (1601, 2.49, 1.28), "densenet169": (1631, 2.56, 1.30), "densenet201": (1665, 2.67, 1.40),
    "resnet50": (1701, 2.67, 1.28), "resnet101": (1757, 2.95, 1.30), "resnet152": (1827, 3.10, 1.31),
    "densenet161": (1919, 2.75, 1.32), "inception_v3": (2157, 4.42, 1.63), "resnext101_32x8d": (2191, 3.51, 1.33),
    "vgg11": (2903, 3.94, 1.29), "wide_resnet50_2": (3611, 3.16, 1.31), "wide_resnet101_2": (3831, 3.91, 1.32),
    "vgg13": (3887, 3.98, 1.30), "vgg16": (3907, 4.04, 1.27), "vgg16_bn": (3907, 4.03, 1.26),
    "vgg19": (3947, 4.07, 1.33),
}  # fmt: skip
"""
Occupation in MB, load in s, inference of a batch of 32 images in s, on a GeForce RTX 2080.

Source: Zhao, Jha, Hong, "GPU-enabled Function-as-a-Service for Machine Learning Inference" (IPDPS 2023), table 1.
"""

PAPER_DEVICES: Final = 12
PAPER_MEMORY: Final = 7800 * MB
"""The part of the RTX 2080's 8 GB that models can use."""
PAPER_RPM: Final = 325
PAPER_MINUTES: Final = 6
DEFAULT_SKEW: Final = 0.8
"""Fits the 35 most called functions of the Azure trace: its top 15 have 56 % of all calls; by this law they have 62 %
of the calls of the 35."""

_BURST_SHARE: Final = 0.5
"""The share of calls that come in bursts."""
_BURST_CALLS: Final = 40
_BURST_S: Final = 2.0
_DAY_DEPTH: Final = 0.8
"""The amplitude of day and night: the rate goes from 0.2 to 1.8 times its mean."""

Arrivals = list[tuple[Seconds, int]]


def devices(count: int = PAPER_DEVICES, memory: Bytes = PAPER_MEMORY) -> list[SimulatedDevice]:
    return [SimulatedDevice(DeviceId(f"g{number}"), memory) for number in range(count)]


def functions(count: int, rng: random.Random, names: Sequence[tuple[str, str]] = ()) -> list[SimulatedFunction]:
    """Return *count* functions with the costs of table 1 in random order; *names* are (name, namespace)."""
    models = list(TABLE_1.values())
    rng.shuffle(models)
    drawn = [models[index % len(models)] for index in range(count)]
    named = names or [(f"f{rank}", DEFAULT_NAMESPACE) for rank in range(count)]
    return [
        SimulatedFunction(name, {ANY_KIND: Cost(size * MB, load_s, infer_s)}, namespace)
        for (name, namespace), (size, load_s, infer_s) in zip(named, drawn, strict=True)
    ]


def popularity(count: int, skew: float) -> list[float]:
    """Return the weights of the ranks, from rank 0."""
    return [(rank + 1) ** -skew for rank in range(count)]


def normalised(weights: Sequence[float], total: int) -> list[int]:
    """Return indices, each as often as its share of *total*, by largest remainder; ties by index."""
    whole = sum(weights)
    if not whole:
        return []
    shares = [each * total / whole for each in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda index: (counts[index] - shares[index], index))
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return [index for index, count in enumerate(counts) for _ in range(count)]


def spread_over_minutes(minutes: Sequence[Sequence[int]], rng: random.Random) -> Arrivals:
    """Give each call of each minute a time in it, uniformly; sorted."""
    return sorted((60.0 * (minute + rng.random()), call) for minute, calls in enumerate(minutes) for call in calls)


def power_law(count: int, rpm: float, minutes: int, skew: float, rng: random.Random) -> Arrivals:
    """The published shape: in each minute, each function has its share of the calls."""
    minute = normalised(popularity(count, skew), round(rpm))
    return spread_over_minutes([minute] * minutes, rng)


def poisson(count: int, rpm: float, minutes: int, skew: float, rng: random.Random) -> Arrivals:
    """Independent calls at a steady rate."""
    return _thinned(count, rpm, minutes, skew, rng, lambda _: 1.0, 1.0)


def diurnal(count: int, rpm: float, minutes: int, skew: float, rng: random.Random) -> Arrivals:
    """Independent calls, with one day and night over the whole length; *rpm* is the mean rate."""
    length_s = 60.0 * minutes

    def rate(time: Seconds) -> float:
        return 1.0 - _DAY_DEPTH * math.cos(2 * math.pi * time / length_s)

    return _thinned(count, rpm, minutes, skew, rng, rate, 1.0 + _DAY_DEPTH)


def bursts(count: int, rpm: float, minutes: int, skew: float, rng: random.Random) -> Arrivals:
    """Half of the calls are independent; the others come in bursts of 40 calls of one function within 2 s."""
    found = _thinned(count, rpm * (1 - _BURST_SHARE), minutes, skew, rng, lambda _: 1.0, 1.0)
    cumulative = list(accumulate(popularity(count, skew)))
    per_s = rpm * _BURST_SHARE / 60.0 / _BURST_CALLS
    time = rng.expovariate(per_s)
    while time < 60.0 * minutes:
        function = rng.choices(range(count), cum_weights=cumulative)[0]
        found += [(time + _BURST_S * rng.random(), function) for _ in range(_BURST_CALLS)]
        time += rng.expovariate(per_s)
    return sorted(found)


def _thinned(
    count: int, rpm: float, minutes: int, skew: float, rng: random.Random, rate: Callable[[Seconds], float], peak: float
) -> Arrivals:
    """An inhomogeneous Poisson process: candidates at the *peak* rate, each taken with rate/peak."""
    cumulative = list(accumulate(popularity(count, skew)))
    times: list[Seconds] = []
    time = 0.0
    while (time := time + rng.expovariate(rpm * peak / 60.0)) < 60.0 * minutes:
        if peak == 1.0 or rng.random() * peak < rate(time):
            times.append(time)
    return list(zip(times, rng.choices(range(count), cum_weights=cumulative, k=len(times)), strict=True))


SHAPES: Final[Mapping[str, Callable[[int, float, int, float, random.Random], Arrivals]]] = {
    "power-law": power_law, "poisson": poisson, "bursts": bursts, "diurnal": diurnal,
}  # fmt: skip


def make_workload(
    shape: str = "power-law",
    *,
    working_set: int = 35,
    rpm: float = PAPER_RPM,
    minutes: int = PAPER_MINUTES,
    seed: int = 0,
    skew: float = DEFAULT_SKEW,
    on: Sequence[SimulatedDevice] | None = None,
) -> Workload:
    """
    Return the workload of *seed*, which is the same for every policy.

    :raises BadWorkload: there is no such shape, or a function fits no device
    """
    if shape not in SHAPES:
        raise BadWorkload(f"no workload is called {shape!r}: choose one of {', '.join(SHAPES)}")
    rng = random.Random(seed)
    drawn = functions(working_set, rng)
    times, calls = arrivals(SHAPES[shape](working_set, rpm, minutes, skew, rng))
    where = devices() if on is None else on
    return all_fit(Workload(where, drawn, times, calls, name=f"{shape}, {working_set} functions, {rpm:g}/min"))
