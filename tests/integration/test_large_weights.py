"""Weights of more than 2 GiB go from an author's folder to a worker, and no process ever has all of them in memory."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.conftest import Peak, Platform

from gpufaas_core.files import remove_tree

SIZE = 2_200 << 20
MOST = SIZE // 8
"""What each process may take for it."""
HANDLER = """
import mmap, os
def load(device):
    with open(os.path.join(os.path.dirname(__file__), "model.gguf"), "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
def handle(model, event, context):
    return {"size": len(model), "begin": model[:4].decode(), "end": model[-3:].decode()}
"""
STACK = """
provider: {{name: openfaas, gateway: "{url}"}}
functions:
  large:
    lang: python3-torch
    handler: ./large
    annotations: {{gpufaas.memory: 48Mi}}
"""


@pytest.mark.long
def test_a_gguf_file_above_two_gib_is_built_stored_and_served_without_being_read_whole(
    make_platform: Callable[..., Platform], tmp_path: Path
) -> None:
    platform = make_platform("--device", "cpu:0=200MiB", "--host-cache", "0").start()
    folder = tmp_path / "project" / "large"
    folder.mkdir(parents=True)
    (folder / "handler.py").write_text(HANDLER)
    with open(folder / "model.gguf", "wb") as file:  # sparse
        file.write(b"GGUF")
        file.seek(SIZE - 3)
        file.write(b"end")
    (folder.parent / "stack.yml").write_text(STACK.format(url=platform.url))
    peak = Peak(platform.pid)

    up = subprocess.Popen([sys.executable, "-m", "gpufaas_cli", "up"], cwd=folder.parent)
    _, up.returncode, usage = os.wait4(up.pid, 0)

    assert up.returncode == 0
    said = platform.call("/function/large").raise_for_status().json()
    assert said == {"size": SIZE, "begin": "GGUF", "end": "end"}
    assert usage.ru_maxrss * 1024 < MOST
    assert peak.growth < MOST
    [kept] = [each for each in (platform.data / "artifacts/sha256").glob("??/*") if each.stat().st_size == SIZE]
    assert kept.samefile(next((platform.data / "bundles").glob("*/function/model.gguf")))
    platform.stop()
    remove_tree(platform.data)  # pytest would keep it for a while
