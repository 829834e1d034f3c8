"""
A call that ran longer than the function's mean counted as about to end, for as long as it ran: another function's call
waited 39 s for that device while an idle one could have loaded its model. No output showed how far times vary.
"""

import time
from typing import Any

import pytest
from tests.integration.conftest import GATED_MODEL, Platform, until

pytestmark = pytest.mark.timeout(120)

SLEEPS_OR_WAITS = GATED_MODEL.replace(
    "open(", "if event.text[0] in '0.':\n            return time.sleep(float(event.text)) or 'slept'\n        open(", 1
)
DEVICES = ("--device", "cpu:0=600MiB", "--device", "cpu:1=600MiB")


def explained(platform: Platform, call: str) -> dict[str, Any]:
    answer = platform.http.get(f"/system/explain/{call}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def device_of(platform: Platform, path: str) -> str:
    return platform.call(path).headers["x-gpufaas-device"]


@pytest.mark.long
def test_a_call_is_not_kept_waiting_behind_one_that_takes_longer_than_anyone_thought(make_platform: object) -> None:
    platform: Platform = make_platform(*DEVICES).start()  # type: ignore[operator]
    long, other = platform.deploy("long", GATED_MODEL), platform.deploy("other", GATED_MODEL)
    elsewhere = platform.deploy("elsewhere", GATED_MODEL)
    aside = platform.gate()
    held = platform.begin(elsewhere, aside.body)
    until(aside.reached)
    device = device_of(platform, long)
    assert device_of(platform, other) == device, "the only idle one"
    aside.open()
    held.result()

    gate = platform.gate()
    runs = platform.begin(long, gate.body)
    until(gate.reached)

    def estimate_s() -> float:
        (busy,) = [each for each in platform.status()["devices"] if each["busy"]]
        return float(busy["estimated_finish_s"])

    until(lambda: estimate_s() > 0.3, "the calls before took a millisecond: this one is late by any measure")
    answer = platform.call(other)

    assert answer.headers["x-gpufaas-device"] != device
    gate.open()
    assert runs.result().status_code == 200
    assert platform.stop() == 0


@pytest.mark.long
def test_how_long_calls_take_is_shown_as_a_distribution_and_outlives_a_restart(make_platform: object) -> None:
    platform: Platform = make_platform("--device", "cpu:0=600MiB").start()  # type: ignore[operator]
    path = platform.deploy("sleeper", SLEEPS_OR_WAITS)
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
    gate = platform.gate()
    runs = platform.begin(path, gate.body, headers={"X-Gpufaas-Size": "125"})
    until(gate.reached)
    for _ in range(4):
        time.sleep(0.8)
        assert platform.status()["devices"][0]["estimated_finish_s"] > 0.2
    gate.open()
    assert runs.result().status_code == 200

    assert platform.stop() == 0
    platform.start()
    after = platform.call(path, b"0.02", headers={"X-Gpufaas-Size": "1"})
    service = explained(platform, after.headers["x-call-id"])["service"]

    assert service["calls"] > last["calls"]
    assert service["size"] == 1
    assert service["estimate_s"] < 0.5 * last["estimate_s"], "it is a small one"
    assert platform.stop() == 0
