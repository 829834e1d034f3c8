"""Two commands in one folder, and files that go while a command looks at them."""

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from tests.unit.cli.conftest import Run
from tests.waiting import until

from gpufaas_cli import pipeline
from gpufaas_cli.files import alone
from gpufaas_cli.source_files import Contents

BUILD = [sys.executable, "-m", "gpufaas_cli", "build", "--offline"]


@pytest.fixture
def built(here: Path, run: Run) -> Path:
    """The folder for what is built of the two functions here."""
    for name in ("hello", "other"):
        run("new", name, "--lang", "python3-http")
    (here / "build").mkdir()
    return here / "build"


def test_a_command_waits_until_another_one_has_built_in_the_same_folder_and_says_so(built: Path, run: Run) -> None:
    with ExitStack() as first:
        first.enter_context(alone(built / "hello"))
        with subprocess.Popen(BUILD, stderr=subprocess.PIPE, text=True) as second:
            assert second.stderr is not None
            assert second.stderr.readline() == "gpufaas: another command builds in build: waiting for its end\n"
            assert run("build", "--list").exit_code == 0, "which builds nothing"
            assert list(built.iterdir()) == []
            first.close()
            second.communicate()

    assert second.returncode == 0
    assert {each.name for each in built.iterdir()} == {"hello", "other"}


def test_a_file_that_goes_fails_its_function_and_not_the_others(
    built: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(handler: Path, *_: object, **__: object) -> Contents:
        return Contents(data=(handler / "gone").stat().st_size) if handler.name == "hello" else Contents()

    monkeypatch.setattr(pipeline, "contents", gone)
    result = run("build", "--offline")

    assert result.exit_code == 1
    assert "gpufaas: hello: [Errno 2] No such file or directory: 'hello/gone'\n" in result.stderr
    assert "1 of 2 functions not built: hello" in result.stderr
    assert (built / "other/bundle.tar").exists()


def test_a_build_that_is_terminated_ends_what_its_script_has_started_and_leaves_nothing(built: Path) -> None:
    started = built / "started"
    shell = f"echo $$ > {started}.new; mv {started}.new {started}; sleep 600"
    (built.parent / "hello/build.py").write_text(f"import subprocess\nsubprocess.call({shell!r}, shell=True)\n")

    with subprocess.Popen(BUILD, stderr=subprocess.PIPE) as process:
        until(started.exists)
        process.terminate()
        process.communicate()

    assert process.returncode == 130
    shell_pid = int(started.read_text())  # nobody may wait for it: it has ended as a zombie, too
    until(lambda: not psutil.pid_exists(shell_pid) or psutil.Process(shell_pid).status() == psutil.STATUS_ZOMBIE)
    assert list((built / ".parts").iterdir()) == []
