"""The author's API: what handlers get, and what they may return."""

import gzip
import json
import subprocess
import sys
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples

from gpufaas_functions import author
from gpufaas_functions.author import JSON, TEXT, BadBody, Event, HandlerAnswer, to_answer
from gpufaas_functions.memory import is_out_of_memory


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


@dataclass
class Found:
    label: Any


@pytest.mark.parametrize(
    ("value", "body"),
    [
        ({True: 1, False: 2, None: 3, 1.5: 5}, {"true": 1, "false": 2, "null": 3, "1.5": 5}),
        ({None: {np.int64(2): {np.bool_(True): 1}}}, {"null": {"2": {"true": 1}}}),
        ({"file": "a\udcff.txt", "\ud800": ["é\udcff"]}, {"file": "a\udcff.txt", "\ud800": ["é\udcff"]}),
        ({None: [float("nan"), float("inf"), np.float32("nan")]}, {"null": [None, None, None]}),
        ({None: [b"\xff", {7}, Decimal("1.10"), date(2020, 1, 2)]}, {"null": ["/w==", [7], "1.10", "2020-01-02"]}),
        ([Found({True: Path("a\udcff")}), Found(np.array([{None: 1}]))],
         [{"label": {"true": "a\udcff"}}, {"label": [{"null": 1}]}]),
        (np.array(["2020-01-02", "NaT"], "M8[s]"), ["2020-01-02T00:00:00", None]),
        (torch.tensor([1.5], dtype=torch.bfloat16), [1.5]),
        (torch.zeros(1, requires_grad=True).expand(2), [0.0, 0.0]),
    ],
)  # fmt: skip
def test_json_is_what_json_dumps_makes_of_the_plain_values(value: Any, body: Any) -> None:
    assert json.loads(to_answer(value).body or b"") == body
    assert b"".join(to_answer(iter([value])).chunks or ()) == to_answer(value).body


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"a": [1, {"b": 2j}]}, r"dict that is not JSON-able \(complex at \['a'\]\[1\]\['b'\]: no JSON"),
        ({"a": {(1, 2): 3}}, r"\(dict.*keys must be str, int, float, bool or None, not tuple"),
        ({"a": np.array([1j])}, r"ndarray at \['a'\]: no JSON for complex"),
        ([np.longdouble(1)], r"longdouble at \[0\]: no JSON"),
        ([np.array([5], "m8[ns]")], r"ndarray at \[0\]: timedelta64\[ns\] beyond Python's dates and times"),
        (np.array(["2020-01-02", "20000-01-01"], "M8[D]"), r"ndarray: datetime64\[D\] beyond"),
        ([np.timedelta64(5, "Y")], r"timedelta64 at \[0\]: timedelta64\[Y\] beyond"),
        ({"a": torch.empty(3, device="meta")}, r"Tensor at \['a'\]: .*meta tensor"),
        ({"a": torch.eye(2).to_sparse()}, r"Tensor at \['a'\]: "),
        ({"a": [iter([1])]}, r"list_iterator at \['a'\]\[0\]"),
        (LOOP, "contains itself, or is nested too deeply"),
    ],
)
def test_what_has_no_json_is_named_with_its_type_and_place(value: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        to_answer(value)


def test_what_an_answer_fails_with_beneath_is_kept() -> None:
    class Large:
        def tolist(self) -> list[int]:
            raise MemoryError

    with pytest.raises(TypeError, match=r"Large at \['a'\]") as raised:
        to_answer({"a": Large()})
    assert is_out_of_memory(raised.value)


def test_a_text_without_utf_8_is_escaped() -> None:
    assert to_answer("a\udcff").body == b"a\\udcff"
    assert b"".join(to_answer(iter(["a\udcff"])).chunks or ()) == b"a\\udcff"


def test_a_body_with_a_status_is_an_answer_as_in_flask() -> None:
    answer = to_answer(({"id": 7}, 201, {"Location": "/7"}))

    assert (answer.status, answer.body) == (201, b'{"id":7}')
    assert answer.headers == [(b"location", b"/7"), (b"content-type", b"application/json")]
    assert plain(to_answer(("gone", HTTPStatus.GONE)))[::2] == (410, b"gone")
    assert plain(to_answer((iter(["a", "b"]), 202)))[::2] == (202, b"a|b")
    assert plain(to_answer(([1], 201, {})))[::2] == (201, b"[1]")
    assert plain(to_answer((None, 204)))[::2] == (204, b"")
    assert plain(to_answer(OrderedDict(statusCode=201, body="x")))[::2] == (201, b"x")


@pytest.mark.parametrize(
    "value",
    [
        (1, 2),
        (0.5, 200),
        ([1], 200),
        ("a", 7.5),
        ("a", True),
        ("a", "b"),
        ("a", 200, 1),
        ({}, {}),
        (1, 200, {}),
        ("a",),
    ],
    ids=repr,
)
def test_other_tuples_are_data(value: Any) -> None:
    assert plain(to_answer(value))[::2] == (200, json.dumps(value, separators=(",", ":")).encode())


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
        (("cat", 7), "statusCode is 7: return the HTTP status of an answer, 200 to 599; data as a list"),
        ({"body": "", "headers": {"X": "a\r\nY: b"}}, "is no header: its name or value"),
        ({"body": "", "headers": {"X-Name": "5 €"}}, "'X-Name': '5 €' is no header: its name or value"),
        ({"body": "", "headers": {"X-Ñ": "1"}}, "'X-Ñ': '1' is no header"),
        ({"body": "", "headers": {"X-Name": None}}, "the header 'X-Name' is None"),
        ({"body": "", "headers": "X: 1"}, "headers are 'X: 1': return a dict"),
        ({"body": "", "headers": {7: "x"}}, "the header 7 is 'x': a name is a str"),
        ({"body": "", "headers": {"X": "x" * 5_000_000}}, "headers of 5 MiB: an answer may have 64 KiB"),
        ({"statusCode": 401, "header": {}}, r"'header' \(did you mean 'headers'\?\)"),
        ({"statusCode": 200, "x" * 5_000_000: "hi"}, "statusCode and 'x{80}', but"),
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
    assert (event.headers.get("X-€"), event.headers.get_all("X-€")) == (None, [])
    with pytest.raises(ValueError, match="the body is not JSON"):
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


MOST_PLAIN = 4096
PACKED = {
    b"gzip": gzip.compress(b'["caf\xc3\xa9"]'),
    b" X-GZIP": gzip.compress(b'["caf\xc3\xa9"]'),
    b"Deflate": zlib.compress(b'["caf\xc3\xa9"]'),
    b"identity": b'["caf\xc3\xa9"]',
}


def test_a_body_that_nests_deeply_does_not_overflow_the_stack_of_a_small_thread() -> None:
    """From Python 3.13 on, C code may nest 10,000 deep: 2 MiB of stack were too few, and the worker ended."""
    code = """if True:
        import threading
        from gpufaas_functions.author import BadBody, Event
        from gpufaas_functions.memory import use_small_stacks

        def parse():
            for depth in (900, 5000, 9900, 100_000):
                try:
                    Event("POST", "/", b"", [], b"[" * depth).json()
                except BadBody as exc:
                    print(exc)

        use_small_stacks()
        thread = threading.Thread(target=parse)
        thread.start()
        thread.join()"""

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert len(found.stdout.splitlines()) == 4, found.stdout


@pytest.mark.parametrize("coding", PACKED)
def test_a_compressed_body_is_unpacked_where_it_is_read_as_json_or_text(coding: bytes) -> None:
    event = Event("POST", "/", b"", [(b"Content-Encoding", coding)], PACKED[coding])

    assert (event.json(), event.text) == (["café"], '["café"]')
    assert event.body == PACKED[coding]


@pytest.mark.parametrize(
    ("body", "coding", "status", "says"),
    [
        (b'["\xff"]', b"gzip", 400, "the body is no gzip: "),
        (PACKED[b"gzip"][:-9], b"gzip", 400, "it ends too early"),
        (PACKED[b"Deflate"][:-1], b"deflate", 400, "it ends too early"),
        (PACKED[b"gzip"] * 2, b"gzip", 400, "goes on behind its end"),
        (gzip.compress(b"\xff"), b"gzip", 400, "can't decode byte 0xff"),
        (PACKED[b"gzip"], b"br", 415, "the Content-Encoding 'br' is not known"),
        (PACKED[b"gzip"], b"gzip, gzip", 415, "the Content-Encoding 'gzip, gzip' is not known"),
        (gzip.compress(b" " * MOST_PLAIN + b"1"), b"gzip", 413, "unpacks to over 4 KiB: send it uncompressed"),
        (zlib.compress(b" " * MOST_PLAIN + b"1"), b"deflate", 413, "unpacks to over 4 KiB: send it uncompressed"),
    ],
    ids=["plain", "cut", "cut-zlib", "two", "no-text", "br", "twice", "bomb", "bomb-zlib"],
)
def test_a_body_that_cannot_be_unpacked_is_the_callers_fault(
    body: bytes, coding: bytes, status: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(author, "MOST_PLAIN", MOST_PLAIN)
    event = Event("POST", "/", b"", [(b"content-encoding", coding)], body)

    for read in (event.json, lambda: event.text):
        with pytest.raises(BadBody, match=says) as raised:
            read()
        assert raised.value.status == status
    assert not event.read_ahead(JSON | TEXT)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_json_in_another_utf_is_read_though_its_caller_does_not_say_so(encoding: str) -> None:
    assert sent('["a", "é"]'.encode(encoding), b"application/json").json() == ["a", "é"]


def test_who_asks_for_json_is_told_what_kind_of_body_came() -> None:
    with pytest.raises(BadBody, match="its Content-Type is multipart/form-data; boundary=x"):
        sent(b"--x\r\n", b"multipart/form-data; boundary=x").json()


@pytest.mark.parametrize(
    "body",
    [b'{"text":"caf\xe9"}', b'"\xed\xa0\x80"', b'"\\ud800"', b"", b"\x00", b"1" * 5000, b"1e999999", b"[" * 100_000],
)
def test_a_body_that_is_no_json_is_the_callers_fault(body: bytes) -> None:
    event = sent(body, b"application/json")

    with pytest.raises(BadBody, match="the body is not JSON") as raised:
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
