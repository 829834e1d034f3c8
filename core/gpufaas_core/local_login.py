"""
The login of a gateway on this machine, for clients of the user who started it: a file that only this user can read,
locked by the gateway for as long as it serves.

The lock tells a file that a killed gateway left: its port may be another's by now, who must not get the password.
"""

import contextlib
import fcntl
import logging
import os
import re
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

log = logging.getLogger("gpufaas")


@contextlib.contextmanager
def offered(url: str, user: str, password: str) -> Iterator[None]:
    """Keep the login of the gateway at *url* in a file until the block ends. Log it where there is no place for one."""
    with contextlib.ExitStack() as stack:
        try:
            path = _file(url)
            path.parent.mkdir(0o700, parents=True, exist_ok=True)
            file = stack.enter_context(tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False))
            stack.callback(_remove, path, file.fileno())
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(f"{user}:{password}")
            file.flush()
            os.replace(file.name, path)
        except (OSError, RuntimeError) as exc:  # RuntimeError: this user has no home directory
            log.warning("clients on this machine have to log in: no file can be kept for them (%s)", exc)
        yield


def _remove(path: Path, ours: int) -> None:
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(ours), path.stat()):  # else it is the next gateway's by now
            path.unlink()


def find(url: str) -> tuple[str, str] | None:
    """
    Return user and password of the gateway at *url*; None: it is not one of this machine that this user started.
    ``localhost`` is none: see `direct`.
    """
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        path = _file(url)
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                log.warning("%s is ignored: it must belong to this user, with mode 0600, to hold a login", path)
                return None
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # succeeds if nobody serves there
            except BlockingIOError:
                user, _, password = file.read().partition(":")
                return user, password
    return None


def direct(url: str) -> str:
    """
    Return *url* with the address of this user's gateway in place of ``localhost``; as it is, if there is none. Where
    only 127.0.0.1 is the gateway's, another, or a function, may listen at ::1, where that name leads to first.
    """
    there = re.sub("(?i)^http://localhost(?=[:/]|$)", "http://127.0.0.1", url)
    return there if there != url and find(there) else url


def _file(url: str) -> Path:
    """:raises ValueError: *url* is none. :raises RuntimeError: this user has no home directory"""
    at, runtime = urlsplit(url), os.environ.get("XDG_RUNTIME_DIR")
    name = f"gpufaas/login-{socket.gethostname()}-{at.scheme}-{at.hostname}-{at.port or 80}"  # homes may be shared
    with contextlib.suppress(OSError):
        if runtime and os.stat(runtime).st_uid == os.geteuid():  # after su it is still that of the other user
            return Path(runtime, name)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", name)
