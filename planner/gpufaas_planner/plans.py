"""`Plans`: plans are checked, kept as versions, and the latest is told to the engine."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

from msgspec.structs import replace

from gpufaas_core.errors import BadPlan, PlanConflict, UnknownPlan
from gpufaas_core.model import Device, DeviceId, Function, PlacementPlan, Replica, Seconds
from gpufaas_core.plans import PlanVersion
from gpufaas_planner.check import check

ANONYMOUS: Final = "anonymous"
_LONGEST_WHY: Final = 500
"""In characters."""


class PlanStore(Protocol):
    """
    Keeps the last versions of plans (`gpufaas_core.plans.KEPT`). Calls block, and may come from several threads.

    Each method raises `StorageFailed` if it cannot read or write; then nothing has changed.
    """

    def history(self) -> list[PlanVersion]:
        """Return all that are kept, newest first: the first one is in force."""

    def add(self, plan: PlanVersion) -> bool:
        """Store *plan*, in one step, if the latest is the one before it. False: somebody else was first."""


class Plans:
    """
    One event loop owns it; several, of other processes too, may share *store*, which decides who was first.

    What changes the plan in force returns the new version, and raises `BadPlan`, `PlanConflict` or `StorageFailed`;
    then nothing has changed.

    :param functions: returns those that take calls, by ``NAME.NAMESPACE``
    :param tell: gets each plan that comes in force
    """

    def __init__(
        self, store: PlanStore, functions: Callable[[], Mapping[str, Function]],
        devices: Callable[[], Iterable[Device]], tell: Callable[[PlacementPlan], None] = lambda _: None,
        now: Callable[[], Seconds] = time.time,
    ) -> None:  # fmt: skip
        self._store = store
        self._functions = functions
        self._devices = devices
        self._tell = tell
        self._now = now
        self._in_force: PlanVersion | None = None

    def learn(self, plan: PlanVersion) -> None:
        """*plan* is in the store, and in force unless a later one is."""
        if self._in_force is None or plan.version > self._in_force.version:
            self._in_force = plan
            self._tell(plan.plan())

    def in_force(self) -> PlanVersion | None:
        """Return the latest version, from memory; None: there was none yet. It may be without replicas."""
        return self._in_force

    async def apply(
        self, replicas: Sequence[Replica], *, by: str, why: str = "",
        expected: Mapping[str, float] | None = None, base: int | None = None,
    ) -> PlanVersion:  # fmt: skip
        """:param base: the version that *replicas* were written against, 0: there was none; None: any"""
        return await self._add(await self._latest(), replicas, by, why, expected, base)

    async def history(self) -> list[PlanVersion]:
        """Return the versions that are kept, newest first."""
        return await asyncio.to_thread(self._store.history)

    async def version(self, version: int) -> PlanVersion:
        """:raises UnknownPlan: it is not kept"""
        kept = await self.history()
        for each in kept:
            if each.version == version:
                return each
        has = f"{kept[-1].version} to {kept[0].version} are" if kept else "no plan was ever applied"
        raise UnknownPlan(f"version {version} of the plan is not kept: {has}")

    async def rollback(self, version: int, *, by: str, base: int | None = None) -> PlanVersion:
        """Put what *version* had in force, as a new version. :raises UnknownPlan: it is not kept"""
        old = await self.version(version)
        return await self._add(await self._latest(), old.replicas, by, f"rollback to {version}", old.expected, base)

    async def pin(self, replica: Replica, *, by: str) -> PlanVersion:
        """Have *replica* in force, pinned, and no others of its function but those that were pinned before."""
        latest, function, device = await self._latest(), replica.function, replica.device
        stay = [
            each for each in latest.replicas if each.function != function or (each.pinned and each.device != device)
        ]
        if replica == Replica(function, device):  # nothing is said of how: as the plan has it there
            there = [each for each in latest.replicas if (each.function, each.device) == (function, device)]
            replica = there[0] if there else replica
        return await self._add(latest, (*stay, replace(replica, pinned=True)), by, f"pin {function} on {device}")

    async def unpin(self, function: str, device: DeviceId | None, *, by: str) -> PlanVersion:
        """Take the pinned replicas of *function* out of the plan; None: on all devices."""
        latest = await self._latest()
        pinned = [each for each in latest.replicas if each.function == function and each.pinned]
        gone = [each for each in pinned if device in (None, each.device)]
        if not gone:
            where = f"on {', '.join(each.device for each in pinned)} only" if pinned else "nowhere"
            raise BadPlan(f"{function} is pinned {where}: there is nothing to unpin (gpufaas plan show)")
        return await self._add(latest, [each for each in latest.replicas if each not in gone], by, f"unpin {function}")

    async def _latest(self) -> PlanVersion:
        """Return the plan in force by the store; version 0: none was ever applied."""
        return next(iter(await self.history()), PlanVersion(0))

    async def _add(
        self, latest: PlanVersion, replicas: Sequence[Replica], by: str, why: str,
        expected: Mapping[str, float] | None = None, base: int | None = None,
    ) -> PlanVersion:  # fmt: skip
        """Put *replicas* in force after *latest*."""
        if base not in (None, latest.version):
            raise _conflict(latest)
        if len(why) > _LONGEST_WHY:
            raise BadPlan(f"why has {len(why):,} characters: say it in {_LONGEST_WHY} at most")
        check(replicas, self._functions(), self._devices(), latest.replicas)
        new = PlanVersion(latest.version + 1, tuple(replicas), by or ANONYMOUS, self._now(), why, dict(expected or {}))
        if not await asyncio.to_thread(self._store.add, new):
            raise _conflict(await self._latest())
        self.learn(new)
        return new


def _conflict(latest: PlanVersion) -> PlanConflict:
    if not latest.version:
        return PlanConflict("no plan is in force, and this one was written against another: leave out its version")
    why = f" ({' '.join(latest.why.split())[:80]})" if latest.why else ""
    return PlanConflict(
        f"plan {latest.version} by {latest.by} came in between{why}: look at it (gpufaas plan show), then apply again"
    )
