"""
What ``--watch`` does. It finds changed files by looking ten times a second: the kernel's watches would need a
dependency for each system and see nothing on network mounts, and looking at the files of a few functions takes a
millisecond.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import click

from gpufaas_cli import output
from gpufaas_cli.source_files import NOT_HANDLER, Ignored, LeavesOut, is_cache, walk
from gpufaas_cli.stack import Stack, StackFunction
from gpufaas_core.errors import GpufaasError, InvalidSpec
from gpufaas_core.files import identity
from gpufaas_core.units import Seconds

_EVERY_S: Final = 0.1
_LOOKS: Final = 20
"""After so many a change is told although files go on changing, as where a program writes its log there."""
_LOOKING: Final = 0.1
"""The part of one core that it takes at most: it looks less often where a look takes long."""

_Seen = Mapping[Path, object]
_Paths = Callable[[], Iterable[tuple[Path, LeavesOut]]]
_Act = Callable[[Stack, list[StackFunction]], None]


def watch(read: Callable[[], tuple[Stack, list[StackFunction]]], act: _Act) -> None:
    """Do *act* with all that *read* gives, then with what has changed, until Ctrl-C."""
    known = [read()]  # the last that could be read
    try:
        changed_files = changes(lambda: watched(*known[-1]))  # what is written while the first is built counts, too
        _attempt(act, *known[-1])
        for changed in changed_files:
            try:
                known[:] = [read()]
            except GpufaasError as exc:
                output.note(f"gpufaas: {exc}")
                continue
            stack, functions = known[-1]
            _attempt(act, stack, concerned(stack, functions, changed))
    except KeyboardInterrupt:
        output.note("Stopped watching.")


def watched(stack: Stack, functions: Sequence[StackFunction]) -> list[tuple[Path, LeavesOut]]:
    """Return the files and folders that *functions* are made from, and what is left out of each."""
    if stack.made_of:
        return [(stack.made_of, is_cache)]
    handlers = [each.handler for each in functions if each.handler]
    return [
        *((path, is_cache) for path in (stack.path, *stack.template_dirs())),
        *((path, Ignored(path, NOT_HANDLER)) for path in handlers),
        *((path, Ignored(path)) for path in (stack.root / each for each in stack.copy)),
    ]


def concerned(stack: Stack, functions: Sequence[StackFunction], changed: set[Path]) -> list[StackFunction]:
    """Return those of *functions* with a change in their own folder, without the stack file; all, if one is outside."""
    folders = [each.handler for each in functions if each.handler and not stack.path.is_relative_to(each.handler)]
    if any(not any(path.is_relative_to(folder) for folder in folders) for path in changed):
        return list(functions)
    return [each for each in functions if each.handler and any(path.is_relative_to(each.handler) for path in changed)]


def _attempt(act: _Act, stack: Stack, functions: list[StackFunction]) -> None:
    """Do *act*. A mistake in a function does not end the watch: it waits for the correction."""
    try:
        act(stack, functions)
    except click.exceptions.Exit:
        pass
    except GpufaasError as exc:
        output.note(f"gpufaas: {exc}")
    output.note(f"Watching {stack.made_of or f'{stack.path} and what it names'}; Ctrl-C ends it.")


def changes(paths: _Paths, sleep: Callable[[Seconds], None] = time.sleep) -> Iterator[set[Path]]:
    """
    Yield, without end, the files below *paths* that were changed, added or removed since this was called.

    Files that are written together, as by a checkout, come together: it waits until one look finds nothing new, for
    `_LOOKS` at most.

    :param paths: files and folders, each with what is left out of it; asked at each look, since a stack file may name
        others after a change
    """
    return _changes(_look(paths()), paths, sleep)


def _changes(before: _Seen, paths: _Paths, sleep: Callable[[Seconds], None]) -> Iterator[set[Path]]:
    now, took_s, waited = before, 0.0, 0
    while True:
        sleep(max(_EVERY_S, took_s / _LOOKING))
        began = time.perf_counter()
        later = _look(paths())
        took_s = time.perf_counter() - began
        waited = waited + 1 if now != before else 0
        if waited and (later == now or waited > _LOOKS):
            yield {path for path in before.keys() | now.keys() if before.get(path) != now.get(path)}
            before, waited = now, 0
        now = later


def _look(paths: Iterable[tuple[Path, LeavesOut]]) -> _Seen:
    """Return what tells whether a build would find the same as before: identities of files, or what is wrong."""
    seen: dict[Path, object] = {}
    for path, leaves_out in paths:
        try:
            seen |= {file: identity(file.stat()) for file in walk(path, leaves_out)}
        except (InvalidSpec, OSError) as exc:
            seen[path] = str(exc)
    return seen
