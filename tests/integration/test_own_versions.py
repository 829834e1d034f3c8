"""Functions of one platform, each with its own version of a package that the platform has, too."""

import importlib.metadata
import textwrap
from pathlib import Path

import pytest
from tests.integration.conftest import Platform
from tests.unit.cli.conftest import Wheels, wheels

from gpufaas_cli.bundles import BuildRequest, build

__all__ = ["wheels"]  # the fixture

HANDLER = """
    import importlib.metadata
    import click

    def handle(event, context):
        return f"{importlib.metadata.version('click')} {getattr(click, 'VERSION', '')} {'/site/' in click.__file__}"
"""


def deploy(platform: Platform, name: str, requirement: str, folder: Path) -> str:
    source = folder / name
    source.mkdir()
    (source / "handler.py").write_text(textwrap.dedent(HANDLER))
    (source / "requirements.txt").write_text(f"{requirement}\n")
    built = build(BuildRequest(name, "python3-http", source, build_root=folder / "build"))
    platform.upload(built)
    answer = platform.deploy_spec(
        {"service": name, "image": f"{name}:latest", "annotations": {"gpufaas.bundle": built.digest}}
    )
    assert answer.status_code < 300, answer.text
    return f"/function/{name}"


@pytest.mark.slow
def test_each_function_sees_its_own_version_and_those_without_one_the_platforms(
    platform: Platform, tmp_path: Path, wheels: Wheels
) -> None:
    for version in ("6.0", "7.0"):
        wheels("click", version)
    asked = {"six": "click<7", "seven": "click<8", "ours": "click>=8"}
    paths = {name: deploy(platform, name, requirement, tmp_path) for name, requirement in asked.items()}

    answers = {name: platform.call(path).text for name, path in (paths | paths).items()}

    ours = importlib.metadata.version("click")
    assert answers == {"six": "6.0 6.0 True", "seven": "7.0 7.0 True", "ours": f"{ours}  False"}
