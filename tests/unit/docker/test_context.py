"""The files that images are built from."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_all_that_is_packaged_is_there_when_an_image_is_built() -> None:
    """What .dockerignore does not name stays out, and a build without a package of ours fails, or lacks it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packaged = {each.split("/")[0] for each in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]}

    named = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}

    assert packaged - named == set()
