"""
``requirements.lock``: what a build adds to the packages of the nodes, by version and digest. It belongs into git.

It is a requirements file. Its second line says for what it was made: a build that finds the same resolves nothing
(docs/adr/0066).
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import msgspec
from packaging.utils import canonicalize_name

from gpufaas_core.bundle import Needs
from gpufaas_core.environment import Environment, misfits
from gpufaas_core.errors import InvalidSpec

LOCK: Final = "requirements.lock"
_TITLE: Final = "# What this function adds to the packages of its nodes. `gpufaas build` writes it: commit it."
_MADE_FOR: Final = "# made for "
_PIN: Final = re.compile(r"([\w.-]+)(?:\[.*\])?(?:==(\S+)| @ (\S+))")


@dataclass(frozen=True, slots=True)
class Missing:
    """One distribution to be installed."""

    name: str
    """Empty: uv knows it by its place only."""
    version: str
    """Empty: uv knows it by its URL only."""
    url: str = ""
    """Where it is installed from, if the requirement names a URL or a path."""
    hashes: tuple[str, ...] = ()
    """The digests, ``sha256:…``, of the files that may be installed. A folder or a repository has none."""

    def __str__(self) -> str:
        return f"{self.name}=={self.version}" if self.version else self.name or self.url

    @property
    def lockable(self) -> bool:
        """Whether it is the same on each machine."""
        return bool(self.hashes) and (not self.url or self.url.startswith(("http:", "https:")))

    def line(self, between: str = " ") -> str:
        """Return it as a line of a requirements file."""
        asked = f"{self.name} @ {self.url}" if self.url and self.name else self.url or str(self)
        return between.join([asked, *(f"--hash={each}" for each in self.hashes)])


class MadeFor(msgspec.Struct, frozen=True):
    requirements: str = ""
    """A digest of what was asked for."""
    python: str = ""
    """Version and machine (`machine_of`)."""
    needs: Needs | None = None
    """What all of it needs of the nodes; None: that is known when it is installed."""


@dataclass(frozen=True, slots=True)
class Lock:
    """What is installed in ``site/``."""

    missing: tuple[Missing, ...] = ()
    """Sorted by name."""
    made_for: MadeFor = field(default_factory=MadeFor)
    inputs: str = ""
    """On what its files depend besides: the best tag of wheels that the nodes take, folders that it names."""
    numbers: dict[str, int] = field(default_factory=dict)
    """The line of each package in the file where it was read."""

    @property
    def needs(self) -> Needs | None:
        return self.made_for.needs

    @property
    def key(self) -> str:
        """What has the same key is installed as the same files."""
        text = "\n".join([self.made_for.python, self.inputs, *(each.line() for each in self.missing)])
        return hashlib.sha256(text.encode()).hexdigest()

    def misfit(self, file: Path, now: MadeFor, environments: Sequence[Environment]) -> str:
        """Return which line of *file*, where it was read, no longer fits, and why; empty: it fits."""
        if self.made_for.requirements != now.requirements or self.needs is None:
            return f"{file}:2: requirements.txt has changed"
        if self.made_for.python != now.python:
            return f"{file}:2: it is for {self.made_for.python}, and the nodes have {now.python}"
        reasons = (each for one in environments for each in misfits(self.made_for.needs or Needs(), one))
        return next((f"{file}:{self.numbers.get(each.partition('==')[0], 2)}: {each}" for each in reasons), "")

    def write(self, file: Path) -> None:
        """Write *file*; or remove it, where nothing is installed, or what is not the same on each machine."""
        if not self.missing or not all(each.lockable for each in self.missing):
            file.unlink(missing_ok=True)
            return
        made_for = _MADE_FOR + msgspec.json.encode(self.made_for).decode()
        file.write_text("\n".join([_TITLE, made_for, *(each.line(" \\\n    ") for each in self.missing), ""]))


def machine_of(environment: Environment) -> str:
    """Return what markers, and so what is resolved, depend on."""
    machine = f"{environment.markers.get('sys_platform', '')} {environment.markers.get('platform_machine', '')}"
    return f"Python {environment.python_minor} ({environment.abi}) on {machine}"


def read_lock(file: Path) -> Lock | None:
    """
    Return what *file* says; None: there is none.

    :raises InvalidSpec: it is malformed; names the line
    """
    if not file.is_file():
        return None
    undo = f"undo that edit, or `rm {file}` and build again"
    try:
        text = file.read_text("utf-8")
        head = re.search(rf"^{_MADE_FOR}(.*)", text, re.MULTILINE)
        made_for = msgspec.json.decode(head[1], type=MadeFor) if head else MadeFor()
    except ValueError as exc:  # it is no UTF-8, or no JSON, or not ours
        raise InvalidSpec(f"{file}:2: {exc}: {undo}") from None
    pins = read_pins(text)
    for number, each in pins:
        if not each.name or not each.hashes or not (each.version or each.url):
            raise InvalidSpec(f"{file}:{number}: {each} is no NAME==VERSION with --hash=sha256:… of its files: {undo}")
    return Lock(tuple(each for _, each in pins), made_for, numbers={each.name: number for number, each in pins})


def read_pins(text: str) -> list[tuple[int, Missing]]:
    """Return the distributions that *text* names, as uv writes it, each with the number of its line."""
    found: list[tuple[int, Missing]] = []
    for number, line in enumerate(text.splitlines(), 1):
        asked, *hashes = re.split(r"\s*--hash=", line.removesuffix("\\").strip())
        if asked and not asked.startswith("#"):
            pin = _PIN.fullmatch(asked)
            each = Missing(canonicalize_name(pin[1]), pin[2] or "", pin[3] or "") if pin else Missing("", "", asked)
            found.append((number, each))
        if found and hashes:  # of the distribution above
            number, each = found[-1]
            found[-1] = number, replace(each, hashes=(*each.hashes, *hashes))
    return found
