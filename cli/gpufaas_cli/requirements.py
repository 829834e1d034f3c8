"""
A function's requirements, resolved against what this Python environment has.

What is installed here is provided: it is used as it is and never installed again, for torch alone would bring gigabytes
of CUDA packages into each function. Only what is missing is installed, into a folder of the function's own. A
requirement that contradicts what is provided is refused with both versions.

Most functions ask for nothing, or for what is here: that is found out without pip. Otherwise pip resolves, held to the
installed versions by constraints; its own settings (PIP_INDEX_URL, PIP_FIND_LINKS, pip.conf) apply.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from packaging.markers import UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from gpufaas_core.errors import InvalidSpec

RESERVED: Final = frozenset(("torch", "numpy", "safetensors"))
"""The platform's own: where one is not installed, the environment is at fault and not the function."""
_SOURCE_OPTIONS: Final = ("-i", "--index-url", "--extra-index-url", "-f", "--find-links", "--no-index", "--pre",
                          "--trusted-host", "--prefer-binary", "--only-binary", "--no-binary")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Missing:
    """One distribution to be installed."""

    name: str
    version: str
    url: str | None = None
    """Where it must come from, when the requirement said so."""

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


@dataclass(frozen=True, slots=True)
class Requirements:
    """A requirements.txt, read. `lines` are those that name a distribution, with their line numbers."""

    file: Path
    lines: tuple[tuple[int, Requirement], ...] = ()
    options: tuple[str, ...] = ()
    needs_pip: bool = False
    """There are lines that only pip understands: files, URLs, ``-r``."""
    looked_at: dict[str, str | None] = field(default_factory=dict)
    """Every distribution that was met on the way, and its installed version: what the answer depends on."""
    satisfied: bool = True


def read_requirements(file: Path) -> Requirements:
    """
    Return what *file* asks for, checked against what is installed. A missing file asks for nothing.

    :raises InvalidSpec: malformed, or against the version of a provided distribution; names file and line
    """
    if not file.is_file():
        return Requirements(file)
    logical_lines = list(_logical_lines(file))
    installed = installed_versions() if logical_lines else {}
    lines: list[tuple[int, Requirement]] = []
    options: list[str] = []
    needs_pip = False
    for number, text in logical_lines:
        if text.startswith("-"):
            option = re.split(r"[\s=]", text, maxsplit=1)[0]
            if option in _SOURCE_OPTIONS:
                options.append(_absolute(text, file.parent))
            else:
                needs_pip = True
            continue
        try:
            requirement = Requirement(text)
        except InvalidRequirement as exc:
            if "/" in text or text.endswith((".whl", ".tar.gz", ".zip")):
                needs_pip = True
                continue
            why = str(exc).splitlines()[0]
            raise InvalidSpec(f"{file}:{number}: {text!r} is not a requirement ({why}): write NAME==VERSION") from None
        if _applies(requirement, ""):
            _check_conflict(requirement, installed, f"{file}:{number}")
            lines.append((number, requirement))
    looked_at: dict[str, str | None] = {}
    satisfied = not needs_pip
    for _, requirement in lines:
        satisfied &= _is_satisfied(requirement, installed, looked_at)
    return Requirements(file, tuple(lines), tuple(options), needs_pip, looked_at, satisfied)


def find_missing(requirements: Requirements, progress: Callable[[str], None]) -> tuple[Missing, ...]:
    """
    Return what must be installed, sorted by name; asks pip when something is.

    :raises InvalidSpec: they cannot be met beside what is provided, or not at all; says why in pip's words
    """
    if requirements.satisfied:
        return ()
    installed = installed_versions()
    progress("resolving requirements")
    with tempfile.TemporaryDirectory(prefix="gpufaas-build-") as scratch:
        constraints, report = Path(scratch, "provided.txt"), Path(scratch, "report.json")
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in sorted(installed.items())))
        _pip(
            ["--dry-run", "--report", str(report), "--constraint", str(constraints), "-r", requirements.file.name],
            requirements.file,
        )
        answer = json.loads(report.read_text())
    missing = []
    for each in answer["install"]:
        name = canonicalize_name(each["metadata"]["name"])
        version = each["metadata"]["version"]
        if name in installed:
            raise InvalidSpec(_conflict(str(requirements.file), f"{name} {version}", name, installed[name]))
        if name in RESERVED:
            raise InvalidSpec(
                f"{requirements.file} needs {name}, which every worker has but {sys.prefix} has not: "
                "install it with `pip install 'gpufaas[serve]'`, then build again"
            )
        missing.append(Missing(name, version, each["download_info"]["url"] if each.get("is_direct") else None))
    return tuple(sorted(missing, key=lambda each: each.name))


def install_missing(missing: Sequence[Missing], requirements: Requirements, site: Path) -> None:
    """Install exactly *missing*, without dependencies, into the folder *site*."""
    with tempfile.TemporaryDirectory(prefix="gpufaas-build-") as scratch:
        file = Path(scratch, "missing.txt")
        wanted = [f"{each.name} @ {each.url}" if each.url else str(each) for each in missing]
        file.write_text("\n".join([*requirements.options, *wanted]) + "\n")
        _pip(["--target", str(site.absolute()), "--no-deps", "--no-compile", "-r", str(file)], requirements.file)


def installed_versions() -> dict[str, str]:
    """Return what this environment has, version by canonical name; of duplicates the one that is imported."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(canonicalize_name(name), distribution.version)
    return found


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
    """``--find-links wheels`` is meant from the folder of its file."""
    name, value = (*re.split(r"[\s=]+", option, maxsplit=1), "")[:2]
    if name in ("-f", "--find-links") and (folder / value).exists():
        return f"{name} {(folder / value).absolute()}"
    return option


def _applies(requirement: Requirement, extra: str) -> bool:
    try:
        return requirement.marker is None or requirement.marker.evaluate({"extra": extra})
    except UndefinedEnvironmentName:
        return False


def _check_conflict(requirement: Requirement, installed: dict[str, str], where: str) -> None:
    name = canonicalize_name(requirement.name)
    have = installed.get(name)
    if have is None:
        return
    if requirement.url is not None or not requirement.specifier.contains(have, prereleases=True):
        raise InvalidSpec(_conflict(where, str(requirement), name, have))


def _conflict(where: str, wanted: str, name: str, have: str) -> str:
    return (
        f"{where}: {wanted} conflicts with {name} {have}, which the platform provides to every worker: "
        f"ask for a range that has {have} in it or drop the pin, or install that version where the platform runs"
    )


def _is_satisfied(requirement: Requirement, installed: dict[str, str], looked_at: dict[str, str | None]) -> bool:
    """Whether it and all that it needs is installed. Notes every distribution that it met."""
    satisfied = True
    todo = [requirement]
    done: set[tuple[str, frozenset[str]]] = set()
    while todo:
        each = todo.pop()
        name = canonicalize_name(each.name)
        key = name, frozenset(each.extras)
        version = looked_at[name] = installed.get(name)
        if version is None or not each.specifier.contains(version, prereleases=True):
            satisfied = False
            continue
        if key in done:
            continue
        done.add(key)
        for text in importlib.metadata.requires(name) or ():
            needed = Requirement(text)
            if any(_applies(needed, extra) for extra in ("", *each.extras)):
                todo.append(needed)
    return satisfied


def _pip(arguments: Sequence[str], file: Path) -> None:
    """Run ``pip install`` with *arguments* beside *file*; what it says on failure becomes the error."""
    command = [sys.executable, "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    environment = {**os.environ, "PIP_USER": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    # Not --quiet: that hides what conflicts with what.
    done = subprocess.run(
        [*command, *arguments], check=False, text=True, cwd=file.parent, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode == 0:
        return
    if "No module named pip" in done.stdout:
        raise InvalidSpec(f"{file} needs pip, which {sys.prefix} has not: run `{sys.executable} -m ensurepip`")
    raise InvalidSpec(f"{file} cannot be met beside what the platform provides: {_reason(done.stdout)}")


def _reason(output: str) -> str:
    """pip's explanation in one line: what conflicts with what, or its errors."""
    lines = [line.strip() for line in output.splitlines()]
    if "The conflict is caused by:" in lines:
        start = lines.index("The conflict is caused by:") + 1
        end = lines.index("", start) if "" in lines[start:] else len(lines)
        return "; ".join(lines[start:end]) + ": ask for versions that agree with these"
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines[-3:]
    return "; ".join(errors) + ": check the names, and the package index that pip is set to"
