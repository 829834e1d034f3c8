"""How a function moves to other hardware: phases in order, other types in turn, no way back after the switch."""

import pytest

from gpufaas_scheduler.plans.reconfiguration import Phase, Reconfiguration


def move(*others: str, phase: Phase = Phase.PROVISION, since: float = 0) -> Reconfiguration:
    return Reconfiguration("f", "v100", others, since, phase)


def test_the_phases_in_order_and_when_both_are_paid_for() -> None:
    now, seen, both = move(), [], []
    for at in range(1, 6):
        seen.append(now.phase)
        both.append(now.pays_for_both)
        now = now.succeeded(at)

    assert [*seen, now.phase] == ["provision", "start", "switch", "drain", "release", "done"]
    assert both == [False, True, True, True, True]
    assert not now.pays_for_both


def test_what_cannot_be_had_is_replaced_by_the_next_type_then_given_up() -> None:
    first = move("m60", "k80").succeeded(1)

    second = first.failed(2)
    third = second.failed(3)

    assert [(each.target, each.phase) for each in (second, third)] == [("m60", "provision"), ("k80", "provision")]
    assert third.failed(4).phase is Phase.GIVEN_UP


def test_it_is_given_up_when_the_limit_is_over() -> None:
    assert move("m60").failed(10, limit=10).phase is Phase.GIVEN_UP
    assert move("m60", "k80").failed(6, limit=10).failed(11, limit=10).phase is Phase.GIVEN_UP


@pytest.mark.parametrize("phase", [Phase.SWITCH, Phase.DRAIN, Phase.RELEASE])
def test_from_the_switch_on_the_same_is_done_again(phase: Phase) -> None:
    assert move("m60", phase=phase).failed(9).phase is phase


def test_it_drains_until_no_call_is_left_or_the_limit_is_over() -> None:
    draining = move(phase=Phase.DRAIN)

    assert draining.waited(3, now=59) is draining
    assert draining.waited(0, now=1).phase is Phase.RELEASE
    assert draining.waited(3, now=60).phase is Phase.RELEASE
    assert move().waited(0, now=99).phase is Phase.PROVISION


def test_another_process_takes_it_up_where_it_was_kept() -> None:
    kept = move("m60").succeeded(1)

    assert kept.succeeded(2) == Reconfiguration("f", "v100", ("m60",), 2, Phase.SWITCH, begun=0)
