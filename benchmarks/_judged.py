"""Bars of a benchmark: what is asked, what was found, whether it is met, and the exit status that follows."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Bar:
    met: bool | None
    """None: what it asks about was not measured."""
    text: str

    @property
    def verdict(self) -> str:
        return {True: "met", False: "MISSED", None: "not judged"}[self.met]


def least(text: str, value: float | None, limit: float) -> Bar:
    """Ask that *value* is at least *limit*."""
    return _bar(text, value, None if value is None else value >= limit, f"at least {limit:g}")


def most(text: str, value: float | None, limit: float) -> Bar:
    """Ask that *value* is at most *limit*."""
    return _bar(text, value, None if value is None else value <= limit, f"at most {limit:g}")


def _bar(text: str, value: float | None, met: bool | None, wanted: str) -> Bar:
    if value is None:
        return Bar(met, f"{text} ({wanted})")
    return Bar(met, f"{text}: {f'{value:.2f}' if abs(value) < 10 else f'{value:.0f}'} ({wanted})")


def status_of(bars: Sequence[Bar]) -> int:
    """Say on stderr which bars are met; return the exit status: 1 if one was missed."""
    for each in bars:
        print(f"{each.verdict}: {each.text}", file=sys.stderr)
    return 1 if any(each.met is False for each in bars) else 0


def listed(bars: Sequence[Bar]) -> str:
    """Return the bars as a list in Markdown."""
    return "\n".join(f"- {'**missed**' if each.met is False else each.verdict}: {each.text}" for each in bars)
