"""Faults in a cluster of real processes, under load. Each test is a row of the table that is printed at the end."""

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
import pytest
from tests.chaos.load import RECORDING, RECORDING_MODEL, Call, Load, Traffic, Verdict, judge
from tests.etcd_process import etcd_missing
from tests.integration.cluster import Cluster, Network, Service
from tests.integration.conftest import HTTP, LIMIT_S, TORCH, until

DRAIN_S = 90.0
DISK_MB = 64
_rows = pytest.StashKey[list["Row"]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-json", type=Path, help="write the table of faults there, too")
    parser.addoption("--chaos-rate", type=float, default=100.0, help="calls per second")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_rows] = []


@dataclass
class Row:
    """:param bars: what was asked, what was measured, and whether that is met"""

    fault: str
    bars: list[tuple[str, str, bool]] = field(default_factory=list)
    calls: int = 0
    rate: float = 0.0
    accepted: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    failing_s: float = 0.0
    again: int = 0
    p99_ms: float = 0.0
    wrong: list[str] = field(default_factory=list)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash[_rows]
    if not rows:
        return
    terminalreporter.section("chaos")
    lines = [("fault", "bar", "measured", "calls", "async", "failures", "over", "again", "p99", "")]
    for row in rows:
        failures = " ".join(f"{count}x{'cut' if status == '0' else status}" for status, count in row.failures.items())
        first = (
            f"{row.calls} at {row.rate:.0f}/s", str(row.accepted), failures or "none", f"{row.failing_s:.1f} s",
            str(row.again), f"{row.p99_ms:.0f} ms", "WRONG" if row.wrong else "",
        )  # fmt: skip
        bars = row.bars or [("nothing lost", "", True)]
        for at, (bar, measured, met) in enumerate(bars):
            lines.append(
                (
                    row.fault if at == 0 else "",
                    bar,
                    measured + ("" if met else " MISSED"),
                    *(first if at == 0 else ("",) * 7),
                )
            )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        terminalreporter.write_line(
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        )
    where = config.getoption("--chaos-json")
    if where is not None:
        where.write_text(json.dumps([asdict(row) for row in rows], indent=1))


@pytest.fixture(scope="module")
def network() -> Iterator[Network | None]:
    made = None if Network.missing() else Network()
    yield made
    if made is not None:
        made.close()


@pytest.fixture(scope="module")  # not for the session: an idle cluster takes processor time from all other tests
def cluster(tmp_path_factory: pytest.TempPathFactory, network: Network | None) -> Iterator[Cluster]:
    """Two of each; every test leaves it whole."""
    missing = etcd_missing()
    if missing:
        pytest.skip(missing)
    made = Cluster(tmp_path_factory.mktemp("cluster"), network=network, disk=DISK_MB if os.geteuid() == 0 else 0)
    try:
        made.start()
        deploy(made)
        yield made
        for each in made.services:
            assert "Traceback" not in each.said(), f"{each.id}: {each.said()}"
    finally:
        made.close()


TRAFFIC = (
    Traffic("hot1", 0.3), Traffic("hot2", 0.3), Traffic("cpu", 0.2), Traffic("queued", 0.15, is_async=True),
    Traffic("model", 0.05, is_async=True),
)  # fmt: skip


def deploy(cluster: Cluster) -> None:
    """One gateway gets all functions; those of the load are resident afterwards, those to be called in need are not."""
    gateway = cluster.gateways[0]
    record = {"record": str(cluster.record)}
    retry = {f"com.openfaas.retry.{key}": text for key, text in
             {"min_wait": "50ms", "max_wait": "500ms", "attempts": "1000"}.items()}  # fmt: skip
    for name in ("hot1", "hot2"):
        gateway.deploy(name, RECORDING_MODEL, TORCH, env=record, labels={"com.openfaas.scale.min": "2"})
    gateway.deploy("model", RECORDING_MODEL, TORCH, env=record, **retry)
    gateway.deploy("cpu", RECORDING, HTTP, env=record, labels={"com.openfaas.scale.min": "2"})
    gateway.deploy("queued", RECORDING, HTTP, env=record, **retry)
    for name in ("hot1", "hot2", "model", "cpu", "queued"):
        for each in cluster.gateways:
            until(lambda: each.call(f"/function/{name}", b"warm-up").status_code == 200, f"{name} answers")  # noqa: B023


class Budget:
    """Looks at what nodes promised and what their workers hold, again and again; `over` has what was too much."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="budget")
        self.over: list[str] = []
        self.samples = 0

    def __enter__(self) -> "Budget":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(0.25):
            for node in self._cluster.nodes:
                self._look_at(node)

    def _look_at(self, node: Service) -> None:
        try:
            answer = httpx.get(f"http://{node.host}:{node.status_port}/metrics", timeout=1, trust_env=False).text
        except httpx.TransportError:
            return
        found = dict(line.rsplit(" ", 1) for line in answer.splitlines() if line[:1] != "#")
        whole = 0.0
        for name, value in found.items():
            if name.startswith("gpufaas_node_memory_bytes"):
                reserved = float(found[name.replace("memory_bytes", "reserved_bytes")])
                whole += float(value)
                if reserved > float(value):
                    self.over.append(f"{node.id} promised {reserved:.0f} of {value} bytes")
        held = node.held_bytes()
        self.samples += 1
        if held > whole:
            self.over.append(f"the workers of {node.id} hold {held} of {whole:.0f} bytes")


class Chaos:
    """
    A fault under load. ``with chaos("kill a node") as it``: load runs; within, break and mend, saying `broke` and
    `mended`; then everything is judged.
    """

    def __init__(self, cluster: Cluster, fault: str, rate: float, traffic: tuple[Traffic, ...]) -> None:
        self.cluster = cluster
        self.row = Row(fault)
        self.since = self.over = 0.0
        self._began = 0.0
        self.load = Load([(each.host, each.port) for each in cluster.gateways], traffic, rate, cluster.host)
        self.budget = Budget(cluster)
        self.may_fail = True

    def broke(self) -> float:
        """Something is broken from now on."""
        self.since = self.since or time.monotonic()
        return self.since

    def mended(self, grace_s: float = 0.0) -> None:
        """Calls that begin *grace_s* from now must succeed."""
        self.over = time.monotonic() + grace_s

    def bar(self, name: str, limit_s: float, measured_s: float) -> None:
        self.row.bars.append((f"{name}: {limit_s:g} s", f"{measured_s:.2f} s", measured_s <= limit_s))

    def claim(self, name: str, met: bool, measured: str = "") -> None:
        self.row.bars.append((name, measured or ("yes" if met else "no"), met))

    def failed(self, function: str = "", since: float = 0.0) -> list[Call]:
        """Return synchronous calls that failed so far."""
        return [
            each for each in self.load.calls
            if not each.wanted_async and each.status not in (-1, 200) and each.function.startswith(function)
            and each.began >= since
        ]  # fmt: skip

    def run_on(self, seconds: float) -> None:
        """Let the load go on for so long: what is measured is what happens meanwhile."""
        time.sleep(seconds)

    def __enter__(self) -> "Chaos":
        self.budget.__enter__()
        self.load.__enter__()
        self._began = time.monotonic()
        self.run_on(2.0)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.load.__exit__()
            self.budget.__exit__()
            return
        self.run_on(3.0)
        sent_s = time.monotonic() - self._began
        self.load.stop(DRAIN_S)
        self.budget.__exit__()
        verdict = judge(self.load, self.cluster.record, self.since, self.over)
        self._note(verdict, sent_s)
        self.cluster.wait_agreed()
        assert not self.row.wrong, "\n".join(self.row.wrong[:8]) + f"\n{verdict.texts.most_common(8)}"
        assert all(met for _, _, met in self.row.bars), self.row.bars
        assert self.budget.samples

    def _note(self, verdict: Verdict, sent_s: float) -> None:
        row = self.row
        row.calls, row.accepted, row.again = verdict.calls, verdict.accepted, verdict.again
        row.rate = verdict.calls / sent_s
        row.failures = {str(status): count for status, count in sorted(verdict.failures.items())}
        row.failing_s, row.p99_ms = verdict.span_s, verdict.p99_s * 1e3
        row.wrong = verdict.wrong + self.budget.over
        for text, count in verdict.texts.most_common(6):
            print(f"    {count}x {text}")
        for each in row.wrong[:20]:
            print(f"    WRONG {each}")


@pytest.fixture
def chaos(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Callable[..., Chaos]]:
    def begin(fault: str, traffic: tuple[Traffic, ...] = TRAFFIC, most: float = math.inf) -> Chaos:
        made = Chaos(cluster, fault, min(most, request.config.getoption("--chaos-rate")), traffic)
        request.config.stash[_rows].append(made.row)
        return made

    yield begin
    # Whatever a failed test has left: the next one gets a whole cluster.
    if cluster.network is not None:
        for number in range(1, len(cluster.nodes) + 1):
            cluster.network.mend(number)
    with_etcd = cluster.etcd
    if with_etcd._process is None:
        with_etcd.start()
    with_etcd.resume()
    for each in cluster.services:
        if each.runs:
            each.resume()
        else:
            each.start(wait=False)
    for each in cluster.services:
        each.wait_ready()
    until(cluster.whole, "every gateway sees every node", 2 * LIMIT_S)
