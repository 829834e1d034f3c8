"""Which frames of a lane may come now, and from whom."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufaas_core.wire import order
from gpufaas_core.wire.kinds import KINDS, Kind
from gpufaas_core.wire.order import FROM_GATEWAY, FROM_NODE, FROM_WORKER, Says
from gpufaas_core.wire.prefix import BrokenFrame

LAST = {Kind.ANSWER, Kind.LAID, Kind.END, Kind.REFUSED, Kind.ERROR, Kind.REPLY, Kind.DROPPED}
legs = pytest.mark.parametrize("answers", [FROM_WORKER, FROM_NODE], ids=["worker", "node"])


def talk(data: st.DataObject, answers: Says, state: int) -> list[int]:
    """Answer until the lane is free, or a batch is over."""
    said = list[int]()
    while state != order.FREE and not (state == order.BATCHED and data.draw(st.booleans())):
        may_come = [kind for kind, after in answers.items() if state in after]
        if len(said) > 20:
            may_come = [kind for kind in may_come if kind in LAST] or may_come
        said.append(data.draw(st.sampled_from(may_come)))
        state = answers[said[-1]][state]
    return said


@legs
@given(data=st.data())
def test_a_call_has_one_answer_whole_or_in_pieces_between_head_and_end(data: st.DataObject, answers: Says) -> None:
    said = talk(data, answers, order.CALLED)

    assert [kind for kind in said if kind in LAST] == said[-1:]
    if Kind.CHUNK in said or said[-1] == Kind.END:
        assert said.count(Kind.HEAD) == 1
        assert said.index(Kind.HEAD) < min(at for at, kind in enumerate(said) if kind in (Kind.CHUNK, Kind.END))
    if said[-1] in (Kind.ANSWER, Kind.LAID, Kind.REFUSED, Kind.DROPPED):
        assert Kind.HEAD not in said, "what has begun to be answered was not refused"


@given(st.data())
def test_a_query_has_one_reply_and_no_head(data: st.DataObject) -> None:
    said = talk(data, FROM_NODE, order.ASKED)

    assert set(said[:-1]) <= {Kind.CHUNK}
    assert said[-1] in (Kind.REPLY, Kind.END, Kind.ERROR)


@given(st.data())
def test_answers_of_a_batch_stream_one_after_the_other(data: st.DataObject) -> None:
    said = [kind for kind in talk(data, FROM_WORKER, order.BATCHED) if kind in (Kind.HEAD, Kind.END)]

    assert said[::2] == [Kind.HEAD] * len(said[::2])
    assert said[1::2] == [Kind.END] * len(said[1::2])


@pytest.mark.parametrize("state", [*range(1, 8)])
def test_a_lane_has_one_call_at_a_time(state: int) -> None:
    for kind in (Kind.CALL, Kind.ASK):
        with pytest.raises(BrokenFrame, match="on a lane that"):
            FROM_GATEWAY[kind][state]


@legs
def test_a_lane_without_a_call_hears_nothing(answers: Says) -> None:
    for kind in answers:
        with pytest.raises(BrokenFrame, match="on a lane that has no call"):
            answers[kind][order.FREE]


def test_pieces_of_a_body_come_after_its_call_and_before_its_end() -> None:
    called = FROM_GATEWAY[Kind.CALL][order.FREE]
    with pytest.raises(BrokenFrame, match="BODY on a lane that waits for an answer"):
        FROM_GATEWAY[Kind.BODY][called]

    coming = order.BODY_FOLLOWS[called]
    assert FROM_GATEWAY[Kind.BODY][coming] == coming
    assert FROM_GATEWAY[Kind.BODY_END][coming] == called
    with pytest.raises(BrokenFrame, match="BODY_END on a lane that waits for an answer"):
        FROM_GATEWAY[Kind.BODY_END][called]


def test_an_answer_may_end_before_its_body_has_come_and_the_rest_of_that_is_skipped() -> None:
    state = FROM_GATEWAY[Kind.BODY][FROM_NODE[Kind.HEAD][order.BODY_FOLLOWS[order.CALLED]]]
    state = FROM_NODE[Kind.END][FROM_NODE[Kind.CHUNK][state]]

    assert state == order.FREE
    assert FROM_GATEWAY[Kind.BODY_END][FROM_GATEWAY[Kind.BODY][state]] == order.FREE


@pytest.mark.parametrize("state", [*range(8)])
def test_a_caller_may_leave_and_a_reader_give_room_at_any_time(state: int) -> None:
    assert FROM_GATEWAY[Kind.CANCEL][state] == FROM_GATEWAY[Kind.ROOM][state] == state


@pytest.mark.parametrize("says", [FROM_GATEWAY, FROM_NODE, FROM_WORKER], ids=["gateway", "node", "worker"])
def test_an_end_says_nothing_else(says: Says) -> None:
    for kind in {*KINDS, 0, 255} - set(says):
        with pytest.raises(BrokenFrame, match=r"never says of a call"):
            says[kind]


def test_a_worker_cannot_speak_as_a_node() -> None:
    assert not set(FROM_WORKER) & {Kind.REFUSED, Kind.ERROR, Kind.REPLY, Kind.RUNS}
