"""The document at /openapi.json matches the routes."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from tests.unit.async_calls.fakes import FakeCallbacks, MemoryAsyncQueue
from tests.unit.gateway.conftest import Gateway

from gpufaas_apps.plan_api import plan_routes
from gpufaas_async_calls.api import AsyncInvocations, async_routes
from gpufaas_async_calls.calls import AsyncCalls
from gpufaas_async_calls.retry import RetryPolicy
from gpufaas_core.model import EngineStatus, NodeView
from gpufaas_gateway.auth import is_public
from gpufaas_gateway.errors import METHODS, QuotaExceeded
from gpufaas_gateway.node_api import node_routes
from gpufaas_gateway.openapi import describe
from gpufaas_gateway.platform_api import prune_routes

NAMESPACES = ("/system/namespaces", "/system/namespaces/", "/system/namespace", "/system/namespace/")
OPERATIONS = {
    "/": "get head",
    "/async-function/{name}": "delete get post",
    "/async/{call}": "get",
    "/docs": "get",
    "/function/{name}": " ".join(METHODS).lower(),
    "/healthz": "get head",
    "/metrics": "get head",
    "/openapi.json": "get",
    "/readyz": "get head",
    "/system/alert": "post",
    "/system/artifacts/{digest}": "head put",
    "/system/async/dead": "get",
    "/system/async/dead/{call}": "delete",
    "/system/async/dead/{call}/retry": "post",
    "/system/environments": "get post",
    "/system/explain/{call}": "get",
    "/system/function/{name}": "get",
    "/system/function/{name}/revisions": "get",
    "/system/function/{name}/rollback": "post",
    "/system/functions": "delete get post put",
    "/system/info": "get",
    "/system/logs": "get",
    **dict.fromkeys((*NAMESPACES, "/system/namespace/{name}", "/system/namespaces/{name}"), "delete get post put"),
    "/system/namespace/{name}/quota": "delete get put",
    "/system/nodes": "get",
    "/system/nodes/{name}": "get",
    "/system/nodes/{name}/drain": "delete post",
    "/system/plan": "get put",
    "/system/plan/history": "get",
    **dict.fromkeys((f"/system/plan/{each}" for each in ("make", "pin", "rollback", "unpin")), "post"),
    "/system/plan/{version}": "get",
    "/system/prune": "post",
    "/system/scale-function/{name}": "post",
    "/system/secrets": "delete get post put",
    "/system/status": "get",
    "/ui/": "get",
}


async def never(*_: Any) -> None: ...


def served(calls: AsyncCalls) -> AsyncInvocations:
    return AsyncInvocations(None, calls, served_by="gpufaas/1", callbacks=None)  # type: ignore[arg-type]


@pytest.fixture
def whole(gateway: Gateway, tmp_path: Path) -> Gateway:
    """With the routes that the composition root adds."""
    calls = AsyncCalls(MemoryAsyncQueue(tmp_path), never, FakeCallbacks(), lambda _: RetryPolicy())
    catalogue, plans = gateway.catalogue, gateway.plans
    for each in (
        async_routes(calls, served(calls)), node_routes(NoNodes()), prune_routes(catalogue, never),
        plan_routes(catalogue, plans, gateway.scheduler.status, lambda _: asyncio.sleep(0, {})),
    ):  # fmt: skip
        gateway.app.include_router(each)
    return gateway


class NoNodes:
    def nodes(self) -> list[NodeView]:
        return []

    def status(self) -> EngineStatus:
        return EngineStatus("lalb-o3", (), {}, {})

    async def drain(self, node: str, drain: bool) -> None:
        raise NotImplementedError


@pytest.fixture
def described(whole: Gateway) -> dict[str, Any]:
    return describe(whole.app)


def operations(described: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(method.upper(), path): op for path, ops in described["paths"].items() for method, op in ops.items()}


def test_it_has_the_routes_that_clients_rely_on(described: dict[str, Any]) -> None:
    found = {path: " ".join(sorted(methods)) for path, methods in described["paths"].items()}

    assert {path: " ".join(sorted(methods.split())) for path, methods in OPERATIONS.items()} == found


async def test_every_path_refuses_another_method_and_names_those_that_it_has(
    whole: Gateway, described: dict[str, Any]
) -> None:
    for path, methods in described["paths"].items():
        if path != "/function/{name}":
            for method in ("TRACE", *[each for each in METHODS if each.lower() not in methods][:1]):
                answer = await whole.client.request(
                    method, path.replace("{version}", "1").replace("{", "").replace("}", "")
                )
                assert (answer.status_code, answer.text) == (405, ""), (method, path)
                assert answer.headers["allow"].lower().split(", ") == sorted(methods), (method, path)


async def test_to_get_a_function_of_asynchronous_calls_is_to_mistake_the_method(
    gateway: Gateway, tmp_path: Path
) -> None:
    calls = AsyncCalls(MemoryAsyncQueue(tmp_path), never, FakeCallbacks(), lambda _: RetryPolicy())
    gateway.app.include_router(async_routes(calls, served(calls), lambda name: name == "f"))

    mistaken, unknown = [await gateway.client.get(f"/async-function/{name}") for name in "fg"]

    assert (mistaken.status_code, mistaken.headers["allow"]) == (405, "DELETE, GET, POST")
    assert unknown.status_code == 404


async def test_it_is_served_behind_the_password(whole: Gateway, described: dict[str, Any]) -> None:
    refused = await whole.stranger.get("/openapi.json")
    answer = await whole.admin.get("/openapi.json")

    assert refused.status_code == 401
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert answer.json() == described


def test_it_asks_for_a_password_where_the_gateway_does(described: dict[str, Any]) -> None:
    for (method, path), op in operations(described).items():
        public = is_public(method, path)
        assert (op.get("security") == []) == public, (method, path)
        assert ("401" in op["responses"]) == (not public), (method, path)


def test_what_a_path_names_is_described_and_every_reference_leads_somewhere(described: dict[str, Any]) -> None:
    for (method, path), op in operations(described).items():
        named = {each["name"] for each in op.get("parameters", ()) if each["in"] == "path"}
        assert named == set(re.findall(r"{(\w+)}", path)), (method, path)
        assert op["responses"], (method, path)
        assert all(each["description"] for each in op["responses"].values()), (method, path)

    references = set(re.findall(r"'#/components/schemas/(\w+)'", repr(described)))
    assert references <= set(described["components"]["schemas"])
    assert {"FunctionDeployment", "Secret", "FunctionStatus", "EngineStatus", "NodeShown"} <= references


def test_a_route_says_what_it_takes_and_with_which_errors_it_ends(described: dict[str, Any]) -> None:
    """Bodies from the models that check them, statuses and words from the one table of errors."""
    deploy = operations(described)["POST", "/system/functions"]
    logs = operations(described)["GET", "/system/logs"]

    assert deploy["requestBody"]["content"] == {
        "application/json": {"schema": {"$ref": "#/components/schemas/FunctionDeployment"}}
    }
    assert {int(status) for status in deploy["responses"]} >= {202, 400, 401, 403, 408, 409, 413, 502, 503, 507}
    assert deploy["responses"]["403"]["description"] == " ".join((QuotaExceeded.__doc__ or "").split())
    assert "422" not in deploy["responses"]
    assert {each["name"] for each in logs["parameters"]} == {
        "name", "namespace", "instance", "callId", "tail", "since", "follow",
    }  # fmt: skip
