"""
NVML, NVIDIA's library of management: which GPUs a node has, and what each process holds of them.

A GPU that is split (MIG) stands for its MIG devices: each is a device of its own, with the number that it has in the
list of all. MIG by NVIDIA's documentation and tested with a stand-in; not run on a real GPU.
"""

import contextlib
from collections.abc import Sequence
from glob import glob
from pathlib import Path
from typing import Any, Final

from gpufaas_core.errors import InvalidSpec
from gpufaas_core.model import Bytes

_SPLIT: Final = 1  # NVML_DEVICE_MIG_ENABLE
_CAPS: Final = Path("/proc/driver/nvidia/capabilities")


class Nvml:
    """The few calls of NVML that we make, with its errors translated."""

    def __init__(self) -> None:
        """:raises InvalidSpec: there is no NVIDIA driver here"""
        import pynvml

        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            gpus = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            found = [(gpu, device) for gpu in gpus for device in self._of(gpu)]
        except pynvml.NVMLError as exc:
            raise InvalidSpec(f"no CUDA device can be used here: NVML says {exc}; use --device cpu:0=SIZE") from exc
        self._devices = [device for _, device in found]
        self._wholes = [gpu for gpu, _ in found]
        """The GPU of each: itself, if it is not split."""

    def count(self) -> int:
        """Return how many GPUs there are, each MIG device counted and the GPUs that are split left out."""
        return len(self._devices)

    def describe(self, index: int) -> tuple[Bytes, str, str]:
        """Return total bytes, product name and UUID of device *index*."""
        if index >= self.count():
            raise InvalidSpec(
                f"cuda:{index} was asked for, but there are {self.count()} GPUs here (cuda:0 is the first)"
            )
        handle = self._devices[index]
        total = int(self._nvml.nvmlDeviceGetMemoryInfo(handle).total)
        return total, self._nvml.nvmlDeviceGetName(handle), self._nvml.nvmlDeviceGetUUID(handle)

    def nodes(self, index: int) -> list[str]:
        """Return the device nodes for programs on device *index*: its own, if the driver says which they are."""
        nvml, handle, gpu = self._nvml, self._devices[index], self._wholes[index]
        try:
            own = [f"/dev/nvidia{(number := int(nvml.nvmlDeviceGetMinorNumber(gpu)))}"]
            if handle is not gpu:
                part = _CAPS / f"gpu{number}/mig/gi{nvml.nvmlDeviceGetGpuInstanceId(handle)}"
                files = part / "access", part / f"ci{nvml.nvmlDeviceGetComputeInstanceId(handle)}" / "access"
                own += [f"/dev/nvidia-caps/nvidia-cap{each.read_text().split()[1]}" for each in files]
        except (nvml.NVMLError, OSError, LookupError):
            own = [*glob("/dev/nvidia[0-9]*"), *glob("/dev/nvidia-caps/*"), "/dev/dxg"]
        return [*own, "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"]

    def driver(self) -> str:
        """Return the version of the driver; empty: it does not tell."""
        try:
            return str(self._nvml.nvmlSystemGetDriverVersion())
        except self._nvml.NVMLError:
            return ""

    def fault(self, uuid: str) -> str:
        """Return why the GPU *uuid* does not answer any more: it fell off the bus, or its driver was unloaded."""
        try:
            handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            self._nvml.nvmlDeviceGetMemoryInfo(handle)
        except self._nvml.NVMLError as exc:
            return f"NVML says {exc}"
        return ""

    def used_by(self, index: int, pids: Sequence[int]) -> Bytes | None:
        """Return the bytes of device *index* that *pids* hold; None where the driver does not tell (in containers)."""
        handle = self._devices[index]
        try:
            running = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except self._nvml.NVMLError:
            return None
        with contextlib.suppress(self._nvml.NVMLError):  # a driver from before MPS was told apart
            running = [*running, *self._nvml.nvmlDeviceGetMPSComputeRunningProcesses_v3(handle)]
        held = [each.usedGpuMemory for each in running if each.pid in pids]
        return None if any(size is None for size in held) else int(sum(held))

    def _of(self, gpu: Any) -> list[Any]:
        """Return the MIG devices of *gpu*, or itself if it is not split. Split and without any it cannot be used."""
        try:
            if self._nvml.nvmlDeviceGetMigMode(gpu)[0] != _SPLIT:
                return [gpu]
            most = int(self._nvml.nvmlDeviceGetMaxMigDeviceCount(gpu))
        except self._nvml.NVMLError:  # one that cannot be split, or a driver from before that
            return [gpu]
        found = []
        for index in range(most):
            with contextlib.suppress(self._nvml.NVMLError):  # no device in this place
                found.append(self._nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index))
        return found
