"""
The management routes: functions, logs, artifacts, health, metrics (openfaas.md §3; ours begin with /system/artifacts,
/system/environments and /system/status, or end in /quota). Invocations do not come here: `invoke.py` serves them
without FastAPI.

Statuses are what real clients need, which is not always what one would choose: 202 and 200 but never 201 or 204 for
functions, text/plain errors, DELETE with a JSON body, and no 422 for bodies.
"""

import asyncio
import platform
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Final

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from gpufaas_core.constraints import MEMORY
from gpufaas_core.errors import CorruptArtifact, GpufaasError, InvalidSpec, UnknownFunction
from gpufaas_core.logs import LogLine, LogQuery
from gpufaas_core.model import CallId, EngineStatus, FunctionId
from gpufaas_core.status_metrics import full_name_of
from gpufaas_core.units import Bytes, MiB
from gpufaas_gateway.alerts import add_alert_route
from gpufaas_gateway.answers import encode, error_answer, json_answer, pieces, read_body, starting
from gpufaas_gateway.catalogue import Catalogue, Deployed, replicas_of
from gpufaas_gateway.deploy import Deployer
from gpufaas_gateway.docs_page import render
from gpufaas_gateway.environments import add_environment_routes
from gpufaas_gateway.errors import METHODS, UnknownCall, headers_of, status_of
from gpufaas_gateway.function_state import Copies, copies_of, state_of
from gpufaas_gateway.metrics import CONTENT_TYPE, Metrics
from gpufaas_gateway.openapi import document
from gpufaas_gateway.page import PAGE
from gpufaas_gateway.ports import Artifacts, FunctionLogs, Scheduler, Secrets
from gpufaas_gateway.resource_api import add_namespace_routes, add_quota_routes, add_secret_routes
from gpufaas_gateway.spec import DEFAULT_NAMESPACE, check_digest
from gpufaas_gateway.wire import DeleteFunctionRequest, FunctionDeployment, ScaleServiceRequest, parse, spec_fields

UsageOf = Callable[[FunctionId], Awaitable[tuple[float, Bytes] | None]]
"""Millicores and bytes that a function's workers use now, all of them together; None: it has none."""

_WRITE_BYTES: Final[Bytes] = 1 * MiB  # one hop to a thread per MiB of an upload, and not one per TCP segment
_TRUE: Final = frozenset({"1", "t", "T", "TRUE", "true", "True"})  # Go's ParseBool
_NDJSON: Final = "application/x-ndjson"
_UNPROCESSABLE: Final = 422
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

    @app.get("/system/functions")
    async def list_functions(request: Request) -> Response:
        if not catalogue.loaded:
            return starting()
        status = scheduler.status()
        copies = copies_of(status)
        functions = catalogue.all(request.query_params.get("namespace") or DEFAULT_NAMESPACE)
        return json_answer(
            [{**_status_of(each, status, copies), "invocationCount": each.invocations} for each in functions]
        )

    @app.post("/system/functions")
    async def create_function(request: Request) -> Response:
        return await deploy(request, update=False)

    @app.put("/system/functions")
    async def update_function(request: Request) -> Response:
        return await deploy(request, update=True)

    async def deploy(request: Request, update: bool) -> Response:
        asked = parse(FunctionDeployment, await read_body(request))
        if not catalogue.loaded:
            return starting()
        spec = asked.spec()
        if spec.namespace is None and (namespace := request.query_params.get("namespace")):
            spec = msgspec.structs.replace(spec, namespace=namespace)
        await deployer.deploy(spec, update)
        # 200 makes faas-cli say that a rolling update was attempted, and that is what an update is.
        return Response(status_code=200 if update else 202)

    @app.delete("/system/functions")
    async def remove_function(request: Request) -> Response:
        asked = parse(DeleteFunctionRequest, await read_body(request))
        if not catalogue.loaded:
            return starting()
        found = find(asked.function_name, asked.namespace or request.query_params.get("namespace"))
        await deployer.remove(found.name, found.namespace)
        await asyncio.to_thread(logs.drop, found.name, found.namespace)
        return Response(status_code=202)

    @app.get("/system/function/{name}")
    async def describe_function(name: str, request: Request) -> Response:
        if not catalogue.loaded:
            return starting()
        found = find(name, request.query_params.get("namespace"))
        now = scheduler.status()
        status = _status_of(found, now, copies_of(now))
        if request.query_params.get("usage", "") in _TRUE:
            used = await usage_of(found.function_id) if usage_of is not None else None
            if used is not None:
                status["usage"] = {"cpu": round(used[0], 3), "totalMemoryBytes": used[1]}
        return json_answer(status)

    def find(name: str, namespace: str | None) -> Deployed:
        found = catalogue.find(_key(name, namespace))
        if found is None:
            raise UnknownFunction(
                f"function {name[:80]} in {namespace or DEFAULT_NAMESPACE} is not deployed: "
                "'gpufaas list' shows what is"
            )
        return found

    @app.post("/system/scale-function/{name}")
    async def scale_function(name: str, request: Request) -> Response:
        asked = parse(ScaleServiceRequest, await read_body(request))
        if not catalogue.loaded:
            return starting()
        found = find(name, asked.namespace or request.query_params.get("namespace"))
        if asked.service_name not in (None, "", name, found.name, found.full_name):
            raise InvalidSpec(f"serviceName: it is {asked.service_name[:80]!r}, but the path names {found.full_name}")
        deployer.scale(found, asked.replicas)
        return Response(status_code=202)

    add_alert_route(app, deployer, scheduler)
    add_namespace_routes(app, deployer)
    add_quota_routes(app, deployer)
    add_secret_routes(app, deployer, secrets)
    add_environment_routes(app, deployer)

    @app.get("/system/logs")
    async def function_logs(request: Request) -> Response:
        query = request.query_params
        name = query.get("name")
        if not name:
            return error_answer(400, "name: the query names no function: add ?name=FUNCTION")
        try:
            tail = int(query.get("tail") or 0)
            since = _moment(query["since"]) if query.get("since") else None
        except ValueError as exc:
            return error_answer(_UNPROCESSABLE, f"tail or since: {exc}")
        key = _key(name, query.get("namespace"))
        deployed = catalogue.find(key)
        name, namespace = (deployed.name, deployed.namespace) if deployed else _split(key)
        # What a deployment that failed has printed is read before there is a function.
        if deployed is None and not await asyncio.to_thread(logs.known, name, namespace):
            raise UnknownFunction(f"function {name[:80]} in {namespace[:80]} is not deployed, and has left no logs")
        asked = LogQuery(name, namespace, since, tail, query.get("instance") or "", query.get("callId") or "")
        if query.get("follow", "") in _TRUE:
            lines = logs.follow(asked)
            return StreamingResponse(_each(lines), media_type=_NDJSON)

        def kept() -> bytes:
            """In a thread: the whole log of one that prints much is 20 MB."""
            return b"".join(map(_line, logs.query(asked)))

        return Response(await asyncio.to_thread(kept), media_type=_NDJSON)

    @app.get("/system/info")
    async def info() -> Response:
        # faas-cli dies with a nil pointer when one of these is missing.
        release = {"commit_message": "", "sha": commit, "release": version}
        provider = {"provider": "gpufaas", "orchestration": orchestration(), "version": release}
        return json_answer({"provider": provider, "version": release, "arch": platform.machine() or "unknown"})

    @app.get("/system/status")
    async def status() -> Response:
        whole = _whole_status(scheduler.status(), catalogue)
        return json_answer({**whole, "asyncQueues": metrics.queues()})

    @app.get("/system/explain/{call}")
    async def explain(call: str) -> Response:
        found = await scheduler.explain(CallId(call))
        if found is None:
            raise UnknownCall(
                f"call {call!r} is not known: only calls of model functions that wait, or are among the last ones that "
                "were started, can be explained. Its id is X-Call-Id of the answer"
            )
        return json_answer(msgspec.to_builtins(found))

    @app.head("/system/artifacts/{digest}")
    async def has_artifact(digest: str) -> Response:
        check_digest(digest, "path")
        return Response(status_code=200 if await asyncio.to_thread(artifacts.has, digest) else 404)

    @app.put("/system/artifacts/{digest}")
    async def put_artifact(digest: str, request: Request) -> Response:
        check_digest(digest, "path")
        if await asyncio.to_thread(artifacts.has, digest):
            async for _ in pieces(request):
                pass  # read to its end: a client that is cut off in mid-upload would not see the answer
            return Response(status_code=201)
        try:
            await _receive(request, artifacts, digest)
        except CorruptArtifact as exc:
            return error_answer(400, str(exc))
        return Response(status_code=201)

    @app.api_route("/healthz", methods=["GET", "HEAD"])
    async def healthz() -> Response:
        return PlainTextResponse("OK") if catalogue.loaded else starting()

    @app.api_route("/readyz", methods=["GET", "HEAD"])
    async def readyz() -> Response:
        if not catalogue.loaded:
            return starting()
        if not scheduler.status().devices:
            return error_answer(503, "; ".join(gone) or "no device has joined yet: calls would wait")
        if reason := fault():
            return error_answer(503, f"{reason}; functions that are loaded answer meanwhile")
        return PlainTextResponse("\n".join(["OK", *gone]))

    @app.api_route("/", methods=["GET", "HEAD"])
    async def root() -> Response:
        return RedirectResponse("/ui/", status_code=307)

    @app.get("/ui/")
    async def ui() -> Response:
        return HTMLResponse(PAGE)

    described = document(version)
    description, docs_page = encode(described), render(described)

    @app.get("/docs")
    async def docs() -> Response:
        return HTMLResponse(docs_page)

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return Response(description, media_type="application/json")

    @app.api_route("/metrics", methods=["GET", "HEAD"])
    async def show_metrics() -> Response:
        return Response(metrics.render(), headers={"Content-Type": CONTENT_TYPE})

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


async def _receive(request: Request, artifacts: Artifacts, digest: str) -> None:
    """Stream the body to disk. Hashing and writing are off the loop, which serves invocations."""
    context = artifacts.writer(digest)
    writer = await asyncio.to_thread(context.__enter__)
    try:
        part = bytearray()
        async for chunk in pieces(request):
            part += chunk
            if len(part) >= _WRITE_BYTES:
                await asyncio.to_thread(writer.write, bytes(part))
                part.clear()
        await asyncio.to_thread(writer.write, bytes(part))
    except BaseException as exc:
        await asyncio.to_thread(context.__exit__, type(exc), exc, exc.__traceback__)
        raise
    await asyncio.to_thread(context.__exit__, None, None, None)


def _key(name: str, namespace: str | None) -> str:
    """Return what `Catalogue.find` knows: the namespace may come in the name, beside it, or not at all."""
    if not namespace:
        return name
    return name if name.endswith(f".{namespace}") else f"{name}.{namespace}"


def _split(key: str) -> tuple[str, str]:
    name, dot, namespace = key.rpartition(".")
    return (name, namespace) if dot else (key, DEFAULT_NAMESPACE)


def _moment(text: str) -> datetime:
    """
    Return an RFC 3339 time.

    :raises ValueError: it is none, or has no zone
    """
    # A '+' that a client forgot to encode arrives as a space.
    moment = datetime.fromisoformat(text.replace(" ", "+") if "T" in text else text)
    if moment.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone: write for example 2026-11-20T22:50:53Z")
    if not 1970 <= moment.year < 9999:
        # Go's zero time is of the year 1, and beyond both ends a change of zone overflows.
        return moment.replace(year=1970 if moment.year < 1970 else 9998, month=1, day=1)
    return moment


async def _each(lines: AsyncIterator[LogLine]) -> AsyncIterator[bytes]:
    async for line in lines:
        yield _line(line)


def _line(line: LogLine) -> bytes:
    return encode(line) + b"\n"


def _status_of(deployed: Deployed, status: EngineStatus, all_copies: Mapping[FunctionId, Copies]) -> dict[str, object]:
    """Return FunctionStatus (openfaas.md §4.2), and beside it what only we know, under ``gpufaas``."""
    replicas = replicas_of(deployed, status)
    copies = all_copies.get(deployed.function_id) or Copies()
    callable_now = deployed.unavailable is None
    failing = deployed.function_id in status.failing
    ours: dict[str, object] = {
        **state_of(deployed, status, copies, time.time()),
        "revision": deployed.record.revision,
        "bundle": deployed.spec.digest,
        "devices": list(copies.by_device),
        "copies": dict(copies.by_device),
        "hits": deployed.stats.hits,
        "misses": deployed.stats.misses,
    }
    if callable_now:
        ours |= {
            "kind": deployed.spec.kind,
            "slots": deployed.spec.slots,
            "memory": deployed.spec.memory,
            "memoryReason": deployed.why_memory,
            "timeout": deployed.timeout_s,
            "profiles": {
                kind: {
                    "load_s": each.load_s,
                    "service_s": each.service_s,
                    "occupation": each.occupation,
                    "measured": each.measured,
                    "estimated": each.estimated,
                }
                for kind, each in deployed.profiles.items()
            },
        }
        allowed = deployed.placement.among([known.device for known in status.devices])
        ours["memoryEnforcement"] = sorted({each.labels[MEMORY] for each in allowed if MEMORY in each.labels})
        if deployed.placement.asked:
            ours["placement"] = {
                "asked": [str(each) for each in deployed.placement.asked],
                "devices": [each.id for each in allowed],
            }
    else:
        ours["unavailable"] = deployed.unavailable
    return {
        **spec_fields(deployed.record),
        "replicas": replicas,
        # Ready is what can be called, and an idle function can be: loading is part of its first call. One that was
        # scaled to nothing can be called too, but who scaled it waits to see 0. What does not load is not ready.
        "availableReplicas": max(0 if failing else min(1, replicas), copies.ready) if callable_now else 0,
        "gpufaas": ours,
    }


def _whole_status(status: EngineStatus, catalogue: Catalogue) -> dict[str, object]:
    """Return `EngineStatus` as it is, with a ``name`` for each resident, and what was counted of each function."""
    whole: dict[str, object] = msgspec.to_builtins(status)
    whole["devices"] = [
        {
            **msgspec.to_builtins(each),
            "resident": [
                {
                    **msgspec.to_builtins(resident),
                    "name": full_name_of(resident.function),
                }
                for resident in each.resident
            ],
        }
        for each in status.devices
    ]
    whole["functions"] = {
        each.full_name: {
            "id": each.function_id,
            "kind": each.spec.kind,
            "invocations": each.invocations,
            "inflight": each.stats.inflight,
            "hits": each.stats.hits,
            "misses": each.stats.misses,
            "queue_s": each.stats.queue_s,
            "load_s": each.stats.load_s,
            "run_s": each.stats.run_s,
            "unavailable": each.unavailable,
        }
        for each in catalogue.everywhere()
    }
    return whole
