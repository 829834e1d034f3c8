"""Revisions of a function that can be gone back to: their files are kept within a size."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.conftest import HTTP, Platform

pytestmark = pytest.mark.timeout(120)

SAYS = """
    def handle(event, context):
        return "{said}"
"""
LARGE = SAYS.format(said="large") + f"    # {random.Random(1).randbytes(200_000).hex()}\n"
"""Of more than the size, packed in whatever way."""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Platform]:
    platform = Platform(tmp_path, "--device", "cpu:0=200MiB", "--history-size", "150KiB")
    try:
        yield platform.start()
    finally:
        platform.close()


def prune(platform: Platform) -> int:
    """Remove what nothing needs, as if all of it had been unused for long; return how many files that were."""
    for each in (platform.data / "artifacts" / "sha256").glob("??/*.json"):
        os.utime(each, (0, 0))
    removed: int = platform.http.post("/system/prune").raise_for_status().json()["artifacts"]
    return removed


def test_revisions_within_the_size_can_be_gone_back_to_and_a_larger_one_is_gone(served: Platform) -> None:
    for said in ("first", "second", "third"):
        served.deploy("talker", SAYS.format(said=said), HTTP)
        assert served.call("/function/talker").text == said
    newest_first = served._cli.history("talker")
    assert [each.get("status", "serving") for each in newest_first] == ["serving", "superseded", "superseded"]

    assert prune(served) == 0
    served._cli.rollback("talker", newest_first[-1]["revision"])
    served.handed_over("talker")
    assert served.call("/function/talker").text == "first"

    served.deploy("talker", LARGE, HTTP)
    assert prune(served) == 0, "what serves does not count"
    assert served.call("/function/talker").text == "large"
    served.deploy("talker", SAYS.format(said="last"), HTTP)
    assert prune(served) == 1

    history = served._cli.history("talker")
    assert [each.get("gone", False) for each in history] == [False, True, False, False, False, False]
    refused = served.http.post("/system/function/talker/rollback")
    assert refused.status_code == 409
    assert f"files of revision {history[1]['revision']} of function talker were removed" in refused.text
    assert "--history-size" in refused.text
    assert served.call("/function/talker").text == "last"
