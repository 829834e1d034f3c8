"""The state of a deployed function, as ``/system/functions`` shows it."""

import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

import msgspec

from gpufaas_core.constraints import COMPUTE, MEMORY, isolation_of
from gpufaas_core.model import EngineStatus, FunctionId
from gpufaas_gateway.catalogue import Deployed, replicas_of
from gpufaas_gateway.isolation import not_enforced
from gpufaas_gateway.memory_advice import memory_advice
from gpufaas_gateway.wire import FunctionDetail, FunctionStatus, PlacementShown, ProfileShown, timestamp


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


def status_of(deployed: Deployed, status: EngineStatus, all_copies: Mapping[FunctionId, Copies]) -> FunctionStatus:
    """Return the status of *deployed*; *all_copies* as `copies_of` returns them."""
    replicas = replicas_of(deployed, status)
    copies = all_copies.get(deployed.function_id) or Copies()
    detail = _detail(deployed, status, copies)
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


def _detail(deployed: Deployed, status: EngineStatus, copies: Copies) -> FunctionDetail:
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
        before=None if before is None else before.revision,
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
