"""What a process that serves takes for itself at its start: descriptors, and a directory that is its own."""

import logging
import resource
from pathlib import Path
from typing import Final

log = logging.getLogger("resources")

_ENOUGH: Final = 65_536
"""Descriptors: some thousand functions and connections. Not more, since old programs close all that there may be."""
_FEW: Final = 4096


def raise_descriptors() -> None:
    """
    Have as many descriptors as the system lets this process have, up to `_ENOUGH`; what it starts has as many.

    The usual limit of 1,024 is for programs that use select(2), and was reached by the 111th CPU function.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < _FEW:
        log.warning("descriptors.few limit=%d: raise the hard limit of open files (ulimit -Hn, LimitNOFILE=)", most)


def keep_private(directory: Path) -> None:
    """Let nobody but our user into *directory*, which is there: bundles, logs, secrets and calls' bodies are in it."""
    mode = directory.stat().st_mode
    if mode & 0o077:
        try:
            directory.chmod(mode & 0o700)
        except PermissionError:
            log.warning("data.shared directory=%s: others may look into it, and it is not ours to close", directory)
