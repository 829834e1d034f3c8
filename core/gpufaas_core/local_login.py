"""
The login of a gateway on this machine, for clients of the user who started it: a file that only this user can read,
locked by the gateway for as long as it serves.

The lock tells a file that a killed gateway left: its port may be another's by now, who must not get the password.
"""

import contextlib
import fcntl
import json
import logging
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

log = logging.getLogger("gpufaas")

_HERE: Final = "127.0.0.1"


@contextlib.contextmanager
def offered(url: str, user: str, password: str) -> Iterator[None]:
    """Keep the login of the gateway at *url* in a file until the block ends. Log it where there is no place for one."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_written(_file(url), {"url": url, "user": user, "password": password}))
        except (OSError, RuntimeError) as exc:  # RuntimeError: this user has no home directory
            log.warning("clients on this machine have to log in: no file can be kept for them (%s)", exc)
        yield


@contextlib.contextmanager
def _written(path: Path, content: dict[str, str]) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    made, temporary = tempfile.mkstemp(dir=path.parent)
    with open(made, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        json.dump(content, file)
        file.flush()
        os.replace(temporary, path)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(made), path.stat()):  # else it is the next gateway's by now
                    path.unlink()


def find(url: str) -> tuple[str, str] | None:
    """Return user and password of the gateway at *url*; None: it is not one of this machine that this user started."""
    parts = urlsplit(url)
    own = parts.hostname in ("localhost", socket.gethostname().lower())
    for host in (parts.hostname, *((_HERE,) if own else ())):
        with contextlib.suppress(OSError, RuntimeError, ValueError, KeyError):
            path = _file(f"{parts.scheme}://{f'[{host}]' if host and ':' in host else host}:{parts.port or 80}")
            if found := _read(path):
                return found
    return None


def _read(path: Path) -> tuple[str, str] | None:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), encoding="utf-8") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            log.warning("%s is ignored: it must belong to this user, with mode 0600, to be trusted with a login", path)
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            content = json.load(file)
            return content["user"], content["password"]
    return None  # nobody serves there


def _file(url: str) -> Path:
    parts = urlsplit(url)
    return _folder() / f"login-{parts.scheme}-{parts.hostname}-{parts.port}.json"


def _folder() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    with contextlib.suppress(OSError):
        if runtime and os.stat(runtime).st_uid == os.geteuid():  # after su it is still that of the other user
            return Path(runtime, "gpufaas")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gpufaas")
