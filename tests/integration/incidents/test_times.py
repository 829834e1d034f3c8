"""
A call that ran longer than the function's mean counted as about to end, for as long as it ran: another function's call
waited 39 s for that device while an idle one could have loaded its model. Nobody was told how far times vary.
"""

import time
from typing import Any

import pytest
from tests.integration.conftest import Platform

pytestmark = pytest.mark.timeout(120)

SLEEPER = """
    import time

    def load(device):
        return None

    def handle(model, event, context):
        time.sleep(float(event.text))
        return "slept"
"""


def explained(platform: Platform, call: str) -> dict[str, Any]:
    answer = platform.http.get(f"/system/explain/{call}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_how_long_calls_take_is_shown_as_a_distribution_and_outlives_a_restart(make_platform: object) -> None:
    platform: Platform = make_platform("--device", "cpu:0=600MiB").start()  # type: ignore[operator]
    path = platform.deploy("sleeper", SLEEPER)
    for number in range(16):
        units = 1 + 4 * (number % 4)
        answer = platform.call(path, f"{units * 0.02:.2f}".encode(), headers={"X-Gpufaas-Size": str(units)})
        assert answer.text == "slept"
    last = explained(platform, answer.headers["x-call-id"])["service"]
    assert last["calls"] >= 15, "the first one replaces what was declared"
    assert last["size"] == units
    assert last["p50_s"] <= last["p90_s"]
    refused = platform.call(path, b"0", headers={"X-Gpufaas-Size": "large"})
    assert (refused.status_code, "X-Gpufaas-Size" in refused.text) == (400, True)

    # One that takes longer than anyone thought (ten times the longest before) is never about to end.
    runs = platform.begin(path, b"2.5", headers={"X-Gpufaas-Size": "125"})
    left = []
    for _ in range(2):
        time.sleep(0.8)
        left.append(platform.status()["devices"][0]["estimated_finish_s"])
    assert min(left) > 0.2
    assert runs.result().text == "slept"

    assert platform.stop() == 0
    platform.start()
    after = platform.call(path, b"0.02", headers={"X-Gpufaas-Size": "1"})
    service = explained(platform, after.headers["x-call-id"])["service"]

    assert service["calls"] > last["calls"]
    assert service["size"] == 1
    assert service["estimate_s"] < 0.5 * last["estimate_s"], "it is a small one"
    assert platform.stop() == 0
