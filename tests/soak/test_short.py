"""The soak for twenty seconds; ``make soak`` is twenty minutes of it."""

from pathlib import Path

import pytest
from tests.etcd_process import etcd_missing
from tests.soak.soak import Soak

NEEDS_ETCD = pytest.mark.skipif(bool(etcd_missing()), reason=etcd_missing() or "-")


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("cluster", [False, pytest.param(True, marks=NEEDS_ETCD)])
def test_nothing_is_lost_wrong_or_stuck(tmp_path: Path, cluster: bool) -> None:
    report = Soak(tmp_path, 20.0, cluster=cluster).run()

    assert report.violations == []
    assert report.faults
    assert report.updates
