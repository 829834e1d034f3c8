"""Programs in ~/.gpufaas/plugins and ~/.openfaas/plugins are commands. Real processes: we become the plugin."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from gpufaas_cli.testing import Reply, WireLog

Run = Callable[..., Result]
SCRIPT = b'#!/bin/sh\necho "$0 $*"; cat; exit 7\n'


def plugin(home: Path, name: str, folder: str = ".openfaas", mode: int = 0o755) -> Path:
    path = home / folder / "plugins" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(SCRIPT)
    path.chmod(mode)
    return path


def gpufaas(home: Path, *args: str, given: str = "") -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "HOME": str(home)}
    return subprocess.run(
        [sys.executable, "-m", "gpufaas_cli", *args], input=given, capture_output=True, text=True, env=env, check=False
    )


def test_a_plugin_is_a_command_with_its_own_arguments_input_and_status(tmp_path: Path) -> None:
    path = plugin(tmp_path, "hello")

    done = gpufaas(tmp_path, "hello", "--help", "--update=false", "a b", given="in")

    assert (done.returncode, done.stdout, done.stderr) == (7, f"{path} --help --update=false a b\nin", "")


def test_our_folder_goes_before_faas_clis_and_our_commands_before_both(tmp_path: Path) -> None:
    plugin(tmp_path, "hello")
    ours = plugin(tmp_path, "hello", ".gpufaas")
    plugin(tmp_path, "version")
    plugin(tmp_path, "data", mode=0o644)

    assert gpufaas(tmp_path, "hello").stdout.startswith(str(ours))
    assert gpufaas(tmp_path, "version", "--short-version").returncode == 0
    assert gpufaas(tmp_path, "data").returncode == 2
    assert "Plugins:\n  hello" in gpufaas(tmp_path, "--help").stdout


def test_the_list_has_what_can_be_run(run: Run, here: Path) -> None:
    assert run("plugin", "list").stdout == "No plugins found.\n"
    path = plugin(here / "home", "hello")
    plugin(here / "home", "data", mode=0o644)

    assert json.loads(run("plugin", "list", "--json").stdout) == [{"name": "hello", "path": str(path)}]
    assert run("plugin", "list").stdout.split() == ["NAME", "PATH", "hello", str(path)]


def test_a_program_is_installed_from_a_file_or_a_url(run: Run, here: Path, wire: WireLog) -> None:
    (here / "hello.sh").write_bytes(SCRIPT)
    wire.answer("GET", "/hello", Reply(body=SCRIPT))

    from_file = run("plugin", "get", "hello", "--from", "hello.sh")
    from_url = run("plugin", "get", "again", "--from", f"{wire.url}/hello", "--path", "elsewhere")

    assert from_file.exit_code == from_url.exit_code == 0
    assert os.access(here / "home/.gpufaas/plugins/hello", os.X_OK)
    assert (here / "elsewhere/again").read_bytes() == SCRIPT


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ("pro", "there is no registry of plugins to get pro from: name its program with --from"),
        ("list --from hello.sh", "there is a command of that name"),
        ("../x --from hello.sh", "cannot be a plugin's name"),
        ("x --from none", "none: No such file or directory"),
        ("x --from text", "text is no program"),
        ("x --from http://example.com/x", "is not encrypted"),
        ("x --from http://127.0.0.1.example.com/x", "is not encrypted"),
        (f"x --from hello.sh --sha256 {'0' * 64}", f"has the sha256 {hashlib.sha256(SCRIPT).hexdigest()}, not 000"),
    ],
)
def test_what_cannot_be_installed_is_refused(run: Run, here: Path, args: str, why: str) -> None:
    (here / "hello.sh").write_bytes(SCRIPT)
    (here / "text").write_text("text")

    result = run("plugin", "get", *args.split())

    assert result.exit_code in (1, 2)
    assert why in result.stderr
    assert not (here / "home/.gpufaas").exists()
