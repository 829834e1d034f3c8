"""The frames of calls between gateway and node, as bytes."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufaas_cluster.call_heads import ErrorHead, NodeAnswerHead, NodeCallHead, QueryHead
from gpufaas_cluster.error_codes import make_error, told
from gpufaas_core.errors import GpufaasError, GrantRefused, NotAdmitted, Overloaded, TooLate
from gpufaas_core.logs import LogQuery
from gpufaas_core.messages import Grant
from gpufaas_core.model import CallId, CopyId, DeviceId, FunctionId, Part
from gpufaas_core.wire.heads import AnswerHead, CallHead, RoomHead
from gpufaas_core.wire.kinds import Kind
from gpufaas_core.wire.prefix import FrameReader, encode_frame

GRANT = Grant(
    7, 3, (CallId("c@g1"),), FunctionId("f.ns@1"), "digest", (Part(DeviceId("n/cuda:0"), 1 << 30),), True,
    (CopyId("old.ns@1"),), local=True, copy=2,
)  # fmt: skip
HEAD = CallHead("c", "POST", "/a%20b", b"q=1", [(b"host", b"h"), (b"x", b"\xff")], timeout_s=1.5)
SAID = [
    (Kind.CALL, NodeCallHead(GRANT, HEAD), b"body"),
    (Kind.CALL, NodeCallHead(None, HEAD, 3), b"body"),
    (Kind.BODY, None, b"x" * 1000),
    (Kind.BODY_END, None, b""),
    (Kind.CANCEL, None, b""),
    (Kind.ASK, QueryHead("logs"), msgspec.msgpack.encode(LogQuery("f", "ns", tail=3))),
    (Kind.ROOM, RoomHead(1 << 20), b""),
    (Kind.ANSWER, NodeAnswerHead(AnswerHead(200, []), 0.5, (("room", 0.25),), GRANT), b"answer"),
    (Kind.REFUSED, ErrorHead("GrantRefused", "no"), b""),
    (Kind.ERROR, ErrorHead("Overloaded", "full", 2.5), b""),
    (Kind.REPLY, None, b"\xc0"),
]


@given(st.lists(st.integers(1, 400), min_size=1))
def test_frames_arrive_as_they_were_said_however_the_network_cuts_them(sizes: list[int]) -> None:
    data = b"".join(encode_frame(*each) for each in SAID)
    reader, found, at, turn = FrameReader(), [], 0, 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        found += reader.feed(data[at : at + size])
        at, turn = at + size, turn + 1

    heads = [
        None if head is None else msgspec.msgpack.decode(header, type=type(head))
        for (_, head, _), (_, header, _) in zip(SAID, found, strict=True)
    ]
    assert [kind for kind, _, _ in found] == [kind for kind, _, _ in SAID]
    assert heads == [head for _, head, _ in SAID]
    assert [body for _, _, body in found] == [body for _, _, body in SAID]


@pytest.mark.parametrize(
    "error", [GrantRefused("no"), Overloaded("full", 2.5), TooLate("late", 3.0, {"soonest_s": 2.0}), NotAdmitted("no")]
)
def test_an_error_arrives_as_it_was_raised(error: GpufaasError) -> None:
    failure, details = ErrorHead(*told(error)), getattr(error, "details", None)
    arrived = make_error(failure.name, failure.message, failure.retry_after_s, details)

    assert (type(arrived), str(arrived)) == (type(error), str(error))
    assert getattr(arrived, "retry_after_s", 0) == getattr(error, "retry_after_s", 0)
    assert getattr(arrived, "details", None) == details
