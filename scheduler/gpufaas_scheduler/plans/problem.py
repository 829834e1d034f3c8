"""How the problems of this package are read: strictly, each error in one line that says where and what."""

import json
from typing import Annotated, Any, Final, TypeVar

import msgspec

from gpufaas_core.errors import InvalidSpec
from gpufaas_core.json_errors import UNREADABLE, mistake

Milliseconds = float

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
Name = Annotated[str, msgspec.Meta(min_length=1)]

EPSILON: Final = 1e-9
"""Times and sums that differ by less are taken for equal."""

LARGEST: Final = 1e15
SMALLEST: Final = 1e-30
"""Other numbers than 0 lie between these two, so that no sum and no product leaves the range of floats."""

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""An answer for people: headings, rows."""

_T = TypeVar("_T", bound=msgspec.Struct)


class BadProblem(InvalidSpec):
    """A problem that cannot be read, or that contradicts itself; the message is one line."""


class Problem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of what is read: an unknown key is an error."""


class Infeasible(msgspec.Struct, frozen=True):
    """The answer where there is none: why."""

    infeasible: str


def read(data: bytes | str, kind: type[_T], name: str = "the problem") -> _T:
    """
    Return the problem that *data*, JSON, holds.

    :param name: of the file
    :raises BadProblem: it is not JSON, or not such a problem: file and line, what is there, and what is allowed
    """
    try:
        found = msgspec.json.decode(data, type=kind)
        json.loads(data, object_pairs_hook=_once, parse_int=_real, parse_float=_real)
        return found
    except UNREADABLE as exc:
        raise BadProblem(mistake(data.encode() if isinstance(data, str) else data, kind, exc, name)) from exc
    except BadProblem as exc:
        raise BadProblem(f"{name}: {exc}") from exc


def distinct(names: list[str], what: str) -> None:
    """
    Check that no name comes twice.

    :raises BadProblem: one does
    """
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise BadProblem(f"two {what} are called {name!r}: names must differ")
        seen.add(name)


def _once(pairs: list[tuple[str, Any]]) -> None:
    distinct([key for key, _ in pairs], "keys of one object")


def _real(text: str) -> None:
    size = abs(float(text))
    if size > LARGEST or 0 < size < SMALLEST:
        raise BadProblem(f"{text} is out of range: numbers lie between {SMALLEST:g} and {LARGEST:g}, or are 0")
