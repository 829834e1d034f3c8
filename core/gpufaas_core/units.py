"""Bytes and seconds in and out of text: the notations that people and OpenFaaS clients write."""

import re
from typing import Final

from gpufaas_core._types import Bytes as Bytes
from gpufaas_core._types import Seconds as Seconds
from gpufaas_core.errors import InvalidSpec

KiB: Final = 1024
MiB: Final = 1024**2
GiB: Final = 1024**3

_BYTE_UNITS: Final[dict[str, int]] = {
    "": 1, "b": 1,
    "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "ki": KiB, "mi": MiB, "gi": GiB, "ti": 1024**4,
    "kib": KiB, "mib": MiB, "gib": GiB, "tib": 1024**4,
}  # fmt: skip
_DURATION_UNITS: Final[dict[str, float]] = {
    "ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0,
}  # fmt: skip
_BYTES: Final = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([a-zA-Z]*)")  # more digits are no float in the end
_DURATION_PART: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h)")


def parse_bytes(text: str) -> Bytes:
    """
    Return the bytes that *text* means: ``"512Mi"``, ``"2GiB"``, ``"500M"``, ``"1048576"``.

    :raises InvalidSpec: not a size; says what was given and what a size looks like
    """
    found = _BYTES.fullmatch(text.strip())
    unit = _BYTE_UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise InvalidSpec(f"{text[:80]!r} is not a memory size: write for example 512Mi, 2GiB or 1500M")
    return int(float(found[1]) * unit)


def format_bytes(size: Bytes) -> str:
    """Return *size* for people, in binary units: ``1.5 GiB``, ``324 MiB``."""
    if abs(size) >= GiB:
        return f"{size / GiB:.1f} GiB"
    if abs(size) >= MiB:
        return f"{size / MiB:.0f} MiB"
    if abs(size) >= KiB:
        return f"{size / KiB:.0f} KiB"
    return f"{size} B"


def parse_duration(text: str) -> Seconds:
    """
    Return the seconds of a Go duration (``"300ms"``, ``"1h30m"``) or of a bare number of seconds.

    :raises InvalidSpec: neither of the two
    """
    text = text.strip()
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    parts = _DURATION_PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise InvalidSpec(f"{text!r} is not a duration: write for example 300ms, 30s or 1h30m")
    return sum(float(number) * _DURATION_UNITS[unit] for number, unit in parts)
