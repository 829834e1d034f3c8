"""Functions whose imports take long, on a platform: each has a layer with them, within the walls of the function."""

import os
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.files import open_file
from tests.integration.conftest import Platform
from tests.waiting import until

HEAVY = """
    import os, time
    with open(os.environ["RECORD"], "a") as record:
        record.write("x")
    end = time.process_time() + 0.6
    while time.process_time() < end:
        pass
    home, made_in = os.environ.get("HEAVY_HOME"), os.getpid()
"""
HANDLER = """
    import os
    os.environ["HEAVY_HOME"] = "as the handler has it"
    import heavy

    def load(device):
        return None

    def handle(model, event, context):
        scratch = os.environ["GPUFAAS_SCRATCH"]
        with open(f"{scratch}/mine", "w") as file:
            file.write("mine")
        with open("/proc/self/cgroup") as groups:
            return {
                "server": os.getppid(), "made in": heavy.made_in, "home": heavy.home, "uid": os.getuid(), "word": "one",
                "groups": groups.read(), "files": os.listdir(scratch), "status": open("/proc/self/status").read(),
            }
"""


@pytest.fixture
def heavy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file to which each import of the module `heavy` adds a letter."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        Path(folder, "heavy.py").write_text(textwrap.dedent(HEAVY))
        monkeypatch.setenv("PYTHONPATH", folder)
        yield open_file("record")


@pytest.mark.slow
def test_an_edit_and_a_new_worker_do_not_import_again_and_no_other_function_has_that(
    make_platform: Callable[..., Platform], heavy: Path
) -> None:
    platform = make_platform("--device", "cpu:0=400MiB", "--host-cache", "512MiB").start()
    env = {"RECORD": str(heavy)}

    one = platform.call(platform.deploy("one", HANDLER, env=env)).json()
    assert heavy.read_text() == "xx", "by the check, and by the fork server"
    assert one["server"] == one["made in"] != platform.fork_server().pid
    assert one["home"] == "as the handler has it"
    assert one["files"] == ["mine"]

    edited = platform.call(platform.deploy("one", HANDLER.replace('"one"', '"two"'), env=env)).json()
    assert (edited["word"], edited["server"], edited["uid"]) == ("two", one["server"], one["uid"])
    assert heavy.read_text() == "xx"

    other = platform.call(platform.deploy("other", HANDLER, env=env)).json()
    assert other["server"] != one["server"]
    assert heavy.read_text() == "xxxx"
    again = platform.call("/function/one").json()
    assert again["server"] == one["server"]
    for each in (one, other):
        assert psutil.Process(each["server"]).uids().real == each["uid"]
    if os.geteuid() == 0:
        assert one["uid"] != other["uid"] != 0
    platform.remove("one")
    until(lambda: not psutil.pid_exists(one["server"]))
