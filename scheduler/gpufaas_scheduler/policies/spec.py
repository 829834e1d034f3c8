"""
Which policy decides, and with which options: `PolicySpec`, as text and as data.

The text form has parts with ``+`` between them, and needs no quotes in a shell::

    NAME[:OPTION=VALUE[,OPTION=VALUE]...][+ROLE=NAME[:OPTION=VALUE...]]...

    lalb-o3
    lalb-o3:o3_limit=10
    least-wait:wait_bound_s=60+replacement=cost-aware

A policy, or what fills a role, declares its options as a `msgspec.Struct` called ``Options``: fields with defaults, and
with limits and a description in `msgspec.Meta`. A spec is checked by conversion to it: an option is written down once.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
from msgspec import Struct
from msgspec import inspect as types

from gpufaas_core.errors import InvalidSpec
from gpufaas_core.json_errors import allowed

Value: TypeAlias = str | int | float | bool | None
"""The value of an option."""

FORM: Final = "NAME[:OPTION=VALUE,...][+ROLE=NAME[:OPTION=VALUE,...]]..."
EXAMPLE: Final = "lalb-o3:o3_limit=10+replacement=cost-aware"


class NoOptions(Struct, frozen=True):
    """The options of a role or policy that has nothing to set."""


OptionsT = TypeVar("OptionsT", bound=Struct)


class Chosen(Struct, frozen=True, omit_defaults=True):
    """What was chosen by name, and the options that were given for it."""

    name: str
    options: dict[str, Value] = {}

    def __str__(self) -> str:
        options = ",".join(f"{name}={_text(value)}" for name, value in self.options.items())
        return f"{self.name}:{options}" if options else self.name


class PolicySpec(Struct, frozen=True, omit_defaults=True):
    """
    A policy by name, its options, and what fills single roles instead of what the policy has there.

    `parse` and `str` are inverse. A journal has the fields.
    """

    name: str
    options: dict[str, Value] = {}
    roles: dict[str, Chosen] = {}
    """What was chosen for each role, by the role's name."""

    @classmethod
    def parse(cls, text: str) -> PolicySpec:
        """
        Read the text form. The names are not looked up, and the values of options stay text.

        :raises InvalidSpec: it is not of this form
        """
        policy = Chosen("")
        roles: dict[str, Chosen] = {}
        for at, each in enumerate(text.split("+")):
            role, chosen = _part(each, text)
            if not role:
                if at:
                    raise _malformed(text)
                policy = chosen
                continue
            if role in roles:
                raise InvalidSpec(f"policy {text!r} names {role} twice: say it once")
            roles[role] = chosen
        return cls(policy.name, policy.options, roles)

    def __str__(self) -> str:
        roles = [f"{role}={each}" for role, each in self.roles.items()]
        return "+".join([str(Chosen(self.name, self.options)), *roles] if self.name else roles)


def _part(part: str, text: str) -> tuple[str, Chosen]:
    """Return the role that *part* of *text* names, or "", and what it chooses."""
    head, colon, tail = part.partition(":")
    role, equals, name = head.rpartition("=")
    options: dict[str, Value] = {}
    for each in tail.split(",") if colon else ():
        option, given, value = each.partition("=")
        if not (option and given):
            raise _malformed(text)
        if option in options:
            raise InvalidSpec(f"policy {text!r} gives {option} twice: say it once")
        options[option] = value
    if not name or bool(equals) != bool(role):
        raise _malformed(text)
    return role, Chosen(name, options)


def _malformed(text: str) -> InvalidSpec:
    return InvalidSpec(f"{text!r} does not say a policy: write {FORM}, as in {EXAMPLE}")


def _text(value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


# --- options ----------------------------------------------------------------------------------------------------------


def read_options(owner: str, kind: type[OptionsT], given: Mapping[str, Value]) -> OptionsT:
    """
    Return *given* as the options of *owner*. Text is converted to the type of its option.

    :raises InvalidSpec: an option is not known, or its value is not allowed; says which there are, or what is allowed
    """
    known = {each.name: each for each in msgspec.structs.fields(kind)}
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise InvalidSpec(f"{owner} has no option {name!r}: {has}")
        field = known[name].type
        try:
            values[name] = read = msgspec.convert(value, field, strict=False)
        except msgspec.ValidationError:
            read = None
        if (read is None and value is not None) or (isinstance(read, float) and not isfinite(read)):
            raise InvalidSpec(f"{owner}: {name} is {allowed(field)}, not {_text(value)!r}")
    return kind(**values)


def description(field: Any) -> str:
    """Return what `msgspec.Meta` says about an option of the type *field*."""
    kind = types.type_info(field)
    said = kind.extra_json_schema if isinstance(kind, types.Metadata) else None
    return str((said or {}).get("description", ""))
