"""What least-wait keeps from run to run changes none of its decisions."""

import random

import pytest
from tests.compiled import python_only

from gpufaas_scheduler.policies.least_wait.estimates import Estimates
from gpufaas_scheduler.policies.least_wait.floor import Floor
from gpufaas_scheduler.policies.least_wait.placement import Rooms
from gpufaas_simulator.run import engine_header, simulate
from gpufaas_simulator.synthetic import devices, make_workload

DEVICES = 26


@python_only  # a method is replaced
@pytest.mark.parametrize("seed", [2, 4])
def test_the_floor_is_never_above_what_the_victims_for_a_load_are_worth(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    workload = make_workload(
        "poisson", working_set=rng.choice([60, 90]), rpm=DEVICES * rng.uniform(25.0, 32.0), minutes=2, seed=seed,
        on=devices(DEVICES),
    )  # fmt: skip
    below, asked, shares = Floor.below, [], []

    def compared(self, function, among):  # type: ignore[no-untyped-def]
        least = below(self, function, among)
        asked.append(least)
        if least > 0.0:
            view = self._view
            rooms = Rooms(view, Estimates(view)).rooms(function)
            assert all(each.worth >= least for each in rooms)
            shares.extend(least / rooms[0].worth for _ in rooms[:1])
        return least

    monkeypatch.setattr(Floor, "below", compared)
    found = simulate(workload, engine_header("least-wait"))[1]
    monkeypatch.setattr(Floor, "below", lambda *_: 0.0)

    assert found == simulate(workload, engine_header("least-wait"))[1]
    assert len(shares) > 50
    assert max(shares) > 0.9
