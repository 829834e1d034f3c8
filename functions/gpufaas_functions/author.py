"""
The API of a function's author: the event, the context, and what a handler may return.

Model functions (``python3-torch``) define ``load(device) -> model`` and ``handle(model, event, context)``, or
``handle_batch(model, events, contexts)`` for several calls at once (`batches`); CPU functions (``python3-http``) define
``handle(event, context)``, as OpenFaaS's template of that name. An answer is

* ``str``, ``bytes`` or None (an empty body), sent as they are;
* a dict or list, sent as JSON;
* ``{"statusCode": 200, "body": ..., "headers": {...}}``, each of the three optional; the body is one of all these;
* ``body, status`` or ``body, status, headers``, as in Flask (`keyed`);
* a generator (anything with ``__next__``), which streams: each str, bytes or JSON-able value is sent at once.

``handle`` may be ``async def`` (`coroutines`); it streams with an async generator.
"""

import difflib
import json
import os
import re
import socket
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from encodings import normalize_encoding
from encodings.aliases import aliases
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, unquote

import msgspec

from gpufaas_core.plausible import HEADER_NAME, NOT_IN_VALUE, why_no_answer
from gpufaas_core.units import Bytes, MiB, format_bytes
from gpufaas_core.wire.prefix import MAX_SAID

if TYPE_CHECKING:
    from gpufaas_functions.areas import Area  # containers of other programs have no areas
    from gpufaas_functions.body_file import BodyFile

_PIECE: Final = 256 * 1024
_FRAMING: Final = 16
"""More bytes than a header takes in a frame beside its name and value."""
_SHORT: Final = 256
"""Characters of a header's value: those of longer ones are not kept."""
_TEXT: Final = b"text/plain; charset=utf-8"
_JSON: Final = b"application/json"
_BINARY: Final = b"application/octet-stream"
_CONTENT_TYPE: Final = b"content-type"
_CHARSET: Final = re.compile(rb";\s*charset\s*=\s*[\"']?([^\s;\"']+)", re.IGNORECASE)
JSON: Final = 1
TEXT: Final = 2
"""Ways to read a body, beside its bytes."""
_UTF_8: Final = "utf_8"
_WINDOWS: Final = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # zlib's names of the Content-Encodings
MOST_PLAIN: Final[Bytes] = 32 * MiB
"""The most that a compressed body may have when it is unpacked: its caller may have sent a thousandth of that."""
_MARK: Final = "\ufeff"
"""The byte order mark, which some programs write before a text: it is no part of that."""
_ENCODINGS: Final = {each for each in aliases.values() if not each.endswith("_codec")} - {"mbcs", "rot_13", "utf_7"}
"""Encodings of texts that a caller may name. No others are looked up: Python keeps each name that was, and some that
are for no body (``idna``) take the square of its length."""


class Headers(Mapping[str, str]):
    """The caller's headers, read without regard to case; the last value of a repeated one (`get_all` has every)."""

    __slots__ = ("_raw",)

    def __init__(self, raw: list[tuple[bytes, bytes]]) -> None:
        self._raw = raw

    def __getitem__(self, name: str) -> str:
        wanted = name.lower().encode("latin-1", "replace")
        for key, value in reversed(self._raw):
            if key.lower() == wanted:
                return value.decode("latin-1")
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(key.decode("latin-1").title() for key, _ in self._raw))

    def __len__(self) -> int:
        return len({key.lower() for key, _ in self._raw})

    def get_all(self, name: str) -> list[str]:
        wanted = name.lower().encode("latin-1", "replace")
        return [value.decode("latin-1") for key, value in self._raw if key.lower() == wanted]

    def __repr__(self) -> str:
        return f"Headers({dict(self)!r})"


class Query(dict[str, str]):
    """The query's parameters, the first value of each; `getlist` has every value, as in Flask."""

    def __init__(self, raw: bytes) -> None:
        self._all = parse_qs(raw.decode("latin-1"), keep_blank_values=True)
        super().__init__((name, values[0]) for name, values in self._all.items())

    def getlist(self, name: str) -> list[str]:
        return self._all.get(name, [])


class BadBody(msgspec.DecodeError):
    """The body of *event* is not what the handler asked for. A ValueError; it is the caller's fault."""

    def __init__(self, text: str, event: "Event | None" = None, status: int = 400) -> None:
        """:param status: what the caller is answered if the handler lets it pass"""
        super().__init__(text)
        self.event, self.status = event, status


class Event:
    """One call. Reading `body` reads all of it; `stream` gives a body that streams piece by piece."""

    __slots__ = (
        "_ahead", "_body", "_laid", "_query", "_raw_headers", "_stream", "asked", "method", "raw_path", "unreadable",
    )  # fmt: skip

    def __init__(
        self,
        method: str,
        path: str,
        query: bytes,
        headers: list[tuple[bytes, bytes]],
        body: bytes | None,
        stream: Callable[[], Iterator[bytes]] | None = None,
        laid: "Area | BodyFile | None" = None,
    ) -> None:
        self.method = method
        self.raw_path = path
        self._query = query
        self._raw_headers = headers
        self._body = body
        self._stream = stream
        self._laid = laid
        """Where a large body lies: in memory shared with the node, or a file. None: it is in memory, or streams."""
        self._ahead: dict[int, Any] | None = None
        """What was read ahead and not asked for yet, by its reading."""
        self.asked = self.unreadable = 0
        """The readings (`JSON`, `TEXT`) that the handler has asked for; that were tried before, and failed."""

    @property
    def body(self) -> bytes:
        """The whole body."""
        if self._body is None and self._laid is not None:
            self._body = self._read(0, len(self._laid))
        elif self._body is None:
            self._body = b"".join(self.stream())
        return self._body

    def stream(self) -> Iterator[bytes]:
        """Yield the body in pieces as they come, without keeping them. Only once; `body` is empty afterwards."""
        if self._body is not None:
            yield self._body
            return
        if self._laid is not None:
            for at in range(0, len(self._laid), _PIECE):
                yield self._read(at, _PIECE)
            return
        source, self._stream = self._stream, None
        if source is None:
            raise RuntimeError("the body was already read: use event.body, or event.stream() once")
        yield from source()
        if self._body is None:
            self._body = b""

    def _read(self, at: int, size: int) -> bytes:
        """:raises BadBody: its call has ended"""
        assert self._laid is not None
        try:
            return self._laid.read(at, size)
        except FileNotFoundError:
            raise BadBody("the body is gone: its call has ended", self) from None

    @property
    def headers(self) -> Headers:
        return Headers(self._raw_headers)

    @property
    def path(self) -> str:
        """The path after the function's name, percent-decoded; ``/`` when there is none."""
        return unquote(self.raw_path)

    @property
    def query(self) -> Query:
        return Query(self._query)

    @property
    def text(self) -> str:
        """
        The body as text: in the charset of its Content-Type, else in UTF-8.

        :raises BadBody: it is no such text (400), or its charset is not known (415)
        """
        self.asked |= TEXT
        found: str | None = self._ahead.pop(TEXT, None) if self._ahead else None
        return self._text() if found is None else found

    def _text(self) -> str:
        body, encoding = self._plain()
        try:
            return body.decode(encoding).removeprefix(_MARK)
        except UnicodeError as exc:
            raise BadBody(f"the body is no text: {exc}", self) from None

    def json(self) -> Any:
        """:raises BadBody: the body is not JSON; if the handler lets it pass, its caller is answered 400"""
        self.asked |= JSON
        found = self._ahead.pop(JSON, None) if self._ahead else None
        return self._json() if found is None else found

    def read_ahead(self, readings: int) -> bool:
        """Read the body before the handler does. Return whether it can be read in all of these ways."""
        ahead = self._ahead = {} if self._ahead is None else self._ahead
        for reading in (JSON, TEXT):
            if readings & reading and not self.unreadable & reading and reading not in ahead:
                try:
                    ahead[reading] = self._json() if reading == JSON else self._text()
                except (BadBody, OSError, MemoryError):
                    self.unreadable |= reading
        return not readings & self.unreadable

    def _json(self) -> Any:
        body = self.body
        try:
            if body.isascii() or _encoding_in(self.content_type) == _UTF_8:  # to look for a charset costs 0.5 us
                return msgspec.json.decode(body)
        except (ValueError, RecursionError):
            pass  # UTF-16, or compressed, say
        body, encoding = self._plain()
        try:
            text = body.decode(json.detect_encoding(body) if encoding == _UTF_8 else encoding)
            return msgspec.json.decode(text.removeprefix(_MARK))
        except (ValueError, RecursionError) as exc:
            kind = self.content_type.decode("latin-1") or "not given"
            raise BadBody(f"the body is not JSON: {exc} (its Content-Type is {kind:.80})", self) from None

    def _plain(self) -> tuple[bytes, str]:
        """Return the body, unpacked, and Python's name of its charset. :raises BadBody: one of them is not known"""
        body, kind = self.body, self.content_type
        if not (encoding := _encoding_in(kind)):
            raise BadBody(f"the charset in {str(kind)[1:]:.80} is not known: send the body in UTF-8", self, 415)
        given = self._given(b"content-encoding")
        if not given or (coding := given.decode("latin-1").strip().lower()) == "identity":
            return body, encoding
        if (window := _WINDOWS.get(coding)) is None:
            raise BadBody(f"the Content-Encoding {coding!r:.80} is not known: send gzip, deflate or none", self, 415)
        unpacker = zlib.decompressobj(window)
        try:
            if len(plain := unpacker.decompress(body, MOST_PLAIN + 1)) > MOST_PLAIN:
                raise BadBody(f"the body unpacks to over {format_bytes(MOST_PLAIN)}: send it uncompressed", self, 413)
            if not unpacker.eof or unpacker.unused_data:
                raise zlib.error("it ends too early, or goes on behind its end")
        except zlib.error as exc:
            raise BadBody(f"the body is no {coding}: {exc}", self) from None
        return plain, encoding

    def _given(self, wanted: bytes) -> bytes:
        size = len(wanted)  # to compare sizes first takes half the time
        for name, value in self._raw_headers:
            if len(name) == size and name.lower() == wanted:
                return value
        return b""

    @property
    def content_type(self) -> bytes:
        """Of the body, as its caller sent it; empty: it did not say."""
        return self._given(_CONTENT_TYPE)


@lru_cache(64)
def _encoding_in(content_type: bytes) -> str:
    """Return Python's name of the charset, which is UTF-8 if *content_type* names none; empty: it is not known."""
    if (found := _CHARSET.search(content_type)) is None:
        return _UTF_8
    name = normalize_encoding(found[1].decode("latin-1")).lower()
    name = aliases.get(name, name)
    return name if name in _ENCODINGS else ""


class Context(msgspec.Struct, eq=False):
    """The place where a call runs."""

    call_id: str
    function: str
    device: str

    @property
    def hostname(self) -> str:
        return os.environ.get("HOSTNAME") or socket.gethostname()


class HandlerAnswer(msgspec.Struct, eq=False):
    """What a handler returned, ready to be sent: `body` is whole, or None if `chunks` yields it."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes | None
    chunks: Iterator[bytes] | None
    failed: bool = False
    """The handler raised, and the answer shows its exception."""
    out_of_memory: bool = False


_BODIES: Final = (str, bytes, dict, type(None), Iterator, AsyncIterator)  # a number with a number is rather data
_ANSWER_KEYS: Final = frozenset(("statusCode", "body", "headers"))


def to_answer(value: Any) -> HandlerAnswer:
    """
    Return *value*, which a handler returned, as an answer.

    :raises TypeError: it cannot be sent; says what it was and what a handler may return
    """
    status, headers = 200, []
    value = keyed(value) if type(value) is tuple else value
    if isinstance(value, dict) and ("statusCode" in value or "body" in value):
        unknown = value.keys() - _ANSWER_KEYS
        if unknown and "statusCode" in value:
            raise TypeError(_not_of_an_answer(unknown))
        if not unknown:
            if "statusCode" in value:
                status = _status(value["statusCode"])
            if given := value.get("headers"):
                headers = _headers(given)
            value = value.get("body")
    if isinstance(value, (bytes, bytearray, memoryview)):
        return HandlerAnswer(status, _typed(headers, _BINARY), bytes(value), None)
    if isinstance(value, str):
        return HandlerAnswer(status, _typed(headers, _TEXT), value.encode("utf-8", "backslashreplace"), None)
    if value is None:
        return HandlerAnswer(status, headers, b"", None)
    if hasattr(value, "__next__"):
        return HandlerAnswer(status, _typed(headers, _TEXT), None, (piece_of(each) for each in value))
    if isinstance(value, HandlerAnswer):
        return value
    return HandlerAnswer(status, _typed(headers, _JSON), _to_json(value), None)


def keyed(value: Any) -> Any:
    """Return *value*; as a dict of these, if it is ``body, status`` or ``body, status, headers``, as Flask takes it."""
    if type(value) is tuple and len(value) in (2, 3) and isinstance(value[1], int) and type(value[1]) is not bool:
        bodies = _BODIES if len(value) == 2 else (*_BODIES, list)
        if isinstance(value[0], bodies) and all(isinstance(each, dict) for each in value[2:]):
            return dict(zip(("body", "statusCode", "headers"), value, strict=False))
    return value


def _not_of_an_answer(unknown: Iterable[object]) -> str:
    key = min(map(str, unknown))[:80]
    near = difflib.get_close_matches(key, _ANSWER_KEYS, n=1, cutoff=0.5)
    return (
        f"the handler returned a dict with statusCode and {key!r}"
        + (f" (did you mean {near[0]!r}?)" if near else "")
        + ", but an answer has statusCode, body and headers only: put what is meant as JSON into body"
    )


def _status(value: Any) -> int:
    try:
        status = int(value)
    except (TypeError, ValueError, OverflowError):
        status = 0
    if not 200 <= status <= 599:
        raise TypeError(f"statusCode is {value!r:.80}: return the HTTP status of an answer, 200 to 599; data as a list")
    return status


def _headers(given: Any) -> list[tuple[bytes, bytes]]:
    try:
        pairs = given.items() if isinstance(given, (dict, Mapping)) else [(name, value) for name, value in given]
    except (TypeError, ValueError):
        raise TypeError(f"headers are {given!r:.80}: return a dict, or a list of pairs") from None
    raw, size = [], 0
    for name, value in pairs:
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if each is None or not isinstance(name, str):
                raise TypeError(f"the header {name!r:.80} is {each!r:.80}: a name is a str, and a value not None")
            text = each.decode("latin-1") if isinstance(each, bytes) else str(each)
            pair = (_known_header if len(text) <= _SHORT else _header)(name, text)
            raw.append(pair)
            size += len(pair[0]) + len(pair[1]) + _FRAMING
    if size + 16 * _FRAMING > MAX_SAID:
        # A head that is too large for a frame would end the worker, and the other calls with it.
        raise TypeError(f"the answer cannot be sent: {why_no_answer(200, raw)}")
    return raw


def _header(name: str, value: str) -> tuple[bytes, bytes]:
    pair = name.encode("latin-1", "replace").lower(), value.encode("latin-1", "replace")
    if not HEADER_NAME.fullmatch(pair[0]) or NOT_IN_VALUE.search(pair[1]) or pair[1].decode("latin-1") != value:
        raise TypeError(f"{name[:80]!r}: {value[:80]!r} is no header: its name or value has characters that none has")
    return pair


_known_header: Final = lru_cache(64)(_header)
"""Nearly all answers of a handler have the same."""


def _typed(headers: list[tuple[bytes, bytes]], content_type: bytes) -> list[tuple[bytes, bytes]]:
    return headers if headers and _CONTENT_TYPE in dict(headers) else [*headers, (_CONTENT_TYPE, content_type)]


def piece_of(value: Any) -> bytes:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    return value.encode("utf-8", "backslashreplace") if isinstance(value, str) else _to_json(value)


def _to_json(value: Any) -> bytes:
    try:
        try:
            return _encode(value)
        except (TypeError, UnicodeError):  # msgspec writes no key as None, and no lone surrogate
            text = json.dumps(msgspec.to_builtins(value, enc_hook=_simplify))
            return json.dumps(json.loads(text, parse_constant=lambda _: None), separators=(",", ":")).encode()
    except Exception as exc:
        if hasattr(value, "__await__") or hasattr(value, "__anext__"):
            raise TypeError(
                f"the handler returned {type(value).__name__}, which only an async handler may: write async def handle"
            ) from None
        loops = isinstance(exc, RecursionError)
        why = "it contains itself, or is nested too deeply" if loops else f"{_culprit(value)}: {str(exc)[:500]}"
        raise TypeError(
            f"the handler returned a {type(value).__name__} that is not JSON-able ({why}): return str, bytes, a dict "
            "or list of plain values, a dict of statusCode, body and headers, or a generator"
        ) from exc  # it may be an error of the device, or a lack of memory


def _culprit(value: Any, place: str = "") -> str:
    """Return the type, and the place in what was returned, of the first part of *value* that has no JSON."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, each in parts:
        try:
            msgspec.to_builtins(each, enc_hook=_simplify)
        except Exception:
            return _culprit(each, f"{place}[{key!r:.80}]")
    return f"{type(value).__name__}{place and ' at '}{place[:200]}"


def _simplify(value: Any) -> Any:
    """Return what *value* says that it is as plain values: tensors and arrays, pydantic's models, paths."""
    for name in ("tolist", "model_dump", "__fspath__"):
        if hasattr(value, name) and type(plain := getattr(value, name)()) is not type(value):
            kind = getattr(getattr(value, "dtype", None), "kind", "")
            if kind in ("m", "M") and any(type(each) is int for each in value.ravel().tolist()):
                raise TypeError(f"{value.dtype} beyond Python's dates and times: .astype(str) makes text of it")
            return plain
    raise TypeError(f"no JSON for {type(value).__name__}")


_encode: Final = msgspec.json.Encoder(enc_hook=_simplify).encode
