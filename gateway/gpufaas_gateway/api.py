"""
The management routes: functions, logs, artifacts, health, metrics (openfaas.md §3; ours begin with /system/artifacts,
/system/environments and /system/status, or end in /quota). Invocations do not come here: `invoke.py` serves them
without FastAPI.

Statuses are what real clients need, which is not always what one would choose: 202 and 200 but never 201 or 204 for
functions, text/plain errors, DELETE with a JSON body, and no 422 for bodies.
"""

from collections.abc import Callable, Sequence
from typing import Final

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from gpufaas_core.errors import GpufaasError
from gpufaas_gateway.alerts import add_alert_route
from gpufaas_gateway.deploy import Deployer
from gpufaas_gateway.environments import add_environment_routes
from gpufaas_gateway.errors import METHODS, headers_of, status_of
from gpufaas_gateway.function_api import UsageOf, add_deploy_routes, add_function_routes, add_log_route
from gpufaas_gateway.metrics import Metrics
from gpufaas_gateway.platform_api import add_artifact_routes, add_health_routes, add_pages, add_status_routes
from gpufaas_gateway.ports import Artifacts, FunctionLogs, Scheduler, Secrets
from gpufaas_gateway.resource_api import add_namespace_routes, add_quota_routes, add_secret_routes

_CLIENT_GONE: Final = 499  # in the middle of its body: nothing was taken, and nobody reads this


def management_app(
    deployer: Deployer,
    scheduler: Scheduler,
    logs: FunctionLogs,
    artifacts: Artifacts,
    metrics: Metrics,
    secrets: Secrets,
    *,
    version: str,
    commit: str = "unknown",
    orchestration: Callable[[], str] = lambda: "processes",
    usage_of: UsageOf | None = None,
    fault: Callable[[], str] = lambda: "",
    gone: Sequence[str] = (),
) -> FastAPI:
    """
    Return the ASGI app of the management routes.

    :param version: of the platform, for ``/system/info``; like *commit* not empty
    :param orchestration: what functions run as here, now
    :param fault: why the node in this process can start no worker; empty: it can, or there is none here
    :param gone: devices of this process that were given up, a line for each
    """
    catalogue = deployer.catalogue
    app = FastAPI(title="gpufaas", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_exception_handler(GpufaasError, _platform_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _nobody_there)
    add_function_routes(app, catalogue, scheduler, usage_of)
    add_deploy_routes(app, deployer, logs)
    add_alert_route(app, deployer, scheduler)
    add_namespace_routes(app, deployer)
    add_quota_routes(app, deployer)
    add_secret_routes(app, deployer, secrets)
    add_environment_routes(app, deployer)
    add_log_route(app, catalogue, logs)
    add_status_routes(app, catalogue, scheduler, metrics, version, commit, orchestration)
    add_artifact_routes(app, artifacts)
    add_health_routes(app, catalogue, scheduler, fault, gone)
    add_pages(app, version)
    return app


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


async def _nobody_there(_: Request, _exc: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)
