"""The metrics of a scheduler in a process of its own. Those of gateways count calls and their outcomes."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gpufaas_cluster.leader import Leader
from gpufaas_core.status_metrics import status_metrics


class _Collector:
    def __init__(self, leader: Leader | None) -> None:
        self._leader = leader

    def collect(self) -> Iterable[Metric]:
        leader = self._leader
        serving = leader is not None and leader.serving
        yield GaugeMetricFamily("gpufaas_scheduler_leads", "1 where the engine is, 0 on standbys.", leader is not None)
        yield GaugeMetricFamily("gpufaas_scheduler_serving", "1 where calls are placed.", serving)
        if leader is None:
            return
        status = leader.service.status()
        yield GaugeMetricFamily("gpufaas_scheduler_nodes", "Nodes that are connected.", len(leader.nodes.by_id))
        drained = GaugeMetricFamily("gpufaas_scheduler_node_drained", "1: it takes no new calls.", labels=["node"])
        for id_, node in leader.nodes.by_id.items():
            drained.add_metric([id_], node.draining)
        yield drained
        yield GaugeMetricFamily("gpufaas_scheduler_waiting", "Calls that wait.", sum(status.queued.values()))
        yield GaugeMetricFamily("gpufaas_scheduler_running", "Calls that run.", sum(status.running.values()))
        events = leader.service.driver.events
        yield CounterMetricFamily("gpufaas_scheduler_events", "Events that the engine was told.", events)
        yield CounterMetricFamily(
            "gpufaas_scheduler_node_differences",
            "Workers and calls that a node had, or lacked, against what the scheduler knew; each was settled.",
            leader.nodes.differences,
        )
        resident = GaugeMetricFamily("gpufaas_device_residents", "Copies in memory.", labels=["device"])
        for each in status.devices:
            resident.add_metric([each.device.id], len(each.resident))
        yield resident
        yield from status_metrics(status)


def scheduler_metrics(leader: Leader | None) -> bytes:
    """Return the metrics in Prometheus' text format. *leader*: None on a standby."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(leader))
    return generate_latest(registry)
