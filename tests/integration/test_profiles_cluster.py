"""A profile that is taken in a cluster, and who is killed meanwhile: the device takes calls again, nothing is kept."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.etcd_process import etcd_missing
from tests.integration.cluster import Cluster
from tests.integration.conftest import until
from tests.integration.test_profiles import WAITER

pytestmark = [
    pytest.mark.skipif(bool(etcd_missing()), reason=etcd_missing() or "-"), pytest.mark.timeout(180), pytest.mark.long,
]  # fmt: skip

WITHIN_S = 5


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    try:
        yield made.start()
    finally:
        made.close()


def probing(cluster: Cluster) -> bool:
    return any("+profile" in each for names in cluster.gateways[1].residents().values() for each in names)


def kill_node(cluster: Cluster, device: str) -> None:
    next(each for each in cluster.nodes if device.startswith(f"{each.id}/")).kill()


def kill_leader(cluster: Cluster, _: str) -> None:
    cluster.the_leader().kill()


def kill_gateway(cluster: Cluster, _: str) -> None:
    cluster.gateways[0].kill()


@pytest.mark.parametrize("kill", [kill_node, kill_leader, kill_gateway])
def test_kill_9_in_the_middle_leaves_the_device_to_calls_and_keeps_all_or_nothing(
    cluster: Cluster, kill: Callable[[Cluster, str], None]
) -> None:
    first, second = cluster.gateways
    path = first.deploy("mine", WAITER)
    device = first.call(path, b"0").headers["x-gpufaas-device"]
    until(lambda: second.call(path, b"0").status_code == 200)

    def take() -> httpx.Response:
        return first.web.post("/system/profile/mine", content=b"0.2", params={"device": device}, timeout=60)

    with ThreadPoolExecutor(1) as pool:
        taking: Future[httpx.Response] = pool.submit(take)
        until(lambda: probing(cluster), "it has begun")
        kill(cluster, device)
        assert second.call(path, b"0", timeout=WITHIN_S).status_code == 200
        error = taking.exception()

    kept = second.web.get("/system/profile/mine")
    if error is None and taking.result().status_code == 200:  # the next leader was quick: all batches have run
        assert kept.json()["profiles"] == taking.result().json()["profiles"]
    else:
        assert error is None or isinstance(error, httpx.TransportError)
        assert kept.status_code == 404
    until(lambda: not probing(cluster), "the probe is gone")


def test_a_profile_reaches_all_gateways_and_outlives_the_leader(cluster: Cluster) -> None:
    first, second = cluster.gateways
    first.deploy("mine", WAITER)

    taken = first.web.post("/system/profile/mine", content=b"0.001", params={"quick": "1"}, timeout=60)
    assert taken.status_code == 200, taken.text
    cluster.the_leader().kill()

    until(lambda: second.web.get("/system/profile/mine").json()["profiles"] == taken.json()["profiles"])
    until(lambda: not probing(cluster), "the probe is gone")
