"""`gpufaas prune` says what would go, asks, and removes it: at the gateway, and builds that no stack file names."""

from pathlib import Path

import pytest
from tests.unit.cli.conftest import Run
from tests.unit.cli.wire_log import WireLog

STACK = """version: 1.0
provider: {name: openfaas}
functions:
  kept: {lang: python3-http, handler: ./kept, image: kept:1}
"""


@pytest.fixture
def builds(here: Path) -> Path:
    (here / "stack.yaml").write_text(STACK)
    for name in ("kept", "gone"):
        (here / "build" / name).mkdir(parents=True)
        (here / "build" / name / ".gpufaas-build.json").write_text("{}")
    (here / "build" / "somebodys").mkdir()
    return here / "build"


def test_what_nothing_needs_is_named_and_goes_only_when_that_was_confirmed(
    run: Run, wire: WireLog, builds: Path
) -> None:
    wire.answer("POST", "/system/prune", {"artifacts": 3, "size": 5 << 20})

    refused = run("prune", data="n\n")
    asked = wire.requests()
    there = sorted(each.name for each in builds.iterdir())
    done = run("prune", "--yes")

    assert f"{wire.url}: 3 artifacts, 5 MiB\n" in refused.stdout
    assert "build/gone: 2 B\n" in refused.stdout
    assert (refused.exit_code, asked, there) == (130, [("POST", "/system/prune?dry=1")], ["gone", "kept", "somebodys"])
    assert wire.requests()[-1] == ("POST", "/system/prune")
    assert sorted(each.name for each in builds.iterdir()) == ["kept", "somebodys"]
    assert done.stdout.endswith("Removed: 3 artifacts, 5 MiB; 1 builds.\n")


def test_where_nothing_can_go_nobody_is_asked(run: Run, wire: WireLog) -> None:
    wire.answer("POST", "/system/prune", {"artifacts": 0, "size": 0})

    assert run("prune").exit_code == 0
    assert len(wire.requests()) == 1


def test_a_gateway_that_cannot_prune_says_so(run: Run, wire: WireLog) -> None:
    wire.answer("POST", "/system/prune", 404)

    result = run("prune")

    assert (result.exit_code, "only gpufaas serve prunes" in result.stderr) == (1, True)
