"""What a scheduler of its own tells Prometheus; the gateways' metrics have what calls met with."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gpufaas_core.status_metrics import status_metrics

if TYPE_CHECKING:
    from gpufaas_cluster.scheduler_server import SchedulerServer


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
        resident = GaugeMetricFamily("gpufaas_device_residents", "Copies in memory.", labels=["device"])
        for each in status.devices:
            resident.add_metric([each.device.id], len(each.resident))
        yield resident
        yield from status_metrics(status)


def scheduler_metrics(server: "SchedulerServer") -> bytes:
    """Return all of it in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(server))
    return generate_latest(registry)
