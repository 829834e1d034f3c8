"""
``${NAME}`` in a stack file, with the forms of faas-cli.

A form of its own, not a shell's: ``$NAME`` stays, ``$$`` is a dollar sign, ``:+`` is read like ``:-``, and without its
colon ``${NAME-x}`` is an error.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Final

_FORM: Final = re.compile(r"\$\{(?:#(\w+)|(\w+)(:[-=?+]?|=|\^\^?|,,?|##?|%%?|//?|))", re.ASCII)
"""The name of ``${#NAME``; else name and operator. A word, or the closing brace, follows."""


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
    form = _FORM.match(text, start)
    if form is None:
        raise BadSubstitution("a name is missing after ${", start)
    counted, name, operator = form.groups()
    value, at = env.get(counted or name, ""), form.end()
    if operator in _WITH_WORD:
        word, at = _word(text, at, start, env)
        try:
            return _WITH_WORD[operator](value, word), at
        except ValueError:
            raise BadSubstitution(f"{word!r} is not OFFSET or OFFSET:LENGTH", start) from None
    if text[at : at + 1] != "}":
        after = "" if counted or operator else f" after ${{{name}"
        raise BadSubstitution(f"missing closing brace{after}", start)
    return str(len(value)) if counted else _WITHOUT_WORD[operator](value), at + 1


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


def _slice(value: str, word: str) -> str:
    """:raises ValueError: *word* is not OFFSET or OFFSET:LENGTH"""
    offset, _, length = word.partition(":")
    rest = value[int(offset) :]
    return rest[: int(length)] if length else rest


def _without_start(value: str, pattern: str, cuts: Iterable[int]) -> str:
    return next((value[cut:] for cut in cuts if fnmatchcase(value[:cut], pattern)), value)


def _without_end(value: str, pattern: str, cuts: Iterable[int]) -> str:
    return next((value[:cut] for cut in cuts if fnmatchcase(value[cut:], pattern)), value)


def _replace(value: str, word: str, count: int = 1) -> str:
    """A word that begins with # or % replaces at the start or the end only."""
    old, _, new = word.partition("/")
    if count == 1 and old.startswith("#"):
        return new + value[len(old) - 1 :] if value.startswith(old[1:]) else value
    if count == 1 and old.startswith("%"):
        return value.removesuffix(old[1:]) + new if value.endswith(old[1:]) else value
    return value.replace(old, new, count) if old else value


_WITHOUT_WORD: Final[Mapping[str, Callable[[str], str]]] = {
    "": str,
    "^^": str.upper,
    "^": lambda value: value[:1].upper() + value[1:],
    ",,": str.lower,
    ",": lambda value: value[:1].lower() + value[1:],
}
_WITH_WORD: Final[Mapping[str, Callable[[str, str], str]]] = {
    **dict.fromkeys((":-", ":=", ":?", ":+", "="), lambda value, word: value or word),
    ":": _slice,
    "#": lambda value, word: _without_start(value, word, range(len(value) + 1)),
    "##": lambda value, word: _without_start(value, word, range(len(value), -1, -1)),
    "%": lambda value, word: _without_end(value, word, range(len(value), -1, -1)),
    "%%": lambda value, word: _without_end(value, word, range(len(value) + 1)),
    "/": _replace,
    "//": lambda value, word: _replace(value, word, -1),
}
"""By their operators. Doubled ones try the longest match first."""
