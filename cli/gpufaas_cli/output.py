"""How results are printed: tables, bars, durations, JSON. stdout carries results, stderr everything else."""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click

from gpufaas_core.units import Bytes, Seconds

if TYPE_CHECKING:
    from rich.console import Console


_CONTROL: Final = re.compile(r"\x1b(?!\[[0-9;]*m)|\r(?!\n)|[\0-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f\ud800-\udfff]")


def plain(text: str, colours: bool = False) -> str:
    """Return *text*, which others wrote, so that a terminal shows it and obeys nothing in it but *colours*."""
    shown = _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text if colours else click.unstyle(text))
    return f"{shown}\x1b[0m" if colours and "\x1b" in shown else shown.replace("\x1b", r"\x1b")


def show(text: str = "", colours: bool = False) -> None:
    click.echo(plain(text, colours))


def note(text: str) -> None:
    """Print on stderr what is not the result."""
    click.echo(plain(text), err=True)


def show_json(content: object) -> None:
    """Print *content* as JSON: values, and structs of msgspec by the names of their fields."""
    of_struct = lambda value: {name: getattr(value, name) for name in value.__struct_fields__}  # noqa: E731
    click.echo(json.dumps(content, indent=2, ensure_ascii=False, default=of_struct))


def console(err: bool = False, width: int | None = None) -> "Console":
    from rich.console import Console

    class Plain(Console):
        def render(self, *args: Any, **more: Any) -> Iterator[Any]:
            for each in super().render(*args, **more):
                yield each if each.control else each._replace(text=plain(each.text))

    return Plain(stderr=err, highlight=False, width=width)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns by spaces, as wide as they must be: what `cut` and `awk` can still read."""
    widths = [max(len(row[column]) for row in [headings, *rows]) for column in range(len(headings))]
    for row in [headings, *rows]:
        show("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def aligned(pairs: Sequence[tuple[str, str]], indent: int = 0) -> None:
    width = max((len(key) for key, _ in pairs), default=0) + 2
    for key, value in pairs:
        show(f"{' ' * indent}{f'{key}:'.ljust(width)}{value}".rstrip())


def section(title: str, entries: Mapping[str, str] | Sequence[str], verbose: bool = False) -> None:
    """Print *entries* under *title*. Empty ones are left out, unless *verbose*."""
    if not entries:
        if verbose:
            show(f"\n{title}: <none>")
        return
    show(f"\n{title}:")
    if isinstance(entries, Mapping):
        aligned(sorted(entries.items()), indent=1)
    else:
        show("\n".join(f" - {each}" for each in entries))


def text(value: object) -> str:
    """Return *value* as a cell of a table: None is empty, booleans as in JSON."""
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def format_seconds(seconds: Seconds) -> str:
    """Return *seconds* for people: ``1.96 s``, ``9.1 ms``, ``85 ms``."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.1f} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"


def format_age(age_s: Seconds | None) -> str:
    """Return what to add to a state that is *age_s* old; 0 or None: it is of now."""
    return f", as of {age_s:.0f} s ago" if age_s else ""


def upload_bar(what: str, size: Bytes) -> AbstractContextManager[Callable[[int], object]]:
    """Show a progress bar on a terminal; give what takes each step, in bytes."""
    from rich.progress import DownloadColumn, TransferSpeedColumn

    return _bar(what, size, (DownloadColumn(True), TransferSpeedColumn()), lambda bar, task: partial(bar.advance, task))


def progress_bar(what: str, total: int) -> AbstractContextManager[Callable[[int, str], object]]:
    """Show a progress bar on a terminal; give what takes how much is done, and of what."""
    from rich.progress import TaskProgressColumn, TimeRemainingColumn

    return _bar(
        what, total, (TaskProgressColumn(), TimeRemainingColumn()),
        lambda bar, task: lambda done, of: bar.update(task, completed=done, description=of),
    )  # fmt: skip


@contextmanager
def _bar(what: str, total: int, columns: Sequence[Any], teller: Callable[[Any, Any], Any]) -> Iterator[Any]:
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.progress import BarColumn, Progress, TextColumn

    text = TextColumn("{task.description}", markup=False)
    with Progress(text, BarColumn(), *columns, console=console(err=True), transient=True) as bar:
        yield teller(bar, bar.add_task(what, total=total))


@contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner on a terminal, lines elsewhere; give what takes each new text."""
    if not sys.stderr.isatty():
        yield lambda text: note(f"  {text}")
        return
    from rich.markup import escape

    terminal = console(err=True)
    width = max(20, terminal.width - 4)
    with terminal.status(escape(what)) as status:
        yield lambda text: status.update(escape(f"{what}: {text}"[:width]))
