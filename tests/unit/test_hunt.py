"""What a hunt for tests that do not hold has seen, and what of it is left to run."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.hunt.book import AGAIN, Batch, Book, Result
from tests.hunt.watch import name_of

A, B = "tests/a.py::test_a", "tests/b.py::test_b[x@y]"


def result(test: str, outcome: str = "passed", number: str = "1", setting: str = "quiet", tree: str = "now") -> Result:
    return Result(setting, number, test, outcome, 2.0, tree)


def test_each_round_has_all_settings_and_what_was_seen_does_not_run_again() -> None:
    book = Book("now", [result(A), result(B, setting="busy"), result(A, number="2", setting="busy")])

    assert book.rounds([A, B], ["quiet", "busy"], 2) == [
        Batch("quiet", "1", (B,)), Batch("busy", "1", (A,)), Batch("quiet", "2", (A, B)), Batch("busy", "2", (B,)),
    ]  # fmt: skip


def test_what_failed_runs_again_once_the_sources_have_changed() -> None:
    same = Book("now", [result(A, "failed"), result(B)])
    changed = Book("now", [result(A, "failed", tree="before"), result(B, tree="before")])

    assert same.rounds([A, B], ["quiet"], 1) == []
    assert changed.rounds([A, B], ["quiet"], 1) == [Batch("quiet", "1", (A,))]


def test_a_test_that_passed_runs_again_once_its_file_has_changed() -> None:
    passed = [replace(result(A, tree="before"), file="old"), replace(result(B, tree="before"), file="same")]
    book = Book("now", passed, digests={"tests/a.py": "new", "tests/b.py": "same"})

    assert book.rounds([A, B], ["quiet"], 1) == [Batch("quiet", "1", (A,))]


def test_what_ever_failed_is_run_by_itself_in_its_setting_on_this_tree() -> None:
    now = result(A, number=AGAIN, setting="busy")
    before = [result(A, "failed", setting="busy", tree="before"), replace(now, tree="before")]
    book = Book("now", [*before, now, result(A), result(B)])

    assert book.again([A, B], ["quiet", "busy"], 3) == [Batch("busy", AGAIN, (A,))] * 2
    (suspect,) = book.suspects()
    assert (suspect.failed, suspect.runs, suspect.failed_now, suspect.again) == (1, 3, 0, 1)


def test_a_hunt_that_was_stopped_goes_on_from_its_file(tmp_path: Path) -> None:
    Book.open(tmp_path / "results", "now").add(result(A, "failed"))
    book = Book.open(tmp_path / "results", "now")
    book.add(result(B, "skipped"))

    assert Book.open(tmp_path / "results", "now").results == [result(A, "failed"), result(B, "skipped")]


def test_the_estimate_is_by_what_was_seen_and_a_setting_that_was_not_seen_is_slower() -> None:
    book = Book("now", [result(A), result(A, setting="busy")])

    assert book.estimate_s([Batch("quiet", "1", (A, B))], workers=2) == 2.0
    assert book.estimate_s([Batch("quiet", "1", (A,))], workers=2) == 2.0
    assert book.estimate_s([Batch("one-core", "1", (A, B))], workers=2) == 4.0


@pytest.mark.parametrize("name", [A, B, "tests/c.py::test_c[x]"])
def test_the_group_of_a_test_is_no_part_of_its_name(name: str) -> None:
    assert name_of(name) == name_of(f"{name}@tests/a.py") == name_of(f"{name}@docker") == name


@pytest.mark.slow
def test_a_hunt_finds_the_test_that_does_not_hold(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_holds():\n    pass\n\n\ndef test_does_not():\n    assert False\n")
    run(tmp_path, "git", "init", "-q")
    run(tmp_path, "git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "it")

    options = ("--times=1", "--again=1", "--setting=shuffled", "test_it.py")
    done = run(tmp_path, sys.executable, "-m", "tests.hunt", *options, check=False)

    assert done.returncode == 1
    assert "2 tests, 1 times in each of shuffled: 2 runs are left" in done.stdout
    assert "3 runs, 2 failed" in done.stdout


def run(folder: Path, *command: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
    root = str(Path(__file__).parents[2])
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": root, "COLUMNS": "200"}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=check, env=environment)
