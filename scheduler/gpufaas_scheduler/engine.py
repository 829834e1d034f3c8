"""
The engine: it is told events and returns commands. It has no clock, no IO, no lock and no logger; the live service and
the simulator are shells around it.

*Functions.* Calls of a *placed* function reserve compute of a device while they run: 100 % is the device to itself.
The policy chooses the device, or a local queue. Several calls run beside each other on a device as long as its compute
lasts. A *direct* function reserves none for its calls: it is a CPU function, or holds a share with each copy. Its calls
start without the policy, at the copy that runs the fewest of them. So a function may call another one on the same
device. Without a free slot they wait in a FIFO of their function. All use the same memory and the same LRU lists. A
device holds one copy of a placed function, and as many copies of direct ones as fit.

*Copies.* Calls create copies. A minimum of copies is loaded without a call and never evicted for others. `Scaled` sets
a number beside that: missing copies are loaded, a few at a time; surplus copies take no new calls and are evicted once
idle. A call that needs room may still evict idle copies down to the minimum. Scaling removes the replicas that it
added, not those that a policy made.

*Memory* is promised when the decision is made: a miss charges its reservation and releases that of its victims, and the
node evicts them before it loads. A device that loads a copy for a minimum or for `Scaled` is idle: the copy is pinned,
and a call for it starts as a hit that waits for the load. A device that loads for a policy's `Load` is busy until then.

*Takeover.* A new engine is told what the last one left (`Restored`), what the nodes have and run (`DeviceJoined` with a
snapshot), and which calls still wait (`Arrived` with an age). It decides nothing before `Serving`. From the same state
it gives the same commands as its predecessor; docs/adr/0022 says what is kept for that.

*A scheduling run* follows each event by which a call began to wait, or by which a device, memory or a pin became free.
Time alone leads to one when a late device gives its local queue back, or when the policy asked for it (`wake_at`).
There is at most one run per event.
"""

from collections import deque
from collections.abc import Collection, Iterable
from math import inf

from gpufaas_cache_manager.replacement import Replacement
from gpufaas_core import messages as m
from gpufaas_core.explanation import Explanation
from gpufaas_core.model import CallId, DeviceId, EngineStatus, FunctionId, Learnt, Seconds
from gpufaas_core.plans import Snapshot
from gpufaas_core.snapshot import DeviceDoc, EngineDoc, FunctionDoc
from gpufaas_scheduler import docs
from gpufaas_scheduler.check import Holding
from gpufaas_scheduler.explain import explain, holdings, snapshot, status
from gpufaas_scheduler.handle import calls, waiting
from gpufaas_scheduler.handle.ahead import take_back
from gpufaas_scheduler.handle.clear import make_way
from gpufaas_scheduler.handle.prefetch import prefetch
from gpufaas_scheduler.handle.settle import is_watched, return_overdue, settle, untangle
from gpufaas_scheduler.handle.table import TANGLING, handlers_of
from gpufaas_scheduler.keeping import keep_s
from gpufaas_scheduler.policy_contract import SchedulingPolicy
from gpufaas_scheduler.view import view_of
from gpufaas_scheduler.world.agenda import WATCHED
from gpufaas_scheduler.world.call_state import RUNNING
from gpufaas_scheduler.world.world import World


class Engine:
    """
    `handle` takes each event once, in order, with a clock that does not go back. Not thread-safe.

    :param learn: profiles follow what is measured. False for simulations and tests, where profiles are given; the
        spread of service times is learnt in any case
    """

    def __init__(
        self,
        *,
        policy: SchedulingPolicy,
        replacement: Replacement,
        epoch: int = 1,
        max_queue: int = 10_000,
        learn: bool = True,
    ) -> None:
        self._world = world = World(replacement, policy, epoch=epoch, max_queue=max_queue, learn=learn)
        world.view = view_of(world)
        world.handlers = handlers_of(world)
        self.policy = policy
        self.epoch = epoch
        self.refusals = world.refusals
        self.ignored = world.ignored

    def handle(self, event: m.Event, now: Seconds) -> list[m.Command]:
        """
        Return the commands that follow from *event*. *now* is in seconds on a monotonic clock.

        A scheduling decision costs O(models on the device + log queue). Exceptions of the policy are passed on.
        """
        world = self._world
        world.now = now
        out: list[m.Command] = []
        world.out = out
        world.agenda.event = event
        if world.late and world.late[0][0] <= now:
            return_overdue(world)
        world.handlers[type(event)](world, event)
        if world.freed or (world.watches & WATCHED[type(event)] and world.older.left is None and is_watched(world)):
            world.freed = False
            settle(world)
        if world.nested and (world.tangled or type(event) in TANGLING):
            world.tangled = False
            untangle(world)
            if world.lenders:
                out += world.lending.ask(world.nests.crowded())
        if world.rare:
            self._rarely(event)
        if world.lenders and (world.homeless or world.orphans):
            out += world.lending.ask(world.homeless.values())
        return out

    def _rarely(self, event: m.Event) -> None:
        """
        Do what follows *event* where functions share devices, where loads from host memory are shorter, where calls
        went ahead, or where a plan has taken room.
        """
        world = self._world
        if world.crowded and world.older.left is None:
            world.crowded = False
            waiting.leave_to_plan(world)
        waits = world.queue.count or world.homeless or world.freed or world.tangled
        if world.clears or (world.mixed and waits):
            make_way(world)
        gain = world.hosts.gain
        if gain and world.orphans and world.hosts.size and world.queue.count:
            prefetch(world, event)
        if not world.ahead:
            world.rare = gain or world.clears or world.mixed > 0 or world.crowded
        elif world.idle_devices:
            take_back(world)

    @property
    def wake_at(self) -> Seconds | None:
        """
        When to send `Woken`: the deadline of a waiting call, the return of a local queue, the retry of a failed load,
        or the policy's next wake, whichever is first. None: time alone changes nothing.
        """
        world = self._world
        at = world.calls.deadline()
        overdue = world.overdue.at() if world.overdue.entries else None
        if at is None or (overdue is not None and overdue < at):
            at = overdue
        if world.held_back:
            retry_at = min(each.backoff.retry_at for each in world.held_back.values() if each.backoff is not None)
            at = retry_at if at is None or retry_at < at else at
        if world.agenda.wakes or world.agenda.planned:
            look_at = world.agenda.wake_at(world.now, world.queue.count)
            if look_at is not None and (at is None or look_at < at):
                at = look_at
        return at

    def may_wake_before(self, at: Seconds) -> bool:
        """Return whether `wake_at` may be before *at*, where it was last. It costs less: each event asks this."""
        world = self._world
        calls = world.calls
        if calls.soonest < at:
            calls.soonest = inf
            return True
        return bool(world.late or world.agenda.wakes or world.held_back or world.agenda.planned)

    @property
    def queue_length(self) -> int:
        """The number of calls in the global queue."""
        return self._world.queue.count

    def knows(self, call: CallId) -> bool:
        """Whether *call* waits or runs."""
        return call in self._world.calls.by_id

    def function_of(self, call: CallId) -> FunctionId | None:
        """Return the function of *call*, if it waits or runs."""
        known = self._world.calls.by_id.get(call)
        return None if known is None else known.function

    def runs(self, call: CallId) -> bool:
        """Whether *call* has a grant."""
        known = self._world.calls.by_id.get(call)
        return known is not None and known.state == RUNNING

    def keep_s(self, grant: m.Grant) -> Seconds:
        """See `keeping.keep_s`."""
        return keep_s(self._world, grant)

    def heeds(self, refusal: m.NodeRefused) -> bool:
        """Whether *refusal* is of the grant that its call has now, so that the call gets another one."""
        return calls.refused_call(self._world, refusal) is not None

    def calls(self) -> list[CallId]:
        """Return the calls that wait or run. O(calls)."""
        return list(self._world.calls.by_id)

    def holdings(self, devices: Iterable[DeviceId], among: Collection[CallId] | None = None) -> dict[DeviceId, Holding]:
        """
        Return the copies and calls that these devices should have. O(residents + running calls).

        :param among: only these calls; None: all
        """
        return holdings(self._world, devices, among)

    def status(self, now: Seconds) -> EngineStatus:
        """Return what `gpufaas top` shows. O(devices, residents, functions)."""
        return status(self._world, now)

    def snapshot(self, now: Seconds, profiled: bool = True) -> Snapshot:
        """See `explain.snapshot`."""
        return snapshot(self._world, now, profiled)

    def remember(self, starts: int) -> None:
        """Keep explanations of this many starts, instead of `EXPLAINED`."""
        self._world.starts = deque(self._world.starts, maxlen=starts)

    def explain(self, call: CallId, now: Seconds) -> Explanation | None:
        """See `explain.explain`."""
        return explain(self._world, call, now)

    def take_learnt(self) -> list[Learnt]:
        """Return the profiles that changed since the last call of this method."""
        world, learnt = self._world, []
        for function, kind in world.learnt:
            owner = world.functions.get(function)
            if owner is not None and (costs := owner.costs[kind]) is not None:
                costs.noted = False
                learnt.append(Learnt(function, kind, costs.profile()))
        world.learnt.clear()
        return learnt

    def take_changed(self) -> list[str]:
        """Return the keys of the docs that may have changed since the last call of this method."""
        world = self._world
        keys = world.changes.take()
        settled, world.settled = world.settled, False
        return [docs.ENGINE_KEY, *keys] if keys or settled else []

    def doc(self, key: str, now: Seconds) -> DeviceDoc | FunctionDoc | EngineDoc | None:
        """
        Return the doc of a key of `take_changed`; None: its device or function is gone, so delete the key.

        O(residents) or O(copies); for the engine, O(calls) until `docs.WAITING_KEPT` waiting ones are found.
        """
        world = self._world
        kind, _, name = key.partition("/")
        if kind == "devices":
            device = world.devices.get(DeviceId(name))
            return None if device is None else docs.device_doc(device, now)
        if kind == "functions":
            owner = world.functions.get(FunctionId(name))
            return None if owner is None else docs.function_doc(owner, now)
        return docs.engine_doc(world, now)
