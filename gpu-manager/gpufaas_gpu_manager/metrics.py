"""Metrics of a node: its memory, its reservations, its workers, its host tier."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from gpufaas_gpu_manager.node import Node


class NodeFamilies(Collector):
    """Makes the families at each scrape."""

    def __init__(self, node: "Node") -> None:
        self._node = node

    def describe(self) -> Iterable[Metric]:
        return ()  # registering must not look at the node: it may not run yet

    def collect(self) -> Iterable[Metric]:
        memory = GaugeMetricFamily("gpufaas_node_memory_bytes", "Memory that may be promised.", labels=["device"])
        reserved = GaugeMetricFamily("gpufaas_node_reserved_bytes", "Memory that processes hold.", labels=["device"])
        workers = GaugeMetricFamily("gpufaas_node_workers", "Workers by state.", labels=["device", "state"])
        counts: dict[tuple[str, str], int] = {}
        for worker in (each for each in self._node.workers() if not each.checks):
            key = worker.device.id, worker.state.name.lower()
            counts[key] = counts.get(key, 0) + 1
        for device in self._node.devices():
            memory.add_metric([device.id], device.memory)
            reserved.add_metric([device.id], self._node.reserved(device.id))
        for (device_id, state), count in sorted(counts.items()):
            workers.add_metric([device_id, state], count)
        host, blank = self._node.host_cache.status(), self._node.host.blank()
        yield from (memory, reserved, workers)
        yield GaugeMetricFamily("gpufaas_node_host_cache_bytes", "Memory for weights beside devices.", host.budget)
        yield GaugeMetricFamily("gpufaas_node_host_cache_used_bytes", "Weights that are kept there.", host.used)
        yield GaugeMetricFamily("gpufaas_node_parked", "Workers that are parked.", host.parked)
        yield GaugeMetricFamily("gpufaas_node_parked_bytes", "Memory of these beside weights.", host.parked_bytes)
        wakes = CounterMetricFamily("gpufaas_node_wakes", "Parked workers that a start wanted.", labels=["outcome"])
        wakes.add_metric(["ok"], self._node.host.parks.woken)
        wakes.add_metric(["failed"], self._node.host.parks.failed)
        yield wakes
        yield GaugeMetricFamily("gpufaas_node_standbys", "Processes that wait to be workers.", blank["ready"])
        yield GaugeMetricFamily("gpufaas_node_standby_bytes", "Memory of these.", blank["memory"])
        yield GaugeMetricFamily("gpufaas_node_layers", "Fork servers with preloaded modules.", blank["layers"])
        yield GaugeMetricFamily("gpufaas_node_layer_bytes", "Memory of these.", blank["layerMemory"])
        starts = CounterMetricFamily("gpufaas_node_starts", "Workers that were standbys, or not.", labels=["from"])
        starts.add_metric(["standby"], blank["taken"])
        starts.add_metric(["fork"], blank["missed"])
        yield starts


def node_metrics(node: "Node") -> bytes:
    """Return the metrics of a node that runs as a process of its own, in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(NodeFamilies(node))
    return generate_latest(registry)
