"""docs/placing.md as somebody reads it: its plan and its commands, in their order, on a platform with two models."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.integration.conftest import ECHO_MODEL, Platform
from tests.waiting import until

from gpufaas_cli.main import cli

PAGE = (Path(__file__).parents[2] / "docs" / "placing.md").read_text()
PLAN = "".join(re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
COMMANDS = re.findall(r"^\$ gpufaas (.*?)(?: +#.*)?$", PAGE, re.MULTILINE)
DIFFERS = 1


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    devices = [f"--device=cpu:{number}=300MiB,cores=1" for number in range(2)]
    platform = Platform(tmp_path_factory.mktemp("platform"), *devices)
    try:
        platform.start()
        for name in ("digits", "faces"):
            platform.deploy(name, ECHO_MODEL, slots="2", sharing="auto")
        yield platform
    finally:
        platform.close()


@pytest.fixture(autouse=True)
def folder(platform: Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader's: the plan of the page is there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENFAAS_URL", platform.url)
    monkeypatch.setenv("OPENFAAS_CONFIG", str(tmp_path / "config"))
    (tmp_path / "plan.yaml").write_text(PLAN)


def gpufaas(command: str, code: int = 0, stdin: str = "") -> Result:
    result = CliRunner().invoke(cli, shlex.split(command), input=stdin)
    assert result.exit_code == code, f"gpufaas {command}: {result.output}"
    return result


def plan() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gpufaas("plan show --json").stdout)
    return found


def test_the_page_and_its_commands_are_true() -> None:
    assert len(COMMANDS) == 7

    for command in COMMANDS:
        gpufaas(command, DIFFERS if command.startswith("plan diff") else 0)
        if command.startswith(("plan apply", "plan rollback")):
            replicas = {each["function"]: each for each in plan()["replicas"]}
            assert replicas["digits.openfaas-fn"]["share"] == 40
            assert (replicas["faces.openfaas-fn"]["share"], replicas["faces.openfaas-fn"]["slots"]) == (30, 2)
            gpufaas("plan diff plan.yaml")

    assert [each.get("why") for each in json.loads(gpufaas("plan history --json").stdout)][:4] == [
        "unpin digits.openfaas-fn", "pin digits.openfaas-fn on local/cpu:0", "rollback to 1", "one device is enough",
    ]  # fmt: skip
    assert [each["function"] for each in plan()["replicas"]] == ["faces.openfaas-fn"]


def test_an_edited_plan_is_refused_where_another_came_in_between() -> None:
    gpufaas("plan apply plan.yaml")
    edited = gpufaas("plan show --json").stdout.replace("cpu:0", "cpu:1")
    gpufaas("plan pin digits local/cpu:0")
    latest = plan()["version"]

    refused = gpufaas("plan apply -", 1, edited)

    assert f"plan {latest} by admin came in between" in refused.stderr
    assert plan()["version"] == latest


def test_what_is_planned_is_there_and_takes_the_calls(platform: Platform) -> None:
    def runs_on(name: str) -> tuple[str, str]:
        headers = platform.call(f"/function/{name}", b"x").raise_for_status().headers
        return headers["X-Gpufaas-Device"], headers.get("X-Gpufaas-Share", "")

    def are_there() -> bool:
        return {each["state"] for each in plan()["replicas"]} == {"resident"}

    gpufaas("plan apply plan.yaml")
    until(are_there, lambda: f"both are there: {plan()}")
    assert (runs_on("digits"), runs_on("faces")) == (("local/cpu:0", "40"), ("local/cpu:0", "30"))

    gpufaas("plan pin digits local/cpu:1")
    until(are_there, lambda: f"digits is where it is pinned: {plan()}")
    until(lambda: runs_on("digits") == ("local/cpu:1", ""), "its calls are, too")

    assert runs_on("faces") == ("local/cpu:0", "30")
    assert "local/cpu:1" in gpufaas("explain digits").stdout
