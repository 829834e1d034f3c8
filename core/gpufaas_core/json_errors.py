"""
What is wrong with JSON that people wrote, in words: where it is, what is there, and what is allowed.

msgspec says it in names of Python, knows no lines, and does not say which key of a dictionary it means.
"""

import bisect
import difflib
import itertools
import json
import re
from typing import Any, Final

import msgspec
from msgspec import inspect as types

from gpufaas_core.errors import InvalidSpec

Step = str | int
"""A key, or an index."""

UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for JSON that is wrong."""

_JSON: Final = json.JSONDecoder(parse_int=lambda digits: int(digits[:99]))  # Python reads no number of 4301 digits
_AT: Final = re.compile(r" - at (?P<key>`key` in )?`\$(?P<path>.*)`$")
_STEP: Final = re.compile(r"\.(?P<name>[^.\[\]]+)|\[(?P<index>\d+)\]|\[\.\.\.\]")
_BYTE: Final = re.compile(r"\(byte (\d+)\)$")
_FIELD: Final = re.compile(r"Object (contains unknown|missing required) field `(.*?)`(?: - at |$)")
_BETWEEN: Final = re.compile(r"[\s,:]*")
_SHOWN: Final = 60
"""Characters of what is there."""


def mistake(content: bytes, shape: Any, exc: Exception, name: str) -> str:
    """Say in a sentence, with the line, why the file *name* with *content* is not JSON, or not a *shape*."""
    text = content.decode(errors="replace")
    try:
        found = _JSON.decode(text)
    except json.JSONDecodeError as no_json:
        return f"{name}:{no_json.lineno}: this is not JSON: {no_json}"
    except RecursionError as deep:
        exc = deep
    if isinstance(exc, msgspec.ValidationError):
        where, what = wrong(found, shape, exc)
        return f"{name}:{line_of(text, where)}: {what}"
    why = "it is nested too deeply" if isinstance(exc, RecursionError) else "it is not UTF-8"
    if at := _BYTE.search(str(exc)):  # NaN, or half of a pair of surrogates
        why, text = "a number or a character is none of JSON", content[: int(at[1])].decode(errors="replace")
    line = text.partition("\ufffd")[0].count("\n") + 1
    return f"{name}:{line}: this is not JSON: {why}"


def wrong(
    found: Any, shape: Any, exc: msgspec.ValidationError, within: tuple[Step, ...] = (), strict: bool = True
) -> tuple[tuple[Step, ...], str]:
    """
    Return where *found*, which is at *within* and was to be a *shape*, is wrong; and a sentence about it.

    :param strict: as it was given to msgspec
    """
    whole, kind, where, at = found, types.type_info(shape), list(within), _AT.search(str(exc))
    for each in _STEP.finditer(at["path"] if at else ""):
        step = int(each["index"]) if each["index"] else each["name"] or _key(whole, shape, str(exc), found, strict)
        kind, found = _below(kind, step, found), found[step]
        where.append(step)
    name = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in where).lstrip(".") or "the whole"
    if at and at["key"]:
        return tuple(where), f"a key of {name} is wrong: write {allowed(_container(kind).key_type)}"
    if field := _FIELD.match(str(exc)):
        key, known, of = field[2], _fields(kind, found), f" in {name}" if where else ""
        if field[1] == "missing required":
            return tuple(where), f"{key} is missing{of}: write {allowed(known[key])}"
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
        return (*where, key), f"unknown key {key!r}{of}: {hint}"
    there = json.dumps(found, ensure_ascii=False)
    there = there if len(there) <= _SHOWN else f"{there[:_SHOWN]}…"
    return tuple(where), f"{name} is {there}: write {allowed(kind)}"


def line_of(text: str, where: tuple[Step, ...]) -> int:
    """Return the line, from 1, at which the value at *where* begins in *text*, JSON, or the nearest one around it."""
    read, at = _JSON.raw_decode, _begin(text, 0)
    for step in where:
        around, at = at, at + 1
        for index in itertools.count():
            at = _begin(text, at)
            if text[around] not in "{[" or text[at] in "}]":
                return text.count("\n", 0, around) + 1
            key, at = read(text, at) if text[around] == "{" else (index, at)
            at = _begin(text, at)
            if key == step:
                break
            at = read(text, at)[1]
    return text.count("\n", 0, at) + 1


def _begin(text: str, at: int) -> int:
    found = _BETWEEN.match(text, at)
    return found.end() if found else at


def allowed(of: Any) -> str:
    """Return in words which values a field of the type *of* takes."""
    kinds = _members(of if isinstance(of, types.Type) else types.type_info(of))
    return " or ".join(dict.fromkeys(_words(each) for each in kinds))


def _words(kind: Any) -> str:
    match kind:
        case types.LiteralType():
            return "one of " + ", ".join(str(each) for each in kind.values)
        case types.BoolType():
            return "true or false"
        case types.IntType() | types.FloatType():
            what = "a whole number" if isinstance(kind, types.IntType) else "a number"
            ends = {
                "{:g} or more": kind.ge, "more than {:g}": kind.gt, "{:g} at most": kind.le, "less than {:g}": kind.lt,
            }  # fmt: skip
            return ", ".join([what, *(says.format(limit) for says, limit in ends.items() if limit is not None)])
        case types.StructType(array_like=True):
            return f"a list of {sum(each.required for each in kind.fields)} or more"
        case types.ListType() | types.VarTupleType():
            return f"a list of {kind.min_length} or more" if kind.min_length else "a list"
        case types.StructType() | types.DictType():
            return "an object that is not empty" if getattr(kind, "min_length", 0) else "an object"
    return "text that is not empty" if getattr(kind, "min_length", 0) else "text"


def _members(kind: Any) -> list[Any]:
    """Return the types that *kind* allows, but for null."""
    kind = getattr(kind, "type", kind)  # with metadata
    each = getattr(kind, "types", (kind,))
    return [getattr(one, "type", one) for one in each if not isinstance(one, types.NoneType)]


def _fields(kind: Any, found: Any) -> dict[str, types.Type]:
    """Return the types of the keys that *found* may have as a *kind*; of several structs, the one that its tag says."""
    structs = [each for each in _members(kind) if isinstance(each, types.StructType)]
    tags = {each.tag: each for each in structs if each.tag_field}
    of_tag = {str(each.tag_field): types.LiteralType(tuple(tags)) for each in tags.values()}
    structs = [tags[each] for each in map(found.get, of_tag) if each in [*tags]] if tags else structs
    return of_tag | {field.encode_name: field.type for each in structs for field in each.fields}


def _below(kind: Any, step: Step, found: Any) -> Any:
    """Return the type of what is at *step* of *found*, which was to be a *kind*."""
    if fields := _fields(kind, found):
        return fields[step] if isinstance(step, str) else list(fields.values())[step]
    inner = _container(kind)
    return getattr(inner, "value_type", None) or inner.item_type


def _container(kind: Any) -> Any:
    """Return the one of the types that *kind* allows that has something in it."""
    return next(
        each for each in _members(kind) if isinstance(each, types.ListType | types.VarTupleType | types.DictType)
    )


def _key(whole: Any, shape: Any, message: str, found: dict[str, Any], strict: bool) -> str:
    """Return the first key of *found*, within *whole*, with which *whole* is no *shape*, for the reason *message*."""
    entries = list(found.items())

    def is_wrong(last: int) -> bool:
        found.clear()
        found.update(entries[: last + 1])
        try:
            msgspec.json.decode(json.dumps(whole), type=shape, strict=strict)
        except (msgspec.DecodeError, InvalidSpec) as exc:  # which may be of what comes later
            return str(exc) == message
        finally:
            found.update(entries)
        return False

    return entries[bisect.bisect_left(range(len(entries) - 1), True, key=is_wrong)][0]
