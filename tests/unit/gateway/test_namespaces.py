"""Namespaces: created, changed and removed, and functions in them."""

import asyncio
from pathlib import Path

import pytest
from tests.unit.gateway.conftest import Gateway, is_platform_error
from tests.unit.gateway.fakes import MemorySecrets, MemoryStore

from gpufaas_core.errors import StorageFailed
from gpufaas_gateway.catalogue import Catalogue
from gpufaas_gateway.errors import NotEmpty
from gpufaas_gateway.namespaces import Namespaces
from gpufaas_gateway.quotas import NamespaceQuotas
from gpufaas_gateway.spec import Namespace

DEV = {"name": "dev", "annotations": {"openfaas": "1"}, "labels": {"openfaas": "1", "team": "a"}}


@pytest.fixture
async def dev(gateway: Gateway) -> Gateway:
    assert (await gateway.client.post("/system/namespace/", json=DEV)).status_code == 201
    return gateway


async def test_at_first_there_is_the_default_one_alone(gateway: Gateway) -> None:
    assert (await gateway.client.get("/system/namespaces")).json() == ["openfaas-fn"]
    assert (await gateway.client.get("/system/namespace/openfaas-fn")).json()["name"] == "openfaas-fn"


async def test_the_clients_life_of_a_namespace(gateway: Gateway) -> None:
    """As faas-cli does it: a trailing slash, a whole object for an update, a body for a delete (appendix A)."""
    created = await gateway.client.post("/system/namespace/", json=DEV)
    listed = await gateway.client.get("/system/namespaces")
    shown = await gateway.client.get("/system/namespace/dev")
    updated = await gateway.client.put("/system/namespace/dev", json={"name": "dev", "labels": {"team": "b"}})
    changed = await gateway.client.get("/system/namespace/dev")
    removed = await gateway.client.request("DELETE", "/system/namespace/dev", json={"name": "dev", "labels": {}})

    assert [each.status_code for each in (created, listed, shown, updated, removed)] == [201, 200, 200, 202, 202]
    assert listed.json() == ["dev", "openfaas-fn"]
    assert shown.json() == DEV
    assert changed.json() == {"name": "dev", "labels": {"team": "b"}}
    assert (await gateway.client.get("/system/namespaces")).json() == ["openfaas-fn"]
    assert gateway.store.namespaces() == []


@pytest.mark.parametrize("path", ["/system/namespace", "/system/namespaces", "/system/namespaces/"])
async def test_the_other_spellings_are_meant_too(gateway: Gateway, path: str) -> None:
    created = await gateway.client.post(path, json=DEV)
    listed = await gateway.client.get(path)
    shown = await gateway.client.get("/system/namespaces/dev")
    updated = await gateway.client.put("/system/namespaces/dev", json=DEV)
    removed = await gateway.client.delete("/system/namespaces/dev")

    assert [each.status_code for each in (created, updated, removed)] == [201, 202, 202]
    assert (listed.json(), shown.json()) == (["dev", "openfaas-fn"], DEV)


async def test_namespaces_are_there_after_a_restart(tmp_path: Path, dev: Gateway) -> None:
    await dev.deployed(namespace="dev")
    restarted = Gateway(tmp_path / "again")
    restarted.store.known_namespaces = dev.store.known_namespaces
    restarted.store.records = dev.store.records
    await restarted.deployer.load()

    assert (await restarted.client.get("/system/namespaces")).json() == ["dev", "openfaas-fn"]
    assert restarted.catalogue.find("echo.dev") is not None
    await restarted.client.aclose()


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("POST", "/system/namespace/", {"name": "dev"}, 409, "namespace dev exists"),
        ("POST", "/system/namespace/", {"name": "openfaas-fn"}, 409, "exists"),
        ("POST", "/system/namespace/", {}, 400, "name is missing"),
        ("POST", "/system/namespace/", {"name": "Dev"}, 400, "'Dev' is not a namespace"),
        ("POST", "/system/namespace/", {"name": "kube-system"}, 400, "kube-"),
        ("POST", "/system/namespace/", {"name": "../etc"}, 400, "is not a namespace"),
        ("POST", "/system/namespace/", {"name": "a", "labels": {"a": 1}}, 400, "labels.a: input should be"),
        ("POST", "/system/namespace/", {"name": 1}, 400, "name: input should be a valid string"),
        ("POST", "/system/namespace/a", {"name": "b"}, 400, "the body says 'b', the path 'a'"),
        ("GET", "/system/namespace/none", None, 404, "namespace none not found"),
        ("PUT", "/system/namespace/none", {"name": "none"}, 404, "namespace none not found"),
        ("DELETE", "/system/namespace/none", {"name": "none"}, 404, "namespace none not found"),
        ("PUT", "/system/namespace/openfaas-fn", {"name": "openfaas-fn"}, 400, "default namespace"),
        ("DELETE", "/system/namespace/openfaas-fn", {"name": "openfaas-fn"}, 400, "default namespace"),
        ("DELETE", "/system/namespace/dev", {"name": "other"}, 400, "the body says 'other'"),
    ],
)
async def test_what_cannot_be_is_said(
    dev: Gateway, method: str, path: str, body: object, status: int, message: str
) -> None:
    answer = await dev.client.request(method, path, json=body)

    assert (answer.status_code, message in answer.text) == (status, True), answer.text
    assert is_platform_error(answer)
    assert (await dev.client.get("/system/namespaces")).json() == ["dev", "openfaas-fn"]


async def test_a_namespace_with_functions_stays(dev: Gateway) -> None:
    await dev.deployed(namespace="dev")

    refused = await dev.client.request("DELETE", "/system/namespace/dev", json={"name": "dev"})
    await dev.delete({"functionName": "echo", "namespace": "dev"})
    removed = await dev.client.request("DELETE", "/system/namespace/dev", json={"name": "dev"})

    assert (refused.status_code, removed.status_code) == (409, 202)
    assert "has functions: remove them first" in refused.text


async def test_the_secrets_of_a_namespace_go_with_it(dev: Gateway) -> None:
    dev.secrets.create("dev", "key", b"old")
    dev.secrets.create("openfaas-fn", "key", b"kept")

    await dev.client.delete("/system/namespace/dev")

    assert dev.secrets.values == {("openfaas-fn", "key"): b"kept"}


async def test_a_namespace_stays_while_a_function_is_being_deployed_into_it(dev: Gateway) -> None:
    async def remove() -> None:
        with pytest.raises(NotEmpty):
            await dev.deployer.namespaces.remove("dev")

    attempts: list[asyncio.Task[None]] = []
    dev.workers.during_check = lambda: attempts.append(asyncio.ensure_future(remove()))

    await dev.deployed(namespace="dev")
    await attempts[0]

    assert dev.catalogue.find("echo.dev") is not None


async def test_a_full_disk_changes_nothing() -> None:
    store = MemoryStore()
    namespaces = Namespaces(store, MemorySecrets(), NamespaceQuotas(store), Catalogue())
    await namespaces.create(Namespace("dev"))
    store.failure = "the disk is full"

    for attempt in (
        namespaces.create(Namespace("other")),
        namespaces.update(Namespace("dev", {"a": "b"})),
        namespaces.remove("dev"),
    ):
        with pytest.raises(StorageFailed):
            await attempt

    assert (namespaces.names(), namespaces.get("dev")) == (["dev", "openfaas-fn"], Namespace("dev"))


# --- functions in namespaces ---


async def test_functions_of_one_name_live_in_two_namespaces(dev: Gateway) -> None:
    await dev.deployed()
    await dev.deployed(namespace="dev")

    here, there = dev.found(), dev.found("echo.dev")

    assert (here.full_name, there.full_name) == ("echo.openfaas-fn", "echo.dev")
    assert [each["namespace"] for each in (await dev.client.get("/system/functions")).json()] == ["openfaas-fn"]
    assert [each["namespace"] for each in (await dev.client.get("/system/functions?namespace=dev")).json()] == ["dev"]


@pytest.mark.parametrize(
    "url",
    ["/system/function/echo.dev", "/system/function/echo?namespace=dev", "/system/function/echo.dev?namespace=dev"],
)
async def test_the_namespace_is_in_the_name_or_in_the_query(dev: Gateway, url: str) -> None:
    await dev.client.post("/system/functions?namespace=dev", json=dev.body())

    assert (await dev.client.get(url)).json()["namespace"] == "dev"
    assert (await dev.client.get("/system/function/echo")).status_code == 404


async def test_a_name_without_namespace_never_means_another_ones_function(dev: Gateway) -> None:
    await dev.deployed(namespace="dev")

    assert dev.catalogue.find("echo") is None
    assert (await dev.delete({"functionName": "echo"})).status_code == 404


async def test_a_namespace_that_does_not_exist_takes_no_function(gateway: Gateway) -> None:
    for query, body in (("", gateway.body(namespace="dev")), ("?namespace=dev", gateway.body())):
        answer = await gateway.client.post(f"/system/functions{query}", json=body)

        assert answer.status_code == 400
        assert "namespace: 'dev' does not exist: create it first" in answer.text
    assert (await gateway.client.get("/system/functions?namespace=dev")).json() == []
