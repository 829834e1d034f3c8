"""
A short cut past the parser: a connection mostly sends the same head again, with the same body or another one. What was
read in it is known, then.
"""

import re
from typing import Final

from msgspec import Struct

from gpufaas_core.units import Bytes, KiB
from gpufaas_gateway.call_headers import Header, ReadHead, read_head
from gpufaas_gateway.fronts.target import Target
from gpufaas_gateway.http.exchange import HttpExchange

TRIES: Final = 8
"""A connection that repeats none of so many heads is not likely to repeat one."""
_MAX_KNOWN: Final[Bytes] = 4 * KiB
_MAX_DIGITS: Final = 9
_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)


class KnownHead(Struct, frozen=True):
    """The head of a request for a function that came in one piece, and what was read in it."""

    whole: bytes
    size: Bytes
    """Of the request, with its body."""
    start: bytes
    """Up to the digits of its Content-Length; all of it, if it has none."""
    digits: bytes
    rest: bytes
    target: Target
    method: str
    headers: list[Header]
    read: ReadHead

    def ends_in(self, data: bytes) -> tuple[int, bytes]:
        """
        Return where it ends in *data*, and its Content-Length there, if *data* is such a request, whole and no more.
        Else return -1.
        """
        if len(data) == self.size and data.startswith(self.whole):
            return len(self.whole), self.digits
        if not self.rest or not data.startswith(self.start):
            return -1, b""
        at = len(self.start)
        stops = data.find(b"\r", at, at + _MAX_DIGITS)
        digits, end = data[at:stops], stops + len(self.rest)
        same = stops > at and digits.isdigit() and data.startswith(self.rest, stops) and len(data) == end + int(digits)
        return (end if same else -1), digits

    def with_length(self, digits: bytes, client: tuple[str, int] | None) -> tuple[list[Header], ReadHead]:
        """Return the headers of such a request with this Content-Length, and what is read in them."""
        headers = [(name, digits if name == b"content-length" else value) for name, value in self.headers]
        return headers, read_head(headers, client)


def known_head(call: HttpExchange, data: bytes) -> KnownHead | None:
    """Return the head of *call*, if it and its body are all of *data*. (The parser takes only CRLF to end a line.)"""
    end = data.find(b"\r\n\r\n") + 4
    whole = len(call.body) == len(data) - end and not (call.more_body or call.waiting_for_100_continue)
    if not (3 < end <= _MAX_KNOWN and whole and call.keep_alive):
        return None
    start, digits, rest = (head := data[:end]), b"", b""
    if (declared := _LENGTH.search(head)) is not None:
        digits = declared[1]
        start, rest = head[: declared.start(1)], head[declared.end(1) :]
    return KnownHead(head, len(data), start, digits, rest, call.target, call.method, call.headers, call.read)
