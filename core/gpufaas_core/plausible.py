"""
Checks of what a worker says. The author's code shares the worker's process and may send anything.

The node checks each message of a worker. The engine checks again before it learns a figure, and the stores check what
they read, since one wrong figure would spoil a function for good.
"""

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from gpufaas_core.model import Bytes, Profile, Seconds
from gpufaas_core.units import KiB, format_bytes
from gpufaas_core.wire.heads import FailedHead, ReadyHead

MAX_HEADERS: Final[Bytes] = 64 * KiB
"""The most bytes of an answer's headers, names and values together. Most servers and proxies accept less."""
_MAX_FIELDS: Final = 1000
"""The number of headers. A head of 64 KiB that is not an attack has fewer."""
MAX_S: Final[Seconds] = 366 * 86_400.0
"""Nothing takes longer."""
MAX_BYTES: Final[Bytes] = 1 << 50
_MAX_PHASES: Final = 16
HEADER_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
"""RFC 9110: a token. In lower case: by that, the headers of a connection are told from those of an answer."""
NOT_IN_VALUE: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_USUAL: Final = frozenset(
    (b"content-type", value)
    for value in (
        b"application/json", b"application/octet-stream", b"text/plain", b"text/plain; charset=utf-8",
        b"text/html; charset=utf-8",
    )
)  # fmt: skip
"""Most answers have one of these and no other header: a lookup instead of two searches."""
_PHASE: Final = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_decode_profile: Final = msgspec.json.Decoder(Profile).decode


def is_time(seconds: Seconds) -> bool:
    """Whether *seconds* can be a duration; NaN cannot."""
    return 0.0 <= seconds <= MAX_S


def is_size(size: Bytes) -> bool:
    return 0 <= size <= MAX_BYTES


def why_no_answer(status: int, headers: Sequence[tuple[bytes, bytes]]) -> str:
    """Return what is wrong with the head of an answer; empty: nothing. Takes 0.3 us, and 0.3 us for each header."""
    if not 200 <= status <= 599:
        return f"status {status}: an answer's is from 200 to 599"
    if len(headers) > _MAX_FIELDS:
        return f"{len(headers)} headers: an answer may have {_MAX_FIELDS}"
    if len(headers) == 1 and headers[0] in _USUAL:
        return ""
    size = 0
    for name, value in headers:
        size += len(name) + len(value)
        if not HEADER_NAME.fullmatch(name) or NOT_IN_VALUE.search(value):
            return f"{name[:80]!r}: {value[:80]!r} is no header: its name or value has characters that none here has"
    if size > MAX_HEADERS:
        return f"headers of {format_bytes(size)}: an answer may have {format_bytes(MAX_HEADERS)}"
    return ""


def why_not_ready(head: ReadyHead) -> str:
    """Return what is wrong with a worker's report of its load; empty: nothing."""
    if not is_size(head.occupation) or not is_size(head.data_base):
        return f"its memory is {head.occupation} bytes, {head.data_base} at the fork point"
    if head.imported is not None and not is_time(head.imported.seconds):
        return f"its imports took {head.imported.seconds}"
    return why_no_phases(head.phases)


def why_no_phases(phases: Sequence[tuple[str, Seconds]]) -> str:
    """Return what is wrong with the phases of a load; empty: nothing."""
    if len(phases) > _MAX_PHASES or not all(_PHASE.fullmatch(name) and is_time(s) for name, s in phases):
        return f"its load took {str(phases)[:200]}"
    return ""


def shortened(head: FailedHead) -> FailedHead:
    """Return *head* with its texts cut to a length that fits an error and a log."""
    return FailedHead(head.summary[:2000], head.text[-64 * KiB :], head.out_of_memory)


def read_profile(data: bytes) -> Profile:
    """Return a stored profile. :raises ValueError: it is no profile, or has impossible figures: treat it as missing"""
    profile = _decode_profile(data)
    if not (is_time(profile.load_s) and is_time(profile.service_s) and is_size(profile.occupation)):
        raise ValueError(f"no profile: {profile}")
    return profile
