"""
Building a function: from the author's folder to a bundle and its weights.

::

    build/NAME/                    the template, with the author's folder over its handler folder (OpenFaaS's layout)
        function/                  handler.py …, and what build.py made
        site/                      requirements that are not provided
        gpufaas.json               the manifest
        bundle.tar                 all of these but the weights; reproducible, so its digest names the function
        .gpufaas-build.json        what it was built from: building the same again does nothing

build.py runs in this Python environment; packages are chosen for that of the nodes (`build_target`).
"""

import hashlib
import io
import os
import platform
import shutil
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from gpufaas_cli.build_target import BuildTarget, this_python
from gpufaas_cli.handler_check import check_handler
from gpufaas_cli.locks import LOCK, Lock
from gpufaas_cli.requirement_files import Requirements, read_requirements
from gpufaas_cli.requirements import (
    RESERVED,
    check_provided,
    find_lock,
    install_missing,
    installed_version,
    settle,
)
from gpufaas_cli.source_files import NOT_HANDLER, Ignored, LeavesOut, copy_tree, find_extra, is_cache, walk
from gpufaas_cli.stack import FUNCTION_NAME
from gpufaas_cli.subprocess_lines import run_shown
from gpufaas_cli.weights import WEIGHTS, is_pickled
from gpufaas_core.bundle import FUNCTION_DIR, MANIFEST, SITE_DIR, Manifest, WeightsFile
from gpufaas_core.environment import misfits
from gpufaas_core.errors import InvalidSpec, StorageFailed
from gpufaas_core.files import FileIdentity, identity
from gpufaas_core.units import MiB, Seconds
from gpufaas_templates import Template, find_template

ALLOW_PICKLE: Final = "gpufaas.allow-pickle"
BUNDLE: Final = "bundle.tar"
_STAMP: Final = ".gpufaas-build.json"
_FORMAT: Final = 3
"""Part of what a build depends on: raise it when this module makes other bundles from the same folder."""

_NOT_PACKED: Final = frozenset(("template.yml", "meta.json", "Dockerfile", MANIFEST))
_STAT_FROM: Final = 16 * MiB
"""Inputs from this size on are compared by their identity: hashing 500 MB at each `up` takes longer than the rest."""
_BUILD_THREADS: Final = "1"
"""Fixed, since sums in another order give other weights, and so another digest; one, since two threads on a busy
machine took 48 s for what one does in 6. A build that needs more asks: ``build_args: {OMP_NUM_THREADS: "8"}``."""


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """What to build. `handler` and `copy` are relative to `root`; `build_root` and `template_dirs` are not."""

    name: str
    lang: str
    handler: Path
    build_args: Mapping[str, str] = field(default_factory=dict)
    """Environment of build.py."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    copy: Sequence[Path] = ()
    """Files and folders that are put beside handler.py, under the path that they have here. They lie inside `root`."""
    build_root: Path = Path("build")
    template_dirs: Sequence[Path] = (Path("template"),)
    root: Path = Path()
    target: Callable[[], BuildTarget] = this_python
    """What it is built for; asked only where there are requirements."""

    @property
    def allows_pickle(self) -> bool:
        return self.annotations.get(ALLOW_PICKLE, "").strip().lower() in ("true", "1", "yes")


@dataclass(frozen=True, slots=True)
class Built:
    name: str
    digest: str
    """sha256 of `bundle_tar`."""
    bundle_tar: Path
    manifest: Manifest
    weights: list[tuple[WeightsFile, Path]]
    """Each file of weights, and where it is now."""
    up_to_date: bool
    """It was built before from the same inputs: nothing was done."""
    seconds: Seconds


class _Output(msgspec.Struct, frozen=True):
    """A file of a finished build."""

    path: str
    identity: FileIdentity

    @classmethod
    def of(cls, folder: Path, path: Path) -> "_Output":
        return cls(path.relative_to(folder).as_posix(), identity(path.stat()))


class _Stamp(msgspec.Struct, frozen=True):
    """What lies beside a finished build."""

    inputs: str
    digest: str
    manifest: Manifest
    outputs: tuple[_Output, ...]


def build(request: BuildRequest, progress: Callable[[str], None] = lambda _: None) -> Built:
    """
    Build *request* in ``build_root/NAME``, and describe each step to *progress*, a line at a time.

    :raises InvalidSpec: something of the author's is missing, malformed, refused or failed; says what and where
    :raises StorageFailed: the build folder cannot be written
    """
    began = time.perf_counter()
    making = _Build.of(request, progress)
    inputs = making.hash_inputs()
    stamp = making.earlier(inputs)
    up_to_date = stamp is not None
    folder = making.folder
    if stamp is None:
        try:
            stamp = making.make(inputs)
        except OSError as exc:
            what = f"{exc.filename or folder}: {exc.strerror or exc}"
            raise StorageFailed(f"cannot build in {folder}: {what}: check its disk and rights") from exc
    return Built(
        name=request.name,
        digest=stamp.digest,
        bundle_tar=folder / BUNDLE,
        manifest=stamp.manifest,
        weights=[
            (each, making.function / Path(each.path).relative_to(FUNCTION_DIR)) for each in stamp.manifest.weights
        ],
        up_to_date=up_to_date,
        seconds=time.perf_counter() - began,
    )


def check_name(name: str) -> None:
    if not FUNCTION_NAME.fullmatch(name):
        raise InvalidSpec(
            f"{name!r} cannot be the name of a function: use lower-case letters, digits and dashes, 63 at most, "
            "not beginning or ending with a dash"
        )


@dataclass(frozen=True)
class _Build:
    """A request whose sources were found and checked."""

    request: BuildRequest
    progress: Callable[[str], None]
    template: Template
    handler: Path
    copies: list[tuple[Path, Path]]
    requirements: list[Requirements]
    target: BuildTarget | None
    """None: there are no requirements."""

    @classmethod
    def of(cls, request: BuildRequest, progress: Callable[[str], None]) -> "_Build":
        check_name(request.name)
        template = find_template(request.lang, request.template_dirs)
        if template.kind is None:
            raise InvalidSpec(
                f"template {template.name} makes container images only: use one of kind model, http or server"
            )
        handler = request.root / request.handler
        _check_folder(handler, request)
        if template.kind != "server":
            check_handler(handler / "handler.py", template.kind, template.name)
        copies = [find_extra(path, request.root) for path in request.copy]
        places = (template.path, handler) if template.kind == "server" else (handler,)
        requirements = [read_requirements(place / "requirements.txt") for place in places]
        target = request.target() if any(each.asks for each in requirements) else None
        return cls(request, progress, template, handler, copies, requirements, target)

    @property
    def folder(self) -> Path:
        return self.request.build_root / self.request.name

    @property
    def function(self) -> Path:
        return self.folder / self.template.handler_folder

    # --- what it depends on ---

    def hash_inputs(self) -> str:
        request, template, target = self.request, self.template, self.target
        provided = [check_provided(each, target) for each in self.requirements] if target is not None else []
        settings = {
            "format": _FORMAT,
            "kind": template.kind,
            "template": template.name,
            "folder": template.handler_folder,
            "build_args": sorted(request.build_args.items()),
            "allow_pickle": request.allows_pickle,
            "python": [platform.python_version(), platform.machine()],
            "provided": [[name, installed_version(name)] for name in sorted(RESERVED)],
            "requirements": sorted((name, version or "") for each in provided for name, version in each.looked_at),
        }
        hashed = hashlib.sha256(msgspec.json.encode(settings))
        sources: list[tuple[str, Path, LeavesOut]] = [
            ("template", template.path, is_cache),
            ("handler", self.handler, Ignored(self.handler, NOT_HANDLER)),
        ]
        sources += [(f"copy:{place.as_posix()}", source, Ignored(source)) for source, place in self.copies]
        sources += [("required", path, Ignored(path)) for each in self.requirements for path in each.named]
        for label, source, leaves_out in sources:
            for file in walk(source, leaves_out):
                relative = file.relative_to(source).as_posix() if file != source else ""
                hashed.update(f"\0{label}\0{relative}\0".encode(errors="surrogateescape"))
                status = file.stat()
                hashed.update(b"x" if status.st_mode & 0o100 else b"-")
                if status.st_size >= _STAT_FROM:
                    hashed.update(f"{identity(status)}".encode())
                else:
                    hashed.update(hashlib.sha256(file.read_bytes()).digest())
        return hashed.hexdigest()

    def earlier(self, inputs: str) -> _Stamp | None:
        """Return the stamp of an earlier build from the same *inputs*, if it is whole and runs on the target."""
        try:
            stamp = msgspec.json.decode((self.folder / _STAMP).read_bytes(), type=_Stamp)
            whole = all(_Output.of(self.folder, self.folder / each.path) == each for each in stamp.outputs)
        except (OSError, msgspec.DecodeError):
            return None
        needs = stamp.manifest.needs  # the platform may have changed since, or be another one
        unfit = needs and self.target and any(misfits(needs, each) for each in self.target.environments)
        return stamp if whole and stamp.inputs == inputs + self._locked() and not unfit else None

    def _locked(self) -> str:
        file = self.handler / LOCK
        return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""

    # --- making it ---

    def make(self, inputs: str) -> _Stamp:
        request, template, folder, function = self.request, self.template, self.folder, self.function
        assert template.kind is not None
        if folder.exists():
            shutil.rmtree(folder)
        copy_tree(template.path, folder)
        copy_tree(self.handler, function, Ignored(self.handler, NOT_HANDLER))
        for source, place in self.copies:
            copy_tree(source, function / place, Ignored(source))
        lock = self._install()
        if (self.handler / "build.py").is_file():
            self._run_build_script()
        weights = []
        for path in _find_weights(function, request):
            self.progress(f"hashing {path.name}")
            weights.append((_hash_weights(function, path), path))
        manifest = Manifest(
            kind=template.kind,
            template=template.name,
            weights=tuple(each for each, _ in weights),
            requirements=tuple(map(str, lock.missing)),
            allow_pickle=request.allows_pickle,
            command=template.command,
            workdir=template.workdir,
            port=template.port,
            env=template.env,
            needs=lock.needs,
        )
        self.progress("packing")
        _write_manifest(folder, manifest)
        digest = _pack(folder, self._roots(), {path for _, path in weights})
        outputs = (folder / BUNDLE, *(path for _, path in weights))
        stamp = _Stamp(inputs + self._locked(), digest, manifest, tuple(_Output.of(folder, path) for path in outputs))
        (folder / _STAMP).write_bytes(msgspec.json.encode(stamp))
        return stamp

    def _install(self) -> Lock:
        """Install in site/ what the target does not provide; return it, and what is needed of the nodes."""
        if self.target is None:
            return Lock()
        site, file = self.folder / SITE_DIR, self.handler / LOCK
        lock = find_lock(self.requirements, self.target, file, self.progress)
        if lock.missing:
            install_missing(lock, self.requirements, self.target, site, self.progress)
        return settle(lock, self.requirements, self.target, site, file)

    def _run_build_script(self) -> None:
        """Run the author's build.py in the folder of its outputs, reproducibly as far as we can make it."""
        self.progress("running build.py")
        paths = [str((self.folder / SITE_DIR).absolute()), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": _BUILD_THREADS,
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
            **self.request.build_args,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        run_shown(
            [sys.executable, "build.py"], self.function, environment, self.progress,
            lambda status: f"{self.handler / 'build.py'} ended with status {status}",
        )  # fmt: skip

    def _roots(self) -> dict[str, Path]:
        """Return the files and folders that are packed, by their names in the bundle."""
        template, site = self.template, self.folder / SITE_DIR
        if template.workdir != ".":
            return {FUNCTION_DIR: self.function, SITE_DIR: site}
        # A server that runs beside its template's files finds all under the names that they have in an image.
        roots = {SITE_DIR: site, template.handler_folder: self.function}
        for path in sorted(template.path.iterdir()):
            if path.name not in {*_NOT_PACKED, *roots} and not is_cache(path):
                roots[path.name] = self.folder / path.name
        return roots


def _check_folder(handler: Path, request: BuildRequest) -> None:
    name = request.name
    if not handler.exists():
        raise InvalidSpec(f"handler folder {handler} of function {name} does not exist: correct `handler:` of it")
    if not handler.is_dir():
        raise InvalidSpec(f"handler {handler} of function {name} is not a folder: name the one that has handler.py")
    if not (handler / "handler.py").is_file():
        raise InvalidSpec(f"{handler} has no handler.py, which function {name} needs: see `gpufaas new --help`")
    build_root = request.build_root.resolve()
    if build_root.is_relative_to(handler.resolve()) and build_root != handler.resolve() / "build":
        raise InvalidSpec(f"{build_root} lies inside the handler folder {handler}: build elsewhere, or in its build/")


def _find_weights(function: Path, request: BuildRequest) -> Iterable[Path]:
    """:raises InvalidSpec: there are pickled weights, and the author did not accept that"""
    for path in walk(function):
        if path.name.endswith(WEIGHTS):
            yield path
        elif is_pickled(path):
            if not request.allows_pickle:
                raise InvalidSpec(
                    f"{path.relative_to(function)} of function {request.name} is a pickle, which runs any code that "
                    "its maker put in: save it as .safetensors (safetensors.torch.save_file), .pt2 or .onnx; or, if "
                    f'you trust its maker, set the annotation {ALLOW_PICKLE}: "true"'
                )
            yield path


def _hash_weights(function: Path, path: Path) -> WeightsFile:
    with open(path, "rb", buffering=0) as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return WeightsFile(f"{FUNCTION_DIR}/{path.relative_to(function).as_posix()}", sha256, path.stat().st_size)


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    written = msgspec.to_builtins(manifest)
    del written["data_bytes"]
    if manifest.needs is None:
        del written["needs"]
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(written)) + b"\n")


def _pack(folder: Path, roots: Mapping[str, Path], left_out: set[Path]) -> str:
    """Write the bundle; return its digest. The same files give the same bytes: no times, no owners, names sorted."""
    with open(folder / BUNDLE, "w+b") as file:
        with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as tar:
            _add(tar, MANIFEST, folder / MANIFEST)
            for name, source in roots.items():
                for path in walk(source) if source.exists() else ():
                    if path not in left_out:
                        _add(tar, name if path == source else f"{name}/{path.relative_to(source).as_posix()}", path)
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()


def _add(tar: tarfile.TarFile, name: str, path: Path) -> None:
    content = path.read_bytes()
    member = tarfile.TarInfo(name)
    member.size = len(content)
    member.mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
    tar.addfile(member, io.BytesIO(content))
