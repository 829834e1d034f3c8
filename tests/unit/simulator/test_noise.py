"""True times that the scheduler does not know: given with a workload, or drawn about the profiles."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, cast

import pytest
from click.testing import Result

from gpufaas_core import messages as m
from gpufaas_core.messages import Command, Event
from gpufaas_core.model import FunctionId, Seconds
from gpufaas_scheduler.engine import Engine
from gpufaas_simulator.entries import workload_json
from gpufaas_simulator.explicit import read_workload
from gpufaas_simulator.nodes import Noise
from gpufaas_simulator.noise import Law, bimodal, load_noise, lognormal, pareto, service_noise
from gpufaas_simulator.run import engine_header, simulate
from gpufaas_simulator.simulation import Simulation
from gpufaas_simulator.synthetic import make_workload

Run = Callable[..., Result]
Write = Callable[[Any], Path]


def test_a_call_takes_its_true_time_and_others_what_their_function_takes(small: dict[str, Any], written: Write) -> None:
    small["arrivals"] = [[0, "f"], [20, "f", 7.5], [40, "f", 0]]

    record, _ = simulate(read_workload(written(small)))

    assert list(record.service_s) == [1.25, 7.5, 0.0]
    assert list(record.ended) == [3.75, 27.5, 40.0]


def test_a_true_time_is_the_same_on_every_kind_of_device(small: dict[str, Any], written: Write) -> None:
    small["functions"]["f"]["kinds"] = {"gpu": {"occupation_mb": 1269, "load_s": 1, "infer_s": 0.5}}
    small["arrivals"] = [[0, "f"], [10, "f", 7.5]]

    record, _ = simulate(read_workload(written(small)))

    assert list(record.service_s) == [0.5, 7.5]


def test_the_scheduler_is_told_of_the_mean_and_hears_the_true_time_when_the_call_is_over(
    small: dict[str, Any], written: Write
) -> None:
    def heard(infer_s: float) -> list[tuple[Event, list[Command]]]:
        small["arrivals"] = [[0, "f", infer_s], [1, "g"], [1.5, "f"], [2, "g"]]
        engine = engine_header("least-wait").engine()
        found: list[tuple[Event, list[Command]]] = []

        class Watched:
            def handle(self, event: Event, now: Seconds) -> list[Command]:
                found.append((event, commands := engine.handle(event, now)))
                return commands

            def __getattr__(self, name: str) -> Any:
                return getattr(engine, name)

        Simulation(read_workload(written(small)), cast(Engine, Watched())).run()
        return found

    usual, long = heard(1.25), heard(40.0)
    # The load of the first call is over at 2.5 s and the usual call at 3.75 s: until then all is the same.
    until = next(at for at, (event, _) in enumerate(usual) if isinstance(event, m.Finished))
    assert any(isinstance(event, m.Loaded) for event, _ in usual[:until])
    assert usual[:until] == long[:until]
    [took] = [event.service_s for event, _ in long if isinstance(event, m.Finished) and event.call == "0"]
    assert took == 40.0


def test_a_workload_is_written_as_it_was_read(small: dict[str, Any], written: Write, tmp_path: Path) -> None:
    small["arrivals"] = [[0, "f"], [0.5, "g", 0.1], [2, "f", 3e-7]]
    workload = read_workload(written(small))
    again = tmp_path / "again.json"
    again.write_bytes(workload_json(workload))

    assert json.loads(again.read_text())["arrivals"] == small["arrivals"]
    assert workload_json(read_workload(again)) == again.read_bytes()


def test_without_true_times_none_are_kept(small: dict[str, Any], written: Write) -> None:
    assert read_workload(written(small)).service_s is None


@pytest.mark.parametrize(
    ("law", "cv"),
    [(lognormal(0.2), 0.2), (lognormal(1), 1), (lognormal(3), 3), (pareto(), 2.2), (pareto(2.5), 0.81), (bimodal(), 9)],
)  # fmt: skip
def test_a_law_has_mean_1_and_the_spread_that_is_documented(law: Law, cv: float) -> None:
    rng = random.Random(0)
    factors = [law(rng) for _ in range(100_000)]

    assert fmean(factors) == pytest.approx(1, abs=3 * cv / math.sqrt(len(factors)) + 1e-3)
    assert pstdev(factors) == pytest.approx(cv, rel=0.15)
    assert min(factors) > 0


def test_the_pareto_law_ends_at_a_hundred_means() -> None:
    rng, law = random.Random(1), pareto()

    assert 90 < max(law(rng) for _ in range(200_000)) <= 100


def test_a_call_has_the_same_time_under_every_policy() -> None:
    workload = make_workload("bursts", working_set=20, rpm=300, minutes=2)
    factors = Noise(service_noise(workload, lognormal(3), 7))

    records = {name: simulate(workload, engine_header(name), noise=factors)[0] for name in ("lb", "least-wait")}

    assert list(records["lb"].starts) != list(records["least-wait"].starts)
    assert records["lb"].service_s == records["least-wait"].service_s
    assert service_noise(workload, lognormal(3), 7) == factors.service != service_noise(workload, lognormal(3), 8)


def test_the_nth_load_of_a_function_has_the_same_time_whatever_is_loaded_between() -> None:
    f, g = FunctionId("f"), FunctionId("g")
    one, other = load_noise(lognormal(1), 0), load_noise(lognormal(1), 0)

    mixed = [other(each) for each in (f, g, f, g)]
    assert [one(f), one(f)] == mixed[::2]
    assert load_noise(lognormal(1), 0)(f) != load_noise(lognormal(1), 1)(f) != load_noise(lognormal(1), 1)(g)


def test_drift_begins_half_way() -> None:
    workload = make_workload("poisson", working_set=3, rpm=60, minutes=2)
    half = workload.times[-1] / 2

    factors = service_noise(workload, None, 0, drift=2.0)

    assert {(at >= half, factor) for at, factor in zip(workload.times, factors, strict=True)} == {
        (False, 1.0), (True, 2.0),
    }  # fmt: skip


def simulated(run: Run, *args: object) -> dict[str, Any]:
    done = run("simulate", "--working-set", 5, "--rpm", 100, "--minutes", 4, "--json", *args)
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_noise_of_services_leaves_loads_alone(small: dict[str, Any], written: Write) -> None:
    workload = read_workload(written(small))
    factors = service_noise(workload, lognormal(1), 0)
    plain, service = simulate(workload)[0], simulate(workload, noise=Noise(factors))[0]
    load = simulate(workload, noise=Noise(load=load_noise(lognormal(1), 0)))[0]

    assert load.service_s == plain.service_s != service.service_s
    assert service.ended[0] == 2.5 + 1.25 * factors[0]
    assert load.ended[0] != plain.ended[0]


def test_options_say_of_what_and_how(run: Run) -> None:
    plain = simulated(run)
    found = {
        options: simulated(run, *options)
        for options in [
            ("--noise", 1), ("--noise", 1, "--noise-law", "lognormal"), ("--noise", 1, "--noise-of", "service"),
            ("--noise", 1, "--noise-of", "load"), ("--noise-law", "pareto"), ("--noise", 2, "--noise-law", "pareto"),
            ("--noise-law", "bimodal"), ("--drift", 2),
        ]
    }  # fmt: skip
    both, the_same, *others = (each["latency"] for each in found.values())

    assert both == the_same == simulated(run, "--noise", 1)["latency"]
    assert len({str(each) for each in (plain["latency"], both, *others)}) == len(others) + 2
    load = found["--noise", 1, "--noise-of", "load"]
    assert load["utilisation"] * load["duration_s"] == pytest.approx(plain["utilisation"] * plain["duration_s"])
