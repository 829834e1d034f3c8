"""What goes into a function from its author's folders, and what does not."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gpufaas_cli.source_files import NOT_HANDLER, OWN_IGNORE, Ignored, walk
from gpufaas_cli.weights import is_weights
from gpufaas_core.units import Bytes, MiB, format_bytes

_NAMED: Final = 3
_LARGE: Final = 100 * MiB


@dataclass(slots=True)
class Contents:
    files: dict[str, Bytes] = field(default_factory=dict)
    """By their places in the function's folder."""
    data: Bytes = 0
    """Of files that are no weights."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Why, by the path from the working directory; of folders with a slash."""

    def told(self) -> str:
        """Return what is left out, such as ``.env (secrets), venv/ (a virtual environment, 412 files)``."""
        kinds = []
        for why in dict.fromkeys(self.left_out.values()):
            names = [name for name, of in self.left_out.items() if of == why]
            more = f" and {len(names) - _NAMED} more" * (len(names) > _NAMED)
            count = sum(len(files) for name in names for _, _, files in os.walk(name))
            kinds.append(f"{', '.join(names[:_NAMED])}{more} ({why}{f', {count:,} files' * (count > 0)})")
        return ", ".join(kinds)

    def warning(self) -> str:
        """Return what to say of much that is no weights; empty: it is not much."""
        what = f"{format_bytes(self.data)} of files that are no weights are packed: name in {OWN_IGNORE} what it can do"
        return f"{what} without; 'gpufaas build --list' shows them" if self.data > _LARGE else ""


def contents(handler: Path, copies: Sequence[tuple[Path, Path]], by_git: bool) -> Contents:
    """:param copies: extra files and folders, and their places in the function's folder"""
    found = Contents()
    for source, place in ((handler, Path()), *copies):
        ignored = Ignored(source, NOT_HANDLER if source == handler else frozenset(), by_git)
        for file in walk(source, ignored):
            name, size = (place / file.relative_to(source)).as_posix(), file.stat().st_size
            found.files[name] = size
            found.data += 0 if is_weights(file) else size
        for path, why in ignored.left_out.items():
            found.left_out[os.path.relpath(path) + "/" * path.is_dir()] = why
    return found
