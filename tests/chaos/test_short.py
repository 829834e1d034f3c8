"""
The short run: the most frequent faults, one after another under one load. `test_faults` has all of them, and bars of
time for a machine that does nothing else.
"""

import time
from collections.abc import Callable

import pytest
from tests.chaos.conftest import Chaos
from tests.chaos.test_faults import NEW_LEADER_S, another_leader, seconds_until, serves
from tests.costs import GENEROUS
from tests.etcd_process import etcd_missing
from tests.integration.cluster import Cluster
from tests.integration.conftest import until

pytestmark = [
    pytest.mark.skipif(bool(etcd_missing()), reason=etcd_missing() or "-"),
    pytest.mark.timeout(180),
    pytest.mark.slow,
    pytest.mark.skipif("config.getoption('-m') == 'chaos'", reason="make chaos has more"),
]


def test_nothing_is_lost_when_worker_leader_node_gateway_and_etcd_die(
    cluster: Cluster, chaos: Callable[..., Chaos]
) -> None:
    with chaos("worker, leader, node, gateway, etcd killed", most=30.0) as it:  # a machine may be slow, or busy
        it.broke()
        cluster.nodes[1].workers()[0].kill()
        old = cluster.the_leader()
        since = time.monotonic()
        old.kill()
        it.bar(
            "new leader",
            GENEROUS * NEW_LEADER_S,
            seconds_until(another_leader(cluster, old), since, "another one leads"),
        )
        cluster.nodes[0].kill()
        cluster.nodes[0].start(wait=False)
        cluster.gateways[1].kill()
        cluster.gateways[1].start(wait=False)
        cluster.etcd.kill()
        it.run_on(1.0)
        cluster.etcd.start()
        old.start(wait=False)
        for each in cluster.services:
            each.wait_ready()
        until(cluster.whole, "all are back")
        until(lambda: serves(cluster, "model"), "calls are placed")
        it.mended(1.0)
