"""
The paper's evaluation in small (specs/gpu-faas.md 6): 12 GPUs, 35 functions, 325 requests a minute for 6 minutes.

Bounds hold the mean of eight seeds within what seeds spread about an independent simulation of the same text: LB
159.7 s and .855 misses, LALB 8.85 s and .277, LALB-O3 3.74 s and .241. It tells a right scheduler from a wrong one; it
is not a target to fit to.
"""

import random
from heapq import heappop, heappush

import pytest

from gpufaas_cache_manager.replacement import make_replacement
from gpufaas_core import messages as m
from gpufaas_core.model import CallId, Device, DeviceId, Function, FunctionId, Profile
from gpufaas_scheduler.engine import Engine
from gpufaas_scheduler.policies import make_policy

MB = 10**6
TABLE_1 = [
    (1269, 2.41, 1.28), (1313, 2.52, 1.25), (1357, 2.60, 1.25), (1435, 2.32, 1.33), (1437, 2.81, 1.25),
    (1555, 2.64, 1.29), (1601, 2.49, 1.28), (1631, 2.56, 1.30), (1665, 2.67, 1.40), (1701, 2.67, 1.28),
    (1757, 2.95, 1.30), (1827, 3.10, 1.31), (1919, 2.75, 1.32), (2157, 4.42, 1.63), (2191, 3.51, 1.33),
    (2903, 3.94, 1.29), (3611, 3.16, 1.31), (3831, 3.91, 1.32), (3887, 3.98, 1.30), (3907, 4.04, 1.27),
    (3907, 4.03, 1.26), (3947, 4.07, 1.33),
]  # fmt: skip
"""Occupation in MB, load in s, inference of a batch of 32 in s."""


@pytest.mark.parametrize(
    ("policy", "least_s", "most_s", "least_misses", "most_misses"),
    [("lb", 130.0, 180.0, 0.80, 0.90), ("lalb", 4.0, 13.0, 0.22, 0.34), ("lalb-o3", 2.8, 4.7, 0.19, 0.28)],
)
def test_latency_and_misses_are_those_of_the_paper_s_evaluation(
    policy: str, least_s: float, most_s: float, least_misses: float, most_misses: float
) -> None:
    runs = [simulate(policy, working_set=35, rpm=325, seed=seed) for seed in range(8)]

    assert least_s < sum(mean_s for mean_s, _ in runs) / len(runs) < most_s
    assert least_misses < sum(misses for _, misses in runs) / len(runs) < most_misses


def simulate(policy: str, working_set: int, rpm: int, seed: int) -> tuple[float, float]:
    """Return the mean latency in seconds, and the share of misses."""
    rng = random.Random(seed)
    models = rng.sample(TABLE_1, len(TABLE_1))
    drawn = [models[i % len(models)] for i in range(working_set)]
    rng.shuffle(drawn)
    profiles = {
        FunctionId(f"f{rank}"): Profile(load_s, service_s, size * MB)
        for rank, (size, load_s, service_s) in enumerate(drawn)
    }
    minute_of_calls = normalised([(rank + 1) ** -0.8 for rank in range(working_set)], rpm)
    engine = Engine(policy=make_policy(policy), replacement=make_replacement("lru"), learn=False, max_queue=10**6)
    for number in range(12):
        engine.handle(m.DeviceJoined(Device(DeviceId(f"d{number}"), "gpu", 7800 * MB)), 0.0)
    for name, profile in profiles.items():
        engine.handle(m.FunctionDeployed(Function(name, "", profiles={"*": profile}, max_queue=10**6)), 0.0)

    calendar: list[tuple[float, bool, int, m.Event]] = []
    arrived: dict[str, float] = {}
    for minute in range(6):
        for rank in rng.sample(minute_of_calls, rpm):
            call = CallId(f"c{len(arrived)}")
            arrived[call] = 60 * (minute + rng.random())
            heappush(calendar, (arrived[call], True, len(arrived), m.Arrived(call, FunctionId(f"f{rank}"))))
    latency_s = 0.0
    misses = 0
    while calendar:
        now, _, _, event = heappop(calendar)
        if isinstance(event, m.Finished):
            latency_s += now - arrived.pop(event.call)
        for command in engine.handle(event, now):
            assert isinstance(command, m.Start)
            lease = command.lease
            profile = profiles[lease.function]
            ready = now
            if lease.cold:
                misses += 1
                ready += profile.load_s
                loaded = m.Loaded(lease.function, lease.device, profile.load_s, 0)
                heappush(calendar, (ready, False, -lease.number, loaded))
            finished = m.Finished(lease.call, lease.device, profile.service_s)
            heappush(calendar, (ready + profile.service_s, False, lease.number, finished))
    assert not arrived
    return latency_s / (6 * rpm), misses / (6 * rpm)


def normalised(popularity: list[float], total: int) -> list[int]:
    """Ranks, each as often as its share of *total* calls, by largest remainder."""
    shares = [each * total / sum(popularity) for each in popularity]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda rank: counts[rank] - shares[rank])
    for rank in by_remainder[: total - sum(counts)]:
        counts[rank] += 1
    return [rank for rank, count in enumerate(counts) for _ in range(count)]
