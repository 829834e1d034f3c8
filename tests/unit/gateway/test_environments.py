"""The packages of nodes: the route that shows them, and the deployment that is checked against them."""

import pytest
from msgspec.structs import replace
from tests.unit.core.test_environment import environment
from tests.unit.gateway.conftest import Gateway

from gpufaas_core.bundle import Needs
from gpufaas_core.model import Device, DeviceId
from gpufaas_core.units import GiB


@pytest.fixture(autouse=True)
def two_nodes(gateway: Gateway) -> None:
    """n1 has scikit-learn, n2 has not."""
    gateway.workers.joined = [
        Device(DeviceId(f"{node}/cpu:0"), "cpu", 2 * GiB, {"zone": node}) for node in ("n1", "n2")
    ]
    gateway.workers.provided = {
        "n1": environment(numpy="2.1.0", scikit_learn="1.7.0"), "n2": environment(numpy="2.1.0"),
    }  # fmt: skip


def needs(gateway: Gateway, *packages: str) -> None:
    manifest = gateway.workers.manifests[gateway.bundle]
    gateway.workers.manifests[gateway.bundle] = replace(manifest, needs=Needs(packages=packages))


async def test_the_route_says_what_nodes_provide_and_which(gateway: Gateway) -> None:
    gateway.workers.provided["n2"] = gateway.workers.provided["n1"]

    answer = await gateway.client.get("/system/environments")

    assert answer.status_code == 200
    [found] = answer.json()
    assert (found["nodes"], found["python"], found["abi"]) == (["n1", "n2"], "3.11.7", "cp311")
    assert found["distributions"] == {"numpy": {"version": "2.1.0"}, "scikit-learn": {"version": "1.7.0"}}


async def test_for_a_function_it_says_that_of_the_nodes_on_which_it_may_run(gateway: Gateway) -> None:

    answer = await gateway.client.post("/system/environments", json=gateway.body(constraints=["zone=n2"]))
    nowhere = await gateway.client.post("/system/environments", json=gateway.body(constraints=["zone=n3"]))

    assert [each["nodes"] for each in answer.json()] == [["n2"]]
    assert (nowhere.status_code, "none satisfies zone=n3" in nowhere.text) == (400, True)


async def test_a_bundle_that_one_of_its_nodes_does_not_fit_is_refused_with_the_node(gateway: Gateway) -> None:
    needs(gateway, "scikit-learn>=1.6")

    answer = await gateway.client.post("/system/functions", json=gateway.body())

    assert answer.status_code == 400
    assert "the bundle of echo does not fit node n2: Python 3.11.7" in answer.text
    assert "it needs scikit-learn>=1.6, and there is none" in answer.text
    assert gateway.catalogue.find("echo") is None


async def test_it_is_deployed_where_its_constraints_leave_only_nodes_that_fit(gateway: Gateway) -> None:
    needs(gateway, "scikit-learn>=1.6")

    await gateway.deployed(constraints=["zone=n1"])


async def test_what_is_no_requirement_in_an_uploaded_bundle_is_the_senders_mistake(gateway: Gateway) -> None:
    needs(gateway, "?!")

    assert (await gateway.client.post("/system/functions", json=gateway.body())).status_code == 400
