"""Several gateway processes on one port, as callers and operators meet them (`gpufaas gateway --gateway-workers`)."""

import contextlib
import os
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from tests.etcd_process import etcd_missing, free_port
from tests.integration.cluster import Cluster, Gateway
from tests.integration.conftest import ECHO, GATED, HTTP, LIMIT_S, lives, until

pytestmark = [
    pytest.mark.skipif(bool(etcd_missing()), reason=etcd_missing() or "-"),
    pytest.mark.timeout(180),
]
PROCESSES, CALLS = 2, 16
NAMES = [f"g1-{number}" for number in range(1, PROCESSES + 1)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("cluster"), schedulers=1, nodes=1, gateways=1)
    gateway = made.gateways[0]
    gateway.arguments += ["--gateway-workers", str(PROCESSES)]
    gateway.prefix = ["setsid"]  # a process group of its own, as a terminal gives it one
    gateway.status_port = _ports(PROCESSES + 1)
    gateway.http.base_url = httpx.URL(f"http://{gateway.host}:{gateway.status_port}")
    try:
        made.start()
        gateway.deploy("echo", ECHO, HTTP)
        gateway.deploy("gated", GATED, HTTP, slots=str(CALLS))
        yield made
    finally:
        made.close()


@pytest.fixture
def gateway(cluster: Cluster) -> Gateway:
    """All its processes serve."""
    gateway = cluster.gateways[0]
    if not gateway.runs:
        gateway.start()
    until(lambda: _listening(gateway) == PROCESSES, lambda: f"all processes listen; it says: {gateway.said()[-2000:]}")
    return gateway


def _ports(count: int) -> int:
    """Return the first of so many free ports in a row."""
    while True:
        first = free_port()
        try:
            for port in range(first + 1, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first


def _listening(gateway: Gateway) -> int:
    """Return how many processes of *gateway* take connections at its port."""
    return sum(gateway.port in _open_ports(process) for process in gateway.tree())


def _open_ports(process: psutil.Process) -> set[int]:
    """Return the ports that *process* takes connections at; none if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return {each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
    return set()


def _process(gateway: Gateway, name: str) -> psutil.Process:
    """Return the process that has the status port of gateway *name*."""
    port = gateway.status_port + int(name.rpartition("-")[2])
    found = [process for process in gateway.tree() if port in _open_ports(process)]
    assert len(found) == 1, found
    return found[0]


def _by_process(gateway: Gateway, metric: str, function: str) -> dict[str, float]:
    """Return the sum of *metric* of *function* by process, as the status port says it."""
    found = dict.fromkeys(NAMES, 0.0)
    for name, value in gateway.metrics().items():
        if name.startswith(metric + "{") and f'function_name="{function}.openfaas-fn"' in name:
            process = re.search(r'process="([^"]+)"', name)
            assert process, name
            found[process[1]] += value
    return found


def _called(gateway: Gateway, path: str, body: bytes) -> int:
    """Call over a connection of its own; return the status, 0 if the connection broke."""
    try:
        return httpx.post(gateway.url + path, content=body, timeout=LIMIT_S, trust_env=False).status_code
    except httpx.TransportError:
        return 0


def _held(gateway: Gateway, pool: ThreadPoolExecutor, gate: Path) -> list[Future[int]]:
    """Begin calls that end when the file *gate* is there; return when all run."""
    body = str(gate).encode()
    calls = [pool.submit(_called, gateway, "/function/gated", body) for _ in range(CALLS)]
    until(lambda: sum(_by_process(gateway, "gateway_function_invocation_inflight", "gated").values()) == CALLS)
    until(lambda: Path(f"{gate}.began").exists())
    return calls


def test_calls_reach_all_processes_and_each_counts_its_own(gateway: Gateway) -> None:
    def counted() -> list[float]:
        after = _by_process(gateway, "gateway_function_invocation_total", "echo")
        return [after[name] - before[name] for name in NAMES]

    before = _by_process(gateway, "gateway_function_invocation_total", "echo")

    for _ in range(60):
        assert _called(gateway, "/function/echo", b"x") == 200

    until(lambda: sum(counted()) == 60)
    assert min(counted()) > 0, counted()


def test_metrics_are_the_same_whichever_process_is_asked(gateway: Gateway) -> None:
    texts = [httpx.get(f"{gateway.url}/metrics", trust_env=False).text for _ in range(20)]

    for text in texts:
        series = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
        assert len(series) == len(set(series)), "no series is there twice"
        families = re.findall("^# TYPE (\\S+)", text, re.MULTILINE)
        assert len(families) == len(set(families)), "no family is there twice"
        for name in NAMES:
            assert f'gateway_function_invocation_started{{process="{name}",function_name="echo.openfaas-fn"}}' in text
        assert 'gpufaas_device_memory_bytes{device="n1/cpu:0"}' in text, "what is the same in all is there once"


def test_kill_9_of_one_process_loses_its_own_calls_only(gateway: Gateway, open_path: Path) -> None:
    gate, killed = open_path / "gate", _process(gateway, NAMES[0])
    with ThreadPoolExecutor(CALLS) as pool:
        calls = _held(gateway, pool, gate)
        its = int(_by_process(gateway, "gateway_function_invocation_inflight", "gated")[NAMES[0]])

        killed.kill()
        until(lambda: not killed.is_running(), "it is reaped: a zombie may have threads yet that hold its socket open")
        others = [_called(gateway, "/function/echo", b"x") for _ in range(20)]  # nobody waits for the dead one
        gate.touch()
        statuses = [each.result() for each in calls]

    assert others == [200] * 20
    assert (statuses.count(0), statuses.count(200)) == (its, CALLS - its)
    until(lambda: f"gateway.process_ended id={NAMES[0]} pid={killed.pid} killed by SIGKILL" in gateway.said())
    until(lambda: _listening(gateway) == PROCESSES, "it is started again")
    assert [_called(gateway, "/function/echo", b"x") for _ in range(20)] == [200] * 20, (
        "it opened knowing all functions"
    )
    starts = {name: gateway.metrics()[f'gpufaas_gateway_process_starts_total{{process="{name}"}}'] for name in NAMES}
    assert starts == {NAMES[0]: 2, NAMES[1]: 1}
    assert gateway.readiness() == (200, "ready")


def test_a_second_gateway_on_the_port_is_refused_in_one_line(gateway: Gateway, cluster: Cluster) -> None:
    other = Gateway(cluster, "g2", gateway.host, ("--auth", "off", "--gateway-workers", "2"))
    other.arguments[other.arguments.index("--port") + 1] = str(gateway.port)
    other.start(wait=False)

    assert other.end() == 1
    assert f"cannot listen on {gateway.host}:{gateway.port}" in other.said()
    assert "Traceback" not in other.said()
    other.close()


def test_a_process_that_cannot_start_ends_all_with_its_reason(gateway: Gateway, cluster: Cluster) -> None:
    other = Gateway(cluster, "g3", gateway.host, ("--auth", "off", "--gateway-workers", "2"))
    other.status_port = _ports(3)
    with socket.socket() as taken:
        taken.bind((gateway.host, other.status_port + 2))
        taken.listen()
        other.start(wait=False)

        assert other.end() == 1
    assert f"cannot listen on {gateway.host}:{other.status_port + 2}" in other.said()
    assert "gateway process g3-2 cannot be started (with status 1): its reason is above" in other.said()
    assert "Traceback" not in other.said()
    other.close()


def test_processes_without_status_ports_are_refused_in_one_line(gateway: Gateway, cluster: Cluster) -> None:
    other = Gateway(cluster, "g4", gateway.host, ("--auth", "off", "--gateway-workers", "2"))
    other.status_port = 65_535
    other.start(wait=False)

    assert other.end() == 1
    assert "there is no port 65537 for the status of process 2" in other.said()
    assert "Traceback" not in other.said()
    other.close()


def test_ctrl_c_reaches_the_processes_once_however_slow_their_parent_is(gateway: Gateway, open_path: Path) -> None:
    gate = open_path / "gate"
    with ThreadPoolExecutor(CALLS) as pool:
        calls = _held(gateway, pool, gate)

        gateway.pause()
        os.killpg(gateway.pid, signal.SIGINT)
        assert [_called(gateway, "/function/echo", b"x") for _ in range(20)] == [200] * 20, "they hear of it by him"
        gateway.resume()
        until(lambda: _listening(gateway) == 0, "no new connections are taken")
        gate.touch()

        assert [each.result() for each in calls] == [200] * CALLS
    assert gateway.end() == 0, gateway.said()[-2000:]


def test_a_stop_lets_the_calls_of_all_processes_end(gateway: Gateway, open_path: Path) -> None:
    gate, processes = open_path / "gate", gateway.tree()
    with ThreadPoolExecutor(CALLS) as pool:
        calls = _held(gateway, pool, gate)

        gateway.signal(signal.SIGTERM)
        until(lambda: _listening(gateway) == 0, "no new connections are taken")
        assert _called(gateway, "/function/echo", b"x") == 0
        assert sum(_by_process(gateway, "gateway_function_invocation_inflight", "gated").values()) == CALLS
        gate.touch()

        assert [each.result() for each in calls] == [200] * CALLS
    assert gateway.end() == 0, gateway.said()[-2000:]
    assert "Traceback" not in gateway.said()
    assert not any(map(lives, processes))
