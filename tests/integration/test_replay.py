"""A workload replayed on the real platform, and what its journal says of it afterwards."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.integration.conftest import ECHO_MODEL, Platform

from gpufaas_cli.main import cli

Make = Callable[..., Platform]

FAILS_ON_BAD = """
    def load(device):
        return None

    def handle(model, event, context):
        raise ValueError("bad")
"""


@pytest.fixture
def journaled(make_platform: Make, tmp_path: Path) -> tuple[Platform, Path]:
    """Two small devices, and every event of the scheduler in a file."""
    journal = tmp_path / "events.jsonl"
    devices = ("--device", "cpu:0=200MiB", "--device", "cpu:1=200MiB")
    return make_platform(*devices, "--journal", str(journal)).start(), journal


def gpufaas(*args: object) -> Result:
    return CliRunner().invoke(cli, [str(each) for each in args])


def workload(path: Path, *functions: str, calls: int) -> Path:
    cost = {"occupation_mb": 50, "load_s": 0.1, "infer_s": 0.01}
    content = {
        "devices": [{"id": "g0", "memory_mb": 200}],
        "functions": dict.fromkeys(functions, cost),
        "arrivals": [[0.05 * index, functions[index % len(functions)]] for index in range(calls)],
    }
    path.write_text(json.dumps(content))
    return path


def test_a_replay_reports_what_the_platform_did_and_the_journal_says_the_same(
    journaled: tuple[Platform, Path], tmp_path: Path
) -> None:
    platform, journal = journaled
    for name in ("one", "two"):
        platform.deploy(name, ECHO_MODEL)

    done = gpufaas(
        "replay", "--workload", workload(tmp_path / "w.json", "one", "two", calls=30), "-g", platform.url, "-j"
    )
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    platform.stop()
    asked = json.loads(gpufaas("what-if", "--journal", journal, "--add-device", "200MiB", "--json").stdout)

    assert (found["calls"], found["completed"], found["errors"]) == (30, 30, {})
    assert found["policy"] == asked["recorded"]["policy"]
    assert found["misses"] == asked["recorded"]["misses"] >= 2
    assert sum(each["calls"] for each in found["devices"]) == 30
    assert found["latency"]["mean"] >= asked["recorded"]["latency"]["mean"] > 0
    assert asked["recorded"]["completed"] == asked["simulated"]["completed"] == asked["what_if"]["completed"] == 30
    assert len(asked["what_if"]["devices"]) == 3


def test_calls_that_fail_are_counted_and_named(journaled: tuple[Platform, Path], tmp_path: Path) -> None:
    platform, _ = journaled
    platform.deploy("bad", FAILS_ON_BAD)

    done = gpufaas("replay", "--workload", workload(tmp_path / "w.json", "bad", calls=4), "-g", platform.url, "-j")

    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["completed"], found["failed"]) == (0, 4)
    assert found["errors"] == {"500 Internal Server Error": 4}


def test_functions_that_are_not_deployed_are_said_before_anything_is_sent(
    journaled: tuple[Platform, Path], tmp_path: Path
) -> None:
    platform, _ = journaled

    done = gpufaas("replay", "--workload", workload(tmp_path / "w.json", "one", calls=4), "-g", platform.url)

    assert done.exit_code == 2
    assert "function one is not deployed: name deployed ones with --function" in done.stderr
