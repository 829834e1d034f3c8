"""What people read: tables, bars, durations. stdout carries results, stderr everything else."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from gpufaas_core.units import Bytes, Seconds

if TYPE_CHECKING:
    from rich.console import Console


def show(text: str = "") -> None:
    click.echo(text)


def note(text: str) -> None:
    """Say something that is not the result."""
    click.echo(text, err=True)


def show_json(content: object) -> None:
    click.echo(json.dumps(content, indent=2, ensure_ascii=False))


def console(err: bool = False, width: int | None = None) -> "Console":
    from rich.console import Console

    return Console(stderr=err, highlight=False, width=width)


def is_terminal() -> bool:
    return sys.stdout.isatty()


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns by spaces, as wide as they must be: what `cut` and `awk` can still read."""
    widths = [max(len(row[column]) for row in [headings, *rows]) for column in range(len(headings))]
    for row in [headings, *rows]:
        click.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def aligned(pairs: Sequence[tuple[str, str]], indent: int = 0) -> None:
    width = max((len(key) for key, _ in pairs), default=0) + 2
    for key, value in pairs:
        click.echo(f"{' ' * indent}{f'{key}:'.ljust(width)}{value}".rstrip())


def format_seconds(seconds: Seconds) -> str:
    """Return *seconds* for people: ``1.96 s``, ``9.1 ms``, ``85 ms``."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.1f} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"


@contextmanager
def upload_bar(what: str, size: Bytes) -> Iterator[Callable[[int], object]]:
    """A progress bar on a terminal, nothing elsewhere; give what it is to be told of each step, in bytes."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(True), TransferSpeedColumn())
    with Progress(*columns, console=console(err=True), transient=True) as progress:
        task = progress.add_task(what, total=size)
        yield lambda step: progress.advance(task, step)


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int, str], object]]:
    """A progress bar on a terminal, nothing elsewhere; give what it is to be told: how much is done, and of what."""
    if not sys.stderr.isatty():
        yield lambda _, __: None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(err=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done, of: progress.update(task, completed=done, description=of)


@contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """A spinner that says what is waited for; on a pipe, each new word is a line. Give how the words are changed."""
    if not sys.stderr.isatty():
        yield lambda text: note(f"  {text}")
        return
    from rich.markup import escape

    terminal = console(err=True)
    width = max(20, terminal.width - 4)
    with terminal.status(escape(what)) as status:
        yield lambda text: status.update(escape(f"{what}: {text}"[:width]))
