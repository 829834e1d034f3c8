"""Quotas of namespaces on the real platform, set as users set them."""

import json
import subprocess
import sys
from collections.abc import Callable

import pytest
from tests.integration.conftest import GATED_MODEL, HTTP, TORCH, Platform, until
from tests.integration.test_async import deploy as deploy_async

from gpufaas import Refused

Make = Callable[..., Platform]


def set_quota(platform: Platform, *limits: str) -> dict[str, object]:
    said = subprocess.run(
        [sys.executable, "-m", "gpufaas_cli", "namespace", "quota", "openfaas-fn", *limits, "--json",
         "-g", platform.url],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    found: dict[str, object] = json.loads(said.stdout)
    return found


def used(platform: Platform) -> dict[str, int]:
    found: dict[str, int] = platform.http.get("/system/namespace/openfaas-fn/quota").json()["used"]
    return found


def test_quotas_hold_deployments_and_calls_also_after_a_kill(make_platform: Make) -> None:
    """One call runs, one waits, the third is told to come again; asynchronous ones wait until there is room."""
    platform = make_platform("--device", "cpu:0=400MiB").start()
    path = "/function/gated"
    deploy_async(platform, "gated", GATED_MODEL, TORCH, min_wait="200ms")
    set_quota(platform, "--functions", "1", "--memory", "100Mi")
    set_quota(platform, "--in-flight", "2", "--waiting", "1")
    platform.kill()
    platform.start()

    gate = platform.gate()
    calls = [platform.begin(path, gate.body)]
    until(gate.reached)
    calls.append(platform.begin(path, gate.body))
    until(lambda: used(platform)["waiting"] == 1)
    third = platform.call(path, gate.body)
    accepted = platform.call("/async-function/gated", gate.body)

    assert (third.status_code, third.headers["retry-after"]) == (429, "1")
    assert third.headers["x-gpufaas-error"] == "overloaded"
    assert "namespace openfaas-fn is at its quota of calls in flight (2 of 2" in third.text
    assert accepted.status_code == 202
    with pytest.raises(Refused, match=r"quota of functions \(1 of 1\), and second\.openfaas-fn would be one more"):
        platform.deploy("second", "def handle(event, context): return 'x'", HTTP)
    with pytest.raises(Refused, match=r"gated\.openfaas-fn reserves 150 MiB"):
        platform.deploy("gated", GATED_MODEL, TORCH, memory="150Mi")

    gate.open()
    call_id = accepted.headers["x-call-id"]
    assert [each.result().status_code for each in calls] == [200, 200]
    until(lambda: platform.http.get(f"/async/{call_id}").json()["state"] == "done", "its 429 was no failure of it")
    assert platform.http.get(f"/async/{call_id}").json()["status"] == 200
    until(lambda: used(platform) == {"functions": 1, "memory": 48 << 20, "inFlight": 0, "waiting": 0})

    assert set_quota(platform, "--clear") == {"namespace": "openfaas-fn", "used": {"functions": 1, "memory": 48 << 20}}
    assert platform.deploy("gated", GATED_MODEL, TORCH, memory="150Mi") == path
