"""
Constraints on where a function may run, and the labels of devices that they speak of.

Written as OpenFaaS's users do: ``key=value``, as for Kubernetes' node selectors, and ``key==value`` or ``key!=value``
with or without spaces, as for Swarm. Values are compared without regard to case, as Swarm does. A device without the
label satisfies ``!=`` only, as in both.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct

from gpufaas_core.errors import InvalidSpec

GPU: Final = "gpu"
"""``true`` or ``false``."""
KIND: Final = "device.kind"
"""``cuda`` or ``cpu``."""
DEVICE: Final = "device.id"
NODE: Final = "node.id"
MEMORY: Final = "memory.enforcement"
"""What holds workers on a CPU device to their reservation: one of the four below."""
CGROUP_V1: Final = "cgroup-v1"
CGROUP_V2: Final = "cgroup-v2"
WATCHER: Final = "watcher"
RLIMIT: Final = "rlimit"
ENFORCED_BY: Final = {
    CGROUP_V1: "by the kernel (control groups, v1)",
    CGROUP_V2: "by the kernel (control groups, v2)",
    WATCHER: "by the kernel for private memory, by a watcher for the rest",
    RLIMIT: "by the kernel for private memory of each process, not for shared memory",
}
"""Words for what a CPU device's label says."""
PRODUCT: Final = "nvidia.com/gpu.product"
"""``NVIDIA-H200``: the name that NVIDIA's feature discovery for Kubernetes gives it."""

PLATFORM_LABELS: Final = frozenset(
    (
        GPU, KIND, DEVICE, NODE, PRODUCT, MEMORY, "node.hostname", "kubernetes.io/hostname", "node.platform.os",
        "kubernetes.io/os", "node.platform.arch", "kubernetes.io/arch",
    )
)  # fmt: skip
"""Those that every node sets itself; all others are its operator's."""

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


def satisfied(constraints: Iterable[Constraint], labels: Mapping[str, str]) -> bool:
    """Whether a device with *labels* satisfies all of *constraints*."""
    return all(each.satisfied_by(labels) for each in constraints)


def parse_constraint(text: str) -> Constraint:
    """
    Return what *text* asks for. Swarm's ``node.labels.KEY`` and ``engine.labels.KEY`` are KEY: devices have the labels.

    :raises InvalidSpec: not a constraint; says what one looks like
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
    Return key and value of ``KEY=VALUE``, as an operator labels a device.

    :raises InvalidSpec: not a label; says what one looks like
    """
    key, _, value = text.strip().partition("=")
    if not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
        raise InvalidSpec(
            f"{text[:80]!r} is not a label: write KEY=VALUE with letters, digits and -_./ (in the value also ':'), "
            "for example zone=a"
        )
    return key, value


def label_value(text: str) -> str:
    """Return *text* as the value of a label: what may not stand in one becomes ``-``."""
    return re.sub(r"[^A-Za-z0-9_./:]+", "-", text).strip("-_./:")
