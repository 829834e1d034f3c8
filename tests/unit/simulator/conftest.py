"""Workload files and the command line, for tests of the simulator."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gpufaas_cli.main import cli


def gpufaas(*args: object) -> Result:
    result = CliRunner().invoke(cli, [str(each) for each in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def run() -> Callable[..., Result]:
    return gpufaas


@pytest.fixture
def small() -> dict[str, Any]:
    """A workload of two devices and two functions, of which one fits the first device only."""
    return {
        "devices": [{"id": "g0", "memory_mb": 7800}, {"id": "g1", "memory_mb": 3000}],
        "functions": {
            "f": {"occupation_mb": 1269, "load_s": 2.5, "infer_s": 1.25},
            "g": {"occupation_mb": 7000, "load_s": 3, "infer_s": 1},
        },
        "arrivals": [[0, "f"], [0.5, "g"], [0.5, "f"], [10, "g"], [10, "f"]],
    }


@pytest.fixture
def written(tmp_path: Path) -> Callable[[Any], Path]:
    def write(content: Any) -> Path:
        path = tmp_path / "w.json"
        path.write_text(
            content if isinstance(content, str) else json.dumps(content, indent=1), errors="surrogateescape"
        )
        return path

    return write
