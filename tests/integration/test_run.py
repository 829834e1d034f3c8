"""`gpufaas run`: one file as a function, for one call; nothing is left of it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.conftest import LIMIT_S, Platform
from tests.waiting import until

SAYS = """
def handle(event, context):
    print("was called")
    return {"said": event.text}
"""
WAITS = """
import time


def handle(event, context):
    print("waits", flush=True)
    time.sleep(600)
"""


def begun(platform: Platform, home: Path, source: str, *options: str) -> "subprocess.Popen[str]":
    file = home / "一次.py"  # of which no letter can be in a function's name
    file.write_text(source)
    password = (platform.data / "auth" / "basic-auth-password").read_text()
    url = platform.url.replace("://", f"://admin:{password}@")
    command = [sys.executable, "-m", "gpufaas_cli", "run", str(file), "-g", url, "-d", "hi", *options]
    return subprocess.Popen(
        command, env={**os.environ, "XDG_CACHE_HOME": str(home / "cache")}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def printed(platform: Platform) -> str:
    return "".join(
        platform.http.get("/system/logs", params={"name": each["name"]}).text
        for each in platform.http.get("/system/functions").json()
    )


def built(home: Path) -> list[str]:
    return [each.name for each in home.glob("cache/gpufaas/files/*/*/handler.py")]


def test_with_json_the_answer_is_in_an_object_with_its_status_and_timing(platform: Platform, tmp_path: Path) -> None:
    process = begun(platform, tmp_path, SAYS, "--json")
    stdout, stderr = process.communicate(timeout=LIMIT_S)

    found = json.loads(stdout)
    assert process.returncode == 0, stderr
    assert stderr.endswith("was called\n")
    assert (found["status"], found["answer"]) == (200, {"said": "hi"})
    assert found["phases"].keys() == {"queue", "load", "run"}
    assert platform.http.get("/system/functions").json() == []
    assert built(tmp_path) == []


def test_a_file_that_cannot_be_deployed_leaves_no_log(platform: Platform, tmp_path: Path) -> None:
    before = set(platform.data.glob("logs/*"))

    process = begun(platform, tmp_path, "print('is imported')\nraise RuntimeError('and fails')" + SAYS)
    _, stderr = process.communicate(timeout=LIMIT_S)

    assert (process.returncode, "is imported" in stderr) == (1, True), stderr
    assert set(platform.data.glob("logs/*")) == before


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_ended_while_its_call_runs_it_removes_the_function(
    platform: Platform, tmp_path: Path, end: signal.Signals
) -> None:
    with begun(platform, tmp_path, WAITS) as process:
        until(lambda: process.poll() is not None or "waits" in printed(platform))
        process.send_signal(end)
        _, stderr = process.communicate(timeout=LIMIT_S)

    assert (process.returncode, "waits" in stderr) == (130, True), stderr
    assert platform.http.get("/system/functions").json() == []
    assert built(tmp_path) == []
