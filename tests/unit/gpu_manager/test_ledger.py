"""Reservations of a device's memory."""

from hypothesis import given
from hypothesis import strategies as st

from gpufaas_gpu_manager.ledger import MemoryLedger


def test_what_is_reserved_is_not_free() -> None:
    ledger = MemoryLedger(100)

    assert ledger.reserve(1, 60)

    assert (ledger.free, ledger.used) == (40, 60)


def test_more_than_is_free_is_refused_and_nothing_changes() -> None:
    ledger = MemoryLedger(100)
    ledger.reserve(1, 60)

    assert not ledger.reserve(2, 41)
    assert not ledger.resize(1, 101)

    assert dict(ledger.reserved) == {1: 60}


def test_another_reservation_of_a_worker_takes_the_place_of_the_one_before() -> None:
    ledger = MemoryLedger(100)
    ledger.reserve(1, 60)

    assert ledger.reserve(1, 90)

    assert (dict(ledger.reserved), ledger.used) == ({1: 90}, 90)


def test_a_worker_without_reservation_has_none_to_resize_or_release() -> None:
    ledger = MemoryLedger(100)

    assert not ledger.resize(1, 10)
    ledger.release(1)
    assert ledger.used == 0


@given(
    st.lists(
        st.tuples(st.sampled_from(["reserve", "resize", "release"]), st.integers(0, 5), st.integers(-5, 120)),
        max_size=60,
    )
)
def test_promises_never_exceed_the_device(steps: list[tuple[str, int, int]]) -> None:
    ledger = MemoryLedger(100)

    for step, worker, size in steps:
        if step == "reserve":
            ledger.reserve(worker, size)
        elif step == "resize":
            ledger.resize(worker, size)
        elif step == "release":
            ledger.release(worker)

        assert ledger.used == sum(ledger.reserved.values())
        assert 0 <= ledger.used <= 100
        assert ledger.free == 100 - ledger.used
