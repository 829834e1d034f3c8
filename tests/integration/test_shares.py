"""Devices with a number of cores: what the kernel lets functions have that share one; that it does: test_cgroups."""

from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.integration.conftest import ECHO_MODEL, Platform


@pytest.fixture
def platform(make_platform: Callable[..., Platform]) -> Iterator[Platform]:
    running = make_platform("--device", "cpu:0=400MiB,cores=0.6").start()
    yield running
    assert running.stop() == 0


def group_of(process: psutil.Process) -> Path:
    """Return the folder of its control group that limits CPU time, of version 1 or else 2."""
    lines = Path(f"/proc/{process.pid}/cgroup").read_text().splitlines()
    paths = {line.split(":", 2)[1]: line.split(":", 2)[2] for line in lines}
    first = next((each for each in paths if "cpu" in each.split(",")), "")
    mount, parts = Path("/sys/fs/cgroup", "cpu" if first else ""), Path(paths[first]).parts[1:]
    # A container may see only its own part of the tree.
    folders = (mount.joinpath(*parts[cut:]) for cut in range(len(parts)))
    return next(each for each in folders if each.is_dir())


def cores(group: Path) -> float:
    if (group / "cpu.max").exists():
        quota, period = (group / "cpu.max").read_text().split()
    else:
        quota, period = ((group / f"cpu.cfs_{each}_us").read_text() for each in ("quota", "period"))
    return float(quota) / float(period)


def test_two_halves_of_a_device_are_halves_and_no_more(platform: Platform) -> None:
    labels = platform.status()["devices"][0]["device"]["labels"]
    if labels["compute.enforcement"] != "cpu-quota":
        pytest.skip("no control groups with CPU time can be made here")
    assert labels["device.cores"] == "0.6"
    paths = [platform.deploy(name, ECHO_MODEL, sharing="share", compute="50") for name in ("one", "two")]
    for path in paths:
        assert platform.call(path).headers["x-gpufaas-share"] == "50"
    assert platform.status()["devices"][0]["reserved"] == 100

    groups = [group_of(next(each for each in platform.workers() if name in each.name())) for name in ("one", "two")]
    assert [cores(each) for each in groups] == pytest.approx([0.3, 0.3])
    assert groups[0].parent == groups[1].parent
    assert cores(groups[0].parent) == pytest.approx(0.6)
