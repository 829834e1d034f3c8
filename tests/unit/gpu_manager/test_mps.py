"""MPS with a stand-in that writes down what it is told: `nvidia-cuda-mps-control` is on no machine without a GPU."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.gpu_manager.test_devices import FAKE_NVML, through_nvml
from tests.waiting import until

from gpufaas_core.model import Need
from gpufaas_core.units import MiB
from gpufaas_gpu_manager import mps
from gpufaas_gpu_manager.mps import Mps

DAEMON = """
    import json, os, pathlib, signal, sys, time
    said = pathlib.Path(os.environ["TOLD"])
    pipe = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
    log = pathlib.Path(os.environ["CUDA_MPS_LOG_DIRECTORY"])
    if (said.parent / "broken").exists():
        sys.exit("no GPU for me")
    with said.open("a") as file:
        file.write(json.dumps({"argv": sys.argv[1:], "gpu": os.environ["CUDA_VISIBLE_DEVICES"], "pipe": str(pipe),
                               "logs": log.is_dir()}) + "\\n")
    if sys.argv[1:] == ["-f"]:
        (pipe / "control").write_text(str(os.getpid()))
        while (pipe / "control").exists():
            time.sleep(0.01)
    elif not (pipe / "control").exists():
        sys.exit("Cannot find MPS control daemon process")
    elif sys.stdin.readline() == "quit\\n":
        (pipe / "control").unlink()
"""


class Told:
    """The stand-in, on PATH."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._file = home / "told"

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self._file.read_text().splitlines()]

    def started(self) -> list[dict[str, object]]:
        return [each for each in self.lines() if each["argv"] == ["-f"]]


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    program = tmp_path / mps.PROGRAM
    program.write_text(f"#!{sys.executable} -S\n{textwrap.dedent(DAEMON)}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    return Told(tmp_path)


@pytest.fixture
def daemon(told: Told) -> Iterator[Mps]:  # noqa: ARG001 - it has to be there
    daemon = Mps("GPU-one")
    yield daemon
    daemon.close()


def test_a_daemon_has_its_gpu_and_directories_of_its_own_until_it_is_told_to_quit(told: Told) -> None:
    first, second = Mps("GPU-one"), Mps("GPU-two")
    began = told.started()
    assert [each["gpu"] for each in began] == ["GPU-one", "GPU-two"]
    assert began[0]["pipe"] != began[1]["pipe"]
    assert began[0]["logs"], "its directory of logs is there"

    first.close()

    assert not Path(str(began[0]["pipe"])).exists()
    assert Path(str(began[1]["pipe"])).exists(), "the other one goes on"
    second.close()


def test_workers_that_share_are_clients_and_those_with_a_share_are_limited(daemon: Mps, told: Told) -> None:
    pipe = str(told.started()[0]["pipe"])
    directories = {"CUDA_MPS_PIPE_DIRECTORY": pipe, "CUDA_MPS_LOG_DIRECTORY": str(Path(pipe).with_name("log"))}

    assert daemon.env(Need(50, "spatial"), 0, 300 * MiB) == directories
    assert daemon.env(Need(30, "share"), 30, 300 * MiB) == {
        **directories, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "30", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=300M",
    }  # fmt: skip
    assert daemon.env(Need(), 0, 300 * MiB) == {}
    assert daemon.env(Need(sharing="time"), 0, 300 * MiB) == {}
    assert daemon.env(Need(sharing="auto"), 0, 300 * MiB) == directories, "a plan may let it run beside others"
    assert daemon.env(Need(sharing="auto"), 40, 1)["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "40", "a policy gave it one"


def test_a_daemon_that_has_ended_is_started_again_for_the_next_client(daemon: Mps, told: Told) -> None:
    control = Path(str(told.started()[0]["pipe"])) / "control"
    pid = int(control.read_text())
    control.unlink()
    until(lambda: state(pid) in "ZX", "it has ended")

    daemon.env(Need(50, "spatial"), 0, MiB)

    assert len(told.started()) == 2
    assert control.exists()


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0]
    except OSError:
        return "X"


def test_why_there_is_none_is_said(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    (told.home / "broken").touch()
    with pytest.raises(OSError, match="ended with status 1: no GPU for me"):
        Mps("GPU-one")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(OSError, match="nvidia-cuda-mps-control is not installed"):
        Mps("GPU-one")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is needed to build a library that answers as NVML does")
@pytest.mark.parametrize("there", [True, False])
def test_a_node_with_gpus_says_whether_it_has_mps_and_gives_it_to_workers(told: Told, there: bool) -> None:
    source = told.home / "nvml.c"
    source.write_text(FAKE_NVML)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", told.home / "libnvidia-ml.so.1", source], check=True)
    if not there:
        (told.home / "broken").touch()
    script = textwrap.dedent(
        """
        import json
        from gpufaas_core.model import Need
        from gpufaas_gpu_manager.devices import open_devices
        found = open_devices(["cuda:0", "cuda:1"], "n")
        print(json.dumps({
            "labels": [each.device.labels["compute.enforcement"] for each in found],
            "env": [each.share_env(Need(30, "share"), 30, 1 << 30) for each in found],
            "note": [each.note for each in found],
        }))
        for each in found:
            each.close()
        """
    )

    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "LD_LIBRARY_PATH": str(told.home)},
        capture_output=True,
        text=True,
        check=True,
    )

    said = json.loads(done.stdout)
    if there:
        assert said["labels"] == ["mps", "mps"]
        assert [each["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] for each in said["env"]] == ["30", "30"]
        assert [each["gpu"] for each in told.started()] == ["GPU-one", "GPU-two"]
        assert said["note"] == ["", ""]
    else:
        assert said["labels"] == ["time-slicing", "time-slicing"]
        assert said["env"] == [{}, {}]
        assert "its workers take turns: no MPS: nvidia-cuda-mps-control ended with status 1" in said["note"][0]


@pytest.mark.parametrize("isolation", ["best", "strict"])
def test_where_workers_are_isolated_there_is_no_mps_and_the_node_says_what_to_do(told: Told, isolation: str) -> None:
    script = f"""
        import json
        from gpufaas_gpu_manager.devices import open_devices
        (found,) = open_devices(["cuda:0"], "n", isolation={isolation!r})
        print(json.dumps([found.device.labels["compute.enforcement"], found.note]))
    """

    by, note = through_nvml(told.home, script)

    assert by == "time-slicing"
    assert note.endswith("no MPS: its clients have one uid and one /dev/shm together, as only with --isolation none")
    assert not (told.home / "told").exists(), "no daemon was started"
