"""HTTP/1.1 between a slot and its worker, as bytes: the request of a call, and the parser of answers. No IO."""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import httptools

from gpufaas_core.hop_by_hop import NAMES_NONE
from gpufaas_core.model import Bytes
from gpufaas_core.plausible import MAX_HEADERS
from gpufaas_core.units import KiB, format_bytes
from gpufaas_core.wire.bodies import UPGRADE
from gpufaas_core.wire.heads import CallHead

SWITCHED: Final = 101
_WITHOUT_BODY: Final = frozenset(("GET", "HEAD", "DELETE", "OPTIONS"))
_OURS: Final = frozenset((b"content-length", b"transfer-encoding", b"connection", b"expect"))
"""Request headers that belong to the connection; `Expect` was met by the server that took the body."""
_THEIRS: Final = frozenset((b"content-length", b"transfer-encoding", b"connection", b"keep-alive", b"trailer", b"date"))
"""Answer headers that belong to the connection, and `Date`, which our server sets."""
_MOST_HEAD: Final[Bytes] = 2 * MAX_HEADERS
_MAX_KNOWN: Final[Bytes] = 4 * KiB
_LARGE: Final[Bytes] = 64 * KiB
"""A rest of a body that is larger is not parsed: the parser would only copy it."""


def request_head(head: CallHead, length: int | None) -> bytes:
    """Return the head of the request. :param length: of its body, in bytes; None: it is sent in chunks"""
    lines = [b"%b: %b\r\n" % pair for pair in head.headers if pair[0] not in _OURS]
    if length is None:
        lines.append(b"transfer-encoding: chunked\r\n")
    elif head.body_mode == UPGRADE:
        lines.append(b"connection: Upgrade\r\n")
    elif length or head.method not in _WITHOUT_BODY:
        lines.append(b"content-length: %d\r\n" % length)
    target = head.path.encode("latin-1")
    if head.query:
        target = b"%b?%b" % (target, head.query)
    return b"%b %b HTTP/1.1\r\n%b\r\n" % (head.method.encode(), target, b"".join(lines))


def declared_length(head: CallHead) -> int | None:
    """Return what the caller's Content-Length says; None: there is none."""
    return next((int(value) for name, value in head.headers if name == b"content-length"), None)


def chunk(piece: bytes | memoryview) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), bytes(piece))


class BadHttp(Exception):
    """What came is no answer to the request; says why."""


class _Known(NamedTuple):
    """The head of an answer that came in one piece, and what was read in it. A server mostly repeats it."""

    head: bytes
    size: int
    """Of head and body."""
    status: int
    headers: list[tuple[bytes, bytes]]
    length: int


class AnswerParser:
    """Reads the answers of one connection, one at a time: `expect`, then `feed` until it is `complete`."""

    def __init__(self) -> None:
        self.status = 0
        """0: the head of the answer is not read yet."""
        self.headers: list[tuple[bytes, bytes]] = []
        """Not to be changed. The same list again: the same head came again."""
        self.length = -1
        """Its Content-Length; -1: it has none."""
        self.complete = self.keep = False
        """`keep`: the connection can carry another call."""
        self.pieces: list[bytes] = []
        """What has come of its body, and was not taken."""
        self._parser: Any
        self._feed: Callable[[bytes], None]
        self._bodiless = self._may_switch = self._chunked = self._closes = False
        self._known: _Known | None = None
        self._left: Bytes = 0
        """Of a body that is not parsed, this has not come yet."""
        self._head_bytes: Bytes = 0
        """The bytes of the answer's headers and, before its status, of everything: heads of 1xx count, too."""
        self._renew()

    def _renew(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._feed = self._parser.feed_data

    def expect(self, method: str, may_switch: bool) -> None:
        """A request of *method* goes out: the next message is its answer."""
        if self._bodiless:
            self._renew()  # see `on_headers_complete`
        self._bodiless = method == "HEAD"
        self._may_switch = may_switch
        self.complete = False
        self.status = self._head_bytes = 0

    def feed(self, data: bytes) -> None:
        """:raises BadHttp: see there"""
        known = self._known
        begins = not (self.status or self._head_bytes or self._bodiless or self._may_switch)
        if begins and known is not None and len(data) == known.size and data.startswith(known.head):
            # The parser is between two answers, and would be there again: it need not see the same twice.
            _, _, self.status, self.headers, self.length = known
            self.pieces = [data[len(known.head) :]] if self.length else []
            self.complete = self.keep = True
            return
        self._parse(data)
        if begins and self.complete and self.keep and self.length >= 0:
            self._learn(data)

    def _learn(self, data: bytes) -> None:
        """Keep the head of the answer if it and its body are all of *data*. (The parser takes only CRLF for lines.)"""
        end = data.find(b"\r\n\r\n") + 4
        if end <= _MAX_KNOWN and len(data) == end + self.length == end + sum(map(len, self.pieces)):
            self._known = _Known(data[:end], len(data), self.status, self.headers, self.length)

    def _parse(self, data: bytes) -> None:
        """:raises BadHttp: as `feed`"""
        try:
            self._feed(data)
        except httptools.HttpParserUpgrade as exc:
            if not self._may_switch:
                raise BadHttp("it switched protocols, which was not asked for") from None
            self._switch(data[exc.args[0] :])
        except httptools.HttpParserError as exc:
            if self.complete and self.length >= 0:
                raise BadHttp(f"it sent more than the {self.length} bytes of its Content-Length") from None
            raise BadHttp(f"it sent what is not an HTTP answer: {exc}") from None
        if not self.status and not self.complete:
            self._head_bytes += len(data)
        if self._head_bytes > _MOST_HEAD:
            raise BadHttp(f"its answer's head is over {format_bytes(MAX_HEADERS)}")
        if self.status and self.length > _LARGE and not self.complete and not self._left:
            self._left = self.length - sum(map(len, self.pieces))
            self.keep = self._parser.should_keep_alive()
            self._feed = self._take_body

    def _take_body(self, data: bytes) -> None:
        """Take *data* past the parser, as far as it is of the body."""
        over = len(data) - self._left
        self.pieces.append(data if over <= 0 else data[: self._left])
        self._left = max(0, -over)
        if over >= 0:
            self.complete = True
            self._renew()  # the old one waits for a body that it has not seen
        if over > 0:
            self._feed(data[-over:])

    def feed_end(self) -> bool:
        """The connection was closed in order. Return whether that ends the answer: one without a length."""
        if not self.status or self.length >= 0 or self._chunked:
            return False
        self.complete, self.keep = True, False
        return True

    def take(self) -> bytes:
        """Return what has come of the body since the last time."""
        pieces = self.pieces
        if len(pieces) == 1:
            return pieces.pop()
        self.pieces = []
        return b"".join(pieces)

    def _switch(self, rest: bytes) -> None:
        """The head of a 101 was read: what follows is not HTTP, until the connection ends."""
        self.status = SWITCHED
        self.length, self._chunked = -1, False  # some servers say that a 101 has no body
        self._feed = self.on_body
        if rest:
            self.pieces.append(rest)

    # --- called by httptools ---

    def on_message_begin(self) -> None:
        if self.complete:
            self.keep = False  # more than was asked for: what follows belongs to no call
            return
        self.headers = []
        self.length = -1
        self._chunked = self._closes = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self.complete or self.status:
            return  # a trailer
        name = name.lower()
        if name not in _THEIRS:
            self.headers.append((name, value))
        elif name == b"content-length":
            self.length = int(value)
        elif name == b"transfer-encoding":
            self._chunked = True
        elif name == b"connection":
            self._closes = b"close" in value.lower()
            if value not in NAMES_NONE:
                self.headers.append((name, value))  # the gateway drops it, with what it names

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self.complete or 100 <= status < 200:
            return
        self.status = status
        if self._bodiless:
            # httptools cannot be told that this answer may have a length and no body: a new parser reads the next.
            self.complete = True
            self.keep = self._parser.get_http_version() == "1.1" and not self._closes

    def on_body(self, piece: bytes) -> None:
        if not self.complete:
            self.pieces.append(piece)
        else:
            self.keep = False  # of an answer to HEAD

    def on_message_complete(self) -> None:
        if self.status and not self.complete:
            self.complete = True
            self.keep = self._parser.should_keep_alive()
