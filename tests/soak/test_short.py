"""The soak for twenty seconds; ``make soak`` is twenty minutes of it."""

from pathlib import Path

import pytest
from tests.soak.soak import Soak


@pytest.mark.long
@pytest.mark.timeout(240)
def test_nothing_is_lost_wrong_or_stuck(tmp_path: Path) -> None:
    report = Soak(tmp_path, 20.0).run()

    assert report.violations == []
    assert report.faults
    assert report.updates
