"""
The form of workload files (docs/simulator.md), and writing them. `explicit` reads them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from gpufaas_core.cost import Cost
from gpufaas_core.model import ALL_COMPUTE, Need
from gpufaas_scheduler.plans.problem import AtLeastOne, Count, Name, NotNegative, Positive
from gpufaas_simulator.workload import (
    ANY_KIND,
    DEFAULT_KIND,
    DEFAULT_NAMESPACE,
    MB,
    UNBOUNDED,
    Change,
    DeviceJoins,
    DeviceLeaves,
    FunctionScaled,
    FunctionUpdated,
    HostLoad,
    KindLeaves,
    NodeLeaves,
    NodeOffer,
    OfferChanges,
    PlanComes,
    PlannerEntry,
    SimulatedDevice,
    SimulatedFunction,
    TimedChange,
    Workload,
)

Megabytes = Annotated[float, Meta(gt=0, le=1e12)]
Percent = Annotated[int, Meta(ge=1, le=ALL_COMPUTE)]
Used = Annotated[int, Meta(ge=0, le=ALL_COMPUTE)]
BatchTimes = dict[Annotated[int, Meta(ge=2)], NotNegative]
Uses = Used | Annotated[dict[AtLeastOne, Used], Meta(min_length=1)]


class DeviceEntry(Struct, forbid_unknown_fields=True, omit_defaults=True):
    id: Name
    memory_mb: Megabytes
    kind: str = DEFAULT_KIND
    node: str | None = None
    compute: Percent = ALL_COMPUTE


class _Figures(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The costs on devices of one kind. All three first ones, or none; in `PlannedEntry` any of them."""

    occupation_mb: Megabytes | UnsetType = UNSET
    load_s: NotNegative | UnsetType = UNSET
    infer_s: NotNegative | UnsetType = UNSET
    uses: Uses | None = None
    batch: BatchTimes = {}
    share: dict[Percent, Positive] = {}
    beside: dict[str, Positive] = {}

    @property
    def use(self) -> int | tuple[tuple[int, int], ...] | None:
        """`uses` as `Cost` has it."""
        return tuple(sorted(self.uses.items())) if isinstance(self.uses, dict) else self.uses


_FiguresT = TypeVar("_FiguresT", bound=_Figures)


class CostEntry(_Figures):
    host_load_s: NotNegative | None = None
    wake_s: NotNegative | None = None
    near: NotNegative = 0.0
    power: Annotated[float, Meta(ge=1)] = 1.0
    start_s: NotNegative = 0.0


class PlannedEntry(_Figures):
    kinds: dict[str, _Figures] = {}


class FunctionEntry(CostEntry):
    kinds: dict[str, CostEntry] = {}
    planned: PlannedEntry | None = None
    namespace: str = DEFAULT_NAMESPACE
    sharing: str | None = None
    compute: Percent | None = None
    slots: AtLeastOne | None = None
    batch_max: AtLeastOne = 1
    batch_wait_s: NotNegative = 0.0
    latency_goal_s: NotNegative | None = None
    batch_adaptive: bool = False
    min_copies: Count = 0
    max_queue: AtLeastOne | None = None
    timeout_s: NotNegative | None = None
    weight: Positive = 1.0
    priority: int = 0
    task: str = ""
    accuracy: float = 0.0
    idempotent: bool = False


class NodeEntry(Struct, forbid_unknown_fields=True, omit_defaults=True):
    host_memory_mb: Megabytes | None = None
    price_per_h: NotNegative = 0.0
    parks: bool = False


class OfferEntry(Struct, forbid_unknown_fields=True, omit_defaults=True):
    kind: Name
    memory_mb: Megabytes
    devices: AtLeastOne = 1
    price_per_h: NotNegative = 0.0
    delay_s: NotNegative = 0.0
    limit: Count | None = None
    compute: Percent = ALL_COMPUTE
    host_memory_mb: Megabytes | None = None


class JoinEntry(TimedChange, frozen=True, tag="device_joins"):
    device: DeviceEntry


class UpdateEntry(CostEntry, tag_field="event", tag="function_updated", kw_only=True):
    at_s: NotNegative = msgspec.field(name="t")
    function: str


ChangeEntry = (
    JoinEntry
    | DeviceLeaves
    | NodeLeaves
    | KindLeaves
    | OfferChanges
    | HostLoad
    | UpdateEntry
    | FunctionScaled
    | PlanComes
)


class ArrivalEntry(Struct, array_like=True):
    t: NotNegative
    function: str
    infer_s: NotNegative = math.nan
    """The true service time of this call. NaN, which JSON does not have: as in the function's costs."""
    more: Any = UNSET
    """Must stay unset. It is here because msgspec does not say which array is too long."""


class CostsEntry(Struct):
    """What of a workload file is the profile of emulated devices."""

    functions: Annotated[dict[str, FunctionEntry], Meta(min_length=1)]


class FileEntry(Struct, forbid_unknown_fields=True):
    devices: Annotated[list[DeviceEntry], Meta(min_length=1)]
    functions: dict[str, FunctionEntry]
    arrivals: list[ArrivalEntry]
    nodes: dict[str, NodeEntry] = {}
    offers: list[OfferEntry] = []
    changes: list[ChangeEntry] = []
    planner: PlannerEntry | None = None


# --- writing ----------------------------------------------------------------------------------------------------------


def workload_json(workload: Workload) -> bytes:
    """Return *workload* in the format that `read_workload` reads: one line per device, function, change and arrival."""
    encode = msgspec.json.Encoder().encode
    names = [encode(each.name) for each in workload.functions]
    functions = [name + b": " + encode(_as_function(each))
                 for name, each in zip(names, workload.functions, strict=True)]  # fmt: skip
    called = [b"[%s, %s]" % (encode(time), names[call])
              for time, call in zip(workload.times, workload.calls, strict=True)]  # fmt: skip
    if workload.service_s is not None:
        called = [each if math.isnan(infer_s) else each[:-1] + b", %s]" % encode(infer_s)
                  for each, infer_s in zip(called, workload.service_s, strict=True)]  # fmt: skip
    parts = [
        b'"devices": [\n%s\n]' % b",\n".join(encode(_as_device(each)) for each in workload.devices),
        b'"functions": {\n%s\n}' % b",\n".join(functions),
    ]
    sizes, prices = workload.host_memory, workload.prices
    nodes = {
        node: NodeEntry(_as_mb(sizes.get(node, 0)), prices.get(node, 0.0), node in workload.parks)
        for node in {**sizes, **prices}
    }
    if nodes:
        parts.append(b'"nodes": %s' % encode(nodes))
    if workload.offers:
        parts.append(b'"offers": [\n%s\n]' % b",\n".join(encode(_as_offer(each)) for each in workload.offers))
    if workload.changes:
        parts.append(b'"changes": [\n%s\n]' % b",\n".join(encode(_as_change(each)) for each in workload.changes))
    if workload.planner is not None:
        parts.append(b'"planner": %s' % encode(workload.planner))
    parts.append(b'"arrivals": [\n%s\n]' % b",\n".join(called))
    return b"{%s}\n" % b",\n".join(parts)


def _as_mb(size: int) -> float | None:
    return size / MB if size else None


def _as_device(each: SimulatedDevice) -> DeviceEntry:
    return DeviceEntry(each.id, each.memory / MB, each.kind, each.node, each.compute)


def _as_offer(each: NodeOffer) -> OfferEntry:
    return OfferEntry(
        each.kind, each.memory / MB, each.devices, each.price_per_h, each.delay_s, each.limit, each.compute,
        _as_mb(each.host_memory),
    )  # fmt: skip


def _with_costs(entry: _FiguresT, cost: Cost | None) -> _FiguresT:
    if cost is not None:
        entry.occupation_mb, entry.load_s, entry.infer_s = cost.occupation / MB, cost.load_s, cost.service_s
        entry.uses = dict(cost.uses) if isinstance(cost.uses, tuple) else cost.uses
        entry.batch, entry.share, entry.beside = dict(cost.batch), dict(cost.share), dict(cost.beside)
        if isinstance(entry, CostEntry):
            entry.host_load_s, entry.wake_s = cost.host_load_s, cost.wake_s
            entry.near, entry.power, entry.start_s = cost.near, cost.power, cost.start_s
    return entry


def _as_planned(planned: Mapping[str, Cost]) -> PlannedEntry | None:
    if not planned:
        return None
    kinds = {kind: _with_costs(_Figures(), cost) for kind, cost in planned.items() if kind != ANY_KIND}
    return _with_costs(PlannedEntry(kinds=kinds), planned.get(ANY_KIND))


def _as_function(each: SimulatedFunction) -> FunctionEntry:
    need = each.need
    # As `explicit` reads it: by default a model; with slots alone a CPU function.
    plain = need.sharing == "exclusive" and (need.compute == 0 or need.slots == 1)
    found = FunctionEntry(
        kinds={kind: _with_costs(CostEntry(), cost) for kind, cost in each.costs.items() if kind != ANY_KIND},
        planned=_as_planned(each.planned),
        namespace=each.namespace,
        sharing=None if plain else need.sharing,
        compute=need.compute if need.sharing in ("spatial", "share") else None,
        slots=need.slots if need.compute == 0 or need.slots > 1 else None,
        batch_max=need.batch_max,
        batch_wait_s=need.batch_wait_s,
        latency_goal_s=need.latency_goal_s,
        batch_adaptive=need.batch_adaptive,
        min_copies=each.min_copies,
        max_queue=None if each.max_queue == UNBOUNDED else each.max_queue,
        timeout_s=each.timeout_s,
        weight=each.weight,
        priority=each.priority,
        task=each.task,
        accuracy=each.accuracy,
        idempotent=each.idempotent,
    )
    return _with_costs(found, each.costs.get(ANY_KIND))


def _as_change(change: Change) -> ChangeEntry:
    match change:
        case DeviceJoins(at_s, device):
            return JoinEntry(at_s, _as_device(device))
        case FunctionUpdated(at_s, function, costs):
            found = UpdateEntry(at_s=at_s, function=function)
            return _with_costs(found, (costs or {}).get(ANY_KIND))
    return change


def need_of(entry: FunctionEntry) -> Need:
    """Return the need of a function whose keys go together."""
    whole = entry.slots is None or entry.sharing is not None
    return Need(
        entry.compute if entry.compute is not None else ALL_COMPUTE if whole else 0,
        entry.sharing or "exclusive",
        entry.slots or 1,
        entry.batch_max,
        entry.batch_wait_s,
        entry.latency_goal_s,
        entry.batch_adaptive,
    )
