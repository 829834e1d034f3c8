"""
What a node's Python environment provides to functions, and whether a bundle can run in it.

Names, versions, markers and tags follow Python's packaging standards: PEP 440 (versions), PEP 508 (requirements and
markers), PEP 425 and 600 (tags of wheels). They are evaluated for the described environment, not for this process.
"""

import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache

from msgspec import Struct, json
from msgspec.structs import replace
from packaging import tags
from packaging.markers import UndefinedEnvironmentName, default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from gpufaas_core.bundle import Needs
from gpufaas_core.files import FileIdentity, identity

_OF_A_KERNEL = ("platform_release", "platform_version")
"""These markers differ between equal machines, and no package asks for them: they are left empty."""
_PYTHON = re.compile(r"\d{1,3}\.\d{1,3}(\D|$)")


FIXED = ("gpufaas", "msgspec", "numpy", "safetensors", "torch", "tqdm", "typing-extensions")
"""Packages that the fork server has imported: its workers have them, whatever their functions bring."""


class Distribution(Struct, frozen=True, omit_defaults=True):
    """One installed package."""

    version: str
    requires: tuple[str, ...] = ()
    """Its requirements as in PEP 508, those of its extras included."""


class Environment(Struct, frozen=True):
    """One Python environment: which wheels it accepts, and what is installed in it."""

    python: str
    """The full version of Python: ``3.11.7``."""
    implementation: str
    """As in tags: ``cp``."""
    abi: str
    """``cp311``."""
    platforms: tuple[str, ...]
    """Platform tags of wheels that run there, the most specific first: ``manylinux_2_36_x86_64``."""
    markers: dict[str, str]
    """The values of PEP 508's markers."""
    distributions: dict[str, Distribution]
    """The installed packages, by canonical name."""
    nodes: tuple[str, ...] = ()
    """The nodes that have it."""
    fixed: tuple[str, ...] = FIXED
    """The packages of which no function can bring its own version."""

    def __post_init__(self) -> None:
        """:raises ValueError: no wheel can be chosen for it"""
        if not _PYTHON.match(self.python) or not self.platforms:
            raise ValueError(f"Python {self.python[:80]!r} on {len(self.platforms)} platforms is no environment")

    @property
    def python_minor(self) -> str:
        """``3.11``."""
        return ".".join(self.python.split(".")[:2])

    @property
    def build_target(self) -> tuple[str, str, str, tuple[str, ...]]:
        """A wheel that was made in an environment with the same build target runs in this one."""
        return self.python_minor, self.implementation, self.abi, self.platforms

    def __str__(self) -> str:
        where = f"{'node' if len(self.nodes) == 1 else 'nodes'} {', '.join(self.nodes)}" if self.nodes else "here"
        return f"{where}: Python {self.python} ({self.abi}, {self.platforms[0]})"


def measure() -> Environment:
    """
    Return the environment of this process. Blocks for 0.3 s with a hundred packages. The result is kept until a folder
    in ``sys.path`` changes, so that it shows what an operator installs.
    """
    return _measured(tuple(map(_found, sys.path)))


@lru_cache(maxsize=1)
def _measured(_: tuple[object, ...]) -> Environment:
    found: dict[str, Distribution] = {}
    for each in importlib.metadata.distributions():
        name = each.metadata["Name"]
        if name:  # of duplicates the first counts: that is the one that is imported
            found.setdefault(canonicalize_name(name), Distribution(each.version, tuple(each.requires or ())))
    first = next(tags.sys_tags())
    markers = {key: "" if key in _OF_A_KERNEL else str(value) for key, value in default_environment().items()}
    return Environment(
        python=platform.python_version(),
        implementation=tags.interpreter_name(),
        abi=first.abi,
        platforms=tuple(tags.platform_tags()),
        markers=markers,
        distributions=dict(sorted(found.items())),
    )


def _found(folder: str) -> tuple[str, FileIdentity | None]:
    try:
        return folder, identity(os.stat(folder or "."))
    except OSError:
        return folder, None


def grouped(by_node: Mapping[str, Environment]) -> list[Environment]:
    """Return the different environments of *by_node*, each with its nodes; the one of most nodes comes first."""
    groups: dict[bytes, tuple[Environment, list[str]]] = {}
    for node, environment in sorted(by_node.items()):
        groups.setdefault(json.encode(environment, order="deterministic"), (environment, []))[1].append(node)
    largest_first = sorted(groups.values(), key=lambda each: (-len(each[1]), each[1]))
    return [replace(environment, nodes=tuple(nodes)) for environment, nodes in largest_first]


def applies(requirement: Requirement, environment: Environment, extra: str = "") -> bool:
    """Whether the marker of *requirement* holds in *environment* if *extra* was asked for."""
    try:
        return requirement.marker is None or requirement.marker.evaluate({**environment.markers, "extra": extra})
    except UndefinedEnvironmentName:
        return False


def required_by(requirement: Requirement, environment: Environment, requires: tuple[str, ...]) -> Iterator[Requirement]:
    """Yield those of *requires*, the needs of the package that *requirement* names, that apply in *environment*."""
    for text in requires:
        try:
            needed = Requirement(text)
        except InvalidRequirement:
            continue  # old packages have such; pip ignores them as well
        if any(applies(needed, environment, extra) for extra in ("", *requirement.extras)):
            yield needed


def installed(requirement: Requirement, environment: Environment) -> bool:
    """Whether *environment* has a version that satisfies *requirement*. The package's own needs are not checked."""
    found = environment.distributions.get(canonicalize_name(requirement.name))
    return (
        found is not None
        and requirement.url is None
        and requirement.specifier.contains(found.version, prereleases=True)
    )


def supported_tags(environment: Environment) -> frozenset[str]:
    """Return the tags of wheels that it accepts: ``cp311-cp311-manylinux_2_17_x86_64``, ``py3-none-any`` …"""
    major, minor = map(int, environment.python_minor.split("."))
    interpreter = f"{environment.implementation}{major}{minor}"
    own = (
        tags.cpython_tags((major, minor), [environment.abi], environment.platforms)
        if environment.implementation == "cp"
        else tags.generic_tags(interpreter, [environment.abi], environment.platforms)
    )
    return frozenset(map(str, (*own, *tags.compatible_tags((major, minor), interpreter, environment.platforms))))


def misfits(needs: Needs, environment: Environment) -> list[str]:
    """Return why a bundle with these *needs* cannot run in *environment*, a phrase per reason; empty: it can."""
    found = []
    if needs.python and needs.python != environment.python_minor:
        found.append(f"its packages were chosen for Python {needs.python}, and there is {environment.python}")
    elif needs.wheels:
        supported = supported_tags(environment)
        found += [
            f"{name} is a wheel for {next(iter(wheel), 'nothing')}, which {environment.abi} on "
            f"{environment.platforms[0]} does not take"
            for name, wheel in needs.wheels.items()
            if supported.isdisjoint(wheel)
        ]
    for text in needs.packages:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            found.append(f"it needs {text[:80]!r}, which is no requirement")
            continue
        if not installed(requirement, environment):
            have = environment.distributions.get(canonicalize_name(requirement.name))
            found.append(f"it needs {text}, and there is {f'version {have.version}' if have else 'none'}")
    return found
