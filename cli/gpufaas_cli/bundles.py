"""
Building a function: from the author's folder to a bundle and its weights. A library; the commands are elsewhere.

::

    build/NAME/                    the template, with the author's folder over its handler folder (OpenFaaS's layout)
        function/                  handler.py …, and what build.py made
        site/                      requirements that are not provided
        gpufaas.json               the manifest
        bundle.tar                 all of these but the weights; reproducible, so its digest names the function
        .gpufaas-build.json        what it was built from: the same again is no work

What runs here (build.py) runs in this Python environment; packages are chosen for that of the nodes (`target`).
"""

import ast
import collections
import hashlib
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

import msgspec

from gpufaas_cli.requirements import (
    RESERVED,
    Missing,
    Provided,
    Requirements,
    check_provided,
    find_missing,
    find_needs,
    install_missing,
    installed_version,
    read_requirements,
)
from gpufaas_cli.target import Target, this_python
from gpufaas_core.bundle import FUNCTION_DIR, MANIFEST, SITE_DIR, Kind, Manifest, Needs, Weights
from gpufaas_core.environment import misfits
from gpufaas_core.errors import InvalidSpec, StorageFailed
from gpufaas_core.units import MiB, Seconds
from gpufaas_templates import Template, find_template

__all__ = ["ALLOW_PICKLE", "BuildRequest", "Built", "build"]

ALLOW_PICKLE: Final = "gpufaas.allow-pickle"
BUNDLE: Final = "bundle.tar"
_STAMP: Final = ".gpufaas-build.json"
_FORMAT: Final = 2
"""Part of what a build depends on: raise it when this module makes other bundles from the same folder."""

_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_LEFT_OUT: Final = frozenset(
    ("__pycache__", ".git", ".venv", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".ipynb_checkpoints", ".DS_Store")
)
NOT_HANDLER: Final = frozenset(("build", "template"))
"""Folders that OpenFaaS skips in a handler folder: it may be the working directory."""
_NOT_PACKED: Final = frozenset(("template.yml", "meta.json", "Dockerfile", MANIFEST))
_WEIGHTS: Final = (".safetensors", ".pt2", ".onnx", ".onnx_data", ".onnx.data")
_PICKLED: Final = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".joblib")
_STAT_FROM: Final = 16 * MiB
"""Inputs from this size on are compared by size and mtime: hashing 500 MB at each `up` takes longer than the rest."""
_BUILD_THREADS: Final = "1"
"""Fixed, since sums in another order give other weights, and so another digest; one, since two threads on a busy
machine took 48 s for what one does in 6. A build that needs more asks: ``build_args: {OMP_NUM_THREADS: "8"}``."""
_TAIL_LINES: Final = 20

_CALLED: Final[Mapping[Kind, Mapping[str, tuple[str, ...]]]] = {
    "model": {"load": ("device",), "handle": ("model", "event", "context")},
    "http": {"handle": ("event", "context")},
}


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
    target: Callable[[], Target] = this_python
    """What it is built for; asked only where there are requirements."""


@dataclass(frozen=True, slots=True)
class Built:
    name: str
    digest: str
    """sha256 of `bundle_tar`."""
    bundle_tar: Path
    manifest: Manifest
    weights: list[tuple[Weights, Path]]
    """Each file of weights, and where it is now."""
    up_to_date: bool
    """It was built before from the same inputs: nothing was done."""
    seconds: Seconds


class _File(msgspec.Struct, frozen=True):
    path: str
    size: int
    mtime_ns: int


class _Stamp(msgspec.Struct, frozen=True):
    """What lies beside a finished build."""

    inputs: str
    digest: str
    manifest: Manifest
    outputs: tuple[_File, ...]


def build(request: BuildRequest, progress: Callable[[str], None] = lambda _: None) -> Built:
    """
    Build *request* in ``build_root/NAME``, and tell *progress* what is being done, a line at a time.

    :raises InvalidSpec: something of the author's is missing, malformed, refused or failed; says what and where
    :raises StorageFailed: the build folder cannot be written
    """
    began = time.perf_counter()
    check_name(request.name)
    template = find_template(request.lang, request.template_dirs)
    if template.kind is None:
        raise InvalidSpec(
            f"template {template.name} makes container images only: use one of kind model, http or server"
        )
    handler = request.root / request.handler
    _check_folder(handler, request)
    if template.kind != "server":
        _check_handler(handler / "handler.py", template.kind, template.name)
    elif template.workdir == "." and not (handler / "handler.py").is_file():
        raise InvalidSpec(f"{handler / 'handler.py'} is not there: template {template.name} imports it")
    copies = [copied(path, request) for path in request.copy]
    places = (template.path, handler) if template.kind == "server" else (handler,)
    requirements = [read_requirements(place / "requirements.txt") for place in places]
    target = request.target() if any(each.asks for each in requirements) else None
    provided = [check_provided(each, target) for each in requirements] if target is not None else []

    folder = request.build_root / request.name
    named = [path for each in requirements for path in each.named]
    inputs = _hash_inputs(request, template, handler, copies, named, provided)
    stamp = _read_stamp(folder)
    if stamp is None or stamp.inputs != inputs or not _outputs_are_there(folder, stamp) or not _fits(stamp, target):
        try:
            stamp = _make(request, template, handler, copies, requirements, target, folder, inputs, progress)
        except OSError as exc:
            what = f"{exc.filename or folder}: {exc.strerror or exc}"
            raise StorageFailed(f"cannot build in {folder}: {what}: check its disk and rights") from exc
        up_to_date = False
    else:
        up_to_date = True
    return Built(
        name=request.name,
        digest=stamp.digest,
        bundle_tar=folder / BUNDLE,
        manifest=stamp.manifest,
        weights=[(each, _unpacked(folder, template, each.path)) for each in stamp.manifest.weights],
        up_to_date=up_to_date,
        seconds=time.perf_counter() - began,
    )


# What the author gave, checked before anything is done.


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidSpec(
            f"{name!r} cannot be the name of a function: use lower-case letters, digits and dashes, 63 at most, "
            "not beginning or ending with a dash"
        )


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


def _check_handler(file: Path, kind: Kind, template: str) -> None:
    """Find here what would otherwise only fail at deploy: bad syntax, and functions that are missing for sure."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            source = file.read_bytes()
            tree = ast.parse(source, str(file))
            compile(source, str(file), "exec", dont_inherit=True)
    except SyntaxError as exc:
        shown = f": {exc.text.strip()}" if exc.text and exc.text.strip() else ""
        raise InvalidSpec(f"{file}:{exc.lineno or 1}: {exc.msg}{shown}") from None
    except ValueError as exc:  # null bytes
        raise InvalidSpec(f"{file}: {exc}") from None
    bound = _bound_names(tree)
    for name, parameters in _CALLED[kind].items():
        call = f"{name}({', '.join(parameters)})"
        if bound is not None and name not in bound:
            raise InvalidSpec(f"{file} defines no {call}, which {template} calls: add it, or choose another template")
        for each in tree.body:
            if isinstance(each, ast.AsyncFunctionDef) and each.name == name:
                raise InvalidSpec(
                    f"{file}:{each.lineno}: {name} is async, which {template} does not support: write def {name}, with "
                    "asyncio.run() in it where you need it"
                )
        defined = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == name]
        if len(defined) == 1 and not defined[0].decorator_list and not _takes(defined[0].args, len(parameters)):
            raise InvalidSpec(f"{file}:{defined[0].lineno}: {template} calls {call}, which this {name} does not take")


def _bound_names(tree: ast.Module) -> set[str] | None:
    """Return the names that a module binds at its top level, or None where only running it can tell."""
    names: set[str] = set()
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
                continue  # what it binds is its own
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names.update(alias.asname or alias.name.partition(".")[0] for alias in aliases)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Name(id="globals" | "exec" | "setattr"):
                return None
        todo.extend(ast.iter_child_nodes(node))
    return None if names & {"*", "__getattr__"} else names


def _takes(arguments: ast.arguments, count: int) -> bool:
    positional = len(arguments.posonlyargs) + len(arguments.args)
    if any(default is None for default in arguments.kw_defaults):
        return False
    return positional - len(arguments.defaults) <= count and (count <= positional or arguments.vararg is not None)


def copied(path: Path, request: BuildRequest) -> tuple[Path, Path]:
    """Return where an extra path is, and its place below the handler folder."""
    root = request.root.resolve()
    source = (root / path).resolve()
    if not source.is_relative_to(root) or source == root:
        raise InvalidSpec(f"copy: {path} must lie inside {root}, and not be it")
    if not source.exists():
        raise InvalidSpec(f"copy: {path} does not exist in {root}")
    return source, source.relative_to(root)


# What a build depends on.


def _hash_inputs(
    request: BuildRequest,
    template: Template,
    handler: Path,
    copies: Iterable[tuple[Path, Path]],
    named: Iterable[Path],
    provided: Sequence[Provided],
) -> str:
    hashed = hashlib.sha256()
    settings = {
        "format": _FORMAT,
        "kind": template.kind,
        "template": template.name,
        "folder": template.handler_folder,
        "build_args": sorted(request.build_args.items()),
        "allow_pickle": _allows_pickle(request),
        "python": [platform.python_version(), platform.machine()],
        "provided": [[name, installed_version(name)] for name in sorted(RESERVED)],
        "requirements": sorted((name, version or "") for each in provided for name, version in each.looked_at),
    }
    hashed.update(msgspec.json.encode(settings))
    sources = [("template", template.path, frozenset[str]()), ("handler", handler, NOT_HANDLER)]
    sources += [(f"copy:{place.as_posix()}", source, frozenset()) for source, place in copies]
    sources += [("required", path, NOT_HANDLER) for path in named]
    for label, source, skip in sources:
        for file in walk(source, skip):
            relative = file.relative_to(source).as_posix() if file != source else ""
            hashed.update(f"\0{label}\0{relative}\0".encode(errors="surrogateescape"))
            status = file.stat()
            hashed.update(b"x" if status.st_mode & 0o100 else b"-")
            if status.st_size >= _STAT_FROM:
                hashed.update(f"{status.st_size} {status.st_mtime_ns}".encode())
            else:
                hashed.update(hashlib.sha256(file.read_bytes()).digest())
    return hashed.hexdigest()


def walk(source: Path, skip: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yield the files of a folder (or the file itself) that belong to a function, sorted."""
    if source.is_file():
        yield source
        return
    for directory, folders, files in os.walk(source, followlinks=True):
        top = Path(directory) == source
        folders[:] = sorted(each for each in folders if each not in _LEFT_OUT and not (top and each in skip))
        for name in sorted(files):
            if name in _LEFT_OUT or name.endswith(".pyc"):
                continue
            file = Path(directory, name)
            if not file.exists():
                raise InvalidSpec(f"{file} is a link to {os.readlink(file)}, which is not there: correct or remove it")
            yield file


def _read_stamp(folder: Path) -> _Stamp | None:
    try:
        return msgspec.json.decode((folder / _STAMP).read_bytes(), type=_Stamp)
    except (OSError, msgspec.DecodeError):
        return None


def _fits(stamp: _Stamp, target: Target | None) -> bool:
    """Whether what was built runs on *target*: the platform may have changed, or be another one."""
    needs = stamp.manifest.needs
    return needs is None or target is None or not any(misfits(needs, each) for each in target.environments)


def _outputs_are_there(folder: Path, stamp: _Stamp) -> bool:
    try:
        return all(_file(folder, folder / each.path) == each for each in stamp.outputs)
    except OSError:
        return False


def _file(folder: Path, path: Path) -> _File:
    status = path.stat()
    return _File(path.relative_to(folder).as_posix(), status.st_size, status.st_mtime_ns)


# Doing it.


def _make(
    request: BuildRequest,
    template: Template,
    handler: Path,
    copies: Iterable[tuple[Path, Path]],
    requirements: Sequence[Requirements],
    target: Target | None,
    folder: Path,
    inputs: str,
    progress: Callable[[str], None],
) -> _Stamp:
    assert template.kind is not None
    function, site = folder / template.handler_folder, folder / SITE_DIR
    if folder.exists():
        shutil.rmtree(folder)
    copy_tree(template.path, folder)
    copy_tree(handler, function, NOT_HANDLER)
    for source, at in copies:
        copy_tree(source, function / at)

    installed, needs = _install(requirements, target, site, progress) if target is not None else ([], None)
    if (handler / "build.py").is_file():
        _run_build_script(request, handler, function, site, progress)

    weights = []
    for path in _find_weights(function, request):
        progress(f"hashing {path.name}")
        weights.append((_hash_weights(function, path), path))
    manifest = Manifest(
        kind=template.kind,
        template=template.name,
        weights=tuple(each for each, _ in weights),
        requirements=tuple(map(str, installed)),
        allow_pickle=_allows_pickle(request),
        command=template.command,
        workdir=template.workdir,
        port=template.port,
        env=template.env,
        needs=needs,
    )
    progress("packing")
    _write_manifest(folder, manifest)
    digest = _pack(folder, _roots(template, folder), {path for _, path in weights})
    outputs = (folder / BUNDLE, *(path for _, path in weights))
    stamp = _Stamp(inputs, digest, manifest, tuple(_file(folder, path) for path in outputs))
    (folder / _STAMP).write_bytes(msgspec.json.encode(stamp))
    return stamp


def _install(
    requirements: Sequence[Requirements], target: Target, site: Path, progress: Callable[[str], None]
) -> tuple[list[Missing], Needs | None]:
    """Install in *site* what *target* does not provide; return it, and what is needed of the nodes."""
    installed: list[Missing] = []
    for each in requirements:
        if missing := find_missing(each, target, progress):
            progress(f"installing {', '.join(map(str, missing))}")
            install_missing(missing, each, target, site)
            installed += missing
    needs = find_needs(requirements, target, site)
    if installed:
        shutil.rmtree(site / "bin", ignore_errors=True)  # scripts name this machine's interpreter
    return installed, needs


def _hash_weights(function: Path, path: Path) -> Weights:
    with open(path, "rb", buffering=0) as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return Weights(f"{FUNCTION_DIR}/{path.relative_to(function).as_posix()}", sha256, path.stat().st_size)


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    written = msgspec.to_builtins(manifest)
    del written["data_bytes"]
    if manifest.needs is None:
        del written["needs"]
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(written)) + b"\n")


def _roots(template: Template, folder: Path) -> dict[str, Path]:
    """Return what the bundle is packed from in *folder*, by its name in the bundle."""
    function, site = folder / template.handler_folder, folder / SITE_DIR
    if template.workdir != ".":
        return {FUNCTION_DIR: function, SITE_DIR: site}
    # A server that runs beside its template's files finds all under the names that they have in an image.
    roots = {SITE_DIR: site, template.handler_folder: function}
    for path in sorted(template.path.iterdir()):
        if path.name not in _NOT_PACKED and path.name not in _LEFT_OUT and path.name not in roots:
            roots[path.name] = folder / path.name
    return roots


def copy_tree(source: Path, target: Path, skip: frozenset[str] = frozenset()) -> None:
    for file in walk(source, skip):
        place = target / file.relative_to(source) if file != source else target
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        shutil.copy(file, place)
        place.chmod(place.stat().st_mode | 0o200)


def _run_build_script(
    request: BuildRequest, handler: Path, function: Path, site: Path, progress: Callable[[str], None]
) -> None:
    """Run the author's build.py where its outputs belong, reproducibly as far as we can make it."""
    progress("running build.py")
    paths = [str(site.absolute()), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": _BUILD_THREADS,
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        **request.build_args,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
    with subprocess.Popen(
        [sys.executable, "build.py"],
        cwd=function,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                tail.append(line.rstrip())
                progress(tail[-1])
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        last = next((line for line in reversed(tail) if line), "it said nothing")
        shown = "".join(f"\n    {line}" for line in tail)
        raise InvalidSpec(f"{handler / 'build.py'} ended with status {process.returncode}: {last}{shown}")


def _find_weights(function: Path, request: BuildRequest) -> list[Path]:
    """:raises InvalidSpec: there are pickled weights, and the author did not accept that"""
    found = []
    for path in walk(function):
        if path.name.endswith(_WEIGHTS):
            found.append(path)
        elif path.name.endswith(_PICKLED) and _is_pickle(path):
            if not _allows_pickle(request):
                raise InvalidSpec(
                    f"{path.relative_to(function)} of function {request.name} is a pickle, which runs any code that "
                    "its maker put in: save it as .safetensors (safetensors.torch.save_file), .pt2 or .onnx; or, if "
                    f'you trust its maker, set the annotation {ALLOW_PICKLE}: "true"'
                )
            found.append(path)
    return found


def _is_pickle(path: Path) -> bool:
    """``.bin`` may be anything: torch's are zips or begin with a pickle's protocol. The others are what they say."""
    if path.suffix != ".bin":
        return True
    with open(path, "rb") as file:
        start = file.read(4)
    return start == b"PK\x03\x04" or (start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05")


def _allows_pickle(request: BuildRequest) -> bool:
    return request.annotations.get(ALLOW_PICKLE, "").strip().lower() in ("true", "1", "yes")


def _pack(folder: Path, roots: Mapping[str, Path], left_out: set[Path]) -> str:
    """Write the bundle; return its digest. The same files give the same bytes: no times, no owners, names sorted."""
    with open(folder / BUNDLE, "wb") as file:
        hashing = _Hashing(file)
        with tarfile.open(fileobj=hashing, mode="w|", format=tarfile.PAX_FORMAT) as tar:  # type: ignore[call-overload]
            _add(tar, MANIFEST, folder / MANIFEST)
            for name, source in roots.items():
                for path in walk(source) if source.exists() else ():
                    if path not in left_out:
                        _add(tar, name if path == source else f"{name}/{path.relative_to(source).as_posix()}", path)
    return hashing.sha256.hexdigest()


def _add(tar: tarfile.TarFile, name: str, path: Path) -> None:
    content = path.read_bytes()
    member = tarfile.TarInfo(name)
    member.size = len(content)
    member.mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
    tar.addfile(member, io.BytesIO(content))


class _Hashing:
    """A file that is only written, and the hash of what was."""

    def __init__(self, file: IO[bytes]) -> None:
        self.sha256 = hashlib.sha256()
        self._file = file

    def write(self, content: bytes) -> int:
        self.sha256.update(content)
        return self._file.write(content)


def _unpacked(folder: Path, template: Template, path: str) -> Path:
    return folder / template.handler_folder / Path(path).relative_to(FUNCTION_DIR)
