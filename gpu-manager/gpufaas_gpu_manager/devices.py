"""
The devices of a node: CUDA GPUs (through NVML) and CPU devices with a declared budget.

Parsing and discovery. NVML is asked, never torch: this process must not touch CUDA (docs/adr/0004).
"""

import os
import platform
import re
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from gpufaas_core.constraints import (
    DEVICE,
    GPU,
    KIND,
    MEMORY,
    NODE,
    PLATFORM_LABELS,
    PRODUCT,
    RLIMIT,
    label_value,
    parse_label,
)
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.model import Bytes, Device, DeviceId, NodeId
from gpufaas_core.units import MiB, format_bytes, parse_bytes

_SPEC: Final = re.compile(r"(cpu|cuda):(\d+)(?:=(.+))?")
_CUDA_SPARE: Final = 512 * MiB
"""Not promised on a GPU when no size is given: memory of the driver, and growth of other programs' contexts."""

_GO_ARCH: Final = {"x86_64": "amd64", "aarch64": "arm64"}  # the names that Kubernetes uses


class NodeDevice(Protocol):
    """What the supervisor needs of a device beside its id and size."""

    @property
    def device(self) -> Device: ...

    @property
    def torch_device(self) -> str:
        """The device that load() of a handler gets."""

    @property
    def env(self) -> dict[str, str]:
        """Added to the environment of its workers."""

    @property
    def enforced(self) -> bool:
        """Whether the kernel holds workers to their reservation (RLIMIT_DATA)."""

    def used_bytes(self, pids: Sequence[int]) -> Bytes | None:
        """Return the device's memory that the processes *pids* occupy by the driver's account; None: it keeps none."""

    def fault(self) -> str:
        """Return why the device cannot be used any more; empty: it can. May block for long: call it in a thread."""


class CpuDevice:
    """A share of the machine's memory as a device: real, and enforced on each worker (enforcement.py)."""

    torch_device = "cpu"
    enforced = True

    def __init__(
        self,
        node: NodeId,
        index: int,
        memory: Bytes,
        labels: Mapping[str, str] | None = None,
        enforcement: str = RLIMIT,
    ) -> None:
        """
        :param labels: the operator's
        :param enforcement: what holds workers to their memory; see constraints.MEMORY
        """
        device = DeviceId(f"{node}/cpu:{index}")
        every = {**(labels or {}), **_labels(node, device, "cpu"), MEMORY: enforcement}
        self.device = Device(device, "cpu", memory, every)
        # A handler that asks torch.cuda must find no GPU, and not one of another device.
        self.env = {"CUDA_VISIBLE_DEVICES": ""}

    def used_bytes(self, pids: Sequence[int]) -> Bytes | None:  # noqa: ARG002 - the port's
        return None

    def fault(self) -> str:
        return ""


class CudaDevice:
    """One GPU. Workers see it alone, as ``cuda:0``."""

    torch_device = "cuda:0"
    enforced = False

    def __init__(
        self, node: NodeId, index: int, memory: Bytes | None, nvml: "Nvml", labels: Mapping[str, str] | None = None
    ) -> None:
        """:param labels: the operator's"""
        total, name, self.uuid = nvml.describe(index)
        self.total = total
        self._nvml = nvml
        self._index = index
        device = DeviceId(f"{node}/cuda:{index}")
        every = {**(labels or {}), **_labels(node, device, "cuda"), PRODUCT: label_value(name)}
        self.device = Device(device, name, memory or max(total - _CUDA_SPARE, 0), every)
        self.env = {"CUDA_VISIBLE_DEVICES": self.uuid, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

    def used_bytes(self, pids: Sequence[int]) -> Bytes | None:
        return self._nvml.used_by(self._index, pids)

    def fault(self) -> str:
        return self._nvml.fault(self.uuid)


class Nvml:
    """The few calls of NVML that we make, with its errors translated."""

    def __init__(self) -> None:
        """:raises InvalidSpec: there is no NVIDIA driver here"""
        import pynvml

        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as exc:
            raise InvalidSpec(f"no CUDA device can be used here: NVML says {exc}; use --device cpu:0=SIZE") from exc

    def count(self) -> int:
        return int(self._nvml.nvmlDeviceGetCount())

    def describe(self, index: int) -> tuple[Bytes, str, str]:
        """Return total bytes, product name and UUID of GPU *index*."""
        if index >= self.count():
            raise InvalidSpec(
                f"cuda:{index} was asked for, but there are {self.count()} GPUs here (cuda:0 is the first)"
            )
        handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        total = int(self._nvml.nvmlDeviceGetMemoryInfo(handle).total)
        return total, _text(self._nvml.nvmlDeviceGetName(handle)), _text(self._nvml.nvmlDeviceGetUUID(handle))

    def fault(self, uuid: str) -> str:
        """Return why the GPU *uuid* does not answer any more: it fell off the bus, or its driver was unloaded."""
        try:
            handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            self._nvml.nvmlDeviceGetMemoryInfo(handle)
        except self._nvml.NVMLError as exc:
            return f"NVML says {exc}"
        return ""

    def used_by(self, index: int, pids: Sequence[int]) -> Bytes | None:
        """Return the bytes of GPU *index* that *pids* hold; None where the driver does not tell (MIG, containers)."""
        handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        try:
            running = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except self._nvml.NVMLError:
            return None
        held = [each.usedGpuMemory for each in running if each.pid in pids]
        return None if any(size is None for size in held) else int(sum(held))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _labels(node: NodeId, device: DeviceId, kind: str) -> dict[str, str]:
    """Return the labels that every device has. Host, system and processor have Swarm's and Kubernetes' names."""
    host, machine = label_value(platform.node()) or str(node), platform.machine()
    return {
        NODE: node,
        DEVICE: device,
        KIND: kind,
        GPU: "true" if kind == "cuda" else "false",
        "node.hostname": host,
        "kubernetes.io/hostname": host,
        "node.platform.os": "linux",
        "kubernetes.io/os": "linux",
        "node.platform.arch": machine,
        "kubernetes.io/arch": _GO_ARCH.get(machine, machine),
    }


def open_devices(
    specs: Sequence[str], node: NodeId, labels: Sequence[str] = (), enforcement: str = RLIMIT
) -> list[NodeDevice]:
    """
    Return the devices that *specs* name: ``cpu:0=2GiB``, ``cuda:0``, ``cuda:1=20GiB``, or with labels of its own
    ``cuda:0,zone=a``. Without *specs*: the GPUs of this machine, else two CPU devices with half of the free memory.

    :param labels: ``KEY=VALUE``, of all devices
    :param enforcement: what holds workers of CPU devices to their memory
    :raises InvalidSpec: a spec is malformed, named twice, larger than the machine, or names a GPU that is not there;
        a label is malformed, or set by the platform
    """
    common = _own_labels(labels, "--label")
    if not specs:
        return _discover(node, common, enforcement)
    devices: list[NodeDevice] = []
    nvml: Nvml | None = None
    for given in specs:
        spec, *more = given.strip().split(",")
        own = {**common, **_own_labels(more, f"--device {given}")}
        found = _SPEC.fullmatch(spec)
        if not found:
            raise InvalidSpec(f"--device {given!r}: write cpu:0=2GiB, cuda:0, cuda:0=20GiB or cuda:0,zone=a")
        kind, index = found[1], int(found[2])
        memory = parse_bytes(found[3]) if found[3] else None
        if memory == 0:
            raise InvalidSpec(f"--device {spec}: a device of no memory holds no model")
        if kind == "cpu":
            if memory is None:
                raise InvalidSpec(f"--device {spec}: a CPU device needs a budget, for example {spec}=2GiB")
            devices.append(CpuDevice(node, index, memory, own, enforcement))
        else:
            nvml = nvml or Nvml()
            cuda = CudaDevice(node, index, memory, nvml, own)
            if memory and memory > cuda.total:
                raise InvalidSpec(f"--device {spec}: that GPU has {format_bytes(cuda.total)}")
            devices.append(cuda)
    ids = [each.device.id for each in devices]
    for each in ids:
        if ids.count(each) > 1:
            raise InvalidSpec(f"--device {each.partition('/')[2]} is named twice: give each device a number of its own")
    declared = sum(each.device.memory for each in devices if each.device.kind == "cpu")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if declared > total:
        raise InvalidSpec(
            f"the CPU devices are given {format_bytes(declared)} together, but this machine has {format_bytes(total)}"
        )
    return devices


def _own_labels(given: Sequence[str], what: str) -> dict[str, str]:
    labels: dict[str, str] = {}
    for text in given:
        try:
            key, value = parse_label(text)
        except InvalidSpec as exc:
            raise InvalidSpec(f"{what}: {exc}") from exc
        if key in PLATFORM_LABELS:
            raise InvalidSpec(f"{what}: {key} is a label that the platform sets itself: choose another name")
        if labels.get(key, value) != value:
            raise InvalidSpec(f"{what}: {key} is {labels[key]} and {value}: a device has one value of each label")
        labels[key] = value
    return labels


def _discover(node: NodeId, labels: Mapping[str, str], enforcement: str) -> list[NodeDevice]:
    try:
        nvml = Nvml()
        gpus: list[NodeDevice] = [CudaDevice(node, index, None, nvml, labels) for index in range(nvml.count())]
    except InvalidSpec:
        gpus = []
    if gpus:
        return gpus
    each = available_memory() // 4 // MiB * MiB
    return [CpuDevice(node, index, each, labels, enforcement) for index in range(2)]


def available_memory() -> Bytes:
    """Return the bytes that can be used on this machine without swapping (MemAvailable)."""
    with open("/proc/meminfo", "rb") as meminfo:
        for line in meminfo:
            if line.startswith(b"MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
