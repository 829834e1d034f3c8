"""What a function's labels ``com.openfaas.scale.*`` say about its number of copies. The autoscaler decides by it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from gpufaas_core.errors import InvalidSpec
from gpufaas_core.units import Seconds, parse_duration

_T = TypeVar("_T")

PREFIX: Final = "com.openfaas.scale."
TYPES: Final = ("rps", "capacity", "cpu", "queue")
"""What is measured: completions per second, calls waiting or running, millicores, pending asynchronous calls."""

_TRUE: Final = frozenset({"1", "t", "T", "TRUE", "true", "True"})  # Go's ParseBool
_FALSE: Final = frozenset({"0", "f", "F", "FALSE", "false", "False"})
_MAX_DOWN_WINDOW_S: Final = 300.0
_MAX_COPIES: Final = 10_000


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """Bounds, what is measured, and how much of it one copy is meant to bear. Defaults are OpenFaaS's but for one."""

    min: int = 1
    """While it is in use; see `pinned` for what stays in memory."""
    max: int = 20
    zero: bool = False
    """No copies once it was idle for `zero_duration_s`."""
    zero_duration_s: Seconds = 900.0
    type: str = "rps"
    target: float = 50.0
    """Load of one copy, in the unit of `type`."""
    target_proportion: float = 0.9
    """Part of `target` that is aimed at."""
    factor: int = 20
    """0 switches scaling by load off. Otherwise of no effect: percent of max that OpenFaaS CE adds for an alert."""
    down_window_s: Seconds = 30.0
    """Going down, the highest need of this time counts. OpenFaaS's default is 0: it drops as soon as load does, which
    its users complain about (openfaas.md 16, 7)."""
    pinned: int = 0
    """Copies that are kept for it whatever others need: the minimum, where it is given and zero is not allowed."""

    @property
    def floor(self) -> int:
        """Copies at least, while it is in use."""
        return max(1, self.min)


def read_scaling_rule(labels: Mapping[str, str], annotations: Mapping[str, str] | None = None) -> ScalingRule | None:
    """
    Return what the labels ask for; None: none of them is about scaling, and copies follow calls.

    :param annotations: asked for labels that are not there: older users put them here (openfaas.md §8)
    :raises InvalidSpec: a value that cannot be; names the label
    """
    given = {**(annotations or {}), **labels}
    given = {name.removeprefix(PREFIX): value for name, value in given.items() if name.startswith(PREFIX)}

    def read(name: str, parse: Callable[[str], _T], otherwise: _T) -> _T:
        if name not in given:
            return otherwise
        try:
            return parse(given[name].strip())
        except InvalidSpec as exc:
            where = "label" if f"{PREFIX}{name}" in labels else "annotation"
            raise InvalidSpec(f"{where} {PREFIX}{name}: {exc}") from exc

    usual = ScalingRule()
    zero = read("zero", _claim, usual.zero)
    least = read("min", _whole, usual.min)
    rule = ScalingRule(
        min=least,
        max=read("max", _at_least_one, max(usual.max, least)),
        zero=zero,
        zero_duration_s=read("zero-duration", _some_time, usual.zero_duration_s),
        type=read("type", _type, usual.type),
        target=read("target", _above_nothing, usual.target),
        target_proportion=read("target-proportion", _proportion, usual.target_proportion),
        factor=read("factor", _percent, usual.factor),
        down_window_s=read("down.window", _window, usual.down_window_s),
        pinned=0 if zero or "min" not in given else least,
    )
    if rule.max < rule.min:
        raise InvalidSpec(
            f"label {PREFIX}max: {rule.max} is below {PREFIX}min, which is {rule.min}: raise it, or lower that"
        )
    return rule if given.keys() & _KNOWN else None


_KNOWN: Final = frozenset(
    {"min", "max", "zero", "zero-duration", "type", "target", "target-proportion", "factor", "down.window"}
)


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InvalidSpec(f"{text[:40]!r} is not a whole number")
    if int(text) > _MAX_COPIES:
        raise InvalidSpec(f"{text!r} is over {_MAX_COPIES} copies")
    return int(text)


def _at_least_one(text: str) -> int:
    number = _whole(text)
    if number < 1:
        raise InvalidSpec(f"{text!r} must be at least 1")
    return number


def _percent(text: str) -> int:
    if (number := _whole(text)) > 100:
        raise InvalidSpec(f"{text!r} is not in 0 to 100 percent")
    return number


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InvalidSpec(f"{text[:40]!r} is not a number")
    return number


def _above_nothing(text: str) -> float:
    number = _number(text)
    if not 1e-6 <= number <= 1e9:
        raise InvalidSpec(f"{text!r} is not a load that a copy could bear: write for example 50")
    return number


def _proportion(text: str) -> float:
    number = _number(text)
    if not 0.01 <= number <= 1.0:
        raise InvalidSpec(f"{text!r} is not in 0.01 to 1")
    return number


def _claim(text: str) -> bool:
    if text not in _TRUE | _FALSE:
        raise InvalidSpec(f"{text[:40]!r} is neither true nor false")
    return text in _TRUE


def _type(text: str) -> str:
    if text not in TYPES:
        raise InvalidSpec(f"{text[:40]!r} is not measured here: choose one of {', '.join(TYPES)}")
    return text


def _some_time(text: str) -> Seconds:
    seconds = parse_duration(text)
    if seconds <= 0:
        raise InvalidSpec(f"{text!r} must be longer than nothing: write for example 15m")
    return seconds


def _window(text: str) -> Seconds:
    seconds = parse_duration(text)
    if seconds > _MAX_DOWN_WINDOW_S:
        raise InvalidSpec(f"{text!r} is longer than 5m")
    return seconds
