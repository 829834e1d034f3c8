"""The thesis's heuristic of where a model is cut, beside the exact search."""

import random

from gpufaas_scheduler.plans.partition import Costs, best

COUNTER = Costs(0.5, (4, 2, 6, 3, 5), (0.02, 0.01, 0.03, 0.015, 0.025), (0.004, 0.001, 0.008, 0.002))


def test_the_heuristic_of_the_thesis_misses_the_best_plan() -> None:
    from log_cutting import log_cutting

    found, wanted = log_cutting(COUNTER, 3000, 4), best(COUNTER, 3000, 4)

    assert (found.cuts, round(found.t_avg, 3)) == ((2,), 57.578)
    assert (wanted.cuts, round(wanted.t_avg, 3)) == ((1, 2, 3), 51.596)


def test_the_heuristic_is_never_better() -> None:
    from log_cutting import log_cutting

    for seed in range(60):
        rng = random.Random(seed)
        c, e, n = (tuple(rng.random() for _ in range(count)) for count in (7, 7, 6))
        costs = Costs(0.1, c, e, n)

        assert best(costs, 40, 4).t_avg <= log_cutting(costs, 40, 4).t_avg * (1 + 1e-9)
