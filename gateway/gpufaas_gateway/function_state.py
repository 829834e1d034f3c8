"""
The state of a deployed function, as ``/system/functions`` shows it, and what to tell who deployed it: whether it
declares the memory that it needs, and what its devices cannot enforce of its share.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

import msgspec

from gpufaas_core.constraints import AFFINITY, COMPUTE, CORES, MEMORY, NOT_CAPPED, TIME_SLICING, isolation_of
from gpufaas_core.model import Device, EngineStatus, FunctionId, Need
from gpufaas_core.reservations import peak_of
from gpufaas_core.units import Bytes, GiB, MiB, format_bytes
from gpufaas_gateway.catalogue import ServedRevision, replicas_of
from gpufaas_gateway.owner import PlanInForce, owner_of
from gpufaas_gateway.wire import FunctionDetail, FunctionStatus, PlacementShown, ProfileShown, timestamp

_MEASURED_CALLS: Final = 10
"""The least number of calls to give advice after: before, the peak may be that of small inputs."""
_MUCH: Final = 1.5
"""A function that declares more than this many times its peak is told of less."""
_CLOSE: Final = 1.1
"""One that declares less than this many times its peak is told of more."""
_SHOWN: Final = 3
"""The most devices that a line names."""
_OF_A_SHARE: Final = {
    NOT_CAPPED: "not enforced on {}, so it may use more: give such a device cores, as in cpu:0=2GiB,cores=2",
    AFFINITY: "held to whole cores on {}: without control groups there are no fractions of a core",
    TIME_SLICING: "not enforced on {}: without MPS, processes take turns on a GPU",
}
_OF_NEIGHBOURS: Final = {TIME_SLICING: "calls take turns, and do not run side by side, on {}: there is no MPS"}


@dataclass(slots=True)
class Copies:
    """The copies of one revision."""

    by_device: Counter[str] = field(default_factory=Counter)
    ready: int = 0
    """Loaded, and taking calls."""
    loading: int = 0
    parked: list[str] = field(default_factory=list)
    """The devices with a parked one."""


def copies_of(status: EngineStatus) -> Mapping[FunctionId, Copies]:
    copies: defaultdict[FunctionId, Copies] = defaultdict(Copies)
    for each in status.devices:
        for resident in each.resident:
            found = copies[resident.function]
            found.by_device[each.device.id] += 1
            found.ready += not (resident.loading or resident.draining)
            found.loading += resident.loading
        for parked in each.parked:
            copies[parked.function].parked.append(each.device.id)
    return copies


def status_of(
    deployed: ServedRevision, status: EngineStatus, all_copies: Mapping[FunctionId, Copies], plan: PlanInForce
) -> FunctionStatus:
    """Return the status of *deployed*; *all_copies* as `copies_of` returns them."""
    replicas = replicas_of(deployed, status)
    copies = all_copies.get(deployed.function_id) or Copies()
    detail = _detail(deployed, status, copies)
    detail.owner, detail.owner_why = owner_of(deployed, plan)
    detail.plan = list(plan.of.get(deployed.full_name, ())) or None
    sent = msgspec.structs.asdict(deployed.record.spec)
    del sent["service"]
    sent["namespace"], sent["annotations"] = deployed.namespace, sent["annotations"] or {}
    sent["labels"] = {**(sent["labels"] or {}), "faas_function": deployed.name}  # clients expect this one
    return FunctionStatus(
        **sent,
        name=deployed.name,
        created_at=timestamp(deployed.record.created_at),
        replicas=replicas,
        # At least 1 for a function that can be called, because faas-cli takes 0 for not ready: the next call loads one
        # that is idle or scaled to 0.
        available_replicas=0 if detail.unavailable else copies.ready or int(not (detail.reason or detail.kept_out)),
        gpufaas=detail,
    )


def _detail(deployed: ServedRevision, status: EngineStatus, copies: Copies) -> FunctionDetail:
    """
    ``unavailable``: its bundle is damaged or gone. ``failed``: its last load failed, and no copy serves. ``resident``:
    a copy takes calls. ``loading``: the first copy loads. ``idle``: the next call loads it.
    """
    handover = deployed.record.handover
    pending, before, failed = handover.pending, handover.before, handover.failed
    detail = FunctionDetail(
        state="resident" if copies.ready else "loading" if copies.loading else "idle",
        age=round(status.age_s, 3) or None,
        ready=copies.ready,
        loading=copies.loading,
        revision=deployed.record.revision,
        pending=None if pending is None else pending.record.revision,
        # One that a plan or scaling has loaded without a call is on trial until it has one, to no purpose.
        before=None if before is None or copies.ready else before.revision,
        failed=failed,
        bundle=deployed.spec.digest,
        devices=list(copies.by_device),
        copies=dict(copies.by_device),
        parked=copies.parked or None,
        lacks=status.lacking.get(deployed.function_id),
        kept_out=status.kept_out.get(deployed.function_id),
        hits=deployed.stats.hits,
        misses=deployed.stats.misses,
    )
    if deployed.unavailable is not None:
        detail.state, detail.reason, detail.unavailable = "unavailable", deployed.unavailable, deployed.unavailable
        return detail
    failing = status.failing.get(deployed.function_id)
    if failing is not None:
        detail.state, detail.reason, detail.failures = "failed", failing.reason, failing.failures
        detail.since = timestamp(time.time() - failing.for_s)
        detail.retry_in = round(failing.retry_in_s, 3)
    spec, placement = deployed.spec, deployed.options.placement
    need = deployed.function.need
    detail.kind, detail.slots, detail.memory = spec.kind, need.slots, spec.memory
    detail.compute, detail.latency_goal = need.compute, need.latency_goal_s
    detail.sharing = need.sharing if need.compute else None
    if need.batch_max > 1:
        detail.batch_max, detail.batch_wait, detail.batch_adaptive = (
            need.batch_max, need.batch_wait_s, need.batch_adaptive,
        )  # fmt: skip
        stats = deployed.stats
        detail.batch_mean = round((stats.hits + stats.misses) / stats.grants, 3) if stats.grants else None
    detail.memory_reason, detail.timeout = deployed.why_memory, deployed.timeout_s
    detail.memory_advice = memory_advice(deployed)
    detail.run_timeout = deployed.exec_s if deployed.exec_s < inf else None
    detail.profiles = msgspec.convert(deployed.profiles, dict[str, ProfileShown], from_attributes=True)
    allowed = placement.among([known.device for known in status.devices])
    detail.memory_enforcement = sorted({each.labels[MEMORY] for each in allowed if MEMORY in each.labels})
    if not spec.image:
        detail.isolation = isolation_of(each.labels for each in allowed)
    if need.sharing in ("share", "spatial"):
        detail.compute_enforcement = sorted({each.labels[COMPUTE] for each in allowed if COMPUTE in each.labels})
    detail.not_enforced = not_enforced(need, allowed, image=bool(spec.image)) or None
    if placement.asked:
        detail.placement = PlacementShown([str(each) for each in placement.asked], [each.id for each in allowed])
    return detail


def not_enforced(need: Need, devices: Sequence[Device], *, image: bool = False) -> str:
    """
    Return what *devices*, on which a function with *need* may run, cannot enforce; empty: nothing.

    :param image: it runs in containers or pods
    """
    found = _of_its_share(need, devices)
    capped = [each.id for each in devices if CORES in each.labels] if image else []
    if not capped:
        return found
    together = (
        f"each of its containers is held to the cores of {_few(capped)}, or its share of them, but not all workers "
        "there together: with others they may use more"
    )
    return f"{found}; {together}" if found else together


def _of_its_share(need: Need, devices: Sequence[Device]) -> str:
    match need.sharing:
        case "share":
            said, begin = _OF_A_SHARE, f"its share of {need.compute} per cent is "
        case "spatial":
            said, begin = _OF_NEIGHBOURS, ""
        case _:
            return ""
    found: dict[str, list[str]] = {}
    for each in devices:
        by = each.labels.get(COMPUTE, "")
        if by in said:
            found.setdefault(by, []).append(each.id)
    return begin + "; ".join(said[by].format(_few(ids)) for by, ids in found.items()) if found else ""


def _few(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
    return ", ".join(ids[:_SHOWN]) + more


def memory_advice(function: ServedRevision) -> str | None:
    """
    Return in one line what *function* should declare instead; None: it declares none, what it declares fits, or it is
    not known yet. Programs and images are not measured.
    """
    declared, options = function.options.memory, function.options
    needs = [each.occupation for each in function.profiles.values() if each.measured and "memory" not in each.estimated]
    if not (declared and needs) or function.stats.invocations < _MEASURED_CALLS or function.spec.kind == "server":
        return None
    own = function.spec.memory - declared  # of a worker that is a process of its own: it comes on top
    need = max(needs) - own
    peak = peak_of(need)
    better = _rounded(need)
    name, unit = ("gpufaas.memory", "MiB") if options.device_memory else ("limits.memory", "Mi")
    if declared < peak * _CLOSE:
        return (
            f"Uses up to {format_bytes(peak)} and declares {format_bytes(declared)}, so that it may run out of memory: "
            f"{name}: {better // MiB}{unit} leaves room."
        )
    if declared > peak * _MUCH and better < declared:
        return (
            f"Uses at most {format_bytes(peak)} of the {format_bytes(declared)} that it declares: "
            f"{name}: {better // MiB}{unit} frees {format_bytes(declared - better)}."
        )
    return None


def _rounded(size: Bytes) -> Bytes:
    """Return *size*, and what makes it a number that is easy to read."""
    step = 256 * MiB if size > GiB else 50 * MiB
    return max(1, -(-size // step)) * step
