"""Reads requirements.txt for what a build has to know before uv reads it: what it asks for, line by line, and names."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from gpufaas_cli.source_files import walk
from gpufaas_core.errors import InvalidSpec

_SOURCE_OPTION: Final = re.compile(
    r"(-i|--index-url|--extra-index-url|--no-index|--only-binary|--no-binary|(?P<links>-f|--find-links))"
    r"([\s=]+(?P<value>.+))?"
)
_OTHER_FILE: Final = re.compile(r"(-r|--requirement|-c|--constraint)[\s=]*(.+)")
_EDITABLE: Final = re.compile(r"(?:-e|--editable)[\s=]*(.+)")


@dataclass(slots=True)
class Requirements:
    """What a requirements.txt says, with the files that it includes (``-r``)."""

    file: Path
    lines: list[tuple[str, Requirement]] = field(default_factory=list)
    """The lines that name a distribution, each with its place: FILE:NUMBER."""
    options: list[str] = field(default_factory=list)
    """The lines that say where packages are. Their paths are absolute."""
    named: list[Path] = field(default_factory=list)
    """Files and folders of this machine that it names: a build depends on them, too."""
    needs_resolver: bool = False
    """There are lines that only uv understands: files, URLs, constraints."""
    says: list[str] = field(default_factory=list)
    """All lines, without comments."""
    hashes: dict[str, tuple[str, ...]] = field(default_factory=dict)
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

    def add(self, file: Path, outer: tuple[Path, ...] = ()) -> None:
        """
        Read *file*, which *outer* include, each the next one.

        :raises InvalidSpec: it is malformed; names file and line
        """
        for number, line in _logical_lines(file):
            where = f"{file}:{number}"
            self.says.append(line)
            if other := _OTHER_FILE.fullmatch(line):
                self._add_other(other[1] in ("-r", "--requirement"), other[2], where, (*outer, file))
            elif option := _SOURCE_OPTION.fullmatch(line):
                folder = file.parent / (option["value"] or "")
                local = option["links"] and folder.exists()
                self.options.append(f"{option['links']} {folder.absolute()}" if local else line)
            elif editable := _EDITABLE.fullmatch(line):
                self._add_place(editable[1])
            elif line.startswith("-"):
                raise InvalidSpec(f"{where}: {line!r} is no option that uv reads in such a file: take it out")
            else:
                self._add_line(line, where)

    def _add_place(self, text: str) -> None:
        """Add a path, which is meant from the function's folder, or a URL."""
        self.needs_resolver = True
        if "://" not in text or text.startswith("file://"):
            path = re.sub(r"\[[^]]*\]$|\s*[;#].*$", "", text.removeprefix("file://").removeprefix("file:")).strip()
            self.named += [self.file.parent / path] if path and (self.file.parent / path).exists() else []

    def _add_line(self, line: str, where: str) -> None:
        text = re.split(r"\s--?[a-z]", line, maxsplit=1)[0].strip()
        try:
            requirement = Requirement(text)
        except InvalidRequirement as exc:
            if "/" not in text and not text.endswith((".whl", ".tar.gz", ".zip")):
                why = str(exc).splitlines()[0]
                raise InvalidSpec(f"{where}: {text!r} is not a requirement ({why}): write NAME==VERSION") from None
            self._add_place(text)
            return
        self.lines.append((where, requirement))
        if requirement.url:
            self._add_place(requirement.url)
        if hashes := re.findall(r"--hash[=\s]+(\S+)", line):
            self.hashes[canonicalize_name(requirement.name)] = tuple(hashes)

    def _add_other(self, asks: bool, name: str, where: str, outer: tuple[Path, ...]) -> None:
        """Read what ``-r`` names; what ``-c`` does is left to uv."""
        other = outer[-1].parent / name
        self.needs_resolver |= not asks or "://" in name
        if "://" in name:
            return
        if not other.is_file():
            raise InvalidSpec(f"{where}: there is no file {other}: correct its path from {outer[-1].parent}")
        if other.resolve() in (each.resolve() for each in outer):
            raise InvalidSpec(f"{where}: {other} includes itself: take that line out")
        self.named.append(other)
        if asks:
            self.add(other, outer)


def read_requirements(file: Path) -> Requirements:
    """
    Return what *file* asks for. A missing file asks for nothing.

    :raises InvalidSpec: it is malformed; names file and line
    """
    found = Requirements(file)
    if file.is_file():
        found.add(file)
    return found


def _logical_lines(file: Path) -> Iterator[tuple[int, str]]:
    """Yield lines as pip and uv read them: continued ones joined, comments taken off."""
    try:
        text = file.read_text("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise InvalidSpec(f"{file} is not UTF-8 text ({exc.reason} at byte {exc.start}): save it as UTF-8") from None
    joined, start = "", 0
    for number, line in enumerate([*text.splitlines(), ""], 1):  # the last line may be continued, too
        start = start or number
        if line.endswith("\\") and not line.lstrip().startswith("#"):
            joined += line[:-1] + " "
            continue
        whole = re.sub(r"(^|\s)#.*$", "", joined + line).strip()
        if whole:
            yield start, whole
        joined, start = "", 0
