"""The management routes of profiles that are taken. OpenFaaS has no such routes."""

import asyncio
from collections.abc import Awaitable
from typing import Final, TypeVar

import msgspec
from fastapi import APIRouter, Request
from msgspec import Struct, field

from gpufaas_core.errors import GrantRefused, InvalidSpec, LoadFailed, StorageFailed, UnknownFunction, UnknownName
from gpufaas_core.json_errors import UNREADABLE, mistake
from gpufaas_core.model import Taken
from gpufaas_core.taken import why_stale
from gpufaas_gateway.catalogue import Catalogue, ServedRevision
from gpufaas_gateway.errors import BadQuery
from gpufaas_gateway.function_api import find
from gpufaas_gateway.profiling import QUICK, TIMED, ProfileAsked, Profiling
from gpufaas_gateway.typed_routes import json_of, read_body, refuses, router
from gpufaas_gateway.wire import InNamespace, InPath, Yes

_T = TypeVar("_T")
_PATH: Final = "/system/profile/{name}"


class Profiles(Struct, forbid_unknown_fields=True):
    """What was taken of a function."""

    function: str
    profiles: dict[str, Taken]
    """By kind of device, the newest last."""
    stale: dict[str, str] = field(default_factory=dict)
    """Why nobody plans with some of them."""


def profile_routes(catalogue: Catalogue, profiling: Profiling) -> APIRouter:
    routes = router(catalogue)

    def shown(deployed: ServedRevision, taken: dict[str, Taken]) -> Profiles:
        found = Profiles(deployed.full_name, dict(sorted(taken.items(), key=lambda each: each[1].at)))
        devices = [each.device for each in profiling.scheduler.status().devices]
        for kind, each in taken.items():
            if why := why_stale(each, [one for one in devices if one.kind == kind]):
                found.stale[kind] = why
        return found

    @routes.get(_PATH, responses=refuses(UnknownFunction, UnknownName, StorageFailed))
    async def show_profiles(name: InPath, namespace: InNamespace = None) -> Profiles:
        """What was taken of a function."""
        deployed = find(catalogue, name, namespace)
        if not (known := await profiling.known(deployed)):
            raise UnknownName(f"no profile of {deployed.name} was taken: gpufaas profile {deployed.name} takes one")
        return shown(deployed, known)

    imported = {"requestBody": {"required": True, **json_of(Profiles)}}

    @routes.put(_PATH, responses=refuses(UnknownFunction, StorageFailed), openapi_extra=imported)
    async def import_profiles(name: InPath, request: Request, namespace: InNamespace = None) -> Profiles:
        """Take over profiles that were taken elsewhere."""
        deployed, body = find(catalogue, name, namespace), await read_body(request)
        try:
            taken = msgspec.json.decode(body, type=Profiles).profiles
        except UNREADABLE as exc:
            raise InvalidSpec(mistake(body, Profiles, exc, "body")) from None
        if not taken or not all(kind and "/" not in kind and each.batches for kind, each in taken.items()):
            raise InvalidSpec("the body has no profiles, one without a kind of device, or one without batches")
        await profiling.keep(deployed, taken)
        return shown(deployed, taken)

    @routes.post(_PATH, responses=refuses(UnknownFunction, BadQuery, GrantRefused, LoadFailed, StorageFailed))
    async def take_profile(
        name: InPath, request: Request, namespace: InNamespace = None, device: str = "", batches: str = "",
        together: int = 0, quick: Yes = None,
    ) -> Profiles:  # fmt: skip
        """Measure a function on a device. The body is the input; without one it is the sample of the bundle."""
        deployed = find(catalogue, name, namespace)
        try:
            sizes = [int(each) for each in batches.split(",")] if batches else []
        except ValueError:
            raise InvalidSpec(f"batches {batches[:80]!r} are no sizes: write whole numbers, as in 1,2,4") from None
        body = await read_body(request, deployed.max_body, f"that is the limit of calls of {deployed.name}")
        asked = ProfileAsked(
            batches=sizes, device=device, together=together, timed=QUICK if quick else TIMED, body=body,
            content_type=request.headers.get("content-type", "").encode("latin-1"),
        )  # fmt: skip
        return shown(deployed, await _while_asked(request, profiling.take(deployed, asked)))

    return routes


async def _while_asked(request: Request, doing: Awaitable[_T]) -> _T:
    """Return what *doing* returns; it is cancelled if its caller goes away."""
    task = asyncio.ensure_future(doing)

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        task.cancel()

    watching = asyncio.ensure_future(watch())
    try:
        return await task
    except asyncio.CancelledError:
        raise LoadFailed("the caller went away, or the platform stops: no profile is kept") from None
    finally:
        watching.cancel()
