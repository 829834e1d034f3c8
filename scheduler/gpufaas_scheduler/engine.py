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

from collections import Counter, deque
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from typing import Any, Final, TypeAlias

from msgspec.structs import replace

from gpufaas_cache_manager.replacement import Replacement
from gpufaas_cache_manager.residency import ANSWERED, NOT_ASKED, Resident
from gpufaas_core import messages as m
from gpufaas_core.model import (
    CallId,
    Considered,
    CopyId,
    Device,
    DeviceId,
    DeviceStatus,
    EngineStatus,
    Explanation,
    Failing,
    FunctionId,
    ResidentStatus,
    Seconds,
    ServiceEstimate,
    copy_id,
)
from gpufaas_core.plausible import MAX_S, is_size, is_time
from gpufaas_core.snapshot import CallDoc, DeviceDoc, DeviceSnapshot, EngineDoc, FunctionDoc, RunningCall
from gpufaas_core.units import format_bytes
from gpufaas_scheduler import backoff, docs, memory, policies
from gpufaas_scheduler.check import Holding
from gpufaas_scheduler.nests import Nests
from gpufaas_scheduler.overdue import Overdue
from gpufaas_scheduler.policies import Action, Refusal, SchedulingPolicy
from gpufaas_scheduler.queue import IMPLICIT
from gpufaas_scheduler.state import LOCAL, RUNNING, WAITING, Call, Cluster, Demand, DeviceState, FunctionState, Model

LEARNING_RATE: Final = 0.25
"""Weight of the newest time in a profile (EWMA): half of what is learnt is from the last 2.4 calls, so that a model
that slows down is believed within a few calls and a single outlier is not. Of service times that vary much, less."""

MAX_LOADING: Final = 4
"""Copies of a CPU function that load at once without a call, once one is ready and so shows that it can: a container
takes a second to start, mostly waiting. More would take the machine's cores from calls that run."""

MAX_REFUSALS: Final = 3
"""By nodes, in a row, for one call; then it is rejected instead of going round."""

MAX_RETRY_AFTER_S: Final = 60.0

EXPLAINED: Final = 2_000
"""So many starts of model functions' calls are remembered, to be explained."""

_NAMED: Final = 20
"""Of the calls that were passed over, so many are named; all are counted."""

_NESTED: Final = policies.Why("a call waits for it, and holds a device meanwhile: it has the first that it can have")

_TANGLING: Final = frozenset((
    m.DeviceLeft, m.DeviceDrained, m.Measured, m.Resized, m.LoadFailed, m.WorkerExited, m.Refused, m.FunctionDeployed,
    m.Scaled, m.Serving,
))  # fmt: skip
"""Events after which a nested call may have no place any more that it had a claim to."""

_TAKEN_OVER: Final = policies.Why("it ran already when this scheduler learnt of it")

# Calls that were started before this engine knew of them have numbers below all others.
_MAX_ADOPTED: Final = 1 << 40

# For those who take no docs.
_MAX_GONE: Final = 10_000

# A lease reaches its node, or its caller gives up, within moments: this is for bursts, and for gateways that died.
_MAX_LOST: Final = 10_000

# A policy that yields so many actions without one being done is stopped; the queue is planned again at the next event.
_MAX_IDLE_ACTIONS: Final = 1000
_IDLE_ACTIONS_PER_DEVICE: Final = 4


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
        self.policy = policy
        self.epoch = epoch
        self.max_queue = max_queue
        self.refusals: deque[Refusal] = deque(maxlen=100)
        """The last actions of the policy that were not done, and why."""
        self.ignored: Counter[str] = Counter()
        """Facts that did not fit the state (late, twice, unknown), by type. A few are routine."""
        self._learn = learn
        self._rate = LEARNING_RATE if learn else 0.0
        self._cluster = Cluster(replacement, policy.pass_limit)
        self._lending = memory.Lending(self._cluster)
        self._queue = self._cluster.queue
        self._functions = self._cluster.functions
        self._devices = self._cluster.devices
        self._idle = self._cluster.idle_devices
        self._calls: dict[CallId, Call] = {}
        """All that wait or run."""
        self._nests = Nests(self._cluster, self._calls)
        self._nested = self._nests.inner
        self._tangled = False
        """A call made by a call has come."""
        self._waiting = 0
        self._lease = 0
        self._starts: deque[_Started] = deque(maxlen=EXPLAINED)
        self._deadlines: list[tuple[Seconds, int, Call]] = []
        """A heap; entries of calls that no longer wait are dropped when they surface or outnumber the others."""
        self._overdue = Overdue()
        self._look_at: Seconds | None = None
        """When the policy wants to plan again, should nothing happen before."""
        self._lost: dict[CallId, Call] = {}
        """Calls that ended with their worker. Most were answered by their node; one whose lease had not reached it by
        then is refused instead, and placed again. The newest `_MAX_LOST`."""
        self._homeless: dict[FunctionId, FunctionState] = {}
        """CPU functions with waiting calls that are resident nowhere."""
        self._short: dict[FunctionId, FunctionState] = {}
        """Functions with fewer copies than they should have without a call."""
        self._held_back: dict[FunctionId, FunctionState] = {}
        """Those that lack copies, too, but whose next load has to wait (`backoff`)."""
        self._surplus: dict[FunctionId, FunctionState] = {}
        """Functions that have copies to give up, or copies that drain."""
        self._learnt: dict[tuple[FunctionId, str], None] = {}
        self._freed = False
        """Something changed that may let a waiting call start."""
        self._touched: list[DeviceState | FunctionState] = []
        """Whose docs may be others since they were last taken: those that are `touched`."""
        self._settled = False
        """Something was tried since docs were last taken; if only that a call was passed over."""
        self._gone: dict[str, None] = {}
        """Keys of docs whose device or function is there no more. The newest `_MAX_GONE`."""
        self._left: _Left | None = None
        """What an older engine left, until `Serving`."""
        self._remembered: dict[CallId, tuple[CallDoc, Seconds]] = {}
        """Calls of an older engine that may arrive again, and when that was written."""
        self._adopted = 0
        self._out: list[m.Command] = []
        self._serve: dict[type[m.Event], Callable[[Any], None]] = {
            m.Arrived: self._arrived,
            m.Finished: self._finished,
            m.Cancelled: self._cancelled,
            m.Loaded: self._loaded,
            m.LoadFailed: self._load_failed,
            m.Measured: self._measured,
            m.Resized: self._resized,
            m.WorkerExited: self._worker_exited,
            m.Refused: self._refused,
            m.Woken: self._woken,
            m.DeviceJoined: self._device_joined,
            m.DeviceLeft: self._device_left,
            m.DeviceDrained: self._device_drained,
            m.FunctionDeployed: self._function_deployed,
            m.FunctionRemoved: self._function_removed,
            m.Scaled: self._scaled,
            m.Restored: self._restored,
            m.Serving: self._serving,
        }
        self._listen = dict(self._serve)
        for event in self._serve.keys() - {m.FunctionDeployed, m.Restored, m.Serving}:
            self._listen[event] = self._defer
        self._handlers = self._serve

    # --- the public face ----------------------------------------------------------------------------------------------

    def handle(self, event: m.Event, now: Seconds) -> list[m.Command]:
        """
        Return what is to be done because of *event*. *now* is in seconds on a monotonic clock.

        One scheduling decision costs O(models on the device + log queue). What the policy raises is passed on.
        """
        cluster = self._cluster
        cluster.now = now
        cluster.asked = None
        out: list[m.Command] = []
        self._out = out
        overdue = self._overdue.entries
        if overdue and overdue[0][0] <= now:
            self._return_overdue()
        self._handlers[type(event)](event)
        if self._freed:
            self._freed = False
            self._settle()
        if self._nested and (self._tangled or type(event) in _TANGLING):
            self._tangled = False
            self._untangle()
        if self._lending.lenders and (self._homeless or cluster.orphaned):
            out += self._lending.ask(self._homeless.values())
        return out

    @property
    def wake_at(self) -> Seconds | None:
        """
        When time alone changes something: a waiting call's deadline comes, a local queue goes back, a load that failed
        is tried again without a call, or the policy wants to look again. Send `Woken` then.
        """
        at = self._next_deadline() if self._deadlines else None
        overdue = self._overdue.at() if self._overdue.entries else None
        if at is None or (overdue is not None and overdue < at):
            at = overdue
        if self._held_back:
            retry_at = min(each.backoff.retry_at for each in self._held_back.values() if each.backoff is not None)
            at = retry_at if at is None or retry_at < at else at
        look_at = self._look_at
        if look_at is not None and self._queue.count and (at is None or look_at < at):
            at = look_at
        return at

    def _next_deadline(self) -> Seconds | None:
        deadlines = self._deadlines
        while deadlines:
            deadline, _, call = deadlines[0]
            if call.state != RUNNING and call.deadline == deadline and self._calls.get(call.id) is call:
                return deadline
            heappop(deadlines)
        return None

    @property
    def queue_length(self) -> int:
        """Calls in the global queue: those that no device was chosen for yet."""
        return self._queue.count

    def knows(self, call: CallId) -> bool:
        """Whether *call* waits or runs."""
        return call in self._calls

    def runs(self, call: CallId) -> bool:
        """Whether *call* has a lease."""
        known = self._calls.get(call)
        return known is not None and known.state == RUNNING

    def calls(self) -> list[CallId]:
        """Return those that wait or run. O(calls)."""
        return list(self._calls)

    def holdings(self, devices: Iterable[DeviceId], among: Iterable[CallId] | None = None) -> dict[DeviceId, Holding]:
        """
        Return what these devices should have, by what this engine was told. O(calls + residents).

        :param among: the calls that are looked at; None: all
        """
        found = {id_: Holding(dict(self._devices[id_].models.models), set()) for id_ in devices if id_ in self._devices}
        known = self._calls if among is None else among
        for call in filter(None, map(self._calls.get, known)):
            if call.state == RUNNING and call.device is not None and call.device.id in found:
                found[call.device.id].calls.add(CallId(call.id.removesuffix(_twin(CallId(""), call.device.id))))
        return found

    def status(self, now: Seconds) -> EngineStatus:
        """O(devices, residents, functions)."""
        return EngineStatus(
            policy=self.policy.name,
            devices=tuple(_device_status(each, now) for each in self._devices.values()),
            queued={each.id: each.waiting for each in self._functions.values() if each.waiting},
            running={each.id: each.running for each in self._functions.values() if each.running},
            desired={each.id: each.target for each in self._functions.values() if each.desired is not None},
            failing={
                each.id: Failing(failing.reason, failing.failures, now - failing.since, failing.left_s(now))
                for each in self._functions.values()
                if (failing := each.backoff) is not None and failing.reason is not None
            },
        )

    def remember(self, starts: int) -> None:
        """Be able to explain so many of the last starts, in place of `EXPLAINED`."""
        self._starts = deque(self._starts, maxlen=starts)

    def explain(self, call: CallId, now: Seconds) -> Explanation | None:
        """
        Say what was weighed for a call of a model function that waits, or that is among the last ones that were
        started; None for others. O(starts remembered + waiting calls): who passed whom is found when it is asked.

        *call* may be the part of the id before ``#``, which is what a caller may have sent; then the newest counts.
        """
        waiting = self._calls.get(call)
        if waiting is None:
            sent = f"{call}#"
            named = [each for each in self._calls.values() if each.id.startswith(sent) and each.state != RUNNING]
            waiting = named[-1] if named else None
            for index in range(len(self._starts) - 1, -1, -1):
                started = self._starts[index][1].id
                if waiting is None and (started == call or started.startswith(sent)):
                    return self._explain_start(index)
        elif waiting.state == RUNNING:
            for index in range(len(self._starts) - 1, -1, -1):
                if self._starts[index][1] is waiting:
                    return self._explain_start(index)
        if waiting is None or not waiting.owner.exclusive or waiting.state == RUNNING:
            return None
        self._cluster.now = now
        why = waiting.why
        if waiting.state == WAITING:
            why = self.policy.weigh(self._cluster, waiting) if isinstance(self.policy, policies.Explaining) else None
            why = why or policies.Why("the policy has not placed it")
        before = [each.id for at, each, *_ in self._starts if each.number > waiting.number and at >= waiting.arrived_at]
        return Explanation(
            call=waiting.id,
            function=waiting.function,
            policy=self.policy.name,
            state="waiting" if waiting.state == WAITING else "local",
            at=now,
            waited_s=now - waiting.arrived_at,
            device=None if waiting.device is None else waiting.device.id,
            rule="" if why is None else why.rule,
            options=_options(why),
            overtaken_by=tuple(before[:_NAMED]),
            overtaken_by_count=len(before),
            service=self._service(waiting, waiting.device),
        )

    def _service(self, call: Call, device: DeviceState | None) -> ServiceEstimate | None:
        owner = call.owner
        if device is not None:
            return owner.service_estimate(device.kind, call.size, call.estimate_s)
        return next((owner.service_estimate(kind, call.size) for kind in self._cluster.largest_for(owner)), None)

    def _explain_start(self, index: int) -> Explanation:
        at, call, device, cold, victims, local, why = self._starts[index]
        starts = list(self._starts)
        passed = [each for _, each, *_ in starts[index + 1 :] if each.number < call.number]
        passed += [
            each
            for each in self._calls.values()
            if each.state != RUNNING and each.owner.exclusive and each.number < call.number
        ]
        passed.sort(key=lambda each: each.number)
        before = [each.id for then, each, *_ in starts[:index] if each.number > call.number and then >= call.arrived_at]
        return Explanation(
            call=call.id,
            function=call.function,
            policy=self.policy.name,
            state="running" if self._calls.get(call.id) is call else "ended",
            at=at,
            waited_s=at - call.arrived_at,
            device=device,
            hit=not cold,
            via="local" if local else "global",
            victims=victims,
            rule="" if why is None else why.rule,
            options=_options(why),
            passed_over=tuple(each.id for each in passed[:_NAMED]),
            passed_over_count=len(passed),
            overtaken_by=tuple(before[:_NAMED]),
            overtaken_by_count=len(before),
            service=self._service(call, self._devices.get(device)),
        )

    def take_learnt(self) -> list[m.Learnt]:
        """Return the profiles that changed since the last call of this."""
        learnt = []
        for function, kind in self._learnt:
            owner = self._functions.get(function)
            costs = None if owner is None else owner.costs(kind)
            if costs is not None:
                costs.noted = False
                learnt.append(m.Learnt(function, kind, costs.profile()))
        self._learnt.clear()
        return learnt

    def take_changed(self) -> list[str]:
        """Return the keys of the docs that may be others since the last call of this, to be asked for with `doc`."""
        keys = []
        for each in self._touched:
            each.touched = False
            keys.append(docs.key_of(each))
        self._touched.clear()
        keys += self._gone
        self._gone.clear()
        settled, self._settled = self._settled, False
        return [docs.ENGINE_KEY, *keys] if keys or settled else []

    def _touch(self, whose: DeviceState | FunctionState) -> None:
        """Its doc is another one now. Where a call passes, the flag is looked at first."""
        if not whose.touched:
            whose.touched = True
            self._touched.append(whose)

    def doc(self, key: str, now: Seconds) -> DeviceDoc | FunctionDoc | EngineDoc | None:
        """
        Return what is to be kept under *key* of `take_changed`; None: nothing, its device or function is not there.

        O(residents), O(copies), and for the engine O(calls until `docs.WAITING_KEPT` that wait were seen).
        """
        kind, _, name = key.partition("/")
        if kind == "devices":
            device = self._devices.get(DeviceId(name))
            return None if device is None else docs.device_doc(device, now)
        if kind == "functions":
            owner = self._functions.get(FunctionId(name))
            return None if owner is None else docs.function_doc(owner, now)
        waiting = list(self._queue.returned)
        if self._waiting:
            room = docs.WAITING_KEPT
            for call in self._calls.values():
                if call.state == WAITING and (call.passes == IMPLICIT or not call.owner.exclusive):
                    waiting.append(call)
                    room -= 1
                    if not room:
                        break
        waiting.sort(key=lambda call: call.number)
        return docs.engine_doc(
            self._cluster,
            now,
            policy=self.policy.name,
            lease=self._lease,
            waiting=waiting[: docs.WAITING_KEPT],
            waiting_count=self._waiting,
            homeless=self._homeless,
            short=self._short,
            surplus=self._surplus,
            look_at=self._look_at,
        )

    # --- calls --------------------------------------------------------------------------------------------------------

    def _arrived(self, event: m.Arrived) -> None:
        owner = self._functions.get(event.function)
        age_s = event.age_s
        if age_s and self._came_again(event):
            return
        if event.call in self._calls:
            self.ignored["Arrived"] += 1
            return
        if owner is None or owner.backoff is not None or owner.removed or owner.fits_as_of != self._cluster.fleet:
            refused = self._why_not(owner, event)
            if refused is not None:
                self._out.append(refused)
                return
            assert owner is not None
        deadline = event.deadline
        if not owner.fits and self._devices:
            self._out.append(self._no_device(event.call, owner))
            return
        outer = ends = None
        if event.outer is not None:
            outer, ends = self._nests.outer_of(event.outer)
            if ends is not None and (deadline is None or ends < deadline):
                deadline = ends
            else:
                ends = None
        if deadline is not None and deadline <= self._cluster.now:
            self._out.append(m.Reject(event.call, "deadline", "the deadline had passed when the call arrived"))
            return
        if owner.desired == 0:
            self._wake(owner)
        queue = self._queue
        call = Call(
            event.call, owner.id, owner, queue.next_number, self._cluster.now, deadline, event.size, event.endless
        )
        if outer is not None:
            call.ends = ends
            self._nests.add(call, outer)
            self._tangled = True
        if age_s:
            self._back_date(call, age_s)
        else:
            queue.next_number += 1
        self._calls[event.call] = call
        owner.waiting += 1
        self._waiting += 1
        self._cluster.note_call(owner)
        if age_s:
            self._join_queue(call)
            self._freed = True
            if not owner.exclusive:
                self._serve_fifo(owner)
        elif owner.exclusive:
            queue.append(call)
            if outer is not None:
                self._start_nested()
            if self._freed:  # local queues went back: one scheduling run for all
                self._freed = False
                self._settle()
            elif self._idle:
                self._plan()
        else:
            self._place_shared(call)
        if call.state == RUNNING:
            return
        if not owner.touched:
            self._touch(owner)
        # Only now is it clear that it has to wait: a full queue turns away whoever would make it longer.
        if owner.waiting > owner.max_queue or self._waiting > self.max_queue:
            self._overloaded(call)
        elif deadline is not None:
            self._watch(call)

    def _why_not(self, owner: FunctionState | None, event: m.Arrived) -> m.Reject | None:
        if owner is None:
            return m.Reject(event.call, "unknown_function", f"no function {event.function} is deployed")
        if self._backs_off(owner) and (owner.waiting or owner.loading or self._is_held_back(owner)):
            return self._failing(event.call, owner)  # who comes first when the time is over tries it
        if owner.removed:
            return m.Reject(event.call, "removed", f"function {owner.id} was removed")
        self._cluster.fits_somewhere(owner)
        return None

    def _finished(self, event: m.Finished) -> None:
        call = self._calls.get(event.call)
        if call is None or call.state != RUNNING or call.device is None or call.device.id != event.device:
            call = self._calls.get(_twin(event.call, event.device))
            if call is None:
                self.ignored["Finished"] += 1
                return
            assert call.device is not None
        device, owner = call.device, call.owner
        device.served += 1
        if event.ok:
            if owner.backoff is not None:
                self._recovers(owner, owner.backoff, call.cold)
            costs = owner.costs(device.kind)
            if costs is not None and 0.0 <= event.service_s <= MAX_S:
                # Who has slots is not estimated call by call.
                costs.learn_service(event.service_s, call.size if owner.exclusive else 0.0, self._rate)
                if not costs.noted and self._learn:
                    costs.noted = True
                    self._learnt[(owner.id, device.kind)] = None
        self._end(call)
        self._proceed(call, device)

    def _cancelled(self, event: m.Cancelled) -> None:
        call = self._calls.get(event.call)
        if call is None or call.aborted:
            if self._lost.pop(event.call, None) is None:
                self.ignored["Cancelled"] += 1
        elif call.state == RUNNING:
            call.aborted = True
            assert call.device is not None
            self._touch(call.device)
            self._out.append(m.Abort(call.id, call.device.id))
        else:
            self._give_up(call)

    def _refused(self, event: m.Refused) -> None:
        lost = self._lost.pop(event.call, None)
        if lost is not None and lost.device is not None and lost.device.id == event.device:
            self._place_again(lost, event.reason)
            if not lost.owner.exclusive:
                self._serve_fifo(lost.owner)
            self._freed = True
            return
        call = self._calls.get(event.call)
        if call is None or call.state != RUNNING or call.device is None or call.device.id != event.device:
            self.ignored["Refused"] += 1
            return
        device, model, owner = call.device, call.model, call.owner
        assert model is not None
        self._end(call)
        if not call.cold:
            device.hits -= 1
        elif not event.opened:
            device.misses -= 1
            if model.loading and device.models.models.get(model.key) is model:
                self._drop(device, model)
                # Whether the node got as far as the victims is not known, and their memory is promised: make it so.
                for function, copy in call.victims:
                    if copy_id(function, copy) not in device.models.models:
                        self._out.append(m.Evict(function, device.id, copy))
        self._place_again(call, event.reason)
        if owner.exclusive:
            self._next_local(device)
        else:
            self._serve_fifo(owner)
        if owner.removed:
            self._forget_if_done(owner)
        self._freed = True

    def _place_again(self, call: Call, why: str) -> None:
        """A call that no worker has any more waits again, with its arrival number and its passes."""
        owner = call.owner
        call.refusals += 1
        if call.aborted:
            pass
        elif owner.starved is not None:
            self._out.append(m.Reject(call.id, "out_of_memory", owner.starved))
        elif self._functions.get(owner.id) is not owner:
            self._out.append(m.Reject(call.id, "removed", f"function {owner.id} was removed"))
        elif self._backs_off(owner) and self._is_held_back(owner):
            self._out.append(self._failing(call.id, owner))
        elif call.refusals >= MAX_REFUSALS:
            assert call.device is not None
            reason = f"{call.refusals} nodes in a row refused the call, the last one ({call.device.id}): {why}"
            self._out.append(m.Reject(call.id, "refused", reason, 1.0))
        else:
            call.device = call.model = None
            call.cold, call.victims, call.state = False, (), WAITING
            self._calls[call.id] = call
            if owner.desired == 0:
                self._wake(owner)
            owner.waiting += 1
            self._waiting += 1
            self._join_queue(call)
            if call.deadline is not None:
                self._watch(call)

    def _join_queue(self, call: Call) -> None:
        """Let *call* wait among the others, by its number and with its passes."""
        owner = call.owner
        if not owner.exclusive:
            owner.queue.put_back(call)
            if not owner.active:
                self._homeless[owner.id] = owner
            return
        if call.passes == IMPLICIT:
            self._queue.append(call)
        else:
            self._queue.put_back(call)
        self._cluster.note_orphan(owner)

    def _woken(self, _event: m.Woken) -> None:
        now = self._cluster.now
        if self._look_at is not None and self._look_at <= now:
            self._look_at = None
            self._freed = True
        if self._held_back:
            for owner in [each for each in self._held_back.values() if not self._is_held_back(each)]:
                self._balance(owner)
        while (deadline := self._next_deadline()) is not None and deadline <= now:
            call = heappop(self._deadlines)[2]
            where = "in the queue"
            if call.device is not None:
                where = f"in the local queue of {call.device.id}"
            waited = f"the call waited {now - call.arrived_at:.3f} s {where}, until its deadline"
            self._give_up(call)
            self._out.append(m.Reject(call.id, "deadline", waited))

    def _watch(self, call: Call) -> None:
        """Let `wake_at` know of the deadline of a call that waits."""
        deadlines = self._deadlines
        assert call.deadline is not None
        heappush(deadlines, (call.deadline, call.number, call))
        if len(deadlines) > 2 * self._waiting + 1000:
            alive = {entry[1]: entry for entry in deadlines if self._calls.get(entry[2].id) is entry[2]}
            deadlines[:] = [entry for entry in alive.values() if entry[2].state != RUNNING]
            heapify(deadlines)

    def _give_up(self, call: Call) -> None:
        """A waiting call leaves, wherever it waits."""
        owner = call.owner
        if call.state == LOCAL:
            device = call.device
            assert device is not None
            self._take_local(device, call)
            self._touch(device)
            self._freed = True  # perhaps it was what pinned the model
        elif owner.exclusive:
            self._queue.remove(call)
        else:
            owner.queue.remove(call)
            if not owner.queue.calls:
                self._homeless.pop(owner.id, None)
        owner.waiting -= 1
        self._waiting -= 1
        self._touch(owner)
        del self._calls[call.id]
        if owner.removed:
            self._forget_if_done(owner)

    def _overloaded(self, call: Call) -> None:
        owner = call.owner
        full = f"function {owner.id} has {owner.waiting - 1} calls waiting"
        if owner.waiting <= owner.max_queue:
            full = f"{self._waiting - 1} calls wait on the platform"
        costs = next((owner.costs(kind) for kind in self._cluster.largest_for(owner)), None)
        if owner.waiting > owner.max_queue:
            calls, places = owner.waiting, max(1, owner.copies) * (1 if owner.exclusive else owner.slots)
        else:
            calls, places = self._waiting, max(1, len(self._devices))
        drain_s = 1.0 * calls / places if costs is None else costs.drain_s(calls, places)
        self._give_up(call)
        self._out.append(m.Reject(call.id, "overloaded", full, min(MAX_RETRY_AFTER_S, max(0.1, drain_s))))

    def _no_device(self, call: CallId, owner: FunctionState) -> m.Reject:
        allowed = [each for each in self._devices.values() if owner.allows(each)]
        if not allowed:
            asked = ", ".join(map(str, owner.constraints))
            why = f"function {owner.id} may run on no device that is there now: none satisfies its constraints {asked}"
            return m.Reject(call, "no_device", why)
        largest = max(allowed, key=lambda each: each.device.memory)
        needs = []
        for kind, size in self._cluster.largest_for(owner).items():
            costs = owner.costs(kind)
            need = "cannot run" if costs is None else f"needs {format_bytes(costs.occupation)}"
            needs.append(f"{need} on {kind} (largest: {format_bytes(size)})")
        message = (
            f"function {owner.id} fits no device{' that it may run on' if owner.constraints else ''}: it "
            f"{', '.join(needs)}; the largest device is {largest.id} with "
            f"{format_bytes(largest.device.memory)}. Deploy a smaller model, or add a larger device"
        )
        return m.Reject(call, "no_device", message)

    # --- starting and ending ------------------------------------------------------------------------------------------

    def _start(self, call: Call, device: DeviceState, model: Model | None, victims: tuple[Model, ...]) -> None:
        """Grant *call* the lease: a hit on *model*, or a miss for which *victims* leave. The caller checked it all."""
        cluster = self._cluster
        owner = call.owner
        now = cluster.now
        names: tuple[CopyId, ...] = ()
        if model is None:
            model, names = self._reserve(device, owner, victims)
            call.cold = True
            call.victims = tuple((each.owner.id, each.copy) for each in victims)
            device.misses += 1
        else:
            device.models.touch(model, now)
            cluster.asked = None
            device.hits += 1
        model.running += 1
        if model.running == 1 and model.limit != model.memory:
            device.models.hold(model)
        if not device.touched:
            self._touch(device)
        local = call.state == LOCAL
        call.state = RUNNING
        call.device = device
        call.model = model
        if not owner.touched:
            self._touch(owner)
        owner.waiting -= 1
        owner.running += 1
        self._waiting -= 1
        if owner.exclusive:
            costs = owner.costs(device.kind)
            ready = model.ready_at if model.loading and model.ready_at > now else now
            device.run = call
            device.busy_since = now
            call.estimate_s = 0.0 if costs is None else costs.estimate_s(call.size)
            device.free_at = ready + call.estimate_s
            if device.local:
                self._overdue.note(device)
            device.starts += 1
            if device.idle_key is not None:
                cluster.set_busy(device)
            self._starts.append((now, call, device.id, call.cold, names, local, call.why))
        elif owner.ready is not None:
            owner.ready.started(model)
        self._lease = number = self._lease + 1
        lease = m.Lease(
            self.epoch, number, call.id, owner.id, owner.digest, device.id, call.cold, model.memory, names, local,
            model.copy, None if call.ends is None else call.ends - now,
        )  # fmt: skip
        self._out.append(m.Start(lease))

    def _reserve(
        self, device: DeviceState, owner: FunctionState, victims: tuple[Model, ...]
    ) -> tuple[Model, tuple[CopyId, ...]]:
        """Evict *victims* and charge the reservation of *owner*, whose load begins now."""
        self._touch(device)
        self._touch(owner)
        self._leave_for_others(device, victims)
        costs = owner.costs(device.kind)
        assert costs is not None
        self._out += self._lending.take_back(device, costs.occupation)
        model = self._cluster.insert(device, owner, costs.occupation, costs.load_s)
        if owner.copies >= owner.target:
            self._short.pop(owner.id, None)
        return model, tuple(victim.key for victim in victims)

    def _leave_for_others(self, device: DeviceState, victims: Iterable[Model]) -> None:
        for victim in victims:
            self._touch(victim.owner)
            self._cluster.evict(device, victim)
            device.evictions += 1
            if victim.owner.copies < victim.owner.target:
                victim.owner.eager = False
                self._short[victim.owner.id] = victim.owner

    def _end(self, call: Call) -> None:
        """*call* no longer uses its worker."""
        model, device, owner = call.model, call.device, call.owner
        assert model is not None
        assert device is not None
        del self._calls[call.id]
        if not device.touched:
            self._touch(device)
        if not owner.touched:
            self._touch(owner)
        model.running -= 1
        if not model.running:
            if model.limit != model.memory:
                device.models.let_go(model)
            if model.asked == ANSWERED:
                model.asked = NOT_ASKED
        owner.running -= 1
        if device.run is call:
            device.run = None
            device.busy_s += self._cluster.now - device.busy_since
            if device.others:
                self._next_other(device)
        elif owner.ready is not None:
            owner.ready.ended(model)
        elif device.others and call in device.others:
            device.others.remove(call)

    def _next_other(self, device: DeviceState) -> None:
        """Of several model functions' calls on *device*, which should not have been, the next one has it now."""
        device.run = following = device.others.pop(0)
        costs = following.owner.costs(device.kind)
        following.estimate_s = 0.0 if costs is None else costs.estimate_s(following.size)
        device.busy_since = self._cluster.now
        device.free_at = self._cluster.now + following.estimate_s
        self._overdue.note(device)

    def _proceed(self, call: Call, device: DeviceState) -> None:
        """After `_end`: the place on the worker goes to the next that waits for it."""
        owner = call.owner
        if owner.exclusive:
            self._next_local(device)
            self._freed = True
        else:
            model = call.model
            assert model is not None
            if owner.queue.calls and model in owner.active:
                if model.running < owner.slots:
                    following = owner.queue.calls[0]
                    owner.queue.remove(following)
                    self._start(following, device, model, ())
            elif model.running == 0 and self._sought(owner):
                self._freed = True
        if owner.removed:
            self._forget_if_done(owner)

    def _sought(self, owner: FunctionState) -> bool:
        """Somebody may be waiting for the memory of an idle copy of *owner*: not its own next copy, see `victims`."""
        short = self._short
        return bool(self._surplus or self._homeless or self._queue.count or self._nested) or len(short) > (
            owner.id in short
        )

    def _next_local(self, device: DeviceState) -> None:
        """A device whose run ended, if it did: its local queue first, before anybody plans with it (3.2, step 1)."""
        if device.busy or self._devices.get(device.id) is not device:
            return
        if device.local:
            call = device.local[0]
            model = device.models.models[call.function]
            self._take_local(device, call)
            self._start(call, device, model, ())
        elif device.idle_key is None and not device.closed:
            self._cluster.set_idle(device)

    def _take_local(self, device: DeviceState, call: Call) -> None:
        local = device.local
        if local[0] is call:
            local.popleft()
            if device.busy:
                self._overdue.note(device)
        else:
            local.remove(call)
        # Emptied, it is exactly nothing, whatever rounding left.
        device.local_s = device.local_s - call.estimate_s if local else 0.0
        device.models.models[call.function].queued -= 1

    # --- planning -----------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Something became free: let all that waits try again."""
        self._settled = True
        if self._surplus:
            for owner in list(self._surplus.values()):
                self._trim(owner)
        if self._homeless:
            for owner in list(self._homeless.values()):
                self._serve_fifo(owner)
        if self._nested:
            self._start_nested()
        if self._queue.count and self._idle:
            self._plan()
        if self._short:
            for owner in list(self._short.values()):
                self._load_copies(owner)

    def _plan(self) -> None:
        """One scheduling run: the policy proposes, and each action is done or refused at once."""
        plan = self.policy.plan(self._cluster)
        verdict: Refusal | None = None
        self._look_at = None
        budget = limit = _MAX_IDLE_ACTIONS + _IDLE_ACTIONS_PER_DEVICE * len(self._devices)
        while True:
            try:
                action: Action = plan.send(verdict)
            except StopIteration as end:
                self._look_at = None if end.value is None or end.value <= self._cluster.now else end.value
                break
            kind = type(action)
            if kind is policies.CountPass:
                self._queue.count_pass(action.before)  # type: ignore[union-attr]
                verdict = None
            else:
                if kind is policies.Start:
                    reason = self._try_start(action)  # type: ignore[arg-type]
                elif kind is policies.EnqueueLocal:
                    reason = self._try_enqueue(action)  # type: ignore[arg-type]
                elif kind is policies.Promise:
                    reason = self._try_promise(action)  # type: ignore[arg-type]
                elif kind is policies.Load:
                    reason = self._try_load(action)  # type: ignore[arg-type]
                else:
                    reason = f"{kind.__name__} is not an action"
                if reason is None:
                    verdict = None
                    budget = limit
                else:
                    verdict = Refusal(action, reason)
                    self.refusals.append(verdict)
            budget -= 1
            if budget < 0:
                plan.close()
                self.refusals.append(Refusal(action, f"{limit} actions without one that was done: run ended"))
                break
        self._queue.rewind()

    def _try_start(self, action: policies.Start) -> str | None:
        """Do it, or return why not."""
        call = self._calls.get(action.call)
        if call is None or call.state != WAITING or not call.owner.exclusive:
            return f"call {action.call} does not wait in the global queue"
        device = self._devices.get(action.device)
        if device is None:
            return f"there is no device {action.device}"
        if device.busy:
            return _busy(device)
        model = device.models.models.get(call.function)
        victims: tuple[Model, ...] = ()
        if model is None:
            chosen = self._chosen(device, call.owner, action.victims)
            if isinstance(chosen, str):
                return chosen
            victims = chosen
        self._queue.remove(call)
        call.why = action.why
        if action.reserved_s:
            self._cluster.reserved_until = self._cluster.now + action.reserved_s
        self._start(call, device, model, victims)
        return None

    def _try_promise(self, action: policies.Promise) -> str | None:
        """Do it, or return why not."""
        call = self._calls.get(action.call)
        if call is None or call.state != WAITING or not call.owner.exclusive:
            return f"call {action.call} does not wait in the global queue"
        call.promised_at = action.at
        return None

    def _try_enqueue(self, action: policies.EnqueueLocal) -> str | None:
        """Do it, or return why not."""
        call = self._calls.get(action.call)
        if call is None or call.state != WAITING or not call.owner.exclusive:
            return f"call {action.call} does not wait in the global queue"
        device = self._devices.get(action.device)
        if device is None:
            return f"there is no device {action.device}"
        if not device.busy:
            return f"device {device.id} is idle: nothing would end its local queue's wait"
        model = device.models.models.get(call.function)
        if model is None or device.id not in call.owner.holders:
            return f"device {device.id} does not hold {call.function}, or not for new calls"
        if self._nested and self._nests.holds(device):
            return f"device {device.id} is held by a call that waits for a call"
        self._queue.remove(call)
        call.why = action.why
        costs = call.owner.costs(device.kind)
        call.estimate_s = 0.0 if costs is None else costs.estimate_s(call.size)
        call.state = LOCAL
        call.device = device
        call.patience_s = action.patience_s
        device.local.append(call)
        device.local_s += call.estimate_s
        if device.local[0] is call:
            self._overdue.note(device)
        model.queued += 1
        self._touch(device)
        self._cluster.asked = None
        return None

    def _try_load(self, action: policies.Load) -> str | None:
        """Do it, or return why not."""
        owner = self._functions.get(action.function)
        if owner is None or owner.removed or not owner.exclusive:
            return f"no model function {action.function} is deployed"
        device = self._devices.get(action.device)
        if device is None:
            return f"there is no device {action.device}"
        if device.busy:
            return _busy(device)
        if owner.backoff is not None:
            return f"the last load of {owner.id} failed: a call has to try it first"
        if owner.id in device.models.models:
            return f"device {device.id} holds {owner.id} already"
        if owner.max_copies and owner.copies >= owner.max_copies:
            return f"{owner.id} has {owner.copies} copies, and may have {owner.max_copies}"
        victims = self._chosen(device, owner, action.victims)
        if isinstance(victims, str):
            return victims
        model, names = self._reserve(device, owner, victims)
        device.preload = model
        device.busy_since = self._cluster.now
        device.free_at = model.ready_at
        self._cluster.set_busy(device)
        self._lease = number = self._lease + 1
        self._out.append(m.Load(self.epoch, number, owner.id, owner.digest, device.id, model.memory, names))
        return None

    def _chosen(
        self, device: DeviceState, owner: FunctionState, names: tuple[CopyId, ...] | None
    ) -> tuple[Model, ...] | str:
        """Return the models to be evicted for *owner*: those of *names*, or of the replacement order; or why not."""
        if names is None:
            chosen = self._cluster.victims(device, owner)
            return self._why_no_room(owner, device) if chosen is None else chosen
        costs = owner.costs(device.kind)
        if costs is None or not owner.allows(device):
            return self._why_no_room(owner, device)
        free = device.models.free
        victims: list[Model] = []
        for name in dict.fromkeys(names):
            model = device.models.models.get(name)
            if model is None:
                return f"{name} cannot be evicted: {device.id} does not hold it"
            if not self._cluster.evictable(model, [each.owner for each in victims].count(model.owner)):
                return f"{name} cannot be evicted from {device.id}: it is pinned, or within its minimum of copies"
            victims.append(model)
            free += model.memory
        if free < costs.occupation:
            need, after = format_bytes(costs.occupation), format_bytes(free)
            return f"{owner.id} needs {need}, device {device.id} has {after} free once {len(victims)} are evicted"
        return tuple(victims)

    def _why_no_room(self, owner: FunctionState, device: DeviceState) -> str:
        if not owner.allows(device):
            return f"device {device.id} does not satisfy the constraints of {owner.id}"
        costs = owner.costs(device.kind)
        if costs is None:
            return f"{owner.id} has no profile for devices of kind {device.kind}"
        need, memory = format_bytes(costs.occupation), device.device.memory
        if costs.occupation > memory:
            return f"{owner.id} needs {need}, device {device.id} has {format_bytes(memory)}"
        free = format_bytes(device.models.free)
        return f"{owner.id} needs {need}, device {device.id} has {free} free, and what could be evicted is too little"

    def _place_shared(self, call: Call) -> None:
        """A CPU function's call: start it, or let it wait in its function's FIFO."""
        owner = call.owner
        if not owner.queue.calls and (free := owner.free_copy()) is not None:
            self._start(call, owner.active[free], free, ())
            return
        owner.queue.append(call)
        if not owner.active:
            self._homeless[owner.id] = owner
            self._serve_fifo(owner)
        elif owner.waiting == 1 and owner.id in self._short:
            self._load_copies(owner)  # now it may evict; later calls change nothing about that

    def _serve_fifo(self, owner: FunctionState) -> None:
        """Start as many waiting calls of a CPU function as there are free slots; load it if it is resident nowhere."""
        cluster = self._cluster
        queue = owner.queue
        if not owner.active and queue.calls:
            self._revive(owner)
        if not owner.active and queue.calls:
            device = cluster.room_for(owner)
            if device is None:
                return
            victims = cluster.victims(device, owner)
            assert victims is not None
            first = queue.calls[0]
            queue.remove(first)
            self._start(first, device, None, victims)
        self._homeless.pop(owner.id, None)
        while queue.calls and (free := owner.free_copy()) is not None:
            following = queue.calls[0]
            queue.remove(following)
            self._start(following, owner.active[free], free, ())

    # --- calls made by calls ------------------------------------------------------------------------------------------

    def _start_nested(self) -> None:
        """
        Calls that others wait for start wherever the policy cannot know that waiting is in vain: at an idle holder, and
        elsewhere if all holders, or all slots, are held by calls that wait for calls.
        """
        for call in self._nests.waiting():
            owner = call.owner
            if not owner.exclusive:
                if owner.active and call.state != RUNNING and self._nests.full_of_outers(owner):
                    self._start_at_another_copy(call)
            elif self._idle and call.state == WAITING:
                device = self._cluster.idle_holder(call)
                if device is None and not self._nests.may_wait(owner):
                    device = self._cluster.room_for(owner, [key[2] for key in self._idle])
                if device is not None:
                    self._try_start(policies.Start(call.id, device.id, None, _NESTED))

    def _start_at_another_copy(self, call: Call) -> None:
        owner = call.owner
        if owner.max_copies and owner.copies >= owner.max_copies:
            return
        device = self._cluster.room_for(owner)
        if device is not None:
            victims = self._cluster.victims(device, owner)
            assert victims is not None
            owner.queue.remove(call)
            self._start(call, device, None, victims)

    def _untangle(self) -> None:
        """
        No nested call waits for what cannot become free before it ends: those for which there is no place any more are
        refused, one after the other, the last that came first. Its outer call goes on, and so perhaps the others.
        """
        self._start_nested()
        while stuck := self._nests.stuck():
            local = [(device, each) for device in self._devices.values() if device.local and self._nests.holds(device)
                     for each in device.local]  # fmt: skip
            for device, each in local:
                self._return_local(device, each)
            if local:
                self._freed = True  # they may have places elsewhere, and their models need not stay
            else:
                refused = stuck[-1]
                why = self._nests.why_stuck(refused)
                self._give_up(refused)
                self._out.append(m.Reject(refused.id, "nested", why))
            if self._freed:
                self._freed = False
                self._settle()

    # --- copies without calls -----------------------------------------------------------------------------------------

    def _scaled(self, event: m.Scaled) -> None:
        owner = self._functions.get(event.function)
        if owner is None or owner.removed:
            self.ignored["Scaled"] += 1
            return
        before = owner.target
        # Calls that wait are served: that is not a function at zero.
        owner.scale(None if event.copies <= 0 and owner.waiting else max(0, event.copies))
        owner.excess = max(0, owner.excess + before - owner.target)
        owner.eager = True
        self._balance(owner)

    def _balance(self, owner: FunctionState) -> None:
        """Its number of copies, or what it should be, changed: note what is to be done as soon as it can be."""
        self._touch(owner)
        self._note_lack(owner)
        if owner.surplus or owner.draining:
            self._surplus[owner.id] = owner
        self._freed = True

    def _note_lack(self, owner: FunctionState) -> None:
        self._short.pop(owner.id, None)
        self._held_back.pop(owner.id, None)
        if owner.copies < owner.target and not owner.removed:
            (self._held_back if self._is_held_back(owner) else self._short)[owner.id] = owner

    def _wake(self, owner: FunctionState) -> None:
        """A call of a function that was scaled to zero: from now on its copies follow its calls again."""
        owner.scale(None)
        owner.excess = 0
        while self._revive(owner):
            pass

    def _revive(self, owner: FunctionState) -> bool:
        """Let a copy that drains take calls again; False: there is none that may."""
        for model, device in owner.draining.items():
            if not device.closed:
                self._touch(owner)
                self._touch(device)
                owner.add(model, owner.draining.pop(model))
                return True
        return False

    def _trim(self, owner: FunctionState) -> None:
        """Evict copies that are surplus and idle; those that are not idle take no new calls."""
        self._touch(owner)
        for model, device in list(owner.draining.items()):
            if not model.pinned:
                self._evict(device, model)
        surplus = owner.surplus
        if surplus:
            for model in _dispensable(owner)[:surplus]:
                owner.excess -= 1
                if model.pinned:
                    self._touch(owner.active[model])
                    owner.draining[model] = owner.drop(model)
                    self._cluster.note_orphan(owner)
                else:
                    self._evict(owner.active[model], model)
        if not owner.surplus:
            owner.excess = 0
            if not owner.draining:
                self._surplus.pop(owner.id, None)

    def _evict(self, device: DeviceState, model: Model) -> None:
        """Take a copy away from its device for nobody's sake."""
        preload = device.preload
        self._touch(device)
        self._touch(model.owner)
        self._cluster.evict(device, model)
        device.evictions += 1
        self._out.append(m.Evict(model.owner.id, device.id, model.copy))
        if preload is not device.preload:
            self._next_local(device)

    def _load_copies(self, owner: FunctionState) -> None:
        """More copies of a function that has too few: only where they fit, and not all at once."""
        if self._is_held_back(owner):
            self._note_lack(owner)
            return
        while owner.copies < owner.target and self._revive(owner):
            pass
        while owner.copies < owner.target:
            at_once = MAX_LOADING if not owner.exclusive and owner.loading < owner.copies else 1
            if owner.loading >= at_once or not self._load_copy(owner):
                return
        self._short.pop(owner.id, None)

    def _load_copy(self, owner: FunctionState) -> bool:
        """Load one, and return whether there was room."""
        if owner.exclusive and owner.copies >= len(self._devices):
            return False
        device = self._cluster.room_for(owner)
        if device is None:
            return False
        victims = self._cluster.victims(device, owner)
        assert victims is not None
        if victims and owner.copies >= owner.min_copies and not owner.eager and not owner.queue.calls:
            return False
        model, names = self._reserve(device, owner, victims)
        self._lease = number = self._lease + 1
        load = m.Load(self.epoch, number, owner.id, owner.digest, device.id, model.memory, names, model.copy)
        self._out.append(load)
        if not owner.exclusive:
            self._serve_fifo(owner)  # its slots are free from now on, see `free_copy`
        return True

    # --- workers ------------------------------------------------------------------------------------------------------

    def _resident(
        self, event: m.Loaded | m.LoadFailed | m.Measured | m.Resized | m.WorkerExited
    ) -> tuple[DeviceState, Model] | None:
        """Return the copy that *event* is about, and its device; None: the engine has taken it away."""
        state = self._devices.get(event.device)
        model = None if state is None else state.models.models.get(copy_id(event.function, event.copy))
        return None if state is None or model is None else (state, model)

    def _loaded(self, event: m.Loaded) -> None:
        found = self._resident(event)
        if found is None or not found[1].loading:
            self.ignored["Loaded"] += 1
            return
        device, model = found
        owner = model.owner
        self._touch(device)
        self._touch(owner)
        model.loading = False
        owner.loading -= 1
        if model not in owner.draining:
            owner.add(model, device)
        owner.starved = None
        model.ready_at = self._cluster.now
        if owner.backoff is not None:
            owner.backoff.loaded(self._cluster.now)
            self._note_lack(owner)
        if self._learn and owner.declared.elastic:
            # Its node waits to be told, if only that there is nothing.
            self._out += self._lending.lend(device, model) or [memory.resize_of(device, model)]
        if device.preload is model:
            device.preload = None
            device.busy_s += self._cluster.now - device.busy_since
            self._next_local(device)
            self._freed = True
        costs = owner.costs(device.kind)
        if costs is not None and self._learn and is_time(event.load_s):
            costs.learn_load(event.load_s, LEARNING_RATE)
            self._learnt[(owner.id, device.kind)] = None
        run = device.run
        if run is not None and run.model is model and costs is not None:
            run.estimate_s = costs.estimate_s(run.size)
            device.free_at = self._cluster.now + run.estimate_s  # the load is over: what is left is known better
            self._overdue.note(device)
        if not owner.exclusive:
            self._serve_fifo(owner)
        if not model.pinned or owner.copies < owner.target or owner.surplus:
            self._freed = True

    def _load_failed(self, event: m.LoadFailed) -> None:
        found = self._resident(event)
        if found is None or not found[1].loading:
            self.ignored["LoadFailed"] += 1
            return
        device, model = found
        owner = model.owner
        awaited = model.running > 0
        ended = self._lose(device, model)
        self._touch(owner)
        costs = owner.costs(device.kind)
        if event.out_of_memory and self._learn and costs is not None:
            largest = self._cluster.largest_for(owner).get(device.kind, device.device.memory)
            if memory.widen(costs, model.limit, largest):
                self._profile_changed(owner, device.kind)
                for call in ended:
                    call.refusals -= 1  # the node refuses them now, for want of room and of nothing else
                self._after_loss(device, owner)
                return
            owner.starved = (
                f"function {owner.id} ran out of memory while it loaded: it had {format_bytes(model.limit)}, which is "
                f"all that the largest {device.kind} device for it has ({event.reason}). Deploy a smaller or quantised "
                "model, or add a larger device"
            )
        self._start_failed(owner, awaited, f"the last load, on {device.id}: {event.reason}")
        self._after_loss(device, owner)

    def _worker_exited(self, event: m.WorkerExited) -> None:
        found = self._resident(event)
        if found is None:
            self.ignored["WorkerExited"] += 1
            return
        device, model = found
        owner = model.owner
        young = model.loading or self._cluster.now - model.ready_at < backoff.STEADY_S
        # One that ended in a call was ended by the call, for all that is known.
        if not self._lose(device, model) and young and owner.copies < owner.target:
            why = f"the last worker, on {device.id}, ended right after it had started: {event.reason}"
            self._start_failed(owner, False, why)
        self._after_loss(device, owner)

    def _start_failed(self, owner: FunctionState, awaited: bool, why: str) -> None:
        """A copy did not come to be. :param awaited: by a call"""
        self._touch(owner)
        failing = owner.backoff = owner.backoff or backoff.Backoff()
        held_back = failing.failed(self._cluster.now)
        self._note_lack(owner)
        # One copy more is not worth a function that serves elsewhere.
        if held_back and (awaited or owner.copies <= owner.loading):
            failing.reason = why
            for call in [each for each in self._calls.values() if each.owner is owner and each.state != RUNNING]:
                self._give_up(call)
                self._out.append(self._failing(call.id, owner))

    def _failing(self, call: CallId, owner: FunctionState) -> m.Reject:
        failing = owner.backoff
        assert failing is not None
        left_s = failing.left_s(self._cluster.now)
        again = f"is tried again in {max(1, round(left_s))} s" if left_s else "is being tried again now"
        message = (
            f"function {owner.id} failed to load {failing.failures} times in a row: it {again}, or at once when it is "
            f"deployed again; {failing.reason}"
        )
        return m.Reject(call, "load_failed", message, max(1.0, left_s))

    def _backs_off(self, owner: FunctionState) -> bool:
        """Its calls are refused, but for one that tries it."""
        return owner.backoff is not None and owner.backoff.reason is not None

    def _is_held_back(self, owner: FunctionState) -> bool:
        """Nothing of it is to be loaded yet."""
        return owner.backoff is not None and owner.backoff.retry_at > self._cluster.now

    def _recovers(self, owner: FunctionState, failing: backoff.Backoff, cold: bool) -> None:
        """A call of a function whose loads failed of late has ended well."""
        if failing.served(self._cluster.now, cold):
            owner.backoff = None
            self._balance(owner)

    def _lose(self, device: DeviceState, model: Model) -> list[Call]:
        """
        A worker is gone: the calls that ran on it are over, those that waited for it wait for any again.

        Return the former.
        """
        ended = [each for each in self._calls.values() if each.model is model and each.state == RUNNING]
        for call in ended:
            self._end(call)
            self._lost[call.id] = call
        while len(self._lost) > _MAX_LOST:
            del self._lost[next(iter(self._lost))]
        self._drop(device, model)
        return ended

    def _drop(self, device: DeviceState, model: Model) -> None:
        """Take a model off the lists that was no victim, with its local queue."""
        owner = model.owner
        self._touch(device)
        self._touch(owner)
        if model.queued:
            for call in [each for each in device.local if each.owner is owner]:
                self._return_local(device, call)
        self._cluster.evict(device, model)
        if owner.copies < owner.target and owner.id not in self._short:
            self._note_lack(owner)
        if not owner.exclusive and owner.queue.calls and not owner.active:
            self._homeless[owner.id] = owner

    def _return_overdue(self) -> None:
        """Devices are later than their local queues have patience for. Planned for once the event is dealt with."""
        for device in self._overdue.take(self._cluster.now):
            self._touch(device)
            for call in reversed(list(device.local)):
                self._return_local(device, call)
            self._freed = True

    def _return_local(self, device: DeviceState, call: Call) -> None:
        self._take_local(device, call)
        call.state = WAITING
        call.device = None
        self._queue.put_back(call)
        self._cluster.note_orphan(call.owner)

    def _after_loss(self, device: DeviceState, owner: FunctionState) -> None:
        self._next_local(device)
        if owner.removed:
            self._forget_if_done(owner)
        self._freed = True

    def _measured(self, event: m.Measured) -> None:
        found = self._resident(event)
        if found is None or not is_size(event.occupation):
            self.ignored["Measured"] += 1
            return
        device, model = found
        self._touch(device)
        self._touch(model.owner)
        costs = model.owner.costs(device.kind)
        peak, charged, limit = event.occupation, model.memory, model.limit
        if event.out_of_memory and costs is not None and limit <= costs.occupation:
            peak = max(peak, limit)  # it needs more than it had; one that was lent memory may have asked for anything
        if peak:
            wanted = min(memory.reservation(peak), device.device.memory)
            if costs is not None and self._learn:
                if costs.learn_size(wanted):
                    self._profile_changed(model.owner, device.kind)
                    self._freed = True
                wanted = min(costs.occupation, device.device.memory)
            self._out += self._lending.resize(device, model, max(wanted, model.owner.declared.floor))
        elastic = model.owner.declared.elastic
        if self._learn and event.out_of_memory and elastic:
            leaving = self._lending.outgrown(device, model)
            self._leave_for_others(device, leaving)
            self._out += [m.Evict(each.owner.id, device.id, each.copy) for each in leaving]
        if self._learn and (event.out_of_memory or (model.limit > limit and elastic)):
            self._out += self._lending.lend(device, model)
        if (model.memory, model.limit) != (charged, limit):
            self._cluster.asked = None
            self._freed = True

    def _resized(self, event: m.Resized) -> None:
        found = self._resident(event)
        if found is None:
            self.ignored["Resized"] += 1
        elif memory.answered(*found, event.memory):
            self._touch(found[0])
            self._cluster.asked = None
            self._freed = True

    def _profile_changed(self, owner: FunctionState, kind: str) -> None:
        owner.fits_as_of = -1
        self._learnt[(owner.id, kind)] = None

    # --- devices and functions ----------------------------------------------------------------------------------------

    def _device_joined(self, event: m.DeviceJoined) -> None:
        known = self._devices.get(event.device.id)
        if event.snapshot is not None:
            self._device_came_back(event.device, event.snapshot, known)
        else:
            if known is not None:
                self._leave(known)  # a node that came back before its absence was noticed: it holds nothing any more
            self._touch(self._cluster.join(event.device))
        self._freed = True

    def _device_left(self, event: m.DeviceLeft) -> None:
        device = self._devices.get(event.device)
        if device is None:
            self.ignored["DeviceLeft"] += 1
            return
        self._leave(device)
        self._freed = True

    def _device_drained(self, event: m.DeviceDrained) -> None:
        device = self._devices.get(event.device)
        if device is None or device.closed == event.drain:
            self.ignored["DeviceDrained"] += 1
            return
        device.closed = event.drain
        self._touch(device)
        self._freed = True
        if not event.drain:
            self._cluster.constrained -= 1
            if not device.busy:
                self._cluster.set_idle(device)
            return
        self._cluster.constrained += 1
        for call in list(device.local):
            self._return_local(device, call)
        for model in list(device.models):
            owner = model.owner
            if model in owner.draining:
                pass
            elif model.pinned:
                owner.draining[model] = owner.drop(model)
                self._cluster.note_orphan(owner)
                if not owner.exclusive and owner.queue.calls and not owner.active:
                    self._homeless[owner.id] = owner
            else:
                self._evict(device, model)
            self._balance(owner)
        if device.idle_key is not None:
            self._cluster.set_busy(device)

    def _leave(self, device: DeviceState) -> None:
        owners = [model.owner for model in device.models]
        for call in [each for each in self._calls.values() if each.device is device and each.state == RUNNING]:
            self._end(call)
        for model in list(device.models):
            self._drop(device, model)
        self._cluster.leave(device)
        self._forget_doc(device, docs.key_of(device))
        for owner in owners:
            if owner.removed:
                self._forget_if_done(owner)

    def _forget_doc(self, whose: DeviceState | FunctionState, key: str) -> None:
        if whose.touched:
            self._touched.remove(whose)
            whose.touched = False
        self._gone[key] = None
        if len(self._gone) > _MAX_GONE:
            del self._gone[next(iter(self._gone))]

    def _function_deployed(self, event: m.FunctionDeployed) -> None:
        owner = self._functions.get(event.function.id)
        if owner is None:
            owner = FunctionState(event.function)
            self._functions[owner.id] = owner
            self._cluster.constrained += bool(owner.constraints)
        else:
            owner.deploy(event.function)
            if not owner.exclusive:
                self._serve_fifo(owner)
        self._balance(owner)

    def _function_removed(self, event: m.FunctionRemoved) -> None:
        owner = self._functions.get(event.function)
        if owner is None:
            self.ignored["FunctionRemoved"] += 1
            return
        self._touch(owner)
        owner.removed = True
        owner.min_copies = 0
        owner.scale(None)
        self._note_lack(owner)
        if not event.drain:
            self._reject_waiting(owner, "removed", f"function {owner.id} was removed")
            for call in self._calls.values():
                if call.owner is owner and not call.aborted:
                    call.aborted = True
                    assert call.device is not None
                    self._touch(call.device)
                    self._out.append(m.Abort(call.id, call.device.id))
        self._forget_if_done(owner)
        self._freed = True

    def _reject_waiting(self, owner: FunctionState, code: str, message: str) -> None:
        for call in [each for each in self._calls.values() if each.owner is owner and each.state != RUNNING]:
            self._give_up(call)
            self._out.append(m.Reject(call.id, code, message))

    def _forget_if_done(self, owner: FunctionState) -> None:
        """Evict a removed function everywhere once none of its calls waits or runs."""
        if owner.waiting or owner.running or self._functions.get(owner.id) is not owner:
            return
        for model, device in [*owner.active.items(), *owner.draining.items()]:
            self._evict(device, model)
        del self._functions[owner.id]
        self._forget_doc(owner, docs.key_of(owner))
        self._cluster.constrained -= bool(owner.constraints)
        self._homeless.pop(owner.id, None)
        self._surplus.pop(owner.id, None)
        self._freed = True

    # --- taking over --------------------------------------------------------------------------------------------------

    def _restored(self, event: m.Restored) -> None:
        if self._left is not None or self._devices or self._calls:
            self.ignored["Restored"] += 1
            return
        self._left = _Left(event, self._cluster.now)
        self._handlers = self._listen

    def _defer(self, event: m.Event) -> None:
        assert self._left is not None
        self._left.events.append((self._cluster.now, event))

    def _serving(self, _event: m.Serving) -> None:
        left = self._left
        if left is None:
            self.ignored["Serving"] += 1
            return
        self._left = None
        self._handlers = self._serve
        now = self._cluster.now
        newest = left.event.engine
        if newest is not None:
            self._lease = newest.lease
            self._queue.restore(newest.next_number, newest.ends)
            self._cluster.joined = newest.joined
            since = left.since(newest)
            self._look_at = None if newest.look_in_s is None else since + newest.look_in_s
            if newest.reserved_in_s is not None:
                self._cluster.reserved_until = since + newest.reserved_in_s
            first = newest.first_call_age_s
            self._cluster.restore_demand(
                Demand(None if first is None else since - first, newest.offered_s, since - newest.offered_age_s)
            )
        functions = self._restore_functions(left)
        waiting = self._restore_calls(left)
        changed = self._restore_devices(left, waiting)
        for doc, owner in functions:
            docs.restore_order(owner, doc)
        for call in sorted(waiting.values(), key=lambda each: each.number):
            # A call with a count of its own came back from a device before: see `queue`.
            self._wait_again(call)
        changed |= self._restore_wishes(left, functions)
        for device in list(self._devices.values()):
            if not device.busy and device.local:
                changed = True
            self._next_local(device)
        for device in self._devices.values():
            self._touch(device)
        for owner in self._functions.values():
            self._touch(owner)
        # What came meanwhile: first the calls that nobody here knew, by age, as if they had come in that order.
        aged = [(at, each) for at, each in left.events if isinstance(each, m.Arrived) and each.age_s]
        aged.sort(key=lambda each: each[0] - each[1].age_s)
        for at, arrived in aged:
            if arrived.call not in self._calls or self._calls[arrived.call].state == RUNNING:
                changed = True
                self._arrived(replace(arrived, age_s=arrived.age_s + now - at))
        joined = {each.device.id: at for at, (_, each) in enumerate(left.events) if isinstance(each, m.DeviceJoined)}
        for at_event, (_, each) in enumerate(left.events):
            if isinstance(each, m.DeviceJoined) or (isinstance(each, m.Arrived) and each.age_s):
                continue
            if at_event < joined.get(getattr(each, "device", DeviceId("")), -1):
                continue  # a fact that the snapshot has
            changed = True
            self._serve[type(each)](each)
        for owner in list(self._functions.values()):
            if owner.removed:
                self._forget_if_done(owner)
        # If all is as it was, its predecessor would do nothing now either.
        self._freed = changed

    def _restore_functions(self, left: "_Left") -> list[tuple[FunctionDoc, FunctionState]]:
        restored = []
        for doc in left.event.functions:
            owner = self._functions.get(doc.function.id)
            if owner is None:
                # Taken away meanwhile, or before: it serves what it still has, and goes.
                self._function_deployed(m.FunctionDeployed(doc.function))
                owner = self._functions[doc.function.id]
                owner.removed = True
                owner.min_copies = 0
            docs.restore_function(owner, doc, left.since(doc))
            if owner.removed:
                owner.scale(None)
            restored.append((doc, owner))
        return restored

    def _restore_calls(self, left: "_Left") -> dict[CallId, Call]:
        """The calls that waited in the older engine's queues, as far as they are known to wait still."""
        again = {each.call: each for _, each in left.events if isinstance(each, m.Arrived)}
        known = [] if left.event.engine is None else [(each, left.event.engine) for each in left.event.engine.waiting]
        known += [(each, doc) for doc in left.event.devices for each in doc.local]  # type: ignore[misc]
        waiting: dict[CallId, Call] = {}
        for each, doc in known:
            since = left.since(doc)
            owner = self._functions.get(each.function)
            if owner is None:
                continue
            if not left.event.queued and each.call not in again:
                self._remembered[each.call] = (each, since)
                continue
            call = docs.restored_call(each, owner, since)
            if each.call in again and again[each.call].deadline is not None:
                call.deadline = again[each.call].deadline
            waiting[each.call] = call
        return waiting

    def _restore_devices(self, left: "_Left", waiting: dict[CallId, Call]) -> bool:
        """Take the devices over that have come; those of *waiting* that run or wait on one of them leave it."""
        known = {doc.device.id: doc for doc in left.event.devices}
        joined: dict[DeviceId, tuple[Seconds, m.DeviceJoined]] = {}
        for at, event in left.events:
            if isinstance(event, m.DeviceLeft):
                joined.pop(event.device, None)
            elif isinstance(event, m.DeviceJoined):
                joined[event.device.id] = (at, event)
        changed = False
        last = len(known) + max((doc.order for doc in known.values()), default=0)
        order = {name: known[name].order if name in known else last for name in joined}
        for name in sorted(joined, key=lambda each: order[each]):
            at, event = joined[name]
            doc = known.pop(name, None)
            calls: dict[CallId, Call] = {}
            local: list[Call] = []
            since = at
            if doc is not None:
                since = left.since(doc)
                for each in doc.running:
                    owner = self._functions.get(each.function)
                    if owner is not None:
                        calls[each.call] = docs.restored_call(each, owner, since)
                        self._remembered[each.call] = (each, since)
                local = [waiting.pop(each.call) for each in doc.local if each.call in waiting]
            snapshot = event.snapshot or DeviceSnapshot(event.device)
            changed |= self._adopt(event.device, snapshot, at, doc, since, calls, local, waiting)
        for name, doc in known.items():
            self._gone[docs.key_of_device(name)] = None
            for each in doc.running:
                self._remembered[each.call] = (each, left.since(doc))
            changed = True
        return changed

    def _wait_again(self, call: Call) -> None:
        owner = call.owner
        self._calls[call.id] = call
        call.state = WAITING
        call.device = None
        owner.waiting += 1
        self._waiting += 1
        self._join_queue(call)
        if call.deadline is not None:
            self._watch(call)

    def _restore_wishes(self, left: "_Left", functions: list[tuple[FunctionDoc, FunctionState]]) -> bool:
        """Who lacks copies, has too many, or waits without one: in the old order, then those that are so only now."""
        engine = left.event.engine
        known = {doc.function.id: doc for doc, _ in functions}
        changed = False
        for begun in (self._cluster.orphaned, self._short, self._surplus, self._homeless):
            begun.clear()  # in the order in which things were restored; what is right follows
        for name in () if engine is None else engine.orphaned:
            if (owner := self._functions.get(name)) is not None:
                self._cluster.orphaned[name] = owner
        for names, wishes, holds in (
            (() if engine is None else engine.short, self._short, self._lacks),
            (() if engine is None else engine.surplus, self._surplus, _has_surplus),
            (() if engine is None else engine.homeless, self._homeless, _is_homeless),
        ):
            for name in names:
                if (owner := self._functions.get(name)) is not None:
                    wishes[name] = owner
            for name, owner in self._functions.items():
                if name not in wishes and holds(owner):
                    # Else it was known, and is left as it was: a surplus that nobody was told of, a load given up.
                    doc = known.get(name)
                    if wishes is self._homeless or doc is None or docs.lost_copies(owner, doc):
                        wishes[name] = owner
                        changed = True
        for owner in self._functions.values():
            self._cluster.note_orphan(owner)
            if self._is_held_back(owner):
                self._note_lack(owner)
        return changed

    def _lacks(self, owner: FunctionState) -> bool:
        return owner.copies < owner.target and not owner.removed and not self._is_held_back(owner)

    def _device_came_back(self, device: Device, snapshot: DeviceSnapshot, known: DeviceState | None) -> None:
        """A node tells what one of its devices has; *known* is what was thought of it, if it was not away for long."""
        now = self._cluster.now
        doc: DeviceDoc | None = None
        calls: dict[CallId, Call] = {}
        local: list[Call] = []
        if known is not None:
            doc = replace(docs.device_doc(known, now), order=self._cluster.joined)
            local = list(known.local)
            for call in local:
                self._take_local(known, call)
                del self._calls[call.id]
                call.owner.waiting -= 1
                self._waiting -= 1
            for call in [each for each in self._calls.values() if each.device is known and each.state == RUNNING]:
                self._end(call)
                calls[call.id] = call
            self._leave(known)
        waiting: dict[CallId, Call] = {}
        self._adopt(device, snapshot, now, doc, now, calls, local, waiting)
        for call in waiting.values():
            self._wait_again(call)
        # Their leases may be on their way: if a node refuses one, its call waits again.
        for call in calls.values():
            self._lost[call.id] = call
        self._next_local(self._devices[device.id])
        for owner in {each.function: self._functions.get(each.function) for each in snapshot.residents}.values():
            if owner is not None:
                self._balance(owner)
                if owner.removed:
                    self._forget_if_done(owner)
                elif not owner.exclusive:
                    self._serve_fifo(owner)

    def _adopt(
        self,
        device: Device,
        snapshot: DeviceSnapshot,
        at: Seconds,
        doc: DeviceDoc | None,
        since: Seconds,
        calls: dict[CallId, Call],
        local: list[Call],
        waiting: dict[CallId, Call],
    ) -> bool:
        """
        Take over a device that has and runs what *snapshot* says, which was made at *at*.

        :param doc: what the scheduler knew of it, made at *since*
        :param calls: those that it knew to run there; those that do not are left in it
        :param local: its local queue; who cannot wait there goes to *waiting*
        :param waiting: calls that wait elsewhere; those that turn out to run here are taken out
        :return: whether something is not as *doc* has it
        """
        cluster = self._cluster
        taken = {each.order for each in self._devices.values()}
        fresh = doc is None or doc.order in taken or device.id in self._devices
        state = cluster.attach(device, None if fresh or doc is None else doc.order)
        self._touch(state)
        if doc is not None:
            state.starts, state.served, state.hits = doc.starts, doc.served, doc.hits
            state.misses, state.evictions, state.busy_s = doc.misses, doc.evictions, doc.busy_s
        changed = self._adopt_residents(state, snapshot, at, doc, since)
        if doc is not None and doc.closed:
            state.closed = True
            cluster.constrained += 1
        exclusive: list[tuple[Call, RunningCall]] = []
        for each in snapshot.running:
            model = state.models.models.get(copy_id(each.function, each.copy))
            if model is None:
                continue  # it is on its way out, and its calls with it
            call = self._adopt_call(state, model, each, at, calls, waiting)
            if call.owner.exclusive:
                exclusive.append((call, each))
        if doc is not None and calls:
            changed = True
        preload = None if doc is None or doc.preload is None else state.models.models.get(doc.preload)
        if exclusive:
            has = doc.running[0].call if doc is not None and doc.running else None
            exclusive.sort(key=lambda each: (each[0].id != has, not each[1].begun, -each[1].age_s))
            first, running = exclusive[0]
            state.run = first
            state.others = [call for call, _ in exclusive[1:]]
            state.busy_since, state.free_at = at - running.age_s, self._estimate(first, running, at)
            if doc is not None and first.id == has:
                first.estimate_s = doc.running[0].estimate_s
                state.busy_since, state.free_at = since - doc.busy_for_s, since + doc.free_in_s
        elif preload is not None and preload.loading and doc is not None:
            state.preload = preload
            state.busy_since, state.free_at = since - doc.busy_for_s, since + doc.free_in_s
        if doc is not None and state.busy != (doc.status != "idle"):
            changed = True
        waits = [call for call in local if call.function in state.models.models]
        for call in local:
            if call not in waits:
                changed = True
                waiting[call.id] = call
        for call in waits:
            call.state, call.device = LOCAL, state
            self._calls[call.id] = call
            call.owner.waiting += 1
            self._waiting += 1
            state.local.append(call)
            state.local_s += call.estimate_s
            state.models.models[call.function].queued += 1
            if call.deadline is not None:
                self._watch(call)
        if doc is not None and len(waits) == len(doc.local):
            state.local_s = doc.local_s
        self._overdue.note(state)
        return changed

    def _adopt_residents(
        self, state: DeviceState, snapshot: DeviceSnapshot, at: Seconds, doc: DeviceDoc | None, since: Seconds
    ) -> bool:
        """List what *state* has; evict what is of nobody, or too much. Return whether that is not as *doc* has it."""
        known = {} if doc is None else {copy_id(each.function, each.copy): each for each in doc.residents}
        running = Counter(copy_id(each.function, each.copy) for each in snapshot.running)
        over = sum(each.memory for each in snapshot.residents) - state.device.memory
        found = []
        for each in snapshot.residents:
            owner = self._functions.get(each.function)
            key = copy_id(each.function, each.copy)
            excess = over > 0 and not running[key]
            if (
                owner is None
                or excess
                or owner.digest != each.digest
                or owner.costs(state.kind) is None
                or not owner.allows(state)
                or (owner.exclusive and each.copy)
                or each.memory > state.models.unpromised
                or key in state.models.models
            ):
                over -= each.memory
                self._out.append(m.Evict(each.function, state.id, each.copy))
                continue
            costs = owner.costs(state.kind)
            assert costs is not None
            before = known.get(key)
            charged = min(each.memory, costs.occupation if before is None else before.memory)
            model = Resident(owner, charged, at - each.idle_s, at - each.load_age_s + costs.load_s, each.copy)
            model.limit = each.memory
            model.loading = each.loading
            model.running = running[key]
            model.asked = ANSWERED if model.running and before is not None and before.asked else NOT_ASKED
            if before is not None and before.loading == each.loading:
                model.ready_at = since + before.ready_in_s
            state.models.insert(model)
            self._lending.note(state, model)
            self._touch(owner)
            owner.loading += each.loading
            if (before is not None and before.draining) or (doc is not None and doc.closed):
                owner.draining[model] = state
            else:
                owner.add(model, state)
            found.append((key, each.memory, each.loading, model.running))
        return found != [
            (copy_id(each.function, each.copy), each.limit or each.memory, each.loading, each.running)
            for each in known.values()
        ]

    def _adopt_call(
        self,
        state: DeviceState,
        model: Model,
        running: RunningCall,
        at: Seconds,
        calls: dict[CallId, Call],
        waiting: dict[CallId, Call],
    ) -> Call:
        """*running* runs on *model*, whoever let it. `model.running` counts it already."""
        owner = model.owner
        other = self._calls.get(running.call)
        waited = waiting.pop(running.call, None)
        call = calls.pop(running.call, None) or waited
        regrant = twin = False
        if other is not None and other.state != RUNNING and not running.begun:
            # Its gateway asked again, since it had not heard of this lease: it gets it now.
            call, regrant = other, True
            self._unqueue(other)
        elif other is not None:
            # It runs elsewhere, or its gateway has given this one up: here it is to stop.
            twin, call = True, None
        if call is None:
            # In front of all that wait here: it was started before they were. In front of the others as it came.
            self._adopted += 1
            call = Call(running.call, owner.id, owner, self._adopted - _MAX_ADOPTED, at - running.age_s, None)
            call.passes = 0
            call.aborted = running.abandoned
        if twin:
            call.id = _twin(running.call, state.id)
            if not call.aborted:
                call.aborted = True
                self._out.append(m.Abort(running.call, state.id))
        elif call.aborted and not running.abandoned:
            self._out.append(m.Abort(running.call, state.id))  # the node has not heard of it
        call.state, call.device, call.model, call.cold = RUNNING, state, model, running.cold
        if running.begun:
            call.why = _TAKEN_OVER
        self._calls[call.id] = call
        owner.running += 1
        if regrant:
            self._grant_again(call, state, model)
        return call

    def _unqueue(self, call: Call) -> None:
        """Take a waiting call from wherever it waits, and off the books."""
        owner = call.owner
        if call.state == LOCAL:
            assert call.device is not None
            self._take_local(call.device, call)
        else:
            (self._queue if owner.exclusive else owner.queue).remove(call)
            if not owner.queue.calls:
                self._homeless.pop(owner.id, None)
        owner.waiting -= 1
        self._waiting -= 1
        del self._calls[call.id]

    def _grant_again(self, call: Call, device: DeviceState, model: Model) -> None:
        """A call that has its place already, and whose gateway has not heard of it."""
        self._lease = number = self._lease + 1
        owner = call.owner
        victims = tuple(copy_id(function, copy) for function, copy in call.victims)
        lease = m.Lease(
            self.epoch, number, call.id, owner.id, owner.digest, device.id, call.cold, model.memory, victims,
            copy=model.copy, within_s=None if call.ends is None else call.ends - self._cluster.now,
        )  # fmt: skip
        self._out.append(m.Start(lease))

    def _estimate(self, call: Call, running: RunningCall, at: Seconds) -> Seconds:
        """When a call of a model function should end that was not started by this engine."""
        model, device = call.model, call.device
        assert model is not None
        assert device is not None
        costs = call.owner.costs(device.kind)
        call.estimate_s = 0.0 if costs is None else costs.estimate_s(call.size)
        if running.begun:
            return at - running.age_s + call.estimate_s
        return max(at, model.ready_at if model.loading else at) + call.estimate_s

    def _came_again(self, event: m.Arrived) -> bool:
        """A gateway says that a call still waits. True: it is known here, and where it is has been said or will be."""
        call = self._calls.get(event.call)
        if call is None:
            return False
        if call.state != RUNNING:
            if event.deadline is not None and event.deadline != call.deadline:
                call.deadline = event.deadline
                self._watch(call)
        elif call.why is _TAKEN_OVER or call.aborted:
            assert call.device is not None
            runs = f"call {call.id} has begun on {call.device.id} already, and is not run twice"
            self._out.append(m.Reject(call.id, "refused", runs))
        else:
            assert call.device is not None
            assert call.model is not None
            self._grant_again(call, call.device, call.model)
        return True

    def _back_date(self, call: Call, age_s: Seconds) -> None:
        """Give a call that waited elsewhere its place: what it had, or in front of those that came here later."""
        remembered = self._remembered.pop(call.id, None)
        if remembered is not None:
            doc, since = remembered
            call.number = doc.number
            call.arrived_at = since - doc.age_s
            call.refusals = doc.refusals
            call.passes = doc.passes or 0
            return
        call.arrived_at -= age_s
        number = self._queue.next_number
        for each in reversed(self._calls.values()):  # those that came last are the last here, but for a few
            if each.state != RUNNING:
                if each.arrived_at <= call.arrived_at:
                    break
                number = min(number, each.number)
        call.number = number
        if number == self._queue.next_number:
            self._queue.next_number += 1
        else:
            call.passes = 0


_Started: TypeAlias = "tuple[Seconds, Call, DeviceId, bool, tuple[CopyId, ...], bool, policies.Why | None]"
"""When, which call, where, a miss, its victims, from a local queue, why."""


class _Left:
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


def _has_surplus(owner: FunctionState) -> bool:
    return bool(owner.surplus or owner.draining)


def _is_homeless(owner: FunctionState) -> bool:
    return bool(not owner.exclusive and owner.queue.calls and not owner.active)


def _twin(call: CallId, device: DeviceId) -> CallId:
    """What a call goes by on *device* that is known to wait or to run elsewhere as well."""
    return CallId(f"{call} on {device}")


def _options(why: policies.Why | None) -> tuple[Considered, ...]:
    return () if why is None else tuple(Considered(*each) for each in why.options)


def _busy(device: DeviceState) -> str:
    if device.run is not None:
        return f"device {device.id} is busy with call {device.run.id}"
    return f"device {device.id} is busy with a load"


def _dispensable(owner: FunctionState) -> list[Model]:
    """
    Return the copies that may go, the first to go first: those that run the fewest calls, of these where a device has
    most of them, then the one that was used longest ago.

    A loading copy is looked at again when it is loaded: it may have been promised to a call that is not here.
    """
    ready = [(model, device) for model, device in owner.active.items() if not model.loading]
    ready.sort(key=lambda each: (each[0].running + each[0].queued, each[0].last_used, each[1].order))
    left = Counter(device for _, device in ready)
    ranked = []
    for at, (model, device) in enumerate(ready):
        ranked.append((model.running + model.queued, -left[device], at, model))
        left[device] -= 1
    ranked.sort(key=lambda each: each[:3])
    return [each[3] for each in ranked]


def _device_status(device: DeviceState, now: Seconds) -> DeviceStatus:
    return DeviceStatus(
        device=device.device,
        used=device.device.memory - device.models.free - device.models.held,
        busy=device.busy,
        resident=tuple(
            ResidentStatus(
                function=each.owner.id,
                memory=each.memory,
                running=each.running,
                loading=each.loading,
                pinned=each.pinned or each.owner.copies <= each.owner.min_copies,
                last_used=each.last_used,
                draining=each in each.owner.draining,
                copy=each.copy,
                limit=each.limit,
            )
            for each in device.models
        ),
        local_queue=len(device.local),
        served=device.served,
        hits=device.hits,
        misses=device.misses,
        evictions=device.evictions,
        estimated_finish_s=device.left_s(now),
        busy_s=device.busy_s + (now - device.busy_since if device.busy else 0.0),
    )
