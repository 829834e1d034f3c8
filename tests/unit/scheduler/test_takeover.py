"""
An engine that is made from what another one left, and from what the nodes have, goes on as that one would have.

The nodes of these tests are the truth: they hear the commands of the first engine, and their snapshots are made from
what they did. Times are binary fractions, so that an age is exact; the second engine's clock shows another time.
"""

import random
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.scheduler.indexes import check_indexes
from tests.unit.scheduler.world import limited, state_of

from gpufaas_cache_manager.replacement import CostAware, Lru, ReplacementOptions
from gpufaas_core import messages as m
from gpufaas_core.model import CallId, Device, DeviceId, Function, FunctionId, Need, NodeId, Part, Profile, copy_id
from gpufaas_core.snapshot import (
    DeviceDoc,
    DeviceSnapshot,
    EngineDoc,
    FunctionDoc,
    NodeSnapshot,
    ParkedSnapshot,
    ResidentSnapshot,
    RunningCall,
    StagedWeights,
)
from gpufaas_scheduler.engine import Engine
from gpufaas_scheduler.policies import make_policy
from gpufaas_scheduler.world.call_state import WAITING

SHIFT = 4096.0
"""How much later it is on the second engine's clock."""


NEEDS = (
    Need(), Need(50, "spatial"), Need(100, "time"), Need(30, "share", slots=2), Need(slots=2), Need(batch_max=3),
    Need(50, "spatial", batch_max=2, batch_wait_s=0.5),
)  # fmt: skip
"""Of model functions: those of a function stay the same when it is deployed again."""

FAR = 1e6
"""Seconds. What happens so late is as if it never happened."""


def size_of(call: CallId) -> float:
    """Of its request; one in three is not known."""
    return float(sum(map(ord, call)) % 3)


@dataclass
class Worker:
    function: FunctionId
    copy: int
    memory: int
    used_at: float
    began_at: float
    loading: bool = True
    tier: str = ""
    silent: bool = False


@dataclass
class Running:
    call: CallId
    grant: m.Grant
    since: float
    abandoned: bool = False


@dataclass
class Nodes:
    """What is in the devices' memory and runs there, from commands and facts alone."""

    devices: dict[DeviceId, Device] = field(default_factory=dict)
    workers: dict[DeviceId, dict[str, Worker]] = field(default_factory=dict)
    running: dict[DeviceId, dict[CallId, Running]] = field(default_factory=dict)
    parked: dict[DeviceId, dict[str, tuple[Worker, int]]] = field(default_factory=dict)
    """And what each holds of its device."""
    unparked: list[m.Event] = field(default_factory=list)
    """What they will say of parked copies that they were told to evict."""
    staged: dict[FunctionId, bool] = field(default_factory=dict)
    """The host tier of their one node; true: the weights are on their way there."""

    def join(self, device: Device) -> None:
        self.devices[device.id], self.workers[device.id], self.running[device.id] = device, {}, {}
        self.parked[device.id] = {}

    def obey(self, command: m.Command, now: float) -> None:
        match command:
            case m.StartCall(grant):
                if grant.cold:
                    self._begin(grant, now)
                workers = self.workers[grant.device]
                key = copy_id(grant.function, grant.copy)
                worker = workers[key] = workers.pop(key)
                worker.used_at = now
                for call in grant.calls:
                    self.running[grant.device][call] = Running(call, grant, now)
            case m.LoadCopy():
                self._begin(command, now)
            case m.EvictCopy(function, device, copy, "host"):
                assert copy_id(function, copy) in self.parked[device], "of a refused grant"
            case m.EvictCopy(function, device, copy):
                self._unpark(device, copy_id(function, copy))
                self.end(device, copy_id(function, copy))
            case m.Resize(function, device, memory, copy):
                self.workers[device][copy_id(function, copy)].memory = memory
            case m.Abort(call, device):
                self.running[device][call].abandoned = True
            case m.Stage(function):
                assert function not in self.staged
                self.staged[function] = True

    def memory_of(self, command: m.Resize) -> int:
        return self.workers[command.device][copy_id(command.function, command.copy)].memory

    def _begin(self, command: m.Grant | m.LoadCopy, now: float) -> None:
        for victim in command.victims:
            worker = self.workers[command.device].get(victim)
            self.end(command.device, victim)
            self._unpark(command.device, victim)
            if victim in command.parked and worker is not None:
                self.parked[command.device][victim] = worker, 0
        key = copy_id(command.function, command.copy)
        assert key not in self.workers[command.device]
        self.parked[command.device].pop(key, None)
        self.workers[command.device][key] = Worker(command.function, command.copy, command.memory, now, now)

    def _unpark(self, device: DeviceId, key: str) -> None:
        if (parked := self.parked[device].pop(key, None)) is not None:
            self.unparked.append(m.Unparked(parked[0].function, device, parked[0].copy, "it was evicted"))

    def end(self, device: DeviceId, key: str) -> None:
        if self.workers[device].pop(key, None) is not None:
            calls = self.running[device]
            for call in [name for name, each in calls.items() if copy_id(each.grant.function, each.grant.copy) == key]:
                del calls[call]

    def all_staged(self) -> tuple[StagedWeights, ...]:
        return tuple(StagedWeights(each, 1, staging) for each, staging in self.staged.items())

    def snapshot(self, device: DeviceId, now: float) -> DeviceSnapshot:
        workers, running = self.workers[device], self.running[device]
        return DeviceSnapshot(
            self.devices[device],
            tuple(
                ResidentSnapshot(
                    each.function, f"digest of {each.function}", each.memory, each.copy, now - each.used_at,
                    each.loading, now - each.began_at if each.loading else 0.0, each.tier, each.silent,
                )
                for each in workers.values()
            ),
            tuple(
                RunningCall(
                    call, each.grant.function, each.grant.copy, now - each.since,
                    not workers[copy_id(each.grant.function, each.grant.copy)].loading, each.grant.cold, each.abandoned,
                    each.grant.number if len(each.grant.calls) > 1 else 0, len(each.grant.calls),
                )
                for call, each in running.items()
            ),
            tuple(
                ParkedSnapshot(each.function, f"digest of {each.function}", each.copy, memory)
                for each, memory in self.parked[device].values()
            ),
        )  # fmt: skip


class Site:
    """An engine and its nodes, under random events; and what the engine wrote behind, as JSON."""

    def __init__(
        self,
        policy: str,
        replacement: str,
        learn: bool,
        rng: random.Random,
        needs: tuple[Need, ...] = NEEDS,
        host: int = 0,
    ) -> None:
        """:param host: the size of their node's host tier; without one, nothing is staged"""
        self.rng = rng
        self.host = host
        self.needs = needs
        self.models: dict[FunctionId, Need] = {}
        self.how = (policy, replacement, learn)
        self.engine = self.new_engine(1)
        self.nodes = Nodes()
        self.now = 0.0
        self.functions: dict[FunctionId, Function] = {}
        self.store: dict[str, bytes] = {}
        self.waiting: dict[CallId, tuple[FunctionId, float, float | None]] = {}
        self.successor: Engine | None = None
        self.adopted: set[CallId] = set()
        self.number = 0

    def new_engine(self, epoch: int) -> Engine:
        policy, replacement, learn = self.how
        return Engine(
            policy=make_policy(limited(policy, 3)),
            replacement=(Lru if replacement == "lru" else CostAware)(ReplacementOptions(park=self.host > 0)),
            epoch=epoch,
            max_queue=30,
            learn=learn,
        )

    def tell(self, event: m.Event) -> list[m.Command]:
        """Both engines, once there are two: they must command the same."""
        commands = self.engine.handle(event, self.now)
        check_indexes(self.engine)
        if self.successor is not None:
            assert comparable(self.successor.handle(later(event), self.now + SHIFT)) == comparable(commands), event
            wake_at = self.engine.wake_at
            assert self.successor.wake_at == (None if wake_at is None else pytest.approx(wake_at + SHIFT))
        answers = []
        for command in commands:
            if isinstance(command, m.Resize) and command.memory < self.nodes.memory_of(command):
                answers.append(m.Resized(command.function, command.device, command.memory, command.copy))
            self.nodes.obey(command, self.now)
            answers += self.nodes.unparked
            self.nodes.unparked = []
            if isinstance(command, m.StartCall):
                for call in command.grant.calls:
                    self.waiting.pop(call, None)
            elif isinstance(command, m.RejectCall):
                self.waiting.pop(command.call, None)
            begun = command.grant if isinstance(command, m.StartCall) else command
            if isinstance(begun, m.Grant | m.LoadCopy):
                answers += self.parked(begun)
        for answer in answers:
            self.tell(answer)
        return commands

    def parked(self, command: m.Grant | m.LoadCopy) -> list[m.Event]:
        """What the node says of the victims that were to be parked: one of four could not be."""
        here, said = self.nodes.parked[command.device], []
        for key in command.parked:
            if key not in here:
                continue
            worker, holds = here[key][0], self.rng.choice([0, 1 << 20, 2 << 20, -1])
            if holds < 0:
                del here[key]
                said.append(m.Unparked(worker.function, command.device, worker.copy, "it could not"))
            else:
                here[key] = worker, holds
                said.append(m.Parked(worker.function, command.device, worker.copy, holds))
        return said

    def write(self) -> None:
        for key in self.engine.take_changed():
            doc = self.engine.doc(key, self.now)
            if doc is None:
                self.store.pop(key, None)
            else:
                self.store[key] = msgspec.json.encode(msgspec.structs.replace(doc, epoch=1))

    def take_over(self, *, queued: bool) -> None:
        """From the store and the nodes alone: functions, docs, snapshots; then what waits, if gateways are to say."""
        self.write()
        engine = self.new_engine(2)
        now = self.now + SHIFT
        for function in self.functions.values():
            engine.handle(m.FunctionDeployed(function), now)
        engine.handle(left(self.store, self.now, queued=queued), now)
        names = list(self.nodes.devices)
        self.rng.shuffle(names)
        snapshot = NodeSnapshot(
            tuple(self.nodes.snapshot(each, self.now) for each in names), 1, self.nodes.all_staged()
        )
        told = msgspec.json.decode(msgspec.json.encode(snapshot), type=NodeSnapshot)
        for each in told.devices:
            assert engine.handle(m.DeviceJoined(each.device, each, told.staged), now) == []
        if not queued:
            calls = list(self.waiting.items())
            self.rng.shuffle(calls)
            for call, (function, at, deadline) in calls:
                deadline = None if deadline is None else deadline + SHIFT
                assert (
                    engine.handle(m.Arrived(call, function, deadline, self.now - at + 2**-20, size_of(call)), now) == []
                )

        assert engine.handle(m.Serving(), now) == [], "its predecessor would have done nothing at this moment"

        mine, theirs = engine.status(now), self.engine.status(self.now)
        assert shown(mine, SHIFT) == shown(theirs, 0.0)
        self.adopted = {call for each in self.nodes.running.values() for call in each}
        self.successor = engine

    def populate(self, devices: int) -> None:
        """Let so many devices of two kinds join, and deploy eight functions."""
        for number in range(devices):
            self.join(f"n/d{number}", ("cpu", "kind1")[number % 2], self.rng.randint(20, 60) << 20)
        for number in range(8):
            self.deploy(FunctionId(f"f{number}"), self.rng.choice([None, None, 1, 3]))

    def steps(self, count: int, writes: float = 0.0) -> None:
        """:param writes: the part of them after which the engine writes behind"""
        for _ in range(count):
            self.step(self.rng.randrange(2**16))
            if writes and self.rng.random() < writes:
                self.write()

    def step(self, choice: int) -> None:
        rng, kind, pick = self.rng, choice % 24, choice // 24
        self.now += rng.choice([0.0, 0.25, 1.0])
        if (wake_at := self.engine.wake_at) is not None and wake_at <= self.now:
            self.tell(m.Woken())
        if self.host and choice % 5 == 0:
            self.stage(choice // 5)
        devices = self.nodes.workers.items()
        ready = [(device, each) for device, held in devices for each in held.values() if not each.loading]
        if choice % 7 == 0 and ready:
            device, worker = ready[choice // 7 % len(ready)]
            worker.silent = not worker.silent
            self.tell(m.CopySilent(worker.function, device, worker.copy, worker.silent))
        running = [each for calls in self.nodes.running.values() for each in calls.values()]
        workers = [(device, each) for device, held in self.nodes.workers.items() for each in held.values()]
        loading = [(device, each) for device, each in workers if each.loading]
        if kind < 9:
            self.number += 1
            call, function = CallId(f"c{self.number}"), FunctionId(f"f{pick % 8}")
            deadline = self.now + rng.randint(1, 20) if rng.random() < 0.3 else None
            self.waiting[call] = (function, self.now, deadline)
            self.tell(m.Arrived(call, function, deadline, 0.0, size_of(call)))
        elif kind < 14 and running:
            ended = running[pick % len(running)]
            grant = ended.grant
            worker = self.nodes.workers[grant.device][copy_id(grant.function, grant.copy)]
            if worker.loading:
                self.loaded(grant.device, worker)
            ok = not self.nodes.running[grant.device].pop(ended.call).abandoned and pick % 5 > 0
            self.tell(m.Finished(ended.call, grant.device, rng.randint(1, 16) / 8, ok))
        elif kind < 16 and loading:
            self.loaded(*loading[pick % len(loading)])
        elif kind == 16 and loading:
            device, worker = loading[pick % len(loading)]
            self.nodes.end(device, copy_id(worker.function, worker.copy))
            self.tell(m.CopyFailed(worker.function, device, "broken", pick % 2 == 0, worker.copy))
        elif kind == 17 and workers:
            device, worker = workers[pick % len(workers)]
            self.nodes.end(device, copy_id(worker.function, worker.copy))
            self.tell(m.WorkerExited(worker.function, device, "killed", worker.copy))
        elif kind == 18 and workers:
            device, worker = workers[pick % len(workers)]
            self.tell(m.Measured(worker.function, device, rng.randint(1, 40) << 20, worker.copy))
        elif kind == 19:
            known = [*sorted(self.waiting), *sorted(each.call for each in running), CallId("nobody")]
            call = known[pick % len(known)]
            self.waiting.pop(call, None)
            self.tell(m.CallerLeft(call))
        elif kind == 20:
            self.tell(m.Scaled(FunctionId(f"f{pick % 8}"), (pick // 8) % 6, hold_s=20.0))
        elif kind == 21 and running:
            self.refuse(running[pick % len(running)])
        elif kind == 22:
            self.come_or_go(pick)
        elif kind == 23:
            self.deploy_or_remove(pick)

    def loaded(self, device: DeviceId, worker: Worker) -> None:
        worker.loading = False
        load_s, tier, read_s = self.rng.randint(4, 40) / 8, "disk", 0.0
        if self.host:
            tier, read_s = "disk" if self.nodes.staged.get(worker.function, True) else "host", load_s / 2
        worker.tier = tier
        self.tell(m.Loaded(worker.function, device, load_s, 0, worker.copy, tier, read_s))

    def stage(self, pick: int) -> None:
        """The node does what it was asked, or not; or it keeps or drops weights of its own accord."""
        node, staged = NodeId("n"), self.nodes.staged
        asked = [each for each, staging in staged.items() if staging]
        function = asked[0] if asked else FunctionId(f"f{pick % 8}")
        if asked and pick % 3 == 0:
            del staged[function]
            self.tell(m.Unstaged(node, function, "it had no room"))
        elif asked or (function not in staged and function in self.functions):
            staged[function] = False
            self.tell(m.Staged(node, function, 1))
        elif function in staged:
            del staged[function]
            self.tell(m.Unstaged(node, function))

    def refuse(self, running: Running) -> None:
        """Not the first of several calls on a worker that never came; see the ADR for calls of CPU functions."""
        grant = running.grant
        calls = self.nodes.running[grant.device]
        worker = self.nodes.workers[grant.device][copy_id(grant.function, grant.copy)]
        others = [each for each in calls.values() if each.grant.function == grant.function and each is not running]
        direct = not self.functions[grant.function].need.reserved if grant.function in self.functions else True
        if (grant.cold and worker.loading and others) or (direct and running.call in self.adopted):
            return
        del calls[running.call]
        if grant.cold and worker.loading:
            self.nodes.end(grant.device, copy_id(grant.function, grant.copy))
        if not running.abandoned:
            self.waiting[running.call] = (grant.function, self.now, None)
        self.tell(m.NodeRefused(running.call, grant.device, "no"))

    def come_or_go(self, pick: int) -> None:
        names = sorted(self.nodes.devices)
        if names and pick % 7 == 0:
            self.tell(m.DeviceDrained(names[pick % len(names)], drain=pick % 2 == 0))
        elif names and pick % 3 == 0:
            name = names[pick % len(names)]
            del self.nodes.devices[name], self.nodes.workers[name], self.nodes.running[name], self.nodes.parked[name]
            self.tell(m.DeviceLeft(name, "gone"))
        elif names and pick % 3 == 1:
            name = names[pick % len(names)]
            self.tell(m.DeviceJoined(self.nodes.devices[name], self.nodes.snapshot(name, self.now), self.all_staged()))
        else:
            self.join(f"n/d{pick % 5}", ("cpu", "kind1")[pick % 2], self.rng.randint(20, 60) << 20)

    def join(self, name: str, kind: str, memory: int) -> None:
        device = Device(DeviceId(name), kind, memory, host_memory=self.host, parks=self.host > 0)
        self.nodes.join(device)
        self.tell(m.DeviceJoined(device, None, self.all_staged()))

    def all_staged(self) -> tuple[StagedWeights, ...] | None:
        return self.nodes.all_staged() if self.host else None

    def deploy_or_remove(self, pick: int) -> None:
        name = FunctionId(f"f{pick % 8}")
        if pick % 3 == 0 and name in self.functions:
            del self.functions[name]
            self.tell(m.FunctionRemoved(name, drain=pick % 2 == 0))
            if self.nodes.staged.pop(name, None) is not None:
                self.tell(m.Unstaged(NodeId("n"), name, "it was removed"))
        elif name in self.functions:
            self.deploy(name, slots=None if self.functions[name].need.compute else 3)

    def deploy(self, name: FunctionId, slots: int | None) -> None:
        rng = self.rng
        need = self.models.setdefault(name, rng.choice(self.needs)) if slots is None else Need(0, slots=slots)
        function = Function(
            name, f"digest of {name}", need,
            {"*": Profile(
                rng.randint(8, 40) / 8, rng.randint(1, 16) / 8, rng.randint(2, 30) << 20,
                loads={"host": 0.5} if self.host else {},
            )},
            rng.choice([0, 0, 0, 1, 2]), 12, rng.choice([0, 0, 4]), elastic=rng.random() < 0.5,
        )  # fmt: skip
        self.functions[name] = function
        self.tell(m.FunctionDeployed(function))


def left(store: dict[str, bytes], now: float, *, queued: bool) -> m.Restored:
    """The newest doc is older than now when nothing has changed since: that much somebody has to know."""
    return m.Restored(
        msgspec.json.decode(store["engine"], type=EngineDoc),
        tuple(msgspec.json.decode(v, type=FunctionDoc) for k, v in store.items() if k.startswith("functions/")),
        tuple(msgspec.json.decode(v, type=DeviceDoc) for k, v in store.items() if k.startswith("devices/")),
        elapsed_s=now - max(msgspec.json.decode(each)["at_s"] for each in store.values()),
        queued=queued,
    )


def later(event: m.Event) -> m.Event:
    if isinstance(event, m.Arrived) and event.deadline is not None:
        return msgspec.structs.replace(event, deadline=event.deadline + SHIFT)
    return event


def comparable(commands: list[m.Command]) -> list[object]:
    """Without the epoch, and how long a batch was held back: that is not written. What ends several calls at once names
    them in any order."""
    ended = sorted(repr(each) for each in commands if isinstance(each, m.Abort | m.RejectCall))
    others: list[object] = []
    for each in commands:
        if isinstance(each, m.StartCall):
            others.append(msgspec.structs.replace(each.grant, epoch=0, held_s=0.0))
        elif isinstance(each, m.LoadCopy):
            others.append(msgspec.structs.replace(each, epoch=0))
        elif not isinstance(each, m.Abort | m.RejectCall):
            others.append(each)
    return [*others, *ended]


def shown(status, shift: float):  # type: ignore[no-untyped-def]
    """A status as it can be compared: ages instead of times."""
    document = msgspec.to_builtins(status)
    for device in document["devices"]:
        for each in device["resident"]:
            each["last_used"] -= shift
    document["devices"] = sorted(document["devices"], key=lambda each: each["device"]["id"])
    return document


POLICY = st.sampled_from(["lb", "lalb", "lalb-o3", "least-wait"])
SEED, STEPS = st.integers(0, 2**32), st.integers(0, 150)
"""Events are drawn from the seed: lists of them would cost hypothesis more than the engines."""


@examples(200)
@given(POLICY, st.sampled_from(["lru", "cost-aware"]), st.booleans(), st.booleans(), SEED, STEPS, STEPS)
@example("lb", "cost-aware", True, False, 33344, 84, 8)  # two devices lent memory, the later one first
def test_a_successor_decides_as_its_predecessor_would_have(
    policy: str, replacement: str, learn: bool, queued: bool, seed: int, before: int, after: int
) -> None:
    succeed(policy, replacement, learn, queued, seed, before, after)


@examples(100)
@given(POLICY, st.booleans(), st.booleans(), SEED, STEPS, STEPS)
@example("lb", False, False, 4_294_967_295, 47, 41)  # evicted before its node had said that it is parked
@example("least-wait", False, False, 1961570120, 76, 65)  # parked on two devices, and removed
@example("lalb", True, False, 179286311, 48, 13)  # the last function that shares devices went, and a copy is silent
@example("lalb", True, False, 33, 33, 4)  # a call ends on a device with a silent copy, and another one waits
def test_a_successor_knows_what_is_staged(
    policy: str, learn: bool, queued: bool, seed: int, before: int, after: int
) -> None:
    succeed(policy, "cost-aware", learn, queued, seed, before, after, host=100)


def succeed(
    policy: str, replacement: str, learn: bool, queued: bool, seed: int, before: int, after: int, host: int = 0
) -> None:
    rng = random.Random(seed)
    site = Site(policy, replacement, learn, rng, host=host)
    site.populate(rng.randint(1, 4))
    site.steps(before, writes=0.3)

    site.take_over(queued=queued)

    site.steps(after)


@examples(150)
@given(POLICY, st.booleans(), SEED, STEPS)
@example("lalb", False, 244437, 143)  # a direct function without a copy, whose last call ended after the docs
def test_from_stale_docs_the_nodes_are_right_and_no_call_is_lost(
    policy: str, gone: bool, seed: int, before: int
) -> None:
    start_from_stale_docs(policy, gone, seed, before)


def start_from_stale_docs(policy: str, gone: bool, seed: int, before: int) -> None:
    """Docs are old, or gone altogether; a node is missing, and gateways have sent calls to another without asking."""
    rng = random.Random(seed)
    site = Site(policy, "lru", True, rng)
    for number in range(3):
        site.join(f"n/d{number}", "cpu", 60 << 20)
    for number in range(8):
        site.deploy(FunctionId(f"f{number}"), rng.choice([None, None, 1, 3]))
    site.steps(before, writes=0.1)
    nodes, store = site.nodes, {} if gone else site.store
    if nodes.devices and rng.random() < 0.3:
        lost = min(nodes.devices)
        del nodes.devices[lost], nodes.workers[lost], nodes.running[lost]
    for device, workers in nodes.workers.items():
        for worker in workers.values():
            if not worker.loading and rng.random() < 0.5:
                call = CallId(f"direct-{device}-{worker.function}")
                grant = m.Grant(
                    1, -1, (call,), worker.function, "", (Part(device, worker.memory),), False, copy=worker.copy
                )
                nodes.running[device][call] = Running(call, grant, site.now)

    engine = site.new_engine(2)
    for function in site.functions.values():
        engine.handle(m.FunctionDeployed(function), site.now)
    engine.handle(left(store, site.now, queued=False) if "engine" in store else m.Restored(), site.now)
    for device in nodes.devices:
        engine.handle(m.DeviceJoined(nodes.devices[device], nodes.snapshot(device, site.now)), site.now)
    for call, (function, at, _) in site.waiting.items():
        # A deadline that does not come: else a call that waits for ever would be answered, too.
        engine.handle(m.Arrived(call, function, site.now + 2 * FAR, site.now - at + 0.125), site.now)
    waiting = set(site.waiting)
    site.engine = engine
    site.tell(m.Serving())

    for device in engine.status(site.now).devices:
        held = {copy_id(each.function, each.copy): each.running for each in device.resident}
        assert held == {
            key: sum(copy_id(each.grant.function, each.grant.copy) == key
                     for each in nodes.running[device.device.id].values())
            for key in nodes.workers[device.device.id]
        }  # fmt: skip
        limits = sum(each.limit for each in device.resident)
        assert limits == sum(each.memory for each in nodes.workers[device.device.id].values())
        assert device.used <= limits <= device.device.memory
        assert device.used <= device.device.memory
    for number in range(8):
        large = Device(DeviceId(f"n/large{number}"), "cpu", 10_000 << 20)
        nodes.join(large)
        site.tell(m.DeviceJoined(large))
    for _ in range(500):
        for device, workers in nodes.workers.items():
            for worker in list(workers.values()):
                if worker.loading and workers.get(copy_id(worker.function, worker.copy)) is worker:
                    site.loaded(device, worker)
        running = [each for calls in nodes.running.values() for each in calls.values()]
        if not running:
            if engine.wake_at is None or engine.wake_at > site.now + FAR:
                break
            site.now = engine.wake_at
            site.tell(m.Woken())
            continue
        grant = running[0].grant
        if not nodes.workers[grant.device][copy_id(grant.function, grant.copy)].loading:
            del nodes.running[grant.device][running[0].call]
            site.tell(m.Finished(running[0].call, grant.device, 1.0))
    assert not site.waiting, f"these wait for ever: {site.waiting} of {waiting}"
    assert not any(device.busy for device in engine.status(site.now).devices)
    assert not engine.ignored["Finished"]


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 4000, 1000))
def test_both_hold_over_thousands_of_clusters(first: int) -> None:
    for seed in range(first, first + 1000):
        rng = random.Random(seed)
        policy = rng.choice(["lb", "lalb", "lalb-o3", "least-wait"])
        before, after = rng.randint(0, 150), rng.randint(0, 150)
        replacement, learn, queued = rng.choice(["lru", "cost-aware"]), rng.random() < 0.5, rng.random() < 0.5
        succeed(policy, replacement, learn, queued, seed, before, after)
        start_from_stale_docs(policy, queued, seed, before)


# --- one by one -------------------------------------------------------------------------------------------------------


def make_engine(*functions: Function, policy: str = "lalb-o3") -> Engine:
    engine = Engine(policy=make_policy(policy), replacement=Lru(), epoch=2)
    for function in functions:
        engine.handle(m.FunctionDeployed(function), 0.0)
    return engine


def model(name: str, size: int = 10, digest: str = "d") -> Function:
    return Function(FunctionId(name), digest, profiles={"*": Profile(3.0, 1.0, size)})


def holds(name: str, *, digest: str = "d", size: int = 10, loading: bool = False, copy: int = 0) -> ResidentSnapshot:
    return ResidentSnapshot(FunctionId(name), digest, size, copy, loading=loading)


def runs(call: str, function: str, *, begun: bool = True, age_s: float = 0.5, copy: int = 0) -> RunningCall:
    return RunningCall(CallId(call), FunctionId(function), copy, age_s=age_s, begun=begun)


A = Device(DeviceId("n/a"), "gpu", 100)


def joined(*residents: ResidentSnapshot, running: tuple[RunningCall, ...] = ()) -> m.DeviceJoined:
    return m.DeviceJoined(A, DeviceSnapshot(A, residents, running))


def starts(commands: list[m.Command]) -> list[tuple[str, bool]]:
    return [(each.grant.call, each.grant.cold) for each in commands if isinstance(each, m.StartCall)]


def test_a_node_that_was_away_keeps_its_models_and_its_running_calls() -> None:
    engine = make_engine(model("f"), model("g"))
    engine.handle(joined(), 0.0)
    engine.handle(m.Arrived(CallId("c1"), FunctionId("f")), 0.0)
    engine.handle(m.Loaded(FunctionId("f"), A.id, 3.0, 0), 3.0)
    engine.handle(m.DeviceLeft(A.id, "no beats"), 4.0)

    engine.handle(joined(holds("g"), holds("f"), running=(runs("c1", "f"),)), 5.0)

    (device,) = engine.status(5.0).devices
    assert [(each.function, each.running) for each in device.resident] == [("g", 0), ("f", 1)]
    assert engine.handle(m.Arrived(CallId("c2"), FunctionId("f")), 5.0) == [], "the device is busy"
    assert starts(engine.handle(m.Finished(CallId("c1"), A.id, 1.0), 6.0)) == [("c2", False)]
    assert not engine.ignored


def test_one_that_comes_back_before_it_was_missed_is_right_about_what_it_runs() -> None:
    """c1 ended while no scheduler led; it does not run, and the device is free."""
    engine = make_engine(model("f"))
    engine.handle(joined(), 0.0)
    engine.handle(m.Arrived(CallId("c1"), FunctionId("f")), 0.0)
    engine.handle(m.Arrived(CallId("c2"), FunctionId("f")), 0.0)

    commands = engine.handle(joined(holds("f")), 5.0)

    assert starts(commands) == [("c2", False)]
    assert engine.status(5.0).devices[0].misses == 1, "the device is the same"


def test_calls_of_a_removed_function_go_on_when_their_node_comes_back() -> None:
    """One ran, and one waited in the local queue: the function is known until both are over."""
    engine = make_engine(model("f"), model("g"), policy="lalb")
    engine.handle(joined(holds("f")), 0.0)
    engine.handle(m.DeviceJoined(Device(DeviceId("n/b"), "gpu", 100)), 0.0)
    engine.handle(m.Arrived(CallId("c1"), FunctionId("f")), 0.0)
    engine.handle(m.Arrived(CallId("c2"), FunctionId("f")), 0.0)
    assert engine.status(0.0).devices[0].local_queue == 1
    engine.handle(m.FunctionRemoved(FunctionId("f"), drain=True), 0.5)

    assert engine.handle(joined(holds("f"), running=(runs("c1", "f"),)), 1.0) == []

    assert starts(engine.handle(m.Finished(CallId("c1"), A.id, 1.0), 2.0)) == [("c2", False)]
    assert engine.handle(m.Finished(CallId("c2"), A.id, 1.0), 3.0) == [m.EvictCopy(FunctionId("f"), A.id)]


def test_a_grant_that_had_not_reached_a_node_that_came_back_is_granted_anew_when_the_node_refuses_it() -> None:
    engine = make_engine(model("f"))
    engine.handle(joined(holds("f")), 0.0)
    engine.handle(m.Arrived(CallId("c1"), FunctionId("f")), 0.0)
    engine.handle(joined(holds("f")), 1.0)

    commands = engine.handle(m.NodeRefused(CallId("c1"), A.id, "an older grant"), 1.5)

    assert starts(commands) == [("c1", False)]


@pytest.mark.parametrize("resident", [holds("unknown"), holds("f", digest="other")])
def test_what_is_of_no_function_that_is_deployed_is_evicted(resident: ResidentSnapshot) -> None:
    engine = make_engine(model("f"))

    commands = engine.handle(joined(resident, running=(runs("c", resident.function),)), 0.0)

    assert commands == [m.EvictCopy(resident.function, A.id)]
    assert engine.status(0.0).devices[0].used == 0
    assert not engine.status(0.0).devices[0].busy


def test_several_calls_of_models_on_one_device_are_survived() -> None:
    """Without a scheduler two gateways sent a call each. The device is free when both are over."""
    engine = make_engine(model("f"), model("g"))
    running = (runs("c1", "f", age_s=1.0), runs("c2", "g"), runs("c3", "f", begun=False))
    engine.handle(joined(holds("f"), holds("g"), running=running), 0.0)
    engine.handle(m.Arrived(CallId("c4"), FunctionId("g")), 0.0)

    assert engine.handle(m.Finished(CallId("c2"), A.id, 1.0), 1.0) == []
    assert engine.handle(m.Finished(CallId("c1"), A.id, 1.0), 1.0) == []
    assert starts(engine.handle(m.Finished(CallId("c3"), A.id, 1.0), 2.0)) == [("c4", False)]
    assert engine.status(2.0).running == {"g": 1}


def test_more_than_the_device_has_is_evicted_the_idle_ones_first() -> None:
    engine = make_engine(*(model(name, 40) for name in "abc"))

    commands = engine.handle(
        joined(holds("a", size=40), holds("b", size=40), holds("c", size=40), running=(runs("x", "a"),)), 0.0
    )

    assert commands == [m.EvictCopy(FunctionId("b"), A.id)]


def test_a_call_that_waited_elsewhere_stands_where_it_would_if_it_had_waited_here() -> None:
    engine = make_engine(model("f"), policy="lb")
    engine.handle(joined(holds("f"), running=(runs("r", "f"),)), 0.0)
    engine.handle(m.Arrived(CallId("c1"), FunctionId("f")), 1.0)
    engine.handle(m.Arrived(CallId("c2"), FunctionId("f")), 3.0)

    engine.handle(m.Arrived(CallId("between"), FunctionId("f"), age_s=2.0), 4.0)
    engine.handle(m.Arrived(CallId("oldest"), FunctionId("f"), age_s=9.0), 4.0)

    order, ended = [], CallId("r")
    for _ in range(4):
        ((call, _),) = starts(engine.handle(m.Finished(ended, A.id, 1.0), 5.0))
        order.append(call)
        ended = CallId(call)
    assert order == ["oldest", "c1", "between", "c2"]


def test_calls_with_one_place_in_the_order_may_have_one_deadline() -> None:
    engine = make_engine(model("f"))
    engine.handle(joined(holds("f"), running=(runs("r", "f"),)), 0.0)
    engine.handle(m.Arrived(CallId("c1"), FunctionId("f"), 9.0), 1.0)
    engine.handle(m.Arrived(CallId("c2"), FunctionId("f"), 9.0, age_s=3.0), 2.0)

    rejected = engine.handle(m.Woken(), 9.0)

    assert [each.call for each in rejected if isinstance(each, m.RejectCall)] == ["c1", "c2"]


def test_functions_whose_pauses_end_together_are_loaded_by_name() -> None:
    """A successor does not know which one was held back first."""
    kept = [msgspec.structs.replace(model(name, 60), min_copies=1) for name in "fg"]
    engine = make_engine(*kept)
    engine.handle(joined(), 0.0)
    b = Device(DeviceId("n/b"), "gpu", 100)
    engine.handle(m.DeviceJoined(b), 0.0)
    for copy in range(3):
        for name, device in (("g", b.id), ("f", A.id)):
            engine.handle(m.CopyFailed(FunctionId(name), device, "broken", copy=copy), 1.0)
    engine.handle(m.DeviceLeft(b.id, "gone"), 1.5)

    loads = engine.handle(m.Woken(), 2.0)

    assert [each.function for each in loads if isinstance(each, m.LoadCopy)] == ["f"]


def test_a_call_of_a_cpu_function_that_waited_elsewhere_takes_a_free_slot_at_once() -> None:
    engine = make_engine(msgspec.structs.replace(model("f"), need=Need(0, slots=1)))
    engine.handle(joined(holds("f")), 0.0)

    first = engine.handle(m.Arrived(CallId("c1"), FunctionId("f"), age_s=2.0), 1.0)
    engine.handle(m.Arrived(CallId("c2"), FunctionId("f"), age_s=1.0), 1.0)
    then = engine.handle(m.Finished(CallId("c1"), A.id, 1.0), 2.0)

    assert [call for call, _ in starts(first) + starts(then)] == ["c1", "c2"]


def test_a_gateway_that_missed_its_grant_gets_it_again() -> None:
    engine = make_engine(model("f"))
    engine.handle(joined(), 0.0)
    (start,) = engine.handle(m.Arrived(CallId("c"), FunctionId("f")), 0.0)

    (again,) = engine.handle(m.Arrived(CallId("c"), FunctionId("f"), age_s=1.0), 1.0)

    assert isinstance(start, m.StartCall)
    assert isinstance(again, m.StartCall)
    assert msgspec.structs.replace(again.grant, number=start.grant.number) == start.grant
    assert again.grant.number > start.grant.number


def test_a_call_that_a_worker_has_begun_is_not_begun_again() -> None:
    engine = make_engine(model("f"))
    engine.handle(joined(holds("f"), running=(runs("c", "f"),)), 0.0)

    (command,) = engine.handle(m.Arrived(CallId("c"), FunctionId("f"), age_s=1.0), 1.0)

    assert isinstance(command, m.RejectCall)
    assert command.code == "refused"
    assert "not run twice" in command.message


def test_a_call_that_runs_on_two_nodes_is_stopped_on_the_one_that_came_back() -> None:
    b = Device(DeviceId("n2/b"), "gpu", 100)
    engine = make_engine(model("f"))
    engine.handle(joined(holds("f"), running=(runs("c", "f"),)), 0.0)

    snapshot = DeviceSnapshot(b, (holds("f", copy=1),), (runs("c", "f", copy=1),))
    commands = engine.handle(m.DeviceJoined(b, snapshot), 1.0)

    assert commands == [m.Abort(CallId("c"), b.id)]
    assert engine.status(1.0).devices[1].busy
    engine.handle(m.Finished(CallId("c"), b.id, 0.0, ok=False), 2.0)
    assert [each.busy for each in engine.status(2.0).devices] == [True, False]


def test_a_number_is_never_given_twice() -> None:
    """Not after a takeover, nor after a node told of a copy that this engine did not know."""
    b = Device(DeviceId("n2/b"), "gpu", 100)
    engine = make_engine(model("f"))
    engine.handle(joined(holds("f", copy=4)), 0.0)
    engine.handle(m.DeviceJoined(b, DeviceSnapshot(b, (holds("f", copy=4),))), 0.0)
    engine.handle(m.WorkerExited(FunctionId("f"), A.id, "killed", 4), 1.0)

    (start,) = engine.handle(m.Arrived(CallId("c"), FunctionId("f")), 2.0)

    assert isinstance(start, m.StartCall)
    assert start.grant.copy == 5
    doc = engine.doc("functions/f", 3.0)
    assert isinstance(doc, FunctionDoc)
    assert doc.next_copy == 6


def test_nothing_is_decided_before_the_new_engine_serves() -> None:
    engine = make_engine(model("f"))
    engine.handle(m.Restored(), 0.0)
    assert engine.handle(joined(holds("f")), 0.1) == []
    assert engine.handle(m.Arrived(CallId("new"), FunctionId("f")), 0.2) == []
    assert engine.handle(m.Arrived(CallId("old"), FunctionId("f"), age_s=5.0), 0.3) == []

    assert starts(engine.handle(m.Serving(), 0.5)) == [("old", False)]


def test_changes_are_told_once() -> None:
    engine = make_engine(model("f"), model("idle"))
    engine.handle(joined(), 0.0)
    engine.take_changed()
    engine.handle(m.Arrived(CallId("c"), FunctionId("f")), 1.0)

    assert sorted(engine.take_changed()) == ["devices/n/a", "engine", "functions/f"]
    assert engine.take_changed() == []
    engine.handle(m.DeviceLeft(A.id, "gone"), 2.0)
    assert "devices/n/a" in engine.take_changed()
    assert engine.doc("devices/n/a", 2.0) is None


def comparable_doc(doc: DeviceDoc | FunctionDoc | EngineDoc | None) -> DeviceDoc | FunctionDoc | EngineDoc | None:
    """Without costs that are as declared, an estimate from what is learnt elsewhere, and what time alone ends."""
    if isinstance(doc, DeviceDoc):
        return msgspec.structs.replace(doc, finish_s=0.0)
    if isinstance(doc, FunctionDoc):  # what was only asked for is as declared
        return msgspec.structs.replace(doc, costs={kind: each for kind, each in doc.costs.items() if each.measured})
    return msgspec.structs.replace(doc, reserved_in_s=None) if isinstance(doc, EngineDoc) else doc


class Watched:
    """Looks at every doc of an engine before and after each event: those that an event changes are named."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def handle(self, event: m.Event, now: float) -> list[m.Command]:
        before = self.docs(now)
        commands = self.engine.handle(event, now)
        after = self.docs(now)
        changed = {key for key in after if before[key] != after[key]}
        assert changed <= set(self.engine.take_changed()), event
        return commands

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def docs(self, now: float) -> dict[str, object]:
        keys = [f"devices/n/d{number}" for number in range(5)] + [f"functions/f{number}" for number in range(8)]
        return {key: comparable_doc(self.engine.doc(key, now)) for key in [*keys, "engine"]}


@examples(25)
@given(POLICY, st.booleans(), SEED, STEPS)
def test_each_doc_that_an_event_changes_is_named(policy: str, learn: bool, seed: int, steps: int) -> None:
    rng = random.Random(seed)
    site = Site(policy, "lru", learn, rng)
    engine = Engine(policy=make_policy(limited(policy, 3)), replacement=Lru(), max_queue=30, learn=learn)
    site.engine = cast(Engine, Watched(engine))
    site.populate(3)
    site.steps(steps)


@examples(60)
@given(SEED, STEPS)
def test_the_oldest_hit_is_the_first_call_whose_model_an_idle_device_has(seed: int, steps: int) -> None:
    """Among all calls, and among those of functions that were not refused, without a look at every device."""
    rng = random.Random(seed)
    site = Site("lb", "lru", False, rng, (Need(),))
    for number in range(4):
        site.join(f"n/d{number}", "cpu", 40 << 20)
    for number in range(8):
        site.deploy(FunctionId(f"f{number}"), None)
    site.steps(steps)
    cluster = state_of(site.engine)
    without = {FunctionId(f"f{number}") for number in range(8) if rng.random() < 0.3}
    for device_state in list(cluster.devices.values()):  # as if all were idle: else nothing waits that could be a hit
        if device_state.idle_key is None and not device_state.closed and rng.random() < 0.7:
            device_state.reserved = 0
            device_state.local.clear()
            cluster.offer(device_state)

    hits = [
        call
        for call in state_of(site.engine).calls
        if call.state == WAITING and call.function not in without
        and any(key[2].id in call.owner.holders for key in cluster.idle_devices)
    ]  # fmt: skip
    assert state_of(site.engine).view.oldest_hit(without) is min(hits, key=lambda call: call.number, default=None)
