"""When a fork server counts as stuck: by its state in /proc, once a second."""

import pytest

from gpufaas_gpu_manager.stuck import Silence


def looks_until_stuck(state: str, *, works: bool = False, starting: bool = False) -> int:
    """Return how many looks it takes; 0: it is never stuck."""
    silence = Silence()
    for look in range(1, 200):
        if silence.look(state, (look if works else 7, 0, 0), starting):
            return look
    return 0


def test_a_stopped_one_is_stuck_after_three_looks() -> None:
    assert looks_until_stuck("T") == looks_until_stuck("t", starting=True) == 3


def test_one_that_sleeps_without_an_answer_is_stuck_after_ten() -> None:
    assert looks_until_stuck("S") == 11  # the first look has nothing to compare with


@pytest.mark.parametrize("state", ["R", "D"])
def test_one_that_waits_for_a_processor_or_a_disk_is_given_a_minute(state: str) -> None:
    assert looks_until_stuck(state) == 60


def test_one_that_sleeps_now_and_then_while_it_works_is_given_a_minute() -> None:
    assert looks_until_stuck("S", works=True) == 60


def test_one_that_imports_may_take_as_long_as_something_happens() -> None:
    assert looks_until_stuck("S", works=True, starting=True) == looks_until_stuck("R", starting=True) == 0
    assert looks_until_stuck("S", starting=True) == 61


def test_an_answer_begins_the_count_anew() -> None:
    silence = Silence()
    silence.look("T", (), False)
    silence.look("T", (), False)

    silence.broken()

    assert not silence.look("T", (), False)
