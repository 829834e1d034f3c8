"""
`SecretFiles`: secrets as files, and for each revision of a function a directory with the secrets that it asks for
(ports: `gpufaas_gateway.ports.SecretStore`, `gpufaas_gpu_manager.settings.Secrets`).

::

    secrets/NAMESPACE/NAME          the values; 0600, in directories 0700
    secret-mounts/ID/NAME           copies for workers of one revision, made when one starts, gone with the revision

They are copies because a container is given a directory and cannot follow a link out of it. A file is written aside and
renamed into place, so that a reader sees the old value or the new one.
"""

import logging
import os
import shutil
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gpufaas_core.errors import NameTaken, StorageFailed, UnknownName
from gpufaas_core.files import ASIDE, replace_file
from gpufaas_core.model import FunctionId

log = logging.getLogger(__name__)


class SecretFiles:
    """
    Makes its directories at once, and removes mounts of an earlier run. Blocks; may be called from any thread. Every
    method may raise `StorageFailed`.
    """

    def __init__(self, root: Path, mounts: Path) -> None:
        self._root = root
        self._mounts = mounts
        self._lock = threading.Lock()
        self._mounted: dict[FunctionId, tuple[str, tuple[str, ...], int, int]] = {}
        with self._translated():
            _private(root)
            if mounts.exists():
                shutil.rmtree(mounts)
            _private(mounts)
            for left in root.glob(f"*/{ASIDE}*"):
                left.unlink()

    def names(self, namespace: str) -> list[str]:
        with self._lock, self._translated():
            return self._names(namespace)

    def create(self, namespace: str, name: str, value: bytes) -> None:
        with self._lock, self._translated():
            path = self._path(namespace, name)
            if path.exists():
                raise NameTaken(f"secret {name} in {namespace} exists: update it with PUT, or remove it first")
            _private(path.parent)
            replace_file(path, value)
        log.info("secret.created name=%s namespace=%s", name, namespace)

    def update(self, namespace: str, name: str, value: bytes) -> None:
        with self._lock, self._translated():
            path = self._found(namespace, name)
            replace_file(path, value)
            for mount, mode, uid in self._mounts_of(namespace, name):
                replace_file(mount, value, mode, uid)
        log.info("secret.updated name=%s namespace=%s", name, namespace)

    def put(self, namespace: str, name: str, value: bytes) -> None:
        """Do `update`, or `create` if there is none."""
        try:
            self.update(namespace, name, value)
        except UnknownName:
            self.create(namespace, name, value)

    def keep_only(self, known: Collection[tuple[str, str]]) -> None:
        """Remove all but *known*, which are namespaces and names."""
        with self._lock, self._translated():
            for namespace in [each.name for each in self._root.iterdir() if each.is_dir()]:
                for name in self._names(namespace):
                    if (namespace, name) not in known:
                        self._remove(namespace, name)
                        log.info("secret.removed name=%s namespace=%s", name, namespace)

    def remove(self, namespace: str, name: str) -> None:
        with self._lock, self._translated():
            self._remove(namespace, name)
        log.info("secret.removed name=%s namespace=%s", name, namespace)

    def drop(self, namespace: str) -> None:
        with self._lock, self._translated():
            for name in self._names(namespace):
                self._remove(namespace, name)
            if (self._root / namespace).exists():
                (self._root / namespace).rmdir()

    def mount(
        self, function: FunctionId, namespace: str, names: Sequence[str], *, for_container: bool = False, uid: int = 0
    ) -> Path:
        """
        Return the directory of this revision, with the secrets *names* of *namespace* as files. They follow updates
        until `unmount`. A secret that was removed since the deployment is missing.

        :param for_container: its user is another than ours: the files are readable to all, in a directory that only
            bind mounts reach
        :param uid: of its workers, which also is their gid, and owns all of it; 0: it is that of this process
        """
        mode = 0o444 if for_container else 0o600
        directory = self._directory(function)
        with self._lock, self._translated():
            self._mounted[function] = (namespace, tuple(names), mode, uid)
            directory.mkdir(exist_ok=True)
            directory.chmod(0o755 if for_container else 0o700)
            if uid:
                os.chown(directory, uid, uid)
            for name in names:
                try:
                    value = self._path(namespace, name).read_bytes()
                except FileNotFoundError:
                    log.warning("secret.missing function=%s name=%s", function, name)
                    (directory / name).unlink(missing_ok=True)
                else:
                    replace_file(directory / name, value, mode, uid)
        return directory

    def unmount(self, function: FunctionId) -> None:
        """Remove the directory: the last worker of this revision has ended."""
        with self._lock, self._translated():
            if self._mounted.pop(function, None) is not None:
                shutil.rmtree(self._directory(function), ignore_errors=True)

    # --- with the lock held ---

    def _path(self, namespace: str, name: str) -> Path:
        return self._root / namespace / name

    def _directory(self, function: FunctionId) -> Path:
        return self._mounts / function  # NAME.NAMESPACE@REVISION: names are DNS labels, revisions are hex

    def _names(self, namespace: str) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self._root / namespace) if not name.startswith("."))
        except FileNotFoundError:
            return []

    def _found(self, namespace: str, name: str) -> Path:
        path = self._path(namespace, name)
        if not path.exists():
            raise UnknownName(f"secret {name} in {namespace} does not exist: create it with POST")
        return path

    def _remove(self, namespace: str, name: str) -> None:
        self._found(namespace, name).unlink()
        for mount, _, _ in self._mounts_of(namespace, name):
            mount.unlink(missing_ok=True)

    def _mounts_of(self, namespace: str, name: str) -> list[tuple[Path, int, int]]:
        return [
            (self._directory(function) / name, mode, uid)
            for function, (of, names, mode, uid) in self._mounted.items()
            if of == namespace and name in names
        ]

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise StorageFailed(
                f"secrets in {self._root} cannot be read or written ({exc.strerror}): "
                "make the data directory writable, or free space on its disk"
            ) from exc


def _private(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
