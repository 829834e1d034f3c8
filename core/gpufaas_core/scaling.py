"""The rule for a function's number of copies, from its labels ``com.openfaas.scale.*``. The autoscaler applies it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpufaas_core.errors import InvalidSpec
from gpufaas_core.units import Seconds, parse_duration

PREFIX: Final = "com.openfaas.scale."
TYPES: Final = ("rps", "capacity", "cpu", "queue", "alert")
"""What is measured: see `autoscale.FunctionLoad`; of ``alert``, nothing: alerts and people set the number."""

_MAX_COPIES: Final = 10_000


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """
    The bounds, what is measured, and how much of it one copy should bear. The defaults are OpenFaaS's, but for
    `down_window_s`.
    """

    min: int = 1
    """While the function is in use; see `pinned` for what stays in memory."""
    max: int = 20
    zero: bool = False
    """The function has no copies once it was idle for `zero_duration_s`."""
    zero_duration_s: Seconds = 900.0
    type: str = "rps"
    target: float = 50.0
    """The load of one copy, in the unit of `type`."""
    target_proportion: float = 0.9
    """The part of `target` to aim at."""
    factor: int = 10
    """The per cent of `max` that an alert adds, as in OpenFaaS CE; 0 switches scaling by load and by alerts off."""
    down_window_s: Seconds = 30.0
    """The highest need within this time counts before copies are removed. OpenFaaS's default is 0: its copies go as
    soon as load drops, and its users complain."""
    pinned: int = 0
    """Copies that stay whatever others need: the minimum, if it is given and zero is not allowed."""

    @property
    def acts(self) -> bool:
        """Whether the autoscaler decides about its copies: by its load, or once it is idle."""
        return self.zero or self.by_load

    @property
    def by_load(self) -> bool:
        """Whether its load changes the number of copies while it is in use."""
        return self.factor > 0 and self.type != "alert"

    @property
    def floor(self) -> int:
        """The least number of copies while it is in use."""
        return max(1, self.min)


def read_scaling_rule(labels: Mapping[str, str], annotations: Mapping[str, str] | None = None) -> ScalingRule | None:
    """
    Return the rule that the labels ask for; None: none of them is about scaling. See `ScalingRule.acts`.

    :param annotations: used for labels that are missing: older users put them here
    :raises InvalidSpec: a value is invalid; names the label
    """
    given = {**(annotations or {}), **labels}
    read: dict[str, Any] = {}
    for name, (field, parse) in _LABELS.items():
        if (text := given.get(f"{PREFIX}{name}")) is not None:
            try:
                read[field] = parse(text.strip())
            except InvalidSpec as exc:
                where = "label" if f"{PREFIX}{name}" in labels else "annotation"
                raise InvalidSpec(f"{where} {PREFIX}{name}: {exc}") from exc
    if not read:
        return None
    usual = ScalingRule()
    least = read.get("min", usual.min)
    most = read.setdefault("max", max(usual.max, least))
    if most < least:
        raise InvalidSpec(f"label {PREFIX}max: {most} is below {PREFIX}min, which is {least}: raise it, or lower that")
    return ScalingRule(**read, pinned=0 if read.get("zero") or "min" not in read else least)


def _whole(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise InvalidSpec(f"{text[:40]!r} is not a whole number")
        if not low <= int(text) <= high:
            raise InvalidSpec(f"{text!r} is not in {low} to {high}")
        return int(text)

    return parse


def _number(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not low <= number <= high:
            raise InvalidSpec(f"{text[:40]!r} is not a number in {low:g} to {high:g}")
        return number

    return parse


def _time(low: Seconds, high: Seconds, bounds: str) -> Callable[[str], Seconds]:
    def parse(text: str) -> Seconds:
        seconds = parse_duration(text)
        if not low <= seconds <= high:
            raise InvalidSpec(f"{text!r} is not {bounds}")
        return seconds

    return parse


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise InvalidSpec(f"{text[:40]!r} is neither true nor false")
    return text.lower() in ("true", "1")


def _type(text: str) -> str:
    if text not in TYPES:
        raise InvalidSpec(f"{text[:40]!r} is not measured here: choose one of {', '.join(TYPES)}")
    return text


_LABELS: Final[Mapping[str, tuple[str, Callable[[str], Any]]]] = {
    "min": ("min", _whole(0, _MAX_COPIES)),
    "max": ("max", _whole(1, _MAX_COPIES)),
    "zero": ("zero", _boolean),
    "zero-duration": ("zero_duration_s", _time(1e-9, math.inf, "longer than 0: write for example 15m")),
    "type": ("type", _type),
    "target": ("target", _number(1e-6, 1e9)),
    "target-proportion": ("target_proportion", _number(0.01, 1.0)),
    "factor": ("factor", _whole(0, 100)),
    "down.window": ("down_window_s", _time(0.0, 300.0, "in 0 to 5m")),
}
"""By label without its prefix: the field of the rule, and how the label's text is read."""
