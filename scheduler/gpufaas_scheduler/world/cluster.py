"""The state that decisions are made from."""

from __future__ import annotations

from math import inf

from gpufaas_cache_manager import eviction
from gpufaas_cache_manager.replacement import Replacement
from gpufaas_core.model import CopyId, Device, Function, Part, PlacementPlan, Seconds, name_of
from gpufaas_scheduler.fit import NO_COMPUTE, SHUT, Fit, Reason, fits
from gpufaas_scheduler.world.agenda import Agenda
from gpufaas_scheduler.world.call import Call
from gpufaas_scheduler.world.calls import CallBook
from gpufaas_scheduler.world.demand import Demand
from gpufaas_scheduler.world.device import DeviceState
from gpufaas_scheduler.world.function import Copy, FunctionState
from gpufaas_scheduler.world.function_index import FunctionIndex


class Clearing:
    """The device that takes no calls until it has room for one that has waited long: see `clearing`."""

    __slots__ = ("call", "device", "pauses_until")

    def __init__(self) -> None:
        self.device: DeviceState | None = None
        self.call: Call | None = None
        self.pauses_until: Seconds = 0.0
        """No device is looked for before."""


class Cluster(FunctionIndex):
    """Functions and devices (compiled classes have one base, so their indexes are a chain), and what fits where."""

    __slots__ = (
        "agenda", "calls", "clearing", "clears", "demand", "learn", "parks", "replacement", "reserved_until",
    )  # fmt: skip

    def __init__(self, replacement: Replacement, *, learn: bool) -> None:
        super().__init__()
        self.learn = learn
        """See `Engine`."""
        self.calls = CallBook()
        self.replacement = replacement
        self.parks: bool = getattr(replacement, "park", False)
        """Victims are parked where their nodes can do that."""
        self.reserved_until: Seconds = -inf
        """See `contract.Start.reserved_s`."""
        self.demand = Demand()
        self.agenda = Agenda()
        self.clearing = Clearing()
        self.clears = False
        """A device is cleared."""

    # --- the plan in force ---

    def attach(self, device: Device, order: int | None = None) -> DeviceState:
        state = super().attach(device, order)
        self._replan_all()
        return state

    def leave(self, device: DeviceState) -> None:
        super().leave(device)
        self._replan_all()

    def close(self, device: DeviceState, *, closed: bool) -> None:
        super().close(device, closed=closed)
        self._replan_all()

    def deploy(self, function: Function) -> FunctionState:
        owner = super().deploy(function)
        self._replan(owner)
        return owner

    def remove(self, owner: FunctionState) -> None:
        super().remove(owner)
        self._replan(owner)

    def set_plan(self, plan: PlacementPlan | None) -> None:
        """*plan* is in force from now on."""
        self.agenda.set_plan(plan)
        self._replan_all()

    def _replan_all(self) -> None:
        """The plan, or the devices that are there, have changed. O(functions), if there is a plan."""
        for each in () if self.agenda.plan is None else self.functions.values():
            self._replan(each)

    def _replan(self, owner: FunctionState) -> None:
        """Note what the plan in force has of *owner*."""
        plan, devices = self.agenda.plan, self.devices
        named = self.agenda.by_name.get(name_of(owner.id), ()) if owner.placed and not owner.removed else ()
        there = {each.device: each for each in named if each.device in devices and not devices[each.device].closed}
        if plan is None or not (there or owner.plan):
            return
        owner.plan, owner.plan_version, owner.fits_as_of = there, plan.version, -1
        self.constrained -= owner.bound
        owner.bound = bool(owner.constraints or there)
        self.constrained += owner.bound
        waits = next((each.wait_s for each in there.values()), None)
        owner.batch_wait_s = owner.declared.need.batch_wait_s if waits is None else waits
        for copy, device in (*owner.active.items(), *owner.draining.items()):
            copy.kept = plan.version if device.id in there else None
        self.judge_limits(owner)
        self.keeps |= bool(there)
        self.crowded = self.rare = True
        self.moves += 1
        self.freed = True
        owner.mark()

    # --- what fits where ---

    def fits(
        self,
        device: DeviceState,
        owner: FunctionState,
        victims: tuple[CopyId, ...] | None = None,
        *,
        starts: bool = True,
        part: Part | None = None,
        share: int = 0,
    ) -> Fit[FunctionState] | Reason:
        """
        Return the copies to evict from *device* so that one more copy of *owner* fits, or why it does not fit.

        :param victims: evict these; None: as many as needed, in the replacement order
        :param starts: a call starts there at once, and needs its compute now
        :param part: the copy has several parts, and this one there
        :param share: the copy holds this share of the compute; 0: as its plan or the function says
        """
        need = SHUT if device.shut and not device.closed else owner.need(device)
        if isinstance(need, Reason):
            return need
        compute = (owner.reserves if starts else 0) or owner.share
        if share or owner.limited:
            compute = share or owner.holds(device) or (owner.takes(device) if starts else 0)
        if not starts and owner.placed and self.agenda.by_name and owner.takes(device) > (left := device.left):
            return Reason(NO_COMPUTE, compute=owner.takes(device), spare=left)
        if part is not None:
            need, compute = part.memory, part.share or owner.reserves
        leaving = self.replacement if victims is None else victims
        return fits(device.residency, need, owner, leaving, compute, device.reserved)

    def leaving(self, device: DeviceState, owner: FunctionState) -> tuple[Copy, ...] | None:
        """
        Return the idle copies with shares to evict so that one more call of *owner* has its compute on *device*, beside
        a copy that is there; None: grants hold it, or copies that stay.
        """
        lacking = device.lacks(owner)
        return () if lacking <= 0 else eviction.victims(self.replacement, device.residency, 0, owner, lacking)
