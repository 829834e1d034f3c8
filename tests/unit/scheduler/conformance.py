"""
A small cluster that breaks, for tests of any policy: `Rig` drives an engine with random work, and checks each command.

Nodes load and serve as the profiles say, give or take; some loads fail, workers end, nodes refuse hits, callers leave,
devices leave, are drained and come back. All of it follows from the seed and from what the engine commands.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import combinations, product

from gpufaas_core import messages as m
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.model import (
    CallId,
    CopyId,
    Device,
    DeviceId,
    Function,
    FunctionId,
    Need,
    NodeId,
    OrderId,
    Part,
    Profile,
    copy_id,
    copy_of,
    node_of,
)
from gpufaas_scheduler.journal import Header
from gpufaas_scheduler.policies import POLICIES, make_policy, policy_spec
from gpufaas_scheduler.policies.registry import FILLS
from gpufaas_scheduler.roles import ORDER, PLACEMENT

PARKED = 4
"""What a parked copy holds of its device."""
HOST = 3
"""The size of the host tier of each node, in functions."""
NEEDS = (
    Need(),
    Need(slots=2),
    Need(100, "time"),
    Need(30, "spatial"),
    Need(50, "spatial", batch_max=3),
    Need(25, "share", slots=2),
    Need(0, slots=3),
    Need(batch_max=4, batch_wait_s=0.7),
    Need(batch_max=6, latency_goal_s=3.0, batch_adaptive=True),
    Need(100, "auto", slots=2, batch_max=3),
    Need(100, "auto", slots=3, latency_goal_s=6.0),
    Need(60, "auto", batch_max=4, batch_wait_s=0.3, latency_goal_s=9.0),
)
"""Of the functions that a rig deploys, in turn."""


def specs() -> list[str]:
    """Return every policy, and every pair of what fills two roles, as far as they can be combined."""
    found = list(POLICIES)
    for (one, ones), (two, twos) in combinations(FILLS.items(), 2):
        for first, second in product(ones, twos):
            roles = {ORDER: "o3", PLACEMENT: "locality", one: first, two: second}
            text = "+".join(f"{role}={name}" for role, name in sorted(roles.items()))
            try:
                make_policy(text)
            except InvalidSpec:
                continue
            found.append(text)
    found.append("order=o3+placement=locality+replacement=lru:park=true")
    return list(dict.fromkeys(found))


@dataclass(eq=False)
class Worker:
    """One copy on its node."""

    function: FunctionId
    device: DeviceId
    number: int
    memory: int
    share: int = 0
    began_at: float = 0.0
    used_at: float = 0.0
    tier: str = ""
    ready: bool = False
    grants: dict[int, set[CallId]] = field(default_factory=dict)
    takes: dict[int, int] = field(default_factory=dict)
    """What each grant counts for, as the engine decided when it began."""


class Rig:
    """See module. `events` and `commands` are all that the engine was told, and what it said."""

    def __init__(self, spec: str, seed: int, *, functions: int = 12, devices: int = 4, breaks: bool = True) -> None:
        self.rng = random.Random(seed)
        self.header = Header(policy=policy_spec(spec), learn=False)
        self.engine = self.header.engine()
        self.now = 0.0
        self.breaks = breaks
        self.events: list[tuple[m.Event, float]] = []
        self.commands: list[list[m.Command]] = []
        self.functions: dict[FunctionId, Function] = {}
        self.devices: dict[DeviceId, Device] = {}
        self.workers: dict[tuple[DeviceId, CopyId], Worker] = {}
        self.arrived: dict[CallId, float] = {}
        self.called: dict[CallId, FunctionId] = {}
        self.started: dict[CallId, float] = {}
        self.since: dict[CallId, float] = {}
        """When the call began where it runs."""
        self.running: dict[CallId, Worker] = {}
        self.ended: Counter[CallId] = Counter()
        """How often a call was answered."""
        self.answered: Callable[[FunctionId], None] = lambda _function: None
        """Told of each call that has finished, by its function."""
        self.grants: dict[CallId, m.Grant] = {}
        """Of the calls that run."""
        self.aborted: set[CallId] = set()
        self.drained: set[DeviceId] = set()
        self.staged: dict[NodeId, set[FunctionId]] = {}
        self.staging: dict[NodeId, set[FunctionId]] = {}
        self.parked: dict[tuple[DeviceId, CopyId], Worker] = {}
        """The engine was told of each, or will be: its `memory` is then what it holds of its device."""
        self.unparked: set[tuple[DeviceId, CopyId]] = set()
        """No longer parked, and the engine is about to hear of it."""
        self.woken = 0
        self._calendar: list[tuple[float, int, Callable[[], None]]] = []
        self._entries = 0
        for number in range(devices):
            self.join(number)
        for number in range(functions):
            load_s = self.rng.uniform(1.0, 4.0)
            profile = Profile(load_s, self.rng.uniform(0.3, 1.5), self.rng.randint(10, 40), loads={"host": load_s / 4})
            self.deploy(f"f{number}", NEEDS[number % len(NEEDS)], profile)

    # --- what the test does ---

    def provide(self, kind: str, order: OrderId) -> None:
        raise AssertionError(f"{kind} is ordered, and nobody offers it ({order})")

    def join(self, number: int) -> None:
        device = Device(DeviceId(f"n{number}/d"), "gpu", (60, 80, 100)[number % 3], host_memory=HOST, parks=number != 3)
        self.devices[device.id] = device
        self.tell(m.DeviceJoined(device))

    def deploy(self, name: str, need: Need, profile: Profile) -> None:
        number = len(self.functions)
        function = Function(
            FunctionId(name), name, need, {"*": profile}, task=("", "see", "read")[number % 3],
            accuracy=0.5 + number / 100, sheds=need.latency_goal_s is not None and need.sharing == "auto",
        )  # fmt: skip
        self.functions[function.id] = function
        self.tell(m.FunctionDeployed(function))

    def call(self, function: str) -> CallId:
        call = CallId(f"c{len(self.arrived)}")
        self.arrived[call], self.called[call] = self.now, FunctionId(function)
        self.tell(m.Arrived(call, FunctionId(function)))
        return call

    def work(self, calls: int, per_s: float) -> None:
        """Let calls of all functions arrive, some of them in bursts, while things break."""
        at = 0.0
        names = list(self.functions)
        for _ in range(calls):
            at += 0.0 if self.rng.random() < 0.2 else self.rng.expovariate(per_s)
            name = names[min(int(self.rng.expovariate(0.5)), len(names) - 1)]
            self._at(at, lambda name=name: self.call(name))  # type: ignore[misc]
            if self.breaks and self.rng.random() < 0.08:
                self._at(at, self._break)

    def until_rest(self, most_s: float = 5_000.0) -> None:
        """Let everything happen, and end: a policy that leaves a call waiting for ever fails here."""
        while self._calendar or self.engine.wake_at is not None:
            due = self._calendar[0][0] if self._calendar else float("inf")
            wake_at = self.engine.wake_at
            if wake_at is not None and wake_at <= due:
                self.now = max(self.now, wake_at)
                self.tell(m.Woken())
            else:
                self.now, _, happens = heappop(self._calendar)
                happens()
            assert self.now < most_s, f"these wait for ever: {self.open}"
        assert not self.open, f"these wait for ever: {self.open}"

    @property
    def open(self) -> list[CallId]:
        """The calls without an answer."""
        return [each for each in self.arrived if not self.ended[each]]

    def tell(self, event: m.Event) -> None:
        self.events.append((event, self.now))
        commands = self.engine.handle(event, self.now)
        self.commands.append(commands)
        for command in commands:
            self._obey(command)
        self._check()

    def _at(self, at: float, happens: Callable[[], None]) -> None:
        self._entries += 1
        heappush(self._calendar, (at, self._entries, happens))

    def _obey(self, command: m.Command) -> None:
        match command:
            case m.StartCall(grant):
                self._grant(grant)
            case m.LoadCopy():
                self._evict(command.victims, command.device, command.parked)
                self._load(command.function, command.parts[0], command.copy)
            case m.RejectCall(call, status=status):
                assert call in self.arrived
                assert status != 503 or self.functions[self.called[call]].sheds, "a call is shed that should wait"
                assert call not in self.running, "a call that runs is rejected"
                self.ended[call] += 1
            case m.Abort(call, device):
                self.aborted.add(call)
                self._at(self.now + 0.1, lambda: self._finish(call, device, ok=False))
            case m.EvictCopy(function, device, copy):
                self._evict((copy_id(function, copy),), device)
            case m.SetLimit(function, device, copy, share):
                self.workers[device, copy_id(function, copy)].share = share
            case m.Stage(function, node):
                self.staging.setdefault(node, set()).add(function)
                self._at(self.now + 1.0, lambda: self._stage(function, node))
            case m.SetLimit():
                pass
            case m.ProcureNodes(kind, order):
                self.provide(kind, order)
            case _:
                raise AssertionError(f"what is {command}?")

    def _evict(self, victims: tuple[CopyId, ...], device: DeviceId, parked: tuple[CopyId, ...] = ()) -> None:
        for key in [(device, each) for each in victims]:
            if key in self.parked:
                assert key[1] not in parked, "it is parked already"
                del self.parked[key]
                continue
            if key in self.unparked:
                continue
            worker = self.workers.pop(key)
            assert not worker.grants, "a victim runs calls"
            self._may_evict(worker)
            if key[1] in parked:
                assert self.devices[device].parks
                if self.breaks and self.rng.random() < 0.2:
                    self._unparked(worker)
                else:
                    self.parked[key], worker.memory = worker, 0
                    self._at(self.now + 0.1, lambda worker=worker: self._parked(worker))  # type: ignore[misc]

    def _may_evict(self, worker: Worker) -> None:
        """:raises AssertionError: it should have stayed"""

    def _parked(self, worker: Worker) -> None:
        key = worker.device, copy_id(worker.function, worker.number)
        if self.parked.get(key) is worker:
            worker.memory = PARKED
        if self.parked.get(key) is worker or worker in self.workers.values():
            self.tell(m.Parked(worker.function, worker.device, worker.number, PARKED))

    def _unparked(self, worker: Worker) -> None:
        key = worker.device, copy_id(worker.function, worker.number)
        self.unparked.add(key)
        self._at(self.now + 0.1, lambda: self._say_unparked(key))

    def _say_unparked(self, key: tuple[DeviceId, CopyId]) -> None:
        self.unparked.discard(key)
        function, number = copy_of(key[1])
        self.tell(m.Unparked(function, key[0], number, "it could not"))

    def _load(self, function: FunctionId, part: Part, number: int) -> Worker:
        device = part.device
        key = device, copy_id(function, number)
        assert key not in self.workers, "a number is used twice"
        worker = self.parked.pop(key, None)
        tier = "host" if function in self.staged.get(node_of(device), ()) else "disk"
        if worker is not None:
            worker.memory, worker.ready, tier = part.memory, False, "parked"
            self.woken += 1
        else:
            worker = Worker(function, device, number, part.memory)
        worker.share, worker.began_at, worker.used_at = part.share, self.now, self.now
        self.workers[key] = worker
        profile = self.functions[function].profile("gpu")
        load_s = profile.loads.get(tier, profile.load_s) * self.rng.uniform(0.8, 1.3)
        fails = self.breaks and self.rng.random() < 0.03
        self._at(self.now + load_s, lambda: self._loaded(worker, load_s, tier, fails))
        return worker

    def _stage(self, function: FunctionId, node: NodeId) -> None:
        """The node keeps the weights of three functions at most, and sometimes has no room for those it is to bring."""
        if all(node_of(each) != node for each in self.devices):
            return
        staged = self.staged.setdefault(node, set())
        self.staging[node].discard(function)
        assert function not in staged
        if self.breaks and self.rng.random() < 0.2:
            self.tell(m.Unstaged(node, function, "it has no room"))
            return
        staged.add(function)
        self.tell(m.Staged(node, function, 1))
        if len(staged) > HOST:
            leaves = self.rng.choice(sorted(staged))
            staged.remove(leaves)
            self.tell(m.Unstaged(node, leaves))

    def _grant(self, grant: m.Grant) -> None:
        key = grant.device, copy_id(grant.function, grant.copy)
        if grant.cold:
            self._evict(grant.victims, grant.device, grant.parked)
            worker = self._load(grant.function, grant.parts[0], grant.copy)
        else:
            worker = self.workers[key]
            assert worker.function == grant.function
        assert 1 <= len(grant.calls) <= self.functions[grant.function].need.batch_max
        assert grant.number not in worker.grants
        worker.grants[grant.number] = set(grant.calls)
        worker.takes[grant.number] = self._takes(worker, grant.call)
        worker.used_at = self.now
        for call in grant.calls:
            self.grants[call], self.since[call] = grant, self.now
            assert not self.ended[call], "a call that is over starts"
            assert call not in self.running, "a call runs twice"
            self.running[call] = worker
            self.started.setdefault(call, self.now)
        if not grant.cold and len(grant.calls) == 1 and self.breaks and self.rng.random() < 0.03:
            self._at(self.now + 0.01, lambda: self._refuse(grant.call, worker))
        elif worker.ready:
            self._serve(grant.calls, worker)

    def _serve(self, calls: tuple[CallId, ...], worker: Worker) -> None:
        mean_s = self.functions[worker.function].profile("gpu").service_s
        for call in calls:
            service_s = mean_s * self.rng.choice((0.5, 1.0, 1.0, 4.0))
            self._at(self.now + service_s, lambda call=call: self._finish(call, worker.device))  # type: ignore[misc]

    def _loaded(self, worker: Worker, load_s: float, tier: str, fails: bool) -> None:
        if not self._lives(worker):
            return
        if fails:
            self._gone(worker)
            self.tell(m.CopyFailed(worker.function, worker.device, "it broke", copy=worker.number))
            return
        worker.ready, worker.tier = True, tier
        for calls in list(worker.grants.values()):
            self._serve(tuple(sorted(calls)), worker)
        self.tell(m.Loaded(worker.function, worker.device, load_s, worker.memory, worker.number, tier))

    def _lives(self, worker: Worker) -> bool:
        return self.workers.get((worker.device, copy_id(worker.function, worker.number))) is worker

    def _gone(self, worker: Worker) -> None:
        """The node has answered its calls."""
        del self.workers[worker.device, copy_id(worker.function, worker.number)]
        for calls in list(worker.grants.values()):
            for call in list(calls):
                self._end(call)
                self.ended[call] += 1

    def _end(self, call: CallId) -> None:
        worker = self.running.pop(call)
        self.aborted.discard(call)
        for number, calls in list(worker.grants.items()):
            calls.discard(call)
            if not calls:
                del worker.grants[number], worker.takes[number]

    def _finish(self, call: CallId, device: DeviceId, *, ok: bool = True) -> None:
        worker = self.running.get(call)
        if worker is None or worker.device != device:
            return
        self._end(call)
        self.ended[call] = 1
        self.tell(m.Finished(call, device, 1.0, ok))
        self.answered(worker.function)

    def _refuse(self, call: CallId, worker: Worker) -> None:
        if self.running.get(call) is worker:
            self.ended[call] += call in self.aborted
            self._end(call)
            self.tell(m.NodeRefused(call, worker.device, "it did not like it"))

    def _break(self) -> None:
        rng, kind = self.rng, self.rng.randrange(5)
        if kind == 0 and self.open:
            call = rng.choice(self.open)
            if call not in self.running:
                self.ended[call] += 1
            self.tell(m.CallerLeft(call))
        elif kind == 1 and any(each.ready for each in self.workers.values()):
            worker = rng.choice([each for each in self.workers.values() if each.ready])
            self._gone(worker)
            self.tell(m.WorkerExited(worker.function, worker.device, "it crashed", worker.number))
        elif kind == 2 and len(self.devices) > 2:
            device = rng.choice(list(self.devices))
            del self.devices[device]
            for worker in [each for each in self.workers.values() if each.device == device]:
                self._gone(worker)
            self.parked = {key: each for key, each in self.parked.items() if key[0] != device}
            self.staged.pop(node_of(device), None)
            self.drained.discard(device)
            self.tell(m.DeviceLeft(device, "gone"))
            self._at(self.now + 5.0, lambda: self.join(int(device[1:-2])))
        elif kind == 3 and len(self.devices) > 2:
            device = rng.choice(list(self.devices))
            self._drain(device)
            self._at(self.now + 5.0, lambda: self._drain(device, drain=False))
        elif kind == 4 and self.parked:
            key = rng.choice(list(self.parked))
            self._unparked(self.parked.pop(key))

    def _drain(self, device: DeviceId, *, drain: bool = True) -> None:
        (self.drained.add if drain else self.drained.discard)(device)
        self.tell(m.DeviceDrained(device, drain))

    # --- what always holds ---

    def _takes(self, worker: Worker, _call: CallId) -> int:
        """Return what the grant of a call counts for that runs there."""
        return 0 if worker.share else self.functions[worker.function].need.reserved

    def _check(self) -> None:
        memory: Counter[DeviceId] = Counter()
        compute: Counter[DeviceId] = Counter()
        for worker in self.parked.values():
            memory[worker.device] += worker.memory
        for worker in self.workers.values():
            need = self.functions[worker.function].need
            memory[worker.device] += worker.memory
            once = need.sharing != "spatial"
            takes = worker.takes.values()
            compute[worker.device] += worker.share + (max(takes, default=0) if once else sum(takes))
            assert len(worker.grants) <= need.slots, (
                f"{worker} runs more grants than it has slots: {self.events[-1]}, {self.commands[-1]}"
            )
        for device, used in memory.items():
            assert used <= self.devices[device].memory, f"{device} has {used} bytes"
            assert compute[device] <= self.devices[device].compute, f"{device} computes with {compute[device]} %"
        for refusal in self.engine.refusals:
            assert not _is_unknown(refusal.reason), f"an action on what is not there: {refusal}"


def _is_unknown(reason: str) -> bool:
    return reason.startswith(("there is no ", "no function", "no model function")) or "is not an action" in reason
