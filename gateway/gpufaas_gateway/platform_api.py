"""The management routes of the platform: who it is, how it is, its pages, its metrics, the artifacts that it has."""

import asyncio
import platform
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse

from gpufaas_core.errors import CorruptArtifact
from gpufaas_core.model import CallId, EngineStatus
from gpufaas_core.status_metrics import full_name_of
from gpufaas_core.units import Bytes, MiB
from gpufaas_gateway.answers import encode, error_answer, json_answer, pieces, starting
from gpufaas_gateway.catalogue import Catalogue
from gpufaas_gateway.docs_page import render
from gpufaas_gateway.errors import UnknownCall
from gpufaas_gateway.metrics import CONTENT_TYPE, Metrics
from gpufaas_gateway.openapi import document
from gpufaas_gateway.page import PAGE
from gpufaas_gateway.ports import Artifacts, Scheduler
from gpufaas_gateway.spec import check_digest

_WRITE_BYTES: Final[Bytes] = 1 * MiB  # one hop to a thread per MiB of an upload, and not one per TCP segment


def add_status_routes(
    app: FastAPI,
    catalogue: Catalogue,
    scheduler: Scheduler,
    metrics: Metrics,
    version: str,
    commit: str,
    orchestration: Callable[[], str],
) -> None:
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

    @app.api_route("/metrics", methods=["GET", "HEAD"])
    async def show_metrics() -> Response:
        return Response(metrics.render(), headers={"Content-Type": CONTENT_TYPE})


def add_artifact_routes(app: FastAPI, artifacts: Artifacts) -> None:
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


def add_health_routes(
    app: FastAPI, catalogue: Catalogue, scheduler: Scheduler, fault: Callable[[], str], gone: Sequence[str]
) -> None:
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


def add_pages(app: FastAPI, version: str) -> None:
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
