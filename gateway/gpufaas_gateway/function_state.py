"""The state of a deployed function, as ``/system/functions`` shows it."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpufaas_core.model import DeviceId, EngineStatus, FunctionId
from gpufaas_gateway.catalogue import Deployed
from gpufaas_gateway.wire import timestamp


@dataclass(slots=True)
class Copies:
    """The copies of one revision."""

    by_device: Counter[DeviceId] = field(default_factory=Counter)
    ready: int = 0
    """Loaded, and taking calls."""
    loading: int = 0


def copies_of(status: EngineStatus) -> Mapping[FunctionId, Copies]:
    copies: defaultdict[FunctionId, Copies] = defaultdict(Copies)
    for each in status.devices:
        for resident in each.resident:
            found = copies[resident.function]
            found.by_device[each.device.id] += 1
            found.ready += not (resident.loading or resident.draining)
            found.loading += resident.loading
    return copies


def state_of(deployed: Deployed, status: EngineStatus, copies: Copies, now: float) -> dict[str, object]:
    """
    Return ``state``, the numbers of copies, and for a function that cannot be called the reason.

    ``unavailable``: its bundle is damaged or gone. ``failed``: its loads fail; one call at a time tries again, others
    are refused. ``resident``: a copy takes calls. ``loading``: the first copy loads. ``idle``: the next call loads it.

    :param now: Unix seconds
    """
    counts: dict[str, object] = {"ready": copies.ready, "loading": copies.loading}
    if deployed.unavailable is not None:
        return {"state": "unavailable", "reason": deployed.unavailable, **counts}
    failing = status.failing.get(deployed.function_id)
    if failing is not None:
        return {
            "state": "failed",
            "reason": failing.reason,
            "since": timestamp(now - failing.for_s),
            "failures": failing.failures,
            "retryIn": round(failing.retry_in_s, 3),
            **counts,
        }
    return {"state": "resident" if copies.ready else "loading" if copies.loading else "idle", **counts}
