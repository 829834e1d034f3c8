"""Which devices take a replica, who sends the weights, and which replicas go."""

import pytest

from gpufaas_scheduler.plans import replicas
from gpufaas_scheduler.plans.replicas import Host, choose_receivers, map_senders, scale_down

ONE = 1


def hosts(*free: int, holders: tuple[int, ...] = (0,)) -> list[Host]:
    return [Host(f"h{i + 1}", (ONE,) * count, memory=10, holds=i in holders) for i, count in enumerate(free)]


@pytest.mark.parametrize(("wanted", "each"), [(5, [2, 1, 1, 1]), (8, [2, 2, 2, 2]), (1, [1, 0, 0, 0])])
def test_holders_are_used_up_then_the_rest_is_spread(wanted: int, each: list[int]) -> None:
    chosen = choose_receivers(hosts(2, 4, 4, 4), wanted, on_device=ONE, on_host=5)

    assert [sum(receiver.host == f"h{i}" for receiver in chosen) for i in range(1, 5)] == each


def test_who_does_not_hold_the_weights_needs_room_for_them() -> None:
    small = [Host("full", (ONE,), memory=1), Host("holder", (ONE,), memory=0, holds=True)]

    assert [each.host for each in choose_receivers(small, 2, on_device=ONE, on_host=5)] == ["holder"]


def test_a_device_without_room_takes_nothing() -> None:
    assert choose_receivers([Host("h", (1, 9), memory=9)], 2, on_device=5, on_host=1) == [replicas.Receiver("h", 1)]


def test_receivers_are_dealt_out_evenly() -> None:
    chains = map_senders(["s1", "s2"], ["a", "a", "b", "s1", "c", "d", "e"])

    assert chains == {"s1": ("a", "c", "e"), "s2": ("b", "d")}


@pytest.mark.parametrize(("count", "gone"), [(5, [4, 1]), (3, [2, 1]), (1, [1]), (9, [4, 2, 1, 1]), (0, [])])
def test_the_largest_that_fit_go_first(count: int, gone: list[int]) -> None:
    devices = [4, 2, 1, 1]

    assert [devices[index] for index in scale_down(devices, count)] == gone


def test_the_policies() -> None:
    assert replicas.by_queue_latency(3, 14.0) == 6
    assert replicas.by_request_rate(10, 0.25) == 3
    assert replicas.by_utilisation(3, 1.0) == 5
    assert replicas.by_invocations(100, 30) == 4


@pytest.mark.parametrize(("served", "way"), [(8, 1), (9, 0), (11, 0), (13, -1)])
def test_within_the_band_nothing_changes(served: float, way: int) -> None:
    assert replicas.direction(served, arriving=10, low=1, high=2) == way
