"""What torch.compile makes for a function is kept for its next worker, and for no other function."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.conftest import Platform, until

FOLDER = """
    import os, pathlib

    def load(device):
        kept = pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        kept.mkdir(parents=True, exist_ok=True)
        return kept

    def handle(kept, event, context):
        before = sorted(each.name for each in kept.iterdir())
        (kept / event.text).touch()
        return {"folder": str(kept), "before": before}
"""


@pytest.mark.slow
def test_the_next_worker_of_a_function_finds_what_was_compiled_and_no_other_function_does(
    make_platform: Callable[..., Platform], open_path: Path
) -> None:
    platform = make_platform("--device", "cpu:0=300MiB").start()
    path, other = platform.deploy("one", FOLDER), platform.deploy("other", FOLDER)
    own = platform.deploy("own", FOLDER, env={"TORCHINDUCTOR_CACHE_DIR": str(open_path / "own")})

    first = platform.call(path, b"kernel").json()
    (worker,) = platform.workers()
    worker.kill()
    until(lambda: "one" not in platform.residents(), "it is gone")

    assert first["before"] == []
    assert platform.call(path, b"more").json() == {"folder": first["folder"], "before": ["kernel"]}
    assert platform.call(other, b"kernel").json()["before"] == [], "the same bundle, and another function"
    assert platform.call(own, b"kernel").json()["folder"] == str(open_path / "own"), "the author's choice"
