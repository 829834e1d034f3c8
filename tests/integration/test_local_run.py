"""``gpufaas local-run``: a function on this machine, on a platform that is gone afterwards."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from tests.integration.conftest import all_ended
from tests.waiting import LIMIT_S, until

GPUFAAS = str(Path(sys.executable).with_name("gpufaas"))
HANDLER = """\
import os


def handle(event, context):
    print("called with", event.text)
    return os.environ["GREETING"] + " " + event.text + " v1"
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    subprocess.run([GPUFAAS, "new", "hello", "--lang", "python3-http", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "hello/handler.py").write_text(HANDLER)
    return tmp_path


@contextmanager
def running(project: Path, *options: str, ended_by: signal.Signals = signal.SIGINT) -> Iterator[str]:
    """Give the function's URL; end it as Ctrl-C does, or by another signal, and see that nothing is left."""
    command = [GPUFAAS, "local-run", "hello", "-p", "0", "-e", "GREETING=hi", "--device", "cpu:0=256MiB", *options]
    out, err = project / "out", project / "err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(command, cwd=project, stdout=stdout, stderr=stderr)

    def url() -> str:
        return "".join(re.findall(r"^URL: (http://\S+\n)", out.read_text(), re.MULTILINE))

    children: list[psutil.Process] = []
    try:
        until(lambda: process.poll() is not None or "\n" in url(), err.read_text)
        assert process.poll() is None, err.read_text()
        children = psutil.Process(process.pid).children(recursive=True)
        yield url().strip()
    finally:
        process.send_signal(ended_by)
        assert process.wait(LIMIT_S) == 0, err.read_text()
    all_ended(children)
    assert list((project / "tmp").iterdir()) == []


def test_a_function_runs_here_with_its_output_and_leaves_nothing(project: Path) -> None:
    with running(project) as url:
        assert httpx.post(url, content=b"you", timeout=LIMIT_S).text == "hi you v1"
        until(lambda: "called with you" in (project / "err").read_text())


def test_constraints_are_of_where_it_is_deployed_and_are_said_not_to_be_kept_to(project: Path) -> None:
    stack = (project / "stack.yaml").read_text()
    (project / "stack.yaml").write_text(stack.replace("    lang:", "    constraints: [zone=b]\n    lang:"))

    with running(project, ended_by=signal.SIGTERM) as url:
        assert httpx.post(url, content=b"you", timeout=LIMIT_S).text == "hi you v1"

    assert "Ignored in a local run: constraints zone=b" in (project / "err").read_text()


def test_a_change_is_running_a_moment_later(project: Path) -> None:
    with running(project, "--watch") as url:
        assert httpx.post(url, content=b"you", timeout=LIMIT_S).text == "hi you v1"

        (project / "hello/handler.py").write_text(HANDLER.replace("v1", "version two"))

        until(lambda: httpx.post(url, content=b"you", timeout=LIMIT_S).text == "hi you version two")
