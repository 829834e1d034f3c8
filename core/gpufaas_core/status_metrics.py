"""
Devices, residents and queues for Prometheus. docs/metrics.md is the table of all that is shown.

They are the engine's, and told once: by the platform in one process, or by the scheduler that leads. Gateways of a
cluster know them as well, and show them at their front doors only, which nobody scrapes for sums.
"""

from collections import defaultdict
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gpufaas_core.model import EngineStatus, FunctionId


def full_name_of(function: FunctionId) -> str:
    """Return ``NAME.NAMESPACE`` of a revision."""
    return function.partition("@")[0]


def status_metrics(status: EngineStatus) -> Iterator[Metric]:
    """Yield what *status* says of devices, of what is resident on them, of queues, and of functions that fail."""
    yield from _devices(status)
    yield _residents(status)
    yield _queues(status)
    yield _failing(status)


def _devices(status: EngineStatus) -> Iterator[Metric]:
    total = GaugeMetricFamily(
        "gpufaas_device_memory_bytes", "Memory that may be promised to workers", labels=["device"]
    )
    used = GaugeMetricFamily(
        "gpufaas_device_memory_used_bytes", "Memory that is promised to workers", labels=["device"]
    )
    busy = GaugeMetricFamily("gpufaas_device_busy", "1 while a model function runs there", labels=["device"])
    busy_s = CounterMetricFamily(
        "gpufaas_device_busy_seconds", "Time that model functions ran or loaded there", labels=["device"]
    )
    waiting = GaugeMetricFamily("gpufaas_device_queue_length", "Calls in the device's local queue", labels=["device"])
    served = CounterMetricFamily("gpufaas_device_calls", "Calls placed on the device", labels=["device"])
    hits = CounterMetricFamily("gpufaas_device_hits", "Calls that found their model there", labels=["device"])
    misses = CounterMetricFamily("gpufaas_device_misses", "Calls whose model was loaded there", labels=["device"])
    evictions = CounterMetricFamily("gpufaas_device_evictions", "Models evicted from it", labels=["device"])
    for each in status.devices:
        labels = [each.device.id]
        total.add_metric(labels, each.device.memory)
        used.add_metric(labels, each.used)
        busy.add_metric(labels, each.busy)
        busy_s.add_metric(labels, each.busy_s)
        waiting.add_metric(labels, each.local_queue)
        served.add_metric(labels, each.served)
        hits.add_metric(labels, each.hits)
        misses.add_metric(labels, each.misses)
        evictions.add_metric(labels, each.evictions)
    yield from (total, used, busy, busy_s, waiting, served, hits, misses, evictions)


def _residents(status: EngineStatus) -> Metric:
    family = GaugeMetricFamily(
        "gpufaas_resident_memory_bytes", "Memory promised to a function's workers", labels=["function_name", "device"]
    )
    memory: defaultdict[tuple[str, str], int] = defaultdict(int)  # two revisions of one function may be there
    for each in status.devices:
        for resident in each.resident:
            memory[full_name_of(resident.function), each.device.id] += resident.memory
    for labels, size in sorted(memory.items()):
        family.add_metric(list(labels), size)
    return family


def _failing(status: EngineStatus) -> Metric:
    family = GaugeMetricFamily(
        "gpufaas_function_failed_loads",
        "Loads in a row that failed, of functions whose calls are refused for it",
        labels=["function_name"],
    )
    for function, each in sorted(status.failing.items()):
        family.add_metric([full_name_of(function)], each.failures)
    return family


def _queues(status: EngineStatus) -> Metric:
    family = GaugeMetricFamily(
        "gpufaas_queue_length", "Calls that wait, in the global and the local queues", labels=["function_name"]
    )
    queued: defaultdict[str, int] = defaultdict(int)
    for function, length in status.queued.items():
        queued[full_name_of(function)] += length
    for name, length in sorted(queued.items()):
        family.add_metric([name], length)
    return family
