"""
Other programs that a cluster needs stand still: deployments were refused as if they were wrong, or hung for minutes,
and an upload that met a paused object store never came into it.
"""

import hashlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.etcd_process import etcd_missing
from tests.integration.cluster import Cluster, Gateway
from tests.integration.conftest import ECHO_MODEL, free_port, until

pytestmark = [
    pytest.mark.skipif(bool(etcd_missing()), reason=etcd_missing() or "-"),
    pytest.mark.timeout(180),
    pytest.mark.long,
]


class Bucket:
    """A bucket of an S3 server that can be paused."""

    def __init__(self, home: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self._said = home / "s3"
        with self._said.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", self.url.rpartition(":")[2]],
                stdout=output, stderr=output,
            )  # fmt: skip
        until(self._made, "the S3 server answers", 60.0)

    def _made(self) -> bool:
        try:
            return httpx.put(f"{self.url}/weights", trust_env=False).status_code == 200
        except httpx.TransportError:
            assert self.process.poll() is None, self._said.read_text()
            return False

    def names(self) -> str:
        return httpx.get(f"{self.url}/weights?list-type=2", trust_env=False).text


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    made = Bucket(tmp_path_factory.mktemp("s3"))
    yield made
    made.process.kill()
    made.process.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, bucket: Bucket) -> Iterator[Cluster]:
    """One of each."""
    made = Cluster(tmp_path_factory.mktemp("cluster"), schedulers=1, nodes=1, gateways=1)
    for each in made.services:
        each.env = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    for each in (*made.gateways, *made.nodes):
        each.arguments += ["--object-store", f"s3://weights?endpoint={bucket.url}"]
    try:
        yield made.start()
        for each in made.services:
            assert "Traceback" not in each.said(), f"{each.id}: {each.said()}"
    finally:
        made.close()


def upload(gateway: Gateway, content: bytes) -> httpx.Response:
    return gateway.web.put(f"/system/artifacts/{hashlib.sha256(content).hexdigest()}", content=content)


def deploy(gateway: Gateway, name: str, digest: str) -> httpx.Response:
    wanted = {"service": name, "image": name, "annotations": {"gpufaas.bundle": digest, "gpufaas.memory": "48Mi"}}
    return gateway.web.post("/system/functions", json=wanted)


def says_try_again(answer: httpx.Response) -> bool:
    assert (answer.status_code, answer.headers["x-gpufaas-error"]) == (503, "storage-away"), answer.text
    return int(answer.headers["retry-after"]) > 0


def test_what_etcd_would_keep_is_503_while_it_stands_and_nothing_is_lost(cluster: Cluster) -> None:
    gateway = cluster.gateways[0]
    path = gateway.deploy("before", ECHO_MODEL)
    assert gateway.call(path, b"cold").text == "cold"
    built = cluster.builds.build("before", ECHO_MODEL)

    cluster.etcd.pause()
    try:
        assert says_try_again(deploy(gateway, "during", built.digest))
        assert says_try_again(upload(gateway, secrets.token_bytes(100)))
        warm = gateway.call(path, b"warm")
        assert (warm.text, warm.headers["x-gpufaas-start"]) == ("warm", "hit")
    finally:
        cluster.etcd.resume()

    until(lambda: deploy(gateway, "after", built.digest).status_code in (202, 409), "it is deployed")
    assert set(gateway.functions()) >= {"before", "after"}
    until(lambda: gateway.call("/function/after", b"x").text == "x")
    assert gateway.call(path, b"still").text == "still"
    cluster.remove_all()


def test_an_upload_to_an_object_store_that_stands_is_503_and_comes_into_it_when_it_is_sent_again(
    cluster: Cluster, bucket: Bucket
) -> None:
    gateway, content = cluster.gateways[0], secrets.token_bytes(1000)
    digest = hashlib.sha256(content).hexdigest()
    path = gateway.deploy("before", ECHO_MODEL)
    assert gateway.call(path, b"cold").text == "cold"
    kept = bucket.names()
    assert cluster.builds.build("before", ECHO_MODEL).digest in kept

    def stops_half_way() -> Iterator[bytes]:
        yield content[:500]
        until(lambda: list((gateway.data / "artifacts" / "incoming").iterdir()), "the store was asked, and lacks it")
        os.kill(bucket.process.pid, signal.SIGSTOP)
        yield content[500:]

    try:
        assert says_try_again(gateway.web.put(f"/system/artifacts/{digest}", content=stops_half_way()))
        assert says_try_again(upload(gateway, content))
        warm = gateway.call(path, b"warm")
        assert (warm.text, warm.headers["x-gpufaas-start"]) == ("warm", "hit")
    finally:
        os.kill(bucket.process.pid, signal.SIGCONT)

    assert upload(gateway, content).status_code == 201
    assert digest in bucket.names()
    assert gateway.web.head(f"/system/artifacts/{digest}").status_code == 200
    cluster.remove_all()


def test_a_node_whose_id_another_one_has_ends_with_a_line_that_says_who(cluster: Cluster) -> None:
    """It tried for ever where only the scheduler knew of the other: its key was gone, and its link was there."""
    first = cluster.nodes[0]
    cluster.etcd.ctl("del", f"/gpufaas/v1/nodes/{first.id}")
    twin = cluster.node(first.id, "cpu:0=100MiB")
    twin.arguments[twin.arguments.index("--data") + 1] += "-twin"
    twin.log = cluster.home / "twin.log"
    twin.start(wait=False)
    try:
        assert twin.end() == 1
        last = twin.said().splitlines()[-1]
        assert last.startswith("gpufaas: "), twin.said()
        assert f"a node {first.id!r} is there already" in last
        assert first.address in last
        assert "another --id" in last
        assert "Traceback" not in twin.said()
    finally:
        twin.close()

    gateway = cluster.gateways[0]
    path = gateway.deploy("goes-on", ECHO_MODEL)
    assert gateway.call(path, b"x").text == "x"
    cluster.remove_all()
