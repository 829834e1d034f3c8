"""
The report of a run: the metrics of the published evaluation, and fairness. The fields describe the metrics, for
simulated and for replayed runs.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev
from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from gpufaas_core.model import Seconds
from gpufaas_simulator.record import COMPLETED, FAILED, FALSE_MISS, HIT, MISS, REJECTED, Record

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class Latency(Struct, frozen=True):
    """From arrival to answer, of the calls that were answered; in seconds, the variance in s²."""

    mean: float
    p50: float
    p95: float
    p99: float
    max: float
    variance: float


class Fairness(Struct, frozen=True):
    worst_wait_s: float
    """The longest latency less inference."""
    most_overtaken: int | None
    """The largest number of later arrivals that started before one call."""
    mean_overtaken: float | None


class DeviceReport(Struct, frozen=True):
    id: str
    calls: int
    misses: int
    busy_ratio: float


class TenantReport(Struct, frozen=True):
    calls: int
    latency: Latency
    miss_ratio: float
    worst_wait_s: float


class Segments(Struct, frozen=True):
    """Where the latency of the calls that were answered went: means in seconds, which add up to that of the latency."""

    queue_s: float
    """From arrival to start, without the next two; with `Cost.start_s`."""
    hold_s: float
    """Held back for others of its batch."""
    load_s: float
    """Until its copy was loaded: by its own load, or by one that was under way when it came."""
    run_s: float
    """The service as if alone on the device: in its batch, and under its cap."""
    slowed_s: float
    """What was added to that by neighbours, by another cap meanwhile, and by other work of the host."""


class FunctionReport(Struct, frozen=True):
    calls: int
    completed: int
    latency: Latency
    in_goal: float | None
    """As in `Report`, and so is `goodput`."""
    goodput: float | None
    segments: Segments | None


class NodeReport(Struct, frozen=True):
    node: str
    kind: str
    asked_s: Seconds
    """When it was ordered; of a node that was not, when it joined."""
    joined_s: Seconds | None
    left_s: Seconds | None
    """None: it was there at the end."""
    cost: float


class FleetReport(Struct, frozen=True):
    """The nodes that have a price, or were procured."""

    cost: float
    node_hours: dict[str, float]
    """That were paid, by kind."""
    nodes: tuple[NodeReport, ...]


class Report(Struct, frozen=True):
    """A ratio with denominator 0 is 0. None: not known (a replay sees less than a simulation)."""

    policy: str
    workload: str
    calls: int
    completed: int
    failed: int
    """The device left, or the answer was an error."""
    rejected: int
    unfinished: int
    """Still waiting at the end: no device can serve them."""
    duration_s: Seconds
    """The time from 0 to the last answer."""
    latency: Latency
    mean_wait_s: float
    """Latency less inference: queueing and loading."""
    miss_ratio: float
    """Misses per start."""
    misses: int
    false_miss_ratio: float | None
    """Share of misses for a model that another device held."""
    prefetches: int | None
    """Loads without a call."""
    first_loads: int | None
    """The number of functions that were called: the least number of loads."""
    evictions: int
    hottest_copies: float | None
    """Mean number of devices that hold the most called model."""
    busy_ratio: float
    """Share of device time that was spent loading and serving."""
    utilisation: float
    """
    Share of device time that was spent on inference alone: the paper's SM utilisation. Where grants run beside each
    other, the share of the devices' compute that they used.
    """
    fairness: Fairness
    devices: tuple[DeviceReport, ...] = ()
    tenants: dict[str, TenantReport] = {}
    """By namespace, when there are several."""
    fleet: FleetReport | None = None
    in_goal: float | None = None
    """The share of the calls with a latency goal that were answered within it."""
    goodput: float | None = None
    """Calls a second that were answered within their goal, or without one. None: no function has a goal."""
    segments: Segments | None = None
    functions: dict[str, FunctionReport] = {}
    """Those that were called."""
    preempted: int = 0
    """Calls that the policy stopped, to run them again."""
    host_loads: int = 0
    """Loads, for misses and without a call, whose weights were in host memory."""
    wakes: int = 0
    """Misses and loads without a call that woke a parked copy; not in `host_loads`."""
    staged: int = 0
    """Weights that the policy had brought there."""


class _Calls:
    """Outcomes of the calls of a run as arrays, in order of arrival; times in seconds."""

    def __init__(self, record: Record) -> None:
        times = record.workload.times, record.started, record.ended, record.service_s
        self.arrived, self.began, self.ended, self.service_s = (
            np.frombuffer(each) if len(each) else np.zeros(0) for each in times
        )
        self.outcome = np.frombuffer(bytes(record.outcome), dtype=np.uint8)
        self.start = np.frombuffer(bytes(record.start), dtype=np.uint8)
        self.device = np.array(record.device, dtype=np.int64)
        self.function = np.array(record.workload.calls, dtype=np.int64)
        self.done = self.outcome == COMPLETED
        self.started = self.start >= HIT
        self.cold = self.start >= MISS
        self.latency = (self.ended - self.arrived)[self.done]
        """The latency of completed calls only; `wait` likewise."""
        self.wait = self.latency - self.service_s[self.done]
        goals = np.array([each.need.latency_goal_s or math.inf for each in record.workload.functions])
        goal_s = goals[self.function] if len(self.function) else np.zeros(0)
        self.asked = np.isfinite(goal_s)
        """The call has a goal."""
        self.within = self.latency <= goal_s[self.done]
        """A completed call was answered within its goal, or has none."""


def report(record: Record, policy: str) -> Report:
    """Return the report of a run. O(n log n) in the number of calls, and as `overtakes`."""
    calls = _Calls(record)
    done, latency, wait = calls.done, calls.latency, calls.wait
    misses = int(calls.cold.sum())
    end_s = float(np.nanmax(calls.ended, initial=0.0)) if len(done) else 0.0
    up_s = sum((state.left_at or max(end_s, record.end_s)) - state.joined_at for _, state in record.devices)
    used_s = sum(state.used_s for _, state in record.devices)
    inference_s = used_s if record.mixed else float(calls.service_s[done].sum())
    overtaken = overtakes(record.starts)
    in_goal, goodput = _goals(calls.asked, calls.within, calls.asked[done], end_s)
    parts = _segments(record, calls)
    return Report(
        policy=policy,
        workload=record.workload.name,
        calls=len(done),
        completed=int(done.sum()),
        failed=int((calls.outcome == FAILED).sum()),
        rejected=int((calls.outcome == REJECTED).sum()),
        unfinished=int((calls.outcome == 0).sum()),
        duration_s=end_s,
        latency=latencies(latency),
        mean_wait_s=float(wait.mean()) if len(wait) else 0.0,
        miss_ratio=_ratio(misses, int(calls.started.sum())),
        misses=misses,
        false_miss_ratio=_ratio(int((calls.start == FALSE_MISS).sum()), misses),
        prefetches=record.prefetches,
        first_loads=len(np.unique(calls.function)),
        evictions=record.evictions,
        hottest_copies=_ratio(record.hottest_copy_s, record.end_s),
        busy_ratio=_ratio(sum(state.busy_s for _, state in record.devices), up_s),
        utilisation=_ratio(inference_s, up_s),
        fairness=Fairness(
            float(wait.max(initial=0.0)), max(overtaken, default=0), fmean(overtaken) if overtaken else 0.0
        ),
        devices=_by_device(record, calls),
        tenants=_by_tenant(record, calls),
        fleet=_fleet(record),
        in_goal=in_goal,
        goodput=goodput,
        segments=_means(parts),
        functions=_by_function(record, calls, parts, end_s),
        preempted=record.preempted,
        host_loads=record.host_loads,
        wakes=record.wakes,
        staged=record.staged,
    )


def _by_device(record: Record, calls: _Calls) -> tuple[DeviceReport, ...]:
    started = np.bincount(calls.device[calls.device >= 0], minlength=len(record.devices))
    misses = np.bincount(calls.device[calls.cold], minlength=len(record.devices))
    return tuple(
        DeviceReport(
            device.id, int(started[index]), int(misses[index]),
            _ratio(state.busy_s, (state.left_at or record.end_s) - state.joined_at),
        )
        for index, (device, state) in enumerate(record.devices)
    )  # fmt: skip


def _by_tenant(record: Record, calls: _Calls) -> dict[str, TenantReport]:
    """Return the reports by namespace; empty if there is only one."""
    namespaces = np.array([each.namespace for each in record.workload.functions])
    found: dict[str, TenantReport] = {}
    for namespace in several if len(several := sorted(set(namespaces.tolist()))) > 1 else ():
        of = (namespaces == namespace)[calls.function]
        wait = calls.wait[of[calls.done]]
        found[namespace] = TenantReport(
            int(of.sum()), latencies(calls.latency[of[calls.done]]),
            _ratio(int((calls.cold & of).sum()), int((calls.started & of).sum())), float(wait.max(initial=0.0)),
        )  # fmt: skip
    return found


def _fleet(record: Record) -> FleetReport | None:
    if not record.nodes:
        return None
    hours: dict[str, float] = {}
    nodes = []
    for each in record.nodes:
        paid_h = each.hours(record.end_s)
        hours[each.kind] = hours.get(each.kind, 0.0) + paid_h
        nodes.append(
            NodeReport(each.node, each.kind, each.asked_s, each.joined_s, each.left_s, paid_h * each.price_per_h)
        )  # fmt: skip
    return FleetReport(sum(each.cost for each in nodes), hours, tuple(nodes))


def _goals(asked: Flags, within: Flags, done_asked: Flags, end_s: Seconds) -> tuple[float | None, float | None]:
    """Return the share of the calls with a goal that were in it, and the goodput."""
    if not asked.any():
        return None, None
    return _ratio(int((within & done_asked).sum()), int(asked.sum())), _ratio(int(within.sum()), end_s)


def segments(record: Record) -> Floats:
    """Return the fields of `Segments` as rows, for each call that was answered, in order of arrival."""
    return _segments(record, _Calls(record))


def _segments(record: Record, calls: _Calls) -> Floats:
    done = calls.done
    hold, awaited, slowed = np.zeros((3, len(done)))
    for parts, given in ((hold, record.held_s), (awaited, record.awaited_s), (slowed, record.slowed_s)):
        parts[list(given)] = list(given.values())
    queue = calls.began - calls.arrived - awaited - hold
    load = calls.ended - calls.service_s - calls.began + awaited
    found: Floats = np.array([queue, hold, load, calls.service_s - slowed, slowed])[:, done]
    return found


def _means(parts: Floats) -> Segments | None:
    """None: a replay was not told when its calls started, or none was answered."""
    return Segments(*map(float, parts.mean(axis=1))) if parts.size and not np.isnan(parts).any() else None


def _by_function(record: Record, calls: _Calls, parts: Floats, end_s: Seconds) -> dict[str, FunctionReport]:
    """O(n log n): calls are sorted by function once."""
    called = calls.function[calls.done]
    order, done_order = np.argsort(calls.function, kind="stable"), np.argsort(called, kind="stable")
    bounds = range(len(record.workload.functions) + 1)
    ends, done_ends = np.searchsorted(calls.function[order], bounds), np.searchsorted(called[done_order], bounds)
    found = {}
    for at, each in enumerate(record.workload.functions):
        mine, done = order[ends[at] : ends[at + 1]], done_order[done_ends[at] : done_ends[at + 1]]
        if len(mine):
            asked = calls.asked[mine]
            in_goal, goodput = _goals(asked, calls.within[done], np.full(len(done), asked[0]), end_s)
            found[each.name] = FunctionReport(
                len(mine), len(done), latencies(calls.latency[done]), in_goal, goodput, _means(parts[:, done])
            )  # fmt: skip
    return found


def answered(record: Record) -> Floats:
    """Return the latencies of the calls that were answered, in seconds, in order of arrival."""
    found: Floats = _Calls(record).latency
    return found


def latencies(values: Floats) -> Latency:
    if not len(values):
        return Latency(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    p50, p95, p99 = np.percentile(values, (50, 95, 99))
    return Latency(
        float(values.mean()), float(p50), float(p95), float(p99), float(values.max()), float(values.var())
    )  # fmt: skip


def overtakes(starts: Iterable[int]) -> list[int]:
    """
    Return for each call of *starts* how many calls with a higher number started before it.

    :param starts: calls, in the order of their starts

    Nearly in order, as starts are: O(n log n). The insertion moves as many numbers as are counted.
    """
    started: list[int] = []
    counts = []
    for call in starts:
        at = bisect_right(started, call)
        counts.append(len(started) - at)
        started.insert(at, call)
    return counts


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


# --- several seeds ----------------------------------------------------------------------------------------------------

_T_95: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Two-sided 95 % quantiles of Student's t, by degrees of freedom from 1; beyond 30 the normal distribution's 1.96."""


class Estimate(Struct, frozen=True):
    mean: float
    half_width: float
    """The half width of the 95 % confidence interval of the mean, by Student's t; 0 for a single value."""


def estimate(values: Sequence[float]) -> Estimate:
    if len(values) < 2:
        return Estimate(values[0] if values else math.nan, 0.0)
    quantile = _T_95[len(values) - 2] if len(values) - 2 < len(_T_95) else 1.96
    return Estimate(fmean(values), quantile * stdev(values) / math.sqrt(len(values)))


FIGURES: Final = (
    "mean", "p50", "p95", "p99", "variance", "mean_wait_s", "miss_ratio", "false_miss_ratio", "prefetches",
    "hottest_copies", "busy_ratio", "utilisation", "evictions", "worst_wait_s", "most_overtaken",
    "cost", "in_goal", "goodput",
)  # fmt: skip
"""The names for `figure`."""


def figure(of: Report, name: str) -> float | None:
    """Return one number of a report by its name, from the report, its latency or its fairness."""
    if name == "cost":
        return None if of.fleet is None else of.fleet.cost
    for part in (of.latency, of.fairness, of):
        if hasattr(part, name):
            value = getattr(part, name)
            return None if value is None else float(value)
    raise KeyError(name)


def estimates(reports: Iterable[Report]) -> dict[str, Estimate]:
    """Return estimates over the seeds of one setting, without figures that are None in a report."""
    reports = list(reports)
    found = {}
    for name in FIGURES:
        values = [figure(each, name) for each in reports]
        known = [value for value in values if value is not None]
        if len(known) == len(reports):
            found[name] = estimate(known)
    return found
