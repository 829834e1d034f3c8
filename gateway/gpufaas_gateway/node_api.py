"""The management routes of nodes: their devices and copies, and draining. OpenFaaS has no such routes."""

from typing import Protocol

from fastapi import APIRouter
from msgspec import Struct

from gpufaas_core.errors import InvalidSpec, UnknownName
from gpufaas_core.model import EngineStatus, NodeView
from gpufaas_core.units import Bytes, Seconds
from gpufaas_gateway.typed_routes import refuses, router


class ClusterNodes(Protocol):
    """The nodes, as a gateway knows them."""

    def nodes(self) -> list[NodeView]: ...

    def status(self) -> EngineStatus: ...

    async def drain(self, node: str, drain: bool) -> None:
        """
        Stop, or resume, placing calls on *node*.

        :raises GpufaasError: there is no such node, or no scheduler leads
        """


class DeviceShown(Struct, rename="camel"):
    id: str
    kind: str
    memory: Bytes
    used: Bytes
    running: int
    """Calls."""
    resident: list[str]
    """Functions, one entry for each copy."""
    labels: dict[str, str]


class NodeShown(Struct, rename="camel"):
    name: str
    address: str
    state: str
    """``ready``; ``draining`` while calls run, then ``drained``; ``unknown`` if no scheduler says."""
    age_seconds: Seconds
    """How old all of this is, if no scheduler says; else 0."""
    note: str
    version: str
    joined_seconds: Seconds
    running: int
    resident_copies: int
    devices: list[DeviceShown]


def node_routes(nodes: ClusterNodes) -> APIRouter:
    routes = router()

    @routes.get("/system/nodes")
    async def list_nodes() -> list[NodeShown]:
        return [_shown(each, nodes.status()) for each in nodes.nodes()]

    @routes.get("/system/nodes/{name}", responses=refuses(UnknownName))
    async def describe_node(name: str) -> NodeShown:
        return _shown(_find(nodes, name), nodes.status())

    @routes.post("/system/nodes/{name}/drain", status_code=202, responses=refuses(UnknownName, InvalidSpec))
    async def drain_node(name: str) -> None:
        """Stop placing calls on the node."""
        _find(nodes, name)
        await nodes.drain(name, True)

    @routes.delete("/system/nodes/{name}/drain", status_code=202, responses=refuses(UnknownName, InvalidSpec))
    async def undrain_node(name: str) -> None:
        """Place calls on the node again."""
        _find(nodes, name)
        await nodes.drain(name, False)

    return routes


def _find(nodes: ClusterNodes, name: str) -> NodeView:
    there = nodes.nodes()
    found = next((each for each in there if each.id == name), None)
    if found is None:
        names = ", ".join(sorted(each.id for each in there)) or "no nodes"
        raise UnknownName(f"there is no node {name[:80]!r}: the cluster has {names}")
    return found


def _shown(node: NodeView, status: EngineStatus) -> NodeShown:
    devices = [
        DeviceShown(
            id=each.device.id,
            kind=each.device.kind,
            memory=each.device.memory,
            used=each.used,
            running=sum(one.running for one in each.resident),
            resident=[one.function for one in each.resident],
            labels=dict(each.device.labels),
        )
        for each in status.devices
        if each.device.node == node.id
    ]
    running = sum(each.running for each in devices)
    state = ("draining" if running else "drained") if node.draining else "ready"
    return NodeShown(
        name=node.id,
        address=node.address,
        state="unknown" if status.age_s else state,
        age_seconds=round(status.age_s, 3),
        note=node.note,
        version=node.version,
        joined_seconds=round(node.joined_s, 1),
        running=running,
        resident_copies=sum(len(each.resident) for each in devices),
        devices=devices,
    )
