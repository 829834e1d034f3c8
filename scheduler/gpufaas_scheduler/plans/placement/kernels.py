"""
The measures of compute of a batch (`ao`, `wao`, `wsm`), from what was recorded of its kernels.

A kernel asks for as many multiprocessors as its blocks fill; how many blocks share one is limited by threads, shared
memory, registers and the device. Measures are sums over the kernels that run at a time: their highest value, or their
mean over time, in which gaps count as 0.

Source: P. Elvinger, ETH Zurich, 2024, whose printed formula of the share lacks the factor 100.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpufaas_core._types import Bytes, Seconds
from gpufaas_core.taken import Measured


@dataclass(frozen=True, slots=True)
class Multiprocessors:
    """Of a kind of GPU: how many there are, and what each has."""

    count: int
    shared: Bytes
    threads: int = 2048
    blocks: int = 32
    registers: int = 65536


V100: Final = Multiprocessors(80, 96 * 1024)
H200: Final = Multiprocessors(132, 228 * 1024)


@dataclass(frozen=True, slots=True)
class Kernel:
    grid: int
    """Blocks."""
    block: int
    """Threads of each."""
    registers: int = 0
    """Of each thread."""
    shared: Bytes = 0
    """Of each block, static and dynamic."""


def blocks_of_one(kernel: Kernel, device: Multiprocessors) -> int:
    """Return how many blocks of *kernel* run on one multiprocessor at once; 0 if a block is too large for it."""
    uses = (
        (device.threads, kernel.block),
        (device.shared, kernel.shared),
        (device.registers, kernel.block * kernel.registers),
        (device.blocks, 1),
    )
    return min(most // used for most, used in uses if used)


def multiprocessors(kernel: Kernel, device: Multiprocessors) -> int:
    """
    Return how many multiprocessors *kernel* asks for; more than there are, if its blocks run in turns.

    :raises ValueError: a block is too large for a multiprocessor
    """
    at_once = blocks_of_one(kernel, device)
    if not at_once:
        raise ValueError(f"a block of {kernel} needs more than a multiprocessor has: {device}")
    return math.ceil(kernel.grid / at_once)


def share(kernel: Kernel, device: Multiprocessors) -> float:
    """Return the share of the multiprocessors that *kernel* asks for, in percent."""
    return min(100.0, 100 * multiprocessors(kernel, device) / device.count)


def fit_together(kernels: Sequence[Kernel], device: Multiprocessors) -> bool:
    """Whether *kernels* have multiprocessors of their own; it says nothing about caches and memory."""
    return sum(multiprocessors(each, device) for each in kernels) <= device.count


@dataclass(frozen=True, slots=True)
class Run:
    """Of one kernel: when, and what a measure says of it, such as its `share` or its occupancy."""

    start: Seconds
    end: Seconds
    value: float


def highest(runs: Sequence[Run]) -> float:
    """Return the highest sum of values at a time (`ao`)."""
    return max((value for _, value in _series(runs)), default=0.0)


def mean(runs: Sequence[Run]) -> float:
    """Return the mean over time, from the first start to the last end (`wao`, `wsm`)."""
    series = _series(runs)
    total = math.fsum(length for length, _ in series)
    return math.fsum(length * value for length, value in series) / total if total else 0.0


def wsm(measured: Measured) -> float:
    """Return the mean share of the multiprocessors that the kernels of a traced batch ask for, in percent."""
    of = Multiprocessors(*measured.gpu)
    return min(100.0, mean([Run(start, end, share(Kernel(*kernel), of)) for start, end, *kernel in measured.kernels]))


def _series(runs: Sequence[Run]) -> list[tuple[Seconds, float]]:
    """Return length and sum of values of each interval between starts and ends."""
    at = sorted({time for each in runs for time in (each.start, each.end)})
    return [
        (end - start, math.fsum(each.value for each in runs if each.start <= start and end <= each.end))
        for start, end in itertools.pairwise(at)
    ]
