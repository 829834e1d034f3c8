"""
What a worker found in memory when it started was wrong, and nothing said so: random numbers that other workers had,
too, modules of the directory in which the platform had been started, and no time zone of its own.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.integration.test_layers import LayerRig

PATHS = """
    import os, sys
    def load(device):
        return None
    def handle(model, event, context):
        import http
        return {"path": sys.path, "http": http.__file__, "torch": "torch" in sys.modules, "server": os.getppid()}
"""


@pytest.fixture
async def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LayerRig]:
    """A node with a fork server of its own, in a directory whose modules raise. The operator has a PYTHONPATH."""
    here = tmp_path / "here"
    here.mkdir()
    for name in ("http", "random", "colorsys"):
        (here / f"{name}.py").write_text("raise ImportError('planted')")
    (tmp_path / "installed").mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'installed'}:")
    rig = LayerRig(tmp_path, "auto", 1)
    await rig.node.start()
    yield rig
    await rig.node.close()


async def test_nothing_is_imported_from_the_directory_in_which_the_platform_was_started(
    elsewhere: LayerRig, tmp_path: Path
) -> None:
    plain = await elsewhere.first(await elsewhere.preloading("plain", (), PATHS))
    layered = await elsewhere.first(await elsewhere.preloading("layered", ("colorsys",), PATHS))

    assert plain["torch"]
    assert plain["server"] != layered["server"]
    for said, name in ((plain, "plain"), (layered, "layered")):
        assert said["path"][:3] == [str(tmp_path / name / part) for part in ("function", "site")] + [
            str(tmp_path / "installed")
        ]
        assert not {"", ".", str(tmp_path / "here")} & set(said["path"])
        assert not said["http"].startswith(str(tmp_path))
    assert elsewhere.said == []
