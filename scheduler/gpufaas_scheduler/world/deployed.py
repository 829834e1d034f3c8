"""What was deployed of a function: its limits, its need of devices, its costs, and how many copies it should have."""

from __future__ import annotations

from gpufaas_core.model import ALL_COMPUTE, Function, Seconds
from gpufaas_scheduler.view_nouns import DeviceView
from gpufaas_scheduler.world.backoff import Backoff
from gpufaas_scheduler.world.changes import Changes, function_key
from gpufaas_scheduler.world.costs import Costed, CostsByKind


class Revision(Costed):
    """A deployed revision, apart from its copies and calls."""

    __slots__ = (
        "adaptive", "asks_admission", "backoff", "batch_max", "batch_wait_s", "batches", "constraints", "costs",
        "declared", "desired", "digest", "fits", "fits_as_of", "gated", "held_until", "id", "limited", "max_copies",
        "max_queue", "min_copies", "parked", "placed", "removed", "reserves", "share", "shared_hold", "slots", "staged",
        "staging", "starved", "target", "wanted", "whole",
    )  # fmt: skip

    def __init__(self, function: Function, changes: Changes) -> None:
        super().__init__(function_key(function.id), changes)
        self.id = function.id
        self.placed = function.need.reserved > 0
        """Its calls reserve compute, and the policy places them. False: it is direct."""
        self.constraints = function.constraints
        self.desired: int | None = None
        """The number of copies that `Scaled` set; None: its calls decide."""
        self.held_until: Seconds = 0.0
        """Until then, the autoscaler takes none of `desired` away."""
        self.staged = {}
        self.staging = {}
        self.parked = {}
        self.near = False
        self.limited = False
        """A plan or a policy has said for a copy what it takes of its device's compute: see `FunctionState.takes`."""
        self.deploy(function)

    def deploy(self, function: Function) -> None:
        """Take limits and profiles from *function*, and forget its past failures."""
        self.digest = function.digest
        need = function.need
        self.reserves = need.reserved
        """What its calls reserve of a device's compute while they run."""
        self.share = need.held
        """What each of its copies holds of a device's compute."""
        self.wanted = self.reserves or self.share
        """The compute that a device must have for it."""
        self.slots = 1 if need.sharing == "time" else max(1, need.slots)
        self.batch_max = max(1, need.batch_max)
        self.batches = self.batch_max > 1
        """Its calls may start together."""
        self.batch_wait_s = need.batch_wait_s
        self.adaptive = need.batch_adaptive and self.batches and need.latency_goal_s is not None
        self.shared_hold = self.slots > 1 and need.reserved > 0 and need.sharing != "spatial"
        """One hold of the compute is for all grants of a copy."""
        self.whole = 0
        """`reserves`, if each grant is of one call, and has a hold of its own, of `reserves`; else 0."""
        self.limit(limited=self.limited)
        self.min_copies = function.min_copies
        self.max_copies = function.max_copies
        self.asks_admission = function.sheds
        """The role admission is asked about each call of it that comes."""
        self.scale(self.desired)
        self.max_queue = function.max_queue
        self.declared = function
        """The function as it was deployed."""
        self.costs = CostsByKind(function, bool(self.staged), bool(self.parked))
        self.starved: str | None = None
        """Why no device has enough memory for its load; set when a load runs out of memory."""
        self.backoff: Backoff | None = None
        """None: none of its loads failed recently."""
        self.removed = False
        self.fits = False
        """Whether some device was large enough for it when `Cluster.fleet` was `fits_as_of`."""
        self.fits_as_of = -1

    def park(self, device: DeviceView) -> None:
        """*device* has a parked copy."""
        self.parked[device.id] = device
        self.see_near()

    def unpark(self, device: DeviceView) -> None:
        self.parked.pop(device.id, None)
        self.see_near()

    def remove(self) -> None:
        """It takes no new calls, and is forgotten once its calls have ended."""
        self.removed = True
        self.min_copies = 0
        self.scale(None)

    def scale(self, desired: int | None) -> None:
        """Let it have *desired* copies, within its bounds; None: its calls decide."""
        self.desired = desired
        self.gated = desired == 0 or self.asks_admission
        """There is more to do when a call comes than to place it: see `handle.calls.arrived`."""
        wanted = desired or 0
        if self.max_copies:
            wanted = min(wanted, self.max_copies)
        self.target = max(self.min_copies, wanted)
        """The number of copies that are loaded without a call, if there is room."""
        self.mark()

    def limit(self, *, limited: bool) -> None:
        self.limited = limited
        self.whole = 0 if self.shared_hold or self.batches or limited else self.reserves

    def load_failed(self, now: Seconds) -> bool:
        """Count a failed load. Return whether the next one has to wait."""
        self.mark()
        self.backoff = self.backoff or Backoff()
        return self.backoff.failed(now)

    @property
    def compute(self) -> int:
        return self.declared.need.compute

    @property
    def goal_s(self) -> Seconds | None:
        return self.declared.need.latency_goal_s

    @property
    def mixed(self) -> bool:
        """Whether its calls may run beside others on a device, or its copies hold compute."""
        return 0 < self.wanted < ALL_COMPUTE or self.shared_hold or self.limited
