"""
How a line that a worker prints says which call wrote it: a mark before its text, in the pipe itself.

A mark is ``RS secret call US``. In the pipe it keeps its place among lines that have none: those of C code, and of
programs that a function runs. The secret is the worker's, and new for each: text that a caller sends, and that is
printed as it is, cannot pass for a mark. So a mark is one wherever it stands; what is before it on a line is the
beginning of another, which nobody ended.
"""

import secrets
from collections.abc import Iterator
from typing import Final

MARK_VARIABLE: Final = "GPUFAAS_LOG_MARK"
"""The environment variable in which a worker finds its secret."""
_SECRET_BYTES: Final = 6
_LONGEST_CALL: Final = 128
"""Characters: what gateways take of an X-Call-Id."""


def new_secret() -> str:
    return secrets.token_hex(_SECRET_BYTES)


def mark(secret: str, call: str) -> bytes:
    """Return what stands before a line of *call*; an empty call: of none."""
    return f"\x1e{secret}{call if call.isprintable() else ''}\x1f".encode()


def lines_in(text: str, secret: str) -> Iterator[tuple[str, str]]:
    """Yield the lines of one from a pipe, each with its call (empty: of none), and only with what \\r left of it."""
    before, *marked = text.split(f"\x1e{secret}")
    if before or not marked:
        marked.insert(0, f"\x1f{before}")
    for each in marked:
        call, _, said = each.partition("\x1f")
        said = said.rstrip().rpartition("\r")[2] if "\r" in said else said
        yield call if len(call) <= _LONGEST_CALL and call.isprintable() else "", said
