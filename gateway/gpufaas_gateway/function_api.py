"""The management routes of functions: what is deployed, deploying, removing, scaling, logs (openfaas.md §3)."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from datetime import datetime
from typing import Final

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from gpufaas_core.constraints import MEMORY
from gpufaas_core.errors import InvalidSpec, UnknownFunction
from gpufaas_core.logs import LogLine, LogQuery
from gpufaas_core.model import EngineStatus, FunctionId
from gpufaas_core.units import Bytes
from gpufaas_gateway.answers import encode, error_answer, json_answer, read_body, starting
from gpufaas_gateway.catalogue import Catalogue, Deployed, replicas_of
from gpufaas_gateway.deploy import Deployer
from gpufaas_gateway.function_state import Copies, copies_of, state_of
from gpufaas_gateway.ports import FunctionLogs, Scheduler
from gpufaas_gateway.spec import DEFAULT_NAMESPACE
from gpufaas_gateway.wire import DeleteFunctionRequest, FunctionDeployment, ScaleServiceRequest, parse, spec_fields

UsageOf = Callable[[FunctionId], Awaitable[tuple[float, Bytes] | None]]
"""Millicores and bytes that a function's workers use now, all of them together; None: it has none."""

_TRUE: Final = frozenset({"1", "t", "T", "TRUE", "true", "True"})  # Go's ParseBool
_NDJSON: Final = "application/x-ndjson"
_UNPROCESSABLE: Final = 422


def add_function_routes(app: FastAPI, catalogue: Catalogue, scheduler: Scheduler, usage_of: UsageOf | None) -> None:
    """Add those that tell."""

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

    @app.get("/system/function/{name}")
    async def describe_function(name: str, request: Request) -> Response:
        if not catalogue.loaded:
            return starting()
        found = find(catalogue, name, request.query_params.get("namespace"))
        now = scheduler.status()
        status = _status_of(found, now, copies_of(now))
        if request.query_params.get("usage", "") in _TRUE:
            used = await usage_of(found.function_id) if usage_of is not None else None
            if used is not None:
                status["usage"] = {"cpu": round(used[0], 3), "totalMemoryBytes": used[1]}
        return json_answer(status)


def add_deploy_routes(app: FastAPI, deployer: Deployer, logs: FunctionLogs) -> None:
    """Add those that change."""
    catalogue = deployer.catalogue

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
        found = find(catalogue, asked.function_name, asked.namespace or request.query_params.get("namespace"))
        await deployer.remove(found.name, found.namespace)
        await asyncio.to_thread(logs.drop, found.name, found.namespace)
        return Response(status_code=202)

    @app.post("/system/scale-function/{name}")
    async def scale_function(name: str, request: Request) -> Response:
        asked = parse(ScaleServiceRequest, await read_body(request))
        if not catalogue.loaded:
            return starting()
        found = find(catalogue, name, asked.namespace or request.query_params.get("namespace"))
        if asked.service_name not in (None, "", name, found.name, found.full_name):
            raise InvalidSpec(f"serviceName: it is {asked.service_name[:80]!r}, but the path names {found.full_name}")
        deployer.scale(found, asked.replicas)
        return Response(status_code=202)


def add_log_route(app: FastAPI, catalogue: Catalogue, logs: FunctionLogs) -> None:
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
        key = key_of(name, query.get("namespace"))
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


def find(catalogue: Catalogue, name: str, namespace: str | None) -> Deployed:
    found = catalogue.find(key_of(name, namespace))
    if found is None:
        raise UnknownFunction(
            f"function {name[:80]} in {namespace or DEFAULT_NAMESPACE} is not deployed: 'gpufaas list' shows what is"
        )
    return found


def key_of(name: str, namespace: str | None) -> str:
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
