"""`gpufaas doctor` says part by part what serves functions here, and the command that mends what does not."""

import importlib.util
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cli.conftest import Run
from tests.unit.cli.wire_log import Reply, WireLog

from gpufaas_apps import doctor
from gpufaas_gpu_manager.isolation.levels import Mechanism


def found(run: Run, *given: str) -> tuple[dict[str, Any], int]:
    result = run("doctor", "--json", *given)
    return {each["name"]: each for each in json.loads(result.stdout)}, result.exit_code


def test_each_part_of_a_machine_that_serves_is_named_and_its_gateway_says_that_it_is_ready(
    run: Run, wire: WireLog
) -> None:
    wire.answer("GET", "/readyz", Reply(200, b"OK\nisolation best: seccomp\n"))

    parts, code = found(run)
    shown = run("doctor").stdout

    assert code == 0
    assert {
        "Python",
        "device",
        "torch",
        "MPS",
        "control groups",
        "seccomp",
        "Docker",
        "disk",
        "gateway",
    } <= parts.keys()
    assert "port" not in parts  # the gateway has it
    assert parts["gateway"]["found"] == f"{wire.url}: OK; isolation best: seccomp"
    assert "✓ gateway              http://" in shown
    assert "✗" not in shown


def test_what_is_needed_and_fails_is_exit_code_1_with_the_command_that_mends_it(
    run: Run, wire: WireLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire.answer("GET", "/readyz", Reply(503, b"no device has joined yet\n"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)

    result = run("doctor")

    assert result.exit_code == 1
    assert "✗ torch                not installed  → pip install --force-reinstall torch\n" in result.stdout
    assert f"✗ gateway              {wire.url}: no device has joined yet  → gpufaas top\n" in result.stdout


@pytest.mark.parametrize(
    ("says", "mend"), [("1\n", "apparmor_restrict_unprivileged_userns=0"), ("0\n", "unprivileged_userns_clone=1")]
)
def test_where_apparmor_holds_user_namespaces_its_setting_is_what_mends_a_workers_own_root(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch, says: str, mend: str
) -> None:
    setting = here / "apparmor_restrict_unprivileged_userns"
    setting.write_text(says)
    monkeypatch.setattr(doctor, "_APPARMOR", setting)
    monkeypatch.setattr(doctor, "tried", lambda: ((), [Mechanism("own root", False, "not permitted")]))

    parts, _ = found(run)

    assert parts["own root"]["mend"] == f"sudo sysctl -w kernel.{mend}"


def test_before_the_platform_was_started_its_port_must_be_free_and_its_gateway_need_not_answer(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        other.settimeout(0.01)
        port = other.getsockname()[1]
        monkeypatch.setattr("gpufaas_cli.commands.doctor.ANSWERS_S", 0.1)
        monkeypatch.setenv("OPENFAAS_URL", f"http://127.0.0.1:{port}")
        taken, code = found(run, "--data", str(here / "not" / "there"))
    free, _ = found(run)

    assert (code, taken["port"]["works"], free["port"]["works"]) == (1, False, True)
    assert taken["port"]["mend"] == f"gpufaas serve --port {port + 1}"
    assert taken["disk"]["found"].endswith(f"free for {here}/not/there")
    assert (free["gateway"]["works"], free["gateway"]["mend"]) == (None, "gpufaas serve")


def test_a_gateway_that_was_asked_for_by_name_must_answer(run: Run) -> None:
    parts, code = found(run, "-g", "http://127.0.0.1:9")

    assert (parts["gateway"]["works"], code) == (False, 1)
