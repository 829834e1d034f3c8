"""Artifacts, bundles and disks for tests."""

import contextlib
import hashlib
import io
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from gpufaas_cache_manager.artifacts import ArtifactStore


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def put(store: ArtifactStore, content: bytes) -> str:
    """Put *content* into *store*; return its digest."""
    digest = sha256(content)
    with store.writer(digest) as writer:
        writer.write(content)
    return digest


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
