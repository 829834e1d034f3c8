"""Runs that outlive their process: what is simulated is what a run at one go simulates, wherever it was broken off."""

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from tests.waiting import until

from gpufaas_core.errors import InvalidSpec
from gpufaas_scheduler.policies import POLICIES
from gpufaas_simulator import run_file, simulation
from gpufaas_simulator.explicit import read_workload
from gpufaas_simulator.nodes import Noise
from gpufaas_simulator.noise import bimodal, load_noise, lognormal, pareto, service_noise
from gpufaas_simulator.report import Report
from gpufaas_simulator.run import engine_header, simulate
from gpufaas_simulator.run_file import RunFile
from gpufaas_simulator.synthetic import devices, make_workload
from gpufaas_simulator.workload import MB, BadWorkload, Workload

Write = Callable[[Any], Path]
CALLS = 200
"""After so many of which each part of a run ends."""


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every moment is one to keep."""
    monkeypatch.setattr(run_file, "KEEP_EVERY_S", -1e9)
    monkeypatch.setattr(simulation, "_PROGRESS_EVERY", CALLS // 2)


def drawn() -> Workload:
    return make_workload(
        "bursts", working_set=15, rpm=400, minutes=3, seed=4, skew=0.8, on=devices(3, 7800 * MB)
    )  # fmt: skip


def noise(workload: Workload) -> Noise:
    return Noise(service_noise(workload, lognormal(1.0), 1), load_noise(pareto(), 1))


def in_parts(path: Path, workload: Workload, policy: str, noisy: bool) -> tuple[Report, int]:
    """Simulate with a process that is killed after the second moment to keep; return the report, and how many died."""
    died = 0
    while True:
        told: list[int] = []

        def progress(ended: int, told: list[int] = told) -> None:
            told.append(ended)
            if len(told) > 2:
                raise KeyboardInterrupt

        try:
            given = noise(workload) if noisy else None
            return RunFile(path).simulate(workload, engine_header(policy, learn=noisy), given, progress), died
        except KeyboardInterrupt:
            died += 1


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("noisy", [False, True])
def test_a_run_in_parts_has_the_report_of_a_run_at_one_go(policy: str, noisy: bool, tmp_path: Path) -> None:
    workload = drawn()
    whole = simulate(workload, engine_header(policy, learn=noisy), noise=noise(workload) if noisy else None)[1]

    found, died = in_parts(tmp_path / "a.run", workload, policy, noisy)

    assert died > 2
    assert found == whole


def test_what_runs_beside_each_other_on_a_changing_fleet_goes_on_too(written: Write, tmp_path: Path) -> None:
    function = {
        "occupation_mb": 500, "load_s": 2, "host_load_s": 1, "infer_s": 0.2, "sharing": "spatial", "compute": 30,
        "slots": 2, "batch_max": 4, "batch": {"4": 0.4}, "batch_wait_s": 0.1, "latency_goal_s": 1,
    }  # fmt: skip
    given = {
        "devices": [{"id": "a/0", "memory_mb": 900}, {"id": "b/0", "memory_mb": 1800}],
        "nodes": {"a": {"host_memory_mb": 800, "price_per_h": 3, "parks": True}},
        "offers": [{"kind": "h", "memory_mb": 900, "price_per_h": 6}],
        "functions": {name: {**function, "uses": uses} for name, uses in zip("fgh", (40, 70, 20), strict=True)},
        "arrivals": [[at // 3 * 0.05, "fgh"[at * at % 3]] for at in range(1500)],
        "changes": [
            {"t": 3, "event": "kind_leaves", "kind": "*", "down_s": 2},
            {"t": 9, "event": "host_load", "node": "b", "compute": 30},
            {"t": 10, "event": "function_updated", "function": "f"},
            {"t": 12, "event": "plan", "replicas": [{"function": "g", "device": "b/0"}]},
        ],
    }
    workload = read_workload(written(given))
    whole = simulate(workload, engine_header("lalb-o3"))[1]

    found, died = in_parts(tmp_path / "a.run", workload, "lalb-o3", noisy=False)

    assert died > 2
    assert found == whole


def test_a_finished_simulation_is_not_run_again_but_another_one_is(tmp_path: Path) -> None:
    workload, kept = drawn(), tmp_path / "a.run"
    header = engine_header("lb")
    found = RunFile(kept).simulate(workload, header, None, lambda _: None)
    told: list[int] = []

    assert RunFile(kept).simulate(workload, header, None, told.append) == found
    assert told == []
    other = Noise(service_noise(workload, bimodal(), 1))
    assert RunFile(kept).simulate(workload, header, other, told.append) != found
    assert told


def test_a_policy_that_cannot_be_kept_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dumps(_: object, protocol: int = 0) -> bytes:
        if protocol:  # of a simulation
            raise TypeError("cannot pickle 'generator' object")
        return b""

    monkeypatch.setattr(run_file.pickle, "dumps", dumps)

    with pytest.raises(InvalidSpec, match=r"policy lb cannot be kept in .*a.run .*: leave --run out"):
        RunFile(tmp_path / "a.run").simulate(drawn(), engine_header("lb"), None, lambda _: None)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{}", "this is no file of --run"),
        ("a workload", "this is no file of --run"),
        ('{"run": "older"}\n', "another version of gpufaas wrote it: remove it to begin anew"),
    ],
)
def test_another_file_is_refused_and_left_alone(content: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "a.run"
    path.write_text(content)

    with pytest.raises(BadWorkload, match=says):
        RunFile(path)

    assert path.read_text() == content


def test_a_run_keeps_reports_only(run: Callable[..., Result], tmp_path: Path) -> None:
    done = run("simulate", "--run", tmp_path / "a.run", "--decisions", tmp_path / "d.jsonl")

    assert done.exit_code == 2
    assert "--run keeps reports only: leave --decisions out" in done.output


@pytest.mark.slow
def test_a_command_that_was_killed_goes_on_in_another_process(run: Callable[..., Result], tmp_path: Path) -> None:
    """Which has another seed of hashes: nothing hangs on the order of sets."""
    options = ("simulate", "--minutes", "20", "--rpm", "2000", "--policy", "lalb-o3", "--json")
    kept = tmp_path / "a.run"
    command = (
        "from gpufaas_simulator import run_file; run_file.KEEP_EVERY_S = -1e9\n"
        "from gpufaas_cli.main import cli; cli()"
    )  # fmt: skip
    killed = subprocess.Popen(
        [sys.executable, "-c", command, *options, "--run", kept],
        stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONHASHSEED": "1"},
    )  # fmt: skip
    until(lambda: kept.exists() or killed.poll() is not None)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert json.loads(kept.read_bytes().partition(b"\n")[0])["under_way"], "it is not finished"

    gone_on = run(*options, "--run", kept)

    assert gone_on.exit_code == 0
    assert json.loads(gone_on.stdout) == json.loads(run(*options).stdout)


def test_a_large_fleet_is_kept_too() -> None:
    """What refers to each other in long chains is deeper than Python's own limit."""
    limit = sys.getrecursionlimit()
    chain: list[Any] = []
    for _ in range(100 * limit):
        chain = [chain]

    kept = pickle.loads(run_file._pickled(chain))  # type: ignore[arg-type]

    assert len(kept) == 1
    assert sys.getrecursionlimit() == limit
