"""What make's targets need of the system is said before they start, by the packages that have it."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MAKE = shutil.which("make")
RULES = re.findall(r"^([a-z-]+): (.*)\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
"""Name, what comes before it, and commands of each target."""


@pytest.mark.skipif(MAKE is None, reason="make is not installed")
@pytest.mark.parametrize(
    ("target", "there", "said"),
    [
        (["needs-cluster"], [], "apt install docker.io etcd-server etcd-client haproxy"),
        (["needs-cluster"], ["docker", "etcd"], "apt install etcd-client haproxy"),
        (["needs-cluster"], ["docker", "etcd", "etcdctl", "haproxy"], ""),
        (["needs-cluster", "PUBLIC=1"], ["docker"], ""),
        (["needs-soak"], [], ""),
        (["needs-soak", "CLUSTER=1"], [], "apt install etcd-server etcd-client"),
        (["needs-wrk"], [], "apt install wrk"),
    ],
)
def test_all_that_is_missing_is_named_at_once(target: list[str], there: list[str], said: str, tmp_path: Path) -> None:
    for name in there:
        (tmp_path / name).touch(0o755)

    # Its own PATH alone: what this machine has must not count.
    done = subprocess.run(
        [str(MAKE), "-s", "-f", ROOT / "Makefile", *target, "SBIN="], cwd=tmp_path, env={"PATH": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert (done.returncode != 0) == bool(said), done.stderr
    assert said in done.stderr.replace("\n", " ") + " "


def test_every_target_that_needs_programs_looks_for_them_first() -> None:
    needs = {"make-base.sh": "needs-cluster", "cluster-demo": "needs-cluster", "tests/chaos": "needs-etcd"}
    needs |= {
        each.name: "needs-wrk"
        for each in (ROOT / "benchmarks").glob("[a-z]*.py")
        if re.search(r"^from _wrk import|^from _servers import .*\bPeer\b", each.read_text(), re.MULTILINE)
    }

    found = {
        name: need
        for name, _, commands in RULES
        for what, need in needs.items()
        if re.search(rf"[ /]{re.escape(what)}\b", commands) or what in commands
    }
    assert {"bench-peers", "cluster", "chaos"} <= found.keys()
    assert {name: need for name, before, _ in RULES for need in before.split() if need.startswith("needs-")} == {
        **found,
        "soak": "needs-soak",
    }
