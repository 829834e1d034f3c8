"""
With its scheduler dead, a cluster showed a dead node as ready, and a gateway said OK at its public ``/readyz``. Its
status port was not ready from the first moment of a hand-over on: Kubernetes took all gateways out of their service.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.etcd_process import etcd_missing
from tests.integration.cluster import Cluster, Gateway
from tests.integration.conftest import until

from gpufaas_cli.main import cli
from gpufaas_cluster.remote_placement import NO_LEADER_S

pytestmark = [pytest.mark.skipif(bool(etcd_missing()), reason=etcd_missing() or "-"), pytest.mark.long]

MODEL = """
    def load(device):
        return None

    def handle(model, event, context):
        return event.text
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, schedulers=1, nodes=2, gateways=1)
    try:
        yield made.start()
    finally:
        made.close()


def said(gateway: Gateway, *command: str) -> str:
    result = CliRunner().invoke(cli, [*command, "-g", gateway.url])
    assert result.exit_code == 0, result.output
    return result.output


def age(gateway: Gateway) -> float:
    return max(float(each["ageSeconds"]) for each in gateway.nodes().values())


def test_what_is_old_is_shown_as_old_and_what_is_missing_is_said(cluster: Cluster) -> None:
    (scheduler,), (gateway,) = cluster.schedulers, cluster.gateways
    path = gateway.deploy("model", MODEL)
    home = gateway.call(path).headers["x-gpufaas-device"].partition("/")[0]
    until(lambda: gateway.residents()[home] == ["model"])
    assert (gateway.web.get("/readyz").text.split()[0], age(gateway)) == ("OK", 0)
    assert "as of" not in said(gateway, "node", "list") + said(gateway, "list") + said(gateway, "top", "--once")

    scheduler.kill()
    lost = next(each for each in cluster.nodes if each.id != home)
    lost.kill()
    until(lambda: gateway.nodes()[lost.id]["note"] == "not reached by this gateway")

    answers = gateway.web.get("/readyz").status_code, gateway.readiness()
    assert answers == (200, (200, "ready")) or age(gateway) > NO_LEADER_S  # calls wait for the next one, and so do we
    assert {each["state"] for each in gateway.nodes().values()} == {"unknown"}
    for command in (
        ["node", "list"],
        ["node", "describe", lost.id],
        ["list"],
        ["describe", "model"],
        ["top", "--once"],
    ):
        assert ", as of " in said(gateway, *command), command
    assert gateway.status()["age_s"] > 0
    assert gateway.metrics()["gpufaas_status_age_seconds"] > 0
    assert "gpufaas_device_" not in gateway.web.get("/metrics").text

    until(lambda: gateway.web.get("/readyz").status_code == 503)
    assert "no scheduler for 1" in gateway.web.get("/readyz").text
    until(lambda: gateway.readiness()[1].startswith("ready for models that are loaded; no scheduler for "))
    assert gateway.readiness()[0] == gateway.call(path).status_code == 200

    scheduler.start()
    until(lambda: set(gateway.nodes()) == {home})
    assert (gateway.nodes()[home]["state"], age(gateway)) == ("ready", 0)
    until(lambda: gateway.web.get("/readyz").text.startswith("OK"))  # its devices join after it
