"""
Finds changed files, for ``--watch``, by looking twice a second: the kernel's watches would need a dependency for each
system and see nothing on network mounts, and looking at the files of a few functions takes a millisecond.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from gpufaas_cli.source_files import NOT_HANDLER, walk
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.files import identity
from gpufaas_core.units import Seconds

_EVERY_S: Final = 0.5
_SKIPPED: Final = NOT_HANDLER | {"node_modules"}

_Seen = Mapping[Path, object]


def changes(
    paths: Callable[[], Iterable[Path]], every_s: Seconds = _EVERY_S, sleep: Callable[[Seconds], None] = time.sleep
) -> Iterator[set[Path]]:
    """
    Yield, without end, the files below *paths* that were changed, added or removed since this was called.

    Files that are written together, as by a checkout, come together: it waits until one look finds nothing new.

    :param paths: asked at each look, since a stack file may name others after a change
    """
    return _changes(_look(paths()), paths, every_s, sleep)


def _changes(
    before: _Seen, paths: Callable[[], Iterable[Path]], every_s: Seconds, sleep: Callable[[Seconds], None]
) -> Iterator[set[Path]]:
    while True:
        sleep(every_s)
        now = _look(paths())
        if now == before:
            continue
        while True:
            sleep(every_s)
            later = _look(paths())
            if later == now:
                break
            now = later
        changed = {path for path in before.keys() | now.keys() if before.get(path) != now.get(path)}
        before = now
        if changed:
            yield changed


def _look(paths: Iterable[Path]) -> _Seen:
    """Return what tells whether a build would find the same as before: identities of files, or what is wrong."""
    seen: dict[Path, object] = {}
    for path in paths:
        try:
            seen |= {file: identity(file.stat()) for file in walk(path, _SKIPPED)}
        except (InvalidSpec, OSError) as exc:
            seen[path] = str(exc)
    return seen
