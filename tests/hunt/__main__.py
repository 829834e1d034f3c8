"""
Hunt for tests that do not hold.

Runs each integration test several times in each of four settings: on the machine as it is (quiet), pinned to one core
(one-core), beside four busy loops (busy), and in random order (shuffled). What fails is then run 50 times by itself in
its setting. A hunt that was stopped goes on where it was. A test runs again once its file has changed; one that failed,
once anything has. Results and pytest's output are in .hunt/. Exits with 1 while anything fails, with 2 if pytest could
not run, with 130 after Ctrl-C.
"""

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from tests.hunt.book import SETTINGS, Batch, Book, Result, file_of
from tests.hunt.watch import ONLY, SAID

HOME: Final = Path(".hunt")
TESTS: Final = ("tests/integration", "tests/adapters", "tests/contract")
LOOPS: Final = 4
"""Busy loops beside the tests."""
_ENDS_S: Final = 30.0
"""A pytest that has taken longer than this since Ctrl-C is killed."""
_COLUMNS: Final = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TextColumn("{task.fields[failed]}"),
    TimeElapsedColumn(),
)


class NotRun(Exception):
    """Pytest ran no test, or ended with an error of its own; or there is no git that names the sources."""


def main() -> int:
    options = _options()
    console = Console()
    HOME.mkdir(exist_ok=True)
    if options.fresh:
        (HOME / "results.jsonl").unlink(missing_ok=True)
    try:
        tests, sources = collected(options.tests), tree()
    except NotRun as exc:
        console.print(str(exc), style="red", markup=False, highlight=False)
        return 2
    digests = {each: hashlib.sha256(Path(each).read_bytes()).hexdigest()[:8] for each in {*map(file_of, tests)}}
    book = Book.open(HOME / "results.jsonl", sources, digests)
    hunt = Hunt(book, options.workers, console)
    try:
        batches = book.rounds(tests, options.setting, options.times)
        left = sum(len(each.tests) for each in batches)
        console.print(
            f"{len(tests)} tests, {options.times} times in each of {', '.join(options.setting)}: {left} runs are left"
        )
        while batches:  # again if a process of pytest-xdist has crashed, which ends a run
            hunt.run(batches)
            batches = book.rounds(tests, options.setting, options.times)
        hunt.run(book.again(tests, options.setting, options.again))
    except KeyboardInterrupt:
        console.print("stopped: the next one goes on from here")
        show(console, book)
        return 130
    except NotRun as exc:
        console.print(str(exc), style="red", markup=False, highlight=False)
        return 2
    return show(console, book)


def _options() -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tests.hunt", description=__doc__, formatter_class=form)
    parser.add_argument("tests", nargs="*", default=TESTS, help=f"files or folders [{' '.join(TESTS)}]")
    parser.add_argument("--times", type=int, default=3, help="how often each test runs in each setting [3]")
    parser.add_argument("--again", type=int, default=50, help="how often what failed runs by itself [50]")
    parser.add_argument("--setting", action="append", choices=SETTINGS, help="only this one; repeatable [all]")
    parser.add_argument("--workers", type=int, default=2, help="processes that run tests [2]")
    parser.add_argument("--fresh", action="store_true", help="forget what was seen before")
    options = parser.parse_args()
    options.setting = options.setting or list(SETTINGS)
    return options


def tree() -> str:
    """
    Return a name for the state of the sources: the commit's tree, and a digest of what was changed since.

    :raises NotRun: git does not tell
    """
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD^{tree}"], capture_output=True, text=True, check=True).stdout
        changes = subprocess.run(["git", "diff", "HEAD"], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as exc:
        raise NotRun(f"git does not tell which sources these are: {exc}") from exc
    return commit[:12] + (f"+{hashlib.sha256(changes).hexdigest()[:8]}" if changes else "")


def collected(paths: Sequence[str]) -> list[str]:
    """Return the names of the tests in *paths*. :raises NotRun: there are none"""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if "::" in line]
    if done.returncode or not found:
        raise NotRun(f"no tests were collected:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return found


class Hunt:
    """Runs batches of tests, and notes what became of them."""

    def __init__(self, book: Book, workers: int, console: Console) -> None:
        self._book = book
        self._workers = workers
        self._console = console

    def run(self, batches: Sequence[Batch]) -> None:
        """Run *batches* one after the other. :raises NotRun: pytest could not"""
        bars: dict[str, TaskID] = {}
        with Progress(*_COLUMNS, console=self._console) as bar:
            for number, batch in enumerate(batches):
                if batch.label not in bars:
                    left_s = self._book.estimate_s(batches[number:], self._workers)
                    self._console.print(f"about {_minutes(left_s)} are left")
                    total = sum(len(each.tests) for each in batches if each.label == batch.label)
                    bars[batch.label] = bar.add_task(escape(batch.label), total=total, failed="")
                self._run(batch, bar, bars[batch.label])

    def _run(self, batch: Batch, bar: Progress, task: TaskID) -> None:
        log = HOME / f"{batch.setting}-{batch.round}.log"
        failed = ended = 0
        tree, digests = self._book.tree, self._book.digests
        with tempfile.NamedTemporaryFile("w") as only, log.open("a") as output, setting(batch.setting) as prefix:
            json.dump(batch.tests, only)
            only.flush()
            ours, theirs = os.pipe()
            process = subprocess.Popen(
                [*prefix, *self._command(batch)], stdout=output, stderr=output, stdin=subprocess.DEVNULL,
                pass_fds=[theirs], env=os.environ | {ONLY: only.name, SAID: str(theirs)},
            )  # fmt: skip
            os.close(theirs)
            try:
                with open(ours) as lines:
                    for line in lines:
                        test, outcome, took_s = json.loads(line)
                        digest = digests[file_of(test)]
                        self._book.add(Result(batch.setting, batch.round, test, outcome, took_s, tree, digest))
                        ended += 1
                        failed += outcome == "failed"
                        bar.advance(task)
                        if outcome == "failed":
                            bar.update(task, failed=f"[red]{failed} failed")
                            bar.console.print(f"[red]failed[/red] {batch.setting}: {escape(test)}")
                status = process.wait()
            except KeyboardInterrupt:  # pytest has it, too: its fixtures end what they have started
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_ENDS_S)
                process.kill()
                raise
        if status not in (0, 1) or not ended:
            raise NotRun(f"pytest ran {ended} of {len(batch.tests)} tests, and ended with {status}: see {log}")

    def _command(self, batch: Batch) -> list[str]:
        files = sorted({*map(file_of, batch.tests)})
        command = [sys.executable, "-m", "pytest", "-p", "tests.hunt.watch", "-q", *files]
        command += ["-n", str(min(self._workers, len(batch.tests))), "--dist", "loadgroup", "--no-loadscope-reorder"]
        command += ["--max-worker-restart=0"]  # with another process in its place, pytest-xdist 3.8 may wait for ever
        if batch.setting == "shuffled":
            command += ["--random-order-bucket=module", f"--random-order-seed={time.time_ns() % 100_000}"]
        return command


@contextlib.contextmanager
def setting(name: str) -> Iterator[list[str]]:
    """Make the machine as the setting *name* says; yield the program that starts what is to run in it."""
    busy = [sys.executable, "-c", f"import os\nwhile os.getppid() == {os.getpid()}: pass"]  # not longer than this one
    loops = [subprocess.Popen(busy, stderr=subprocess.DEVNULL) for _ in range(LOOPS)] if name == "busy" else []
    try:
        yield ["taskset", "-c", str(min(os.sched_getaffinity(0)))] if name == "one-core" else []
    finally:
        for each in loops:
            each.kill()
            each.wait()


def show(console: Console, book: Book) -> int:
    """Show what ever failed; return 1 while something fails on this tree, else 0."""
    suspects = book.suspects()
    runs = sum(each.outcome != "skipped" for each in book.results)
    console.print(f"{runs} runs, {sum(each.failed for each in suspects)} failed")
    if suspects:
        table = Table("setting", Column("test", overflow="fold"), "failed, ever", "failed, on this tree")
        for each in suspects:
            table.add_row(each.setting, escape(each.test), f"{each.failed} of {each.runs}", str(each.failed_now or ""))
        console.print(table)
    return 1 if any(each.failed_now for each in suspects) else 0


def _minutes(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


if __name__ == "__main__":
    sys.exit(main())
