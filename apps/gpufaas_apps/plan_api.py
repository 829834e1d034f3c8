"""The management routes of plans: which copies there should be, by version. OpenFaaS has no such routes."""

from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import msgspec
from fastapi import APIRouter, Request
from msgspec import Struct, field
from msgspec.structs import asdict, astuple, replace

from gpufaas_core.errors import BadPlan, GrantRefused, InvalidSpec, PlanConflict, StorageFailed, UnknownPlan
from gpufaas_core.json_errors import UNREADABLE, mistake
from gpufaas_core.model import DeviceId, EngineStatus, PlannedCopy, Replica
from gpufaas_core.plans import PlanVersion
from gpufaas_gateway.catalogue import Catalogue
from gpufaas_gateway.function_api import key_of
from gpufaas_gateway.owner import in_force
from gpufaas_gateway.spec import DEFAULT_NAMESPACE
from gpufaas_gateway.typed_routes import json_of, read_body, refuses, router
from gpufaas_gateway.wire import By
from gpufaas_planner.plans import ANONYMOUS, Plans

_T = TypeVar("_T", bound=Struct)
_CHANGES: Final = refuses(BadPlan, PlanConflict, StorageFailed)


class PlanShown(PlanVersion, frozen=True, omit_defaults=False):
    """The plan in force; version 0: none was ever applied."""

    replicas: tuple[PlannedCopy, ...] = ()
    planner: dict[str, Any] = field(default_factory=dict)
    """What the planner says of itself; empty: none runs here."""


class ReplicaAsked(Replica, frozen=True, forbid_unknown_fields=True):
    namespace: str = ""
    """The namespace of the function, if its name has none."""

    def plain(self) -> Replica:
        *plain, namespace = astuple(self)
        return replace(Replica(*plain), function=_full(self.function, namespace))


class PlanAsked(Struct, forbid_unknown_fields=True):
    replicas: list[ReplicaAsked]
    """All that there should be: calls decide again about functions that are not here."""
    why: str = ""
    expected: dict[str, float] = field(default_factory=dict)
    base: int | None = None
    """The version that it was written against, 0: there was none. Absent: it replaces whatever is in force."""


class RollbackAsked(Struct, forbid_unknown_fields=True):
    version: int
    base: int | None = None


class UnpinAsked(Struct, forbid_unknown_fields=True):
    function: str
    namespace: str = ""
    device: DeviceId | None = None


def plan_routes(
    catalogue: Catalogue, plans: Plans, status: Callable[[], EngineStatus],
    planner: Callable[[str], Awaitable[dict[str, Any]]],
) -> APIRouter:  # fmt: skip
    """:param planner: returns the planner's status; if it is told why, when it has made a plan. Empty: there is none"""
    routes = router(catalogue)

    def change(method: str, path: str, kind: type[Struct]) -> Callable[[Callable[..., Any]], None]:
        def add(handler: Callable[..., Any]) -> None:
            body, refused = {"requestBody": {"required": True, **json_of(kind)}}, _CHANGES | refuses(UnknownPlan)
            said: dict[str, Any] = {"methods": [method], "openapi_extra": body}
            routes.add_api_route(f"/system/plan{path}", handler, responses=refused, **said)

        return add

    @routes.get("/system/plan")
    async def show_plan() -> PlanShown:
        """The plan in force, and what became of it."""
        plan = plans.in_force() or PlanVersion(0)
        replicas = in_force(plan, status().plan).replicas
        try:
            planners = await planner("")
        except (GrantRefused, InvalidSpec) as exc:  # no scheduler leads, or one of an older release
            planners = {"last_error": str(exc)}
        return PlanShown(**{**asdict(plan), "replicas": replicas, "planner": planners})

    @routes.post("/system/plan/make", responses=refuses(InvalidSpec, GrantRefused, StorageFailed))
    async def make_plan(by: By) -> PlanVersion:
        """Have the planner make a plan now."""
        said = await planner(f"{by or ANONYMOUS} asked")
        if not said:
            raise InvalidSpec("no planner runs: start gpufaas serve, or all gpufaas scheduler, with --planner NAME")
        if "last_error" in said:
            raise InvalidSpec(f"the planner made no plan: {said['last_error']}")
        if not (versions := await plans.history()):
            raise InvalidSpec("the planner plans no copies: no plan is in force (gpufaas list)")
        return versions[0]

    @change("PUT", "", PlanAsked)
    async def apply_plan(request: Request, by: By) -> PlanVersion:
        """Put a plan in force."""
        asked = await _read(request, PlanAsked)
        replicas = [each.plain() for each in asked.replicas]
        return await plans.apply(replicas, by=by, why=asked.why, expected=asked.expected, base=asked.base)

    @routes.get("/system/plan/history", responses=refuses(StorageFailed))
    async def list_plans() -> list[PlanVersion]:
        """The versions that are kept, newest first."""
        return await plans.history()

    @routes.get("/system/plan/{version:int}", responses=refuses(UnknownPlan, StorageFailed))
    async def describe_plan(version: int) -> PlanVersion:
        return await plans.version(version)

    @change("POST", "/rollback", RollbackAsked)
    async def roll_back_plan(request: Request, by: By) -> PlanVersion:
        """Put the content of an earlier version in force, as a new one."""
        asked = await _read(request, RollbackAsked)
        return await plans.rollback(asked.version, by=by, base=asked.base)

    @change("POST", "/pin", ReplicaAsked)
    async def pin_function(request: Request, by: By) -> PlanVersion:
        """Have a function on a device, and nowhere else but where it is pinned already."""
        return await plans.pin((await _read(request, ReplicaAsked)).plain(), by=by)

    @change("POST", "/unpin", UnpinAsked)
    async def unpin_function(request: Request, by: By) -> PlanVersion:
        """Take what is pinned of a function out of the plan, on one device or on all."""
        asked = await _read(request, UnpinAsked)
        return await plans.unpin(_full(asked.function, asked.namespace), asked.device or None, by=by)

    return routes


def _full(function: str, namespace: str) -> str:
    key = key_of(function, namespace)
    return key if "." in key else f"{key}.{DEFAULT_NAMESPACE}"


async def _read(request: Request, kind: type[_T]) -> _T:
    """Return the body. :raises InvalidSpec: says where it is wrong, and what is allowed"""
    body = await read_body(request)
    try:
        return msgspec.json.decode(body, type=kind)
    except UNREADABLE as exc:
        raise InvalidSpec(mistake(body, kind, exc, "body")) from None
