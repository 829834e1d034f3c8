"""What each call of a batch is answered, whatever `handle_batch` returns or raises."""

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from gpufaas_core.frames import (
    CHUNK_BYTES,
    BatchHead,
    CallHead,
    FrameReader,
    Kind,
    RoomHead,
    encode_frame,
)
from gpufaas_functions.author import BadBody, Context, Event, HandlerAnswer
from gpufaas_functions.batch_server import BatchServer
from gpufaas_functions.batches import BadBatch, check, one_by_one, run_batch
from gpufaas_functions.begun import no_counts
from gpufaas_functions.connection import Connection
from gpufaas_functions.memory import CpuMemory
from gpufaas_functions.slot_server import SlotServer
from gpufaas_functions.slot_threads import OneSlot


def event(body: bytes) -> Event:
    return Event("POST", "/", b"", [], body)


def context(call: str = "c") -> Context:
    return Context(call, "f.ns", "cpu")


def run(handle_batch: Callable[..., Any], *bodies: bytes) -> list[object]:
    """The body of each answer, or the exception."""
    found = run_batch(handle_batch, [event(each) for each in bodies], [context() for _ in bodies])
    return [each.body if isinstance(each, HandlerAnswer) else each for each in found]


def test_bodies_that_are_no_json_concern_their_calls_only() -> None:
    sizes = []

    def summed(events: list[Event], contexts: list[Context]) -> list[int]:
        assert len(events) == len(contexts)
        sizes.append(len(events))
        return [each.json() + 1 for each in events]

    found = run(summed, b"1", b"{", b"2", b"no")

    assert found[::2] == [b"2", b"3"]
    assert all(isinstance(each, BadBody) for each in found[1::2])
    assert sizes == [4, 3, 2]


def test_a_caller_who_left_with_a_large_body_takes_no_other_call_along() -> None:
    gone = Event("POST", "/", b"", [], None, file="/nowhere/body")
    events = [event(b"1"), gone, event(b"3")]

    for read in (lambda each: each.body, lambda each: b"".join(each.stream())):
        found = run_batch(lambda events, _, read=read: [read(each) for each in events], events, [context()] * 3)

        assert [each.body for each in found if isinstance(each, HandlerAnswer)] == [b"1", b"3"]
        assert isinstance(found[1], BadBody)


def test_a_bad_body_of_no_call_is_an_error_of_all() -> None:
    def strange(events: list[Event], contexts: list[Context]) -> list[int]:  # noqa: ARG001
        raise BadBody("of what?")

    assert [str(each) for each in run(strange, b"", b"")] == ["of what?"] * 2


def test_an_exit_in_a_batch_fails_its_calls_and_ends_nothing() -> None:
    def exits(events: list[Event], contexts: list[Context]) -> list[int]:  # noqa: ARG001
        raise SystemExit("done")

    assert [type(each) for each in run(exits, b"", b"")] == [SystemExit] * 2


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (None, "returned NoneType, not a list: return one answer for each of its 2 events"),
        ("ab", "returned str, not a list"),
        ({"a": 1, "b": 2}, "returned dict, not a list"),
        (iter("ab"), "returned str_ascii_iterator, not a list"),
        ([], r"returned 0 answers for 2 events: return one for each$"),
        ([1, 2, 3], r"returned 3 answers for 2 events"),
    ],
)
def test_what_is_no_list_of_answers_is_an_error_of_all(returned: object, says: str) -> None:
    for each in run(lambda *_: returned, b"", b""):
        with pytest.raises(BadBatch, match=says):
            raise each  # type: ignore[misc]


def test_a_tuple_will_do_and_answers_are_those_of_handle() -> None:
    found = run_batch(
        lambda *_: ({"statusCode": 201, "body": b"x", "headers": {"X-A": "b"}}, "text", None), [event(b"")] * 3,
        [context()] * 3,
    )  # fmt: skip

    assert [(each.status, each.body) for each in found if isinstance(each, HandlerAnswer)] == [
        (201, b"x"), (200, b"text"), (200, b""),
    ]  # fmt: skip


def test_a_call_by_itself_is_a_batch_of_one() -> None:
    def echo(events: list[Event], contexts: list[Context]) -> list[object]:
        return [
            KeyError("it") if each.body == b"fail" else (each.text, of.call_id)
            for each, of in zip(events, contexts, strict=True)
        ]

    handle = one_by_one(echo)

    assert handle(event(b"x"), context("c7")) == ("x", "c7")
    with pytest.raises(KeyError, match="it"):
        handle(event(b"fail"), context())
    with pytest.raises(RuntimeError, match="a KeyboardInterrupt in place of an answer"):
        one_by_one(lambda *_: [KeyboardInterrupt()])(event(b""), context())  # as such it would end the worker
    with pytest.raises(BadBatch):
        one_by_one(lambda *_: [])(event(b""), context())
    for stream in (iter("ab"), {"body": iter("ab")}):
        with pytest.raises(TypeError, match="cannot stream"):
            one_by_one(lambda *_, stream=stream: [stream])(event(b""), context())


def test_what_cannot_be_a_batch_is_refused() -> None:
    async def coroutine() -> None: ...

    async def stream() -> Any:
        yield 1

    def generator() -> Any:
        yield 1

    for each in (coroutine, stream):
        with pytest.raises(TypeError, match=r"handler.py: handle_batch\(\) is async"):
            check(each, "handler")
    with pytest.raises(TypeError, match="is a generator"):
        check(generator, "handler")
    check(run, "handler")


def batch_of(*bodies: bytes) -> bytes:
    calls = [encode_frame(Kind.CALL, CallHead("c", "POST", "/", b"", []), each) for each in bodies]
    return encode_frame(Kind.BATCH, BatchHead(len(bodies))) + b"".join(calls)


def test_a_batch_that_came_early_waits_until_large_answers_of_the_one_before_are_sent() -> None:
    ours, theirs = socket.socketpair()
    server = SlotServer(0, Connection(theirs), lambda *_: None, "f.ns", "cpu", CpuMemory(), alone=True)
    server.serve_batch = BatchServer(server, lambda events, _: [each.body * 3 for each in events]).serve
    counts = no_counts(1)
    serving = threading.Thread(target=OneSlot(server, counts).serve, daemon=True)
    large, small = b"x" * CHUNK_BYTES, b"ab"
    room = encode_frame(Kind.ROOM, RoomHead(3 * CHUNK_BYTES))
    sending = threading.Thread(target=ours.sendall, args=(batch_of(large, small) + batch_of(b"c") + room,))
    serving.start()
    sending.start()
    reader, said = FrameReader(), []
    while len([kind for kind, _ in said if kind == Kind.ANSWERS]) < 2:
        said += [(kind, body) for kind, _, body in reader.feed(ours.recv(1 << 20))]
    sending.join()
    ours.close()
    serving.join(10)

    assert not serving.is_alive()
    assert [kind for kind, _ in said if kind != Kind.MEASURED] == [
        Kind.ANSWERS, Kind.HEAD, Kind.CHUNK, Kind.CHUNK, Kind.CHUNK, Kind.END, Kind.ANSWERS,
    ]  # fmt: skip
    assert sum(len(body) for kind, body in said if kind == Kind.CHUNK) == 3 * CHUNK_BYTES
    assert said[-1][1] == b"ccc" or said[-2][1] == b"ccc"
    assert counts.begun == [2]
