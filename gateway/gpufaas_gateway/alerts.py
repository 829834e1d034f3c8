"""``POST /system/alert``: AlertManager's webhook. It scales functions as OpenFaaS's first autoscaler did (§9.1)."""

import math
from typing import Final

from fastapi import APIRouter

from gpufaas_core.errors import GpufaasError, UnknownFunction
from gpufaas_core.scaling import ScalingRule
from gpufaas_gateway.catalogue import replicas_of
from gpufaas_gateway.deploy import Deployer
from gpufaas_gateway.ports import Scheduler
from gpufaas_gateway.typed_routes import TEXT, Responses, router
from gpufaas_gateway.wire import AlertMessage

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
                rule, replicas = found.options.scaling or ScalingRule(), replicas_of(found, scheduler.status())
                asked = wanted(rule, replicas, firing)
                if rule.factor and (firing or asked != replicas):  # one that still fires at the maximum holds it
                    deployer.scale(found, asked)
            except GpufaasError as exc:
                failed.append(str(exc))
        if failed:
            raise GpufaasError("\n".join(failed))

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
