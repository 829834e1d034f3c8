"""
The gateway's metrics for Prometheus. docs/metrics.md lists all of them.

The families are made from the counts (`usage.FunctionStats`) when they are scraped. Names and buckets of ``gateway_``
metrics are OpenFaaS's, so that its dashboards and alert rules work; ours begin with ``gpufaas_``.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpufaas_core.model import EngineStatus
from gpufaas_core.scaling import ScalingRule
from gpufaas_core.status_metrics import COUNTER, GAUGE, families, family, full_name_of, status_metrics
from gpufaas_core.units import Seconds
from gpufaas_gateway.errors import METHODS
from gpufaas_gateway.usage import BATCH_BOUNDS, BOUNDS, BUCKETS, SUM, FunctionStats, QueueStatus

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_PATHS: Final = (
    "/", "/async", "/async-function", "/healthz", "/metrics", "/readyz", "/system/alert", "/system/artifacts",
    "/system/function", "/system/functions", "/system/info", "/system/logs", "/system/namespace", "/system/namespaces",
    "/system/scale-function", "/system/secrets", "/system/status", "/system/telemetry", "/ui",
)  # fmt: skip
"""Beginnings of management routes. Names that follow are left out of the label: there may be any number of them."""


Counted = tuple[FunctionStats, int, ScalingRule | None]
"""The counts of a function, its desired copies until it is scaled, and the rule of its labels."""


class Metrics:
    """Counts of functions and of management requests as text for Prometheus. Nothing is registered globally."""

    def __init__(
        self,
        status: Callable[[], EngineStatus],
        functions: Callable[[], Iterable[Counted]] = tuple,
        pending: Callable[[], Mapping[str, int]] = dict,
        queues: Callable[[], Mapping[str, QueueStatus]] = dict,
    ) -> None:
        """
        All parameters are called at each scrape.

        :param status: returns devices, copies and queues
        :param functions: returns what is deployed
        :param pending: returns the asynchronous calls that have not ended, by ``NAME.NAMESPACE``
        :param queues: returns the queues of asynchronous calls, by name
        """
        self.status = status
        self.functions = functions
        self.pending = pending
        self.queues = queues
        self.requests: dict[tuple[str, str, str], list[float]] = {}
        """Requests to management routes by method, path and status; values as in `FunctionStats.by_code`."""
        self._registry, self._own = CollectorRegistry(), CollectorRegistry()
        self._registry.register(_Families(self, with_status=True))
        self._own.register(_Families(self, with_status=False))

    def show(self, families: Collector) -> None:
        """Show *families*, too: those of a node in this process."""
        self._registry.register(families)

    def counted(self, app: ASGIApp) -> ASGIApp:
        """Return *app*, the management routes, wrapped so that its requests are counted when their answers end."""

        async def count(scope: Scope, receive: Receive, send: Send) -> None:
            status = "499"  # nginx's number for a client that hung up before the answer

            async def watch(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = str(message["status"])
                await send(message)

            began = perf_counter()
            try:
                await app(scope, receive, watch)
            except Exception:
                status = "500"
                raise
            finally:
                method = scope["method"] if scope["method"] in METHODS else "other"
                self._observe_request((method, collapsed(scope["path"]), status), perf_counter() - began)

        return count

    def _observe_request(self, labels: tuple[str, str, str], seconds: Seconds) -> None:
        counts = self.requests.setdefault(labels, [0.0] * (BUCKETS + 1))
        counts[bisect_left(BOUNDS, seconds)] += 1
        counts[SUM] += seconds

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format (`CONTENT_TYPE`)."""
        return _text(self._registry)

    def render_own(self) -> bytes:
        """Return the metrics of this gateway alone: in a cluster the scheduler shows devices and queues, once."""
        return _text(self._own)


def _text(registry: CollectorRegistry) -> bytes:
    # OpenFaaS's name for this counter does not end in _total, which prometheus_client insists on.
    name = b"gateway_function_invocation_started"
    return generate_latest(registry).replace(name + b"_total", name)


def collapsed(path: str) -> str:
    """Return the label for the path of a management route: ``/system/function`` for all functions."""
    known = [each for each in _PATHS if path == each or path.startswith(f"{each}/")]
    return max(known, key=len) if known and not path.startswith("//") else "other"


@dataclass(frozen=True, eq=False)
class _Families(Collector):
    """Makes the families at each scrape."""

    metrics: Metrics
    with_status: bool

    def collect(self) -> Iterator[Metric]:
        services = sorted(self.metrics.functions(), key=lambda each: each[0].name)
        functions = [stats for stats, *_ in services]
        status = self.metrics.status()
        yield from _histogram(
            ("gateway_function_invocation", "Calls ended, by HTTP status"),
            ("gateway_functions_seconds", "Duration of calls at the gateway"),
            ("function_name", "code"),
            (((each.name, str(code)), counts) for each in functions for code, counts in sorted(each.by_code.items())),
        )
        yield from families(_OF_FUNCTION, "function_name", ((each.name, each) for each in functions))
        yield _batch_sizes(functions)
        yield _batch_waits(functions)
        yield from _services(services, status)
        yield family(
            GAUGE,
            "queue_worker_pending_messages",
            "Asynchronous calls that have not ended",
            _FUNCTION,
            (([name], count) for name, count in sorted(self.metrics.pending().items())),
        )
        yield from families(_OF_QUEUE, "queue", self.metrics.queues().items())
        yield from _histogram(
            ("http_requests", "Requests to management routes"),
            ("http_request_duration_seconds", "Their duration"),
            ("method", "path", "status"),
            sorted(self.metrics.requests.items()),
        )
        what = "The age of what this gateway knows of devices and copies; 0: a scheduler leads"
        yield GaugeMetricFamily("gpufaas_status_age_seconds", what, status.age_s)
        if self.with_status and not status.age_s:
            yield from status_metrics(status)


_FUNCTION: Final = ("function_name",)
_OF_FUNCTION: Final = (
    (COUNTER, "gateway_function_invocation_started", "Calls that came in", "begun"),
    (GAUGE, "gateway_function_invocation_inflight", "Calls that are waiting or running", "inflight"),
    (COUNTER, "gpufaas_function_hits", "Calls that found their model resident", "hits"),
    (COUNTER, "gpufaas_function_misses", "Calls that had to load their model", "misses"),
    (COUNTER, "gpufaas_function_queue_seconds", "Time that calls waited for a placement", "queue_s"),
    (COUNTER, "gpufaas_function_load_seconds", "Time that calls waited for their model to load", "load_s"),
    (COUNTER, "gpufaas_function_run_seconds", "Time that handlers took", "run_s"),
    (COUNTER, "gpufaas_function_grants", "Batches, those of one call included", "grants"),
)
_OF_QUEUE: Final = (
    (GAUGE, "gpufaas_async_queue_pending", "Its asynchronous calls that have not ended", "pending"),
    (GAUGE, "gpufaas_async_queue_running", "Those that are being executed", "running"),
    (GAUGE, "gpufaas_async_queue_delivering", "Those whose callback is being delivered", "delivering"),
    (GAUGE, "gpufaas_async_queue_concurrency", "How many may be executed at once", "concurrency"),
)


def _histogram(
    count: tuple[str, str],
    duration: tuple[str, str],
    labels: Sequence[str],
    observed: Iterable[tuple[Sequence[str], list[float]]],
) -> Iterator[Metric]:
    """Yield number and durations of what was *observed* (`FunctionStats.by_code`), by the values of its labels."""
    total = CounterMetricFamily(*count, labels=labels)
    seconds = HistogramMetricFamily(*duration, labels=labels)
    for of, counts in observed:
        total.add_metric(of, sum(counts[:BUCKETS]))
        bounds = zip((*map(str, BOUNDS), "+Inf"), accumulate(counts[:BUCKETS]), strict=True)
        seconds.add_metric(of, list(bounds), counts[SUM])
    yield from (total, seconds)


def _batch_sizes(functions: list[FunctionStats]) -> Metric:
    """Return how large the batches of calls were, of functions that had some."""
    sizes = HistogramMetricFamily(
        "gpufaas_function_batch_size", "Calls by the size of the batch that they ran in", labels=_FUNCTION
    )
    for each in functions:
        if each.batches:
            by_size = {1: each.hits + each.misses - sum(each.batches.values()), **each.batches}
            counts = [sum(calls for size, calls in by_size.items() if size <= most) for most in BATCH_BOUNDS]
            bounds = [(str(most), float(count)) for most, count in zip(BATCH_BOUNDS, counts, strict=True)]
            every = sum(by_size.values())
            sizes.add_metric([each.name], [*bounds, ("+Inf", every)], sum(size * n for size, n in by_size.items()))
    return sizes


def _batch_waits(functions: list[FunctionStats]) -> Metric:
    """Return how long calls were held back for others of their batch, of functions that had batches."""
    waits = HistogramMetricFamily(
        "gpufaas_function_batch_wait_seconds", "Time that calls were held back for others of their batch",
        labels=_FUNCTION,
    )  # fmt: skip
    for each in functions:
        if each.batches or each.batch_waits:
            counts = each.batch_waits or [0.0] * (BUCKETS + 1)
            at_once = each.hits + each.misses - sum(counts[:BUCKETS])
            by_bound = accumulate((at_once + counts[0], *counts[1:BUCKETS]))
            bounds = zip((*map(str, BOUNDS), "+Inf"), by_bound, strict=True)
            waits.add_metric([each.name], list(bounds), counts[SUM])
    return waits


def _services(services: Sequence[Counted], status: EngineStatus) -> Iterator[Metric]:
    desired = {full_name_of(function): copies for function, copies in status.desired.items()}
    ready = Counter(
        full_name_of(each.function)
        for device in status.devices
        for each in device.resident
        if not (each.loading or each.draining)
    )
    copies = {stats.name: desired.get(stats.name, replicas) for stats, replicas, _ in services}
    rules = {stats.name: rule for stats, _, rule in services if rule is not None}
    for metric, what, values in (
        ("gateway_service_count", "Desired copies", copies),
        ("gateway_service_ready_count", "Copies that are loaded", {name: ready[name] for name in copies}),
        ("gateway_service_min", "Least number of copies while in use", {name: rules[name].min for name in rules}),
        ("gateway_service_target", "Load that one copy should bear", {name: rules[name].target for name in rules}),
    ):
        yield family(GAUGE, metric, what, _FUNCTION, (([name], value) for name, value in values.items()))
    yield family(
        GAUGE,
        "gateway_service_target_load",
        "Load that one copy should bear, by what is measured",
        ("function_name", "scaling_type"),
        (([name, rule.type], rule.target) for name, rule in rules.items()),
    )
