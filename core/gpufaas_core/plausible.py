"""
What may be believed of a worker. An author's code shares its process, and may write there whatever it likes.

Checked where it comes in, at the node; the engine asks again before it learns anything, and the stores before they give
back what was learnt: one figure that is none must not spoil a function for good.
"""

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from gpufaas_core.frames import FailedHead, ReadyHead
from gpufaas_core.model import Bytes, Profile, Seconds
from gpufaas_core.units import KiB, format_bytes

MAX_HEADERS: Final[Bytes] = 64 * KiB
"""Of an answer, names and values together. Most servers and proxies take less."""
_MAX_FIELDS: Final = 1000
"""Of those: as many as a head of that size has that was not made to cost time."""
MAX_S: Final[Seconds] = 366 * 86_400.0
"""Nothing takes longer."""
_MAX_BYTES: Final[Bytes] = 1 << 50
_MAX_PHASES: Final = 16
_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")  # RFC 9110: a token
_NOT_IN_VALUE: Final = re.compile(rb"[\x00\r\n]")
_PHASE: Final = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_decode_profile: Final = msgspec.json.Decoder(Profile).decode


def is_time(seconds: Seconds) -> bool:
    """Whether something can have taken so long. NaN is no time."""
    return 0.0 <= seconds <= MAX_S


def is_size(size: Bytes) -> bool:
    return 0 <= size <= _MAX_BYTES


def why_no_answer(status: int, headers: Sequence[tuple[bytes, bytes]]) -> str:
    """Return what is wrong with the head of an answer; empty: nothing. Some 0.3 us, and as much for each header."""
    if not 200 <= status <= 599:
        return f"status {status}: an answer's is from 200 to 599"
    if len(headers) > _MAX_FIELDS:
        return f"{len(headers)} headers: an answer may have {_MAX_FIELDS}"
    size = 0
    for name, value in headers:
        size += len(name) + len(value)
        if not _NAME.fullmatch(name) or _NOT_IN_VALUE.search(value):
            return f"{name[:80]!r}: {value[:80]!r} is no header: its name or value has characters that none has"
    if size > MAX_HEADERS:
        return f"headers of {format_bytes(size)}: an answer may have {format_bytes(MAX_HEADERS)}"
    return ""


def why_not_ready(head: ReadyHead) -> str:
    """Return what is wrong with what a worker says of its load; empty: nothing."""
    if not is_size(head.occupation) or not is_size(head.data_base):
        return f"its memory is {head.occupation} bytes, {head.data_base} at the fork point"
    if len(head.phases) > _MAX_PHASES or not all(_PHASE.fullmatch(name) and is_time(s) for name, s in head.phases):
        return f"its load took {str(head.phases)[:200]}"
    return ""


def shortened(head: FailedHead) -> FailedHead:
    """Return *head* with texts that an error and a log can bear."""
    return FailedHead(head.summary[:2000], head.text[-64 * KiB :], head.out_of_memory)


def read_profile(data: bytes) -> Profile:
    """
    Return a stored profile.

    :raises ValueError: it is none, or has figures that are none: it is as if it were not there
    """
    profile = _decode_profile(data)
    if not (is_time(profile.load_s) and is_time(profile.service_s) and is_size(profile.occupation)):
        raise ValueError(f"no profile: {profile}")
    return profile
