"""
The whole state of the engine. Handlers (`gpufaas_scheduler.handle`) read and change it, and put the commands that
follow from an event into `World.out`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from gpufaas_cache_manager.replacement import Replacement
from gpufaas_core import messages as m
from gpufaas_core.model import CallId, CopyId, DeviceId, FunctionId, PlacementPlan, Seconds
from gpufaas_scheduler.contract import Refusal, Why
from gpufaas_scheduler.policy_contract import Executing, Noting, Observing, SchedulingPolicy
from gpufaas_scheduler.roles import Admission, Batching, Prefetch
from gpufaas_scheduler.view_contract import View
from gpufaas_scheduler.world.call import Call, GrantState
from gpufaas_scheduler.world.cluster import Cluster
from gpufaas_scheduler.world.function import FunctionState
from gpufaas_scheduler.world.memory import Lending
from gpufaas_scheduler.world.nests import Nests
from gpufaas_scheduler.world.older import Older

LEARNING_RATE: Final = 0.25
"""Weight of the newest time in a profile (EWMA). Half of the weight is on the last 2.4 calls: a model that slows down
is noticed within a few calls, and a single outlier has little effect. Times that vary much have a lower weight."""

EXPLAINED: Final = 2_000
"""This many starts by the policy are remembered for explanations, and as many without it."""


class World(Cluster):
    """One per engine. Policies see the `Cluster` in it."""

    __slots__ = (
        "admission", "ahead", "batching", "direct", "epoch", "follows", "grant", "handlers", "held_back", "ignored",
        "late", "learnt", "lenders", "lending", "lost", "max_queue", "nested", "nests", "observe", "older", "out",
        "policy", "prefetch", "rate", "refusals", "settled", "short", "starts", "surplus", "tangled", "view", "watches",
    )  # fmt: skip

    view: View
    """The policy's view."""

    def __init__(
        self, replacement: Replacement, policy: SchedulingPolicy, *, epoch: int, max_queue: int, learn: bool
    ) -> None:
        super().__init__(replacement, learn=learn)
        self.epoch = epoch
        self.max_queue = max_queue
        self.refusals: deque[Refusal] = deque(maxlen=100)
        """The last actions of the policy that were refused, and why."""
        self.ignored: Counter[str] = Counter()
        """Events that did not fit the state (late, twice, unknown), by tag. A few are routine."""
        self.rate = LEARNING_RATE if learn else 0.0
        self._use(policy)
        self.lending = Lending(self)
        self.lenders = self.lending.lenders
        self.nests = Nests(self)
        self.nested = self.nests.inner
        self.tangled = False
        """A nested call has come, or a copy has begun to drain, which may be the only place of one."""
        self.grant = 0
        self.starts: deque[Started] = deque(maxlen=EXPLAINED)
        self.direct: deque[Call] = deque(maxlen=EXPLAINED)
        """The last calls of direct functions that were started."""
        self.late = self.overdue.entries
        self.ahead: dict[GrantState, GrantState] = {}
        """Grants that went ahead and can be taken back, with those that run before them."""
        self.lost: dict[CallId, Call] = {}
        """Calls that ended with their worker. Their node has answered most of them; it refuses those whose grant had
        not reached it, and they are placed again."""
        self.short: dict[FunctionId, FunctionState] = {}
        """Functions with fewer copies than their target."""
        self.held_back: dict[FunctionId, FunctionState] = {}
        """Functions with fewer copies than their target whose next load has to wait (`backoff`)."""
        self.surplus: dict[FunctionId, FunctionState] = {}
        """Functions with surplus or draining copies."""
        self.learnt: dict[tuple[FunctionId, str], None] = {}
        self.settled = False
        """A scheduling run happened since docs were last taken."""
        self.older = Older()
        self.out: list[m.Command] = []
        self.handlers: Mapping[type[m.Event], Handler] = {}
        """What handles events now, by their kind."""

    def _use(self, policy: SchedulingPolicy) -> None:
        """Ask *policy* once for the roles that it has beside placement."""
        self.policy = policy
        self.observe = policy.observe if isinstance(policy, Observing) else None
        self.admission: Admission | None = getattr(policy, "admission", None)
        self.batching: Batching | None = getattr(policy, "batching", None)
        self.prefetch: Prefetch | None = getattr(policy, "prefetch", None)
        self.queue.leaving = policy.leaving if isinstance(policy, Noting) else None
        self.read_policy()

    def read_policy(self) -> None:
        """Ask the policy for what may change with the plan in force: see `policy_contract.Executing`."""
        policy = self.policy
        self.follows: Why | None = getattr(policy, "follows", None)
        """See `policy_contract.Following`."""
        self.agenda.watches = self.watches = getattr(policy, "watches", 0)

    def set_plan(self, plan: PlacementPlan | None) -> None:
        super().set_plan(plan)
        if plan is not None and isinstance(self.policy, Executing):
            self.policy.take(plan)
            self.read_policy()

    def running(self) -> Iterator[Call]:
        """Yield all calls that run. O(devices + running calls)."""
        for device in self.devices.values():
            yield from (each for each in device.runs() if each.device is device)

    def waits_of(self, owner: FunctionState) -> list[Call]:
        """Return all waiting calls of *owner*, by number. O(these, and the local queues of its devices)."""
        found = list(owner.flow)
        found += [each for each in self.queue.returned if each.owner is owner]
        devices = [device for copy, device in (*owner.active.items(), *owner.draining.items()) if copy.queued]
        found += [each for device in devices for each in device.local if each.owner is owner]
        return sorted(found, key=lambda each: each.number)


Handler: TypeAlias = Callable[["World", Any], None]

Started: TypeAlias = "tuple[Seconds, Call, DeviceId, bool, tuple[CopyId, ...], bool, Why | None]"
"""Time, call, device, whether a miss, victims, whether from a local queue, and why."""
