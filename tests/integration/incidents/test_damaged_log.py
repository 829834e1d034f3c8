"""A bad disk damaged the log of the latest records: SQLite lost them silently, functions among them."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.conftest import ECHO, HTTP, Platform, all_ended

from gpufaas_adapters.sqlite.functions import SqliteStore

pytestmark = pytest.mark.long


def test_it_is_noticed_at_the_start_and_what_was_deployed_is_not_in_it(
    make_platform: Callable[..., Platform], tmp_path: Path
) -> None:
    platform = make_platform("--device", "cpu:0=200MiB").start()
    path = platform.deploy("echo", ECHO, HTTP)
    (tmp_path / "copy").mkdir()
    shutil.copy(platform.data / "gpufaas.db", tmp_path / "copy")
    in_the_file = SqliteStore(tmp_path / "copy" / "gpufaas.db")
    assert [each.name for each in in_the_file.all()] == ["echo"]
    in_the_file.close()
    for name in ("red", "green", "blue"):
        assert platform.http.post("/system/namespace/" + name, json={"name": name}).status_code < 300
    all_ended(platform.kill())

    log = platform.data / "gpufaas.db-wal"
    content = bytearray(log.read_bytes())
    content[32 + 24 + 100] ^= 0xFF  # in the page of the first frame
    log.write_bytes(content)
    platform.launch()

    assert platform.wait() == 1
    last = platform.said().splitlines()[-1]
    assert last.startswith("gpufaas: "), last
    assert f"{log} is damaged: frame 1 is wrong" in last
    assert "or move gpufaas.db-wal away to go on with what gpufaas.db has" in last

    log.rename(tmp_path / "damaged-wal")
    platform.start()
    assert platform.call(path, b"still there").text == "still there"
    assert platform.stop() == 0
