"""
CORS: annotations say which web pages of other origins may call a function.

https://fetch.spec.whatwg.org/#http-cors-protocol. Without `gpufaas.cors-origins`, servers answer preflights, as in
OpenFaaS. For a function with a ``handle()`` the gateway does, without the headers that allow the call, and loads
nothing; with the value ``function`` the function does. OPTIONS that is not a preflight is a call in any case.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gpufaas_core.errors import InvalidSpec

Header = tuple[bytes, bytes]

ORIGINS: Final = "gpufaas.cors-origins"
METHODS: Final = "gpufaas.cors-methods"
HEADERS: Final = "gpufaas.cors-headers"
OWN: Final = "function"
"""For `ORIGINS`: the function answers preflights itself."""
_MAX_AGE_S: Final = 600
_ORIGIN: Final = re.compile(r"\*|https?://[a-zA-Z0-9.\[\]:-]+")
_TOKEN: Final = re.compile(r"\*|[a-zA-Z0-9!#$%&'*+.^_`|~-]+")  # RFC 9110 §5.6.2


@dataclass(frozen=True, slots=True)
class Cors:
    origins: frozenset[bytes]
    methods: bytes
    headers: bytes
    own: bool = False
    """The function answers preflights and sets the headers itself."""

    def answer(self, asked: list[Header]) -> tuple[int, list[Header]]:
        """Return status and headers of the answer to a preflight."""
        allowed = self.allows(asked)
        if not any(name == b"access-control-allow-origin" for name, _ in allowed):
            return 403, allowed
        return 204, [
            *allowed,
            (b"access-control-allow-methods", self.methods),
            (b"access-control-allow-headers", self.headers),
            (b"access-control-max-age", b"%d" % _MAX_AGE_S),
        ]

    def allows(self, asked: list[Header]) -> list[Header]:
        """Return the headers that tell the browser whether the page may read the answer."""
        if self.own:
            return []
        if b"*" in self.origins:
            return [(b"access-control-allow-origin", b"*")]
        origin = next((value for name, value in asked if name == b"origin"), b"")
        vary = (b"vary", b"origin")
        return [(b"access-control-allow-origin", origin), vary] if origin.lower() in self.origins else [vary]


def preflight(cors: Cors | None, method: str, asked: list[Header]) -> tuple[int, list[Header]] | None:
    """Return status and headers of the answer to a preflight; None if the request goes to the function."""
    if method != "OPTIONS" or (cors is not None and cors.own):
        return None
    if not {b"origin", b"access-control-request-method"} <= {name for name, _ in asked}:
        return None
    return (204, []) if cors is None else cors.answer(asked)


def read_cors(annotations: Mapping[str, str]) -> Cors | None:
    """
    Return what *annotations* allow; None if they have no CORS.

    :raises InvalidSpec: a value is malformed, or methods or headers are given without origins
    """
    if ORIGINS not in annotations:
        for name in (METHODS, HEADERS):
            if name in annotations:
                raise InvalidSpec(f"annotation {name} goes with {ORIGINS}, which is not given")
        return None
    if annotations[ORIGINS].strip() == OWN:
        return Cors(frozenset(), b"", b"", own=True)
    origins = _read(annotations[ORIGINS], ORIGINS, _ORIGIN, f"https://app.example, or *, or {OWN}")
    methods = _read(annotations.get(METHODS, "GET, HEAD, POST"), METHODS, _TOKEN, "GET, POST")
    headers = _read(annotations.get(HEADERS, "content-type"), HEADERS, _TOKEN, "content-type, x-call-id")
    return Cors(
        frozenset(each.lower().encode() for each in origins), ", ".join(methods).encode(), ", ".join(headers).encode()
    )


def _read(text: str, name: str, form: re.Pattern[str], example: str) -> list[str]:
    found = [each.strip() for each in text.split(",")]
    for each in found:
        if not form.fullmatch(each):
            raise InvalidSpec(f"annotation {name}: {each[:80]!r} is not valid: write for example {example}")
    return found
