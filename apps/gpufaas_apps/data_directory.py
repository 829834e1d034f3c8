"""The data directory of a gateway: locked by one process, with the credentials made in it."""

import contextlib
import fcntl
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from gpufaas_apps.options import FrontOptions
from gpufaas_apps.process import keep_private
from gpufaas_core import local_login
from gpufaas_core.errors import StorageFailed
from gpufaas_gateway.auth import PASSWORD_FILE, Credentials, make_credentials, read_credentials


@contextlib.contextmanager
def owned(data: Path) -> Iterator[Path]:
    """
    Lock the data directory for this process; yield its directory of spooled bodies, emptied.

    :raises StorageFailed: another process has it, or it cannot be used
    """
    try:
        data.mkdir(parents=True, exist_ok=True)
        keep_private(data)
        lock: IO[str] = (data / "lock").open("a")
    except OSError as exc:
        raise _unusable(data, exc) from exc
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StorageFailed(
                f"another gpufaas serves from {data}: stop it, or give this one a directory of its own with --data"
            ) from None
        spool = data / "spool"
        try:
            spool.mkdir(exist_ok=True)
            for left in spool.iterdir():
                left.unlink()
        except OSError as exc:
            raise _unusable(data, exc) from exc
        yield spool


def _unusable(data: Path, exc: OSError) -> StorageFailed:
    return StorageFailed(
        f"the data directory {data} cannot be used ({exc.strerror}): make it writable, or name another with --data"
    )


def credentials_of(options: FrontOptions) -> Credentials | None:
    """Return the user and password to ask for, made if need be; None: ask for none."""
    if options.auth == "off":
        return None
    if options.auth_dir is None:
        make_credentials(auth_dir_of(options))
    return read_credentials(auth_dir_of(options))


def auth_dir_of(options: FrontOptions) -> Path:
    """Return the directory of the user and password."""
    return options.auth_dir or options.data / "auth"


@contextlib.contextmanager
def login_offered(options: FrontOptions, credentials: Credentials | None) -> Iterator[None]:
    """Say how to log in, or that nobody has to; clients of this user on this machine need not until the block ends."""
    if credentials is None:
        said = f"! anyone who reaches {options.host}:{options.port}, functions too, can deploy code: --auth is off"
        print(said, file=sys.stderr, flush=True)
        yield
        return
    user, file = credentials.user, shlex.quote(str(auth_dir_of(options) / PASSWORD_FILE))
    print(f"✓ auth       user {user}, password in {file}: gpufaas finds it; for faas-cli:")
    print(f"             cat {file} | faas-cli login -u {user} --password-stdin -g {options.url}", flush=True)
    urls = [options.url, *([f"http://[::1]:{options.port}"] if options.host == "::" else [])]
    with contextlib.ExitStack() as stack:
        for url in urls:
            stack.enter_context(local_login.offered(url, user, credentials.password))
        yield
