"""
Two servers measured in turn: pairs of figures, the median of their ratios, bars, a table.

A round measures both, perhaps in several slices, every second time in the other order: its figures are a pair, from the
same seconds.
"""

import argparse
import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from _judged import Bar, status_of
from _servers import Served, measured
from rich.console import Console
from rich.table import Table

CPU: Final = "cpu_us"
"""The figure of processor time: µs of a call, by all processes of the server."""
SURE: Final = 0.95
HIDDEN: Final = frozenset(("requests", "errors", "expected"))
Row = dict[str, float]
S = TypeVar("S")
T = TypeVar("T")
Parts = Mapping[str, Callable[[S], Row]]
"""What is measured of a side, by its name: each gives figures."""


class Limit(NamedTuple):
    """A bar: how many times the other side's a figure may be."""

    figure: str
    how: str
    """``at most`` or ``at least``"""
    times: float
    of: str = ""
    """What it is about; default: all that was measured."""


class Times(NamedTuple):
    """How many times the other side's a figure is: the median of the ratios, and an interval for the true one."""

    median: float
    low: float
    high: float
    sure: float
    """The probability that the interval holds it."""


def times_of(ratios: Sequence[float]) -> Times:
    """Return the median of *ratios*; the interval is between two of them, the closest that are 95 % sure."""
    ordered, count = sorted(ratios), len(ratios)
    sure = [1 - 2 * sum(math.comb(count, below) for below in range(rank + 1)) / 2**count for rank in range(count)]
    rank = max((rank for rank in range((count + 1) // 2) if sure[rank] >= SURE), default=0)
    return Times(statistics.median(ordered), ordered[rank], ordered[-1 - rank], sure[rank])


def by_turns(turn: int, sides: Sequence[S], part: Callable[[S], T]) -> list[T]:
    """Do *part* with each of *sides*, every second turn from the last one; return what it gives in their order."""
    step = -1 if turn % 2 else 1
    return [part(each) for each in sides[::step]][::step]


class Pairs:
    """What the rounds found, by what was measured: the row of what is judged, and that of what it is compared with."""

    def __init__(self, names: Sequence[str], rounds: int, *limits: Limit, slices: int = 1) -> None:
        """
        :param names: of the sides; one: nothing is compared
        :param slices: how often a round measures each side; its row has the medians
        """
        self.names, self.rounds, self.limits, self.slices = names, rounds, limits, slices
        self.found: dict[str, list[list[Row]]] = {}

    def measure(self, parts: Parts[S], sides: Sequence[S]) -> None:
        """Measure each of *parts* in all rounds."""
        for turn in range(self.rounds):
            self.round(turn, parts, sides)

    def round(self, turn: int, parts: Parts[S], sides: Sequence[S]) -> None:
        """:raises SystemExit: calls failed: one that fails is cheap"""
        console = Console(stderr=True, log_path=False)
        for what, part in parts.items():
            told = f"{what}, round {turn + 1} of {self.rounds}"
            with console.status(told):
                slices = [by_turns(turn + at, sides, part) for at in range(self.slices)]
            if errors := sum(row.get("errors", 0) for rows in slices for row in rows):
                raise SystemExit(f"{told}: {errors:.0f} calls failed")
            rows = [_medians(side) for side in zip(*slices, strict=True)]
            self.found.setdefault(what, []).append(rows)
            console.log(f"{told}: CPU µs {' / '.join(f'{row[CPU]:,.1f}' for row in rows)}")

    def times(self, what: str, figure: str) -> Times | None:
        """Return how many times the other side's *figure* is; None where there is no other, or it was nothing."""
        rows = self.found[what]
        if len(self.names) == 1 or not all(other.get(figure) for _, other in rows):
            return None
        return times_of([mine.get(figure, 0.0) / other[figure] for mine, other in rows])

    def bars(self) -> list[Bar]:
        judged = []
        for what in self.found:
            for figure, how, limit, of in self.limits:
                if of in ("", what) and (times := self.times(what, figure)):
                    told = f"{how} {limit:g}; {times.sure:.0%} sure: {times.low:.3f} to {times.high:.3f}"
                    text = f"{what}: {times.median:.3f} times the {figure} of {self.names[1]} ({told})"
                    judged.append(Bar(times.median <= limit if how == "at most" else times.median >= limit, text))
        return judged

    def table(self) -> Table:
        shown = Table(title=f"medians of {self.rounds} rounds; times: of the rounds' ratios", title_justify="left")
        for heading in ("", "figure", *self.names, *(("times", "from", "to") if len(self.names) > 1 else ())):
            shown.add_column(heading, justify="left" if heading in ("", "figure") else "right")
        for what, rows in self.found.items():
            for name in (each for each in dict.fromkeys([CPU, *rows[0][0]]) if each not in HIDDEN):
                middle = [_medians(side).get(name, 0.0) for side in zip(*rows, strict=True)]
                times = [f"{each:.3f}" for each in (self.times(what, name) or ())[:3]]
                shown.add_row(what, name, *(f"{each:,.2f}" for each in middle), *times)
            shown.add_section()
        return shown

    def finish(self, options: argparse.Namespace) -> int:
        """Show and judge what was found; return the exit status. ``options.json``: as `write_json` has it."""
        bars = self.bars()
        if options.json:
            kept = {"sides": list(self.names), "rounds": self.found, "bars": list(map(dataclasses.asdict, bars))}
            write_json(kept, options.json)
        if options.json is not True:
            Console(width=max(Console().width, 120)).print(self.table())
        return status_of(bars)


def _medians(rows: Sequence[Row]) -> Row:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: statistics.median(row.get(name, 0.0) for row in rows) for name in names}


def load(work: str, connections: int, seconds: float, script: Path) -> Callable[[Served], Row]:
    """Return a part: wrk calls *work* for so many seconds."""
    return lambda each: measured(each.urls[work], each.tree, connections, seconds, script)


def write_json(found: object, where: Path | bool) -> None:
    """Write *found* to a file; True: to stdout."""
    text = json.dumps(found, indent=1) + "\n"
    where.write_text(text) if isinstance(where, Path) else sys.stdout.write(text)
