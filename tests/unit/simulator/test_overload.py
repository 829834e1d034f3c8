"""More calls than the devices can serve with loads: `least-wait` beside LALB-O3, on the real engine."""

import pytest

from gpufaas_simulator.nodes import Noise
from gpufaas_simulator.noise import lognormal, service_noise
from gpufaas_simulator.report import Report
from gpufaas_simulator.run import engine_header, simulate
from gpufaas_simulator.synthetic import make_workload


def served(policy: str, functions: int, rpm: int, cv: float) -> Report:
    workload = make_workload(working_set=functions, rpm=rpm, seed=0)
    noise = Noise(service_noise(workload, lognormal(cv), 0)) if cv else None
    return simulate(workload, engine_header(policy), noise=noise)[1]


@pytest.mark.parametrize(("functions", "rpm", "cv"), [(60, 450, 0.0), (35, 325, 3.0)])
@pytest.mark.slow
def test_an_overload_does_not_become_strict_order_with_a_load_for_each_call(
    functions: int, rpm: int, cv: float
) -> None:
    """Past the bound nothing but the oldest call started: worst waits of 334 and 400 s."""
    published = served("lalb-o3", functions, rpm, cv)
    ours = served("least-wait", functions, rpm, cv)

    assert ours.completed == ours.calls
    assert ours.mean_wait_s < 0.75 * published.mean_wait_s
    assert ours.fairness.worst_wait_s <= max(30.0, published.fairness.worst_wait_s)
