"""`gpufaas serve` did not notice that a GPU fell off the bus, and kept offering it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.conftest import ECHO, HTTP, Platform, until

NVML = """
    import os
    class NVMLError(Exception):
        pass
    class Memory:
        total = 4 << 30
    def nvmlInit(): pass
    def nvmlSystemGetDriverVersion(): return "550.54"
    def nvmlDeviceGetCount(): return 1
    def nvmlDeviceGetHandleByIndex(index): return index
    def nvmlDeviceGetMigMode(handle): raise NVMLError("not supported")
    def nvmlDeviceGetName(handle): return "Fake"
    def nvmlDeviceGetUUID(handle): return "GPU-0"
    def nvmlDeviceGetMinorNumber(handle): raise NVMLError("not supported")
    def nvmlDeviceGetHandleByUUID(uuid):
        if os.path.exists(LOST):
            raise NVMLError("GPU is lost")
        return 0
    def nvmlDeviceGetMemoryInfo(handle): return Memory
    def nvmlDeviceGetComputeRunningProcesses(handle): raise NVMLError("not told")
"""
"""What NVML's binding says of one GPU, until the file LOST is there."""


@pytest.mark.long
def test_it_is_given_up_and_what_fits_elsewhere_is_served_there(
    make_platform: Callable[..., Platform], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"LOST = {str(tmp_path / 'lost')!r}", *(each.removeprefix("    ") for each in NVML.splitlines())]
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "pynvml.py").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    platform = make_platform("--device", "cpu:0=300MiB", "--device", "cuda:0").start()
    large = platform.deploy("large", ECHO, HTTP, memory="400Mi")  # only the GPU is as large
    small = platform.deploy("small", ECHO, HTTP)
    assert len(platform.status()["devices"]) == 2

    (tmp_path / "lost").touch()

    until(lambda: len(platform.status()["devices"]) == 1, "it has left")
    assert platform.call(small, b"elsewhere").text == "elsewhere"
    assert "largest device is local/cpu:0" in platform.call(large).text
    ready = platform.http.get("/readyz")
    assert (ready.status_code, "device local/cuda:0 is gone: NVML says GPU is lost" in ready.text) == (200, True)
    assert "device local/cuda:0 is gone" in platform.http.get("/system/nodes").text
    assert platform.stop() == 0
