"""`make demo`, as a new user runs it, without setting up an environment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def test_the_demo_shows_right_answers_evictions_and_budgets_that_hold(tmp_path: Path) -> None:
    home = tmp_path / "demo"

    done = subprocess.run(
        [sys.executable, "-m", "demo"], cwd=ROOT, env={**os.environ, "DEMO_HOME": str(home)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert "every answer was right, models were evicted and reloaded, no budget was exceeded" in done.stdout
    assert not home.exists(), "it leaves nothing behind"
