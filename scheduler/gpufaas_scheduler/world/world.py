"""
What the engine knows between two events. Handlers (`gpufaas_scheduler.handle`) read and change it, and put the commands
that follow from an event into `World.out`.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Final, TypeAlias

from gpufaas_core import messages as m
from gpufaas_core.model import CallId, CopyId, DeviceId, FunctionId, Seconds
from gpufaas_core.snapshot import CallDoc, DeviceDoc, EngineDoc, FunctionDoc
from gpufaas_scheduler.contract import Refusal, SchedulingPolicy, View, Why
from gpufaas_scheduler.world.calls import CallBook
from gpufaas_scheduler.world.cluster import Cluster
from gpufaas_scheduler.world.memory import Lending
from gpufaas_scheduler.world.nests import Nests
from gpufaas_scheduler.world.overdue import Overdue
from gpufaas_scheduler.world.state import Call, DeviceState, FunctionState

LEARNING_RATE: Final = 0.25
"""Weight of the newest time in a profile (EWMA): half of what is learnt is from the last 2.4 calls, so that a model
that slows down is believed within a few calls and a single outlier is not. Of service times that vary much, less."""

EXPLAINED: Final = 2_000
"""So many starts of model functions' calls are remembered, to be explained."""


class World:
    """One per engine. *learn*: see `Engine`."""

    __slots__ = (
        "adopted", "calls", "cluster", "devices", "epoch", "freed", "functions", "held_back",
        "homeless", "idle", "ignored", "learn", "learnt", "lease", "left", "lending", "look_at", "lost", "max_queue",
        "nested", "nests", "out", "overdue", "policy", "queue", "rate", "refusals", "remembered", "settled", "short",
        "starts", "surplus", "tangled", "view",
    )  # fmt: skip

    def __init__(
        self, cluster: Cluster, view: View, policy: SchedulingPolicy, *, epoch: int, max_queue: int, learn: bool
    ) -> None:
        self.policy = policy
        self.epoch = epoch
        self.max_queue = max_queue
        self.refusals: deque[Refusal] = deque(maxlen=100)
        """The last actions of the policy that were not done, and why."""
        self.ignored: Counter[str] = Counter()
        """Facts that did not fit the state (late, twice, unknown), by type. A few are routine."""
        self.learn = learn
        self.rate = LEARNING_RATE if learn else 0.0
        self.cluster = cluster
        self.view = view
        """What the policy sees of it."""
        self.lending = Lending(self.cluster)
        self.queue = self.cluster.queue
        self.functions = self.cluster.functions
        self.devices = self.cluster.devices
        self.idle = self.cluster.idle_devices
        self.calls = CallBook()
        self.nests = Nests(self.cluster)
        self.nested = self.nests.inner
        self.tangled = False
        """A call made by a call has come."""
        self.lease = 0
        self.starts: deque[Started] = deque(maxlen=EXPLAINED)
        self.overdue = Overdue()
        self.look_at: Seconds | None = None
        """When the policy wants to plan again, should nothing happen before."""
        self.lost: dict[CallId, Call] = {}
        """Calls that ended with their worker. Most were answered by their node; one whose lease had not reached it by
        then is refused instead, and placed again. The newest `workers.MAX_LOST`."""
        self.homeless: dict[FunctionId, FunctionState] = {}
        """CPU functions with waiting calls that are resident nowhere."""
        self.short: dict[FunctionId, FunctionState] = {}
        """Functions with fewer copies than they should have without a call."""
        self.held_back: dict[FunctionId, FunctionState] = {}
        """Those that lack copies, too, but whose next load has to wait (`backoff`)."""
        self.surplus: dict[FunctionId, FunctionState] = {}
        """Functions that have copies to give up, or copies that drain."""
        self.learnt: dict[tuple[FunctionId, str], None] = {}
        self.freed = False
        """Something changed that may let a waiting call start."""
        self.settled = False
        """Something was tried since docs were last taken; if only that a call was passed over."""
        self.left: Left | None = None
        """What an older engine left, until `Serving`."""
        self.remembered: dict[CallId, tuple[CallDoc, Seconds]] = {}
        """Calls of an older engine that may arrive again, and when that was written."""
        self.adopted = 0
        self.out: list[m.Command] = []

    def runs_at(self, device: DeviceState) -> list[Call]:
        """
        Return the calls that run on *device*: also those on a copy that is taken for gone already, since the call that
        it was loaded for was refused. O(calls of CPU functions that run).
        """
        found = list(device.runs)
        found += [each for owner in self.functions.values() for each in owner.runs if each.device is device]
        return found

    def runs_of(self, owner: FunctionState) -> list[Call]:
        """Return the calls of *owner* that run. O(devices) for a model function."""
        if not owner.exclusive:
            return list(owner.runs)
        return [each for device in self.devices.values() for each in device.runs if each.owner is owner]

    def waits_of(self, owner: FunctionState) -> list[Call]:
        """Return the calls of *owner* that wait, wherever they do, by number. O(those, and what its devices queue)."""
        found = list(owner.queue)
        found += [each for each in self.queue.returned if each.owner is owner]
        devices = [device for model, device in (*owner.active.items(), *owner.draining.items()) if model.queued]
        found += [each for device in devices for each in device.local if each.owner is owner]
        return sorted(found, key=lambda each: each.number)


Started: TypeAlias = "tuple[Seconds, Call, DeviceId, bool, tuple[CopyId, ...], bool, Why | None]"
"""When, which call, where, a miss, its victims, from a local queue, why."""


class Left:
    """What an older engine left, and what has come since."""

    def __init__(self, event: m.Restored, at: Seconds) -> None:
        self.event = event
        self.events: list[tuple[Seconds, m.Event]] = []
        self._at = at - event.elapsed_s
        """When the newest doc was made, on this engine's clock."""
        every: list[DeviceDoc | FunctionDoc | EngineDoc] = [*event.functions, *event.devices]
        if event.engine is not None:
            every.append(event.engine)
        self._newest = max(((each.epoch, each.at_s) for each in every), default=(0, 0.0))

    def since(self, doc: DeviceDoc | FunctionDoc | EngineDoc) -> Seconds:
        """When *doc* was made. Of an older epoch than the newest: nobody knows, and it is taken for as new."""
        epoch, at_s = self._newest
        return self._at - (at_s - doc.at_s) if doc.epoch == epoch else self._at
