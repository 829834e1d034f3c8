"""Devices with a number of cores: how much CPU time functions get that share one, seen from outside."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from tests.integration.conftest import Platform

BUSY = """
    import time

    def load(device):
        return None

    def handle(model, event, context):
        until = time.monotonic() + float(event.text)
        while time.monotonic() < until:
            pass
        return "done"
"""
MEASURED_S = 2.0
TRIES = 5


@pytest.fixture
def platform(make_platform: Callable[..., Platform]) -> Iterator[Platform]:
    running = make_platform("--device", "cpu:0=400MiB,cores=0.6").start()
    yield running
    assert running.stop() == 0


def used(platform: Platform, functions: list[str]) -> dict[str, float]:
    """Return the cores that each function's worker uses while all are called without a pause."""
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(platform.call, f"/function/{each}", str(MEASURED_S + 1).encode()) for each in functions]
        time.sleep(0.5)
        workers = {name: next(each for each in platform.workers() if name in each.name()) for name in functions}
        before, began = {name: cpu_s(each) for name, each in workers.items()}, time.monotonic()
        time.sleep(MEASURED_S)
        took = time.monotonic() - began
        found = {name: (cpu_s(each) - before[name]) / took for name, each in workers.items()}
        assert [each.result().text for each in calls] == ["done"] * len(calls)
    return found


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@pytest.mark.slow
def test_two_halves_of_a_device_are_halves_and_no_more(platform: Platform) -> None:
    """The bar: each between 0.45 and 0.55 of what both use together."""
    labels = platform.status()["devices"][0]["device"]["labels"]
    if labels["compute.enforcement"] != "cpu-quota":
        pytest.skip("no control groups with CPU time can be made here")
    assert labels["device.cores"] == "0.6"
    for name in ("one", "two"):
        platform.call(platform.deploy(name, BUSY, sharing="share", compute="50"), b"0")

    assert platform.call("/function/one", b"0").headers["x-gpufaas-share"] == "50"
    assert platform.status()["devices"][0]["reserved"] == 100

    alone = used(platform, ["one"])["one"]
    for _ in range(TRIES):  # where other work takes the cores, nothing is shared
        both = used(platform, ["one", "two"])
        if sum(both.values()) > 0.5:
            break

    assert alone <= 0.36, "also alone it gets its half only"
    assert sum(both.values()) <= 0.7
    assert 0.45 <= both["one"] / sum(both.values()) <= 0.55
