"""
Devices, residents and queues for Prometheus. docs/metrics.md is the table of all that is shown.

They are the engine's, and told once: by the platform in one process, or by the scheduler that leads. Gateways of a
cluster know them as well, and show them at their front doors only, which nobody scrapes for sums.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gpufaas_core.model import EngineStatus, FunctionId

Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]
COUNTER: Final = CounterMetricFamily
GAUGE: Final = GaugeMetricFamily
_FUNCTION: Final = ("function_name",)

_DEVICE: Final[tuple[tuple[Kind, str, str, str], ...]] = (
    (GAUGE, "gpufaas_device_memory_bytes", "Memory that may be promised to workers", "device.memory"),
    (GAUGE, "gpufaas_device_memory_used_bytes", "Memory that is promised to workers", "used"),
    (GAUGE, "gpufaas_device_compute_reserved", "Per cent of its compute that copies and calls hold", "reserved"),
    (GAUGE, "gpufaas_device_busy", "1 while a model function runs there", "busy"),
    (COUNTER, "gpufaas_device_busy_seconds", "Time that model functions ran or loaded there", "busy_s"),
    (GAUGE, "gpufaas_device_queue_length", "Calls in the device's local queue", "local_queue"),
    (COUNTER, "gpufaas_device_calls", "Calls placed on the device", "served"),
    (COUNTER, "gpufaas_device_hits", "Calls that found their model there", "hits"),
    (COUNTER, "gpufaas_device_misses", "Calls whose model was loaded there", "misses"),
    (COUNTER, "gpufaas_device_evictions", "Models evicted from it", "evictions"),
)


def family(
    kind: Kind, name: str, what: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    """Return a family of metrics; *values* by the values of its labels."""
    made = kind(name, what, labels=labels)
    for of, value in values:
        made.add_metric(of, value)
    return made


def families(
    table: Iterable[tuple[Kind, str, str, str]], label: str, rows: Iterable[tuple[str, object]]
) -> Iterator[Metric]:
    """Yield a family for each line of *table*: kind, name, description, and which attribute of each row it shows."""
    known = list(rows)
    for kind, name, what, attribute in table:
        read = attrgetter(attribute)
        yield family(kind, name, what, [label], (([of], read(row)) for of, row in known))


def full_name_of(function: FunctionId) -> str:
    """Return ``NAME.NAMESPACE`` of a revision."""
    return function.partition("@")[0]


def status_metrics(status: EngineStatus) -> Iterator[Metric]:
    """Yield what *status* says of devices, of what is resident on them, of queues, and of functions that fail."""
    yield from families(_DEVICE, "device", ((each.device.id, each) for each in status.devices))
    memory: Counter[tuple[str, str]] = Counter()  # two revisions of one function may be there
    for each in status.devices:
        for resident in each.resident:
            memory[full_name_of(resident.function), each.device.id] += resident.memory
    yield family(
        GAUGE,
        "gpufaas_resident_memory_bytes",
        "Memory promised to a function's workers",
        ("function_name", "device"),
        sorted(memory.items()),
    )
    queued: Counter[str] = Counter()
    for function, length in status.queued.items():
        queued[full_name_of(function)] += length
    failed: Counter[str] = Counter()
    for function, failing in status.failing.items():
        failed[full_name_of(function)] = max(failing.failures, failed[full_name_of(function)])
    for name, what, values in (
        ("gpufaas_queue_length", "Calls that wait, in the global and the local queues", queued),
        (
            "gpufaas_function_failed_loads",
            "Loads in a row that failed, of functions whose last load failed and that have no ready copy",
            failed,
        ),
    ):
        yield family(GAUGE, name, what, _FUNCTION, (([of], value) for of, value in sorted(values.items())))
