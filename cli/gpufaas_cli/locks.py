"""
``requirements.lock``: what a build adds to the packages of the nodes, by version and digest. It belongs into git.

The lock is a requirements file. Its second line says for what it was made: a build that finds the same resolves nothing
(docs/adr/0066).
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from gpufaas_core.bundle import Needs
from gpufaas_core.environment import Environment, misfits
from gpufaas_core.errors import InvalidSpec

LOCK: Final = "requirements.lock"
_TITLE: Final = "# What this function adds to the packages of its nodes. `gpufaas build` writes it: commit it."
_MADE_FOR: Final = "# made for "
PIN: Final = re.compile(r"^[^\s#].*(\n[ \t]+.*)*", re.MULTILINE)
"""One distribution, as uv writes it: ``NAME==VERSION``, ``NAME @ URL`` or a place, then its digests, each on a line."""
_LOCKABLE: Final = re.compile(r"[\w.-]+(\[.*\])?(==| @ https?://)\S+(\s*\\\n\s+--hash=\w+:\w+)+")
"""A pin that is the same on each machine."""


def shown(pin: str) -> str:
    """Return ``NAME==VERSION`` of *pin*; of one without a version its name, or else its place."""
    return pin.split()[0]


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

    pins: tuple[str, ...] = ()
    """Sorted by name."""
    made_for: MadeFor = field(default_factory=MadeFor)
    inputs: str = ""
    """On what its files depend besides: the best tag of wheels that the nodes take, folders that it names."""
    is_read: bool = False
    """The lock was read from a file, and fits."""

    @property
    def needs(self) -> Needs | None:
        return self.made_for.needs

    @property
    def key(self) -> str:
        """What has the same key is installed as the same files."""
        return hashlib.sha256("\n".join([self.made_for.python, self.inputs, *self.pins]).encode()).hexdigest()

    @property
    def is_lockable(self) -> bool:
        """Whether it is the same on each machine."""
        return all(map(_LOCKABLE.fullmatch, self.pins))

    def misfit(self, file: Path, now: MadeFor, environments: Sequence[Environment]) -> str:
        """Return which line of *file*, where it was read, no longer fits, and why; empty: it fits."""
        if self.made_for.requirements != now.requirements or self.needs is None:
            return f"{file}:2: requirements.txt has changed"
        if self.made_for.python != now.python:
            return f"{file}:2: it is for {self.made_for.python}, and the nodes have {now.python}"
        reasons = [each for one in environments for each in misfits(self.needs, one)]
        return f"{place(file, reasons[0])}: {reasons[0]}" if reasons else ""

    def write(self, file: Path) -> None:
        """Write *file*; or remove it, where nothing is installed, or what is not the same on each machine."""
        if not self.pins or not self.is_lockable:
            file.unlink(missing_ok=True)
            return
        made_for = _MADE_FOR + msgspec.json.encode(self.made_for).decode()
        file.write_text("\n".join([_TITLE, made_for, *self.pins, ""]))


def place(file: Path, said: str) -> str:
    """Return where the lock *file* has the first pin that *said* names, as FILE:LINE; where it has none, line 2."""
    lines = enumerate(file.read_text("utf-8").splitlines(), 1)
    return f"{file}:{next((number for number, line in lines if PIN.match(line) and shown(line) in said), 2)}"


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
    except ValueError as exc:  # it is not UTF-8, or not JSON, or not ours
        raise InvalidSpec(f"{file}:2: {exc}: {undo}") from None
    for pin in PIN.finditer(text):
        if not _LOCKABLE.fullmatch(pin[0]):
            where, said = f"{file}:{text.count(chr(10), 0, pin.start()) + 1}", pin[0].splitlines()[0].rstrip(" \\")
            raise InvalidSpec(f"{where}: {said} is not NAME==VERSION with --hash=sha256:… of its files: {undo}")
    return Lock(tuple(pin[0] for pin in PIN.finditer(text)), made_for, is_read=True)
