"""What a serving process sets up at its start: its limit of open files, and a private directory."""

import logging
import resource
from pathlib import Path
from typing import Final

log = logging.getLogger("resources")

_ENOUGH: Final = 65_536
"""Open files, for some thousand functions and connections. Not more: old programs close every possible descriptor."""
_FEW: Final = 4096


def raise_descriptors() -> None:
    """
    Raise this process's limit of open files as far as the system allows, up to `_ENOUGH`; child processes inherit it.

    The usual limit of 1,024 is for programs that use select(2); the 111th CPU function reached it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < _FEW:
        log.warning("descriptors.few limit=%d: raise the hard limit of open files (ulimit -Hn, LimitNOFILE=)", most)


def keep_private(directory: Path) -> None:
    """Close the existing *directory* to other users: it has bundles, logs, secrets and bodies of calls."""
    mode = directory.stat().st_mode
    if mode & 0o077:
        try:
            directory.chmod(mode & 0o700)
        except PermissionError:
            log.warning("data.shared directory=%s: others may look into it, and it is not ours to close", directory)
