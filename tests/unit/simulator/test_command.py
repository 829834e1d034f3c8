"""`gpufaas simulate` from the outside."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from gpufaas_apps.options import ServeOptions
from gpufaas_scheduler.policies import DEFAULT_POLICY

Run = Callable[..., Result]
Write = Callable[[Any], Path]

TRACE = """HashOwner,HashApp,HashFunction,Trigger,480,481,482
owner-one,app,quiet,http,0,1,0
owner-one,app,loud,http,30,10,20
owner-two,app,steady,queue,5,5,5
owner-two,app,silent,timer,0,0,9
"""


def test_without_a_policy_the_service_s_default_decides(small: dict[str, Any], written: Write, run: Run) -> None:
    found = json.loads(run("simulate", "--workload", written(small), "--json").stdout)

    assert found["policy"] == DEFAULT_POLICY == ServeOptions().policy.name


def test_the_o3_limit_is_that_of_serve(run: Run) -> None:
    in_order, overtaking = (
        json.loads(run("simulate", "--policy", f"lalb-o3:o3_limit={limit}", "--minutes", 1, "--json").stdout)
        for limit in (0, 25)
    )
    plain = json.loads(run("simulate", "--policy", "lalb", "--minutes", 1, "--json").stdout)

    assert {**in_order, "policy": ""} == {**plain, "policy": ""}
    assert in_order != overtaking


def test_a_trace_gives_its_most_called_functions_in_each_minute(run: Run, tmp_path: Path) -> None:
    trace, saved = tmp_path / "t.csv", tmp_path / "w.json"
    trace.write_text(TRACE)

    done = run("simulate", "--trace", trace, "--minutes", 2, "--working-set", 2, "--rpm", 70, "--save-workload", saved)

    assert done.exit_code == 0
    workload = json.loads(saved.read_text())
    loud, steady = workload["functions"]
    assert (loud, steady) == ("f0-loud", "f1-steady")
    assert workload["functions"][steady]["namespace"] == "owner-tw"
    minutes = [[name for at, name in workload["arrivals"] if at // 60 == minute] for minute in (0, 1)]
    assert [len(minute) for minute in minutes] == [70, 70]
    assert [minute.count(loud) for minute in minutes] == [60, 47]  # 30 and 5 of 35; 10 and 5 of 15


def test_a_trace_as_it_was_recorded(run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text(TRACE)
    args = ("--trace", trace, "--first-minute", 482, "--minutes", 1, "--working-set", 3, "--as-recorded", "--json")

    assert json.loads(run("simulate", *args).stdout)["calls"] == 34


def test_a_saved_workload_gives_the_same_run(run: Run, tmp_path: Path) -> None:
    saved = tmp_path / "w.json"
    drawn = run("simulate", "--minutes", 1, "--shape", "bursts", "--seed", 4, "--save-workload", saved, "--json")

    again = run("simulate", "--workload", saved, "--seed", 4, "--json")

    first, second = json.loads(drawn.stdout), json.loads(again.stdout)
    assert first["calls"] > 100
    for name in ("workload", "working_set"):
        del first[name], second[name]
    assert first == second


def test_several_runs_are_summed_up_with_confidence_intervals(run: Run) -> None:
    args = ("--policy", "lb", "--policy", "lalb", "--working-set", 5, "--working-set", 10, "--seeds", 3, "--minutes", 1)
    found = json.loads(run("simulate", *args, "--json").stdout)

    assert len(found["runs"]) == 12
    assert [(each["policy"], each["working_set"]) for each in found["summary"]] == [
        ("lb", 5), ("lalb", 5), ("lb", 10), ("lalb", 10),
    ]  # fmt: skip
    for each in found["summary"]:
        mine = [run["latency"]["mean"] for run in found["runs"]
                if (run["policy"], run["working_set"]) == (each["policy"], each["working_set"])]  # fmt: skip
        assert each["figures"]["mean"]["mean"] == pytest.approx(sum(mine) / 3)
        assert each["figures"]["mean"]["half_width"] > 0


def test_the_table_has_a_column_per_policy(run: Run) -> None:
    shown = run("simulate", "--policy", "lb", "--policy", "lalb-o3", "--minutes", 1).stdout

    assert "35" not in shown.splitlines()[0] or "devices" in shown.splitlines()[0]
    assert all(
        word in shown for word in ("lb", "lalb-o3", "mean s", "p99", "misses", "false", "hottest on", "worst wait")
    )


@pytest.mark.parametrize("form", ["svg", "png"])
@pytest.mark.slow
def test_plots_are_drawn(form: str, run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "plots"

    args = ("--working-set", 3, "--working-set", 5, "--policy", "lalb", "--minutes", 1, "--plot-format", form)
    done = run("simulate", *args, "--plots", folder)

    assert done.exit_code == 0
    assert {each.name for each in folder.iterdir()} == {
        f"latency.{form}",
        f"cdf.{form}",
        f"resident-lalb-3.{form}",
        f"resident-lalb-5.{form}",
    }
    head = {"svg": b"<?xml", "png": b"\x89PNG"}[form]
    assert all(each.read_bytes().startswith(head) for each in folder.iterdir())


def test_a_log_that_cannot_be_finished_is_not_there(
    small: dict[str, Any], written: Write, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that raises half-way leaves no half log, and an older log as it was."""
    from gpufaas_scheduler.policies.load_balance import Arrival

    log = tmp_path / "d.jsonl"
    log.write_text("old\n")

    def broken(_: object, view: Any, placement: Any) -> Any:  # noqa: ARG001
        if view.now > 1:
            raise RuntimeError("a bug in a policy")
        return iter(())

    monkeypatch.setattr(Arrival, "plan", broken)

    with pytest.raises(RuntimeError, match="a bug in a policy"):
        run("simulate", "--workload", written(small), "--decisions", log, "--policy", "lb")
    assert log.read_text() == "old\n"
    assert {each.name for each in tmp_path.iterdir()} == {"w.json", "d.jsonl"}
