"""Headers of one connection, which are not passed on (RFC 9110 §7.6.1). Names are in lower case."""

from collections.abc import Sequence
from typing import Final

HOP_BY_HOP: Final = frozenset((
    b"connection", b"proxy-connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te",
    b"trailer", b"transfer-encoding", b"upgrade",
))  # fmt: skip
NAMES_NONE: Final = frozenset((b"close", b"keep-alive", b"Keep-Alive", b"upgrade", b"Upgrade"))
"""The usual values of Connection: they name no header but these."""


def end_to_end(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return *headers* without Connection, and those that it names; never without where the message goes and ends."""
    named = b",".join(value for name, value in headers if name == b"connection").lower().split(b",")
    dropped = {b"connection", *map(bytes.strip, named)} - {b"host", b"content-length"}
    return [pair for pair in headers if pair[0] not in dropped]
