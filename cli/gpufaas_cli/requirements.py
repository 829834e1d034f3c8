"""
A function's requirements, resolved against the packages of the nodes on which it will run (`BuildTarget`).

Packages that are installed there are provided: they are used as they are and not installed again, since torch alone
brings gigabytes of CUDA packages. Only missing packages are installed, into a folder of the function's own, which comes
first in the path of its workers. So it may bring its own version of what is provided, except of what is fixed: that is
loaded before a worker is forked (`Environment.fixed`).

Most functions require nothing, or what is provided, or what their lock says (`locks`): then nothing is resolved.
Otherwise uv resolves as if it ran on the nodes (`resolvers`).
"""

import hashlib
import importlib.metadata
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gpufaas_cli.build_target import BuildTarget
from gpufaas_cli.locks import LOCK, Lock, MadeFor, machine_of, place, read_lock, shown
from gpufaas_cli.requirement_files import Requirements
from gpufaas_cli.resolvers import Unresolved, UvFailed, install, resolve
from gpufaas_core.bundle import Needs
from gpufaas_core.environment import Distribution, Environment, applies, installed, measure, misfits, required_by
from gpufaas_core.errors import InvalidSpec

RESERVED: Final = frozenset(("torch", "numpy", "safetensors"))
"""Packages that every worker has: where one is not installed, the environment is wrong, and not the function."""
_IMAGE: Final = "; a function with its own torch is an image (`gpufaas new NAME --lang python3-torch-image`)"


def find_lock(
    requirements: Sequence[Requirements], target: BuildTarget, file: Path, progress: Callable[[str], None]
) -> Lock:
    """
    Return what the function lacks: as *file* says, if that fits; else resolved anew, where possible with its versions.

    :param file: the lock beside the function's requirements.txt; `settle` writes it
    :raises InvalidSpec: they cannot be met beside what is fixed, or the lock is wrong; says where and why
    """
    asking, environment = [each for each in requirements if each.asks], target.shared
    satisfied, own = _look(asking, target)
    digest = hashlib.sha256("".join(each.digest for each in asking).encode()).hexdigest()[:32]
    made_for, inputs = MadeFor(digest, machine_of(environment)), " ".join(environment.platforms[:2])
    old = read_lock(file) if asking else None
    unfit = old.misfit(file, made_for, target.environments) if old is not None else ""
    if old is not None and not unfit:
        return replace(old, inputs=inputs)
    if satisfied:
        return Lock()
    progress(f"{unfit}: resolving anew" if unfit else "resolving requirements")
    if len({each.build_target[:3] for each in target.environments}) > 1 or not environment.platforms:
        raise InvalidSpec(
            f"{asking[-1].file} asks for packages that not all nodes have, and no wheels fit all of them "
            f"({'; '.join(map(str, target.environments))}): name nodes that are alike (constraints), or install the "
            "packages there"
        )
    lock = Lock(_resolve(asking, target, own, old.pins if old is not None else ()), made_for, inputs)
    return lock if lock.is_lockable else replace(lock, inputs=inputs + digest)


def _resolve(
    requirements: Sequence[Requirements], target: BuildTarget, own: set[str], old: Sequence[str]
) -> tuple[str, ...]:
    """
    Return pins of what is missing beside what is provided, or, where that has no solution, beside what is fixed.

    :param own: what is provided in versions that were not asked for
    :param old: what was locked before
    """
    environment, files = target.shared, [each.file for each in requirements]
    said = ", ".join(map(str, files))
    have = {name: each for name, each in environment.distributions.items() if name not in own}
    try:
        try:
            found = resolve(files, have, have, old, environment)
        except Unresolved:
            found = resolve(files, have, environment.fixed, old, environment)
    except UvFailed as exc:
        only = " with wheels" if environment.build_target != measure().build_target else ""
        fixed = _IMAGE * any(re.search(rf"(?<![\w./-]){name}(?![\w/-])", str(exc)) for name in environment.fixed)
        raise InvalidSpec(
            f"{said} cannot be met{only} beside what {target.who} provides ({environment}): {exc}{fixed}"
        ) from None
    for name in RESERVED & {shown(pin).partition("==")[0] for pin in found}:
        one = next((each for each in target.environments if name not in each.distributions), environment)
        raise InvalidSpec(
            f"{said} needs {name}, which every worker has, but not {target.who} ({one}): install it there with "
            "`pip install 'gpufaas[node]'`, or build for a platform that has it (--gateway URL)"
        )
    for number, pin in enumerate(found):  # the author may allow some of its files only
        if hashes := [each for of in requirements for each in of.hashes.get(shown(pin).partition("==")[0], ())]:
            found[number] = " \\\n    ".join([pin.partition(" \\\n")[0], *(f"--hash={each}" for each in hashes)])
    return tuple(found)


def _look(requirements: Sequence[Requirements], target: BuildTarget) -> tuple[bool, set[str]]:
    """
    Return whether *target* has all that is required, and the names of what it has in versions that are not asked for.

    :raises InvalidSpec: a requirement contradicts a version that is fixed; says where, and both versions
    """
    satisfied, contradicted = not any(each.needs_resolver for each in requirements), set[str]()
    for one in target.environments:
        asked = [(where, each) for of in requirements for where, each in of.lines if applies(each, one)]
        for where, each in asked:
            name = canonicalize_name(each.name)
            have = one.distributions.get(name)
            if have is None or installed(each, one):
                continue
            if name in one.fixed:
                raise InvalidSpec(
                    f"{where}: {each} conflicts with {name} {have.version}, which {target.who} provides ({one}) and "
                    f"has loaded: ask for a range that has {have.version} in it or drop the pin{_IMAGE}"
                )
            contradicted.add(name)
        closure = _closure([each for _, each in asked], one, one.distributions)
        satisfied = satisfied and all(have and installed(each, one) for each, have in closure)
    return satisfied, contradicted


def _closure(
    todo: list[Requirement], environment: Environment, within: Mapping[str, Distribution]
) -> Iterator[tuple[Requirement, Distribution | None]]:
    """Yield *todo* and, of what *within* has, all that it requires in turn; each with what it has of that name."""
    done = set[str]()
    while todo:
        each = Requirement(str(todo.pop()))
        each.marker = None
        if str(each) not in done:
            done.add(str(each))
            found = within.get(canonicalize_name(each.name))
            yield each, found
            todo += required_by(each, environment, found.requires) if found else ()


def install_missing(
    lock: Lock, requirements: Sequence[Requirements], target: BuildTarget, site: Path, progress: Callable[[str], None]
) -> None:
    """
    Install what *lock* names, without dependencies, into the folder *site*; say what of it the platform has, too.

    :raises InvalidSpec: it cannot be had, or is not what was locked; names the line of the lock
    """
    for name, _, version in (shown(pin).partition("==") for pin in lock.pins):
        have = {one.distributions[name].version for one in target.environments if name in one.distributions}
        if have:
            progress(f"brings its own {name} {version} (the platform has {' and '.join(sorted(have))})")
    what, folder = ", ".join(map(shown, lock.pins)), requirements[-1].file.parent
    progress(f"installing {what}")
    try:
        install(lock.pins, [each for of in requirements for each in of.options], target.shared, folder, site)
    except UvFailed as exc:
        file = folder / LOCK
        where = f"{place(file, str(exc))}: `rm {file}` to resolve anew: " if lock.is_read else ""
        raise InvalidSpec(f"{where}{what} cannot be installed for {target.shared}: {exc}") from None


def settle(lock: Lock, requirements: Sequence[Requirements], target: BuildTarget, site: Path, file: Path) -> Lock:
    """
    Return *lock*, which is installed in *site*, with its needs; if it was resolved anew, write it to *file*.

    :raises InvalidSpec: a node of *target* has not all of that; says which, and why
    """
    if lock.is_read:
        return lock
    settled = replace(
        lock, made_for=msgspec.structs.replace(lock.made_for, needs=find_needs(requirements, target, site))
    )
    if lock.pins or (any(each.asks for each in requirements) and read_lock(file)):
        settled.write(file)
    return settled


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
    todo = [each for of in requirements for _, each in of.lines if applies(each, environment)]
    closure = _closure([*todo, *map(Requirement, bundled)], environment, bundled)
    packages = {str(each) for each, found in closure if found is None}
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
