"""A handler counts as quick after some quick calls in a row, and as slow after one slow call."""

from gpufaas_functions.pace import AGAIN, FIRST, QUICK_S, Pace

SLOW_S = 2 * QUICK_S


def quick_calls_until_quick(pace: Pace) -> int:
    calls = 0
    while not pace.quick:
        pace.took(0.0)
        calls += 1
        assert calls < 100_000
    return calls


def test_a_new_handler_is_slow_until_it_has_been_quick_a_few_times() -> None:
    assert quick_calls_until_quick(Pace()) == FIRST


def test_one_slow_call_makes_it_slow_and_quick_ones_make_it_quick_again() -> None:
    pace = Pace()
    quick_calls_until_quick(pace)

    pace.took(SLOW_S)

    assert not pace.quick
    assert quick_calls_until_quick(pace) == AGAIN


def test_a_handler_with_a_slow_call_now_and_then_stays_slow_for_longer_each_time_it_is_believed() -> None:
    pace = Pace()
    needed = []
    for _ in range(5):
        pace.took(SLOW_S)
        needed.append(quick_calls_until_quick(pace))

    assert needed == [AGAIN, 2 * AGAIN, 4 * AGAIN, 8 * AGAIN, 16 * AGAIN]
    for _ in range(100_000):
        pace.took(0.0)
    pace.took(SLOW_S)
    assert quick_calls_until_quick(pace) == AGAIN, "that was long ago"


def test_calls_that_are_slow_one_after_the_other_count_once() -> None:
    pace = Pace()
    for _ in range(50):
        pace.took(SLOW_S)

    assert quick_calls_until_quick(pace) == AGAIN
