"""Nobody is told to install what is nowhere: the package is on no index, and extras have the names that are said."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
PLACES = ("*.md", "*.py", "*.txt", "*.yml", "*.yaml", "Dockerfile", "Makefile")


def texts() -> dict[str, str]:
    """Return all that people read of the tree, but for tests and history, by path."""
    tops = [each for each in ROOT.iterdir() if not each.name.startswith((".", "tests", "build", "dist", "CHANGELOG"))]
    found = [*tops, *(each for top in tops if top.is_dir() for place in PLACES for each in top.rglob(place))]
    return {str(each.relative_to(ROOT)): each.read_text(errors="replace") for each in found if each.is_file()}


def test_the_package_is_installed_from_a_clone_and_extras_into_what_is_there() -> None:
    told = {(path, line) for path, text in texts().items() for line in re.findall(r"pip install [^`\n]*", text)}

    assert any(line.startswith("pip install DIR") for _, line in told)
    assert not [each for each in told if re.search(r"install (-\S+ )*['\"]?gpufaas(?![\[-])\b", each[1])]
    named = {
        extra for _, line in told for each in re.findall(r"gpufaas\[([\w,]+)\]", line) for extra in each.split(",")
    }
    assert named
    assert named <= EXTRAS
