"""
What was counted, as Prometheus reads it. docs/metrics.md is the table of all that is shown.

Prometheus families are made from the counts (`usage.FunctionStats`) at scrape time only. Names and buckets of the
``gateway_`` metrics are OpenFaaS's (openfaas.md §15), so that its dashboards and alert rules work; ours begin with
``gpufaas_``.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from time import perf_counter
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpufaas_core.model import EngineStatus
from gpufaas_core.scaling import ScalingRule
from gpufaas_core.status_metrics import full_name_of, status_metrics
from gpufaas_core.units import Seconds
from gpufaas_gateway.usage import BOUNDS, BUCKETS, SUM, FunctionStats, QueueStatus

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_PATHS: Final = (
    "/", "/async", "/async-function", "/build", "/healthz", "/metrics", "/publickey", "/readyz", "/system/alert",
    "/system/artifacts",
    "/system/function", "/system/functions", "/system/info", "/system/logs", "/system/namespace", "/system/namespaces",
    "/system/scale-function", "/system/secrets", "/system/status", "/system/telemetry", "/ui",
)  # fmt: skip
"""What management routes begin with. Names behind them are left out: they are as many as people like."""


class Metrics:
    """All `FunctionStats`, and their text for Prometheus. One per platform; nothing is registered globally."""

    def __init__(
        self,
        status: Callable[[], EngineStatus],
        pending: Callable[[], Mapping[str, int]] = dict,
        queues: Callable[[], Mapping[str, QueueStatus]] = dict,
    ) -> None:
        """
        :param status: asked at each scrape for devices, copies and queues
        :param pending: likewise, for asynchronous calls that have not ended, by ``NAME.NAMESPACE``
        :param queues: likewise, for the queues that they go through, by name
        """
        self.functions: dict[str, FunctionStats] = {}
        """By ``NAME.NAMESPACE``."""
        self.rules: dict[str, tuple[int, ScalingRule | None]] = {}
        """Copies while nobody scaled it, and what its labels say about them, by the same."""
        self.pending = pending
        self.queues = queues
        self._requests: dict[tuple[str, str, str], list[float]] = {}
        """Of management routes, by method, path and status: as `FunctionStats.by_code`."""
        self._registry = CollectorRegistry()
        self._registry.register(_Families(self, self._requests, status, with_status=True))
        self._own = CollectorRegistry()
        self._own.register(_Families(self, self._requests, status, with_status=False))

    def adopt(self, stats: FunctionStats, replicas: int = 1, scaling: ScalingRule | None = None) -> FunctionStats:
        """Show *stats* from now on; return those that are shown, which are older ones if the name has any."""
        self.rules[stats.name] = replicas, scaling
        return self.functions.setdefault(stats.name, stats)

    def forget(self, name: str) -> None:
        """Stop showing a removed function. Calls still running keep their stats, which nobody reads."""
        self.functions.pop(name, None)
        self.rules.pop(name, None)

    def counted(self, app: ASGIApp) -> ASGIApp:
        """Return *app*, the management routes, with its requests counted when their answers end."""

        async def count(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return await app(scope, receive, send)
            status = "499"  # without an answer the client was gone, which nginx has this number for

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
                method = scope["method"] if scope["method"] in _METHODS else "other"
                self._observe_request((method, collapsed(scope["path"]), status), perf_counter() - began)

        return count

    def _observe_request(self, labels: tuple[str, str, str], seconds: Seconds) -> None:
        counts = self._requests.setdefault(labels, [0.0] * (BUCKETS + 1))
        counts[bisect_left(BOUNDS, seconds)] += 1
        counts[SUM] += seconds

    def render(self) -> bytes:
        """Return everything in Prometheus' text format (`CONTENT_TYPE`)."""
        return self._text(self._registry)

    def render_own(self) -> bytes:
        """Return it without what the scheduler of a cluster tells: several gateways would tell it several times."""
        return self._text(self._own)

    def _text(self, registry: CollectorRegistry) -> bytes:
        text = generate_latest(registry)
        # OpenFaaS's name for this counter does not end in _total, which prometheus_client insists on.
        return text.replace(b"gateway_function_invocation_started_total", b"gateway_function_invocation_started")


def collapsed(path: str) -> str:
    """Return what of a management route's path is a label: ``/system/function`` for all functions."""
    known = [each for each in _PATHS if path == each or path.startswith(f"{each}/")]
    return max(known, key=len) if known and not path.startswith("//") else "other"


class _Families(Collector):
    """Makes the families when they are asked for."""

    def __init__(
        self,
        metrics: Metrics,
        requests: Mapping[tuple[str, str, str], list[float]],
        status: Callable[[], EngineStatus],
        *,
        with_status: bool,
    ) -> None:
        self._metrics = metrics
        self._requests = requests
        self._status = status
        self._with_status = with_status

    def describe(self) -> list[Metric]:
        return []  # registering must not ask for a status: the engine may not run yet

    def collect(self) -> Iterator[Metric]:
        functions = sorted(self._metrics.functions.values(), key=lambda stats: stats.name)
        status = self._status()
        yield from _calls(functions)
        yield from _services(self._metrics.rules, status)
        yield from _phases(functions)
        yield _pending(self._metrics.pending())
        yield from _async_queues(self._metrics.queues())
        yield from _management(self._requests)
        if self._with_status:
            yield from status_metrics(status)


def _calls(functions: list[FunctionStats]) -> Iterator[Metric]:
    by_code = ["function_name", "code"]
    total = CounterMetricFamily("gateway_function_invocation", "Calls ended, by HTTP status", labels=by_code)
    seconds = HistogramMetricFamily("gateway_functions_seconds", "Duration of calls at the gateway", labels=by_code)
    begun = _counter("gateway_function_invocation_started", "Calls that came in")
    inflight = _gauge("gateway_function_invocation_inflight", "Calls that are waiting or running")
    for stats in functions:
        for code, counts in sorted(stats.by_code.items()):
            labels = [stats.name, str(code)]
            total.add_metric(labels, sum(counts[:BUCKETS]))
            seconds.add_metric(labels, _cumulative(counts), counts[SUM])
        begun.add_metric([stats.name], stats.begun)
        inflight.add_metric([stats.name], stats.inflight)
    yield from (total, begun, seconds, inflight)


def _services(rules: Mapping[str, tuple[int, ScalingRule | None]], status: EngineStatus) -> Iterator[Metric]:
    desired = {full_name_of(function): copies for function, copies in status.desired.items()}
    ready = _ready_copies(status)
    count = _gauge("gateway_service_count", "Desired copies")
    ready_count = _gauge("gateway_service_ready_count", "Copies that are loaded")
    least = _gauge("gateway_service_min", "Least number of copies while in use")
    target = _gauge("gateway_service_target", "Load that one copy should bear")
    typed = GaugeMetricFamily(
        "gateway_service_target_load",
        "Load that one copy should bear, by what is measured",
        labels=["function_name", "scaling_type"],
    )
    for name, (replicas, rule) in sorted(rules.items()):
        count.add_metric([name], desired.get(name, replicas))
        ready_count.add_metric([name], ready.get(name, 0))
        if rule is not None:
            least.add_metric([name], rule.min)
            target.add_metric([name], rule.target)
            typed.add_metric([name, rule.type], rule.target)
    yield from (count, ready_count, least, target, typed)


def _ready_copies(status: EngineStatus) -> Mapping[str, int]:
    ready: defaultdict[str, int] = defaultdict(int)
    for device in status.devices:
        for each in device.resident:
            if not (each.loading or each.draining):
                ready[full_name_of(each.function)] += 1
    return ready


def _phases(functions: list[FunctionStats]) -> Iterator[Metric]:
    hits = _counter("gpufaas_function_hits", "Calls that found their model resident")
    misses = _counter("gpufaas_function_misses", "Calls that had to load their model")
    queue = _counter("gpufaas_function_queue_seconds", "Time that calls waited for a placement")
    load = _counter("gpufaas_function_load_seconds", "Time that calls waited for their model to load")
    run = _counter("gpufaas_function_run_seconds", "Time that handlers took")
    for stats in functions:
        hits.add_metric([stats.name], stats.hits)
        misses.add_metric([stats.name], stats.misses)
        queue.add_metric([stats.name], stats.queue_s)
        load.add_metric([stats.name], stats.load_s)
        run.add_metric([stats.name], stats.run_s)
    yield from (hits, misses, queue, load, run)


def _pending(counts: Mapping[str, int]) -> Metric:
    family = _gauge("queue_worker_pending_messages", "Asynchronous calls that have not ended")
    for name, count in sorted(counts.items()):
        family.add_metric([name], count)
    return family


def _async_queues(queues: Mapping[str, QueueStatus]) -> Iterator[Metric]:
    pending = _gauge("gpufaas_async_queue_pending", "Its asynchronous calls that have not ended", "queue")
    running = _gauge("gpufaas_async_queue_running", "Those that are being executed", "queue")
    delivering = _gauge("gpufaas_async_queue_delivering", "Those whose callback is being delivered", "queue")
    concurrency = _gauge("gpufaas_async_queue_concurrency", "How many may be executed at once", "queue")
    for name, each in queues.items():
        pending.add_metric([name], each.pending)
        running.add_metric([name], each.running)
        delivering.add_metric([name], each.delivering)
        concurrency.add_metric([name], each.concurrency)
    yield from (pending, running, delivering, concurrency)


def _management(requests: Mapping[tuple[str, str, str], list[float]]) -> Iterator[Metric]:
    labels = ["method", "path", "status"]
    total = CounterMetricFamily("http_requests", "Requests to management routes", labels=labels)
    seconds = HistogramMetricFamily("http_request_duration_seconds", "Their duration", labels=labels)
    for key, counts in sorted(requests.items()):
        total.add_metric(list(key), sum(counts[:BUCKETS]))
        seconds.add_metric(list(key), _cumulative(counts), counts[SUM])
    yield from (total, seconds)


def _cumulative(counts: list[float]) -> list[tuple[str, float]]:
    buckets = []
    so_far = 0.0
    for bound, count in zip((*map(str, BOUNDS), "+Inf"), counts[:BUCKETS], strict=True):
        so_far += count
        buckets.append((bound, so_far))
    return buckets


def _counter(name: str, what: str, label: str = "function_name") -> CounterMetricFamily:
    return CounterMetricFamily(name, what, labels=[label])


def _gauge(name: str, what: str, label: str = "function_name") -> GaugeMetricFamily:
    return GaugeMetricFamily(name, what, labels=[label])
