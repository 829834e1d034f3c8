"""What a scheduler of its own tells Prometheus; the gateways' metrics have what calls met with."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from gpufaas_scheduler.server import SchedulerServer


class _Collector:
    def __init__(self, server: "SchedulerServer") -> None:
        self._server = server

    def collect(self) -> Iterable[Metric]:
        server = self._server
        leads = server.service is not None
        yield GaugeMetricFamily("gpufaas_scheduler_leads", "1 where the engine is, 0 on standbys.", float(leads))
        yield GaugeMetricFamily("gpufaas_scheduler_serving", "1 where calls are placed.", float(server.serving))
        if server.service is None:
            return
        status = server.service.status()
        yield GaugeMetricFamily("gpufaas_scheduler_nodes", "Nodes that are connected.", len(server.nodes))
        yield GaugeMetricFamily("gpufaas_scheduler_waiting", "Calls that wait.", sum(status.queued.values()))
        yield GaugeMetricFamily("gpufaas_scheduler_running", "Calls that run.", sum(status.running.values()))
        yield CounterMetricFamily(
            "gpufaas_scheduler_events", "Events that the engine was told.", server.service.changes
        )
        yield CounterMetricFamily(
            "gpufaas_scheduler_node_differences",
            "Workers and calls that a node had, or lacked, against what the scheduler knew; each was settled.",
            server.differences,
        )
        used = GaugeMetricFamily("gpufaas_device_memory_used_bytes", "Memory promised to workers.", labels=["device"])
        whole = GaugeMetricFamily("gpufaas_device_memory_bytes", "Memory that may be promised.", labels=["device"])
        resident = GaugeMetricFamily("gpufaas_device_residents", "Copies in memory.", labels=["device"])
        starts = CounterMetricFamily(
            "gpufaas_device_starts", "Calls started, by hit or miss.", labels=["device", "start"]
        )
        evictions = CounterMetricFamily("gpufaas_device_evictions", "Copies evicted.", labels=["device"])
        for each in status.devices:
            name = each.device.id
            used.add_metric([name], each.used)
            whole.add_metric([name], each.device.memory)
            resident.add_metric([name], len(each.resident))
            starts.add_metric([name, "hit"], each.hits)
            starts.add_metric([name, "miss"], each.misses)
            evictions.add_metric([name], each.evictions)
        yield from (used, whole, resident, starts, evictions)


def scheduler_metrics(server: "SchedulerServer") -> bytes:
    """Return all of it in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(server))
    return generate_latest(registry)
