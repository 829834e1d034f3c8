"""
Building a function: from the author's folder to a bundle and its weights.

::

    build/NAME/                    links to all that a worker finds in the bundle
        function/                  the template's handler folder, over it the author's: handler.py …; what build.py made
        site/                      requirements that are not provided
        gpufaas.json               the manifest
        bundle.tar                 this and the code; reproducible, so its digest names the function
        .gpufaas-build.json        what it was built from: building the same again does nothing
    build/.parts/                  what was installed and what build.py made, by what it depends on (`built_parts`)

build.py runs in this Python environment; packages are chosen for that of the nodes (`build_target`).
"""

import contextlib
import importlib.metadata
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from gpufaas_cli.author_code import SCRIPT, check_handler, inputs_of_script
from gpufaas_cli.build_target import BuildTarget, this_python
from gpufaas_cli.built_parts import BuiltPart, BuiltParts, Made, Output, key_of, pack
from gpufaas_cli.locks import LOCK, Lock, shown
from gpufaas_cli.requirement_files import Requirements, read_requirements
from gpufaas_cli.requirements import RESERVED, find_lock, install_missing, settle
from gpufaas_cli.source_files import (
    NOT_HANDLER,
    Ignored,
    LeavesOut,
    copy_tree,
    find_extra,
    is_cache,
    is_pickled,
    is_weights,
    loads_as_tensors,
    walk,
)
from gpufaas_cli.stack import FUNCTION_NAME
from gpufaas_cli.subprocess_lines import run_shown
from gpufaas_core.bundle import FUNCTION_DIR, MANIFEST, SITE_DIR, Manifest, WeightsFile
from gpufaas_core.errors import InvalidSpec, StorageFailed
from gpufaas_core.files import FileIdentity, hash_file, identity
from gpufaas_core.units import MiB, Seconds
from gpufaas_templates import Template, find_template

ALLOW_PICKLE: Final = "gpufaas.allow-pickle"
BUNDLE: Final = "bundle.tar"
_STAMP: Final = ".gpufaas-build.json"
_FORMAT: Final = 5
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

    @property
    def handler_folder(self) -> Path:
        """:raises InvalidSpec: it is no folder"""
        folder = self.root / self.handler
        if not folder.is_dir():
            why = "is not a folder" if folder.exists() else "does not exist"
            raise InvalidSpec(f"handler folder {folder} of function {self.name} {why}: correct `handler:` of it")
        return folder

    @property
    def copies(self) -> list[tuple[Path, Path]]:
        """What `copy` names, each with its place below the handler folder. Raises what `find_extra` does."""
        return [find_extra(path, self.root) for path in self.copy]


@dataclass(frozen=True, slots=True)
class Built:
    manifest: Manifest
    files: tuple[tuple[str, Path], ...]
    """What is uploaded, with the sha256 of each: the tar of the bundle, those of its parts, its weights."""
    up_to_date: bool
    """Nothing was done, as an earlier build was from the same inputs."""
    seconds: Seconds

    @property
    def digest(self) -> str:
        """sha256 of `bundle_tar`."""
        return self.files[0][0]

    @property
    def bundle_tar(self) -> Path:
        return self.files[0][1]


class _Stamp(msgspec.Struct, frozen=True):
    """What lies beside a finished build."""

    inputs: str
    manifest: Manifest
    outputs: tuple[Output, ...]
    """The bundle, its parts, its weights."""
    keys: tuple[str, ...]
    """The keys of its parts (`BuiltParts`)."""


def build(request: BuildRequest, progress: Callable[[str], None] = lambda _: None) -> Built:
    """
    Build *request* in ``build_root/NAME``, and describe each step to *progress*, a line at a time.

    :raises InvalidSpec: something of the author's is missing, malformed, refused or failed; says what and where
    :raises StorageFailed: the build folder cannot be written
    """
    began = time.perf_counter()
    making = _Build.of(request, progress)
    before, folder = making.earlier(), making.folder
    try:
        inputs = making.hash_inputs()
        stamp = before if before and making.is_up_to_date(before, inputs) else making.make(inputs, before)
    except OSError as exc:
        what = f"{exc.filename or folder}: {exc.strerror or exc}"
        raise StorageFailed(f"cannot build in {folder}: {what}: check its disk and rights") from exc
    return Built(
        manifest=stamp.manifest,
        files=tuple((each.sha256, Path(os.path.normpath(folder / each.path))) for each in stamp.outputs),
        up_to_date=stamp is before,
        seconds=time.perf_counter() - began,
    )


def drop_unused_parts(build_root: Path) -> None:
    """Remove parts in *build_root* that no function there has any more. No build may be running."""
    used = set[str]()
    for each in build_root.glob(f"*/{_STAMP}"):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            used.update(msgspec.json.decode(each.read_bytes(), type=_Stamp).keys)
    BuiltParts(build_root).drop_unused(used)


def check_name(name: str) -> None:
    if not FUNCTION_NAME.fullmatch(name):
        raise InvalidSpec(
            f"{name!r} cannot be the name of a function: use lower-case letters, digits and dashes, 63 at most, "
            "not beginning or ending with a dash"
        )


def _of_its_handler(path: Path, folder: bool = False) -> bool:
    """Leave out of a template what is of its own handler only: a sample input."""
    return path.name == "sample.json" or is_cache(path, folder)


@dataclass(frozen=True)
class _Build:
    """A request whose sources were found and checked."""

    request: BuildRequest
    progress: Callable[[str], None]
    template: Template
    handler: Path

    @classmethod
    def of(cls, request: BuildRequest, progress: Callable[[str], None]) -> "_Build":
        check_name(request.name)
        template = find_template(request.lang, request.template_dirs)
        if template.kind is None:
            raise InvalidSpec(
                f"template {template.name} makes container images only: use one of kind model, http or server"
            )
        handler = request.handler_folder
        _check_folder(handler, request)
        if template.kind != "server":
            check_handler(handler / "handler.py", template.kind, template.name)
        return cls(request, progress, template, handler)

    @property
    def folder(self) -> Path:
        return self.request.build_root / self.request.name

    @cached_property
    def function(self) -> str:
        """The folder of the handler in the bundle."""
        return self.template.handler_folder if self.template.workdir == "." else FUNCTION_DIR

    @cached_property
    def parts(self) -> BuiltParts:
        return BuiltParts(self.request.build_root)

    # --- what it depends on ---

    @cached_property
    def files(self) -> dict[str, Path]:
        """What the bundle is made from, by the names that it has there; of two with one name the author's."""
        template, function = self.template, self.function
        sources: list[tuple[str, Path, LeavesOut]] = []
        if template.workdir == ".":
            # A server that runs beside its template's files finds all under the names that they have in an image.
            others = (each for each in template.path.iterdir() if each.name not in {*_NOT_PACKED, SITE_DIR, function})
            sources += [(each.name, each, is_cache) for each in others if not is_cache(each)]
        if template.skeleton.exists():
            sources.append((function, template.skeleton, _of_its_handler))
        sources.append((function, self.handler, Ignored(self.handler, NOT_HANDLER)))
        for source, place in self.request.copies:
            sources.append((f"{function}/{place.as_posix()}", source, Ignored(source)))
        found = {
            place if file == source else f"{place}/{file.relative_to(source).as_posix()}": file
            for place, source, leaves_out in sources
            for file in walk(source, leaves_out)
        }
        return dict(sorted(found.items()))

    @cached_property
    def hashes(self) -> dict[str, str]:
        return {name: _hash_source(path) for name, path in self.files.items()}

    @cached_property
    def requirements(self) -> list[Requirements]:
        places = (self.template.path, self.handler) if self.template.kind == "server" else (self.handler,)
        return [read_requirements(place / "requirements.txt") for place in places]

    @cached_property
    def target(self) -> BuildTarget | None:
        """None: there are no requirements."""
        return self.request.target() if any(each.asks for each in self.requirements) else None

    def hash_inputs(self) -> str:
        request, template = self.request, self.template
        target = [replace(each, nodes=()) for each in self.target.environments] if self.target else []
        how = (template.kind, template.name, template.command, template.workdir, template.port, template.env)
        asked = [each.digest for each in self.requirements if each.asks]
        args, python = sorted(request.build_args.items()), _python()
        return key_of(_FORMAT, how, args, request.allows_pickle, python, asked, target, self.hashes)

    def earlier(self) -> _Stamp | None:
        """Return the stamp of an earlier build."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode((self.folder / _STAMP).read_bytes(), type=_Stamp)
        return None

    def is_up_to_date(self, stamp: _Stamp, inputs: str) -> bool:
        """Whether an earlier build was from the same *inputs*, and is whole."""
        return stamp.inputs == inputs + _hash_lock(self.handler) and all(
            each.is_whole(self.folder) for each in stamp.outputs
        )

    # --- making it ---

    def make(self, inputs: str, before: _Stamp | None) -> _Stamp:
        """:param before: an earlier build, whose weights may be the same files"""
        template, folder = self.template, self.folder
        assert template.kind is not None
        lock, site = self._site()
        made_key, made = self._made(lock)
        code = {name: path for name, path in self.files.items() if name not in made.replaced}
        known = {(os.path.abspath(folder / e.path), e.identity): e.sha256 for e in (before.outputs if before else ())}
        found = {name: path for name, path in code.items() if self._is_weights(name, path)}
        weights = {name: (path, _hash_weights(path, known, self.progress)) for name, path in found.items()}
        tree = self.parts.tree(made_key)
        weights |= {name: (tree / name, sha256) for name, sha256 in made.weights.items()}
        weights = dict(sorted(weights.items()))
        for name, (path, _) in weights.items():
            self._check_weights(name, path)
            code.pop(name, None)
        parts = tuple((each.part, key) for each, key in ((site, lock.key), (made, made_key)) if each.part)
        manifest = Manifest(
            kind=template.kind,
            template=template.name,
            weights=tuple(
                WeightsFile(FUNCTION_DIR + name.removeprefix(self.function), sha256, path.stat().st_size)
                for name, (path, sha256) in weights.items()
            ),
            requirements=tuple(map(shown, lock.pins)),
            allow_pickle=self.request.allows_pickle,
            command=template.command,
            workdir=template.workdir,
            port=template.port,
            env=template.env,
            version=2 if parts else 1,
            needs=lock.needs,
            parts=tuple(each for each, _ in parts),
        )
        self.progress("packing")
        self._show(code, {name: path for name, (path, _) in weights.items()}, tree, self._site_of(lock))
        (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
        digest = pack(folder / BUNDLE, {MANIFEST: folder / MANIFEST, **code})
        files = [(folder / BUNDLE, digest), *((self.parts.tar(key), each.sha256) for each, key in parts)]
        outputs = [
            Output(os.path.relpath(path, folder), identity(path.stat()), sha256)
            for path, sha256 in (*files, *weights.values())
        ]
        stamp = _Stamp(inputs + _hash_lock(self.handler), manifest, tuple(outputs), (lock.key, made_key))
        (folder / _STAMP).write_bytes(msgspec.json.encode(stamp))
        return stamp

    def _show(self, code: Mapping[str, Path], weights: Mapping[str, Path], made: Path, site: Path) -> None:
        """Make the folder of the build anew, with links to all that a worker finds in its bundle."""
        if self.folder.exists():
            shutil.rmtree(self.folder)
        left = ((file.relative_to(made).as_posix(), file) for file in (walk(made) if made.exists() else ()))
        for name, path in {**dict(left), **code, **weights}.items():
            place = self.folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(path.absolute())
        if site.exists():
            (self.folder / SITE_DIR).symlink_to(site)

    def _site(self) -> tuple[Lock, BuiltPart]:
        """Return what the target does not provide, with what is needed of the nodes; and the part with it."""
        if self.target is None:
            return Lock(), BuiltPart()
        file, part = self.handler / LOCK, BuiltPart()
        lock = find_lock(self.requirements, self.target, file, self.progress)
        if lock.pins:
            part = self.parts.find(lock.key) or self.parts.build(lock.key, "site", partial(self._install, lock))
        return settle(lock, self.requirements, self.target, self._site_of(lock), file), part

    def _site_of(self, lock: Lock) -> Path:
        return (self.parts.tree(lock.key) / SITE_DIR).absolute()

    def _install(self, lock: Lock, tree: Path) -> Made:
        assert self.target is not None
        install_missing(lock, self.requirements, self.target, tree / SITE_DIR, self.progress)
        return BuiltPart(), [file.relative_to(tree).as_posix() for file in walk(tree)], ()

    def _made(self, lock: Lock) -> tuple[str, BuiltPart]:
        """Return what the author's build.py made, and its key; what it made before if that depends on nothing new."""
        inside = f"{self.function}/"
        if self.files.get(inside + SCRIPT) != self.handler / SCRIPT:
            return "", BuiltPart()
        own = {name.removeprefix(inside): path for name, path in self.files.items() if name.startswith(inside)}
        counted = {inside + name for name in inputs_of_script(own)}
        inputs = [(name, each) for name, each in self.hashes.items() if name in counted or not name.startswith(inside)]
        key = key_of(_FORMAT, _python(), lock.key, sorted(self.request.build_args.items()), inputs)
        found = self.parts.find(key)
        if found is not None and any(self.hashes.get(name) != was for name, was in found.replaced.items()):
            key = key_of(key, [(name, self.hashes.get(name)) for name in found.replaced])  # it reads what it replaces
            found = self.parts.find(key)
        return key, found or self.parts.build(key, "made", partial(self._run_script, self._site_of(lock)))

    def _run_script(self, site: Path, tree: Path) -> Made:
        """Run build.py in a copy of all files, reproducibly as far as we can make it; find what it has changed."""
        for name, path in self.files.items():
            copy_tree(path, tree / name)
        before = {name: identity((tree / name).stat()) for name in self.files}
        self.progress("running build.py")
        paths = [str(site), os.environ.get("PYTHONPATH", "")]
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
            [sys.executable, SCRIPT], tree / self.function, environment, self.progress,
            lambda status: f"{self.handler / SCRIPT} ended with status {status}",
        )  # fmt: skip
        left = {file.relative_to(tree).as_posix(): file for file in walk(tree)}
        kept = {name for name, was in before.items() if name in left and identity(left[name].stat()) == was}
        if not any(each.is_symlink() for each in tree.rglob("*")):  # which may lead to one of them
            for name in kept:
                left[name].unlink()
        made = [name for name in left if name not in kept]
        weights = [name for name in made if self._is_weights(name, left[name])]
        replaced = {name: self.hashes[name] for name in before if name not in kept}
        return BuiltPart(replaced=replaced), [name for name in made if name not in weights], weights

    # --- weights ---

    def _is_weights(self, name: str, path: Path) -> bool:
        return name.startswith(f"{self.function}/") and is_weights(path)

    def _check_weights(self, name: str, path: Path) -> None:
        """:raises InvalidSpec: a manifest cannot name *path*; it is pickled, and the author did not accept that"""
        if any("\ud800" <= each <= "\udfff" for each in name):
            raise InvalidSpec(f"the name of the weights {name!a} of {self.request.name} is not UTF-8: rename the file")
        if is_pickled(path) and not self.request.allows_pickle and not loads_as_tensors(path):
            raise InvalidSpec(
                f"{name.removeprefix(f'{self.function}/')} of function {self.request.name} is a pickle, which runs any "
                "code that its maker put in: save it as .safetensors (safetensors.torch.save_file), .pt2 or .onnx; or, "
                f'if you trust its maker, set the annotation {ALLOW_PICKLE}: "true"'
            )


def _hash_weights(path: Path, known: Mapping[tuple[str, FileIdentity], str], progress: Callable[[str], None]) -> str:
    """Return the sha256 of *path*, which an earlier build may know: hashing 500 MB takes a second."""
    if found := known.get((os.path.abspath(path), identity(path.stat()))):
        return found
    progress(f"hashing {path.name}")
    return hash_file(path)


def _hash_lock(handler: Path) -> str:
    file = handler / LOCK
    return hash_file(file) if file.is_file() else ""


def _python() -> object:
    """What build.py is run by."""
    packages = [each.version for name in sorted(RESERVED) for each in importlib.metadata.distributions(name=name)]
    return platform.python_version(), platform.machine(), packages


def _hash_source(path: Path) -> str:
    """Return what tells of a file that is packed whether it has changed."""
    status = path.stat()
    return ("x" if status.st_mode & 0o100 else "-") + (
        str(identity(status)) if status.st_size >= _STAT_FROM else hash_file(path)
    )


def _check_folder(handler: Path, request: BuildRequest) -> None:
    if not (handler / "handler.py").is_file():
        raise InvalidSpec(f"{handler} has no handler.py, which function {request.name} needs: see `gpufaas new --help`")
    build_root = request.build_root.resolve()
    if build_root.is_relative_to(handler.resolve()) and build_root != handler.resolve() / "build":
        raise InvalidSpec(f"{build_root} lies inside the handler folder {handler}: build elsewhere, or in its build/")
