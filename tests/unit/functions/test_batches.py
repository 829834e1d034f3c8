"""What each call of a batch is answered, whatever `handle_batch` returns or raises."""

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from gpufaas_core.wire.bodies import CHUNK_BYTES
from gpufaas_core.wire.heads import AnswerHead, AnswersHead, BatchHead, CallHead, RoomHead
from gpufaas_core.wire.kinds import Kind
from gpufaas_core.wire.prefix import MAX_SAID, FrameReader, encode_frame
from gpufaas_functions.author import BadBody, Context, Event, HandlerAnswer
from gpufaas_functions.batches import BadBatch, BatchHandler, check
from gpufaas_functions.begun import no_counts
from gpufaas_functions.call_runner import Served
from gpufaas_functions.connection import NodeConnection
from gpufaas_functions.inbox import Shared
from gpufaas_functions.memory import CpuMemory
from gpufaas_functions.reply import together
from gpufaas_functions.slot_threads import OneSlot


def event(body: bytes, content_type: bytes = b"") -> Event:
    return Event("POST", "/", b"", [(b"content-type", content_type)] if content_type else [], body)


def context(call: str = "c") -> Context:
    return Context(call, "f.ns", "cpu")


def run(handler: Callable[..., Any], *calls: bytes | Event) -> list[object]:
    """The body of each answer, or the exception."""
    events = [event(each) if isinstance(each, bytes) else each for each in calls]
    together = handler if isinstance(handler, BatchHandler) else BatchHandler(handler)
    found: dict[int, Any] = {}
    for some in together.run(events, [context() for _ in events]):
        assert not found.keys() & some.keys()
        found |= some
    results = [found[each] for each in range(len(events))]
    return [each.body if isinstance(each, HandlerAnswer) else each for each in results]


class Noted(BatchHandler):
    """Notes the bodies of each batch before it reads them."""

    def __init__(self, read: Callable[[Event], Any]) -> None:
        super().__init__(self._all)
        self.read = read
        self.ran: list[list[bytes]] = []

    def _all(self, events: list[Event], contexts: list[Context]) -> list[Any]:
        assert len(events) == len(contexts)
        self.ran.append([each.body for each in events])
        return [self.read(each) for each in events]


def test_a_call_whose_body_is_no_json_runs_by_itself_and_no_call_runs_twice() -> None:
    handler = Noted(lambda event: event.json() + 1)

    found = run(handler, b"1", b"{", b"2", b"no")

    assert found[::2] == [b"2", b"3"]
    assert all(isinstance(each, BadBody) for each in found[1::2])
    assert handler.ran == [[b"1", b"2"], [b"{"], [b"no"]], "the others first: they do not wait for it"
    assert run(handler, b"3", b"4") == [b"4", b"5"]
    assert handler.ran[-1] == [b"3", b"4"]


def test_bodies_that_a_function_does_not_read_as_json_or_text_run_together() -> None:
    handler, other = (Noted(lambda event: len(event.body)) for _ in range(2))

    assert run(handler, b"\xff", b"\xfe\xff", b"\xff") == [b"1", b"2", b"1"]
    assert handler.ran == [[b"\xff"], [b"\xfe\xff", b"\xff"]], "the first one shows how it reads"
    run(handler, b"\xff", b"\xff")
    assert handler.ran[2:] == [[b"\xff", b"\xff"]]
    other.one(event(b"\xff"), context())
    run(other, b"\xff", b"\xff")
    assert other.ran[1:] == [[b"\xff", b"\xff"]], "a call that ran alone has shown it"


def test_a_function_may_read_bodies_of_each_media_type_in_its_own_way() -> None:
    handler = Noted(lambda event: "image" if "image" in event.headers["content-type"] else event.json())
    image, other, bad = event(b"\xff", b"image/jpeg"), event(b"\xfe", b"image/jpeg;q=1"), event(b"{", b"text/plain")
    run(handler, image, event(b"1", b"text/plain"))
    handler.ran.clear()

    found = run(handler, bad, image, event(b"1", b"text/plain"), other)

    assert found[1:] == [b"image", b"1", b"image"]
    assert isinstance(found[0], BadBody)
    assert handler.ran == [[b"\xff", b"1", b"\xfe"], [b"{"]]


def test_a_function_that_takes_a_bad_body_itself_gets_it() -> None:
    def lenient(event: Event) -> Any:
        try:
            return event.json()
        except ValueError:
            return f"raw {len(event.body)}"

    assert run(Noted(lenient), b"1", b"{{", b"{") == [b"1", b"raw 2", b"raw 1"]


def test_what_was_read_ahead_is_what_the_handler_would_have_read() -> None:
    handler = Noted(lambda event: [event.text, event.json(), event.text, event.json(), event.json() is event.json()])

    found = run(handler, b"[1]", event(b'["\xe9"]', b"application/json; charset=latin-1"))

    assert found == [b'["[1]",[1],"[1]",[1],false]', '["[\\"é\\"]",["é"],"[\\"é\\"]",["é"],false]'.encode()]


def test_a_batch_that_meets_a_bad_body_in_its_middle_does_not_run_again() -> None:
    handler = Noted(lambda event: event.text)
    run(handler, b"", b"")
    handler.ran.clear()
    handler.read = lambda event: event.json()

    found = run(handler, b"1", b"{", b"2")

    assert isinstance(found[1], BadBody)
    assert all("may have run in part" in str(each) for each in found[::2])
    assert handler.ran == [[b"1", b"{", b"2"]]
    run(handler, b"1", b"{", b"2")
    assert handler.ran[-2:] == [[b"1", b"2"], [b"{"]], "it is known now"
    run(handler, b"1", event(b"{", b"text/other"), b"2")
    assert handler.ran[-2:] == [[b"1", b"2"], [b"{"]], "of any type"


def test_a_function_that_parses_its_bodies_itself_does_not_have_them_parsed_twice_for_long() -> None:
    handler = Noted(lambda event: event.body)

    for _ in range(5):
        run(handler, *[b"[1]"] * 4)
    late = event(b"[1]")
    run(handler, late, b"[1]")

    assert late._ahead == {}


def test_callers_cannot_fill_the_memory_of_a_worker_with_media_types() -> None:
    handler = Noted(lambda event: event.body)
    for number in range(1000):
        run(handler, event(b"", b"a/%d" % number))

    assert len(handler._reads) <= 65


def test_a_body_for_which_there_is_no_room_fails_its_call_alone() -> None:
    class Full(Event):
        @property
        def body(self) -> bytes:
            raise MemoryError("for the body")

    found = run(lambda events, _: [each.text for each in events], Full("POST", "/", b"", [], None), b"1")

    assert (type(found[0]), found[1]) == (MemoryError, b"1")


def test_a_caller_who_leaves_while_a_body_streams_ends_a_call_by_itself() -> None:
    class Gone(Exception): ...

    def stream() -> Iterator[bytes]:
        yield b"["
        raise Gone

    with pytest.raises(Gone):
        BatchHandler(lambda events, _: [each.json() for each in events]).one(
            Event("POST", "/", b"", [], None, stream), context()
        )


def test_a_bad_body_of_no_call_is_an_error_of_all() -> None:
    def strange(events: list[Event], contexts: list[Context]) -> list[int]:  # noqa: ARG001
        raise BadBody("of what?")

    assert all("(of what?)" in str(each) for each in run(strange, b"1", b"2"))


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
    for each in run(lambda *_: returned, b"1", b"2"):
        with pytest.raises(BadBatch, match=says):
            raise each  # type: ignore[misc]


def test_a_tuple_will_do_and_answers_are_those_of_handle() -> None:
    together = BatchHandler(lambda *_: ({"statusCode": 201, "body": b"x", "headers": {"X-A": "b"}}, "text", None))
    (found,) = together.run([event(b"1") for _ in range(3)], [context()] * 3)

    assert [(each.status, each.body) for each in found.values() if isinstance(each, HandlerAnswer)] == [
        (201, b"x"), (200, b"text"), (200, b""),
    ]  # fmt: skip


def test_a_call_by_itself_is_a_batch_of_one() -> None:
    def echo(events: list[Event], contexts: list[Context]) -> list[object]:
        return [
            KeyError("it") if each.body == b"fail" else (each.text, of.call_id)
            for each, of in zip(events, contexts, strict=True)
        ]

    handle = BatchHandler(echo).one

    assert handle(event(b"x"), context("c7")).body == b'["x","c7"]'
    with pytest.raises(KeyError, match="it"):
        handle(event(b"fail"), context())
    with pytest.raises(RuntimeError, match="a KeyboardInterrupt in place of an answer"):
        BatchHandler(lambda *_: [KeyboardInterrupt()]).one(event(b""), context())  # as such it would end the worker
    with pytest.raises(BadBatch):
        BatchHandler(lambda *_: []).one(event(b""), context())
    for stream in (iter("ab"), {"body": iter("ab")}):
        with pytest.raises(TypeError, match="cannot stream"):
            BatchHandler(lambda *_, stream=stream: [stream]).one(event(b""), context())


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
    handler = BatchHandler(lambda events, _: [each.body * 3 for each in events])
    served, counts = Served("f.ns", "cpu", lambda *_: None, CpuMemory(), handler), no_counts(1)
    serving = threading.Thread(target=OneSlot(served, NodeConnection(theirs), Shared(counts)).serve, daemon=True)
    large, small = b"\xff" * CHUNK_BYTES, b"\xff"  # the first runs by itself, before the second
    sending = threading.Thread(target=ours.sendall, args=(batch_of(large, small) + batch_of(b"c"),))
    serving.start()
    sending.start()
    reader, said = FrameReader(), []
    while len([kind for kind, _ in said if kind == Kind.ANSWERS]) < 2:
        came = [(kind, body) for kind, _, body in reader.feed(ours.recv(1 << 20))]
        if room := sum(len(body) for kind, body in came if kind == Kind.CHUNK):
            sending.join()
            ours.sendall(encode_frame(Kind.ROOM, RoomHead(room)))
        said += came
    ours.close()
    serving.join(10)

    assert not serving.is_alive()
    assert [kind for kind, _ in said if kind != Kind.MEASURED] == [
        Kind.ANSWERS, Kind.HEAD, Kind.CHUNK, Kind.CHUNK, Kind.CHUNK, Kind.END, Kind.ANSWERS,
    ]  # fmt: skip
    assert sum(len(body) for kind, body in said if kind == Kind.CHUNK) == 3 * CHUNK_BYTES
    assert said[-1][1] == b"ccc" or said[-2][1] == b"ccc"
    assert counts.begun == [2]


def test_answers_with_many_short_headers_go_in_frames_that_a_node_takes() -> None:
    head = AnswerHead(200, [(b"a", b"b")] * 1000)
    frames = [encode_frame(Kind.ANSWERS, *each) for each in together((place, head, b"c") for place in range(400))]

    heads = [msgspec.msgpack.decode(header, type=AnswersHead) for _, header, _ in FrameReader(
        CHUNK_BYTES, 1, MAX_SAID
    ).feed(b"".join(frames))]  # fmt: skip

    assert [place for each in heads for place, _, _ in each.answers] == list(range(400))
