"""Artifacts, bundles and disks for tests."""

import atexit
import contextlib
import functools
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec
import pytest

from gpufaas_cache_manager import artifacts
from gpufaas_cache_manager.artifacts import ArtifactStore

MODES_HOLD: Final = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
"""What to begin a command with, so that it may not write where modes forbid that: root may, without these."""


@functools.cache
def open_root() -> Path:
    """
    Return the directory that platforms of tests open to their functions with ``--bind``: what a test and a function
    tell each other by files lies below it, under the same path for both. It ends with the process.
    """
    root = _opened(tempfile.mkdtemp(prefix="gpufaas-open-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def open_folder() -> Path:
    """Return a new directory below `open_root`; each function may write there, whatever its uid."""
    return _opened(tempfile.mkdtemp(dir=open_root()))


def open_file(name: str) -> Path:
    """Return a new empty file below `open_root`, to which functions of several uids may append."""
    file = open_folder() / name
    file.touch()
    file.chmod(0o666)
    return file


def _opened(folder: str) -> Path:
    os.chmod(folder, 0o777)
    return Path(folder)


def as_user(home: Path, user: int) -> list[str]:
    """
    Return what root begins a command with, to run it as *user*, who may not enter /root, but for this checkout and its
    Python where they lie there; *home* is the user's home directory.
    """
    kept = [each for each in (sys.base_prefix, str(Path(__file__).parents[1])) if each.startswith("/root/")]
    script = "mount -t tmpfs -o mode=755 none /root" if kept else ":"
    for number, each in enumerate(kept):
        (hold := home / f"kept-{number}").mkdir(exist_ok=True)
        script = f"mount --bind {each} {hold} && {script} && mkdir -p {each} && mount --bind {hold} {each}"
    return ["unshare", "--mount", "sh", "-ec", f'{script} && exec "$@"', "sh", "setpriv", f"--reuid={user}",
            f"--regid={user}", "--clear-groups", "env", f"HOME={home}"]  # fmt: skip


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def put(store: ArtifactStore, content: bytes) -> str:
    """Put *content* into *store*; return its digest."""
    digest = sha256(content)
    with store.writer(digest) as writer:
        writer.write(content)
    return digest


def hashed_files(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return a list that gets the files that stores read from now on, to hash them."""
    read: list[Path] = []
    hash_file = artifacts.hash_file

    def hashing(path: Path) -> str:
        read.append(path)
        return hash_file(path)

    monkeypatch.setattr(artifacts, "hash_file", hashing)
    return read


def opened_up(path: Path) -> Path:
    """Return *path*, an artifact or a part of a bundle, which its owner may write from now on."""
    path.chmod(path.stat().st_mode | 0o200)
    return path


def taken_for_right(path: Path) -> None:
    """Have stores take the artifact *path* for what it was, as after a fault of the disk or of memory."""
    path.with_name(f"{path.name}.json").write_bytes(msgspec.json.encode(artifacts._seen(path.stat())))


def tar_of(files: Mapping[str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return made.getvalue()


@contextlib.contextmanager
def small_disk(at: Path, size: str) -> Iterator[Path]:
    """Mount a file system of *size* ("24m") at *at*, for as long as the context lasts. Skips without the right to."""
    at.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(at)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting a small file system needs root (CAP_SYS_ADMIN): {mounted.stderr.strip()}")
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)
