"""How much of a body or an answer may be on its way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufaas_core.wire.credit import PIECE_COST, Credit, Window
from gpufaas_core.wire.kinds import KINDS, Kind
from gpufaas_core.wire.prefix import BrokenFrame

SIZE = 1000
Steps = st.lists(st.sampled_from(["take", "pause", "resume"]) | st.integers(0, 3 * SIZE), max_size=200)


@given(Steps)
def test_both_ends_agree_whatever_comes_and_however_slow_the_reader_is(steps: list[str | int]) -> None:
    credit, window, on_the_way, back = Credit(SIZE), Window(SIZE), list[int](), list[int]()
    for step in steps:
        if isinstance(step, int):
            if credit.is_left:
                credit.spend(step)
                on_the_way.append(step)
        elif step == "pause":
            window.pause()
        elif step == "resume":
            back.append(window.resume())
        elif on_the_way:
            window.came(on_the_way.pop(0))  # the sender has not sent what the reader refuses
            back.append(window.room())
        for room in filter(None, back):
            credit.add(room)  # the reader has not given what the sender refuses
        back.clear()


@given(st.lists(st.integers(0, 3 * SIZE), min_size=1, max_size=100))
def test_a_reader_who_takes_all_is_sent_all(sizes: list[int]) -> None:
    credit, window = Credit(SIZE), Window(SIZE)
    for size in sizes:
        assert credit.is_left
        credit.spend(size)
        window.came(size)
        if room := window.room():
            credit.add(room)


def test_a_piece_counts_for_its_memory_and_not_only_for_its_bytes() -> None:
    credit, pieces = Credit(SIZE), 0
    while credit.is_left:
        credit.spend(0)
        pieces += 1

    assert pieces == -(-SIZE // PIECE_COST)


def test_a_slow_reader_gives_no_room_until_he_goes_on() -> None:
    window = Window(SIZE)
    window.pause()
    window.came(SIZE)

    assert window.room() == 0
    assert window.resume() == SIZE + PIECE_COST
    assert window.room() == 0  # it was given


def test_a_piece_beyond_the_window_is_refused() -> None:
    window = Window(SIZE)
    window.came(SIZE)
    with pytest.raises(BrokenFrame, match="no room"):
        window.came(1)


@pytest.mark.parametrize("room", [-1, 0, 101 + PIECE_COST, 1 << 62])
def test_room_that_was_not_taken_is_refused_and_changes_nothing(room: int) -> None:
    credit = Credit(SIZE)
    credit.spend(100)
    with pytest.raises(BrokenFrame, match="room"):
        credit.add(room)

    credit.add(100 + PIECE_COST)  # what was taken


def test_room_counts_also_where_a_large_piece_has_taken_more_than_there_was() -> None:
    credit = Credit(SIZE)
    credit.spend(SIZE - PIECE_COST - 1)
    credit.spend(2 * SIZE)
    credit.add(SIZE)
    assert not credit.is_left

    credit.add(SIZE + PIECE_COST)
    assert credit.is_left


def test_before_the_reader_has_taken_the_call_nothing_may_be_sent() -> None:
    credit = Credit(SIZE, 0)
    assert not credit.is_left

    credit.add(SIZE)
    assert credit.is_left


def test_no_kind_means_two_things() -> None:
    assert len(KINDS) == sum(name.isupper() for name in vars(Kind))
