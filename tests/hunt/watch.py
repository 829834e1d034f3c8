"""
A plugin of pytest for a hunt: runs the tests that the file `ONLY` names, and writes a line for each that has ended.

The line has the test, how it ended, and how long it took with its fixtures. It goes to the descriptor `SAID`.
"""

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Final

import pytest

ONLY: Final = "GPUFAAS_HUNT_ONLY"
SAID: Final = "GPUFAAS_HUNT_SAID"


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # reports of the workers of pytest-xdist come to the process above them
        config.pluginmanager.register(_Teller(int(os.environ[SAID])), "hunt-teller")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = set(json.loads(Path(os.environ[ONLY]).read_text()))
    dropped = [each for each in items if name_of(each.nodeid) not in wanted]
    items[:] = [each for each in items if name_of(each.nodeid) in wanted]
    config.hook.pytest_deselected(items=dropped)


def name_of(nodeid: str) -> str:
    """Return the name of a test without the group that pytest-xdist adds to it: ``a.py::test[x@y]@group``."""
    name, _, group = nodeid.rpartition("@")
    return name if name and "]" not in group else nodeid


class _Teller:
    """Puts the three reports of a test together."""

    def __init__(self, descriptor: int) -> None:
        self._file = open(descriptor, "w", buffering=1)  # noqa: SIM115  # open until pytest ends
        self._took: dict[str, float] = defaultdict(float)
        self._outcome: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = name_of(report.nodeid)
        self._took[test] += report.duration
        if report.outcome != "passed" and self._outcome.get(test) != "failed":
            self._outcome[test] = report.outcome
        if report.when not in ("setup", "call"):  # of a worker that has crashed there is one report only: "???"
            outcome = self._outcome.pop(test, "passed")
            print(json.dumps([test, outcome, round(self._took.pop(test), 3)]), file=self._file)
