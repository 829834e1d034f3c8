"""The request that calls a function: its route, its body, and the type of its body."""

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from urllib.parse import quote

from gpufaas.gateway import ApiRequest, Content, given
from gpufaas_core._types import Seconds

Pairs = Mapping[str, str] | Sequence[tuple[str, str]]
"""Headers or a query; a name may occur twice in a sequence."""


def function_path(name: str, namespace: str | None = None, asynchronous: bool = False) -> str:
    """Return the route of *name*, which may have a path of its own: ``NAME``, ``NAME.NS``, ``NAME/path``."""
    name, slash, rest = name.partition("/")
    if namespace and not name.endswith(f".{namespace}"):
        name = f"{name}.{namespace}"
    prefix = "async-function" if asynchronous else "function"
    return f"/{prefix}/{quote(name, safe='')}{slash}{quote(rest, safe='/%:@!$&+,;=~*()')}"


def call_request(
    path: str, body: object, method: str, query: Pairs, headers: Pairs, timeout_s: Seconds | None, streams: bool = False
) -> ApiRequest:
    content, kind = _encoded(body)
    headers = as_pairs(headers)
    named = {name.lower() for name, _ in headers}
    ours = {"Accept-Encoding": "identity", **given(**{"Content-Type": kind})}
    headers = [*headers, *((name, value) for name, value in ours.items() if name.lower() not in named)]
    return ApiRequest(
        method, path, as_pairs(query) or None, headers, content=content, timeout_s=timeout_s, of_function=True,
        streams=streams,
    )  # fmt: skip


def _encoded(body: object) -> tuple[Content | None, str | None]:
    match body:
        case None:
            return None, None
        case bytes() | bytearray() | memoryview():
            return bytes(body), "application/octet-stream"
        case str():
            return body.encode(), "text/plain; charset=utf-8"
        case Iterator() | AsyncIterator():
            return body, "application/octet-stream"
        case _:
            return json.dumps(body).encode(), "application/json"


def as_pairs(pairs: Pairs) -> list[tuple[str, str]]:
    return list(pairs.items() if isinstance(pairs, Mapping) else pairs)
