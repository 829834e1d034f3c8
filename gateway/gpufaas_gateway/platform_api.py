"""The management routes of the platform: version, status, health, metrics, artifacts, pages."""

import asyncio
import platform
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, FastAPI, Path, Query, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse

from gpufaas_core.constraints import isolation_of
from gpufaas_core.errors import CorruptArtifact, InvalidSpec, StorageFailed
from gpufaas_core.explanation import Explanation
from gpufaas_core.model import CallId, EngineStatus
from gpufaas_core.status_metrics import full_name_of
from gpufaas_core.units import Bytes, MiB
from gpufaas_gateway.catalogue import Catalogue
from gpufaas_gateway.docs_page import render
from gpufaas_gateway.errors import BadQuery, BodyTooSlow, NotReady, Starting, UnknownCall
from gpufaas_gateway.function_state import memory_advice
from gpufaas_gateway.metrics import CONTENT_TYPE, Metrics
from gpufaas_gateway.openapi import describe
from gpufaas_gateway.page import PAGE
from gpufaas_gateway.ports import Artifacts, Scheduler
from gpufaas_gateway.typed_routes import encode, get_and_head, json_of, pieces, refuses, router
from gpufaas_gateway.wire import Digest, GatewayInfo, Provider, Pruned, Version, Yes

_WRITE_BYTES: Final[Bytes] = 1 * MiB  # one hop to a thread per MiB of an upload, and not one per TCP segment
_ARTIFACT: Final = "/system/artifacts/{digest}"
_BYTES: Final = {"requestBody": {"required": True, "content": {"application/octet-stream": {}}}}


def status_routes(
    catalogue: Catalogue,
    scheduler: Scheduler,
    metrics: Metrics,
    version: str,
    commit: str,
    orchestration: Callable[[], str],
    standbys: Callable[[], dict[str, int]] | None = None,
) -> APIRouter:
    routes = router()

    @routes.get("/system/info")
    async def describe_platform() -> GatewayInfo:
        release = Version("", commit, version)
        return GatewayInfo(Provider("gpufaas", orchestration(), release), release, platform.machine() or "unknown")

    @routes.get("/system/status", responses={200: json_of(EngineStatus)})
    async def describe_status() -> Response:
        """Devices, queues and what is resident."""
        whole = _whole_status(scheduler.status(), catalogue)
        if standbys is not None:
            whole["standbys"] = standbys()
        return Response(encode({**whole, "asyncQueues": metrics.queues()}), media_type="application/json")

    @routes.get("/system/explain/{call}", responses=refuses(UnknownCall))
    async def explain_call(call: Annotated[str, Path(description="X-Call-Id of the call")]) -> Explanation:
        """Why a call was started where it was, or waits."""
        found = await scheduler.explain(CallId(call))
        if found is None:
            raise UnknownCall(
                f"call {call!r} is not known: only calls that wait can be explained, and those among the last 2,000 "
                "that a policy has started, or as many that start without one (of CPU functions, and on shares; in a "
                "cluster, ask the gateway that ran it). Its id is X-Call-Id of the answer"
            )
        return found

    @get_and_head(routes, "/metrics")
    async def show_metrics() -> PlainTextResponse:
        """Prometheus's."""
        return PlainTextResponse(metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    return routes


def artifact_routes(artifacts: Artifacts) -> APIRouter:
    routes = router()

    @routes.head(_ARTIFACT, responses={404: {}})
    async def has_artifact(digest: Digest) -> Response:
        """Whether it was uploaded."""
        return Response(status_code=200 if await asyncio.to_thread(artifacts.has, digest) else 404)

    @routes.put(_ARTIFACT, status_code=201, openapi_extra=_BYTES, responses=refuses(BodyTooSlow, StorageFailed))
    async def upload_artifact(digest: Digest, request: Request) -> None:
        """A bundle or weights."""
        if await asyncio.to_thread(artifacts.has, digest):
            async for _ in pieces(request):
                pass  # read to its end: a client that is cut off in mid-upload would not see the answer
            return
        try:
            await _receive(request, artifacts, digest)
        except CorruptArtifact as exc:
            raise InvalidSpec(str(exc)) from exc

    return routes


def prune_routes(catalogue: Catalogue, prune: Callable[[bool], Awaitable[tuple[int, Bytes]]]) -> APIRouter:
    routes = router(catalogue)

    @routes.post("/system/prune", responses=refuses(StorageFailed, BadQuery))
    async def prune_artifacts(dry: Annotated[Yes, Query(description="say only what would go")] = None) -> Pruned:
        """Remove bundles, their parts and weights that no function has named for ten minutes."""
        return Pruned(*await prune(bool(dry)))

    return routes


def health_routes(
    catalogue: Catalogue, scheduler: Scheduler, fault: Callable[[], str], gone: Sequence[str]
) -> APIRouter:
    routes = router(catalogue)

    @get_and_head(routes, "/healthz")
    async def show_health() -> PlainTextResponse:
        """Whether it serves."""
        return PlainTextResponse("OK")

    @get_and_head(routes, "/readyz", responses=refuses(Starting, NotReady))
    async def show_readiness() -> PlainTextResponse:
        """Whether calls would find a device."""
        if reason := fault():
            raise NotReady(f"{reason}; functions that are loaded answer meanwhile")
        if not (devices := scheduler.status().devices):
            raise NotReady("; ".join(gone) or "no device has joined yet: calls would wait")
        held = isolation_of(each.device.labels for each in devices)
        return PlainTextResponse("\n".join(["OK", *(f"isolation {each}" for each in held), *gone]))

    return routes


def page_routes(app: FastAPI) -> APIRouter:
    """:param app: which the document describes"""
    routes = router()

    async def described() -> dict[str, Any]:
        # In a thread, once: it takes as long as some hundred calls.
        if app.openapi_schema is None:
            app.openapi_schema = await asyncio.to_thread(describe, app)
        return app.openapi_schema

    @get_and_head(routes, "/", status_code=307)
    async def go_to_page() -> RedirectResponse:
        return RedirectResponse("/ui/", status_code=307)

    @routes.get("/ui/")
    async def show_functions() -> HTMLResponse:
        """A page that lists functions."""
        return HTMLResponse(PAGE)

    @routes.get("/docs")
    async def show_api() -> HTMLResponse:
        """This document as a page."""
        return HTMLResponse(render(await described()))

    @routes.get("/openapi.json")
    async def describe_api() -> dict[str, Any]:
        """This document."""
        return await described()

    return routes


async def _receive(request: Request, artifacts: Artifacts, digest: str) -> None:
    """Stream the body to disk. Hashes and writes in a thread, because the loop serves invocations."""
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


def _whole_status(status: EngineStatus, catalogue: Catalogue) -> dict[str, Any]:
    """Return `EngineStatus` with a ``name`` for each resident copy, and the counts of each function."""
    whole: dict[str, Any] = msgspec.to_builtins(status)
    for device in whole["devices"]:
        for resident in device["resident"]:
            resident["name"] = full_name_of(resident["function"])
    counts = ("inflight", "hits", "misses", "queue_s", "load_s", "run_s")
    whole["functions"] = {
        each.full_name: {
            "id": each.function_id,
            "kind": each.spec.kind,
            "invocations": each.stats.invocations,
            **{name: getattr(each.stats, name) for name in counts},
            "batch_max": each.function.need.batch_max,
            "grants": round(each.stats.grants, 3),
            "unavailable": each.unavailable,
            "memory_advice": memory_advice(each),
        }
        for each in catalogue.everywhere()
    }
    return whole
