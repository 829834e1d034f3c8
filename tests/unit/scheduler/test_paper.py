"""
The paper's evaluation in small: 12 GPUs, 35 functions, 325 requests a minute for 6 minutes.

Bounds hold the mean of eight seeds within what seeds spread about an independent simulation of the same text: LB
159.7 s and .855 misses, LALB 8.85 s and .277, LALB-O3 3.74 s and .241. It tells a right scheduler from a wrong one; it
is not a target to fit to. All of it: benchmarks/paper.py.
"""

import pytest

from gpufaas_simulator.run import engine_header, simulate
from gpufaas_simulator.synthetic import make_workload

SEEDS = 8


@pytest.mark.parametrize(
    ("policy", "least_s", "most_s", "least_misses", "most_misses"),
    [("lb", 145.0, 175.0, 0.83, 0.88), ("lalb", 4.0, 18.0, 0.24, 0.34), ("lalb-o3", 3.1, 4.4, 0.21, 0.27)],
)
@pytest.mark.slow
def test_latency_and_misses_are_those_of_the_paper_s_evaluation(
    policy: str, least_s: float, most_s: float, least_misses: float, most_misses: float
) -> None:
    runs = [simulate(make_workload(seed=seed), engine_header(policy))[1] for seed in range(SEEDS)]

    assert {run.completed for run in runs} == {6 * 325}
    assert least_s < sum(run.latency.mean for run in runs) / SEEDS < most_s
    assert least_misses < sum(run.miss_ratio for run in runs) / SEEDS < most_misses
