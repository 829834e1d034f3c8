"""Reads requirements.txt as pip does, with the files that it includes."""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from gpufaas_cli.source_files import walk
from gpufaas_core.errors import InvalidSpec

_SOURCE_OPTIONS: Final = ("-i", "--index-url", "--extra-index-url", "-f", "--find-links", "--no-index", "--pre",
                          "--trusted-host", "--prefer-binary", "--only-binary", "--no-binary")  # fmt: skip
_OTHER_FILE: Final = re.compile(r"(-r|--requirement|-c|--constraint)[\s=]*(.+)")
_EDITABLE: Final = re.compile(r"(?:-e|--editable)[\s=]*(.+)")


@dataclass(frozen=True, slots=True)
class Requirements:
    """A requirements.txt, read, with the files that it includes (``-r``)."""

    file: Path
    lines: tuple[tuple[str, Requirement], ...] = ()
    """The lines that name a distribution, each with its place: FILE:NUMBER."""
    options: tuple[str, ...] = ()
    named: tuple[Path, ...] = ()
    """Files and folders of this machine that it names: a build depends on them, too."""
    needs_resolver: bool = False
    """There are lines that only a resolver understands: files, URLs, constraints."""
    says: tuple[str, ...] = ()
    """All lines, without comments."""
    asked: tuple[str, ...] = ()
    """The lines for a resolver: paths are absolute; without options, hashes and what included files say themselves."""
    hashes: tuple[tuple[str, str], ...] = ()
    """``--hash`` of a distribution, by its name."""

    @property
    def asks(self) -> bool:
        """Whether it asks for anything."""
        return bool(self.lines) or self.needs_resolver

    @property
    def digest(self) -> str:
        """sha256 of what it says, and of what it names here; the same on each machine."""
        digest = hashlib.sha256("\n".join(self.says).encode())
        for file in (each for path in self.named for each in walk(path)):
            digest.update(file.read_bytes())
        return digest.hexdigest()


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
    for number, line in _logical_lines(file):
        where = f"{file}:{number}"
        text = line if line.startswith("-") else re.split(r"\s--?[a-z]", line, maxsplit=1)[0].strip()
        if other := _OTHER_FILE.fullmatch(text):
            part = _read_other(other[1] in ("-r", "--requirement"), other[2], file, where, root, outer)
        elif text.startswith("-") and re.split(r"[\s=]", text, maxsplit=1)[0] in _SOURCE_OPTIONS:
            part = Requirements(file, options=(_absolute(text, file.parent),))
        elif editable := _EDITABLE.fullmatch(text):
            part = _read_place(editable[1], file, root)
        elif text.startswith("-"):
            raise InvalidSpec(f"{where}: {text!r} is no option of a requirements file: take it out")
        else:
            part = _read_line(text, re.findall(r"--hash[=\s]+(\S+)", line), file, where, root)
        found = Requirements(
            file,
            found.lines + part.lines,
            found.options + part.options,
            found.named + part.named,
            found.needs_resolver or part.needs_resolver,
            (*found.says, line, *part.says),
            found.asked + part.asked,
            found.hashes + part.hashes,
        )
    return found


def _read_place(text: str, file: Path, root: Path) -> Requirements:
    """Read a line that names a path or a URL."""
    asked = text if re.match(r"[a-z+]+:|/", text) else f"{root.absolute()}/{text}"
    return Requirements(file, named=_place(text, root), needs_resolver=True, asked=(asked,))


def _read_line(text: str, hashes: list[str], file: Path, where: str, root: Path) -> Requirements:
    try:
        requirement = Requirement(text)
    except InvalidRequirement as exc:
        if "/" in text or text.endswith((".whl", ".tar.gz", ".zip")):
            return _read_place(text, file, root)
        why = str(exc).splitlines()[0]
        raise InvalidSpec(f"{where}: {text!r} is not a requirement ({why}): write NAME==VERSION") from None
    return Requirements(
        file,
        ((where, requirement),),
        named=_place(requirement.url or "", root),
        asked=(str(requirement),),
        hashes=tuple((canonicalize_name(requirement.name), each) for each in hashes),
    )


def _read_other(asks: bool, name: str, file: Path, where: str, root: Path, outer: tuple[Path, ...]) -> Requirements:
    """Read what ``-r`` or ``-c`` names; constraints are left to the resolver."""
    if "://" in name:
        return Requirements(file, needs_resolver=True, asked=(f"{'-r' if asks else '-c'} {name}",))
    other = file.parent / name
    if not other.is_file():
        raise InvalidSpec(f"{where}: there is no file {other}: correct the path, which is meant from {file.parent}")
    if other.resolve() in (each.resolve() for each in (*outer, file)):
        raise InvalidSpec(f"{where}: {other} includes itself: take that line out")
    constraints = Requirements(other, needs_resolver=True, asked=(f"-c {other.absolute()}",))
    part = _read(other, root, (*outer, file)) if asks else constraints
    return replace(part, named=(other, *part.named))


def _place(text: str, root: Path) -> tuple[Path, ...]:
    """Return the file or folder that a requirement names, if it is one of this machine."""
    if "://" in text and not text.startswith("file://"):
        return ()
    path = re.sub(r"\[[^]]*\]$|\s*[;#].*$", "", text.removeprefix("file://").removeprefix("file:")).strip()
    return (root / path,) if path and (root / path).exists() else ()


def _logical_lines(file: Path) -> Iterable[tuple[int, str]]:
    """Yield lines as pip reads them: continued ones joined, comments taken off."""
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
        if whole:
            yield start, whole
        joined, start = "", 0


def _absolute(option: str, folder: Path) -> str:
    """Make the folder of ``--find-links`` absolute: it is relative to the file that has the option."""
    name, value = (*re.split(r"[\s=]+", option, maxsplit=1), "")[:2]
    if name in ("-f", "--find-links") and (folder / value).exists():
        return f"{name} {(folder / value).absolute()}"
    return option
