"""The ways out of `tests/ways_out/doors.py`, tried by functions of a cluster's nodes, at the levels of isolation."""

import json
import os
import re
import secrets
import shutil
import textwrap
from pathlib import Path

import pytest
from tests.etcd_process import etcd_missing
from tests.integration.cluster import Cluster
from tests.integration.conftest import HTTP
from tests.waiting import until
from tests.ways_out.every import WAYS
from tests.ways_out.ways import Facts

from gpufaas_cli.bundles import BuildRequest, build

pytestmark = [
    pytest.mark.skipif(bool(etcd_missing()), reason=etcd_missing() or "-"),
    pytest.mark.skipif(os.geteuid() != 0, reason="the nodes have uids to give only as root"),
]
THIEF = """
    import os, sys
    sys.path.insert(0, os.path.dirname(__file__))
    from tests.ways_out.every import answer_of

    def handle(event, context):
        return {"statusCode": 200, "body": answer_of(event.body.decode())}
"""
BY_CONNECT = {name for name in WAYS if name.startswith("connects by ")}
DOORS = {name for name, way in WAYS.items() if way.in_cluster} - BY_CONNECT
FIRST = 2_100_000_000 + os.getpid() % 1000 * 131_072


class Scene:
    """
    A cluster with a node for each of *levels*, and what thieves there know.

    :param locked: its etcd asks for a login
    """

    def __init__(self, home: Path, levels: tuple[str, ...], *, locked: bool) -> None:
        self.cluster = cluster = Cluster(home, schedulers=1, gateways=1, nodes=0)
        self.variable, self.password = f"VAR-{secrets.token_hex(16)}", f"ETCD-{secrets.token_hex(16)}"
        password = home / "etcd-password"
        password.write_text(self.password)
        password.chmod(0o600)
        cluster.token.write_text(f"TOKEN-{secrets.token_hex(16)}")
        cluster.token.chmod(0o600)
        cluster.etcd.start()
        if locked:
            self._lock()
        for number, level in enumerate(levels):
            node = cluster.node(level, "cpu:0=200MiB")
            node.arguments += [
                "--isolation",
                level,
                "--uid-range",
                f"{FIRST + number * 65_536}-{FIRST + number * 65_536 + 999}",
            ]
            cluster.nodes.append(node)
        for each in cluster.services:
            each.arguments += ["--etcd-user", "gpufaas", "--etcd-password-file", str(password)] if locked else []
            each.start(wait=False)
        for each in cluster.services:
            each.wait_ready()
        until(cluster.whole, "the gateway sees every node")
        self.facts: Facts = {
            "token": str(cluster.token), "scheduler_port": cluster.schedulers[0].port, "etcd_port": cluster.etcd.port,
            "etcd_password": str(password), "status_ports": [each.status_port for each in cluster.services],
        }  # fmt: skip
        self._deploy()

    def _lock(self) -> None:
        for command in (
            "user add root:root-secret", "user grant-role root root", "role add gpufaas",
            "role grant-permission gpufaas --prefix=true readwrite /gpufaas/", f"user add gpufaas:{self.password}",
            "user grant-role gpufaas gpufaas", "auth enable",
        ):  # fmt: skip
            self.cluster.etcd.ctl(*command.split())

    def _deploy(self) -> None:
        folder = self.cluster.home / "thief"
        folder.mkdir()
        (folder / "handler.py").write_text(textwrap.dedent(THIEF))
        ways = Path(__file__).parents[1] / "ways_out"
        shutil.copytree(ways, folder / "tests" / "ways_out", ignore=shutil.ignore_patterns("__pycache__"))
        built = build(BuildRequest("thief", HTTP, folder, build_root=self.cluster.home / "build"))
        api = self.cluster.gateways[0].cli
        api.put_artifact(built.digest, built.bundle_tar, lambda _: None)
        for node in self.cluster.nodes:
            api.deploy(
                {"service": f"thief-{node.id}", "image": "thief", "constraints": [f"node.id=={node.id}"],
                 "envVars": {"CANARY": self.variable}, "annotations": {"gpufaas.bundle": built.digest}}
            )  # fmt: skip

    def open_ways(self, level: str) -> set[str]:
        """Try all ways that need a cluster, on the node of *level*; return those that work."""
        node = next(each for each in self.cluster.nodes if each.id == level)
        facts, found = self.facts | {"node": node.pid, "node_port": node.port}, set()
        for name in DOORS | BY_CONNECT:
            asked = json.dumps({"way": name, "facts": facts}).encode()
            answer = self.cluster.gateways[0].call(f"/function/thief-{level}", asked)
            assert answer.status_code == 200, answer.text
            told = answer.json()
            failed = told.get("failed", "")
            print(level, name, told)  # shown when a test fails
            assert not re.match("NameError|AttributeError|TypeError|KeyError|Import|Assert", failed), (name, told)
            proof = {"variable": self.variable, "http": "HTTP/1.", "claimed": ""}[WAYS[name].proof]
            if told["evidence"] and proof in told["evidence"]:
                found.add(name)
        return found


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "cluster"


@pytest.mark.slow
def test_no_function_of_a_node_enters_a_door_of_the_cluster(home: Path) -> None:
    scene = Scene(home, ("none", "best", "strict"), locked=True)
    try:
        free = scene.open_ways("none")
        assert free >= DOORS - {"etcd_without_a_login"}, "so each can succeed"
        assert free >= BY_CONNECT - {"connects by MPTCP"}
        assert scene.open_ways("best") & DOORS == set()
        assert scene.open_ways("strict") == set(), "nor connects to a port that its annotation does not name"
    finally:
        scene.cluster.close()


@pytest.mark.long
def test_where_etcd_asks_for_no_login_functions_do_not_reach_it(home: Path) -> None:
    scene = Scene(home, ("none", "best"), locked=False)
    try:
        assert scene.open_ways("none") >= {"etcd_without_a_login"}
        assert scene.open_ways("best") == set()
    finally:
        scene.cluster.close()
