"""Hand-overs in a cluster: all gateways show the same, and each of its processes may end while a revision is loaded."""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.etcd_process import etcd_missing
from tests.integration.cluster import Cluster, Gateway
from tests.integration.conftest import until
from tests.integration.test_handover import BROKEN, MODEL

pytestmark = [
    pytest.mark.skipif(bool(etcd_missing()), reason=etcd_missing() or "-"),
    pytest.mark.timeout(180),
    pytest.mark.long,
]

GATED_LOAD = """
    import os, time

    def load(device):
        open("{gate}.began", "w").close()
        while not os.path.exists("{gate}"):
            time.sleep(0.01)
        return None

    def handle(model, event, context):
        return "{said}"
"""
"""A model that is loaded once the file `gate` exists."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, nodes=1)
    try:
        yield made.start()
    finally:
        made.close()


class Load:
    """One caller of each gateway, with one call after another, meanwhile. A gateway that is gone is called again."""

    def __init__(self, cluster: Cluster, path: str) -> None:
        self.answers: dict[str, Counter[str]] = {each.id: Counter() for each in cluster.gateways}
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(each, path)) for each in cluster.gateways]

    def _run(self, gateway: Gateway, path: str) -> None:
        with httpx.Client(base_url=gateway.url, timeout=60, trust_env=False) as web:
            while not self._stop.wait(0.01):
                with contextlib.suppress(httpx.TransportError):
                    self.answers[gateway.id][web.post(path).text] += 1

    def __enter__(self) -> "Load":
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for each in self._threads:
            each.join()

    def answered(self, said: str) -> None:
        """Return when each gateway has answered *said* from now on."""
        before = {id_: each[said] for id_, each in self.answers.items()}
        until(lambda: all(each[said] > before[id_] for id_, each in self.answers.items()), lambda: f"{self.answers}")

    @property
    def texts(self) -> set[str]:
        return {text for each in self.answers.values() for text in each}


def detail(gateway: Gateway) -> dict[str, object]:
    found: dict[str, object] = gateway.web.get("/system/function/model").json()["gpufaas"]
    return found


def begin(gateway: Gateway, source: str, gate: Path) -> None:
    """Update the function at *gateway*, and return when its new revision begins to load."""
    threading.Thread(target=_deploy, args=(gateway, source), daemon=True).start()
    until(gate.with_name(gate.name + ".began").exists, "it loads")


def _deploy(gateway: Gateway, source: str) -> None:
    with contextlib.suppress(httpx.TransportError, AssertionError, KeyError):
        gateway.deploy("model", source)


def served(cluster: Cluster, open_path: Path) -> tuple[str, str, Path]:
    """Deploy a model that says old; return its path, the source of its next revision, and the gate of that."""
    gate = open_path / "gate"
    gate.touch()
    path = cluster.gateways[0].deploy("model", GATED_LOAD.format(gate=gate, said="old"))
    for each in cluster.gateways:
        until(lambda: each.call(path).text == "old")  # noqa: B023
        until(lambda: detail(each)["ready"] == 1, "it knows that a copy is loaded")  # noqa: B023
    after = open_path / "after"
    return path, GATED_LOAD.format(gate=after, said="new"), after


def test_both_gateways_show_what_is_pending_and_no_call_fails(cluster: Cluster, open_path: Path) -> None:
    path, source, gate = served(cluster, open_path)
    one, other = cluster.gateways

    with Load(cluster, path) as load:
        begin(one, source, gate)
        until(lambda: "pending" in detail(one) and detail(one)["pending"] == detail(other).get("pending"))
        load.answered("old")
        gate.touch()
        load.answered("new")
        until(lambda: "pending" not in detail(one) and detail(one)["revision"] == detail(other)["revision"])
        until(lambda: len(cluster.nodes[0].workers()) == 1, "the old one has ended")
        load.answered("new")

    assert load.texts == {"old", "new"}


def test_an_idle_function_that_does_not_load_any_more_goes_back_at_both_gateways(cluster: Cluster) -> None:
    one, other = cluster.gateways
    path = one.deploy("model", MODEL.format(said="old"), memory="80Mi")

    until(lambda: other.functions() == ["model"])
    old = detail(one)["revision"]
    one.deploy("model", BROKEN)
    until(lambda: detail(one)["revision"] == detail(other)["revision"] != old)

    with Load(cluster, path) as load:
        load.answered("old")

    assert load.texts == {"old"}
    for each in cluster.gateways:
        until(lambda: "these weights are of another model" in str(detail(each).get("failed")))  # noqa: B023
        assert detail(each)["revision"] == old


def test_a_gateway_that_dies_while_its_update_loads_leaves_it_to_the_other(cluster: Cluster, open_path: Path) -> None:
    path, source, gate = served(cluster, open_path)
    one, other = cluster.gateways

    begin(one, source, gate)
    one.kill()
    gate.touch()

    until(lambda: other.call(path).text == "new")
    assert "pending" not in detail(other)
    one.start()
    until(lambda: one.call(path).text == "new", "the one that is back knows it")


def test_a_scheduler_that_dies_while_an_update_loads_costs_no_call(cluster: Cluster, open_path: Path) -> None:
    path, source, gate = served(cluster, open_path)

    with Load(cluster, path) as load:
        begin(cluster.gateways[0], source, gate)
        cluster.the_leader().kill()
        load.answered("old")
        gate.touch()
        load.answered("new")

    assert load.texts == {"old", "new"}


def test_a_node_that_dies_while_an_update_loads_there_comes_back_with_the_new_revision(
    cluster: Cluster, open_path: Path
) -> None:
    path, source, gate = served(cluster, open_path)
    one, _ = cluster.gateways

    begin(one, source, gate)
    cluster.nodes[0].kill()
    gate.touch()
    cluster.nodes[0].start()

    until(lambda: one.call(path).text == "new")
    until(lambda: "pending" not in detail(one))
