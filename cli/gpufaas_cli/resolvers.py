"""
The programs that resolve requirements and install them: uv where there is one, else pip. They are separate processes.

What the nodes have is shown to them as a folder of wheels without content, and held by constraints: both need nothing
but documented options (docs/adr/0066). pip reads markers for its own Python and machine: for others there must be uv.
pip's settings (PIP_INDEX_URL, PIP_FIND_LINKS, pip.conf) apply to both.
"""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from packaging.utils import InvalidName, canonicalize_name
from packaging.version import InvalidVersion, Version

from gpufaas_cli.locks import Missing, machine_of, read_pins
from gpufaas_core.environment import Distribution, Environment, measure
from gpufaas_core.errors import InvalidSpec

_EXTRA: Final = re.compile(r"extra\s*==\s*['\"]([-._a-zA-Z0-9]+)['\"]")
_GLIBC: Final = re.compile(r"manylinux_2_(\d+)_(\w+)")
_KNOWN_GLIBC: Final = (17, 28, *range(31, 41))
"""The minor versions for which uv has a name of a platform."""
_SETTING: Final = re.compile(r"\.(index-url|extra-index-url|find-links|no-index|trusted-host|constraint)='(.*)'$")
_OF_UV: Final = {"index-url": "--default-index", "extra-index-url": "--index", "trusted-host": "--allow-insecure-host",
                 "constraint": "--constraints"}  # fmt: skip


_HEADING: Final = re.compile("The conflict is caused by:|ERROR: THESE PACKAGES DO NOT MATCH THE HASHES")


class Unresolved(InvalidSpec):
    """The resolver found no way. The message is its reason, in three lines at most."""


def find_uv() -> str | None:
    try:
        found: str = importlib.import_module("uv").find_uv_bin()
    except (ImportError, FileNotFoundError):
        return shutil.which("uv")
    return found


def resolve(
    asked: Sequence[str],
    provided: Mapping[str, Distribution],
    pinned: Collection[str],
    kept: Sequence[Missing],
    environment: Environment,
) -> list[Missing]:
    """
    Return what *asked*, lines of a requirements file, need in *environment* besides *provided*.

    :param provided: packages that are there, by name
    :param pinned: those of *provided* that must have their version; uv prefers the version of others
    :param kept: versions that are preferred
    :raises Unresolved: there is no way
    """
    with tempfile.TemporaryDirectory(prefix="gpufaas-build-") as scratch:
        file, constraints, answer = (Path(scratch, name) for name in ("requirements.txt", "constraints.txt", "answer"))
        versions = _write_stubs(provided, environment, Path(scratch, "provided"))
        liked = {each.name: each.version for each in kept if each.version}
        held = {name: version for name, version in versions.items() if name in pinned}
        constraints.write_text(_pins(held))
        file.write_text("\n".join([f"--find-links {scratch}/provided", f"-c {constraints}", *asked]) + "\n")
        if uv := find_uv():
            answer.write_text(_pins(versions | liked))  # versions that uv finds there are those that it prefers
            asked = ("--generate-hashes", "--no-header", "--no-annotate", str(file), "-o", str(answer))
            _uv(uv, environment, "compile", *asked)
            found = [each for _, each in read_pins(answer.read_text())]
        else:
            asked = ("--dry-run", "--ignore-installed", "--report", str(answer), "--target", scratch, "-r", str(file))
            try:
                constraints.write_text(_pins(liked | held))
                _pip(environment, *asked)
            except Unresolved:
                if not liked:
                    raise
                constraints.write_text(_pins(held))
                _pip(environment, *asked)
            found = [_of_report(each) for each in json.loads(answer.read_text())["install"]]
    return [each for each in found if not each.version or versions.get(each.name) != each.version]


def _pins(versions: Mapping[str, str]) -> str:
    return "".join(f"{name}=={version}\n" for name, version in versions.items())


def install(missing: Sequence[Missing], options: Sequence[str], environment: Environment, site: Path) -> None:
    """
    Install *missing*, and no more, into the folder *site*. What would differ by machine is left out.

    :raises Unresolved: it cannot be had, or has other digests
    """
    if not all(each.hashes for each in missing):  # pip wants the digest of all files, or of none
        missing = [replace(each, hashes=()) for each in missing]
    with tempfile.TemporaryDirectory(prefix="gpufaas-build-") as scratch:
        file = Path(scratch, "requirements.txt")
        file.write_text("\n".join([*options, *(each.line() for each in missing)]) + "\n")
        arguments = ("--target", str(site.absolute()), "--no-deps", "-r", str(file))
        if uv := find_uv():
            _uv(uv, environment, "install", "--link-mode", "copy", *arguments)
        else:
            _pip(environment, "--no-compile", *arguments)
    shutil.rmtree(site / "bin", ignore_errors=True)  # scripts name this machine's interpreter
    for each in (*site.glob(".lock"), *site.glob("*.dist-info/*")):
        if each.name in (".lock", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json", "uv_build.json"):
            each.unlink()
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
        requires = [" ".join(text.split()) for text in each.requires]
        lines += [f"Requires-Dist: {text}" for text in requires]
        extras = {canonicalize_name(extra) for text in requires for extra in _EXTRA.findall(text)}
        lines += [f"Provides-Extra: {extra}" for extra in sorted(extras)]
        stem = f"{name.replace('-', '_')}-{version}"
        with zipfile.ZipFile(folder / f"{stem}-9-{tag}.whl", "w") as wheel:
            wheel.writestr(f"{stem}.dist-info/METADATA", "\n".join(lines) + "\n")
            wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
            wheel.writestr(f"{stem}.dist-info/RECORD", "")
    return versions


def _of_report(chosen: Any) -> Missing:
    """Return a distribution of pip's report."""
    name, source = canonicalize_name(chosen["metadata"]["name"]), chosen["download_info"]
    hashes = source.get("archive_info", {}).get("hashes", {})
    url = source["url"] if chosen.get("is_direct") else ""
    return Missing(name, chosen["metadata"]["version"], url, tuple(f"{kind}:{each}" for kind, each in hashes.items()))


def _uv(uv: str, environment: Environment, command: str, *arguments: str) -> None:
    options = ["--quiet", "--no-progress", "--color", "never", "--python", sys.executable, *_settings_of_pip()]
    if environment.build_target != measure().build_target:
        found = [_GLIBC.fullmatch(each) for each in environment.platforms]
        minor, machine = max(((int(each[1]), each[2]) for each in found if each), default=(17, "x86_64"))
        minor = max((each for each in _KNOWN_GLIBC if each <= minor), default=17)
        options += ["--only-binary", ":all:", "--python-version", _release(environment)]
        options += ["--python-platform", f"{machine}-manylinux_2_{minor}"]
    _run([uv, "pip", command, *options, *arguments])


def _settings_of_pip() -> list[str]:
    """Return pip's settings of where packages are, as options of uv."""
    if any(re.fullmatch(r"UV_(DEFAULT_INDEX|INDEX|INDEX_URL|EXTRA_INDEX_URL|FIND_LINKS)", name) for name in os.environ):
        return []
    asked = [sys.executable, "-P", "-m", "pip", "config", "list"]
    said = subprocess.run(asked, check=False, capture_output=True, text=True).stdout.splitlines()
    # Sorted by where they are set: what the environment says, `:env:`, comes first, and is the one that counts.
    settings = {found[1]: found[2] for found in map(_SETTING.search, reversed(said)) if found}
    options = ["--index-strategy", "unsafe-best-match"] if "extra-index-url" in settings else []  # as pip's
    for name, value in settings.items():
        if name == "no-index":
            options += ["--no-index"] if value.lower() in ("1", "true", "yes", "on") else []
        else:
            for each in re.split(r"\\n|\s", value):
                options += [_OF_UV.get(name, f"--{name}"), each] if each else []
    return options


def _pip(environment: Environment, *arguments: str) -> None:
    here, options = measure(), ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    if machine_of(environment) != machine_of(here):
        raise Unresolved(f"pip resolves for {machine_of(here)} only, and the nodes have {machine_of(environment)}: "
                         "`pip install uv`, and build again")  # fmt: skip
    if environment.build_target != here.build_target:
        options += ["--only-binary", ":all:", "--implementation", environment.implementation, "--abi", environment.abi]
        options += ["--python-version", _release(environment)]
        options += [each for platform in environment.platforms for each in ("--platform", platform)]
    _run([sys.executable, "-P", "-m", "pip", "install", *options, *arguments])


def _release(environment: Environment) -> str:
    found = re.match(r"[0-9.]+[0-9]", environment.python)
    return found[0] if found else environment.python_minor


def _run(command: Sequence[str]) -> None:
    """:raises Unresolved: it failed; with its words"""
    done = subprocess.run(
        command, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "PIP_USER": "0", "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    if "No module named pip" in done.stdout:
        raise Unresolved(f"{sys.prefix} has neither uv nor pip: run `{sys.executable} -m ensurepip`")
    if done.returncode != 0:
        raise Unresolved(_reason(done.stdout))


def _reason(output: str) -> str:
    """Return the resolver's explanation: what conflicts with what, or its errors; three of its lines at most."""
    text = re.sub(r" \(from (-[rc] )?\S+ \(line \d+\)\)|error: No solution found when.*\n|cause: |\bnote: ", "", output)
    lines = [line.strip() for line in text.splitlines()]
    if start := [number for number, line in enumerate(lines, 1) if _HEADING.match(line)]:
        lines = [*lines[start[0] :], ""]
        lines = lines[: lines.index("")]
    elif errors := [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]:
        lines = errors
    elif failed := [line.removeprefix("× ") for line in lines if line.startswith("× ")]:
        # git, or the build of a package, which pip shows between lines of its own
        said = [line for line in lines if line and not re.match("×|│|╰|error:|\\[|hint:|This error originates", line)]
        lines = [failed[0], *said[-1:]]
    lines = [line.removeprefix("error: ") for line in lines if line]
    return (
        "; ".join(lines if len(lines) <= 3 else [*lines[:2], lines[-1]]) + ": check names, versions and package index"
    )
