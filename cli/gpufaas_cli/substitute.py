"""
``${NAME}`` in a stack file, with the forms of faas-cli.

A form of its own, not a shell's: ``$NAME`` stays, ``$$`` is a dollar sign, ``:+`` is read like ``:-``, and without its
colon ``${NAME-x}`` is an error.
"""

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Final

_NAME: Final = re.compile(r"[A-Za-z0-9_]+")
_DEFAULT: Final = re.compile(r":[-=?+]|=")
_CASE: Final[dict[str, Callable[[str], str]]] = {
    "^^": str.upper,
    "^": lambda value: value[:1].upper() + value[1:],
    ",,": str.lower,
    ",": lambda value: value[:1].lower() + value[1:],
}


class BadSubstitution(ValueError):
    """`at` is the offset of the ``${`` that cannot be read."""

    def __init__(self, message: str, at: int) -> None:
        super().__init__(message)
        self.at = at


def substitute(text: str, env: Mapping[str, str], put: Callable[[str], str] = str) -> str:
    """
    Return *text* with each ``${...}`` replaced from *env*; a name that is not there is empty.

    :param put: what is written for a value
    :raises BadSubstitution: a form that is not understood, or not closed
    """
    out: list[str] = []
    at = 0
    while (dollar := text.find("$", at)) >= 0:
        out.append(text[at:dollar])
        if text.startswith("${", dollar):
            value, at = _expand(text, dollar, env)
            out.append(put(value))
        else:
            out.append("$")
            at = dollar + (2 if text.startswith("$$", dollar) else 1)
    out.append(text[at:])
    return "".join(out)


def _expand(text: str, start: int, env: Mapping[str, str]) -> tuple[str, int]:
    """Return the value of the ``${`` at *start*, and the offset after its brace."""
    wants_length = text.startswith("${#", start)
    found = _NAME.match(text, start + (3 if wants_length else 2))
    if found is None:
        raise BadSubstitution("a name is missing after ${", start)
    value = env.get(found[0], "")
    at = found.end()
    if wants_length:
        return str(len(value)), _closed(text, at, start)
    if default := _DEFAULT.match(text, at):
        word, at = _word(text, default.end(), start, env)
        return value or word, at
    operator = text[at : at + 1]
    if operator == "}":
        return value, at + 1
    if operator and operator in "^,:#%/":
        return _operate(text, at, start, value, env)
    raise BadSubstitution(f"missing closing brace after ${{{found[0]}", start)


def _operate(text: str, at: int, start: int, value: str, env: Mapping[str, str]) -> tuple[str, int]:
    operator = text[at]
    if text[at + 1 : at + 2] == operator and operator in "^,#%/":
        operator *= 2
    if operator in _CASE:
        return _CASE[operator](value), _closed(text, at + len(operator), start)
    word, end = _word(text, at + len(operator), start, env)
    match operator:
        case ":":
            try:
                offset, _, length = word.partition(":")
                first = int(offset)
                return value[first:][: int(length)] if length else value[first:], end
            except ValueError:
                raise BadSubstitution(f"{word!r} is not OFFSET or OFFSET:LENGTH", start) from None
        case "#" | "##":
            cuts = range(len(value) + 1)
            return next((value[cut:] for cut in _longest(cuts, operator) if fnmatchcase(value[:cut], word)), value), end
        case "%" | "%%":
            cuts = range(len(value), -1, -1)
            return next((value[:cut] for cut in _longest(cuts, operator) if fnmatchcase(value[cut:], word)), value), end
        case _:
            old, _, new = word.partition("/")
            if operator == "//":
                return value.replace(old, new) if old else value, end
            if old.startswith("#"):
                return new + value[len(old) - 1 :] if value.startswith(old[1:]) else value, end
            if old.startswith("%"):
                return value.removesuffix(old[1:]) + new if value.endswith(old[1:]) else value, end
            return value.replace(old, new, 1) if old else value, end


def _word(text: str, at: int, start: int, env: Mapping[str, str]) -> tuple[str, int]:
    """Return what stands before the closing brace, with its own ``${...}`` replaced, and the offset after the brace."""
    out: list[str] = []
    while at < len(text):
        if text[at] == "}":
            return "".join(out), at + 1
        if text.startswith("${", at):
            value, at = _expand(text, at, env)
            out.append(value)
        else:
            out.append(text[at])
            at += 1
    raise BadSubstitution("missing closing brace", start)


def _closed(text: str, at: int, start: int) -> int:
    if text[at : at + 1] != "}":
        raise BadSubstitution("missing closing brace", start)
    return at + 1


def _longest(cuts: range, operator: str) -> range:
    """Doubled operators try the longest match first."""
    return cuts[::-1] if len(operator) == 2 else cuts
