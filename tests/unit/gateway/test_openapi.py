"""The document at /openapi.json against the routes that there are."""

import re
from pathlib import Path
from typing import Any

import pytest
from fastapi import APIRouter
from tests.unit.gateway.conftest import Gateway

from gpufaas_async_calls.api import AsyncInvocations, async_routes
from gpufaas_async_calls.calls import AsyncCalls
from gpufaas_async_calls.retry import RetryPolicy
from gpufaas_async_calls.testing import FakeCallbacks, MemoryAsyncQueue
from gpufaas_gateway.auth import is_public
from gpufaas_gateway.builds import build_routes
from gpufaas_gateway.errors import METHODS
from gpufaas_gateway.openapi import document

INVOCATIONS = {(method, "/function/{name}") for method in METHODS}
"""Served without FastAPI, so that no route can be walked."""


@pytest.fixture
def described() -> dict[str, Any]:
    return document("0.1.0")


def operations(described: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(method.upper(), path): op for path, ops in described["paths"].items() for method, op in ops.items()}


async def never(*_: Any) -> None: ...


def served(calls: AsyncCalls) -> AsyncInvocations:
    return AsyncInvocations(None, calls, served_by="gpufaas/1")  # type: ignore[arg-type]


@pytest.fixture
def included(tmp_path: Path) -> list[APIRouter]:
    """Routes that the composition root adds."""

    calls = AsyncCalls(MemoryAsyncQueue(tmp_path), never, FakeCallbacks(), lambda _: RetryPolicy())
    return [async_routes(calls, served(calls)), build_routes(None)]


async def test_it_has_every_route_and_no_other(
    gateway: Gateway, included: list[APIRouter], described: dict[str, Any]
) -> None:
    routes = [*gateway.app.routes, *(route for each in included for route in each.routes)]

    served = {
        (method, route.path.replace(":path", ""))  # type: ignore[attr-defined]
        for route in routes
        for method in route.methods  # type: ignore[attr-defined]
    }

    assert set(operations(described)) == served | INVOCATIONS


async def test_every_path_refuses_other_methods_and_names_those_that_it_has(
    gateway: Gateway, included: list[APIRouter], described: dict[str, Any]
) -> None:
    for each in included:
        gateway.app.include_router(each)

    for path, methods in described["paths"].items():
        if ("GET", path) not in INVOCATIONS:
            for method in ("TRACE", *(each for each in METHODS if each.lower() not in methods)):
                answer = await gateway.client.request(method, path.replace("{", "").replace("}", ""))
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


async def test_it_is_served_behind_the_password(gateway: Gateway, described: dict[str, Any]) -> None:
    refused = await gateway.stranger.get("/openapi.json")
    answer = await gateway.admin.get("/openapi.json")

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
        named = {each["name"] for each in op["parameters"] if each["in"] == "path"}
        assert named == set(re.findall(r"{(\w+)}", path)), (method, path)
        assert op["responses"], (method, path)

    references = set(re.findall(r"'#/components/schemas/(\w+)'", repr(described)))
    assert references <= set(described["components"]["schemas"])
    assert {"FunctionDeployment", "Secret", "FunctionStatus"} <= references
