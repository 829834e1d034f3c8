"""
A function's requirements, resolved against the packages of the nodes on which it will run (`BuildTarget`).

Packages that are installed there are provided: they are used as they are and not installed again, since torch alone
brings gigabytes of CUDA packages. Only missing packages are installed, into a folder of the function's own. A
requirement that contradicts a provided version is refused with both versions.

Most functions require nothing, or what is provided: then pip is not started. Otherwise pip resolves as if it ran on the
nodes (`pip_elsewhere`), with the provided versions as constraints; its own settings (PIP_INDEX_URL, PIP_FIND_LINKS,
pip.conf) apply. Where the nodes differ from this machine in Python or platform, only wheels are taken.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from gpufaas_cli.build_target import BuildTarget
from gpufaas_cli.pip_elsewhere import tag_options, write_environment
from gpufaas_core.bundle import Needs
from gpufaas_core.environment import Distribution, Environment, applies, installed, measure, misfits, required_by
from gpufaas_core.errors import InvalidSpec

RESERVED: Final = frozenset(("torch", "numpy", "safetensors"))
"""Packages that every worker has: where one is not installed, the environment is wrong, and not the function."""
_SOURCE_OPTIONS: Final = ("-i", "--index-url", "--extra-index-url", "-f", "--find-links", "--no-index", "--pre",
                          "--trusted-host", "--prefer-binary", "--only-binary", "--no-binary")  # fmt: skip
_OTHER_FILE: Final = re.compile(r"(-r|--requirement|-c|--constraint)[\s=]*(.+)")


@dataclass(frozen=True, slots=True)
class Missing:
    """One distribution to be installed."""

    name: str
    version: str
    url: str | None = None
    """Where it is installed from, if the requirement names a URL."""
    digest: str | None = None
    """sha256 of the file that pip chose; None: it is no file, but a folder or a repository."""

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


@dataclass(frozen=True, slots=True)
class Requirements:
    """A requirements.txt, read, with the files that it includes (``-r``)."""

    file: Path
    lines: tuple[tuple[str, Requirement], ...] = ()
    """The lines that name a distribution, each with its place: FILE:NUMBER."""
    options: tuple[str, ...] = ()
    named: tuple[Path, ...] = ()
    """Files and folders of this machine that it names: a build depends on them, too."""
    needs_pip: bool = False
    """There are lines that only pip understands: files, URLs, constraints."""

    @property
    def asks(self) -> bool:
        """Whether it asks for anything."""
        return bool(self.lines) or self.needs_pip


@dataclass(frozen=True, slots=True)
class Provided:
    """How far a target provides what is required."""

    satisfied: bool
    looked_at: frozenset[tuple[str, str | None]]
    """Every distribution that was looked at, and its version there: the answer depends on them."""


def read_requirements(file: Path) -> Requirements:
    """
    Return what *file* asks for. A missing file asks for nothing.

    :raises InvalidSpec: it is malformed; names file and line
    """
    if not file.is_file():
        return Requirements(file)
    return _read(file, file.parent, ())


def _read(file: Path, root: Path, outer: tuple[Path, ...]) -> Requirements:
    """:param root: the folder that relative paths are meant from, but for those of other such files"""
    found = Requirements(file)
    for number, text in _logical_lines(file):
        where = f"{file}:{number}"
        if other := _OTHER_FILE.fullmatch(text):
            part = _read_other(other[1] in ("-r", "--requirement"), other[2], file, where, root, outer)
        elif text.startswith("-") and re.split(r"[\s=]", text, maxsplit=1)[0] in _SOURCE_OPTIONS:
            part = Requirements(file, options=(_absolute(text, file.parent),))
        elif text.startswith("-"):
            place = re.sub(r"^(-e|--editable)[\s=]*", "", text)
            part = Requirements(file, named=_place(place, root), needs_pip=True)
        else:
            part = _read_line(text, file, where, root)
        found = Requirements(
            file,
            found.lines + part.lines,
            found.options + part.options,
            found.named + part.named,
            found.needs_pip or part.needs_pip,
        )
    return found


def _read_line(text: str, file: Path, where: str, root: Path) -> Requirements:
    try:
        requirement = Requirement(text)
    except InvalidRequirement as exc:
        if "/" in text or text.endswith((".whl", ".tar.gz", ".zip")):
            return Requirements(file, named=_place(text, root), needs_pip=True)
        why = str(exc).splitlines()[0]
        raise InvalidSpec(f"{where}: {text!r} is not a requirement ({why}): write NAME==VERSION") from None
    return Requirements(file, ((where, requirement),), named=_place(requirement.url or "", root))


def _read_other(asks: bool, name: str, file: Path, where: str, root: Path, outer: tuple[Path, ...]) -> Requirements:
    """Read what ``-r`` or ``-c`` names; constraints are only checked for mistakes here, and left to pip."""
    if "://" in name:
        return Requirements(file, needs_pip=True)
    other = file.parent / name
    if not other.is_file():
        raise InvalidSpec(f"{where}: there is no file {other}: correct the path, which is meant from {file.parent}")
    if other.resolve() in (each.resolve() for each in (*outer, file)):
        raise InvalidSpec(f"{where}: {other} includes itself: take that line out")
    part = _read(other, root, (*outer, file)) if asks else Requirements(other, needs_pip=True)
    return replace(part, named=(other, *part.named))


def _place(text: str, root: Path) -> tuple[Path, ...]:
    """Return the file or folder that a requirement names, if it is one of this machine."""
    if "://" in text and not text.startswith("file://"):
        return ()
    path = re.sub(r"\[[^]]*\]$|\s*[;#].*$", "", text.removeprefix("file://").removeprefix("file:")).strip()
    return (root / path,) if path and (root / path).exists() else ()


def check_provided(requirements: Requirements, target: BuildTarget) -> Provided:
    """
    Return whether *target* has all that is required.

    :raises InvalidSpec: a requirement contradicts a provided version; says where, and both versions
    """
    satisfied = not requirements.needs_pip
    looked_at: dict[tuple[str, str | None], None] = {}
    for environment in target.environments:
        for where, requirement in requirements.lines:
            if not applies(requirement, environment):
                continue
            _check_conflict(requirement, environment, where, target)
            satisfied &= _is_satisfied(requirement, environment, looked_at)
    return Provided(satisfied, frozenset(looked_at))


def find_missing(
    requirements: Requirements, target: BuildTarget, progress: Callable[[str], None]
) -> tuple[Missing, ...]:
    """
    Return what must be installed, sorted by name; asks pip when something is.

    :raises InvalidSpec: they cannot be met beside what is provided, or not at all; says why in pip's words
    """
    if not requirements.asks or check_provided(requirements, target).satisfied:
        return ()
    file = requirements.file
    if len({each.build_target[:3] for each in target.environments}) > 1 or not target.shared.platforms:
        raise InvalidSpec(
            f"{file} asks for packages that not all nodes have, and no wheels fit all of them "
            f"({'; '.join(map(str, target.environments))}): name nodes that are alike (constraints), or install the "
            "packages there"
        )
    environment = target.shared
    progress("resolving requirements")
    with tempfile.TemporaryDirectory(prefix="gpufaas-build-") as scratch:
        constraints, report = Path(scratch, "provided.txt"), Path(scratch, "report.json")
        have = environment.distributions
        constraints.write_text("".join(f"{name}=={each.version}\n" for name, each in have.items()))
        _pip(
            ["--dry-run", "--report", str(report), "--constraint", str(constraints), "-r", file.name],
            file,
            environment,
            target,
        )
        answer = json.loads(report.read_text())
    missing = []
    for each in answer["install"]:
        name = canonicalize_name(each["metadata"]["name"])
        version = each["metadata"]["version"]
        for one in target.environments:
            if name in one.distributions and name in have:
                raise InvalidSpec(
                    _conflict(str(file), f"{name} {version}", name, one.distributions[name].version, one, target)
                )
            if name in RESERVED and name not in one.distributions:
                raise InvalidSpec(
                    f"{file} needs {name}, which every worker has, but not {target.who} ({one}): install it "
                    "there with `pip install 'gpufaas[node]'`, or build for a platform that has it (--gateway URL)"
                )
        source = each["download_info"]
        digest = source.get("archive_info", {}).get("hashes", {}).get("sha256")
        missing.append(Missing(name, version, source["url"] if each.get("is_direct") else None, digest))
    return tuple(sorted(missing, key=lambda each: each.name))


def install_missing(missing: Sequence[Missing], requirements: Requirements, target: BuildTarget, site: Path) -> None:
    """Install exactly *missing*, the files that pip chose for them, without dependencies, into the folder *site*."""
    with tempfile.TemporaryDirectory(prefix="gpufaas-build-") as scratch:
        file = Path(scratch, "missing.txt")
        wanted = [f"{each.name} @ {each.url}" if each.url else str(each) for each in missing]
        if all(each.digest for each in missing):  # pip wants the digest of all files, or of none
            wanted = [f"{text} --hash=sha256:{each.digest}" for text, each in zip(wanted, missing, strict=True)]
        file.write_text("\n".join([*requirements.options, *wanted]) + "\n")
        arguments = ["--target", str(site.absolute()), "--no-deps", "--no-compile", "-r", str(file)]
        _pip(arguments, requirements.file, target.shared, target)


def find_needs(requirements: Sequence[Requirements], target: BuildTarget, site: Path) -> Needs | None:
    """
    Return what a function with *requirements*, of which *site* has what was missing, takes from where it runs.

    :raises InvalidSpec: a node of *target* has not all of that; says which, and why
    """
    environment = target.shared
    bundled: dict[str, Distribution] = {}
    wheels: dict[str, tuple[str, ...]] = {}
    for each in importlib.metadata.distributions(path=[str(site)]):
        name = canonicalize_name(each.metadata["Name"])
        bundled[name] = Distribution(each.version, tuple(each.requires or ()))
        tags = re.findall(r"^Tag: *(\S+)", each.read_text("WHEEL") or "", re.MULTILINE)
        if compiled := tuple(sorted(tag for tag in tags if not tag.endswith("-none-any"))):
            wheels[f"{name}=={each.version}"] = compiled
    packages = _left_to_the_platform(requirements, bundled, environment)
    if not bundled and not packages:
        return None
    needs = Needs(environment.python_minor if bundled else "", tuple(sorted(packages)), dict(sorted(wheels.items())))
    for one in target.environments:
        if reasons := misfits(needs, one):
            raise InvalidSpec(
                f"{', '.join(str(each.file) for each in requirements if each.asks)} cannot be met on {one}: "
                f"{'; '.join(reasons)}: name nodes that fit (constraints), or install there what is missing"
            )
    return needs


def _left_to_the_platform(
    requirements: Sequence[Requirements], bundled: Mapping[str, Distribution], environment: Environment
) -> set[str]:
    todo = [each for of in requirements for _, each in of.lines if applies(each, environment)]
    todo += map(Requirement, bundled)
    packages: set[str] = set()
    done: set[str] = set()
    while todo:
        each = Requirement(str(todo.pop()))
        each.marker = None
        if str(each) in done:
            continue
        done.add(str(each))
        if found := bundled.get(canonicalize_name(each.name)):
            todo += required_by(each, environment, found.requires)
        else:
            packages.add(str(each))
    return packages


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _logical_lines(file: Path) -> Iterable[tuple[int, str]]:
    """Yield lines as pip reads them: continued ones joined, comments and per-requirement options taken off."""
    try:
        text = file.read_text("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise InvalidSpec(f"{file} is not UTF-8 text ({exc.reason} at byte {exc.start}): save it as UTF-8") from None
    joined, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        start = start or number
        if line.endswith("\\") and not line.lstrip().startswith("#"):
            joined += line[:-1] + " "
            continue
        whole = re.sub(r"(^|\s)#.*$", "", joined + line).strip()
        if not whole.startswith("-"):
            whole = re.split(r"\s--?[a-z]", whole, maxsplit=1)[0].strip()
        if whole:
            yield start, whole
        joined, start = "", 0


def _absolute(option: str, folder: Path) -> str:
    """Make the folder of ``--find-links`` absolute: it is relative to the file that has the option."""
    name, value = (*re.split(r"[\s=]+", option, maxsplit=1), "")[:2]
    if name in ("-f", "--find-links") and (folder / value).exists():
        return f"{name} {(folder / value).absolute()}"
    return option


def _check_conflict(requirement: Requirement, environment: Environment, where: str, target: BuildTarget) -> None:
    name = canonicalize_name(requirement.name)
    have = environment.distributions.get(name)
    if have is not None and not installed(requirement, environment):
        raise InvalidSpec(_conflict(where, str(requirement), name, have.version, environment, target))


def _conflict(where: str, wanted: str, name: str, have: str, environment: Environment, target: BuildTarget) -> str:
    return (
        f"{where}: {wanted} conflicts with {name} {have}, which {target.who} provides "
        f"({environment}): ask for a range that has {have} in it or drop the pin, or install that version where the "
        "platform runs"
    )


def _is_satisfied(
    requirement: Requirement, environment: Environment, looked_at: dict[tuple[str, str | None], None]
) -> bool:
    """Return whether *requirement* and all that it needs is installed; add every distribution to *looked_at*."""
    satisfied = True
    todo = [requirement]
    done: set[tuple[str, frozenset[str]]] = set()
    while todo:
        each = todo.pop()
        name = canonicalize_name(each.name)
        key = name, frozenset(each.extras)
        found = environment.distributions.get(name)
        looked_at[name, found.version if found is not None else None] = None
        if found is None or not installed(each, environment):
            satisfied = False
        elif key not in done:
            done.add(key)
            todo += required_by(each, environment, found.requires)
    return satisfied


def _pip(arguments: Sequence[str], file: Path, environment: Environment, target: BuildTarget) -> None:
    """Run ``pip install`` with *arguments* beside *file*, for *environment*. :raises InvalidSpec: with pip's words"""
    elsewhere = environment.build_target != measure().build_target
    with tempfile.TemporaryDirectory(prefix="gpufaas-build-") as there:
        write_environment(environment, Path(there))
        command = [sys.executable, "-P", "-m", "gpufaas_cli.pip_elsewhere", there, "install", "--no-input"]
        command += ["--disable-pip-version-check", *(tag_options(environment) if elsewhere else ())]
        # Not --quiet: that hides what conflicts with what.
        done = subprocess.run(
            [*command, *arguments], check=False, text=True, cwd=file.parent,
            env={**os.environ, "PIP_USER": "0", "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    if done.returncode == 0:
        return
    if "No module named 'pip'" in done.stdout:
        raise InvalidSpec(f"{file} needs pip, which {sys.prefix} has not: run `{sys.executable} -m ensurepip`")
    only = f" with wheels for {environment}, which is not what this machine has" if elsewhere else ""
    raise InvalidSpec(f"{file} cannot be met beside what {target.who} provides{only}: {_reason(done.stdout)}")


def _reason(output: str) -> str:
    """Return pip's explanation in one line: what conflicts with what, or its errors."""
    lines = [line.strip() for line in output.splitlines()]
    if "The conflict is caused by:" in lines:
        start = lines.index("The conflict is caused by:") + 1
        end = lines.index("", start) if "" in lines[start:] else len(lines)
        return "; ".join(lines[start:end]) + ": ask for versions that agree with these"
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or _of_a_program(lines)
    return "; ".join(errors) + ": check the names, and the package index that pip is set to"


def _of_a_program(lines: Sequence[str]) -> list[str]:
    """Return what pip says when git, or the build of a package, has failed: the program, and its last line."""
    failed = [line.removeprefix("× ") for line in lines if line.startswith("× ")]
    said = [line for line in lines if line and not line.startswith(("×", "│", "╰", "note:", "error:", "[", "hint:"))]
    return [*failed[:1], *said[-1:]] or [*lines[-3:]]
