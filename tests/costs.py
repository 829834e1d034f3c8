"""
What a test may cost, by its markers, and which worker of pytest-xdist it runs on.

A test that takes longer than its marker allows is listed at the end of the run. With ``--fail-slow``, as in CI, one
that took `GENEROUS` times as long fails the run: a busy machine is slower, but not so much.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

LIMITS_S = {"chaos": 600.0, "long": 240.0, "slow": 60.0, "property": 20.0, "platform": 10.0, "": 2.0}
"""By marker, the most expensive first; without any: 2 s."""
GENEROUS = 5.0
PLATFORM = {"adapters", "chaos", "charts", "contract", "examples", "integration", "soak"}
"""Folders whose tests start processes (of the platform, etcd, Helm) or build functions: marked ``platform``."""
GROUPS = {
    "docker": ("test_containers", "test_images", "test_image_template", "test_http_worker"),
    "time": ("incidents", "test_cgroups", "test_platform", "test_local_run"),
}
"""Files and folders whose tests must not run beside each other: they share Docker's images and networks, or the control
groups, or measure processor time and moments. All others run file by file."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fail-slow", action="store_true", help="fail if a test took much longer than its marker allows")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs(config.getoption("--fail-slow")), "costs")
    if config.getoption("dist", default="no") == "loadgroup":
        config.pluginmanager.register(Grouped(), "grouped")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = config.getoption("-m")
    for item in items:
        path = item.path.relative_to(config.rootpath)
        if path.parts[1] in PLATFORM:
            item.add_marker(pytest.mark.platform)
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.property)
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(_group(path)))
        if item.get_closest_marker("chaos") and "chaos" not in chosen:
            item.add_marker(pytest.mark.skip(reason="takes minutes: make chaos, make chaos-async"))
        if item.get_closest_marker("long") and "long" not in chosen and os.environ.get("GPUFAAS_TESTS") != "all":
            item.add_marker(pytest.mark.skip(reason="one of many that take minutes together: make test-all"))


def _group(path: Path) -> str:
    for name, members in GROUPS.items():
        if path.stem in members or any(part in members for part in path.parts):
            return name
    return str(path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    marker = next(each for each in LIMITS_S if not each or item.get_closest_marker(each))
    report.user_properties = [*report.user_properties, ("cost", marker)]  # the controller of pytest-xdist reads it
    return report


class Grouped:
    """Ends a run in which tests of one group are not kept together: pytest-xdist 3.8 does so with pytest 9.2."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "@" not in report.nodeid.rpartition("]")[2]:  # pytest-xdist adds the group to the name
            pytest.exit("this pytest-xdist does not keep groups of tests together: make clean, then make setup", 4)


class Costs:
    """Compares what tests took with what they may; with pytest-xdist this is where the reports of all workers come."""

    def __init__(self, fail: bool) -> None:
        self._fail = fail
        self._slow: list[tuple[float, str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        marker = dict(report.user_properties).get("cost", "")
        if report.when == "call" and report.duration > LIMITS_S[str(marker)]:
            self._slow.append((report.duration, str(marker), report.nodeid))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._fail and self._far_over() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._slow:
            return
        terminalreporter.section("longer than their marker allows (tests/costs.py)")
        for took, marker, name in sorted(self._slow, reverse=True):
            limit = f"{LIMITS_S[marker]:g} s{f' with marker {marker}' if marker else ''}"
            terminalreporter.write_line(f"{took:6.1f} s, may take {limit}: {name}")
        if self._fail and (over := self._far_over()):
            terminalreporter.write_line(f"{over} took over {GENEROUS:g} times as long: mark them, or make them faster")

    def _far_over(self) -> int:
        return sum(took > GENEROUS * LIMITS_S[marker] for took, marker, _ in self._slow)
