"""
The host tiers of the nodes: which weights are in the memory of a node, apart from all workers.

The nodes decide what they keep, and their facts are followed here. An engine that takes over is told all of it by the
nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import Final

from gpufaas_core.model import Bytes, Device, DeviceId, FunctionId, NodeId, Seconds
from gpufaas_core.snapshot import StagedWeights
from gpufaas_scheduler.world.costs import Costed

MAX_STAGING: Final = 2
"""Weights that a node brings into its host tier at a time because of a policy: one that is read, and the next one. More
would share the disk, and come later than the first call that needs them."""

DECLINED_S: Final[Seconds] = 10.0
"""A node that did not keep weights is not asked again for so long: it may have room by then."""


class HostTier:
    """That of one node."""

    __slots__ = ("declined", "devices", "node", "size", "staged", "staging")

    def __init__(self, node: NodeId) -> None:
        self.node = node
        self.size: Bytes = 0
        """What it holds at most; 0: the node has none."""
        self.devices: set[DeviceId] = set()
        """Of the node."""
        self.staged: dict[FunctionId, Bytes] = {}
        self.staging: dict[FunctionId, None] = {}
        """What is on its way there because of a `Stage`."""
        self.declined: dict[FunctionId, Seconds] = {}
        """When the node did not do a `Stage`."""

    def refusal(self, function: FunctionId, now: Seconds) -> str | None:
        """Return why the weights of *function* cannot be brought there now; None: they can."""
        if not self.size:
            return f"node {self.node} has no host tier"
        if function in self.staged or function in self.staging:
            return f"node {self.node} has the weights of {function} already, or brings them"
        if len(self.staging) >= MAX_STAGING:
            return f"node {self.node} brings {len(self.staging)} weights already"
        if now < self.declined.get(function, -inf) + DECLINED_S:
            return f"node {self.node} did not keep the weights of {function} a moment ago"
        return None


class Hosts:
    """Of all nodes."""

    __slots__ = ("_functions", "by_node", "size")

    def __init__(self, functions: Mapping[FunctionId, Costed]) -> None:
        self._functions = functions
        self.by_node: dict[NodeId, HostTier] = {}
        """Of the nodes that have devices."""
        self.size: Bytes = 0
        """Of all host tiers together."""

    def of(self, device: Device) -> HostTier:
        """Return that of the node of *device*, which joins."""
        host = self.by_node.get(device.node)
        if host is None:
            host = self.by_node[device.node] = HostTier(device.node)
        self.size += device.host_memory - host.size
        host.size = device.host_memory
        return host

    def leave(self, host: HostTier, device: DeviceId) -> None:
        """A device of the node has left; with the last one, its host tier does."""
        host.devices.discard(device)
        if not host.devices and self.by_node.get(host.node) is host:
            self.tell(host, ())
            self.size -= host.size
            del self.by_node[host.node]

    def tell(self, host: HostTier, staged: Iterable[StagedWeights]) -> None:
        """The node has said all that is there."""
        for function in list(host.staged):
            self.unstage(host, function)
        host.staging.clear()
        host.declined.clear()
        for each in staged:
            if each.staging:
                host.staging[each.function] = None
            else:
                self.stage(host, each.function, each.size)

    def stage(self, host: HostTier, function: FunctionId, size: Bytes) -> None:
        """The weights of *function*, which may not be deployed yet, are there."""
        host.staging.pop(function, None)
        host.declined.pop(function, None)
        host.staged[function] = size
        owner = self._functions.get(function)
        if owner is not None:
            owner.stage(host.node)

    def unstage(self, host: HostTier, function: FunctionId) -> None:
        """The weights of *function* are not there any more."""
        host.staging.pop(function, None)
        if host.staged.pop(function, None) is not None and (owner := self._functions.get(function)) is not None:
            owner.unstage(host.node)

    def deployed(self, function: FunctionId, owner: Costed) -> None:
        for host in self.by_node.values():
            if function in host.staged:
                owner.stage(host.node)

    def forgotten(self, function: FunctionId) -> None:
        """It was removed."""
        for host in self.by_node.values():
            host.staged.pop(function, None)
            host.staging.pop(function, None)
            host.declined.pop(function, None)
