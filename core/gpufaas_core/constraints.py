"""
Constraints on the devices that a function may run on, and the labels of devices.

The notation is that of OpenFaaS's users: ``key=value`` as for Kubernetes' node selectors, and ``key==value`` or
``key!=value`` with or without spaces as for Swarm. Values are compared without regard to case, as in Swarm. A device
without the label satisfies ``!=`` only, as in both.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct

from gpufaas_core.errors import InvalidSpec

GPU: Final = "gpu"
"""``true`` or ``false``."""
KIND: Final = "device.kind"
"""``cuda``, ``cpu`` or ``emulated``."""
EMULATED: Final = "emulated"
DEVICE: Final = "device.id"
NODE: Final = "node.id"
MEMORY: Final = "memory.enforcement"
"""How the reservations of workers on a CPU device are enforced: one of the four below."""
CGROUP_V1: Final = "cgroup-v1"
CGROUP_V2: Final = "cgroup-v2"
WATCHER: Final = "watcher"
RLIMIT: Final = "rlimit"
ENFORCED_BY: Final = {
    CGROUP_V1: "by the kernel (control groups, v1)",
    CGROUP_V2: "by the kernel (control groups, v2)",
    WATCHER: "by the kernel for private memory, by a watcher for the rest that processes have mapped or open",
    RLIMIT: "by the kernel for private memory of each process, not for shared memory",
}
"""How memory limits are enforced, in words."""
COMPUTE: Final = "compute.enforcement"
"""What keeps copies to their shares of a device's compute: one of the values below, or `EMULATED`."""
NOT_CAPPED: Final = "none"
CPU_QUOTA: Final = "cpu-quota"
AFFINITY: Final = "affinity"
MPS: Final = "mps"
TIME_SLICING: Final = "time-slicing"
CAPPED_BY: Final = {
    NOT_CAPPED: "not: a copy may use more than its share",
    CPU_QUOTA: "by the kernel (CPU quota)",
    AFFINITY: "by whole cores, to which its processes are bound",
    MPS: "by MPS",
    TIME_SLICING: "not: without MPS, processes take turns on the GPU",
    EMULATED: "by the emulation, which computes nothing",
}
"""How shares of a device's compute are enforced, in words."""
FIXED_AT_START: Final = frozenset((AFFINITY, MPS))
"""The ways in which a worker's share stays what it was at the start."""
ISOLATION: Final = "isolation"
"""The level that holds functions which are processes: ``none``, ``best`` or ``strict``."""
ISOLATED_BY: Final = "isolation.by"
"""What that is on this machine, in words."""
CORES: Final = "device.cores"
"""How many cores the workers of a CPU device may use together; no label: all."""
PRODUCT: Final = "nvidia.com/gpu.product"
"""``NVIDIA-H200``, as NVIDIA's feature discovery for Kubernetes names it."""

TORCH: Final = "torch.version"
DRIVER: Final = "driver.version"
"""The versions that times depend on: of torch, and of a GPU's driver."""

PLATFORM_LABELS: Final = frozenset(
    (
        GPU, KIND, DEVICE, NODE, PRODUCT, MEMORY, COMPUTE, CORES, TORCH, DRIVER, ISOLATION, ISOLATED_BY,
        "node.hostname", "kubernetes.io/hostname", "node.platform.os", "kubernetes.io/os", "node.platform.arch",
        "kubernetes.io/arch",
    )
)  # fmt: skip
"""The labels that every node sets itself; operators set all others."""

_KEY: Final = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_./]{0,251}[A-Za-z0-9])?")
_VALUE: Final = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_./:]{0,251}[A-Za-z0-9])?")
_CONSTRAINT: Final = re.compile(r"\s*([^\s=!]+)\s*(==|!=|=)\s*(\S*)\s*")
_SWARM_LABELS: Final = ("node.labels.", "engine.labels.")


class Constraint(Struct, frozen=True):
    """One condition on the labels of a device."""

    key: str
    value: str
    negated: bool = False

    def satisfied_by(self, labels: Mapping[str, str]) -> bool:
        found = labels.get(self.key)
        equal = found is not None and (found == self.value or found.lower() == self.value.lower())
        return equal is not self.negated

    def __str__(self) -> str:
        return f"{self.key}{'!=' if self.negated else '='}{self.value}"


def isolation_of(labels: Iterable[Mapping[str, str]]) -> list[str]:
    """Return what holds functions that are processes on devices with *labels*, as ``LEVEL: WORDS``, each once."""
    return sorted({f"{each[ISOLATION]}: {each.get(ISOLATED_BY, '')}" for each in labels if ISOLATION in each})


def satisfied(constraints: Iterable[Constraint], labels: Mapping[str, str]) -> bool:
    """Whether a device with *labels* satisfies all of *constraints*."""
    return all(each.satisfied_by(labels) for each in constraints)


def parse_constraint(text: str) -> Constraint:
    """
    Return the constraint in *text*. Swarm's ``node.labels.KEY`` and ``engine.labels.KEY`` mean KEY.

    :raises InvalidSpec: it is no constraint; says what one looks like
    """
    found = _CONSTRAINT.fullmatch(text)
    key, operator, value = found.groups() if found else ("", "", "")
    for prefix in _SWARM_LABELS:
        key = key.removeprefix(prefix)
    if not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
        raise InvalidSpec(f"{text[:80]!r} is not a constraint: write KEY=VALUE or KEY!=VALUE, for example gpu=true")
    return Constraint(key, value, operator == "!=")


def parse_label(text: str) -> tuple[str, str]:
    """
    Return key and value of an operator's label ``KEY=VALUE``.

    :raises InvalidSpec: it is no label; says what one looks like
    """
    key, _, value = text.strip().partition("=")
    if not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
        raise InvalidSpec(
            f"{text[:80]!r} is not a label: write KEY=VALUE with letters, digits and -_./ (in the value also ':'), "
            "for example zone=a"
        )
    return key, value


def label_value(text: str) -> str:
    """Return *text* as the value of a label: characters that are not allowed become ``-``."""
    return re.sub(r"[^A-Za-z0-9_./:]+", "-", text).strip("-_./:")
