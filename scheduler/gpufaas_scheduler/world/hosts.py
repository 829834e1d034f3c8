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


class Host:
    """The host tier of one node."""

    __slots__ = ("declined", "devices", "node", "size", "staged", "staging")

    def __init__(self, node: NodeId) -> None:
        self.node = node
        self.size: Bytes = 0
        """What it holds at most; 0: the node has none."""
        self.devices: set[DeviceId] = set()
        """The devices of the node."""
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

    __slots__ = ("_functions", "by_node", "gain", "size")

    def __init__(self, functions: Mapping[FunctionId, Costed]) -> None:
        self._functions = functions
        self.by_node: dict[NodeId, Host] = {}
        """The host tiers of the nodes that have devices."""
        self.size: Bytes = 0
        """The size of all host tiers together."""
        self.gain = False
        """Some function is known to load sooner from a host tier, or was staged: until then there is none to bring."""

    def of(self, device: Device) -> Host:
        """Return that of the node of *device*, which joins."""
        host = self.by_node.get(device.node)
        if host is None:
            host = self.by_node[device.node] = Host(device.node)
        self.size += device.host_memory - host.size
        host.size = device.host_memory
        return host

    def leave(self, host: Host, device: DeviceId) -> None:
        """A device of the node has left; with the last one, its host tier does."""
        host.devices.discard(device)
        if not host.devices and self.by_node.get(host.node) is host:
            self.tell(host, ())
            self.size -= host.size
            del self.by_node[host.node]

    def tell(self, host: Host, staged: Iterable[StagedWeights]) -> None:
        """The node has said all that is there."""
        for function in [*host.staged, *host.staging]:
            self.unstage(host, function)
        host.declined.clear()
        for each in staged:
            if each.staging:
                self.bring(host, each.function)
            else:
                self.stage(host, each.function, each.size)

    def bring(self, host: Host, function: FunctionId) -> None:
        """The weights of *function* are on their way there."""
        host.staging[function] = None
        owner = self._functions.get(function)
        if owner is not None:
            owner.staging[host.node] = None

    def stage(self, host: Host, function: FunctionId, size: Bytes) -> None:
        """The weights of *function*, which may not be deployed yet, are there."""
        host.staging.pop(function, None)
        host.declined.pop(function, None)
        host.staged[function] = size
        self.gain = True
        owner = self._functions.get(function)
        if owner is not None:
            owner.stage(host.node)

    def unstage(self, host: Host, function: FunctionId) -> None:
        """The weights of *function* are not there any more, or do not come."""
        host.staging.pop(function, None)
        host.staged.pop(function, None)
        owner = self._functions.get(function)
        if owner is not None:
            owner.unstage(host.node)

    def deployed(self, function: FunctionId, owner: Costed) -> None:
        for host in self.by_node.values():
            if function in host.staged:
                owner.stage(host.node)
            elif function in host.staging:
                owner.staging[host.node] = None

    def forgotten(self, function: FunctionId) -> None:
        """The function was removed."""
        for host in self.by_node.values():
            host.staged.pop(function, None)
            host.staging.pop(function, None)
            host.declined.pop(function, None)

    def all_declined(self, now: Seconds) -> list[tuple[NodeId, FunctionId, Seconds]]:
        """Return what nodes will not be asked for again at once, and how long ago they did not do it."""
        return [
            (host.node, function, now - at)
            for host in self.by_node.values()
            for function, at in host.declined.items()
            if now - at < DECLINED_S
        ]

    def restore_declined(self, declined: Iterable[tuple[NodeId, FunctionId, Seconds]], since: Seconds) -> None:
        for node, function, age_s in declined:
            host = self.by_node.get(node)
            if host is not None:
                host.declined[function] = since - age_s
