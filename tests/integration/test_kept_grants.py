"""Grants that gateways keep, in a cluster of processes: what is counted, and that none outlives what goes wrong."""

import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.etcd_process import etcd_missing
from tests.integration.cluster import Cluster, Gateway, Service
from tests.integration.conftest import HTTP, until

pytestmark = [
    pytest.mark.skipif(bool(etcd_missing()), reason=etcd_missing() or "-"),
    pytest.mark.timeout(180),
]

SOURCE = """
    import os, time

    def handle(event, context):
        what, _, path = event.text.partition(" ")
        if what == "dies":
            os._exit(3)
        if what == "waits":
            open(path + ".began", "w").close()
            until = time.monotonic() + 60
            while not os.path.exists(path) and time.monotonic() < until:
                time.sleep(0.005)
        return event.body
"""
PATH = "/function/said"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("kept"), nodes=1)
    for each in made.gateways:
        each.program = [str(Path(__file__).with_name("patient_gateway.py"))]
    try:
        yield made.start()
        for each in made.services:
            assert each.stop() == 0, f"{each.id} stops in peace: {each.said()[-2000:]}"
            assert "Traceback" not in each.said(), f"{each.id}: {each.said()}"
    finally:
        made.close()


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    """With a function that is loaded. Every test leaves it so that no call runs by what its scheduler knows."""
    shared.gateways[0].deploy("said", SOURCE, HTTP, slots="4")
    for each in shared.gateways:
        until(lambda: each.call(PATH, b"x").status_code == 200)  # noqa: B023
    yield shared
    shared.remove_all()
    shared.wait_agreed()


class Load:
    """Callers of one gateway, each with one call after another, meanwhile."""

    def __init__(self, gateway: Gateway, callers: int = 2) -> None:
        self.statuses: Counter[int] = Counter()
        self._gateway = gateway
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(callers)]

    def _run(self) -> None:
        with httpx.Client(base_url=self._gateway.url, timeout=60, trust_env=False) as web:
            while not self._stop.is_set():
                with contextlib.suppress(httpx.TransportError):
                    self.statuses[web.post(PATH, content=b"x").status_code] += 1

    def __enter__(self) -> "Load":
        for each in self._threads:
            each.start()
        self.goes_on()
        return self

    def goes_on(self) -> None:
        """Return when calls were answered from now on."""
        enough = self.statuses[200] + 50
        until(lambda: self.statuses[200] >= enough, lambda: f"calls are answered: {self.statuses}")

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for each in self._threads:
            each.join()


def count_of(leader: Service, name: str) -> float:
    return sum(value for key, value in leader.metrics().items() if key.startswith(name))


def keeps(gateway: Gateway) -> str:
    """Call until a call has run by a grant that was kept for it; return its id."""
    found: list[str] = []

    def look() -> bool:
        for _ in range(20):
            answer = gateway.call(PATH, b"x")
            assert answer.status_code == 200, answer.text
        said = gateway.web.get(f"/system/explain/{answer.headers['x-call-id']}")
        if said.status_code == 200 and "had kept" in said.json()["rule"]:
            found.append(answer.headers["x-call-id"])
        return bool(found)

    until(look, "a call runs by a grant that is kept")
    return found[0]


def test_calls_ask_the_scheduler_seldom_and_each_is_counted(cluster: Cluster) -> None:
    gateway, leader = cluster.gateways[0], cluster.the_leader()
    cluster.wait_agreed()

    def seldom() -> bool:
        names = ("gpufaas_device_calls_total", "gpufaas_device_hits_total", "gpufaas_scheduler_events_total")
        before = [count_of(leader, name) for name in names]
        for _ in range(100):
            assert gateway.call(PATH, b"x").text == "x"
        until(lambda: count_of(leader, "gpufaas_scheduler_running") == 0, "all are given back")
        calls, hits, events = (count_of(leader, name) - old for name, old in zip(names, before, strict=True))
        assert (calls, hits) == (100, 100)
        return events < 100  # else each of them was placed, and its end reported

    until(seldom, "most calls run without the scheduler")


def test_a_call_that_ran_without_the_scheduler_is_explained(cluster: Cluster) -> None:
    gateway = cluster.gateways[0]
    call = keeps(gateway)

    said = gateway.web.get(f"/system/explain/{call}").json()

    assert said["call"] == call
    assert said["device"] == "n1/cpu:0"
    assert "by a grant that this gateway had kept" in said["rule"]


def test_the_calls_of_another_gateway_find_a_slot(cluster: Cluster) -> None:
    one, other = cluster.gateways
    with Load(one, 4) as load:
        statuses = {other.call(PATH, b"x").status_code for _ in range(50)}
        load.goes_on()

    assert statuses == {200}
    assert set(load.statuses) == {200}


def test_a_gateway_that_dies_takes_its_grants_with_it(cluster: Cluster) -> None:
    one, other = cluster.gateways
    with Load(other, 1):
        keeps(other)
        other.kill()
        until(lambda: count_of(cluster.the_leader(), "gpufaas_scheduler_running") == 0)
        assert one.call(PATH, b"x").text == "x"
    other.start()
    until(cluster.whole)


def test_a_worker_that_dies_in_a_call_by_a_kept_grant_leaves_no_slot_taken(cluster: Cluster) -> None:
    gateway = cluster.gateways[0]
    for _ in range(5):
        keeps(gateway)
        assert gateway.call(PATH, b"dies").status_code == 502
        assert gateway.call(PATH, b"x").text == "x"

    until(lambda: count_of(cluster.the_leader(), "gpufaas_scheduler_running") == 0)


def test_a_caller_that_gives_up_a_call_by_a_kept_grant_leaves_no_slot_taken(cluster: Cluster, open_path: Path) -> None:
    gateway = cluster.gateways[0]
    keeps(gateway)
    gate = open_path / "gate"

    body = f"waits {gate}".encode()
    with socket.create_connection((gateway.host, gateway.port)) as leaves:
        leaves.sendall(
            b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (PATH.encode(), len(body), body)
        )
        until((open_path / "gate.began").exists)
    until(lambda: count_of(gateway, "gateway_function_invocation_inflight") == 0, "the gateway has given it up")
    gate.touch()

    until(lambda: count_of(cluster.the_leader(), "gpufaas_scheduler_running") == 0)
    assert gateway.call(PATH, b"x").text == "x"


@pytest.mark.long
def test_another_scheduler_knows_of_no_call_that_is_over(cluster: Cluster) -> None:
    leader = cluster.the_leader()
    with Load(cluster.gateways[0], 4) as load:
        leader.kill()
        until(lambda: cluster.leader(leader) is not None, "the other one leads")
        until(lambda: count_of(cluster.the_leader(), "gpufaas_scheduler_serving") == 1)
        load.goes_on()

    assert set(load.statuses) == {200}
    until(lambda: count_of(cluster.the_leader(), "gpufaas_scheduler_running") == 0)
    leader.start()


@pytest.mark.long
def test_a_node_that_dies_leaves_nothing(cluster: Cluster) -> None:
    (node,) = cluster.nodes
    with Load(cluster.gateways[0], 4) as load:
        node.kill()
        node.start()
        until(cluster.whole)
        load.goes_on()

    assert load.statuses[200]
    until(lambda: count_of(cluster.the_leader(), "gpufaas_scheduler_running") == 0)


@pytest.mark.long
def test_a_new_revision_answers_at_once(cluster: Cluster) -> None:
    gateway = cluster.gateways[0]
    with Load(gateway) as load:
        gateway.deploy("said", SOURCE.replace("event.body", "b'new'"), HTTP, slots="4")
        until(lambda: gateway.call(PATH, b"x").text == "new")
        until(lambda: len(cluster.nodes[0].workers()) == 1, "the old one is gone")
        load.goes_on()

    assert set(load.statuses) == {200}
