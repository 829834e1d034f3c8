"""The management route of what was paid for ordered nodes. OpenFaaS has no such route."""

import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from msgspec import to_builtins

from gpufaas_core.errors import StorageFailed
from gpufaas_core.orders import Stay
from gpufaas_gateway.typed_routes import refuses, router


def cost_routes(stays: Callable[[], Awaitable[list[Stay]]]) -> APIRouter:
    routes = router()

    @routes.get("/system/cost", responses=refuses(StorageFailed))
    async def list_costs(
        since: Annotated[float, Query(ge=0, description="seconds ago")] = 86400.0,
        by: Literal["function", "namespace", "offer"] = "function",
    ) -> list[dict[str, Any]]:
        """What was paid for nodes that were ordered: node-seconds and cost, the dearest first."""
        from gpufaas_providers.bill import bill  # few ask

        now = time.time()
        return [to_builtins(each) for each in bill(await stays(), now - since, now, by)]

    return routes
