"""
The management app: the routes of OpenFaaS and ours, and how errors become answers.

Calls do not come here (`fronts.table`). Statuses are what real clients need: 200 and 202 but never 201 or 204
for functions, errors as text/plain, DELETE with a JSON body, and 400 instead of 422 for bodies.
"""

from collections.abc import Callable, Sequence
from typing import Final

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from gpufaas_core.errors import GpufaasError, InvalidSpec
from gpufaas_gateway.deploy import Deployer
from gpufaas_gateway.errors import METHODS, BadQuery, headers_of, status_of
from gpufaas_gateway.function_api import (
    UsageOf,
    alert_routes,
    deployment_routes,
    environment_routes,
    function_routes,
    log_routes,
)
from gpufaas_gateway.metrics import Metrics
from gpufaas_gateway.platform_api import artifact_routes, health_routes, page_routes, status_routes
from gpufaas_gateway.ports import Artifacts, LogReader, Scheduler, SecretStore
from gpufaas_gateway.resource_api import namespace_routes, quota_routes, secret_routes
from gpufaas_gateway.wire import explain_errors

_CLIENT_GONE: Final = 499  # The client hung up while it sent its body. Only metrics see this status.


def management_app(
    deployer: Deployer,
    scheduler: Scheduler,
    logs: LogReader,
    artifacts: Artifacts,
    metrics: Metrics,
    secrets: SecretStore,
    *,
    version: str,
    commit: str = "unknown",
    orchestration: Callable[[], str] = lambda: "processes",
    usage_of: UsageOf | None = None,
    fault: Callable[[], str] = lambda: "",
    gone: Sequence[str] = (),
    standbys: Callable[[], dict[str, int]] | None = None,
) -> FastAPI:
    """
    Return the ASGI app of the management routes.

    :param version: of the platform, for ``/system/info``; must not be empty, nor must *commit*
    :param orchestration: returns what functions run as: ``processes``, ``processes and containers``
    :param fault: returns why no model can be loaded: the node in this process cannot, or no scheduler leads; else empty
    :param standbys: returns the processes of this node that wait to become workers, for ``/system/status``
    :param gone: one line for each device of this process that failed and is no longer used
    """
    catalogue = deployer.catalogue
    app = FastAPI(version=version, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_exception_handler(GpufaasError, _platform_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    for routes in (
        function_routes(deployer, scheduler, usage_of),
        deployment_routes(deployer, logs),
        alert_routes(deployer, scheduler),
        namespace_routes(deployer),
        quota_routes(deployer),
        secret_routes(deployer, secrets),
        environment_routes(deployer),
        log_routes(catalogue, logs),
        status_routes(catalogue, scheduler, metrics, version, commit, orchestration, standbys),
        artifact_routes(artifacts),
        health_routes(catalogue, scheduler, fault, gone),
        page_routes(app),
    ):
        app.include_router(routes)
    return app


async def _invalid(request: Request, exc: Exception) -> Response:
    """Answer 400 for a body, as OpenFaaS does, and FastAPI's 422 for a query only."""
    assert isinstance(exc, RequestValidationError)
    errors = exc.errors()
    kind = BadQuery if all(each["loc"][0] == "query" for each in errors) else InvalidSpec
    return await _platform_error(request, kind(explain_errors(errors)))


async def _platform_error(_: Request, exc: Exception) -> Response:
    assert isinstance(exc, GpufaasError)
    return PlainTextResponse(f"{exc}\n", status_code=status_of(exc), headers=headers_of(exc))


async def _http_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    if exc.status_code == 405:
        # Starlette names the methods of one route only; a path may have several. A router is asked, not looked into.
        allowed = [
            method
            for method in sorted(METHODS)
            if any(each.matches({**request.scope, "method": method})[0] is Match.FULL for each in request.app.routes)
        ]
        return Response(status_code=405, headers={"Allow": ", ".join(allowed)})
    text = "404 page not found" if exc.status_code == 404 else exc.detail
    return PlainTextResponse(f"{text}\n", status_code=exc.status_code, headers={**headers_of(), **(exc.headers or {})})


async def _client_gone(_: Request, _exc: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)
