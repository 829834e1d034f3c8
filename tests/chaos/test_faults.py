"""Faults, what users see of them, and for how long. The bars are fixed; the table has the measurements."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.chaos.conftest import Chaos
from tests.etcd_process import etcd_missing
from tests.integration.cluster import Cluster, Network, Service, filled
from tests.integration.conftest import LIMIT_S, all_ended, until

pytestmark = [
    pytest.mark.skipif(bool(etcd_missing()), reason=etcd_missing() or "-"),
    pytest.mark.chaos,
    pytest.mark.timeout(300),
]
Begin = Callable[..., Chaos]

STOPPED_S = 10.0
NEW_LEADER_S = 8.0
GONE_S = 3.0
NO_LEADER_S = 30.0
FAKETIME = next(iter(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")), None)


def seconds_until(claim: Callable[[], bool], since: float, what: str, timeout_s: float = LIMIT_S) -> float:
    until(claim, what, timeout_s)
    return time.monotonic() - since


def serves(cluster: Cluster, name: str) -> bool:
    """Whether a function that is nowhere resident can be called: that needs a scheduler that places."""
    return all(each.call(f"/function/{name}", b"in-need").status_code == 200 for each in cluster.gateways)


def another_leader(cluster: Cluster, old: Service) -> Callable[[], bool]:
    """Return what says whether another one leads and both gateways are with it, and it places calls."""

    def claim() -> bool:
        leader = cluster.leader(old)
        return (
            leader is not None
            and all(each.readiness()[0] == 200 for each in cluster.gateways)
            and bool(leader.metrics().get("gpufaas_scheduler_serving"))
        )  # fmt: skip

    return claim


def sees(cluster: Cluster, node: Service) -> bool:
    """Whether any gateway has *node* in its view."""
    return any(node.id in each.nodes() for each in cluster.gateways)


# --- kill -9 ---


def test_a_worker_is_killed(cluster: Cluster, chaos: Begin) -> None:
    with chaos("worker killed") as it:
        for _ in range(5):
            workers = [each for node in cluster.nodes for each in node.workers()]
            it.broke()
            workers[0].kill()
            it.run_on(0.3)
        it.mended(1.0)
        it.run_on(2.0)


def test_a_node_is_killed_and_comes_back(cluster: Cluster, chaos: Begin) -> None:
    node = cluster.nodes[0]
    with chaos("node killed") as it:
        since = it.broke()
        left = node.kill()
        it.bar(
            "out of the view", GONE_S, seconds_until(lambda: not sees(cluster, node), since, "it is out of the view")
        )
        it.mended(1.0)
        it.run_on(2.0)
        node.start()
        until(cluster.whole, "it is back")
        it.run_on(1.0)
    all_ended(left)


def test_the_leader_is_killed(cluster: Cluster, chaos: Begin) -> None:
    old = cluster.the_leader()
    with chaos("scheduler leader killed") as it:
        since = it.broke()
        old.kill()
        it.bar("new leader", NEW_LEADER_S, seconds_until(another_leader(cluster, old), since, "another one leads"))
        it.mended()
        old.start()


def test_there_is_no_leader_for_30_s(cluster: Cluster, chaos: Begin) -> None:
    with chaos("no scheduler for 30 s") as it:
        since = it.broke()
        for each in cluster.schedulers:
            each.kill()
        it.run_on(NO_LEADER_S)
        it.claim("warm calls succeed", not it.failed(since=since), f"{len(it.failed(since=since))} failed")
        for each in cluster.schedulers:
            each.start(wait=False)
        until(lambda: cluster.leader() is not None, "a scheduler leads")
        until(lambda: serves(cluster, "model"), "calls are placed")
        it.mended()


def test_a_gateway_is_killed_and_comes_back(cluster: Cluster, chaos: Begin) -> None:
    gateway = cluster.gateways[0]
    with chaos("gateway killed") as it:
        since = it.broke()
        gateway.kill()
        it.run_on(2.0)
        others = [each for each in it.failed(since=since) if each.gateway != 0]
        it.claim("calls by the other succeed", not others, f"{len(others)} failed")
        gateway.start()
        it.mended()


def test_etcd_is_killed_and_comes_back(cluster: Cluster, chaos: Begin) -> None:
    with chaos("etcd killed for 20 s") as it:
        since = it.broke()
        cluster.etcd.kill()
        it.run_on(20.0)
        it.claim("warm calls succeed", not it.failed(since=since), f"{len(it.failed(since=since))} failed")
        cluster.etcd.start()
        until(lambda: cluster.leader() is not None, "a scheduler leads")
        until(lambda: serves(cluster, "model"), "calls are placed")
        it.mended()
        it.claim("no sync call failed", not it.failed(), f"{len(it.failed())} failed")


# --- SIGSTOP for 10 s ---


def test_a_worker_stands_still(cluster: Cluster, chaos: Begin) -> None:
    with chaos("worker stopped 10 s") as it:
        worker = cluster.nodes[0].workers()[0]
        it.broke()
        worker.send_signal(signal.SIGSTOP)
        it.run_on(STOPPED_S)
        worker.send_signal(signal.SIGCONT)
        it.mended(1.0)


def test_a_node_stands_still(cluster: Cluster, chaos: Begin) -> None:
    node = cluster.nodes[0]
    with chaos("node stopped 10 s") as it:
        since = it.broke()
        node.pause()
        it.bar(
            "out of the view", GONE_S, seconds_until(lambda: not sees(cluster, node), since, "it is out of the view")
        )
        out = time.monotonic()
        it.run_on(STOPPED_S - (out - since))
        late = it.failed(since=out + 0.5)
        it.claim("calls succeed meanwhile", not late, f"{len(late)} failed")
        node.resume()
        until(cluster.whole, "it is back")
        it.mended(1.0)


def test_the_leader_stands_still(cluster: Cluster, chaos: Begin) -> None:
    old = cluster.the_leader()
    with chaos("scheduler leader stopped 10 s") as it:
        since = it.broke()
        old.pause()
        it.bar("new leader", NEW_LEADER_S, seconds_until(another_leader(cluster, old), since, "another one leads"))
        it.run_on(max(0.0, STOPPED_S - (time.monotonic() - since)))
        old.resume()
        it.mended()
        it.claim("no sync call failed", not it.failed(), f"{len(it.failed())} failed")


def test_a_gateway_stands_still(cluster: Cluster, chaos: Begin) -> None:
    gateway = cluster.gateways[0]
    with chaos("gateway stopped 10 s") as it:
        since = it.broke()
        gateway.pause()
        it.run_on(STOPPED_S)
        others = [each for each in it.failed(since=since) if each.gateway != 0]
        it.claim("calls by the other succeed", not others, f"{len(others)} failed")
        gateway.resume()
        gateway.wait_ready()
        it.mended(1.0)


def test_etcd_stands_still(cluster: Cluster, chaos: Begin) -> None:
    with chaos("etcd stopped 10 s") as it:
        since = it.broke()
        cluster.etcd.pause()
        it.run_on(STOPPED_S)
        cluster.etcd.resume()
        it.claim("warm calls succeed", not it.failed(since=since), f"{len(it.failed(since=since))} failed")
        until(lambda: cluster.leader() is not None, "a scheduler leads")
        until(lambda: serves(cluster, "model"), "calls are placed")
        it.mended()


# --- networks ---

needs_network = pytest.mark.skipif(bool(Network.missing()), reason=Network.missing() or "-")


def cut_for_10_s(cluster: Cluster, it: Chaos, ports: list[int], *, leaves: bool) -> None:
    network, node = cluster.network, cluster.nodes[0]
    assert network is not None
    since = it.broke()
    network.cut(1, ports)
    if leaves:
        it.bar(
            "out of the view", GONE_S, seconds_until(lambda: not sees(cluster, node), since, "it is out of the view")
        )
    out = time.monotonic()
    it.run_on(STOPPED_S - (out - since))
    late = it.failed(since=out + 3.0)
    it.claim("calls succeed meanwhile", not late, f"{len(late)} failed")
    network.mend(1)
    until(cluster.whole, "it is back")
    it.mended(1.0)


@needs_network
def test_a_node_is_cut_off_from_the_schedulers(cluster: Cluster, chaos: Begin) -> None:
    with chaos("node cut from schedulers 10 s") as it:
        cut_for_10_s(cluster, it, [each.port for each in cluster.schedulers], leaves=True)


@needs_network
def test_a_node_is_cut_off_from_etcd(cluster: Cluster, chaos: Begin) -> None:
    with chaos("node cut from etcd 10 s") as it:
        cut_for_10_s(cluster, it, [cluster.etcd.port], leaves=False)
        it.claim("no sync call failed", not it.failed(), f"{len(it.failed())} failed")


@needs_network
def test_a_node_is_cut_off_from_the_gateways(cluster: Cluster, chaos: Begin) -> None:
    with chaos("node cut from gateways 10 s") as it:
        cut_for_10_s(cluster, it, [cluster.nodes[0].port], leaves=False)


@needs_network
def test_a_node_is_cut_off_from_everything(cluster: Cluster, chaos: Begin) -> None:
    node = cluster.nodes[0]
    with chaos("node cut from all 10 s") as it:
        cut_for_10_s(
            cluster, it, [node.port, cluster.etcd.port, *(each.port for each in cluster.schedulers)], leaves=True
        )


# --- the rest ---


@pytest.mark.skipif(os.geteuid() != 0, reason="small disks need root")
def test_a_node_has_no_disk_left(cluster: Cluster, chaos: Begin) -> None:
    node = cluster.nodes[-1]
    with chaos("node's disk full 10 s") as it:
        since = it.broke()
        with filled(node.data):
            it.run_on(STOPPED_S)
            assert node.runs
            it.claim("warm calls succeed", not it.failed(since=since), f"{len(it.failed(since=since))} failed")
        it.mended()


@pytest.mark.skipif(os.geteuid() != 0, reason="small disks need root")
def test_a_gateway_has_no_disk_left(cluster: Cluster, chaos: Begin) -> None:
    gateway = cluster.gateways[-1]
    with chaos("gateway's disk full 10 s") as it:
        since = it.broke()
        with filled(gateway.data):
            it.run_on(STOPPED_S)
            assert gateway.runs
            it.claim("sync calls succeed", not it.failed(since=since), f"{len(it.failed(since=since))} failed")
        it.mended(2.0)


@pytest.mark.skipif(FAKETIME is None, reason="there is no libfaketime here: apt install faketime")
def test_a_node_has_a_clock_that_is_an_hour_off(cluster: Cluster, chaos: Begin) -> None:
    node = cluster.nodes[0]
    node.stop()
    node.env = {"LD_PRELOAD": str(FAKETIME), "FAKETIME": "+1h", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    try:
        node.start()
        until(cluster.whole, "it is seen")
        with chaos("node's clock 1 h ahead") as it:
            it.mended()
            it.run_on(8.0)
            note = cluster.gateways[0].nodes()[node.id]["note"]
            it.claim("its note says so", "its clock is +3600 s off" in note, note)
            it.claim("no sync call failed", not it.failed(), f"{len(it.failed())} failed")
    finally:
        node.env = {}
        if node.runs:
            node.stop()
        node.start()
        until(cluster.whole, "it is seen")


def test_everything_is_restarted_in_turn(cluster: Cluster, chaos: Begin) -> None:
    with chaos("rolling restart") as it:
        it.broke()
        for each in [*cluster.nodes, *cluster.schedulers, *cluster.gateways]:
            assert each.stop() == 0, f"{each.id} stops in peace: {each.said()[-1000:]}"
            each.start()
            until(cluster.whole, "all nodes are seen")
            until(lambda: cluster.leader() is not None, "a scheduler leads")
        cluster.etcd.stop()
        cluster.etcd.start()
        until(lambda: cluster.leader() is not None, "a scheduler leads")
        until(lambda: serves(cluster, "model"), "calls are placed")
        it.mended()
