"""
What is simulated: devices, functions, arrivals in order of time, and changes of the cluster.

A `Workload` is a value. Four modules make workloads: `explicit` (files), `synthetic` (drawn from a seed), `trace`
(Azure Functions 2019) and `recorded` (a journal). The true costs of a function are separate from the profiles that the
engine gets (`Function.profiles`): a simulation can show the effect of wrong estimates.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from gpufaas_core.cost import Cost, ratios, truth
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.model import (
    ALL_COMPUTE,
    Bytes,
    Device,
    DeviceId,
    Function,
    FunctionId,
    Need,
    Profile,
    Replica,
    Seconds,
)
from gpufaas_core.units import format_bytes
from gpufaas_scheduler.plans.problem import Count, NotNegative

MB: Final = 10**6
"""The bytes of a megabyte in the published tables."""
ANY_KIND: Final = "*"
DEFAULT_KIND: Final = "gpu"
DEFAULT_NAMESPACE: Final = "default"
MODEL: Final = Need()
UNBOUNDED: Final = 1 << 60
"""As a limit on queues: simulations ask how long calls wait, not how many are turned away."""


class BadWorkload(InvalidSpec):
    """A file or an option does not describe a workload. The message names file and line, and says what to do."""


@dataclass(frozen=True, slots=True)
class SimulatedFunction:
    name: str
    costs: Mapping[str, Cost]
    """By kind of device; `ANY_KIND` for kinds without an entry."""
    namespace: str = DEFAULT_NAMESPACE
    """Its tenant."""
    need: Need = MODEL
    """By default a model function, which has its device to itself."""
    min_copies: int = 0
    max_queue: int = UNBOUNDED
    timeout_s: Seconds | None = None
    """How long a call may wait for its start; after that it is rejected."""
    planned: Mapping[str, Cost] = field(default_factory=dict)
    """What the engine is told, by kind of device. Other kinds: the true costs."""
    weight: float = 1.0
    priority: int = 0
    task: str = ""
    accuracy: float = 0.0
    idempotent: bool = False
    """A policy may stop its calls and run them again."""

    def cost(self, kind: str) -> Cost | None:
        return self.costs.get(kind) or self.costs.get(ANY_KIND)

    def known_as(self, function: FunctionId) -> Function:
        """Return the function for the engine, with the planned costs."""
        return Function(
            function,
            digest="",
            need=self.need,
            profiles={
                kind: Profile(
                    each.load_s,
                    each.service_s,
                    each.occupation,
                    measured=True,
                    loads={}
                    if each.host_load_s is None
                    else {"host": each.host_load_s, "parked": each.wakes_in_s or 0.0},
                    ratios=ratios(truth(self.name, self.need, each), self.need.batch_max)
                    if kind in self.planned
                    else (),
                )
                for kind, each in {**self.costs, **self.planned}.items()
            },
            min_copies=self.min_copies,
            max_queue=self.max_queue,
            tenant=self.namespace,
            weight=self.weight,
            priority=self.priority,
            task=self.task,
            accuracy=self.accuracy,
            idempotent=self.idempotent,
        )


@dataclass(frozen=True, slots=True)
class SimulatedDevice:
    id: DeviceId
    memory: Bytes
    kind: str = DEFAULT_KIND
    node: str = ""
    """Devices of one node share its host memory, and leave together."""
    compute: int = ALL_COMPUTE

    def known_as(self, price_per_h: float = 0.0, host_memory: Bytes = 0, *, parks: bool = False) -> Device:
        """Return the device for the engine, with what its node can do: a simulation fetches nothing ahead."""
        return Device(
            self.id, self.kind, self.memory, compute=self.compute, host_memory=host_memory, parks=parks,
            loads_parts=True, fetches=False, fetches_from=False, fetches_ranges=False, price_per_h=price_per_h,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class NodeOffer:
    """Nodes of a kind that can be procured."""

    kind: str
    """The kind of the node, and of its devices."""
    memory: Bytes
    """The memory of each device."""
    devices: int = 1
    price_per_h: float = 0.0
    """The price of a node, in any currency, from the request until it has left."""
    delay_s: Seconds = 0.0
    """From the request until it joins."""
    limit: int | None = None
    """How many of them there may be at once, requested ones included. None: any number."""
    compute: int = ALL_COMPUTE
    host_memory: Bytes = 0

    def node(self, number: int) -> list[SimulatedDevice]:
        """Return the devices of the node of this number, from 1."""
        name = f"{self.kind}-{number}"
        return [
            SimulatedDevice(DeviceId(f"{name}/{at}"), self.memory, self.kind, name, self.compute)
            for at in range(self.devices)
        ]


# --- changes of the cluster -------------------------------------------------------------------------------------------


class TimedChange(Struct, frozen=True, tag_field="event", forbid_unknown_fields=True):
    """Workload files hold `DeviceLeaves`, `NodeLeaves` and `FunctionScaled` in this form."""

    at_s: NotNegative = msgspec.field(name="t")


class DeviceJoins(TimedChange, frozen=True, tag="device_joins"):
    device: SimulatedDevice


class DeviceLeaves(TimedChange, frozen=True, tag="device_leaves"):
    """The device fails. Calls that run on it are lost; calls in its local queue return to the global queue."""

    device: DeviceId


class NodeLeaves(TimedChange, frozen=True, tag="node_leaves"):
    """All devices of the node fail, and its host memory is lost."""

    node: str


class KindLeaves(TimedChange, frozen=True, tag="kind_leaves"):
    """The node of a kind that is in use fails: of several, the one with most grants and loads, then the first."""

    kind: Annotated[str, Meta(min_length=1)]
    """`ANY_KIND`: of whatever kind it is."""
    down_s: NotNegative | None = None
    """
    After so long it comes back, if it was there at the start; and until then no node of its kind can be procured. None:
    it stays away, and what is offered stays as it is.
    """


class OfferChanges(TimedChange, frozen=True, tag="offer_changes"):
    """What is not said stays as it is. Nodes that were procured keep their price."""

    kind: str
    limit: Count | UnsetType | None = UNSET
    price_per_h: NotNegative | UnsetType = UNSET
    delay_s: NotNegative | UnsetType = UNSET


class HostLoad(TimedChange, frozen=True, tag="host_load"):
    """From now on, what else runs on a node takes *compute* per cent of the compute of each of its devices."""

    node: str
    compute: Annotated[int, Meta(ge=0, lt=ALL_COMPUTE)]


class FunctionUpdated(TimedChange, frozen=True, tag="function_updated"):
    """Later calls are of a new revision, with a model of its own; the old one drains. Costs None: as before."""

    function: str
    costs: Mapping[str, Cost] | None = None


class FunctionScaled(TimedChange, frozen=True, tag="function_scaled"):
    function: str
    copies: Count


class ReplicaEntry(Replica, frozen=True, forbid_unknown_fields=True):
    """As plans have it; of a function by its name here."""


class PlanComes(TimedChange, frozen=True, tag="plan"):
    """The plan is in force from then on; without replicas there is none."""

    replicas: tuple[ReplicaEntry, ...]


Change = (
    DeviceJoins
    | DeviceLeaves
    | NodeLeaves
    | KindLeaves
    | OfferChanges
    | HostLoad
    | FunctionUpdated
    | FunctionScaled
    | PlanComes
)


class PlannerEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """A solver plans when there is reason to (`gpufaas_planner.planner`)."""

    solver: str
    solve_s: NotNegative = 0.0
    """The simulated time after which its answer is there."""


@dataclass(frozen=True, slots=True)
class Workload:
    """
    `times` and `calls` have one entry per call: its arrival in seconds from 0, in order, and the index of its function.
    A million calls take 12 MB, or 20 MB with `service_s`. `host_memory` is in bytes per node; a node without an entry
    keeps no weights in host memory.
    """

    devices: Sequence[SimulatedDevice]
    functions: Sequence[SimulatedFunction]
    times: array[float]
    calls: array[int]
    changes: Sequence[Change] = ()
    """Changes of the cluster and of functions, by time."""
    host_memory: Mapping[str, Bytes] = field(default_factory=dict)
    name: str = "workload"
    service_s: array[float] | None = None
    """
    The true service time of each call, on any device, in seconds; the scheduler does not know it. NaN: as in the costs
    of the function. None: NaN for all calls.
    """
    offers: Sequence[NodeOffer] = ()
    prices: Mapping[str, float] = field(default_factory=dict)
    """The prices of the nodes at the start and of those that join by a change, per hour. Others cost nothing."""
    parks: Collection[str] = ()
    """The nodes that park copies, within their `host_memory`."""
    planner: PlannerEntry | None = None

    def __len__(self) -> int:
        return len(self.times)

    @property
    def all_devices(self) -> Iterator[SimulatedDevice]:
        """The devices at the start, those that join later, and one of each offer."""
        yield from self.devices
        for offer in self.offers:
            yield offer.node(1)[0]
        for change in self.changes:
            if isinstance(change, DeviceJoins):
                yield change.device

    @property
    def hottest(self) -> int | None:
        """The index of the function that is called most, the first of several; None: there are no calls."""
        if not self.calls:
            return None
        counts = [0] * len(self.functions)
        for call in self.calls:
            counts[call] += 1
        return max(range(len(counts)), key=lambda index: (counts[index], -index))


def arrivals(pairs: Sequence[tuple[Seconds, int]]) -> tuple[array[float], array[int]]:
    """Return *pairs* of time and function as `Workload.times` and `Workload.calls`."""
    return array("d", [time for time, _ in pairs]), array("i", [function for _, function in pairs])


def no_device_for(function: SimulatedFunction, devices: Sequence[SimulatedDevice]) -> str | None:
    """Return why *function* fits none of *devices*. None: it fits one."""
    if not devices:
        return "there are no devices: name at least one"
    costs = [(device, function.cost(device.kind)) for device in devices]
    fitting = [device for device, cost in costs if cost is not None and cost.occupation <= device.memory]
    compute = function.need.compute
    if any(compute <= device.compute for device in fitting):
        return None
    if fitting:
        most = max(fitting, key=lambda device: device.compute)
        return (
            f"function {function.name} needs {compute} % of a device's compute but no device that it fits has more "
            f"than {most.compute} % ({most.id}): add a larger device, or set sharing to spatial or share with less"
        )
    largest = max(devices, key=lambda device: device.memory)
    needs = sorted({cost.occupation for _, cost in costs if cost is not None})
    if not needs:
        kinds = ", ".join(sorted({device.kind for device in devices}))
        return f"function {function.name} has no costs for devices of kind {kinds}: add them, or costs for any kind"
    return (
        f"function {function.name} needs {megabytes(needs[0])} but the largest device ({largest.id}) has "
        f"{megabytes(largest.memory)}: add a larger device, or leave the function out"
    )


def all_fit(workload: Workload) -> Workload:
    """
    Return *workload*.

    :raises BadWorkload: one of its functions fits none of its devices
    """
    everywhere = list(workload.all_devices)
    for function in workload.functions:
        if (reason := no_device_for(function, everywhere)) is not None:
            raise BadWorkload(f"{workload.name}: {reason}")
    return workload


def megabytes(size: Bytes) -> str:
    """Return *size* as workload files have it: ``1269 MB``."""
    return f"{size / MB:g} MB" if size % 1000 == 0 else format_bytes(size)
