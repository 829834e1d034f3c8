"""Heads of requests, as bytes and as pairs: which are refused, and which the parser is given again in another form."""

from typing import Final
from urllib.parse import quote_from_bytes

from gpufaas_core.units import Bytes
from gpufaas_gateway.call_headers import Header

MAX_TARGET: Final[Bytes] = 65_535
"""Path and query; what the parser of URLs can count."""
MAX_HEADERS: Final = 1000
_OF_UPGRADES: Final = (b"upgrade", b"http2-settings")
"""Headers that offer another protocol, also as options of Connection."""


def why_not_taken(headers: list[Header], version: str, target: int) -> tuple[int, str, str] | None:
    """Return status, phrase and reason of the refusal of a head; None: it is accepted."""
    names = [name for name, _ in headers]
    hosts = names.count(b"host")
    if hosts > 1 or (not hosts and version == "1.1"):
        reason = "there are two Host headers" if hosts else "the Host header is missing"
        return 400, "Bad Request", reason  # RFC 9112 §3.2
    coded = b"transfer-encoding"
    if coded in names and [value.lower() for name, value in headers if name == coded] != [b"chunked"]:
        return 501, "Not Implemented", "of the transfer codings, chunked alone is taken"  # RFC 9112 §6.1
    if target > MAX_TARGET:
        return 414, "URI Too Long", f"path and query are over {MAX_TARGET} bytes"
    if len(names) > MAX_HEADERS:
        return 431, "Request Header Fields Too Large", f"there are over {MAX_HEADERS} headers"
    return None


def in_ascii(method: bytes, url: bytes, data: bytes) -> bytes:
    """
    Return the request in whose target the parser has stopped, with what is beyond ASCII there percent-encoded, as many
    servers of functions need it; empty if nothing is. *data* begins with its first line, or in its target after *url*.
    """
    line, end, rest = data.partition(b"\n")
    if line.isascii() or len(url) > MAX_TARGET:
        return b""
    if url:
        line = b"%b %b%b" % (method, url, line)
    return quote_from_bytes(line, bytes(range(128))).encode() + end + rest


def without_offer(method: bytes, url: bytes, version: str, headers: list[Header]) -> bytes:
    """
    Return a head without the offer to switch protocols.

    RFC 9110 §7.8: a server may ignore Upgrade and serve the request. The parser would take the body of such a request
    for another protocol. Java's HttpClient and curl --http2 offer h2c in each first request.
    """
    lines = [b"%s %s HTTP/%s" % (method, url, version.encode())]
    for name, value in headers:
        if name == b"connection":
            options = (each.strip() for each in value.split(b","))
            value = b", ".join(each for each in options if each.lower() not in _OF_UPGRADES)
        if value and name not in _OF_UPGRADES:
            lines.append(b"%s: %s" % (name, value))
    return b"\r\n".join(lines) + b"\r\n\r\n"
