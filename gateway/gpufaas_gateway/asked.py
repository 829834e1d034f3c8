"""
What a call asks for beside its function: headers say it, annotations of the function are their defaults (`spec`).

A function is called by its name and is the only variant, so a call that asks for another one is refused at once.
"""

import re
from collections.abc import Callable, Mapping
from math import inf, nan
from typing import Any, Final

from msgspec.structs import replace

from gpufaas_core.errors import InvalidSpec, Unsatisfiable
from gpufaas_core.model import PREFERENCES, Asked, Function, name_of
from gpufaas_core.units import Seconds, parse_duration

LONGEST_S: Final[Seconds] = 86_400.0
_NAME: Final = re.compile(r"[a-zA-Z0-9][-._/:a-zA-Z0-9]{0,127}")


def read_goal(text: str) -> Seconds:
    """:raises InvalidSpec: *text* is not a duration, or not more than 0, or more than a day"""
    goal_s = parse_duration(text)
    if not 0.0 < goal_s <= LONGEST_S:
        raise InvalidSpec(f"{text[:80]!r} must be more than 0 and at most 24h: write for example 200ms")
    return goal_s


def read_accuracy(text: str) -> float:
    """Accuracies are in per cent. :raises InvalidSpec: *text* is not a number in 0 to 100, or looks like a fraction"""
    accuracy = read_number(text)
    if not 0.0 <= accuracy <= 100.0 or 0.0 < accuracy < 1.0:
        raise InvalidSpec(f"{text[:80]!r} is not an accuracy in per cent, 0 or 1 to 100: write for example 76.1")
    return accuracy


def read_positive(text: str) -> float:
    """:raises InvalidSpec: *text* is not a number above 0"""
    number = read_number(text)
    if not 0.0 < number < inf:
        raise InvalidSpec(f"{text[:80]!r} is not a number above 0: write for example 1.5")
    return number


def read_preference(text: str) -> str:
    """:raises InvalidSpec: *text* is none of `PREFERENCES`"""
    if text.strip() not in PREFERENCES:
        raise InvalidSpec(f"{text[:80]!r} is not one of {', '.join(PREFERENCES)}")
    return text.strip()


def read_name(text: str) -> str:
    """Names of tasks, models and variants. :raises InvalidSpec: *text* is none"""
    if not _NAME.fullmatch(text.strip()):
        raise InvalidSpec(
            f"{text[:80]!r} is not a name: use at most 128 of a-z, A-Z, 0-9, '-', '_', '.', '/' and ':', beginning "
            "with a letter or digit"
        )
    return text.strip()


def read_number(text: str) -> float:
    """Return the number that *text* is; NaN: none."""
    try:
        return float(text)
    except ValueError:
        return nan


_READ: Final[Mapping[bytes, tuple[str, str, Callable[[str], object]]]] = {
    b"x-latency-goal": ("X-Latency-Goal", "goal_s", read_goal),
    b"x-min-accuracy": ("X-Min-Accuracy", "min_accuracy", read_accuracy),
    b"x-max-cost": ("X-Max-Cost", "max_cost", read_positive),
    b"x-prefer": ("X-Prefer", "prefer", read_preference),
    b"x-model": ("X-Model", "model", read_name),
    b"x-variant": ("X-Variant", "variant", read_name),
}
"""By header in lower case: its name, the field of `Asked`, and how its text is read."""
HEADERS: Final = frozenset(_READ)


def read_asked(told: Mapping[bytes, bytes], function: Function, usual: Asked | None) -> Asked | None:
    """
    Return what the headers *told* ask for; *usual* is what they do not say. An empty header says nothing.

    :raises InvalidSpec: a value is malformed
    :raises Unsatisfiable: *function* can never be what is asked for
    """
    read: dict[str, Any] = {}
    for key in told.keys() & HEADERS:
        name, field, parse = _READ[key]
        if text := told[key].decode("latin-1").strip():
            try:
                read[field] = parse(text)
            except InvalidSpec as exc:
                raise InvalidSpec(f"{name}: {exc}") from exc
    if not read:
        return usual
    _check(read, function)
    return replace(usual or Asked(), **read)


def _check(read: Mapping[str, Any], function: Function) -> None:
    name, least = name_of(function.id), read.get("min_accuracy")
    if least is not None and least > function.accuracy:
        has = f"accuracy {function.accuracy:g}" if function.accuracy else "no annotation gpufaas.accuracy"
        raise _differs(name, "X-Min-Accuracy", {"min_accuracy": least}, {"accuracy": function.accuracy or None}, has)
    if (model := read.get("model", function.model)) != function.model:
        has = f"model {function.model}" if function.model else "no annotation gpufaas.model"
        raise _differs(name, "X-Model", {"model": model}, {"model": function.model or None}, has)
    if (variant := read.get("variant", name)) not in (name, name.rpartition(".")[0]):
        raise _differs(name, "X-Variant", {"variant": variant}, {"variant": name}, "no other variant")


def _differs(name: str, header: str, asked: dict[str, object], has: dict[str, object], what: str) -> Unsatisfiable:
    (value,) = asked.values()
    told = value if isinstance(value, str) else f"{value:g}"
    return Unsatisfiable(
        f"{header} asks for {told}, and {name} has {what}: call another function, or leave the header out",
        details={"asked": asked, "has": has},
    )
