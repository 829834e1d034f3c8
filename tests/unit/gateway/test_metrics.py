"""Counting is cheap, and Prometheus sees OpenFaaS's names, labels and buckets."""

import timeit
from collections.abc import Callable, MutableMapping
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import ASGIApp, Receive, Scope, Send
from tests.unit.gateway.fakes import idle

from gpufaas_core.model import Device, DeviceId, EngineStatus, FunctionId, ResidentStatus
from gpufaas_core.scaling import ScalingRule
from gpufaas_core.units import GiB
from gpufaas_gateway.metrics import Metrics, collapsed
from gpufaas_gateway.usage import FunctionStats

NOTHING = EngineStatus("lalb", (), {}, {})
ECHO = {"function_name": "echo.openfaas-fn"}


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {(each.name, frozenset(each.labels.items())): each.value for family in families for each in family.samples}


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics)[name, frozenset(labels.items())]


def test_a_call_is_counted_by_function_and_code() -> None:
    stats = FunctionStats("echo.openfaas-fn")
    metrics = Metrics(lambda: NOTHING, lambda: [(stats, 1, None)])

    for code in (200, 200, 500):
        stats.begun += 1
        stats.observe(code, 0.03, hit=True)
    stats.begun += 1

    assert value(metrics, "gateway_function_invocation_total", code="200", **ECHO) == 2
    assert value(metrics, "gateway_function_invocation_total", code="500", **ECHO) == 1
    # Read as text: prometheus_client's parser gives every counter a name in _total.
    assert b'\ngateway_function_invocation_started{function_name="echo.openfaas-fn"} 4.0\n' in metrics.render()
    assert value(metrics, "gateway_function_invocation_inflight", **ECHO) == 1
    assert value(metrics, "gateway_service_count", **ECHO) == 1


def test_the_histogram_has_openfaas_buckets_and_is_cumulative() -> None:
    stats = FunctionStats("echo.openfaas-fn")
    metrics = Metrics(lambda: NOTHING, lambda: [(stats, 1, None)])

    for seconds in (0.005, 0.006, 0.3, 60.0):
        stats.observe(200, seconds)

    buckets = {
        dict(labels)["le"]: count for (name, labels), count in samples(metrics).items() if name.endswith("_bucket")
    }
    assert buckets == {
        "0.005": 1, "0.01": 2, "0.025": 2, "0.05": 2, "0.1": 2, "0.25": 2, "0.5": 3, "1.0": 3, "2.5": 3, "5.0": 3,
        "10.0": 3, "+Inf": 4,
    }  # fmt: skip
    assert value(metrics, "gateway_functions_seconds_sum", code="200", **ECHO) == 60.311
    assert value(metrics, "gateway_functions_seconds_count", code="200", **ECHO) == 4


def test_what_calls_waited_for_their_batch_is_told_of_functions_that_have_batches() -> None:
    stats = FunctionStats("echo.openfaas-fn")
    metrics = Metrics(lambda: NOTHING, lambda: [(stats, 1, None)])
    stats.observe(200, 0.1, hit=True)
    assert "gpufaas_function_batch_wait_seconds_count" not in {name for name, _ in samples(metrics)}

    for size, held_s in ((2, 0.02), (2, 0.004), (1, 0.25)):
        stats.observe(200, 0.3, hit=True, queue_s=held_s)
        stats.observe_batch(size, held_s)

    waited = "gpufaas_function_batch_wait_seconds"
    found = {bound: value(metrics, f"{waited}_bucket", le=bound, **ECHO) for bound in ("0.005", "0.025", "+Inf")}
    assert found == {"0.005": 2, "0.025": 3, "+Inf": 4}, "the first call waited for no other"
    assert value(metrics, f"{waited}_sum", **ECHO) == pytest.approx(0.274)
    assert value(metrics, "gpufaas_function_batch_size_bucket", le="1", **ECHO) == 2
    assert value(metrics, "gpufaas_function_batch_size_count", **ECHO) == 4


def test_a_call_that_got_no_worker_is_neither_hit_nor_miss() -> None:
    stats = FunctionStats("echo.openfaas-fn")
    metrics = Metrics(lambda: NOTHING, lambda: [(stats, 1, None)])

    stats.observe(200, 2.0, hit=False, queue_s=0.25, load_s=1.5, run_s=0.125)
    stats.observe(200, 0.2, hit=True, run_s=0.125)
    stats.observe(429, 0.001)

    assert value(metrics, "gpufaas_function_hits_total", **ECHO) == 1
    assert value(metrics, "gpufaas_function_misses_total", **ECHO) == 1
    assert value(metrics, "gpufaas_function_queue_seconds_total", **ECHO) == 0.25
    assert value(metrics, "gpufaas_function_load_seconds_total", **ECHO) == 1.5
    assert value(metrics, "gpufaas_function_run_seconds_total", **ECHO) == 0.25


def test_types_are_those_that_prometheus_expects() -> None:
    metrics = Metrics(lambda: NOTHING, lambda: [(FunctionStats("echo.openfaas-fn", begun=1), 1, None)])

    types = {line for line in metrics.render().decode().splitlines() if line.startswith("# TYPE gateway_")}

    assert types == {
        "# TYPE gateway_function_invocation_total counter",
        "# TYPE gateway_function_invocation_started counter",
        "# TYPE gateway_functions_seconds histogram",
        "# TYPE gateway_function_invocation_inflight gauge",
        "# TYPE gateway_service_count gauge",
        "# TYPE gateway_service_ready_count gauge",
        "# TYPE gateway_service_min gauge",
        "# TYPE gateway_service_target gauge",
        "# TYPE gateway_service_target_load gauge",
    }


def test_copies_that_are_ready_are_neither_loading_nor_on_their_way_out() -> None:
    held = [
        ResidentStatus(FunctionId("echo.openfaas-fn@b"), 100, 0, loading, False, 0.0, draining)
        for loading, draining in ((False, False), (True, False), (False, True))
    ]
    devices = tuple(
        replace(idle(Device(DeviceId(f"n1/cpu:{i}"), "cpu", GiB)), resident=(each,)) for i, each in enumerate(held)
    )
    status = EngineStatus("lalb", devices, {}, {}, {FunctionId("echo.openfaas-fn@b"): 2})
    metrics = Metrics(lambda: status, lambda: [(FunctionStats("echo.openfaas-fn"), 1, None)])

    assert value(metrics, "gateway_service_ready_count", **ECHO) == 1
    assert value(metrics, "gateway_service_count", **ECHO) == 2


def test_functions_with_a_scaling_rule_show_what_it_aims_at() -> None:
    ruled = FunctionStats("echo.openfaas-fn"), 1, ScalingRule(min=2, type="capacity", target=5)
    metrics = Metrics(lambda: NOTHING, lambda: [ruled, (FunctionStats("plain.openfaas-fn"), 1, None)])

    assert value(metrics, "gateway_service_min", **ECHO) == 2
    assert value(metrics, "gateway_service_target", **ECHO) == 5
    assert value(metrics, "gateway_service_target_load", scaling_type="capacity", **ECHO) == 5
    assert b'gateway_service_min{function_name="plain' not in metrics.render()


# --- management routes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("/system/functions", "/system/functions"),
        ("/system/function/echo.openfaas-fn", "/system/function"),
        ("/system/namespace/", "/system/namespace"),
        ("/system/artifacts/0123", "/system/artifacts"),
        ("/", "/"),
        ("/wp-admin", "other"),
        ("//system/functions", "other"),
        ("/system/functionsandmore", "other"),
    ],
)
def test_a_path_is_counted_without_the_names_in_it(path: str, label: str) -> None:
    assert collapsed(path) == label


async def requested(metrics: Metrics, app: ASGIApp, **scope: str) -> None:
    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.disconnect"}

    async def send(_: MutableMapping[str, Any]) -> None: ...

    await metrics.counted(app)({"type": "http", "method": "GET", "path": "/system/info", **scope}, receive, send)


async def test_requests_to_management_routes_are_counted_by_method_path_and_status() -> None:
    metrics = Metrics(lambda: NOTHING)

    async def unauthorized(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 401})
        await send({"type": "http.response.body"})

    await requested(metrics, unauthorized)
    await requested(metrics, unauthorized, method="BREW")

    assert value(metrics, "http_requests_total", method="GET", path="/system/info", status="401") == 1
    assert value(metrics, "http_requests_total", method="other", path="/system/info", status="401") == 1
    assert value(metrics, "http_request_duration_seconds_count", method="GET", path="/system/info", status="401") == 1


async def test_a_request_that_fails_counts_as_500_and_one_that_nobody_waited_for_as_499() -> None:
    metrics = Metrics(lambda: NOTHING)

    async def broken(_scope: Scope, _receive: Receive, _send: Send) -> None:
        raise ZeroDivisionError

    async def silent(_scope: Scope, _receive: Receive, _send: Send) -> None: ...

    with pytest.raises(ZeroDivisionError):
        await requested(metrics, broken)
    await requested(metrics, silent)

    assert value(metrics, "http_requests_total", method="GET", path="/system/info", status="500") == 1
    assert value(metrics, "http_requests_total", method="GET", path="/system/info", status="499") == 1


def test_devices_show_their_memory_and_two_revisions_count_as_one_function() -> None:
    device = Device(DeviceId("n1/cpu:0"), "cpu", 2 * GiB)
    residents = tuple(
        ResidentStatus(FunctionId(f"echo.openfaas-fn@{revision}"), 100, 0, False, False, 0.0) for revision in ("a", "b")
    )
    now = replace(idle(device), used=200, resident=residents, evictions=3, hits=5, misses=2, busy=True)
    status = EngineStatus("lalb", (now,), {FunctionId("echo.openfaas-fn@b"): 4}, {})
    metrics = Metrics(lambda: status)

    assert value(metrics, "gpufaas_device_memory_bytes", device="n1/cpu:0") == 2 * GiB
    assert value(metrics, "gpufaas_device_memory_used_bytes", device="n1/cpu:0") == 200
    assert value(metrics, "gpufaas_device_evictions_total", device="n1/cpu:0") == 3
    assert value(metrics, "gpufaas_device_busy", device="n1/cpu:0") == 1
    assert value(metrics, "gpufaas_resident_memory_bytes", device="n1/cpu:0", **ECHO) == 200
    assert value(metrics, "gpufaas_queue_length", **ECHO) == 4


def test_a_function_that_was_removed_is_not_shown() -> None:
    stats = FunctionStats("echo.openfaas-fn")
    stats.observe(200, 0.1)
    deployed = [(stats, 1, None)]
    metrics = Metrics(lambda: NOTHING, lambda: deployed)
    assert b"echo" in metrics.render()

    deployed.clear()

    assert b"echo" not in metrics.render()


def test_two_platforms_in_one_process_count_apart() -> None:
    one = Metrics(lambda: NOTHING, lambda: [(FunctionStats("echo.openfaas-fn", begun=1), 1, None)])
    other = Metrics(lambda: NOTHING)

    assert b"echo" in one.render()
    assert b"echo" not in other.render()


def test_observing_costs_little() -> None:
    """It is on the path of every call: some 15 times an empty function is usual; the best of many tries counts."""
    stats = FunctionStats("echo.openfaas-fn")

    def best(measured: Callable[[], None]) -> float:
        return min(timeit.repeat(measured, number=2000, repeat=20))

    assert best(lambda: stats.observe(200, 0.003, True, 0.001, 0.0, 0.001)) < 100 * best(lambda: None)
