"""
pip, run for another environment than its own: ``python -P -m gpufaas_cli.pip_elsewhere FOLDER ...``

`write_environment` makes FOLDER. pip finds the packages of the other environment there, and no others, and evaluates
markers with that environment's values. pip has options for the wheels of another environment, but none for these two:
it looks for installed packages along `sys.path`, and asks its own interpreter for markers (docs/adr/0029).
"""

import importlib
import json
import re
import sys
import sysconfig
from pathlib import Path
from typing import Final, NoReturn

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from gpufaas_core.environment import Environment

_MARKERS: Final = "markers.json"
_INSTALLED: Final = "installed"
_NAME: Final = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_EXTRA: Final = re.compile(r"extra\s*==\s*['\"]([-._a-zA-Z0-9]+)['\"]")


def write_environment(environment: Environment, folder: Path) -> None:
    """Write the metadata of the packages of *environment* to *folder*, and the values of its markers."""
    (folder / _MARKERS).write_text(json.dumps(environment.markers))
    for name, each in environment.distributions.items():
        try:
            version = str(Version(each.version))
        except InvalidVersion:
            continue  # pip ignores it, too
        if not _NAME.fullmatch(name):
            continue
        requires = [" ".join(text.split()) for text in each.requires]
        extras = sorted({canonicalize_name(extra) for text in requires for extra in _EXTRA.findall(text)})
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {text}" for text in requires]
        lines += [f"Provides-Extra: {extra}" for extra in extras]
        info = folder / _INSTALLED / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("\n".join(lines) + "\n", "utf-8")


def tag_options(environment: Environment) -> list[str]:
    """Return pip's options for wheels, and nothing but wheels, that *environment* takes."""
    release = re.match(r"[0-9.]+[0-9]", environment.python)
    options = ["--only-binary", ":all:", "--implementation", environment.implementation, "--abi", environment.abi]
    options += ["--python-version", release[0] if release else environment.python_minor]
    for each in environment.platforms:
        options += ["--platform", each]
    return options


def main() -> NoReturn:
    folder, *arguments = sys.argv[1:]
    importlib.import_module("pip")  # from here on its modules are found by its own path, without `sys.path`
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    sys.path[:] = [
        str(Path(folder, _INSTALLED)),
        *(each for each in sys.path if each in standard or each.endswith((".zip", "/lib-dynload"))),
    ]
    there = json.loads(Path(folder, _MARKERS).read_text())
    markers = importlib.import_module("pip._vendor.packaging.markers")
    markers.default_environment = lambda: dict(there)  # type: ignore[attr-defined]
    # pip before 23.3 takes the options of another environment with --target only, and then looks at nothing installed.
    options = importlib.import_module("pip._internal.cli.cmdoptions")
    options.check_dist_restriction = lambda *_, **__: None  # type: ignore[attr-defined]
    sys.exit(importlib.import_module("pip._internal.cli.main").main(arguments))


if __name__ == "__main__":
    main()
