"""
iGniter: each replica has the share of the compute with which it meets its goal beside its neighbours.

The model predicts the time of a batch from its share and from what the neighbours use of the L2 cache, the power budget
and the launch of kernels. Half of the goal is left for building batches and waiting.

Source: Xu et al., "iGniter", TPDS 2022, and its public coefficients. Models whose share would exceed a device are split
here over several replicas, with the least number that fits; the original refuses them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from gpufaas_scheduler.plans.placement import problem
from gpufaas_scheduler.plans.placement.problem import DeviceCoefficients, ModelCoefficients, Problem, Replica, Result
from gpufaas_scheduler.plans.problem import EPSILON, BadProblem, Milliseconds

MOST_REPLICAS: Final = 1000
"""A model that needs more is not served."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One replica."""

    model: str
    of: ModelCoefficients
    goal: Milliseconds
    batch: int
    share: float
    """Percent."""

    @property
    def active(self) -> Milliseconds:
        """Time that its kernels take alone."""
        k1, k2, k3, k4, k5 = self.of.k
        size = self.share + k4
        found = (k1 * self.batch**2 + k2 * self.batch + k3) / size + k5 if size > 0 else 0.0
        if found <= 0:
            raise BadProblem(
                f"the coefficients `k` of {self.model!r} give no time above 0 for a batch of {self.batch} with"
                f" {self.share:g} % of a device"
            )
        return found

    @property
    def ability(self) -> float:
        """Requests per second of kernels alone: power and use of the cache are lines in it."""
        return 1000 * self.batch / self.active

    @property
    def cache(self) -> float:
        return self.of.c[0] * self.ability + self.of.c[1]

    @property
    def power(self) -> float:
        return self.of.p[0] * self.ability + self.of.p[1]


@dataclass(frozen=True, slots=True)
class Predicted:
    latency: Milliseconds
    throughput: float
    """Requests per second; loading the next batch overlaps."""


def predict(device: DeviceCoefficients, workloads: Sequence[Workload]) -> list[Predicted]:
    """Return what each of *workloads* takes, beside the others on one device."""
    count = len(workloads)
    growth = device.alpha_sch * count + device.beta_sch if count > 1 else 0.0
    caches = [each.cache for each in workloads]
    power = device.p_idle + sum(each.power for each in workloads)
    frequency = device.F if power <= device.P else device.F + device.alpha_f * (power - device.P)
    found = []
    for each, cache in zip(workloads, caches, strict=True):
        launch = each.of.t_sch0 + each.of.n * growth
        active = each.active * (1 + each.of.alpha_cache * (sum(caches) - cache))
        on_gpu = (launch + active) / (frequency / device.F) if frequency > 0 else math.inf
        into, out = each.of.d_in * each.batch / device.B, each.of.d_out * each.batch / device.B
        found.append(Predicted(into + on_gpu + out, 1000 * each.batch / (on_gpu + out)))
    return found


def least_share(device: DeviceCoefficients, of: ModelCoefficients, goal: Milliseconds, batch: int) -> float | None:
    """Return the least share, a multiple of the unit, with which *batch* is done within *goal* alone, if any is."""
    k1, k2, k3, k4, k5 = of.k
    left = goal - of.t_sch0 - batch * (of.d_in + of.d_out) / device.B - k5
    if left <= 0:
        return None
    share = (k1 * batch**2 + k2 * batch + k3) / left - k4
    return max(1, math.ceil(share / device.unit - EPSILON)) * device.unit


def workloads_of(
    name: str, device: DeviceCoefficients, of: ModelCoefficients, rps: float, slo_ms: float
) -> list[Workload]:
    """Return the replicas, as few as possible, that serve *rps*; empty if no number of them does."""
    goal = slo_ms / 2
    for count in range(1, MOST_REPLICAS + 1):
        rate = rps / 1000 / count
        batch = max(1, math.ceil(goal * rate * device.B / (device.B + of.d_in * rate) - EPSILON))
        share = least_share(device, of, goal, batch)
        if share is not None and share <= 100:
            return [Workload(name, of, goal, batch, share)] * count
        if batch == 1:
            break
    return []


def share_out(device: DeviceCoefficients, workloads: Sequence[Workload]) -> list[Workload] | None:
    """Return *workloads* with the shares with which all of them meet their goals on one device; `None`: none do."""
    shared = list(workloads)
    while sum(each.share for each in shared) <= problem.FULL:
        late = [
            i
            for i, (each, found) in enumerate(zip(shared, predict(device, shared), strict=True))
            if found.latency > each.goal
        ]
        if not late:
            return shared
        for i in late:
            shared[i] = replace(shared[i], share=shared[i].share + device.unit)
    return None


def place(device: DeviceCoefficients, workloads: Sequence[Workload]) -> list[list[Workload]]:
    """Return the replicas of each device; as many devices as it takes, of the kind *device*."""
    opened: list[list[Workload]] = []
    for new in sorted(workloads, key=lambda each: -each.share):
        best: tuple[float, int, list[Workload]] | None = None
        for index, there in enumerate(opened):
            if any(each.model == new.model for each in there):
                continue
            shared = share_out(device, [*there, new])
            if shared is None:
                continue
            growth = sum(each.share for each in shared) - sum(each.share for each in there)
            if best is None or growth < best[0] - EPSILON:
                best = growth, index, shared
        if best is None:
            opened.append([new])
        else:
            opened[best[1]] = best[2]
    return opened


def solve(asked: Problem) -> Result:
    """
    Return the placement: planned for as many devices as it takes, then given to those there are, in their order.

    :raises BadProblem: the kind of the first device has no coefficients
    """
    if not asked.devices:
        return problem.answer(asked, {}, {})
    kind = asked.devices[0].kind
    device = asked.kinds[kind].igniter if kind in asked.kinds else None
    if device is None:
        raise BadProblem(f"kind {kind!r} has no `igniter` coefficients, which this policy needs")
    ours = [each.id for each in asked.devices if each.kind == kind]
    notes = [] if len(ours) == len(asked.devices) else [f"only devices of kind {kind!r} are used"]
    workloads, why = [], {}
    for name, model in asked.models.items():
        of = model.igniter.get(kind)
        made = workloads_of(name, device, of, model.rps, model.slo_ms) if of else []
        limit = model.max_replicas or len(ours)
        if of is None:
            why[name] = f"it has no `igniter` coefficients for kind {kind!r}"
        elif not made:
            within = f"within half of {model.slo_ms:g} ms"
            why[name] = f"no share of a device answers {within}, with up to {MOST_REPLICAS} replicas"
        workloads += made[:limit]
    opened = place(device, workloads)
    notes += [f"the plan has {len(opened)} devices"] if len(opened) > len(ours) else []
    for there in opened[len(ours) :]:
        why.update({each.model: f"the plan has {len(opened)} devices, and there are {len(ours)}" for each in there})
    goodput = {
        Replica(each.model, id_, each.batch, each.share): found.throughput
        for id_, there in zip(ours, opened, strict=False)
        for each, found in zip(there, predict(device, there), strict=True)
    }
    return problem.answer(asked, goodput, why, notes=notes)
