"""What a hunt has seen, and what of it is left to run. No process is started here."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

SETTINGS: Final = ("quiet", "one-core", "busy", "shuffled")
AGAIN: Final = "again"
"""The round of a test that failed once, and is run by itself."""
_SLOWER: Final = {"quiet": 1.0, "one-core": 2.0, "busy": 2.0, "shuffled": 1.0}
"""How much longer a round takes than in quiet, where no round of that setting was seen: measured on two cores."""
_TEST_S: Final = 0.6
"""Work in a test, in the mean, where none was seen."""


@dataclass(frozen=True)
class Result:
    """One run of one test."""

    setting: str
    round: str
    """``1``, ``2``, ..., or `AGAIN`."""
    test: str
    outcome: str
    """``passed``, ``failed`` or ``skipped``."""
    took_s: float
    tree: str
    """The state of the sources that it tested."""
    file: str = ""
    """A digest of the test's own file."""

    @property
    def failed(self) -> bool:
        return self.outcome == "failed"


@dataclass(frozen=True)
class Batch:
    """Tests that one pytest runs."""

    setting: str
    round: str
    tests: tuple[str, ...]

    @property
    def label(self) -> str:
        return f"{self.setting}, {self.tests[0] if self.round == AGAIN else f'round {self.round}'}"


@dataclass(frozen=True)
class Suspect:
    """A test that has failed in a setting."""

    test: str
    setting: str
    failed: int
    runs: int
    """Of this tree and of earlier ones."""
    failed_now: int
    """How many of the runs on this tree failed."""
    again: int
    """How often it was run by itself, on this tree."""


class Book:
    """
    All results of a hunt, of this tree and of earlier ones, kept in a file.

    A run that passed counts until the test's own file changes; one that failed, until anything changes. Then the test
    runs again.
    """

    def __init__(
        self, tree: str, results: Iterable[Result] = (), file: Path | None = None, digests: Mapping[str, str] = {}
    ) -> None:
        """:param digests: of the files of tests, as they are now"""
        self.tree = tree
        self.digests = digests
        self.results = list(results)
        self._file = file

    @classmethod
    def open(cls, file: Path, tree: str, digests: Mapping[str, str] = {}) -> "Book":
        lines = file.read_text().splitlines() if file.exists() else []
        return cls(tree, (Result(**json.loads(line)) for line in lines), file, digests)

    def add(self, result: Result) -> None:
        self.results.append(result)
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")

    def rounds(self, tests: Sequence[str], settings: Sequence[str], times: int) -> list[Batch]:
        """Return what is left of *times* rounds of *tests* in each of *settings*; round by round, not by setting."""
        done = {(each.setting, each.round, each.test) for each in self.results if self._counts(each)}
        batches = []
        for number in map(str, range(1, times + 1)):
            for setting in settings:
                left = tuple(each for each in tests if (setting, number, each) not in done)
                if left:
                    batches.append(Batch(setting, number, left))
        return batches

    def again(self, tests: Sequence[str], settings: Sequence[str], times: int) -> list[Batch]:
        """Return, for all suspects among *tests*, what is left of *times* runs by themselves on this tree."""
        return [
            Batch(each.setting, AGAIN, (each.test,))
            for each in self.suspects()
            if each.test in set(tests) and each.setting in settings
            for _ in range(times - each.again)
        ]

    def suspects(self) -> list[Suspect]:
        """Return all that ever failed, worst first."""
        runs: dict[tuple[str, str], list[Result]] = defaultdict(list)
        for each in self.results:
            if each.outcome != "skipped":
                runs[each.test, each.setting].append(each)
        found = []
        for (test, setting), results in runs.items():
            if failed := sum(each.failed for each in results):
                now = [each for each in results if each.tree == self.tree]
                again = sum(each.round == AGAIN for each in now)
                found.append(Suspect(test, setting, failed, len(results), sum(each.failed for each in now), again))
        return sorted(found, key=lambda each: (-each.failed_now, -each.failed, each.test, each.setting))

    def estimate_s(self, batches: Iterable[Batch], workers: int) -> float:
        """Return about how long *batches* take in *workers* processes, by what each test took in that setting."""
        seen: dict[tuple[str, str], float] = {(each.setting, each.test): each.took_s for each in self.results}
        guess = _mean(self.results, lambda each: each.setting == "quiet") or _TEST_S
        total = 0.0
        for batch in batches:
            usual = _mean(self.results, lambda each, setting=batch.setting: each.setting == setting)
            usual = usual or guess * _SLOWER[batch.setting]
            took_s = sum(seen.get((batch.setting, each), usual) for each in batch.tests)
            total += took_s / min(workers, len(batch.tests))
        return total

    def _counts(self, result: Result) -> bool:
        same = result.file == self.digests.get(file_of(result.test), "")  # a file that git does not know is in no tree
        return same and (not result.failed or result.tree == self.tree)


def file_of(test: str) -> str:
    return test.partition("::")[0]


def _mean(results: Iterable[Result], chosen: Callable[[Result], bool]) -> float:
    took = [each.took_s for each in results if chosen(each)]
    return sum(took) / len(took) if took else 0.0
