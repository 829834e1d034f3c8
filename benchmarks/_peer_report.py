"""What peers.py found: medians of its rounds, the bars, and the tables in the terminal and the documents."""

import dataclasses
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from _document import table, write_part
from _judged import Bar, least, listed, most
from _platform import ROOT
from _servers import PEERS
from rich.console import Console
from rich.table import Table

Row = dict[str, float]
OURS: Final = "this platform"
_SHOWN: Final = ("rps", "p50_ms", "p99_ms", "cpu_us", "first_us", "foreign", "errors")


class Cell(NamedTuple):
    """One comparison: the platform and a peer, with one work at a number of connections."""

    peer: str
    work: str
    connections: int


@dataclass
class Report:
    rounds: int
    seconds: float
    machine: str
    pairs: dict[Cell, list[tuple[Row, Row]]] = field(default_factory=dict)
    """Of each round: what the platform did, and what the peer did."""
    not_run: dict[str, str] = field(default_factory=dict)
    yardsticks: dict[str, list[float]] = field(default_factory=dict)
    _ceiling: float = 0.0

    def yardstick(self, name: str, value: float) -> None:
        self.yardsticks.setdefault(name, []).append(value)

    def ceiling(self, rate: float) -> None:
        """Note what two processes without a server did in the round that begins."""
        self._ceiling = rate
        self.yardstick("convnet_by_hand_rps", rate)

    def add(self, cell: Cell, mine: Row, other: Row) -> None:
        if cell.work == "convnet":
            mine["of_ceiling"] = mine["rps"] / self._ceiling
            other["of_ceiling"] = other["rps"] / self._ceiling
        self.pairs.setdefault(cell, []).append((mine, other))

    def theirs(self, cell: Cell) -> Row | None:
        """Return the peer's medians; None: it was not run."""
        return _medians(other for _, other in self.pairs[cell]) if cell in self.pairs else None

    def ours(self, work: str, connections: int) -> Row | None:
        """Return the platform's medians over the rounds beside all peers."""
        found = [mine for at, pairs in self.pairs.items() if at[1:] == (work, connections) for mine, _ in pairs]
        return _medians(found) if found else None

    def times(self, cell: Cell) -> float | None:
        """Return how many times the peer's requests/s the platform serves: the median of the rounds' ratios."""
        pairs = self.pairs.get(cell)
        return statistics.median(mine["rps"] / max(other["rps"], 1e-9) for mine, other in pairs) if pairs else None

    def points(self) -> list[tuple[str, int]]:
        """Return the works and connections that were measured."""
        return list(dict.fromkeys((cell.work, cell.connections) for cell in self.pairs))

    def line(self, cell: Cell) -> str:
        mine, other = (_medians(row[side] for row in self.pairs[cell]) for side in (0, 1))
        form = "{rps:,.0f}/s, p50 {p50_ms:.2f}, p99 {p99_ms:.2f} ms, {cpu_us:,.0f} µs"
        told = f"{OURS} {form.format(**mine)}; {PEERS[cell.peer].title} {form.format(**other)}"
        return f"{cell.work}, {cell.connections} connections: {told}; {self.times(cell):.2f} times"

    def yardstick_text(self) -> str:
        """Return the yardsticks of this run in a sentence."""
        found = {name: (statistics.median(each), max(each) / min(each)) for name, each in self.yardsticks.items()}
        names = {
            "python_loop_ns": "a turn of an empty Python loop {:.1f} ns",
            "ping_pong_us": "1 KB to another process and back over a unix socket {:.1f} µs",
            "convnet_by_hand_rps": "the convnet in two processes without a server {:.0f}/s",
        }
        parts = [
            f"{text.format(found[name][0])} (largest / least {found[name][1]:.2f})"
            for name, text in names.items()
            if name in found
        ]
        foreign = [row["foreign"] for pairs in self.pairs.values() for pair in pairs for row in pair]
        parts.append(f"other programs used {statistics.median(foreign):.2f} cores ({max(foreign):.2f} at most)")
        return "; ".join(parts)

    def as_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine, "rounds": self.rounds, "seconds": self.seconds, "not_run": self.not_run,
            "yardsticks": self.yardsticks,
            "cells": [
                {**cell._asdict(), "times": self.times(cell), "rounds": [{"ours": a, "theirs": b} for a, b in pairs]}
                for cell, pairs in self.pairs.items()
            ],
            "bars": [dataclasses.asdict(each) for each in bars(self)],
        }  # fmt: skip


def _medians(rows: Iterable[Row]) -> Row:
    given = list(rows)
    found = {key: statistics.median(each[key] for each in given) for key in given[0]}
    return {**found, "tail": statistics.median(each["p99_ms"] / max(each["p50_ms"], 1e-9) for each in given)}


# --- bars -------------------------------------------------------------------------------------------------------------


TIMES_MOSEC: Final = {1: 1.15, 16: 1.5, 64: 1.5}
TIMES_STARLETTE: Final = {16: 1.0, 64: 1.0}
ECHO_CPU_US, OF_CEILING, TAIL, GATEWAY_US = 55.0, 0.98, 1.2, 200.0
CONVNET: Final = (16, 64)


def bars(report: Report) -> list[Bar]:
    found = [
        least(f"echo at {at} connections: times {PEERS[peer].title}", report.times(Cell(peer, "echo", at)), limit)
        for peer, limits in (("mosec", TIMES_MOSEC), ("starlette", TIMES_STARLETTE))
        for at, limit in limits.items()
    ]
    echo = report.ours("echo", 16)
    found.append(most("echo at 16 connections: µs of CPU a call", echo and echo["cpu_us"], ECHO_CPU_US))
    for at in CONVNET:
        row = report.ours("convnet", at)
        found += [
            least(f"convnet at {at}: share of two processes without a server", row and row["of_ceiling"], OF_CEILING),
            most(f"convnet at {at}: p99 / p50", row and row["tail"], TAIL),
            most(f"convnet at {at}: µs of the gateway's process a call", row and row["first_us"], GATEWAY_US),
        ]
    return found


# --- tables -----------------------------------------------------------------------------------------------------------

HEADINGS: Final = (
    "server", "work", "connections", "req/s", "p50 ms", "p99 ms", "CPU µs a call", "of it the first process",
    "errors", "times ours / its",
)  # fmt: skip


def rendered(report: Report) -> list[list[str]]:
    """Return the cells of all rows: the platform's first, then each peer's, for each work and number of connections."""
    lines = []
    for work, connections in report.points():
        rows: list[tuple[str, Row | None, float | None]] = [(OURS, report.ours(work, connections), None)]
        for name in PEERS:
            cell = Cell(name, work, connections)
            rows.append((PEERS[name].title, report.theirs(cell), report.times(cell)))
        for title, row, times in rows:
            if row is not None:
                lines.append([
                    title, work, str(connections), f"{row['rps']:,.0f}", f"{row['p50_ms']:.2f}", f"{row['p99_ms']:.2f}",
                    f"{row['cpu_us']:,.0f}", f"{row['first_us']:,.0f}", f"{row['errors']:.0f}",
                    "" if times is None else f"{times:.2f}",
                ])  # fmt: skip
    return lines


def print_table(report: Report) -> None:
    shown = Table(
        title=f"warm calls, medians of {report.rounds} rounds of {report.seconds:g} s ({report.machine})",
        title_justify="left",
        caption=report.yardstick_text(),
        caption_justify="left",
    )
    for place, heading in enumerate(HEADINGS):
        shown.add_column(heading, justify="left" if place < 2 else "right", no_wrap=place < 2)
    for each in rendered(report):
        shown.add_row(*each)
    Console(width=max(Console().width, 140)).print(shown)
    for name, why in report.not_run.items():
        print(f"{PEERS[name].title}: not run: {why}")


README_HEADINGS: Final = (
    "server", "echo: req/s at 1", "at 16", "at 64", "ours / its", "p50 / p99 at 16, ms", "CPU a call at 16, µs",
    "convnet: req/s at 16", "at 64", "ours / its", "p50 / p99 at 64, ms",
)  # fmt: skip


def short(report: Report) -> list[list[str]]:
    """Return the lines for README.md: one for each server."""
    lines = [_short(OURS, report.ours, lambda _work, _at: None)]
    for name, peer in PEERS.items():
        if any(cell.peer == name for cell in report.pairs):
            lines.append(_short_of(report, name))
        elif name in report.not_run:
            lines.append([peer.title, f"not run: {report.not_run[name]}", *[""] * (len(README_HEADINGS) - 2)])
    return lines


def _short_of(report: Report, name: str) -> list[str]:
    return _short(
        PEERS[name].title,
        lambda work, at: report.theirs(Cell(name, work, at)),
        lambda work, at: report.times(Cell(name, work, at)),
    )


def _short(
    title: str, row_of: Callable[[str, int], Row | None], times_of: Callable[[str, int], float | None]
) -> list[str]:
    def ratios(work: str, connections: tuple[int, ...]) -> str:
        return ", ".join(f"{times:.2f}" for at in connections if (times := times_of(work, at)) is not None)

    def told(work: str, connections: int, form: str) -> str:
        row = row_of(work, connections)
        return "" if row is None else form.format(**row)

    rate, both = "{rps:,.0f}", "{p50_ms:.2f} / {p99_ms:.2f}"
    echo = [told("echo", at, rate) for at in (1, 16, 64)]
    convnet = [told("convnet", at, rate) for at in CONVNET]
    return [
        title, *echo, ratios("echo", (1, 16, 64)), told("echo", 16, both), told("echo", 16, "{cpu_us:,.0f}"),
        *convnet, ratios("convnet", CONVNET), told("convnet", 64, "{p50_ms:.0f} / {p99_ms:.0f}"),
    ]  # fmt: skip


def write(report: Report) -> None:
    """Put the tables into the documents: all of it, and what a reader of README.md needs."""
    told = (
        f"Medians of {report.rounds} rounds of {report.seconds:g} s; {report.machine}; the load generator shares the\n"
        "cores. *times*: the platform's requests/s over the server's, round by round.\n\n"
        f"Yardsticks of this run: {report.yardstick_text()}."
    )
    missing = "".join(f"\n\n{PEERS[name].title}: not run: {why}" for name, why in report.not_run.items())
    command = "```console\n$ python benchmarks/peers.py --write\n```"
    write_part(
        ROOT / "docs" / "performance.md", "benchmarks/peers.py",
        f"{command}\n\n{told}\n\n{table(HEADINGS, rendered(report))}{missing}\n\n{listed(bars(report))}",
    )  # fmt: skip
    told = (
        "*ours / its*: this platform's requests/s over the server's, round by round, at 1, 16 and 64 connections "
        "(convnet: 16 and 64).\n\n"
        f"Medians of {report.rounds} rounds; {report.machine}. Yardsticks of the run: {report.yardstick_text()}."
    )
    write_part(ROOT / "README.md", "benchmarks/peers.py", f"{table(README_HEADINGS, short(report))}\n\n{told}")
