"""`gpufaas what-if`: recorded figures, the same figures simulated, and the effect of a change."""

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import Result

from gpufaas_core.messages import Command, Event
from gpufaas_core.model import Seconds
from gpufaas_scheduler.engine import Engine
from gpufaas_scheduler.journal import Header, Journal
from gpufaas_scheduler.policies import make_policy
from gpufaas_simulator.nodes import Noise
from gpufaas_simulator.noise import lognormal, service_noise
from gpufaas_simulator.run import engine_header
from gpufaas_simulator.simulation import Simulation
from gpufaas_simulator.synthetic import devices, make_workload
from gpufaas_simulator.workload import Workload

Run = Callable[..., Result]


class Journaled:
    """An engine that writes what it is told, as the service does."""

    def __init__(self, engine: Engine, journal: Journal) -> None:
        self.engine, self.journal = engine, journal

    def handle(self, event: Event, now: Seconds) -> list[Command]:
        self.journal.append(event, now)
        return self.engine.handle(event, now)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def record(path: Path, workload: Workload, header: Header, noise: Noise | None = None) -> None:
    policy = make_policy(header.policy)
    engine = Engine(policy=policy, replacement=policy.replacement, max_queue=header.max_queue, learn=False)
    with closing(Journal(path, header)) as journal:
        Simulation(workload, cast(Engine, Journaled(engine, journal)), noise=noise).run()


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """An overloaded cluster of three devices."""
    path = tmp_path / "events.jsonl"
    record(path, make_workload(working_set=6, rpm=200, minutes=2, on=devices(3)), engine_header("lalb-o3"))
    return path


def what_if(run: Run, journal: Path, *args: object) -> dict[str, Any]:
    done = run("what-if", "--journal", journal, "--json", *args)
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_same_cluster_simulated_does_what_was_recorded(journal: Path, run: Run) -> None:
    found = what_if(run, journal)

    assert set(found) == {"recorded", "simulated"}
    recorded, simulated = found["recorded"], found["simulated"]
    assert recorded["calls"] == 400
    assert recorded["misses"] > 6
    for name in ("calls", "completed", "misses", "evictions", "false_miss_ratio", "fairness"):
        assert recorded[name] == pytest.approx(simulated[name]), name
    for name in ("latency", "mean_wait_s", "hottest_copies", "busy_ratio", "utilisation"):
        assert recorded[name] == pytest.approx(simulated[name]), name


def test_a_call_takes_in_the_simulation_what_it_took_then(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "events.jsonl"
    workload = make_workload(working_set=2, rpm=100, minutes=2, on=devices(2))
    record(path, workload, engine_header("lalb-o3"), Noise(service_noise(workload, lognormal(2), 0)))

    found = what_if(run, path)
    half = what_if(run, path, "--rate", 0.01)["what_if"]

    # Their mean is told to the scheduler, which expected another one then: calls take the same, decisions differ.
    recorded, simulated = found["recorded"], found["simulated"]
    assert simulated["latency"]["variance"] == pytest.approx(recorded["latency"]["variance"], rel=0.2)
    assert half["latency"]["max"] > 5 * half["latency"]["mean"]


def test_more_devices_serve_sooner_and_fewer_later(journal: Path, run: Run) -> None:
    more = what_if(run, journal, "--add-device", "7800MB", "--add-device", "gpu=8GiB")["what_if"]
    fewer = what_if(run, journal, "--remove-device", "g1")["what_if"]
    simulated = what_if(run, journal)["simulated"]

    assert len(more["devices"]) == 5
    assert len(fewer["devices"]) == 2
    assert more["latency"]["mean"] < 0.5 * simulated["latency"]["mean"] < fewer["latency"]["mean"]


def test_another_policy_and_another_rate(journal: Path, run: Run) -> None:
    other = what_if(run, journal, "--policy", "lb")["what_if"]
    slower = what_if(run, journal, "--rate", 0.25)["what_if"]
    simulated = what_if(run, journal)["simulated"]

    assert other["policy"] == "lb"
    assert other["miss_ratio"] > simulated["miss_ratio"]
    assert slower["latency"]["mean"] < simulated["latency"]["mean"]
    assert slower["duration_s"] > 3 * 120


def test_the_table_has_what_was_recorded_beside_it(journal: Path, run: Run) -> None:
    done = run("what-if", "--journal", journal, "--add-device", "8GiB")
    shown = " ".join(done.stdout.split())  # the title, with the journal's path, may be longer than a line

    assert done.exit_code == 0, done.output
    assert [word for word in ("recorded", "simulated", "what if", "400 calls") if word not in shown] == []


def test_a_failed_device_is_in_the_record_and_in_the_simulation(tmp_path: Path, run: Run) -> None:
    from dataclasses import replace

    from gpufaas_core.model import DeviceId
    from gpufaas_simulator.workload import DeviceLeaves

    path = tmp_path / "events.jsonl"
    workload = make_workload(working_set=6, rpm=200, minutes=1, on=devices(3))
    record(path, replace(workload, changes=[DeviceLeaves(20.0, DeviceId("g1"))]), engine_header("lalb-o3"))

    found = what_if(run, path)

    assert found["recorded"]["failed"] == found["simulated"]["failed"] == 1
    assert found["recorded"]["latency"] == pytest.approx(found["simulated"]["latency"])
    faster = what_if(run, path, "--rate", 2, "--add-device", "8GiB")["what_if"]
    assert faster["failed"] == 1, "the failure is at the same point of the work"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--add-device", "many"), "'many' is not a memory size"),
        (("--add-device", "tpu=8GiB", "--rate", "1"), None),
        (("--remove-device", "g9"), "there is no device 'g9': choose one of g0, g1, g2"),
        (("--policy", "lalb-o4"), "no policy is called 'lalb-o4'"),
        (("--remove-device", "g0", "--remove-device", "g1", "--remove-device", "g2"), "there are no devices"),
    ],
)
def test_a_wrong_change_is_one_line(args: tuple[str, ...], said: str | None, journal: Path, run: Run) -> None:
    done = run("what-if", "--journal", journal, *args)

    if said is None:  # its functions were measured for any kind
        assert done.exit_code == 0
        return
    assert done.exit_code == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ":1: this is no journal: name a file of 'gpufaas serve --journal'"),
        ('{"policy": "\udce9"}\n', ":1: this is no journal"),
        ("{}\n", ":1: no call is recorded in it"),
        ('{"version": 9}\n', "is a journal of version 9"),
        ('{}\n[1.0, {"type": "Woken"}]\n[oops]\n', ":3: this is no event of a journal"),
    ],
)
def test_a_file_that_is_no_journal(text: str, said: str, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(text, errors="surrogateescape")

    done = run("what-if", "--journal", path)

    assert done.exit_code == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
