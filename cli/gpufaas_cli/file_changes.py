"""
Finds changed files, for ``--watch``, by looking ten times a second: the kernel's watches would need a dependency for
each system and see nothing on network mounts, and looking at the files of a few functions takes a millisecond.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from gpufaas_cli.source_files import LeavesOut, walk
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.files import identity
from gpufaas_core.units import Seconds

_EVERY_S: Final = 0.1
_LOOKS: Final = 20
"""After so many a change is told although files go on changing, as where a program writes its log there."""
_LOOKING: Final = 0.1
"""The part of one core that it takes at most: it looks less often where a look takes long."""

_Seen = Mapping[Path, object]
_Paths = Callable[[], Iterable[tuple[Path, LeavesOut]]]


def changes(
    paths: _Paths, every_s: Seconds = _EVERY_S, sleep: Callable[[Seconds], None] = time.sleep
) -> Iterator[set[Path]]:
    """
    Yield, without end, the files below *paths* that were changed, added or removed since this was called.

    Files that are written together, as by a checkout, come together: it waits until one look finds nothing new, for
    `_LOOKS` at most.

    :param paths: files and folders, each with what is left out of it; asked at each look, since a stack file may name
        others after a change
    """
    return _changes(_look(paths()), paths, every_s, sleep)


def _changes(before: _Seen, paths: _Paths, every_s: Seconds, sleep: Callable[[Seconds], None]) -> Iterator[set[Path]]:
    now, took_s, waited = before, 0.0, 0
    while True:
        sleep(max(every_s, took_s / _LOOKING))
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
