"""
Requirements are resolved and installed by uv, in a process of its own.

What the nodes have is shown to it as a folder of wheels without content, and held by constraints (docs/adr/0066). Its
settings (UV_DEFAULT_INDEX, UV_FIND_LINKS, uv.toml) say where packages are; pip's do not count.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

from packaging.utils import InvalidName, canonicalize_name
from packaging.version import InvalidVersion, Version
from uv import find_uv_bin

from gpufaas_cli.locks import PIN, shown
from gpufaas_core.environment import Distribution, Environment, measure
from gpufaas_core.errors import InvalidSpec

_GLIBC: Final = re.compile(r"manylinux_2_(\d+)_(\w+)")
_KNOWN_GLIBC: Final = (17, 28, *range(31, 41))
"""The minor versions for which uv has a name of a platform."""


class UvFailed(InvalidSpec):
    """uv found out nothing, as where an index does not answer. The message is its reason, in one line."""


class Unresolved(UvFailed):
    """There is no way; with fewer constraints there may be one."""


def resolve(
    files: Sequence[Path],
    provided: Mapping[str, Distribution],
    pinned: Collection[str],
    kept: Sequence[str],
    environment: Environment,
) -> list[str]:
    """
    Return pins of what *files* of requirements need in *environment* besides *provided*, sorted by name.

    :param provided: packages that are there, by name
    :param pinned: those of *provided* that must have their version; that of others is preferred
    :param kept: pins that are preferred
    :raises UvFailed: as `_uv`
    """
    with tempfile.TemporaryDirectory(prefix="gpufaas-build-") as scratch:
        constraints, answer = Path(scratch, "constraints.txt"), Path(scratch, "answer")
        versions = _write_stubs(provided, environment, Path(scratch, "provided"))
        # An option of a file adds to the author's folders of wheels; one of the command would be in place of them.
        links = f"--find-links {scratch}/provided\n"
        constraints.write_text(links + _pins({name: each for name, each in versions.items() if name in pinned}))
        liked = (shown(each).split("==") for each in kept if "==" in shown(each))
        answer.write_text(_pins({**versions, **dict(liked)}))  # versions that uv finds there are those that it prefers
        asked = [*map(str, map(Path.absolute, files)), "-c", str(constraints), "-o", str(answer)]
        _uv(files[-1].parent, environment, "compile", "--generate-hashes", "--no-header", "--no-annotate", *asked)
        # What is installed is a copy: a link to the author's folder leads nowhere on a node.
        found = [pin[0].removeprefix("-e ") for pin in PIN.finditer(answer.read_text())]
        theirs = _pins(versions).splitlines()
    return [pin for pin in found if shown(pin) not in theirs]


def _pins(versions: Mapping[str, str]) -> str:
    return "".join(f"{name}=={version}\n" for name, version in versions.items())


def install(pins: Sequence[str], options: Sequence[str], environment: Environment, folder: Path, site: Path) -> None:
    """
    Install *pins*, and no more, into the folder *site*. What would differ by machine is left out.

    :param options: lines of a requirements file: where packages are
    :param folder: relative paths in *pins* are meant from it
    :raises UvFailed: it cannot be had, or has other digests
    """
    with tempfile.NamedTemporaryFile("w", prefix="gpufaas-build-", suffix=".txt") as file:
        file.write("\n".join([*options, *pins]) + "\n")
        file.flush()
        asked = ["--target", str(site.absolute()), "--no-deps", "-r", file.name]
        asked += [] if all("--hash=" in each for each in pins) else ["--refresh"]  # uv sees no edits in a folder
        _uv(folder, environment, "install", "--link-mode", "copy", *asked)
    shutil.rmtree(site / "bin", ignore_errors=True)  # scripts name this machine's interpreter
    (site / ".lock").unlink(missing_ok=True)
    for record in site.glob("*.dist-info/RECORD"):
        lines = record.read_text("utf-8").splitlines(keepends=True)
        there = [each for each in lines if (site / each.rsplit(",", 2)[0].strip('"')).exists()]
        record.write_text("".join(sorted(there)), "utf-8")


def _write_stubs(provided: Mapping[str, Distribution], environment: Environment, folder: Path) -> dict[str, str]:
    """Write a wheel with nothing but metadata for each of *provided*; return their versions."""
    folder.mkdir()
    python = f"{environment.implementation}{environment.python_minor.replace('.', '')}"
    # As specific as a wheel can be, with a build number: resolvers prefer it to an index's file of the same version.
    tag = re.sub(r"[^\w.-]", "_", f"{python}.py3-{environment.abi}.none-{environment.platforms[0]}.any")
    versions: dict[str, str] = {}
    for name, each in provided.items():
        try:
            version = versions[canonicalize_name(name, validate=True)] = str(Version(each.version))
        except (InvalidName, InvalidVersion):
            continue  # resolvers know no such packages
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {' '.join(text.split())}" for text in each.requires]
        stem = f"{name.replace('-', '_')}-{version}"
        with zipfile.ZipFile(folder / f"{stem}-9-{tag}.whl", "w") as wheel:
            wheel.writestr(f"{stem}.dist-info/METADATA", "\n".join(lines) + "\n")
            wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
            wheel.writestr(f"{stem}.dist-info/RECORD", "")
    return versions


def _uv(folder: Path, environment: Environment, command: str, *arguments: str) -> None:
    """:raises UvFailed, Unresolved: with its words, but for all lines between the second and the last"""
    options = ["--quiet", "--no-progress", "--color", "never", "--python", sys.executable]
    if environment.build_target != measure().build_target:
        found = [_GLIBC.fullmatch(each) for each in environment.platforms]
        minor, machine = max(((int(each[1]), each[2]) for each in found if each), default=(17, "x86_64"))
        minor = max((each for each in _KNOWN_GLIBC if each <= minor), default=17)
        release = re.match(r"[0-9.]+[0-9]", environment.python)
        options += ["--python-version", release[0] if release else environment.python_minor]
        options += ["--only-binary", ":all:", "--python-platform", f"{machine}-manylinux_2_{minor}"]
    done = subprocess.run(
        [find_uv_bin(), "pip", command, *options, *arguments],
        cwd=folder, env={**os.environ, "UV_NO_INSTALLER_METADATA": "1", "COLUMNS": "9999"},  # else it breaks its lines
        check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode != 0:
        text = re.sub(r"error: No solution found when.*\n|error: |cause: ", "", done.stdout)
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        said = "; ".join(lines if len(lines) <= 3 else [*lines[:2], lines[-1]])
        raise (Unresolved if done.returncode == 1 else UvFailed)(f"{said}: check names, versions and package index")
