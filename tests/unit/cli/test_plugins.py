"""Programs in ~/.gpufaas/plugins and ~/.openfaas/plugins are commands. Real processes: we become the plugin."""

import os
import subprocess
import sys
from pathlib import Path

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
