"""
Which pages of other origins may call a function from a browser: the Fetch standard's CORS protocol, by annotations.

https://fetch.spec.whatwg.org/#http-cors-protocol. Without `gpufaas.cors-origins` it is all the function's own affair,
as with OpenFaaS: OPTIONS reaches it like any other call.
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
_MAX_AGE_S: Final = 600
_ORIGIN: Final = re.compile(r"\*|https?://[a-zA-Z0-9.\[\]:-]+")
_TOKEN: Final = re.compile(r"\*|[a-zA-Z0-9!#$%&'*+.^_`|~-]+")  # RFC 9110 §5.6.2


@dataclass(frozen=True, slots=True)
class Cors:
    origins: frozenset[bytes]
    methods: bytes
    headers: bytes

    def preflight(self, method: str, asked: list[Header]) -> tuple[int, list[Header]] | None:
        """Return status and headers of the answer to a preflight; None: this is none."""
        if method != "OPTIONS" or not any(name == b"access-control-request-method" for name, _ in asked):
            return None
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
        """Return what tells a browser whether the page that called may see the answer."""
        if b"*" in self.origins:
            return [(b"access-control-allow-origin", b"*")]
        origin = next((value for name, value in asked if name == b"origin"), b"")
        vary = (b"vary", b"origin")
        return [(b"access-control-allow-origin", origin), vary] if origin.lower() in self.origins else [vary]


def read_cors(annotations: Mapping[str, str]) -> Cors | None:
    """
    Return what *annotations* say; None: nothing.

    :raises InvalidSpec: something is no origin, method or header, or there are no origins
    """
    if ORIGINS not in annotations:
        for name in (METHODS, HEADERS):
            if name in annotations:
                raise InvalidSpec(f"annotation {name} goes with {ORIGINS}, which is not given")
        return None
    origins = _read(annotations[ORIGINS], ORIGINS, _ORIGIN, "https://app.example, or *")
    methods = _read(annotations.get(METHODS, "GET, HEAD, POST"), METHODS, _TOKEN, "GET, POST")
    headers = _read(annotations.get(HEADERS, "content-type"), HEADERS, _TOKEN, "content-type, x-call-id")
    return Cors(
        frozenset(each.lower().encode() for each in origins), ", ".join(methods).encode(), ", ".join(headers).encode()
    )


def _read(text: str, name: str, form: re.Pattern[str], example: str) -> list[str]:
    found = [each.strip() for each in text.split(",")]
    for each in found:
        if not form.fullmatch(each):
            raise InvalidSpec(f"annotation {name}: {each[:80]!r} is none: write for example {example}")
    return found
