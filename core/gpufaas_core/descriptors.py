"""
How a process that serves shares out the open files that it may have: a third for callers' connections, a sixteenth for
weights in host memory, a reserve for its own files and databases, the rest for workers. So none of them takes what the
others need.
"""

import errno
import resource
from typing import Final

_RESERVE: Final = 32
"""Open files of a process that serves and does nothing, with some more for a moment; a sixteenth of all on top."""


def limit() -> int:
    """Return how many files this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def callers_share() -> int:
    """Return how many connections callers may have open at once."""
    return limit() // 3


def lingering_share() -> int:
    """Return how many connections that were answered may wait for their callers: of what is on top of the reserve."""
    return max(1, limit() // 16)


def workers_share() -> int:
    """Return how many open files workers may take in all, of this process's."""
    return max(0, limit() - callers_share() - weights_share() - _RESERVE - limit() // 16)


def weights_share() -> int:
    """Return how many files of weights may be kept in host memory, each of which is an open file."""
    return limit() // 16


def is_lack(error: BaseException) -> bool:
    """Whether *error* says that this process, or the machine, can have no more open files."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
