"""Solvers of the tests, installed as `pip install` does: each answers, or fails, in its own way."""

import sys
from pathlib import Path
from typing import Final

import pytest

SOURCE: Final = '''
"""Solvers of the tests."""

import os
import sys
import time

from gpufaas_core.model import Replica, name_of
from gpufaas_core.plans import Answer
from gpufaas_scheduler.plans.problem import BadProblem


class spread:
    def solve(snapshot):
        """Pinned replicas stay. Each other function is on one device, in turn."""
        pinned = [each for each in (snapshot.plan.replicas if snapshot.plan else ()) if each.pinned]
        names = sorted({name_of(each.id) for each in snapshot.functions} - {each.function for each in pinned})
        devices = sorted(each.id for each in snapshot.devices)
        rest = [Replica(name, devices[at % len(devices)]) for at, name in enumerate(names)]
        return Answer((*pinned, *rest), {"calls_per_s": sum(snapshot.rates.values())})


class gathers:
    def solve(snapshot):
        """All functions are on the last device."""
        last = max(each.id for each in snapshot.devices)
        return Answer(tuple(Replica(each, last) for each in sorted({name_of(each.id) for each in snapshot.functions})))


class forgets_pins:
    def solve(snapshot):
        return Answer(())


class hangs:
    def solve(snapshot):
        time.sleep(3600)


class dies:
    def solve(snapshot):
        os.kill(os.getpid(), 9)


class raises:
    def solve(snapshot):
        raise ZeroDivisionError("of the solver")


class cannot:
    def solve(snapshot):
        raise BadProblem("no model has a profile")


class babbles:
    def solve(snapshot):
        sys.stdout.write("Presolving model\\n")
        return Answer(())


class hoards:
    def solve(snapshot):
        """Takes half of the memory of the machine, and touches none of it."""
        kept = bytearray(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
        return Answer(())
'''


def install_solvers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install them below *folder*, for this process and for those that it starts."""
    (folder / "solvers_of_tests.py").write_text(SOURCE)
    names = [line[6:-1] for line in SOURCE.splitlines() if line.startswith("class ")]
    metadata = folder / "solvers_of_tests-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: solvers-of-tests\nVersion: 1\n")
    entries = "".join(f"{name} = solvers_of_tests:{name}\n" for name in names)
    (metadata / "entry_points.txt").write_text(f"[gpufaas.solvers]\n{entries}")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "solvers_of_tests", raising=False)
