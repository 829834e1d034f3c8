"""Tars of a function's files that are the same wherever, whenever and by whomever they are packed."""

import contextlib
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from gpufaas_core.files import FileIdentity, hash_file, identity


class Output(msgspec.Struct, frozen=True):
    """A file of a finished build, which is uploaded."""

    path: str
    """Relative to the folder of the record that names it."""
    identity: FileIdentity
    sha256: str

    def is_whole(self, folder: Path) -> bool:
        """Whether it is as the build left it."""
        with contextlib.suppress(OSError):
            return identity(os.stat(os.path.normpath(folder / self.path))) == self.identity
        return False


def pack(target: Path, files: Mapping[str, Path]) -> str:
    """
    Write *files*, by their names in it, in this order, to the tar *target*; return its sha256. It has no times and no
    owners, and of modes only whether the owner may execute a file.
    """
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, path in files.items():
            with open(path, "rb") as content:
                member = tar.gettarinfo(fileobj=content)
                plain = tarfile.TarInfo(name)
                plain.size = member.size
                plain.mode = 0o755 if member.mode & 0o100 else 0o644
                tar.addfile(plain, content)
    return hash_file(target)
