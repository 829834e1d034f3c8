"""The management routes of functions: what is deployed, deploying, removing, scaling, logs."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Query, Response
from fastapi.responses import StreamingResponse

from gpufaas_core.environment import Environment
from gpufaas_core.errors import (
    FunctionExists,
    GpufaasError,
    InvalidSpec,
    LoadFailed,
    StorageFailed,
    UnknownFunction,
    UnknownName,
)
from gpufaas_core.logs import LogLine, LogQuery
from gpufaas_core.model import FunctionId
from gpufaas_core.scaling import ScalingRule
from gpufaas_core.units import Bytes
from gpufaas_gateway.catalogue import Catalogue, ServedRevision, replicas_of
from gpufaas_gateway.deploy import Deployer
from gpufaas_gateway.errors import BadQuery, CannotRollBack, KeptByPlan, Overtaken, QuotaExceeded
from gpufaas_gateway.function_state import copies_of, status_of
from gpufaas_gateway.history import Revision, RolledBack
from gpufaas_gateway.owner import in_force
from gpufaas_gateway.ports import LogReader, Scheduler
from gpufaas_gateway.spec import DEFAULT_NAMESPACE, FunctionSpec
from gpufaas_gateway.typed_routes import TEXT, Responses, encode, lines_of, refuses, router
from gpufaas_gateway.wire import (
    AlertMessage,
    By,
    DeleteFunctionRequest,
    FunctionDeployment,
    FunctionStatus,
    InNamespace,
    InPath,
    Moment,
    Number,
    RollbackRequest,
    ScaleServiceRequest,
    Usage,
    Yes,
)

UsageOf = Callable[[FunctionId], Awaitable[tuple[float, Bytes] | None]]
"""Returns the millicores and bytes that all workers of a function use now; None if it has no worker."""

REVISION: Final = "X-Gpufaas-Revision"
"""Of an answer to a deployment: the revision that takes the calls now, or once it is loaded."""
_FUNCTIONS: Final = "/system/functions"
_ENVIRONMENTS: Final = "/system/environments"
_UNCHANGED: Final = {"description": "It is deployed so: there is no new revision."}
_FAILED: Final[Responses] = {500: {"description": "Alerts that could not be applied, one line each.", "content": TEXT}}
_NDJSON: Final = "application/x-ndjson"


def function_routes(deployer: Deployer, scheduler: Scheduler, usage_of: UsageOf | None) -> APIRouter:
    """Return the routes that say what is deployed."""
    catalogue = deployer.catalogue
    routes = router(catalogue)

    @routes.get(_FUNCTIONS)
    async def list_functions(namespace: InNamespace = None) -> list[FunctionStatus]:
        status = scheduler.status()
        copies, plan = copies_of(status), in_force(deployer.plan(), status.plan)
        return [
            msgspec.structs.replace(status_of(each, status, copies, plan), invocation_count=each.stats.invocations)
            for each in catalogue.all(namespace or DEFAULT_NAMESPACE)
        ]

    @routes.get("/system/function/{name}", responses=refuses(UnknownFunction, BadQuery))
    async def describe_function(
        name: InPath,
        namespace: InNamespace = None,
        usage: Annotated[Yes, Query(description="with what its workers hold")] = None,
    ) -> FunctionStatus:
        found = find(catalogue, name, namespace)
        now = scheduler.status()
        status = status_of(found, now, copies_of(now), in_force(deployer.plan(), now.plan))
        used = await usage_of(found.function_id) if usage and usage_of is not None else None
        if used is not None:
            status.usage = Usage(cpu=round(used[0], 3), total_memory_bytes=used[1])
        return status

    @routes.get("/system/function/{name}/revisions", responses=refuses(UnknownFunction, StorageFailed))
    async def list_revisions(name: InPath, namespace: InNamespace = None) -> list[Revision]:
        """The last deployments of a function, newest first."""
        return await deployer.history(find(catalogue, name, namespace))

    return routes


def deployment_routes(deployer: Deployer, logs: LogReader) -> APIRouter:
    """Return the routes that change what is deployed."""
    catalogue = deployer.catalogue
    routes = router(catalogue)
    refused = refuses(QuotaExceeded, LoadFailed, StorageFailed)

    @routes.post(_FUNCTIONS, status_code=202, responses={**refused, **refuses(FunctionExists)})
    async def deploy_function(
        asked: FunctionDeployment, by: By, answer: Response, namespace: InNamespace = None
    ) -> None:
        new = await deployer.deploy(_spec_of(asked, namespace), update=False, by=by)
        answer.headers[REVISION] = new.record.revision

    # 200 makes faas-cli say that a rolling update was attempted, and that is what an update is.
    @routes.put(
        _FUNCTIONS, status_code=200, responses={**refused, **refuses(UnknownFunction, Overtaken), 202: _UNCHANGED}
    )
    async def update_function(
        asked: FunctionDeployment, by: By, answer: Response, namespace: InNamespace = None
    ) -> None:
        spec = _spec_of(asked, namespace)
        if revision := deployer.unchanged(spec):
            answer.status_code = 202
        else:
            revision = (await deployer.deploy(spec, update=True, by=by)).record.revision
        answer.headers[REVISION] = revision

    @routes.delete(_FUNCTIONS, status_code=202, responses=refuses(UnknownFunction, StorageFailed))
    async def remove_function(asked: DeleteFunctionRequest, namespace: InNamespace = None) -> None:
        named = asked.namespace or namespace
        try:
            found = find(catalogue, asked.function_name, named)
        except UnknownFunction:  # what a deployment that failed has printed goes all the same
            await asyncio.to_thread(logs.drop, *_split(key_of(asked.function_name, named)))
            raise
        await deployer.remove(found.name, found.namespace)
        await asyncio.to_thread(logs.drop, found.name, found.namespace)

    rollback_refused = {**refused, **refuses(UnknownFunction, UnknownName, CannotRollBack, Overtaken)}

    @routes.post("/system/function/{name}/rollback", responses=rollback_refused)
    async def roll_back_function(
        name: InPath, by: By, asked: RollbackRequest | None = None, namespace: InNamespace = None
    ) -> RolledBack:
        """
        Deploy an earlier revision anew: that of the body, else the last that served before; while one is pending, go
        back to the one that serves.
        """
        to = asked.revision if asked is not None else None
        return await deployer.rollback(find(catalogue, name, namespace), to, by)

    @routes.post("/system/scale-function/{name}", status_code=202, responses=refuses(UnknownFunction, KeptByPlan))
    async def scale_function(name: InPath, asked: ScaleServiceRequest, namespace: InNamespace = None) -> None:
        """Ask for so many copies."""
        found = find(catalogue, name, asked.namespace or namespace)
        if asked.service_name not in (None, "", name, found.name, found.full_name):
            raise InvalidSpec(f"serviceName: it is {asked.service_name[:80]!r}, but the path names {found.full_name}")
        deployer.scale(found, asked.replicas)

    return routes


def alert_routes(deployer: Deployer, scheduler: Scheduler) -> APIRouter:
    """Return AlertManager's webhook. It scales functions as OpenFaaS's first autoscaler did (§9.1)."""
    catalogue = deployer.catalogue
    routes = router(catalogue)

    @routes.post("/system/alert", responses=_FAILED)
    async def alert(message: AlertMessage) -> None:
        """AlertManager's webhook."""
        failed: list[GpufaasError] = []
        for each in message.alerts:
            name = each.labels.function_name or ""
            firing = (each.status or message.status) == "firing"
            try:
                found = catalogue.find(name)
                if found is None:
                    raise UnknownFunction(f"function {name[:80]!r} is not deployed")
                rule, replicas = found.options.scaling or ScalingRule(), replicas_of(found, scheduler.status())
                asked = wanted(rule, replicas, firing)
                if rule.factor and (firing or asked != replicas):  # one that still fires at the maximum holds it
                    deployer.scale(found, asked)
            except GpufaasError as exc:
                failed.append(exc)
        if failed:
            kept = all(isinstance(each, KeptByPlan) for each in failed)
            raise (KeptByPlan if kept else GpufaasError)("\n".join(map(str, failed)))

    return routes


def environment_routes(deployer: Deployer) -> APIRouter:
    """Return the routes that tell builders of bundles what nodes provide: Python, wheels, packages."""
    routes = router()

    @routes.get(_ENVIRONMENTS)
    async def list_environments() -> list[Environment]:
        """Python, the wheels that it takes, and the packages of each node."""
        return await deployer.environments()

    @routes.post(_ENVIRONMENTS)
    async def list_environments_for_a_function(asked: FunctionDeployment) -> list[Environment]:
        """The same, of the nodes on which the function may run."""
        return await deployer.environments(asked.to(FunctionSpec))

    return routes


def log_routes(catalogue: Catalogue, logs: LogReader) -> APIRouter:
    routes = router()

    @routes.get(
        "/system/logs",
        responses={200: lines_of(LogLine, _NDJSON), **refuses(InvalidSpec, UnknownFunction, BadQuery)},
    )
    async def read_logs(
        name: Annotated[str, Query(description="the function")] = "",
        namespace: InNamespace = None,
        instance: Annotated[str, Query(description="only lines of this worker")] = "",
        call_id: Annotated[str, Query(alias="callId", description="only lines of the call with this X-Call-Id")] = "",
        tail: Annotated[Number, Query(description="the last so many lines; 0 or less: all")] = None,
        since: Annotated[Moment, Query(description="not earlier lines")] = None,
        follow: Annotated[Yes, Query(description="go on with lines as they are printed")] = None,
    ) -> Response:
        """What a function printed."""
        if not name:
            raise InvalidSpec("name: the query names no function: add ?name=FUNCTION")
        key = key_of(name, namespace)
        deployed = catalogue.find(key)
        name, namespace = (deployed.name, deployed.namespace) if deployed else _split(key)
        # What a deployment that failed has printed is read before there is a function.
        if deployed is None and not await asyncio.to_thread(logs.known, name, namespace):
            raise UnknownFunction(f"function {name[:80]} in {namespace[:80]} is not deployed, and has left no logs")
        asked = LogQuery(name, namespace, since, tail or 0, instance, call_id)
        if follow:
            return StreamingResponse(_each(logs.follow(asked)), media_type=_NDJSON)
        # The whole log of one that prints much is 20 MB: in a thread.
        return Response(await asyncio.to_thread(lambda: _lines(logs.query(asked))), media_type=_NDJSON)

    return routes


def wanted(rule: ScalingRule, replicas: int, firing: bool) -> int:
    """
    Return the number of copies that an alert asks for, by OpenFaaS CE's rule.

    While the alert fires, add `ScalingRule.factor` percent of the maximum to *replicas*, within the bounds. When it is
    resolved, go back to the minimum.
    """
    if not firing:
        return rule.min
    return max(replicas, rule.min, min(rule.max, replicas + math.ceil(rule.max * rule.factor / 100)))


def _spec_of(asked: FunctionDeployment, namespace: str | None) -> FunctionSpec:
    spec = asked.to(FunctionSpec)
    return msgspec.structs.replace(spec, namespace=namespace) if spec.namespace is None and namespace else spec


def find(catalogue: Catalogue, name: str, namespace: str | None) -> ServedRevision:
    found = catalogue.find(key_of(name, namespace))
    if found is None:
        raise UnknownFunction(
            f"function {name[:80]} in {namespace or DEFAULT_NAMESPACE} is not deployed: 'gpufaas list' shows what is"
        )
    return found


def key_of(name: str, namespace: str | None) -> str:
    """Return the key for `Catalogue.find`. The namespace may be part of *name*, or given beside it, or missing."""
    if not namespace:
        return name
    return name if name.endswith(f".{namespace}") else f"{name}.{namespace}"


def _split(key: str) -> tuple[str, str]:
    name, dot, namespace = key.rpartition(".")
    return (name, namespace) if dot else (key, DEFAULT_NAMESPACE)


async def _each(lines: AsyncIterator[LogLine]) -> AsyncIterator[bytes]:
    async for line in lines:
        yield _lines([line])


def _lines(lines: Iterable[LogLine]) -> bytes:
    return b"".join(encode(each) + b"\n" for each in lines)
