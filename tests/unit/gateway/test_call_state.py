"""Where a call stands at its gateway."""

import pytest

from gpufaas_core.steps import IllegalStep, Step
from gpufaas_gateway import call_state as states

STEPS = {name: step for name, step in vars(states).items() if isinstance(step, Step)}
STATES = range(states.READING, states.ENDED + 1)


def test_every_state_is_reached_and_every_call_can_end() -> None:
    reached, before = {states.READING}, set[int]()
    while reached != before:
        before = set(reached)
        reached |= {step[state] for step in STEPS.values() for state in before if state in step}

    assert reached == set(STATES)
    assert set(states.END) == set(STATES) - {states.ENDED}


@pytest.mark.parametrize("name", STEPS)
def test_a_call_that_has_ended_takes_no_step(name: str) -> None:
    with pytest.raises(IllegalStep, match="a call that has ended cannot"):
        STEPS[name][states.ENDED]


def test_a_call_begins_only_with_a_grant_that_it_waited_for() -> None:
    for state in set(STATES) - {states.WAITING}:
        with pytest.raises(IllegalStep):
            states.BEGIN[state]


def test_an_answer_that_streams_ends_with_its_stream_and_all_others_with_their_run() -> None:
    assert [state for state in STATES if state >= states.STREAMS] == [states.ANSWERING, states.JOINED, states.ENDED]
