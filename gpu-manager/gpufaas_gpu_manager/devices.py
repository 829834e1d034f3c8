"""
The devices of a node: CUDA GPUs (through NVML), CPU devices with a declared budget, and emulated ones.

Parsing and discovery. NVML is asked, never torch: this process must not touch CUDA (docs/adr/0004).
"""

import difflib
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Final

from gpufaas_core.constraints import (
    COMPUTE,
    CORES,
    DEVICE,
    DRIVER,
    EMULATED,
    ENFORCED_BY,
    GPU,
    KIND,
    MEMORY,
    MPS,
    NODE,
    NOT_CAPPED,
    PLATFORM_LABELS,
    PRODUCT,
    RLIMIT,
    TIME_SLICING,
    TORCH,
    label_value,
    parse_label,
)
from gpufaas_core.cost import ANY
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.model import Bytes, Device, DeviceId, Need, NodeId
from gpufaas_core.units import MiB, format_bytes, parse_bytes
from gpufaas_gpu_manager.emulation import Costs, Emulation
from gpufaas_gpu_manager.isolation.walls import Level
from gpufaas_gpu_manager.machine_memory import available_memory
from gpufaas_gpu_manager.mps import Mps
from gpufaas_gpu_manager.nvml import Nvml

ReadCosts = Callable[[Path], Costs]
"""Reads the cost model of emulated devices from a file. :raises InvalidSpec: it cannot be read"""

_SPEC: Final = re.compile(r"(cpu|cuda|emulated):(\d+)(?:=(.+))?")
_CORES: Final = re.compile(r"\d{1,4}(\.\d{1,3})?|\.\d{1,3}")
_STANDBY_CONTEXT: Final = 512 * MiB
"""Not promised either, for each standby: more than a context takes."""
_CUDA_SPARE: Final = 512 * MiB
"""Not promised on a GPU when no size is given: memory of the driver, and growth of other programs' contexts."""

_ALLOCATOR: Final = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""Blocks of torch's allocator grow in place: gaps between them, which are counted as occupied, stay small."""
_OPTIONS: Final[Mapping[str, Sequence[str]]] = {"cpu": ("cores",), "cuda": ("mps",), EMULATED: ("kind", "profile")}
"""By kind of device: what follows behind commas and is no label."""
_GO_ARCH: Final = {"x86_64": "amd64", "aarch64": "arm64"}  # the names that Kubernetes uses


class NodeDevice:
    """What the supervisor needs of a device. What most of them need not do is done here."""

    device: Device
    torch_device: str
    """The device that load() of a handler gets."""
    env: dict[str, str]
    """Added to the environment of its workers."""
    compiles_for = "cpu"
    """What code that is compiled for it fits, as the name of a folder. torch says the rest in names of files."""
    enforced: bool
    """Whether the kernel holds workers to their reservation (RLIMIT_DATA)."""
    cores = 0.0
    """The cores that the workers of a CPU device may use together; 0: nothing is capped."""
    emulation: Emulation | None = None
    """Its time and its cost model, if it is emulated."""
    contexts = False
    """Whether a standby makes a context on it before it is taken."""
    note = ""
    """What people should know of it, in a line; empty: nothing."""

    @property
    def nodes(self) -> Sequence[str]:
        """Return the device nodes that its workers open."""
        return ()

    def share_env(self, need: Need, share: int, memory: Bytes) -> dict[str, str]:  # noqa: ARG002 - the port's
        """
        Return what is added to the environment of a worker that has *share* per cent of the compute (0: no share) and
        *memory* bytes. May block.

        :raises OSError: the worker cannot share the device
        """
        return {}

    def close(self) -> None:
        """End what was started for it. May block."""

    def used_bytes(self, pids: Sequence[int]) -> Bytes | None:  # noqa: ARG002 - the port's
        """Return the device's memory that the processes *pids* occupy by the driver's account; None: it keeps none."""
        return None

    def fault(self) -> str:
        """Return why the device cannot be used any more; empty: it can. May block for long: call it in a thread."""
        return ""


class CpuDevice(NodeDevice):
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
        cores: float = 0.0,
        shares_by: str = NOT_CAPPED,
    ) -> None:
        """
        :param labels: the operator's
        :param enforcement: what holds workers to their memory; see constraints.MEMORY
        :param cores: that its workers may use together; 0: nothing is capped
        :param shares_by: what holds workers to their shares of the cores; see constraints.COMPUTE
        """
        device = DeviceId(f"{node}/cpu:{index}")
        self.cores = cores
        every = {**(labels or {}), **_labels(node, device, "cpu"), MEMORY: enforcement, COMPUTE: NOT_CAPPED}
        if cores:
            every |= {COMPUTE: shares_by, CORES: f"{cores:g}"}
        # What a call takes depends on the cores: devices with different ones share no profile.
        self.device = Device(device, f"cpu-{cores:g}" if cores else "cpu", memory, every)
        # A handler that asks torch.cuda must find no GPU, and not one of another device.
        self.env = {"CUDA_VISIBLE_DEVICES": ""}


class CudaDevice(NodeDevice):
    """
    One GPU, or a MIG device of one. Workers see it alone, as ``cuda:0``. Those that share it do so by MPS, or else take
    turns.
    """

    torch_device = "cuda:0"
    enforced = False

    def __init__(
        self, node: NodeId, index: int, memory: Bytes | None, nvml: Nvml, labels: Mapping[str, str] | None = None,
        *, mps: bool = True, standby: int = 0, isolation: Level = "none",
    ) -> None:  # fmt: skip
        """
        :param mps: start MPS for it, if that is there
        :param standby: so many processes will have a context on it, without MPS, and be no workers
        """
        total, name, self.uuid = nvml.describe(index)
        self.total = total
        self._nvml = nvml
        self._index = index
        device = DeviceId(f"{node}/cuda:{index}")
        self._mps: Mps | None = None
        why = "it is switched off"
        if mps and isolation != "none":
            why = "its clients have one uid and one /dev/shm together, as only with --isolation none"
        elif mps:
            try:
                self._mps = Mps(self.uuid)
            except OSError as exc:
                why = str(exc)
        self.note = "" if self._mps else f"{device}: its workers take turns: no MPS: {why}"
        # A context has threads, which Landlock does not hold if they are there before it (below ABI 8).
        self.contexts = self._mps is None and (isolation == "none" or (isolation == "best" and os.geteuid() == 0))
        sharing = {COMPUTE: MPS if self._mps else TIME_SLICING}
        every = {**(labels or {}), **_labels(node, device, "cuda"), PRODUCT: label_value(name), **sharing}
        spare = _CUDA_SPARE + self.contexts * standby * _STANDBY_CONTEXT
        self.device = Device(device, name, memory or max(total - spare, 0), every)
        self._nodes = nvml.nodes(index)
        if driver := label_value(nvml.driver()):
            every[DRIVER] = driver
        self.compiles_for = re.sub(r"[^\w.-]+", "-", f"{name}-driver-{driver}")
        self.env = {"CUDA_VISIBLE_DEVICES": self.uuid, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

    @property
    def nodes(self) -> Sequence[str]:
        return [each for each in self._nodes if os.path.exists(each)]  # the driver may make one later

    def share_env(self, need: Need, share: int, memory: Bytes) -> dict[str, str]:
        return self._mps.env(need, share, memory) if self._mps else {}

    def close(self) -> None:
        if self._mps is not None:
            self._mps.close()

    def used_bytes(self, pids: Sequence[int]) -> Bytes | None:
        return self._nvml.used_by(self._index, pids)

    def fault(self) -> str:
        return self._nvml.fault(self.uuid)


def with_allocator(env: dict[str, str]) -> dict[str, str]:
    """Return *env* with the allocator's settings, unless it has some, under the older name, too."""
    return env if "PYTORCH_CUDA_ALLOC_CONF" in env else {**_ALLOCATOR, **env}


class EmulatedDevice(NodeDevice):
    """
    A device that takes the time of a cost model and computes nothing. Its kind begins with ``emulated-``, so that it
    shares no profiles with real devices.
    """

    enforced = False
    """The kernel holds nobody to memory that is not there: see `EmulatedHandler.load`."""

    def __init__(
        self, node: NodeId, index: int, memory: Bytes, kind: str, costs: Costs, source: str,
        labels: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """:param kind: in the cost model"""
        self.torch_device = f"emulated:{index}"
        device = DeviceId(f"{node}/{self.torch_device}")
        every = {**(labels or {}), **_labels(node, device, EMULATED), COMPUTE: EMULATED}
        self.device = Device(device, f"emulated-{kind}", memory, every)
        self.env = {"CUDA_VISIBLE_DEVICES": ""}
        self.emulation = Emulation(device, kind, costs, source)
        self.note = f"{device} is emulated: calls take the time that {source} says, and get no result"


def _labels(node: NodeId, device: DeviceId, kind: str) -> dict[str, str]:
    """Return the labels that every device has. Host, system and processor have Swarm's and Kubernetes' names."""
    host, machine = label_value(platform.node()) or str(node), platform.machine()
    return {
        NODE: node,
        DEVICE: device,
        KIND: kind,
        GPU: "false" if kind == "cpu" else "true",  # an emulated device stands for a GPU
        "node.hostname": host,
        "kubernetes.io/hostname": host,
        "node.platform.os": "linux",
        "kubernetes.io/os": "linux",
        "node.platform.arch": machine,
        "kubernetes.io/arch": _GO_ARCH.get(machine, machine),
        TORCH: label_value(version("torch")),
    }


def described(device: Device) -> str:
    """Return a line about *device*: its size, how memory of its workers is limited, its own labels."""
    labels = device.labels
    how, cores = ENFORCED_BY.get(labels.get(MEMORY, ""), ""), labels.get(CORES, "")
    limited = f"{cores} core{'' if cores == '1' else 's'}, " if cores else ""
    kind = f"CPU device, {limited}memory limit enforced {how}" if how else device.kind
    own = ", ".join(f"{key}={value}" for key, value in labels.items() if key not in PLATFORM_LABELS)
    return f"{device.id}  {format_bytes(device.memory)}  {kind}{'  ' * bool(own)}{own}"


def open_devices(
    specs: Sequence[str], node: NodeId, labels: Sequence[str] = (), enforcement: str = RLIMIT,
    read_costs: ReadCosts | None = None, shares_by: str = NOT_CAPPED, standby: int = 0, isolation: Level = "none",
) -> list[NodeDevice]:  # fmt: skip
    """
    Return the devices that *specs* name: ``cpu:0=2GiB``, ``cuda:0``, ``cuda:1=20GiB``, with labels of its own
    ``cuda:0,zone=a``, or ``emulated:0=16GiB,kind=v100,profile=FILE``. Without *specs*: the GPUs of this machine, else
    two CPU devices with half of the free memory.

    :param labels: ``KEY=VALUE``, of all devices
    :param enforcement: what holds workers of CPU devices to their memory
    :param read_costs: reads the profiles of emulated devices; None: there are none
    :param shares_by: what holds workers of CPU devices with cores to their shares
    :param standby: so many standbys have a context on each GPU; a size that *specs* name must leave room for them
    :param isolation: of the node's workers
    :raises InvalidSpec: a spec is malformed, named twice, larger than the machine, or names a GPU that is not there;
        a label is malformed, or set by the platform; emulated devices are beside real ones
    """
    common = _own_labels(labels, "--label")
    cuda = partial(CudaDevice, standby=standby, isolation=isolation)
    if not specs:
        return _discover(node, common, enforcement, cuda)
    opening = _Opening(node, common, enforcement, read_costs, shares_by, cuda)
    devices = [opening.device(each) for each in specs]
    ids = [each.device.id for each in devices]
    for each in ids:
        if ids.count(each) > 1:
            raise InvalidSpec(f"--device {each.partition('/')[2]} is named twice: give each device a number of its own")
    emulated = [each for each in devices if each.emulation is not None]
    if emulated and len(emulated) < len(devices):
        raise InvalidSpec(
            f"--device {emulated[0].torch_device}: it is emulated and others are real, so calls would be answered by "
            "either: name one sort only"
        )
    _check_cores([each for each in devices if each.cores])
    declared = sum(each.device.memory for each in devices if isinstance(each, CpuDevice))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if declared > total:
        raise InvalidSpec(
            f"the CPU devices are given {format_bytes(declared)} together, but this machine has {format_bytes(total)}"
        )
    return devices


@dataclass(eq=False)
class _Opening:
    """Reads the ``--device`` options of one node."""

    node: NodeId
    labels: Mapping[str, str]
    enforcement: str
    read_costs: ReadCosts | None
    shares_by: str
    new_cuda: Callable[..., CudaDevice]
    nvml: Nvml | None = None

    def device(self, given: str) -> NodeDevice:
        spec, *more = given.strip().split(",")
        found = _SPEC.fullmatch(spec)
        if not found:
            raise InvalidSpec(
                f"--device {given!r}: write cpu:0=2GiB, cpu:0=2GiB,cores=0.6, cuda:0, cuda:0=20GiB, cuda:0,zone=a or "
                "emulated:0=16GiB,kind=v100,profile=FILE"
            )
        kind, index = found[1], int(found[2])
        memory = parse_bytes(found[3]) if found[3] else None
        if memory == 0:
            raise InvalidSpec(f"--device {spec}: a device of no memory holds no model")
        options = _options(more, kind, f"--device {given}")
        labels = {**self.labels, **_own_labels(more, f"--device {given}")}
        match kind:
            case "cpu":
                return self._cpu(spec, index, memory, options, labels)
            case "cuda":
                return self._cuda(spec, index, memory, options, labels)
        return self._emulated(spec, index, memory, options, labels)

    def _cpu(
        self, spec: str, index: int, memory: Bytes | None, options: Mapping[str, str], labels: Mapping[str, str]
    ) -> CpuDevice:
        if memory is None:
            raise InvalidSpec(f"--device {spec}: a CPU device needs a budget, for example {spec}=2GiB")
        text = options.get("cores", "")
        if text and not (_CORES.fullmatch(text) and float(text)):
            raise InvalidSpec(f"--device {spec}: cores={text}: write a number from 0.001, for example cores=0.6")
        cores = float(text or 0)
        return CpuDevice(self.node, index, memory, labels, self.enforcement, cores, self.shares_by)

    def _cuda(
        self, spec: str, index: int, memory: Bytes | None, options: Mapping[str, str], labels: Mapping[str, str]
    ) -> CudaDevice:
        if (mps := options.get("mps", "auto")) not in ("auto", "off"):
            raise InvalidSpec(f"--device {spec}: mps={mps}: write mps=off, or leave it out")
        self.nvml = self.nvml or Nvml()
        cuda = self.new_cuda(self.node, index, memory, self.nvml, labels, mps=mps == "auto")
        if memory and memory > cuda.total:
            cuda.close()
            raise InvalidSpec(f"--device {spec}: that GPU has {format_bytes(cuda.total)}")
        return cuda

    def _emulated(
        self, spec: str, index: int, memory: Bytes | None, options: Mapping[str, str], labels: Mapping[str, str]
    ) -> EmulatedDevice:
        if memory is None or "kind" not in options or "profile" not in options:
            raise InvalidSpec(
                f"--device {spec}: an emulated device has a size, a kind and a profile: write for example "
                f"emulated:{index}=16GiB,kind=v100,profile=FILE, with FILE as for 'gpufaas simulate --workload'"
            )
        if self.read_costs is None:
            raise InvalidSpec(f"--device {spec}: nothing reads profiles of emulated devices here")
        file, kind = options["profile"], options["kind"]
        costs = self.read_costs(Path(file))
        if not any(kind in each or ANY in each for each in costs.values()):
            kinds = sorted({name for each in costs.values() for name in each})
            raise InvalidSpec(
                f"--device {spec}: {file} has no costs on devices of kind {kind} (there are: {', '.join(kinds)})"
            )
        return EmulatedDevice(self.node, index, memory, kind, costs, file, labels)


def _check_cores(devices: Sequence[NodeDevice]) -> None:
    """:raises InvalidSpec: *devices* have more cores together than there are"""
    asked, there = sum(each.cores for each in devices), len(os.sched_getaffinity(0))
    if asked > there:
        given = " and ".join(f"{each.device.id.partition('/')[2]} with cores={each.cores:g}" for each in devices)
        raise InvalidSpec(f"--device: {given} is more than the {there} cores that this machine has for us: give less")


def _options(more: list[str], kind: str, what: str) -> dict[str, str]:
    """Take the options of a device, ``KEY=VALUE``, out of *more*; what is left are labels."""
    known, of_others = _OPTIONS[kind], {key: other for other, keys in _OPTIONS.items() for key in keys}
    options: dict[str, str] = {}
    for text in list(more):
        key, _, value = text.strip().partition("=")
        if key in known:
            if key in options or not value:
                raise InvalidSpec(f"{what}: {key} needs one value: write {key}=VALUE, once")
            options[key] = value
            more.remove(text)
        elif key in of_others:
            raise InvalidSpec(
                f"{what}: {key} is an option of {of_others[key]} devices: remove it, or give a label another name"
            )
        elif near := difflib.get_close_matches(key.lower(), known, 1, 0.8):
            raise InvalidSpec(f"{what}: {key} is no option: did you mean {near[0]}? Else give the label another name")
    return options


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


def _discover(
    node: NodeId, labels: Mapping[str, str], enforcement: str, cuda: Callable[..., CudaDevice]
) -> list[NodeDevice]:
    try:
        nvml = Nvml()
        gpus: list[NodeDevice] = [cuda(node, index, None, nvml, labels) for index in range(nvml.count())]
    except InvalidSpec:
        gpus = []
    if gpus:
        return gpus
    each = available_memory() // 4 // MiB * MiB
    return [CpuDevice(node, index, each, labels, enforcement) for index in range(2)]
