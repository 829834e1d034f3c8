"""
Bundles as directories: the tar of a function's code, extracted once, with its parts and its weights linked in.

::

    ROOT/DIGEST/gpufaas.json · function/ · site        one per bundle; complete, since it was renamed into place
    ROOT/../parts/SHA256/                              one per part: packages, or what a build.py made
    ROOT/../compiled/DIGEST/                           what its workers compile for the next ones

``site`` is a link to its part. What build.py made, and the weights, are hard links to their part and their artifacts
(symbolic ones across file systems): functions with the same weights share one file, and one page cache. Everything here
can be made again from the artifacts (`trees`).
"""

import contextlib
import os
import secrets
import tarfile
import threading
from pathlib import Path, PurePosixPath

import msgspec
from msgspec.structs import replace

from gpufaas_cache_manager.artifacts import ArtifactStore, check_digest, storage_errors
from gpufaas_cache_manager.trees import ASIDE, MADE_BY, UNREADABLE, BundleLimits, Member, Trees, check_size, files_in
from gpufaas_core.bundle import FUNCTION_DIR, MANIFEST, SITE_DIR, Manifest, Part, WeightsFile
from gpufaas_core.errors import CorruptArtifact, InvalidSpec, UnknownArtifact
from gpufaas_core.files import remove_tree
from gpufaas_core.units import Bytes

_CODE = (".py", ".pyc", ".pyi")


class BundleStore:
    """
    The bundles under *root*, made from *artifacts*. Safe to use from several threads; one process per *root*.

    :raises StorageFailed: *root* cannot be made or written
    """

    def __init__(self, root: Path, artifacts: ArtifactStore, limits: BundleLimits = BundleLimits()) -> None:  # noqa: B008
        self._limits = limits
        self._artifacts = artifacts
        self._manifests: dict[str, Manifest] = {}
        self._compiled = root.parent / "compiled"
        self._linking = threading.Lock()
        self._trees = Trees(root, "bundle", self._limits)
        self._parts = Trees(root.parent / "parts", "part", self._limits)
        with storage_errors(root):
            for each in self._compiled.glob("*"):
                if not (root / each.name).exists():
                    remove_tree(each)

    def install(self, digest: str) -> Path:
        """
        Return the directory of bundle *digest*, ready to start workers from; extracts it when it is not there yet.

        Cheap when it is: one look at each part, and at each file of weights.

        :raises UnknownArtifact: the bundle, parts or weights of it are not here: upload them
        :raises CorruptArtifact: one of them is damaged: upload it again; names the file
        :raises InvalidSpec: the artifact is not a bundle
        :raises StorageFailed: no room, or not writable
        """
        manifest = self.manifest(digest)
        directory = self._trees.root / digest
        for part in manifest.parts:
            self._part(part, directory)
        for weights in manifest.weights:
            self._link(weights, directory)
        return directory

    def manifest(self, digest: str) -> Manifest:
        """Return the manifest of bundle *digest*; extracts it when needed. Raises as `install`."""
        known = self._manifests.get(digest)
        directory = self._trees.root / digest
        if known is not None and directory.is_dir():
            return known
        if not directory.is_dir():
            self._trees.extract(self._artifacts.path(digest), digest, lambda aside: self._finish(aside, directory))
        manifest = _read_manifest(directory, self._limits.manifest)
        self._manifests[digest] = manifest
        return manifest

    def named_by(self, digest: str) -> tuple[Part | WeightsFile, ...]:
        """Return the artifacts that bundle *digest* names; they need not be here. Raises as `manifest`."""
        manifest = None
        if not (self._trees.root / digest).is_dir():
            with contextlib.suppress(*UNREADABLE), tarfile.open(self._artifacts.path(digest), tarinfo=Member) as tar:
                first = tar.next()
                if first is not None and first.name == MANIFEST and (file := tar.extractfile(first)) is not None:
                    manifest = _decode(file.read(self._limits.manifest + 1), self._limits.manifest)
        manifest = manifest or self.manifest(digest)
        return (*manifest.parts, *manifest.weights)

    def compiled(self, digest: str) -> Path:
        """Return the directory, which may not be there yet, for what workers of bundle *digest* compile."""
        return self._compiled / digest

    def digests(self) -> list[str]:
        """Return the bundles and parts that are extracted, in no order."""
        return [*self._trees.digests(), *self._parts.digests()]

    def remove(self, digest: str) -> None:
        """Remove the bundle or part *digest*; artifacts stay. No error when it is not there."""
        self._manifests.pop(digest, None)
        self._trees.remove(digest)
        self._parts.remove(digest)
        with storage_errors(self._compiled):
            remove_tree(self.compiled(digest))

    def _finish(self, directory: Path, named: Path) -> None:
        """Add its parts to a bundle that is being extracted in *directory*, and will be *named*; check it."""
        manifest = _manifest_in(directory, self._limits.manifest)
        if manifest.parts and any(each.is_symlink() for each in directory.rglob("*")):
            # What follows would write through them into a part, which is of others, too.
            raise InvalidSpec("the bundle has parts, and links among its files: make bundles with `gpufaas build`")
        for part in sorted(manifest.parts, key=lambda each: each.name):  # site last: nothing is written into it
            tree = self._part(part, named)
            if part.name == "site":
                (directory / SITE_DIR).symlink_to(f"../../{tree.parent.name}/{tree.name}")
                continue
            for file in files_in(tree):
                place = directory / file.relative_to(tree)
                if place.name != MADE_BY:
                    place.parent.mkdir(parents=True, exist_ok=True)
                    os.link(file, place)
        for weights in manifest.weights:
            (directory / weights.path).parent.mkdir(parents=True, exist_ok=True)
        _read_manifest(directory, self._limits.manifest)

    def _part(self, part: Part, directory: Path) -> Path:
        """Return the directory of *part*, of the bundle in *directory*; extracts it when it is not there yet."""
        tree = self._parts.root / part.sha256
        if not tree.is_dir():
            self._parts.extract(self._artifact(part.sha256, f"part {part.name}", directory), part.sha256)
        return tree

    def _artifact(self, digest: str, what: str, directory: Path) -> Path:
        try:
            return self._artifacts.path(digest)
        except (CorruptArtifact, UnknownArtifact) as exc:
            raise type(exc)(f"{what} of the function in {directory}: {exc}") from exc

    def _link(self, weights: WeightsFile, directory: Path) -> None:
        artifact = self._artifact(weights.sha256, f"weights {weights.path}", directory)
        if (found := artifact.stat().st_size) != weights.bytes:
            raise InvalidSpec(
                f"{MANIFEST} of the bundle says {weights.bytes} bytes of {weights.path}, and its weights have {found}: "
                "build the function again"
            )
        place = directory / weights.path
        with contextlib.suppress(FileNotFoundError):
            if os.path.samefile(place, artifact):
                return
        aside = place.with_name(f"{ASIDE}{secrets.token_hex(4)}")
        with storage_errors(place), self._linking:
            place.parent.chmod(0o755)
            try:
                with contextlib.suppress(OSError):  # of another user, or on a disk that is read-only
                    artifact.chmod(0o444)  # an earlier release made it writable
                try:
                    os.link(artifact, aside)
                except OSError:
                    os.symlink(artifact.absolute(), aside)
                os.replace(aside, place)
            finally:
                place.parent.chmod(0o555)


def _manifest_in(directory: Path, limit: Bytes) -> Manifest:
    """:raises InvalidSpec: there is no manifest"""
    try:
        with (directory / MANIFEST).open("rb") as file:
            return _decode(file.read(limit + 1), limit)
    except (FileNotFoundError, IsADirectoryError):
        raise InvalidSpec(f"bundle without {MANIFEST}: make bundles with `gpufaas build`") from None


def _decode(content: bytes, limit: Bytes) -> Manifest:
    """:raises InvalidSpec: *content* is too large, or no manifest that this release can read"""
    check_size(len(content), limit)
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise InvalidSpec(f"{MANIFEST} of the bundle is malformed: {exc}") from exc
    if manifest.version not in (1, 2):
        raise InvalidSpec(
            f"the bundle is of version {manifest.version}, this platform knows 1 and 2: update the platform"
        )
    for digest in (*(each.sha256 for each in manifest.parts), *(each.sha256 for each in manifest.weights)):
        check_digest(digest)
    for weights in manifest.weights:
        parts = PurePosixPath(weights.path).parts
        if len(parts) < 2 or parts[0] != FUNCTION_DIR or ".." in parts or "\0" in weights.path:
            raise InvalidSpec(f"{MANIFEST} names weights {weights.path!r}: a path below {FUNCTION_DIR}/ is expected")
    return manifest


def _read_manifest(directory: Path, limit: Bytes) -> Manifest:
    """:raises InvalidSpec: there is no manifest, or it says something impossible"""
    manifest = _manifest_in(directory, limit)
    others = {directory / each.path for each in manifest.weights}
    data = [each for each in files_in(directory / FUNCTION_DIR) if each not in others and each.suffix not in _CODE]
    manifest = replace(manifest, data_bytes=sum(each.stat().st_size for each in data))
    for weights in manifest.weights:
        if weights.bytes < 0 or (directory / weights.path).is_dir():
            raise InvalidSpec(f"{MANIFEST} names weights {weights.path!r} of {weights.bytes} bytes: a file is expected")
    if manifest.kind == "server":
        # Its command may come from the function's envProcess: the node knows both.
        workdir = PurePosixPath(manifest.workdir)
        if workdir.is_absolute() or ".." in workdir.parts or not (directory / workdir).is_dir():
            raise InvalidSpec(f"{MANIFEST} names the directory {manifest.workdir!r}, which is not in the bundle")
        return manifest
    if not all(part.isidentifier() for part in manifest.handler.split(".")):
        raise InvalidSpec(f"{MANIFEST} names the handler {manifest.handler!r}: a module's name is expected")
    module = directory / FUNCTION_DIR / Path(*manifest.handler.split("."))
    if not (module.with_name(module.name + ".py").is_file() or (module / "__init__.py").is_file()):
        raise InvalidSpec(f"the bundle has no {FUNCTION_DIR}/{manifest.handler}.py: build it again")
    return manifest
