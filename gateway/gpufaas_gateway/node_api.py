"""The nodes of a cluster: who is there, what is wrong with them, and letting one go. OpenFaaS has no such routes."""

from typing import Any, Protocol

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from gpufaas_core.errors import UnknownName
from gpufaas_core.model import EngineStatus, NodeView
from gpufaas_gateway.answers import json_answer


class ClusterNodes(Protocol):
    """What is known of the nodes."""

    def nodes(self) -> list[NodeView]: ...

    def status(self) -> EngineStatus: ...

    async def drain(self, node: str, drain: bool) -> None:
        """
        Let *node* take no new calls, or take it back.

        :raises GpufaasError: there is no such node, or nobody leads
        """
        ...


def node_routes(cluster: ClusterNodes) -> APIRouter:
    routes = APIRouter()

    @routes.get("/system/nodes")
    async def nodes() -> Response:
        return json_answer([_described(each, cluster.status()) for each in cluster.nodes()])

    @routes.get("/system/nodes/{name}")
    async def node(name: str) -> Response:
        return json_answer(_described(_find(cluster, name), cluster.status()))

    @routes.post("/system/nodes/{name}/drain")
    async def drain(name: str) -> Response:
        _find(cluster, name)
        await cluster.drain(name, True)
        return Response(status_code=202)

    @routes.delete("/system/nodes/{name}/drain")
    async def undrain(name: str) -> Response:
        _find(cluster, name)
        await cluster.drain(name, False)
        return Response(status_code=202)

    return routes


def _find(cluster: ClusterNodes, name: str) -> NodeView:
    nodes = cluster.nodes()
    for each in nodes:
        if each.id == name:
            return each
    there = ", ".join(sorted(each.id for each in nodes)) or "none"
    raise UnknownName(f"there is no node {name[:80]!r}: those that are here: {there}")


def _described(node: NodeView, status: EngineStatus) -> dict[str, Any]:
    devices = []
    running = resident = 0
    for each in status.devices:
        if each.device.node != node.id:
            continue
        busy = sum(one.running for one in each.resident)
        running += busy
        resident += len(each.resident)
        devices.append(
            {
                "id": each.device.id,
                "kind": each.device.kind,
                "memory": each.device.memory,
                "used": each.used,
                "running": busy,
                "resident": [one.function for one in each.resident],
                "labels": msgspec.to_builtins(each.device.labels),
            }
        )
    return {
        "name": node.id,
        "address": node.address,
        "state": ("draining" if running else "drained") if node.draining else "ready",
        "note": node.note,
        "version": node.version,
        "joinedSeconds": round(node.joined_s, 1),
        "running": running,
        "residentCopies": resident,
        "devices": devices,
    }
