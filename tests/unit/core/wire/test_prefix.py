"""Frames from bytes in any pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufaas_core.wire.heads import AnswerHead
from gpufaas_core.wire.kinds import Kind
from gpufaas_core.wire.prefix import MAX_SAID, BrokenFrame, FrameReader, encode_frame, encode_prefix

BODIES = st.lists(st.binary(max_size=300), max_size=8)


@given(BODIES, st.lists(st.integers(1, 60), min_size=1, max_size=200))
def test_frames_come_out_as_they_went_in_however_they_are_cut(bodies: list[bytes], cuts: list[int]) -> None:
    head = AnswerHead(200, [(b"a", b"b")])
    stream = b"".join(encode_frame(Kind.ANSWER, head, body) for body in bodies)
    reader, got, at = FrameReader(), [], 0

    for turn in range(len(stream)):
        if at >= len(stream):
            break
        size = cuts[turn % len(cuts)]
        got += list(reader.feed(stream[at : at + size]))
        at += size

    assert [(kind, body) for kind, _, body in got] == [(Kind.ANSWER, body) for body in bodies]


def test_a_prefix_and_its_body_make_the_same_frame() -> None:
    head = AnswerHead(200, [])

    assert encode_prefix(Kind.ANSWER, head, 3) + b"abc" == encode_frame(Kind.ANSWER, head, b"abc")


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 16])
def test_what_is_no_frame_is_noticed_before_memory_is_spent_on_it(garbage: bytes) -> None:
    with pytest.raises(BrokenFrame):
        list(FrameReader().feed(garbage))


def test_a_header_that_is_larger_than_the_reader_takes_is_refused_before_it_is_there() -> None:
    large = encode_frame(Kind.ANSWER, AnswerHead(200, [(b"a", bytes(MAX_SAID))]))

    with pytest.raises(BrokenFrame):
        list(FrameReader(max_header=MAX_SAID).feed(large[:16]))
    assert list(FrameReader().feed(large[:16])) == []
