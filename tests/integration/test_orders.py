"""Nodes that a policy orders, in a cluster of real processes: they come, serve and go, whatever dies meanwhile."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.cluster import Cluster
from tests.integration.conftest import ECHO_MODEL, until

from gpufaas_providers.local import LocalProvider
from gpufaas_providers.ports import Joining

POLICY = """
from pathlib import Path

from gpufaas_scheduler.policies import FLEET, WAKE, Procure, Release, Wake

WISH = Path(%r)


class Renting:
    '''Looks into a file for the kinds of which it wants one node each.'''

    watches = FLEET | WAKE

    def plan(self, view):
        wished = WISH.read_text().split()
        there = {device.kind: device.device.node for device in view.devices() if str(device.id).startswith("local-")}
        for kind in view.offers:
            if kind in wished and kind not in there and kind not in view.ordered.values() and kind not in view.unmet:
                yield Procure(kind)
            if kind not in wished and kind in there:
                yield Release(there[kind])
        yield Wake(view.now + 0.2, "look")
"""
OFFERS = """
offers:
  - {kind: cpu-0.5, memory: 300MiB, price_per_h: 3.6, start_s: 1, limit: 1, options: {functions: process, park: "off"}}
  - {kind: A100, memory: 80GiB, price_per_h: 9}
"""


class Rented(Cluster):
    """A cluster with one node, whose policy orders what stands in `wish`."""

    def __init__(self, home: Path) -> None:
        super().__init__(home, nodes=1, gateways=1)
        self.wish = home / "wish"
        self.wish.write_text("")
        plugin, offers = home / "plugin", home / "offers.yml"
        (plugin / "renting-1.dist-info").mkdir(parents=True)
        (plugin / "renting_policy.py").write_text(POLICY % str(self.wish))
        (plugin / "renting-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: renting\nVersion: 1\n")
        (plugin / "renting-1.dist-info" / "entry_points.txt").write_text(
            "[gpufaas.policies.scaling]\nrenting = renting_policy:Renting\n"
        )
        offers.write_text(OFFERS)
        for each in self.schedulers:
            each.env["PYTHONPATH"] = str(plugin)
            each.arguments += ["--policy", "lb+scaling=renting", "--offers", str(offers), "--provider", "local"]
            each.arguments += ["--data", str(home / "provided")]
        self.provider = LocalProvider(Joining((), home / "provided"))

    def there(self) -> list[str]:
        """Return the nodes that run, in the order of their start."""
        return [each.node for each in self.provider._list() if not each.until]

    def joined(self) -> list[str]:
        """Return the nodes that were ordered, as the gateway sees them."""
        return [each for each in self.gateways[0].nodes() if each != "n1"]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Rented]:
    made = Rented(tmp_path)
    try:
        yield made.start()
    finally:
        made.close()
        for each in made.there():
            made.provider._stop(each)


def test_a_node_is_ordered_serves_and_is_given_back(cluster: Rented) -> None:
    gateway = cluster.gateways[0]
    cluster.wish.write_text("cpu-0.5")
    path = gateway.deploy("echo", ECHO_MODEL)
    until(lambda: cluster.joined() and cluster.joined() == cluster.there(), "a node has joined")
    until(lambda: not gateway.status()["ordered"], "no order is open")

    cluster.nodes[0].stop()
    until(lambda: "n1" not in gateway.nodes(), "it is the only one")
    answer = gateway.call(path, b"x")
    assert answer.status_code == 200
    assert answer.headers["x-gpufaas-device"].partition("/")[0] == cluster.there()[0]

    cluster.wish.write_text("")
    until(lambda: not cluster.there(), "the node has ended")
    until(lambda: not cluster.joined(), "nobody sees it any more")
    (held,) = cluster.provider._list()
    bill = lambda: gateway.cli.cost(by="offer")  # noqa: E731
    until(lambda: bill() == bill(), "the stay is closed: what is open grows")
    (paid,) = bill()
    assert paid["node_s"] == pytest.approx(held.until - held.since, abs=1.0)
    assert (paid["name"], paid["cost"]) == ("cpu-0.5", pytest.approx(paid["node_s"] / 1000))
    by_function = {each["name"]: each["cost"] for each in gateway.cli.cost()}
    assert sum(by_function.values()) == pytest.approx(paid["cost"])
    assert by_function["(idle)"] > 0


def test_an_order_that_the_provider_cannot_carry_out_has_failed_and_the_status_says_why(cluster: Rented) -> None:
    gateway = cluster.gateways[0]
    cluster.wish.write_text("A100")

    until(lambda: gateway.status()["unmet"], "the order has failed")

    assert gateway.status()["unmet"] == {
        "A100": "provider local: local nodes have CPU devices, of kind cpu or cpu-CORES, and none of kind A100"
    }


def test_a_leader_that_is_killed_while_its_node_starts_neither_loses_nor_doubles_it(cluster: Rented) -> None:
    cluster.wish.write_text("cpu-0.5")
    until(cluster.there, "a node is started")

    cluster.the_leader().kill()
    until(lambda: cluster.joined() and cluster.joined() == cluster.there(), "a node has joined the next leader")

    cluster.the_leader().kill()
    for each in cluster.schedulers:
        if not each.runs:
            each.start()
    cluster.wish.write_text("")
    until(lambda: not cluster.there(), "the node is given back to a third leader")
    assert len(cluster.provider._list()) == 1, "one node was started in all"
