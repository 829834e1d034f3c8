"""How benchmarks compare two working trees: turns, medians of ratios, bars, and whose code a process runs."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def pairs(*ratios: float, limit: float = 1.03, names: tuple[str, ...] = ("this tree", "the base")) -> Any:
    from _pairs import Limit, Pairs

    made = Pairs(names, len(ratios), Limit("cpu_us", "at most", limit))
    rows = [
        [{"cpu_us": ratio * base, "p50_ms": 2.0}, {"cpu_us": base}] for ratio, base in zip(ratios, PACE, strict=False)
    ]
    made.found["echo"] = [row[: len(names)] for row in rows]
    return made


PACE = (100.0, 900.0, 120.0, 400.0, 100.0, 800.0, 110.0, 100.0, 300.0)
"""µs of the base's calls: now and then the machine is busy, for both."""
NINE = (1.01, 1.02, 0.99, 1.0, 1.5, 1.03, 0.7, 1.02, 1.01)


def test_every_second_round_measures_in_the_other_order_and_each_row_stays_with_its_side() -> None:
    from _pairs import Pairs

    order: list[str] = []

    def part(side: str) -> dict[str, float]:
        order.append(side)
        return {"cpu_us": 1.0 if side == "a" else 2.0}

    made = Pairs(("a", "b"), 3)
    made.measure({"echo": part}, ["a", "b"])

    assert order == ["a", "b", "b", "a", "a", "b"]
    assert made.found["echo"] == [[{"cpu_us": 1.0}, {"cpu_us": 2.0}]] * 3


def test_a_round_in_slices_changes_sides_more_often_and_has_their_medians() -> None:
    from _pairs import Pairs

    order: list[str] = []

    def part(side: str) -> dict[str, float]:
        order.append(side)
        return {"cpu_us": 1000.0 if len(order) == 4 else len(order)}  # once something else was done

    made = Pairs(("a", "b"), 2, slices=3)
    made.measure({"echo": part}, ["a", "b"])

    assert "".join(order) == "abbaab" + "baabba"
    assert made.found["echo"] == [[{"cpu_us": 5}, {"cpu_us": 3}], [{"cpu_us": 9}, {"cpu_us": 10}]]


def test_the_ratio_is_the_median_of_the_pairs_whatever_the_machines_pace() -> None:
    times = pairs(*NINE).times("echo", "cpu_us")

    assert times.median == pytest.approx(1.01)
    assert (times.low, times.high) == pytest.approx((0.99, 1.03))


@pytest.mark.parametrize(
    ("count", "rank", "sure"), [(9, 1, 0.961), (6, 0, 0.969), (5, 0, 0.938), (1, 0, 0.0), (21, 5, 0.973)]
)
def test_the_interval_is_the_closest_that_holds_the_true_median_in_95_of_100_cases(
    count: int, rank: int, sure: float
) -> None:
    from _pairs import times_of

    times = times_of([float(each) for each in range(count)])

    assert (times.low, times.high) == (rank, count - 1 - rank)
    assert times.sure == pytest.approx(sure, abs=5e-4)


def test_a_base_that_is_exceeded_by_more_than_the_bar_is_a_missed_bar_and_status_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    slower = [each + 0.03 for each in NINE]

    assert pairs(*NINE).finish(argparse.Namespace(json=None)) == 0
    assert pairs(*slower).finish(argparse.Namespace(json=None)) == 1
    assert pairs(*slower, limit=1.05).finish(argparse.Namespace(json=None)) == 0
    said = capsys.readouterr().err
    assert "MISSED: echo: 1.040 times the cpu_us of the base (at most 1.03; 96% sure: 1.020 to 1.060)" in said


def test_a_bar_may_be_about_one_part_only_and_may_be_a_least() -> None:
    from _pairs import Limit

    made = pairs(0.5)
    made.limits = (
        Limit("cpu_us", "at least", 0.6),
        Limit("cpu_us", "at least", 0.4, "echo"),
        Limit("cpu_us", "at most", 9, "x"),
    )

    assert [each.met for each in made.bars()] == [False, True]


def test_without_a_base_figures_are_shown_and_nothing_is_judged(capsys: pytest.CaptureFixture[str]) -> None:
    assert pairs(*NINE, names=("this tree",)).finish(argparse.Namespace(json=None)) == 0
    assert "p50_ms" in capsys.readouterr().out


def test_what_was_found_is_written_as_json(tmp_path: Path) -> None:
    pairs(*NINE).finish(argparse.Namespace(json=tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())

    assert len(found["rounds"]["echo"]) == 9
    assert found["bars"][0]["met"] is True


def test_a_run_with_calls_that_failed_is_no_figure() -> None:
    from _pairs import Pairs

    errors = iter((0, 3, 0))

    with pytest.raises(SystemExit, match="3 calls failed"):
        Pairs(("a",), 1, slices=3).measure({"echo": lambda _: {"cpu_us": 1.0, "errors": next(errors)}}, ["a"])


def test_both_trees_start_anew_for_each_round_by_turns_and_are_called_once_before_it_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import _base

    said: list[str] = []

    class Served:
        def __init__(self, tree: Path) -> None:
            self.tree = tree.name

        def __enter__(self) -> "Served":
            said.append(f"start {self.tree}")
            return self

        def __exit__(self, *_: object) -> None:
            said.append(f"end {self.tree}")

    monkeypatch.setattr(_base, "ROOT", Path("/new"))
    monkeypatch.setattr(_base, "check_workers", lambda url, tree: said.append(f"check {url} {tree.name}"))
    options = argparse.Namespace(base=Path("/old"), rounds=2, bar=1.03)

    def part(side: Served) -> dict[str, float]:
        said.append(side.tree)
        return {"cpu_us": 1.0}

    pairs = _base.pairs_of(options)
    _base.measure(pairs, options, {"echo": part}, Served, lambda side: f"http://{side.tree}")

    before = ["check http://new new", "new", "check http://old old", "old"]
    assert said == [
        *("start new", "start old", *before, "new", "old", "end old", "end new"),
        *("start old", "start new", *before, "old", "new", "end new", "end old"),
    ]
    assert len(pairs.found["echo"]) == 2


# --- whose code -------------------------------------------------------------------------------------------------------


def code_of(tree: Path, engine: str = "") -> dict[str, str]:
    packages = {"gpufaas_core": "core", "gpufaas_scheduler": "scheduler"}
    told = {name: f"{tree}/{room}/{name}/__init__.py" for name, room in packages.items()}
    return {**told, "gpufaas_scheduler.engine": engine or f"{tree}/scheduler/gpufaas_scheduler/engine.py"}


def test_a_process_that_has_a_package_from_elsewhere_is_refused() -> None:
    from _platform import is_code_of

    here, there = Path("/new"), Path("/new/.trees/old")
    compiled = "/env/share/gpufaas/compiled/engine.so"

    assert is_code_of(here, code_of(here)) == "Python"
    assert is_code_of(here, code_of(here, compiled)) == "machine code"
    for told in (
        code_of(there),
        code_of(here) | {"gpufaas_core": code_of(there)["gpufaas_core"]},
        code_of(there, compiled),
    ):
        with pytest.raises(SystemExit, match="what is to be measured is the code of /new"):
            is_code_of(here, told)
    with pytest.raises(SystemExit, match=r"gpufaas_core comes from /new/\.venv/lib"):
        is_code_of(here, {"gpufaas_core": "/new/.venv/lib/python3/site-packages/gpufaas_core/__init__.py"})


def test_trees_of_which_only_one_is_compiled_are_not_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import _base

    (tmp_path / "core" / "gpufaas_core").mkdir(parents=True)
    engines = {_base.ROOT: "", tmp_path: "/env/engine.so"}
    monkeypatch.setattr(_base, "interpreter_of", str)
    monkeypatch.setattr(_base, "_run", lambda tree, *_: json.dumps(code_of(Path(tree), engines[Path(tree)])))

    with pytest.raises(SystemExit, match="Python runs the engine of this tree, machine code that of"):
        _base.working_tree(str(tmp_path))
    engines[tmp_path] = ""
    assert _base.working_tree(str(tmp_path)) == tmp_path
    with pytest.raises(SystemExit, match="no working tree"):
        _base.working_tree(str(tmp_path / "core"))


def test_a_tree_without_an_environment_gets_one_with_its_own_packages_and_the_rest_of_this_one(tmp_path: Path) -> None:
    from _platform import STARTED, interpreter_of, is_code_of

    for room in ("core", "scheduler"):
        (tmp_path / room / f"gpufaas_{room}").mkdir(parents=True)
        (tmp_path / room / f"gpufaas_{room}" / "__init__.py").touch()
    (tmp_path / "scheduler" / "gpufaas_scheduler" / "engine.py").touch()
    python = interpreter_of(tmp_path)
    told = subprocess.run(
        [python, "-P", "-c", f"import runpy, httpx; print(runpy.run_path({str(STARTED)!r})['code']())"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip

    code = eval(told)
    assert set(code) == {"gpufaas_core", "gpufaas_scheduler", "gpufaas_scheduler.engine"}
    assert is_code_of(tmp_path, code) == "Python"
    assert python != sys.executable


# --- processor time ---------------------------------------------------------------------------------------------------

PARENT = """
import os, sys, time
def burn(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
for _ in sys.stdin:
    if os.fork() == 0:
        burn(0.1)
        os._exit(0)
    os.wait()
    burn(0.05)
    print(flush=True)
"""


def test_processor_time_is_that_of_descendants_too_also_of_those_that_have_ended() -> None:
    from _servers import Tree

    with subprocess.Popen([sys.executable, "-S", "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin
        assert child.stdout
        tree = Tree(child.pid)
        before = tree.cpu_s()
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        whole, first = (now - then for now, then in zip(tree.cpu_s(), before, strict=True))
        child.stdin.close()

    assert whole >= 0.1 + 0.05 - 0.02, "ticks of 10 ms, of user and of kernel"
    assert 0.05 <= first < whole
