"""What of a share is not enforced, as people read it."""

import pytest

from gpufaas_core.model import Device, DeviceId, Need
from gpufaas_gateway.function_state import not_enforced


def device(name: str, by: str | None) -> Device:
    return Device(DeviceId(f"n/{name}"), "cpu", 1, {} if by is None else {"compute.enforcement": by})


@pytest.mark.parametrize(
    ("need", "by", "says"),
    [
        (Need(30, "share"), ["cpu-quota", "mps", "emulated", None], ""),
        (
            Need(30, "share"),
            ["cpu-quota", "none"],
            "share of 30 per cent is not enforced on n/1, so it may use more: g",
        ),
        (Need(30, "share"), ["none"] * 5, "on n/0, n/1, n/2 and 2 more, so it"),
        (Need(50, "share"), ["affinity"], "its share of 50 per cent is held to whole cores on n/0"),
        (Need(50, "share"), ["none", "time-slicing"], "; not enforced on n/1: without MPS, processes take turns"),
        (
            Need(50, "spatial"),
            ["time-slicing", "none"],
            "calls take turns, and do not run side by side, on n/0: there",
        ),
        (Need(), ["none", "time-slicing"], ""),
    ],
)
def test_one_line_says_what_is_not_enforced_and_where(need: Need, by: list[str | None], says: str) -> None:
    said = not_enforced(need, [device(str(index), each) for index, each in enumerate(by)])

    assert says in said if says else said == ""
    assert "\n" not in said


def test_containers_on_a_device_with_cores_are_limited_one_by_one_and_it_is_said() -> None:
    cores = Device(DeviceId("n/cpu:0"), "cpu-0.6", 1, {"compute.enforcement": "none", "device.cores": "0.6"})

    assert not_enforced(Need(), [device("1", None), cores]) == ""
    assert not_enforced(Need(), [device("1", None)], image=True) == ""
    alone = not_enforced(Need(), [device("1", None), cores], image=True)
    assert alone.startswith("each of its containers is held to the cores of n/cpu:0, or its share of them, but not all")
    shared = not_enforced(Need(30, "share"), [cores], image=True)
    assert shared.startswith("its share of 30 per cent is not enforced on n/cpu:0")
    assert shared.endswith(f"; {alone}")
