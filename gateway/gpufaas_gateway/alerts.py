"""``POST /system/alert``: AlertManager's webhook. It scales functions as OpenFaaS's first autoscaler did (§9.1)."""

import math
from typing import Final

from fastapi import APIRouter

from gpufaas_core.errors import GpufaasError, UnknownFunction
from gpufaas_gateway.catalogue import Deployed, replicas_of
from gpufaas_gateway.deploy import Deployer
from gpufaas_gateway.ports import Scheduler
from gpufaas_gateway.typed_routes import TEXT, Responses, router
from gpufaas_gateway.wire import AlertMessage

# OpenFaaS's own defaults (§8).
_MIN: Final = 1
_MAX: Final = 20
_FACTOR: Final = 10
_FAILED: Final[Responses] = {500: {"description": "Alerts that could not be applied, one line each.", "content": TEXT}}


def alert_routes(deployer: Deployer, scheduler: Scheduler) -> APIRouter:
    catalogue = deployer.catalogue
    routes = router(catalogue)

    @routes.post("/system/alert", responses=_FAILED)
    async def alert(message: AlertMessage) -> None:
        """AlertManager's webhook."""
        failed = []
        for each in message.alerts:
            name = each.labels.function_name or ""
            firing = (each.status or message.status) == "firing"
            try:
                found = catalogue.find(name)
                if found is None:
                    raise UnknownFunction(f"function {name[:80]!r} is not deployed")
                replicas = replicas_of(found, scheduler.status())
                if (asked := wanted(found, replicas, firing)) != replicas:
                    deployer.scale(found, asked)
            except GpufaasError as exc:
                failed.append(str(exc))
        if failed:
            raise GpufaasError("\n".join(failed))

    return routes


def wanted(function: Deployed, replicas: int, firing: bool) -> int:
    """
    Return the number of copies that an alert asks for.

    While the alert fires, add ``com.openfaas.scale.factor`` percent of the maximum to *replicas*, up to the maximum.
    When it is resolved, go back to the minimum. A factor of 0 turns scaling by alerts off.
    """
    least, most, factor = (_label(function, *each) for each in (("min", _MIN), ("max", _MAX), ("factor", _FACTOR)))
    if factor == 0:
        return replicas
    if not firing:
        return least
    return max(replicas, min(most, replicas + math.ceil(most * factor / 100)))


def _label(function: Deployed, name: str, otherwise: int) -> int:
    text = (function.record.spec.labels or {}).get(f"com.openfaas.scale.{name}", "")
    return int(text) if text.isascii() and text.isdecimal() else otherwise
