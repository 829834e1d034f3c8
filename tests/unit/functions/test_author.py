"""The author's API: what handlers get, and what they may return."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples

from gpufaas_functions.author import BadBody, Event, HandlerAnswer, to_answer


def plain(answer: HandlerAnswer) -> tuple[int, dict[str, str], bytes]:
    body = answer.body if answer.body is not None else b"|".join(answer.chunks or ())
    return answer.status, {name.decode(): value.decode() for name, value in answer.headers}, body


@pytest.mark.parametrize(
    ("value", "content_type", "body"),
    [
        ("text", "text/plain; charset=utf-8", b"text"),
        (b"\x00\x01", "application/octet-stream", b"\x00\x01"),
        ({"a": 1}, "application/json", b'{"a":1}'),
        ([1, 2.5, None], "application/json", b"[1,2.5,null]"),
        ({"array": np.arange(3)}, "application/json", b'{"array":[0,1,2]}'),
        ({"headers": 1, "other": 2}, "application/json", b'{"headers":1,"other":2}'),
        (7, "application/json", b"7"),
        ((str(n) for n in range(3)), "text/plain; charset=utf-8", b"0|1|2"),
        (({"n": n} for n in range(2)), "text/plain; charset=utf-8", b'{"n":0}|{"n":1}'),
    ],
)
def test_what_is_returned_is_sent(value: Any, content_type: str, body: bytes) -> None:
    assert plain(to_answer(value)) == (200, {"content-type": content_type}, body)


def test_none_is_an_empty_answer() -> None:
    assert plain(to_answer(None)) == (200, {}, b"")


def test_status_and_headers_as_in_openfaas() -> None:
    answer = to_answer({"statusCode": 201, "body": {"id": 7}, "headers": {"Location": "/7", "X-Twice": ["a", "b"]}})

    assert answer.status == 201
    assert answer.headers == [
        (b"location", b"/7"), (b"x-twice", b"a"), (b"x-twice", b"b"), (b"content-type", b"application/json")
    ]  # fmt: skip
    assert answer.body == b'{"id":7}'


def test_a_body_may_be_a_generator_with_headers() -> None:
    answer = to_answer({"headers": {"Content-Type": "text/event-stream"}, "body": iter(["data: 1\n\n"])})

    assert plain(answer) == (200, {"content-type": "text/event-stream"}, b"data: 1\n\n")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (object(), "returned a object that is not JSON-able"),
        ({"statusCode": "many"}, "statusCode is 'many'"),
        ({"statusCode": 42}, "statusCode is 42"),
        ({"body": "", "headers": {"X": "a\r\nY: b"}}, "is no header: its name or value"),
        ({"body": "", "headers": {"X": "x" * 5_000_000}}, "headers of 5 MiB: an answer may have 64 KiB"),
        ({"statusCode": 401, "header": {}}, r"'header' \(did you mean 'headers'\?\)"),
        ({"statusCode": 200, "message": "hi"}, "statusCode and 'message', but an answer has"),
    ],
)
def test_what_cannot_be_sent_is_explained(value: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        to_answer(value)


def test_an_event_reads_as_in_openfaas() -> None:
    event = Event("POST", "/a%20b/c", b"x=1&x=2&y=", [(b"content-type", b"text/plain"), (b"x-a", b"1")], b'{"k": [1]}')

    assert (event.method, event.path, event.raw_path) == ("POST", "/a b/c", "/a%20b/c")
    assert (event.query["x"], event.query.getlist("x"), event.query.get("z")) == ("1", ["1", "2"], None)
    assert (event.headers["Content-Type"], event.headers.get("X-A"), "nope" in event.headers) == (
        "text/plain",
        "1",
        False,
    )
    with pytest.raises(ValueError, match="the body is no JSON"):
        Event("POST", "/", b"", [], b"{no json").json()
    assert (event.body, event.text, event.json()) == (b'{"k": [1]}', '{"k": [1]}', {"k": [1]})


def sent(body: bytes, content_type: bytes = b"") -> Event:
    return Event("POST", "/", b"", [(b"content-type", content_type)] if content_type else [], body)


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        ('["café"]'.encode(), b""),
        ('["café"]'.encode(), b"application/x-www-form-urlencoded"),
        ('\ufeff["café"]'.encode(), b"text/plain; charset=UTF-8"),
        (b'["caf\xe9"]', b'text/plain; format=flowed; Charset="ISO-8859-1"'),
        (b'["caf\xe9"]', b"application/json;charset=windows-1252"),
        ('["café"]'.encode("utf-16"), b"application/json; charset=utf-16"),
        ('\ufeff["café"]'.encode("utf-16-le"), b"text/plain; charset='utf-16le'"),
    ],
)
def test_a_text_is_read_in_the_charset_that_its_caller_names(body: bytes, content_type: bytes) -> None:
    assert sent(body, content_type).text == '["café"]'
    assert sent(body, content_type).json() == ["café"]


def test_json_whose_bytes_could_be_ascii_is_read_in_its_charset_where_that_matters() -> None:
    assert sent('["a"]'.encode("utf-16-le"), b"application/json; charset=utf-16le").json() == ["a"]
    assert sent(b'["a"]', b"application/json; charset=klingon").json() == ["a"]


@pytest.mark.parametrize(
    ("body", "content_type", "status"),
    [
        (b"caf\xe9", b"", 400),
        (b"caf\xe9", b"text/plain; charset=utf-8", 400),
        (b"\xff", b"text/plain; charset=ascii", 400),
        (b"odd", b"text/plain; charset=utf-16", 400),
        (b"", b"text/plain; charset=klingon", 415),
        (b"", b"text/plain; charset=base64", 415),
        (b"", b"text/plain; charset=idna", 415),
        (b"", b"text/plain; charset=utf-7", 415),
        (b"", b"text/plain; charset=\x00\xff", 415),
        (b"", b"text/plain; charset=" + b"x" * 5000, 415),
    ],
)
def test_a_body_that_is_no_text_is_the_callers_fault(body: bytes, content_type: bytes, status: int) -> None:
    event = sent(body, content_type)

    for read in (lambda: event.text, event.json):
        with pytest.raises(BadBody) as raised:
            read()
        assert (raised.value.status, raised.value.event) == (status, event)


@pytest.mark.parametrize(
    "body",
    [b'{"text":"caf\xe9"}', b'"\xed\xa0\x80"', b'"\\ud800"', b"", b"\x00", b"1" * 5000, b"1e999999", b"[" * 100_000],
)
def test_a_body_that_is_no_json_is_the_callers_fault(body: bytes) -> None:
    event = sent(body, b"application/json")

    with pytest.raises(BadBody, match="the body is no JSON") as raised:
        event.json()
    assert (raised.value.status, raised.value.event) == (400, event)


@pytest.mark.property
@given(
    query=st.binary(),
    path=st.binary(),
    headers=st.lists(st.tuples(st.from_regex(rb"[!-~]+", fullmatch=True), st.binary())),
)
@examples(100)
def test_no_query_path_or_header_makes_an_event_raise(
    query: bytes, path: bytes, headers: list[tuple[bytes, bytes]]
) -> None:
    event = Event("POST", path.decode("latin-1"), query, headers, b"")

    assert isinstance(event.path, str)
    assert isinstance(event.query.getlist("a"), list)
    assert dict(event.headers) is not None


def test_a_streamed_body_is_taken_once_piece_by_piece_or_whole() -> None:
    whole = Event("POST", "/", b"", [], None, lambda: iter([b"a", b"b"]))
    pieces = Event("POST", "/", b"", [], None, lambda: iter([b"a", b"b"]))

    assert (whole.body, whole.body) == (b"ab", b"ab")
    assert (list(pieces.stream()), pieces.body) == ([b"a", b"b"], b"")
