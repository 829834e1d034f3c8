"""
What a worker wrote stayed: files beside its handler for all later workers, and temporary ones for ever. Now its bundle
cannot be written, and its scratch directory goes with it.
"""

import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.files import MODES_HOLD
from tests.integration.conftest import HTTP, Platform, until

from gpufaas_core.files import identity

WRITER = """
    import os, subprocess, tempfile

    def handle(event, context):
        if event.text:
            with open(event.text, "a") as file:
                file.write("mine")
        scratch = os.environ["GPUFAAS_SCRATCH"]
        before = os.listdir(scratch)
        os.makedirs(os.path.join(scratch, "sub"), exist_ok=True)
        tempfile.mkstemp(dir=os.path.join(scratch, "sub"))
        os.chmod(os.path.join(scratch, "sub"), 0)
        file, _ = tempfile.mkstemp()
        child = subprocess.check_output(["mktemp"], text=True).strip()
        return {"scratch": scratch, "before": before, "temporary": tempfile.gettempdir(), "child": child}
"""


def seen(folder: Path) -> dict[str, object]:
    """Return what is below *folder*, and what each file is."""
    return {str(each): identity(each.lstat()) for each in [folder, *folder.rglob("*")]}


@pytest.fixture(params=["best", "none"])
def platform(request: pytest.FixtureRequest, make_platform: Callable[..., Platform]) -> Iterator[Platform]:
    """Its processes may not write where modes forbid it. Its paths are short, so that sockets can be made there."""
    with tempfile.TemporaryDirectory(prefix="gpufaas-") as data:
        platform = make_platform("--device", "cpu:0=400MiB", "--isolation", request.param, data=Path(data))
        platform.prefix = MODES_HOLD
        yield platform.start()
        platform.close()


@pytest.mark.slow
def test_what_a_worker_writes_is_gone_with_it_and_its_bundle_is_as_it_was(platform: Platform) -> None:
    one, other = platform.deploy("one", WRITER, HTTP), platform.deploy("other", WRITER, HTTP)
    bundles = seen(platform.data / "bundles")

    first, beside = platform.call(one).json(), platform.call(other).json()
    scratch = Path(first["scratch"])
    assert first["before"] == beside["before"] == []
    assert scratch != Path(beside["scratch"]), "each worker has its own"
    on_disk = scratch.exists()  # with a root of its own it is memory of the worker
    assert on_disk or "none" not in platform.options
    assert not on_disk or scratch.stat().st_mode & 0o077 == 0
    assert first["temporary"] == str(scratch)
    assert first["child"].startswith(f"{scratch}/"), "programs, too"
    refused = platform.call(one, b"beside.txt")
    assert refused.status_code == 500
    assert re.search("(Permission denied|Read-only file system): 'beside.txt'", refused.text)
    assert "$GPUFAAS_SCRATCH" in refused.text, "it is said what to do"
    assert platform.call(one, b"handler.py").status_code == 500
    assert platform.call(one, b"/nowhere/x").text.startswith("FileNotFoundError"), "which is another matter"
    assert seen(platform.data / "bundles") == bundles

    for worker in platform.workers():
        worker.kill()
    until(lambda: not scratch.exists(), "it is gone with its worker")
    again = platform.call(one).json()
    assert again["before"] == []
    assert again["scratch"] != first["scratch"]

    platform.kill()
    assert Path(again["scratch"]).exists() == on_disk
    platform.start()
    assert not Path(again["scratch"]).exists(), "what a killed platform left is gone at the next start"
    assert platform.call(one).json()["before"] == []
    assert platform.stop() == 0
    assert not on_disk or list((platform.data / "scratch").iterdir()) == []
