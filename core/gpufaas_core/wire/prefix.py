"""
A frame: a 16-byte prefix, a msgpack header and a raw body. No IO here.

    kind u8 · 0 u8 · lane u16 · header bytes u32 · body bytes u64   (little endian)
"""

import struct
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from gpufaas_core._types import Bytes

PREFIX: Final = struct.Struct("<IIQ")
"""The first number has the kind in its lowest 8 bits, the lane in its highest 16."""
KIND: Final = 0xFF
LANE: Final = 16
"""The place of the lane's bits."""
LANES: Final = 1 << 16
"""The most lanes that a connection may have."""
MAX_HEADER: Final[Bytes] = 4 * 1024 * 1024
MAX_SAID: Final[Bytes] = 256 * 1024
"""The largest header of a worker: to read it takes 8 ms. One of 4 MiB would hold up the node's other calls for 130."""
MAX_BODY: Final[Bytes] = 64 * 1024 * 1024
"""Larger frames are errors: the other end is another program, or is out of step."""


class BrokenFrame(Exception):
    """The other end sent bytes that are no frame: close the connection."""


_EMPTY: Final = b""
_encode: Final = msgspec.msgpack.Encoder().encode
_pack: Final = PREFIX.pack
_unpack: Final = PREFIX.unpack_from


def encode_frame(
    kind: int, head: msgspec.Struct | None = None, body: bytes | bytearray | memoryview = b"", lane: int = 0
) -> bytes:
    """Return the whole frame, for small bodies. For large ones send `encode_prefix`, then the body."""
    header = _EMPTY if head is None else _encode(head)
    return _pack(kind | lane << LANE, len(header), len(body)) + header + body


def encode_prefix(kind: int, head: msgspec.Struct | None, body_bytes: Bytes, lane: int = 0) -> bytes:
    """Return prefix and header. The caller then sends the body, of *body_bytes* bytes, without copying it."""
    header = _EMPTY if head is None else _encode(head)
    return _pack(kind | lane << LANE, len(header), body_bytes) + header


class FrameReader:
    """
    Makes frames ``(kind, header, body)`` of bytes as they come. A frame that comes whole costs two slices. The lane is
    in the kind, as in `PREFIX`.
    """

    __slots__ = ("_end", "_left", "_max_body", "_max_header")

    def __init__(self, max_body: Bytes = MAX_BODY, lanes: int = 1, max_header: Bytes = MAX_HEADER) -> None:
        """:param lanes: their number: frames of others are broken"""
        self._left = bytearray()
        self._max_body = max_body
        self._max_header = max_header
        self._end = lanes << LANE

    def feed(self, data: bytes) -> Iterable[tuple[int, bytes, bytes]]:
        """:raises BrokenFrame: the bytes are no frame"""
        if not self._left and (size := len(data)) >= 16:
            kind, header_bytes, body_bytes = self._prefix(data, 0)
            body_at = 16 + header_bytes
            if body_at + body_bytes == size:
                return ((kind, data[16:body_at], data[body_at:]),)  # nearly always: no generator
        return self._feed(data)

    def _feed(self, data: bytes) -> Iterator[tuple[int, bytes, bytes]]:
        left = self._left
        if left:
            left += data
            # Wait for the whole first frame before anything is copied out of the buffer.
            if len(left) < 16 or len(left) < 16 + sum(self._prefix(left, 0)[1:]):
                return
            data = bytes(left)
            left.clear()
        at, size = 0, len(data)
        while size - at >= 16:
            kind, header_bytes, body_bytes = self._prefix(data, at)
            body_at = at + 16 + header_bytes
            end = body_at + body_bytes
            if end > size:
                break
            yield kind, data[at + 16 : body_at], data[body_at:end]
            at = end
        if at < size:
            left += data[at:]

    def _prefix(self, data: bytes | bytearray, at: int) -> tuple[int, int, int]:
        kind, header_bytes, body_bytes = found = _unpack(data, at)
        if header_bytes > self._max_header or body_bytes > self._max_body or kind & 0xFF00 or kind >= self._end:
            raise BrokenFrame(f"no frame: kind {kind:x}, lengths {header_bytes} and {body_bytes}")
        return found
