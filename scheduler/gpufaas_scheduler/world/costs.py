"""What a function costs on devices of one kind: its times to load and to serve, and its memory; learnt."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, exp, inf, log1p, sqrt
from typing import Final

from gpufaas_core.explanation import ServiceEstimate
from gpufaas_core.model import Bytes, DeviceId, Function, NodeId, Profile, Seconds, Taken, TimesDoc
from gpufaas_core.taken import profile_of
from gpufaas_scheduler.view_nouns import DeviceView
from gpufaas_scheduler.world.batch_size import Room
from gpufaas_scheduler.world.changes import Marked
from gpufaas_scheduler.world.conditions import Condition, Conditions
from gpufaas_scheduler.world.times import ON_GRID, SHARE, BySize, ServiceTimes, on_grid

PARKED: Final = "parked"
HOST: Final = "host"
DISK: Final = "disk"
_FAR: Final = ("peer", "store")
"""Where weights come from: see `messages.Loaded.tier`."""

_THREE_OF_FOUR: Final = 0.674
"""The quantile of the standard normal distribution below which three of four values are."""


class Costs:
    """
    A `Profile` that learns in place.

    The first measurement of each figure replaces what was declared or guessed. Then times follow slowly; the more the
    service time varies, the slower. Its spread is learnt, too. The occupation is a peak and only grows: a worker that
    was started after small calls needs room for large ones.

    Loads are learnt by where the weights came from. A load from the host tier that was never measured is taken for one
    from disk without the time of reading; while that is not known either, for one from disk. A parked copy is taken to
    wake as soon as one is loaded from the host tier, until that was measured.
    """

    __slots__ = (
        "batch", "conditions", "disk_s", "floor", "host_s", "least", "load_s", "loaded", "loads", "measured", "noted",
        "occupation", "parked", "parked_bytes", "parked_s", "read_s", "room", "served", "service_s", "size", "sized",
        "sizes", "staged", "taken", "times",
    )  # fmt: skip

    def __init__(self, profile: Profile, floor: Bytes = 0, staged: bool = False, parked: bool = False) -> None:
        self.disk_s = profile.load_s
        """The time of a load on a node that does not have the weights in its host tier."""
        self.read_s = profile.read_s
        """The part of it in which weights are read; 0.0: not known."""
        self.loads = dict(profile.loads)
        """Times of loads from other tiers, as far as they are known."""
        self.staged = staged
        """The host tier of some node has the weights."""
        self.parked = parked
        """Some device has a parked copy."""
        self.parked_bytes: Bytes = 0
        """What a parked copy holds of its device; 0: nothing, or not known yet."""
        self.expect()
        self.service_s = profile.service_s
        self.size = profile.occupation
        """The memory of a copy: guessed at first, then measured."""
        self.least = 0
        """A lower bound: a load with less memory ran out, whatever is measured afterwards."""
        self.floor = floor
        """The memory that the function declares."""
        self.occupation = max(self.size, floor)
        """What is reserved: the largest of the three above."""
        self.measured = profile.measured
        self.loaded, self.served, self.sized = (
            profile.measured and each not in profile.estimated for each in ("load", "call", "memory")
        )
        self.noted = False
        """The changed service time is noted already, to be stored."""
        self.times = ServiceTimes()
        """The distribution of actual over estimated time."""
        self.sizes = BySize()
        """Service time by the size of the request."""
        self.restore_times(profile.times)
        self.conditions = Conditions(profile.ratios)
        """Service times of grants that do not run alone."""
        self.taken = profile.taken
        self.batch = 1.0
        """See `batch_size`."""
        self.room: Room | None = None
        """How many calls of a batch fit into memory; None: no batch has run out of it lately."""

    def expect(self) -> None:
        """Set the expected times of loads anew."""
        if not (self.loads or self.read_s):
            self.host_s = self.parked_s = self.load_s = self.disk_s
            return
        self.host_s = host_s = self.loads.get(HOST, max(0.0, self.disk_s - self.read_s))
        """The time of a load from the host tier of a node."""
        self.parked_s = self.loads.get(PARKED, host_s)
        """The time in which a parked copy wakes."""
        self.load_s = self.parked_s if self.parked else host_s if self.staged else self.disk_s
        """The time of a load where it is shortest now."""

    def learn_load(self, load_s: Seconds, rate: float, tier: str = DISK, read_s: Seconds = 0.0) -> None:
        """:param read_s: the part of it in which weights were read; 0.0: not known"""
        if tier == DISK:
            self.disk_s = self.disk_s + rate * (load_s - self.disk_s) if self.loaded else load_s
            if read_s > 0.0:
                read_s = min(read_s, load_s)
                self.read_s = self.read_s + rate * (read_s - self.read_s) if self.read_s else read_s
            self.loaded = True
        else:
            before = self.loads.get(tier)
            self.loads[tier] = load_s if before is None else before + rate * (load_s - before)
            if not self.loaded and tier in _FAR:
                self.disk_s = load_s  # longer than from disk, but no guess
        self.measured = True
        self.expect()

    def learn_service(self, service_s: Seconds, size: float, rate: float) -> None:
        """:param rate: weight of this time in the mean; 0: the mean is given, and only the spread is learnt"""
        if self.served or not rate:
            times, mean_s = self.times, self.service_s
            times.centred = rate > 0.0
            by_size_s = self.sizes.predict_s(size) if size else None
            if by_size_s is None:
                rate = times.add(service_s / mean_s if mean_s > 0.0 else 1.0, rate)
            else:
                times.add(service_s / by_size_s)
                rate = self.sizes.rate(rate)
            if rate:
                # `on_grid` inlined: each call passes here.
                self.service_s = mean_s + rate * (service_s - mean_s) + ON_GRID - ON_GRID
        else:
            self.service_s = service_s
            self.served = self.measured = True
        if size:
            self.sizes.add(size, service_s)

    def learn_beside(self, service_s: Seconds, size: float, condition: Condition, rate: float) -> None:
        """A grant that did not run alone took *service_s*; *size* is that of its first call."""
        alone_s = self.estimate_s(size)
        if alone_s > 0.0:
            self.conditions.add(condition, service_s / alone_s, rate)

    def estimate_s(self, size: float) -> Seconds:
        """Return the expected service time alone: by *size* if times depend on it, else the mean."""
        by_size_s = self.sizes.predict_s(size) if size else None
        return self.service_s if by_size_s is None else by_size_s

    def grant_s(self, size: float, condition: Condition) -> Seconds:
        """Return the expected service time of a grant that runs like that."""
        alone_s, ratio = self.estimate_s(size), self.conditions.ratio(condition)
        return alone_s if ratio == 1.0 else on_grid(alone_s * ratio)

    def left_s(self, ran_s: Seconds, estimate_s: Seconds) -> Seconds:
        """Return the expected time left of a call that has run for *ran_s* and was estimated at *estimate_s*."""
        if estimate_s <= 0.0:
            return SHARE * max(0.0, ran_s)
        return estimate_s * self.times.left(ran_s / estimate_s)

    def drain_s(self, calls: int, places: float) -> Seconds:
        """
        Return the time in which *places* at once serve this many calls with a probability of 3/4; at least the mean.
        The sum of their times is taken to be log-normal.
        """
        cv = self.times.cv
        sigma = sqrt(log1p(cv * cv / calls))
        return self.service_s * calls / places * max(1.0, exp(_THREE_OF_FOUR * sigma - sigma * sigma / 2.0))

    def times_doc(self) -> TimesDoc | None:
        return self.times.doc(self.sizes.doc())

    def restore_times(self, doc: TimesDoc | None) -> None:
        """A missing or impossible *doc* counts as no calls seen."""
        self.times = ServiceTimes.restored(doc)
        self.sizes = BySize.restored(None if doc is None else doc.sizes)

    def learn_size(self, occupation: Bytes) -> bool:
        """Return whether the occupation has changed."""
        before, first = self.occupation, not self.sized
        self.size = max(self.size, occupation) if self.sized else occupation
        self.occupation = max(self.size, self.least, self.floor)
        self.sized = self.measured = True
        return first or self.occupation != before

    def widen(self, occupation: Bytes, least: Bytes) -> None:
        """A load ran out of memory: the next one gets *occupation*, and none gets less than *least*."""
        self.least = max(self.least, least)
        self.size = max(self.size, occupation)
        self.occupation = max(self.size, self.least, self.floor)

    def take(self, taken: Taken) -> None:
        """Expect what was measured on purpose, where calls have taught nothing yet."""
        profile = profile_of(taken, self.profile() if self.measured else None)
        self.taken, self.conditions, self.measured = taken, Conditions(profile.ratios), True
        self.disk_s, self.service_s, self.size = profile.load_s, profile.service_s, profile.occupation
        self.occupation = max(self.size, self.least, self.floor)
        self.expect()

    def profile(self) -> Profile:
        """Return it without the declared memory, which belongs to the deployment, not to the bundle."""
        occupation = max(self.size, self.least)
        known = (("load", self.loaded), ("call", self.served), ("memory", self.sized))
        estimated = tuple(name for name, measured in known if self.measured and not measured)
        return Profile(
            self.disk_s, self.service_s, occupation, self.measured, self.times_doc(), estimated,
            self.conditions.docs(), dict(self.loads), self.read_s, self.taken,
        )  # fmt: skip


def gains(profile: Profile) -> bool:
    """Whether *profile* says that a load from the host tier is shorter than one from disk."""
    return profile.read_s > 0.0 or profile.loads.get(HOST, profile.load_s) < profile.load_s


class CostsByKind(dict[str, Costs | None]):
    """By kind of device, made on first use; None: the function has no profile for it, and cannot run there."""

    __slots__ = ("_function", "parked", "staged")

    def __init__(self, function: Function, staged: bool = False, parked: bool = False) -> None:
        super().__init__()
        self._function = function
        self.staged = staged
        """The host tier of some node has the weights."""
        self.parked = parked
        """Some device has a parked copy."""

    def __missing__(self, kind: str) -> Costs | None:
        try:
            costs = Costs(self._function.profile(kind), self._function.floor, self.staged, self.parked)
        except KeyError:
            costs = None
        self[kind] = costs
        return costs

    def near(self, *, staged: bool, parked: bool) -> None:
        """Whether the host tier of some node has the weights, and some device a parked copy."""
        if (staged, parked) != (self.staged, self.parked):
            self.staged, self.parked = staged, parked
            for _, costs in self.known():
                costs.staged, costs.parked = staged, parked
                costs.expect()

    def known(self) -> Iterator[tuple[str, Costs]]:
        """Yield the costs that exist so far."""
        return ((kind, costs) for kind, costs in self.items() if costs is not None)


class Costed(Marked):
    """The costs of a function as policies see them. Infinite where it cannot run."""

    __slots__ = ("near",)

    costs: CostsByKind
    batch_max: int
    adaptive: bool
    """Its batches adapt to its latency goal."""
    staged: dict[NodeId, None]
    """The nodes that have its weights in their host tiers."""
    staging: dict[NodeId, None]
    """The nodes that bring them there because of a `Stage`."""
    parked: dict[DeviceId, DeviceView]
    """The devices that have a parked copy."""
    near: bool
    """A host tier has its weights, or a device has a parked copy: loads do not take the same time everywhere."""

    def stage(self, node: NodeId) -> None:
        """The host tier of *node* has its weights."""
        self.staging.pop(node, None)
        self.staged[node] = None
        self.see_near()

    def unstage(self, node: NodeId) -> None:
        self.staging.pop(node, None)
        self.staged.pop(node, None)
        self.see_near()

    def see_near(self) -> None:
        """Its weights came to or left a host tier, or a parked copy a device."""
        self.near = bool(self.staged or self.parked)
        self.costs.near(staged=bool(self.staged), parked=bool(self.parked))

    def load_s(self, kind: str) -> Seconds:
        costs = self.costs[kind]
        return inf if costs is None else costs.load_s

    def service_s(self, kind: str) -> Seconds:
        costs = self.costs[kind]
        return inf if costs is None else costs.service_s

    def estimate_s(self, kind: str, size: float) -> Seconds:
        costs = self.costs[kind]
        return inf if costs is None else costs.estimate_s(size)

    def grant_s(self, kind: str, batch: int = 1, share: int = 0, neighbours: int = 0) -> Seconds:
        costs = self.costs[kind]
        return inf if costs is None else costs.grant_s(0.0, Condition(batch, share, neighbours))

    def service_estimate(self, kind: str, size: float, estimate_s: Seconds | None = None) -> ServiceEstimate | None:
        """Return it for people. :param estimate_s: an older estimate; None: use the present one"""
        costs = self.costs[kind]
        if costs is None:
            return None
        now_s, times = costs.estimate_s(size), costs.times
        mean_s = now_s if estimate_s is None else estimate_s
        shown = size if costs.sizes.predict_s(size) is not None else 0.0
        return ServiceEstimate(
            kind, mean_s, mean_s * times.quantile(0.5), mean_s * times.quantile(0.9), times.calls, shown
        )

    def batch_size(self, kind: str) -> int:
        """Return how many of its calls should start together on such devices."""
        costs = self.costs[kind]
        if costs is None:
            return self.batch_max
        most = self.batch_max if costs.room is None else min(self.batch_max, costs.room.calls)
        return min(most, int(costs.batch)) if self.adaptive else most

    def serve_s(self, kind: str, calls: float) -> Seconds:
        costs = self.costs[kind]
        if costs is None:
            return inf
        if self.batch_max < 2:
            return calls * costs.service_s
        size = self.batch_size(kind)
        if calls <= size:
            return costs.grant_s(0.0, Condition(ceil(calls)))
        return calls / size * costs.grant_s(0.0, Condition(size))

    def service_cv(self, kind: str) -> float:
        costs = self.costs[kind]
        return 0.0 if costs is None else costs.times.cv

    def service_quantile_s(self, kind: str, share: float) -> Seconds:
        costs = self.costs[kind]
        return inf if costs is None else costs.service_s * costs.times.quantile(share)
