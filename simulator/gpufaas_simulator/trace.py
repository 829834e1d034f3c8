"""
The Azure Functions trace of 2019: a row per function, a column per minute, the number of calls as the value.

The reader takes the full files (``invocations_per_function_md.anon.d01.csv``, columns 1 to 1440) and samples of them
(any run of consecutive minutes), one row at a time.

Source: Shahrad et al., "Serverless in the Wild" (ATC 2020); the data are Microsoft's AzurePublicDataset, CC-BY.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO

from gpufaas_simulator import synthetic
from gpufaas_simulator.workload import BadWorkload, SimulatedDevice, Workload, all_fit, arrivals

COLUMNS: Final = ("HashOwner", "HashApp", "HashFunction", "Trigger")
_SHORT: Final = 8
"""Characters of a hash that are kept in names."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    owner: str
    function: str
    counts: tuple[int, ...]
    """Calls in each of the requested minutes."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The functions with calls in the requested minutes, most calls first; ties in the order of the trace."""

    path: str
    first_minute: int
    minutes: int
    rows: tuple[TraceRow, ...]


def read_trace(path: Path, *, minutes: int, first_minute: int | None = None) -> Trace:
    """
    Read *minutes* columns from *first_minute* (the column's name) on, by default from the first one.

    :raises BadWorkload: the file is missing, or is no such trace; the message names file and line
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return _read(str(path), _rows(str(path), file), minutes, first_minute)
    except OSError as exc:
        raise BadWorkload(f"{path}: it cannot be read ({exc.strerror}): name a trace file") from exc
    except UnicodeDecodeError as exc:
        raise BadWorkload(f"{path}:1: this is no text file ({exc.reason}): name a trace in CSV form") from exc


def _read(path: str, rows_of: Iterator[tuple[int, list[str]]], minutes: int, first_minute: int | None) -> Trace:
    header = next(rows_of, (1, []))[1]
    if not header:
        raise BadWorkload(f"{path}:1: the file is empty: its first line must be {','.join(COLUMNS)},1,2,…")
    names = [each.strip().lstrip("\N{BYTE ORDER MARK}") for each in header]
    missing = [each for at, each in enumerate(COLUMNS) if names[at : at + 1] != [each]]
    if missing:
        raise BadWorkload(f"{path}:1: column {missing[0]} is missing: the first line must be {','.join(COLUMNS)},1,2,…")
    numbers = names[len(COLUMNS) :]
    if not numbers:
        raise BadWorkload(f"{path}:1: there are no minutes: after {COLUMNS[-1]} there must be columns 1,2,…")
    start = int(numbers[0]) if _is_count(numbers[0]) else 1
    for at, each in enumerate(numbers):
        if each != str(start + at):
            raise BadWorkload(
                f"{path}:1: column {len(COLUMNS) + at + 1} is {each!r}: minutes must be consecutive numbers, "
                f"here {start + at}"
            )
    first = start if first_minute is None else first_minute
    last = first + minutes - 1
    if first < start or last >= start + len(numbers):
        raise BadWorkload(
            f"{path}:1: minutes {first} to {last} are not all there: it has {start} to {start + len(numbers) - 1}"
        )
    begin = len(COLUMNS) + first - start
    rows = []
    for line, cells in rows_of:
        if not cells:
            continue
        if len(cells) != len(names):
            raise BadWorkload(f"{path}:{line}: {len(cells)} cells where line 1 has {len(names)}: complete the row")
        counts = cells[len(COLUMNS) :]
        # One check for all cells: a loop over single cells takes a minute on the full trace.
        if "" in counts or not (text := "".join(counts)).isdigit() or not text.isascii():
            at = next(at for at, cell in enumerate(counts) if not _is_count(cell))
            column = names[len(COLUMNS) + at]
            raise BadWorkload(f"{path}:{line}: minute {column} is {counts[at]!r}: write the number of calls, 0 or more")
        taken = cells[begin : begin + minutes]
        if taken.count("0") < minutes:
            rows.append(TraceRow(cells[0], cells[2], tuple(map(int, taken))))
    if not rows:
        raise BadWorkload(f"{path}:1: no function is called in minutes {first} to {last}: choose others")
    rows.sort(key=lambda row: -sum(row.counts))  # a stable sort
    return Trace(path, first, minutes, tuple(rows))


def _rows(path: str, file: TextIO) -> Iterator[tuple[int, list[str]]]:
    """Yield each row with its line number."""
    reader = csv.reader(file, strict=True)
    try:
        for cells in reader:
            yield reader.line_num, cells
    except csv.Error as exc:
        raise BadWorkload(f"{path}:{reader.line_num}: this is not CSV ({exc}): correct the line") from exc


def _is_count(cell: str) -> bool:
    return cell.isascii() and cell.isdigit()


def trace_workload(
    trace: Trace,
    *,
    working_set: int = 35,
    rpm: float | None = synthetic.PAPER_RPM,
    seed: int = 0,
    on: Sequence[SimulatedDevice] | None = None,
) -> Workload:
    """
    Return a workload of the *working_set* most called functions. Each minute is normalised to *rpm* calls (None: as in
    the trace), at random times in the minute. The owner of a function is its tenant.

    :raises BadWorkload: the trace has fewer functions, or one fits no device
    """
    if len(trace.rows) < working_set:
        raise BadWorkload(
            f"{trace.path}:1: only {len(trace.rows)} functions are called in its {trace.minutes} minutes: "
            f"ask for a working set of at most that"
        )
    chosen = trace.rows[:working_set]
    rng = random.Random(seed)
    names = [(f"f{rank}-{row.function[:_SHORT]}", row.owner[:_SHORT]) for rank, row in enumerate(chosen)]
    drawn = synthetic.functions(working_set, rng, names)
    minutes = []
    for minute in range(trace.minutes):
        counts = [row.counts[minute] for row in chosen]
        minutes.append(
            [index for index, count in enumerate(counts) for _ in range(count)]
            if rpm is None
            else synthetic.normalised(counts, round(rpm))
        )
    times, calls = arrivals(synthetic.spread_over_minutes(minutes, rng))
    where = synthetic.devices() if on is None else on
    rate = "as recorded" if rpm is None else f"{rpm:g}/min"
    return all_fit(Workload(where, drawn, times, calls, name=f"trace, {working_set} functions, {rate}"))
