"""The state that decisions are made from."""

from __future__ import annotations

from math import inf

from gpufaas_cache_manager import eviction
from gpufaas_cache_manager.replacement import Replacement
from gpufaas_core.model import CopyId, Part, Seconds
from gpufaas_scheduler.fit import SHUT, Fit, Reason, fits
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
        "agenda", "calls", "clearing", "clears", "demand", "learn", "parks", "rare", "replacement", "reserved_until",
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
        self.rare = False
        """Some function is `mixed`, a device is cleared, or `Hosts.gain`; or that has just been so."""

    def fits(
        self,
        device: DeviceState,
        owner: FunctionState,
        victims: tuple[CopyId, ...] | None = None,
        *,
        starts: bool = True,
        part: Part | None = None,
    ) -> Fit[FunctionState] | Reason:
        """
        Return the copies to evict from *device* so that one more copy of *owner* fits, or why it does not fit.

        :param victims: evict these; None: as many as needed, in the replacement order
        :param starts: a call starts there at once, and needs its compute now
        :param part: the copy has several parts, and this one there
        """
        need = SHUT if device.shut and not device.closed else owner.need(device)
        if isinstance(need, Reason):
            return need
        compute = (owner.reserves if starts else 0) or owner.share
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
