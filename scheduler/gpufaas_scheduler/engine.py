"""
The engine: facts in, commands out. It has no clock, no IO, no lock and no logger; the live service and the simulator
are shells around the same object.

Two kinds of function. A *model function* is exclusive: one of its calls has the device to itself, and the policy says
which device, or whose local queue. A *CPU function* has slots: its calls bypass the policy and the devices' busy state
and start at once at the copy that runs the fewest of them, if that has a free slot, so that a function may call another
one on the same device; without a free slot they wait in a FIFO of their own. Both are charged to the same memory and
stand in the same LRU lists. A device holds one copy of a model function, and as many of a CPU function as there is
memory for.

How many copies a function has follows from its calls, above a minimum that is loaded without a call and never evicted
for others. `Scaled` says a number beside that: missing copies are loaded, a few at a time, and what is beyond takes no
new calls and is evicted once it is idle. Memory is shared all the same: a call that needs room may evict idle copies
down to the minimum. The replicas that a policy makes of model functions are left alone; scaling only adds to them, and
takes away what it added.

The memory of a device is promised in the moment of the decision: a miss charges its reservation and releases its
victims, and the node makes that so before it loads. A device on which a model is loading *without* a call (`Load`) is
idle: only the model is pinned, and a call for it starts there as a hit that waits for the rest of the load. Unless it
was the policy that asked for the load: then the device is busy until it is loaded, as with a miss.

A new engine may take over from another one: it is told what that one left (`Restored`), what the nodes have and run
(`DeviceJoined` with a snapshot), which calls still wait (`Arrived` with an age), and decides nothing before `Serving`.
From the same state it goes on to the same commands; what is kept for that, and what is not, is docs/adr/0022.

When a scheduling run happens: after an event by which a call began to wait, or by which a device, memory or a pin
became free; when local queues went back since their devices are late; and when the policy said that it would look again
(`wake_at` has both). One run after each event (specs/gpu-faas.md, 3.4).
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

from gpufaas_cache_manager.replacement import Replacement
from gpufaas_core import messages as m
from gpufaas_core.model import CallId, DeviceId, EngineStatus, Explanation, FunctionId, Seconds
from gpufaas_core.snapshot import DeviceDoc, EngineDoc, FunctionDoc
from gpufaas_scheduler import docs
from gpufaas_scheduler.check import Holding
from gpufaas_scheduler.contract import SchedulingPolicy
from gpufaas_scheduler.explain import explain, status
from gpufaas_scheduler.handle import calls, copies, fleet, joins, takeover, workers
from gpufaas_scheduler.handle.settle import return_overdue, settle, untangle
from gpufaas_scheduler.view import view_of
from gpufaas_scheduler.world.call_state import RUNNING
from gpufaas_scheduler.world.cluster import Cluster
from gpufaas_scheduler.world.world import World


def _serving(world: World, _event: m.Serving) -> None:
    takeover.serving(world, lambda each: HANDLERS[type(each)](world, each))


HANDLERS: Final[dict[type[m.Event], Callable[[World, Any], None]]] = {
    m.Arrived: calls.arrived,
    m.Finished: calls.finished,
    m.CallerLeft: calls.cancelled,
    m.Loaded: workers.loaded,
    m.CopyFailed: workers.load_failed,
    m.Measured: workers.measured,
    m.Resized: workers.resized,
    m.WorkerExited: workers.worker_exited,
    m.NodeRefused: calls.refused,
    m.Woken: calls.woken,
    m.DeviceJoined: joins.device_joined,
    m.DeviceLeft: fleet.device_left,
    m.DeviceDrained: fleet.device_drained,
    m.FunctionDeployed: fleet.function_deployed,
    m.FunctionRemoved: fleet.function_removed,
    m.Scaled: copies.scaled,
    m.Restored: takeover.restored,
    m.Serving: _serving,
}

_LISTENING: Final = {
    each: handler if each in (m.FunctionDeployed, m.Restored, m.Serving) else takeover.defer
    for each, handler in HANDLERS.items()
}
"""Between `Restored` and `Serving`."""

_TANGLING: Final = frozenset((
    m.DeviceLeft, m.DeviceDrained, m.Measured, m.Resized, m.CopyFailed, m.WorkerExited, m.NodeRefused,
    m.FunctionDeployed, m.Scaled, m.Serving,
))  # fmt: skip
"""Events after which a nested call may have no place any more that it had a claim to."""


class Engine:
    """
    `handle` is told each event once, in order, with a clock that does not go back. Not thread-safe: one owner.

    `learn`: profiles follow what is measured; off for simulations and tests, where they are the truth. How service
    times vary about their estimate is learnt all the same.
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
        cluster = Cluster(replacement, policy.pass_limit)
        self._world = World(cluster, view_of(cluster), policy, epoch=epoch, max_queue=max_queue, learn=learn)
        self.policy = policy
        self.epoch = epoch
        self.refusals = self._world.refusals
        self.ignored = self._world.ignored

    def handle(self, event: m.Event, now: Seconds) -> list[m.Command]:
        """
        Return what is to be done because of *event*. *now* is in seconds on a monotonic clock.

        One scheduling decision costs O(models on the device + log queue). What the policy raises is passed on.
        """
        world = self._world
        cluster = world.cluster
        cluster.now = now
        cluster.asked = None
        out: list[m.Command] = []
        world.out = out
        overdue = world.overdue.entries
        if overdue and overdue[0][0] <= now:
            return_overdue(world)
        (HANDLERS if world.left is None else _LISTENING)[type(event)](world, event)
        if world.freed:
            world.freed = False
            settle(world)
        if world.nested and (world.tangled or type(event) in _TANGLING):
            world.tangled = False
            untangle(world)
        if world.lending.lenders and (world.homeless or cluster.orphaned):
            out += world.lending.ask(world.homeless.values())
        return out

    @property
    def wake_at(self) -> Seconds | None:
        """
        When time alone changes something: a waiting call's deadline comes, a local queue goes back, a load that failed
        is tried again without a call, or the policy wants to look again. Send `Woken` then.
        """
        world = self._world
        at = world.calls.deadline()
        overdue = world.overdue.at() if world.overdue.entries else None
        if at is None or (overdue is not None and overdue < at):
            at = overdue
        if world.held_back:
            retry_at = min(each.backoff.retry_at for each in world.held_back.values() if each.backoff is not None)
            at = retry_at if at is None or retry_at < at else at
        look_at = world.look_at
        if look_at is not None and world.queue.count and (at is None or look_at < at):
            at = look_at
        return at

    @property
    def queue_length(self) -> int:
        """Calls in the global queue: those that no device was chosen for yet."""
        return self._world.queue.count

    def knows(self, call: CallId) -> bool:
        """Whether *call* waits or runs."""
        return call in self._world.calls.by_id

    def runs(self, call: CallId) -> bool:
        """Whether *call* has a lease."""
        known = self._world.calls.by_id.get(call)
        return known is not None and known.state == RUNNING

    def calls(self) -> list[CallId]:
        """Return those that wait or run. O(calls)."""
        return list(self._world.calls.by_id)

    def holdings(self, devices: Iterable[DeviceId], among: Collection[CallId] | None = None) -> dict[DeviceId, Holding]:
        """
        Return what these devices should have, by what this engine was told. O(residents + calls that run).

        :param among: the calls that are looked at; None: all
        """
        world = self._world
        here = [world.devices[each] for each in devices if each in world.devices]
        found = {each.id: Holding(dict(each.models.models), {call.id for call in each.runs}) for each in here}
        for owner in world.functions.values():
            for call in owner.runs:
                if call.device is not None and call.device.id in found:
                    found[call.device.id].calls.add(call.id)
        if among is not None:
            for holding in found.values():
                holding.calls.intersection_update(among)
        return found

    def status(self, now: Seconds) -> EngineStatus:
        """O(devices, residents, functions)."""
        return status(self._world, now)

    def remember(self, starts: int) -> None:
        """Be able to explain so many of the last starts, in place of `EXPLAINED`."""
        self._world.starts = deque(self._world.starts, maxlen=starts)

    def explain(self, call: CallId, now: Seconds) -> Explanation | None:
        """As `explain.explain`."""
        return explain(self._world, call, now)

    def take_learnt(self) -> list[m.Learnt]:
        """Return the profiles that changed since the last call of this."""
        world, learnt = self._world, []
        for function, kind in world.learnt:
            owner = world.functions.get(function)
            costs = None if owner is None else owner.costs[kind]
            if costs is not None:
                costs.noted = False
                learnt.append(m.Learnt(function, kind, costs.profile()))
        world.learnt.clear()
        return learnt

    def take_changed(self) -> list[str]:
        """Return the keys of the docs that may be others since the last call of this, to be asked for with `doc`."""
        world = self._world
        keys = world.cluster.changes.take()
        settled, world.settled = world.settled, False
        return [docs.ENGINE_KEY, *keys] if keys or settled else []

    def doc(self, key: str, now: Seconds) -> DeviceDoc | FunctionDoc | EngineDoc | None:
        """
        Return what is to be kept under *key* of `take_changed`; None: nothing, its device or function is not there.

        O(residents), O(copies), and for the engine O(calls until `docs.WAITING_KEPT` that wait were seen).
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
