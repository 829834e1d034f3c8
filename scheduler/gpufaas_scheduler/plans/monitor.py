"""
When an instance of a variant is overloaded or interfered with: the limits by kind of hardware, and the states.

Source: INFaaS (USENIX ATC 2021) for the states; the limits and their hysteresis are those of its public code.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from gpufaas_scheduler.plans.problem import Milliseconds

SATURATED: Final = 0.9
"""From this fraction of what saturates it, a slow instance is overloaded, not interfered with."""


class State(StrEnum):
    INACTIVE = "inactive"
    ACTIVE = "active"
    OVERLOADED = "overloaded"
    INTERFERED = "interfered"


@dataclass(frozen=True, slots=True)
class Factors:
    """What the limits of an instance are multiples of what it should do by its profile."""

    latency: float = 2.5
    qps: float = 0.5
    queue: float = 0.8
    clear: float = 1.5


FACTORS: Final = {"cpu": Factors(), "gpu": Factors(latency=1.5, qps=0.3, queue=0.8, clear=1.25)}
SINGLE_CPU: Final = Factors(latency=4.0, qps=1.0, queue=1.1)
"""The factors of one replica on a CPU: there is no other one to send queries to."""
_QUICK_MS: Final = 10.0
"""Below it, a GPU may be slower by a larger factor: up to 15 ms, five times at most."""


@dataclass(frozen=True, slots=True)
class Limits:
    latency: Milliseconds
    qps: float
    """Of one replica."""
    queue: float
    """Queries received and not answered, of all replicas."""
    clear: Milliseconds
    """Below it, and with a short queue, a flag goes away."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of one variant on one worker since the last look."""

    latency: Milliseconds
    """The mean latency."""
    qps: float
    """Of one replica."""
    outstanding: int
    load: float
    """Queries per second of all replicas."""


def limits(kind: str, profiled: Milliseconds, replicas: int = 1) -> Limits:
    """
    Return the limits of *replicas* on one worker.

    :param kind: ``cpu``, or any other for an accelerator
    :param profiled: time of a batch as large as the mean one, by the profile
    """
    of = (SINGLE_CPU if replicas == 1 else FACTORS["cpu"]) if kind == "cpu" else FACTORS["gpu"]
    slower = min(5.0, 15.0 / profiled) if kind != "cpu" and profiled < _QUICK_MS else of.latency
    rate = 1000.0 / profiled
    return Limits(slower * profiled, of.qps * rate, of.queue * replicas * rate, of.clear * profiled)


def next_state(before: State, seen: Seen, of: Limits, saturation: float) -> State:
    """
    Return the state after a look.

    :param saturation: queries per second that saturate all replicas

    An inactive instance stays so: loading makes it active, not what is seen.
    """
    if before is State.INACTIVE:
        return before
    long_queue = seen.outstanding > of.queue
    if not ((seen.latency > of.latency and seen.qps > of.qps) or long_queue):
        if seen.latency < of.clear or before is State.ACTIVE:
            return State.ACTIVE
        return before  # between the limits nothing changes
    return State.OVERLOADED if long_queue or seen.load >= SATURATED * saturation else State.INTERFERED


def without_answers(latency: Milliseconds, kind: str) -> Milliseconds:
    """Return the mean latency after a second in which nothing was answered: it is forgotten step by step."""
    return max(0.0, latency - (15.0 if kind == "cpu" else 1.5))
