"""
A scheduler and a node agree on the memory of each worker, whatever crosses on the wire and whoever leads.

The scheduler's engine and the node's `WorkerDevice` are the real ones. Messages wait on two wires, and are lost with
them when another scheduler takes over.
"""

import random
from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.scheduler.world import limited

from gpufaas_cache_manager.host_tier import HostTier
from gpufaas_cache_manager.replacement import Lru
from gpufaas_core import messages as m
from gpufaas_core.model import CallId, CopyId, Device, DeviceId, Function, FunctionId, Need, Part, Profile, copy_id
from gpufaas_gpu_manager.device_snapshot import snapshot_of
from gpufaas_gpu_manager.host_cache import HostCache
from gpufaas_gpu_manager.parked import ParkedWorkers
from gpufaas_gpu_manager.room import WorkerDevice
from gpufaas_gpu_manager.worker_state import WorkerState
from gpufaas_scheduler.engine import Engine
from gpufaas_scheduler.policies import make_policy

MiB = 1 << 20
DEVICE = DeviceId("n/cpu:0")


class FakeCalls:
    def __init__(self) -> None:
        self.exchanges: dict[CallId, Any] = {}
        self.waiting = SimpleNamespace(line=())
        self.watch = SimpleNamespace(silent=False)

    def bind_waiting(self) -> None:
        pass


class FakeWorker:
    """What `WorkerDevice` needs of a worker. The node has it begin, loads it and ends it."""

    def __init__(self, node: "FakeNode", number: int, command: m.Grant | m.LoadCopy) -> None:
        self.node, self.number, self.copy = node, number, command.copy
        self.spec = SimpleNamespace(function=command.function, digest=command.digest, need=Need())
        self.key = copy_id(command.function, command.copy)
        self.memory = self.wanted = command.memory
        self.peak = 0
        self.state = WorkerState.WAITING
        self.told = True
        self.outgrown = self.standby = self.replaced = self.checks = False
        self.pid = None
        self.share = 0
        self.calls = FakeCalls()
        self.used_at = node.now
        self.load = SimpleNamespace(asked_at=node.now, tier="disk")
        self.run = self

    @property
    def ends(self) -> bool:
        return self.state is WorkerState.ENDING

    @property
    def takes_calls(self) -> bool:
        return self.state is WorkerState.READY

    def in_use(self) -> int:
        return self.peak if self.calls.exchanges else 0

    def limit_to(self, memory: int) -> None:
        self.memory = memory

    def on_told(self) -> None:
        self.told = True

    def begin(self) -> None:
        self.state = WorkerState.STARTING

    def fail_unstarted(self, reason: str) -> None:
        self.node.gone(self, m.CopyFailed(self.spec.function, DEVICE, reason, copy=self.copy))

    def end(self) -> None:
        if self.state is WorkerState.WAITING:
            self.node.gone(self)
        else:
            self.state = WorkerState.ENDING
            self.node.dying[self.number] = (self, None)

    def kill(self, reason: str) -> None:
        if self.state is WorkerState.STARTING:
            fact: m.Event = m.CopyFailed(self.spec.function, DEVICE, reason, copy=self.copy)
        else:
            fact = m.WorkerExited(self.spec.function, DEVICE, reason, self.copy)
        self.node.dying.setdefault(self.number, (self, fact))


class FakeNode:
    def __init__(self, rng: random.Random, memory: int) -> None:
        self.rng, self.now = rng, 0.0
        self.device = Device(DEVICE, "cpu", memory)
        source = SimpleNamespace(device=self.device, emulation=None, enforced=True)
        self.room = WorkerDevice(cast(Any, source), ParkedWorkers(HostCache(HostTier(0)), enabled=False))
        self.dying: dict[int, tuple[FakeWorker, m.Event | None]] = {}
        self.said: deque[m.Event] = deque()
        self.number = 0

    def report(self, fact: m.Event) -> None:
        self.said.append(fact)

    def start(self, command: m.Grant | m.LoadCopy) -> FakeWorker:
        for victim in command.victims:
            self.room.end(victim)
        self.number += 1
        worker = FakeWorker(self, self.number, command)
        self.room.add(cast(Any, worker))
        return worker

    def execute(self, command: m.Command) -> None:
        workers = cast("dict[CopyId, FakeWorker]", self.room.workers)
        match command:
            case m.StartCall(grant):
                worker = workers.get(copy_id(grant.function, grant.copy))
                if worker is None and grant.cold:
                    worker = self.start(grant)
                for call in grant.calls:
                    if worker is None or worker.state is WorkerState.GONE:
                        self.report(m.NodeRefused.of(grant.of(call), "its worker is not there any more"))
                        continue
                    worker.used_at = self.now
                    if worker.state is WorkerState.READY:
                        worker.peak = self.rng.randint(0, worker.memory)
                    worker.calls.exchanges[call] = SimpleNamespace(
                        grant=grant.of(call),
                        finished=False,
                        opened_at=self.now,
                        slot=1,
                        bound_at=self.now,
                        abandoned=False,
                    )
            case m.LoadCopy():
                if copy_id(command.function, command.copy) not in workers:
                    self.start(command)
            case m.EvictCopy(function, _, copy):
                self.room.end(copy_id(function, copy))
            case m.Resize(function, _, memory, copy):
                worker = workers.get(copy_id(function, copy))
                if worker is not None and self.room.resize(cast(Any, worker), memory):
                    self.report(m.Resized(function, DEVICE, worker.memory, copy, memory))
            case m.Abort(call, _):
                for each in self.all():
                    if call in each.calls.exchanges:
                        del each.calls.exchanges[call]
                        self.report(m.Finished(call, DEVICE, 0.0, ok=False))

    def all(self) -> list[FakeWorker]:
        return cast("list[FakeWorker]", list(self.room.workers.values()))

    def gone(self, worker: FakeWorker, fact: m.Event | None = None) -> None:
        ended = worker.state is WorkerState.ENDING
        worker.state = WorkerState.GONE
        self.dying.pop(worker.number, None)
        self.room.leave(cast(Any, worker))
        exchanges, worker.calls.exchanges = worker.calls.exchanges, {}
        if ended:
            for call in exchanges:
                self.report(m.Finished(call, DEVICE, 0.0, ok=False))
        if fact is not None:
            self.report(fact)

    def happens(self, pick: int) -> None:
        """Something that is possible now."""
        starting = [each for each in self.all() if each.state is WorkerState.STARTING]
        ready = [each for each in self.all() if each.state is WorkerState.READY]
        busy = [each for each in ready if each.calls.exchanges]
        kind, pick = pick % 8, pick // 8
        if kind < 2 and starting:
            worker = starting[pick % len(starting)]
            worker.state = WorkerState.READY
            self.report(m.Loaded(worker.spec.function, DEVICE, 1.0, 0, worker.copy, "disk"))
        elif kind < 5 and busy:
            worker = busy[pick % len(busy)]
            call = next(iter(worker.calls.exchanges))
            if self.rng.random() < 0.3:
                peak = self.rng.randint(0, worker.memory)
                self.report(m.Measured(worker.spec.function, DEVICE, peak, worker.copy, pick % 5 == 0))
            del worker.calls.exchanges[call]
            worker.peak = self.rng.randint(0, worker.memory)
            self.report(m.Finished(call, DEVICE, 0.5, True))
        elif kind == 5 and self.dying:
            worker, fact = self.dying[sorted(self.dying)[pick % len(self.dying)]]
            self.gone(worker, fact)
        elif kind == 6 and ready and pick % 4 == 0:
            worker = ready[pick % len(ready)]
            self.gone(worker, m.WorkerExited(worker.spec.function, DEVICE, "killed", worker.copy))
        elif kind == 7 and starting and pick % 4 == 0:
            worker = starting[pick % len(starting)]
            self.gone(worker, m.CopyFailed(worker.spec.function, DEVICE, "broken", pick % 8 == 0, worker.copy))


class Site:
    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.policy = rng.choice(["lalb-o3", "least-wait", "lb"])
        self.node = FakeNode(rng, rng.randint(60, 400) * MiB)
        self.functions: dict[FunctionId, Function] = {}
        self.now = 0.0
        self.calls = 0
        self.epoch = 1
        self.store: dict[str, Any] = {}
        self.to_node: deque[m.Command] = deque()
        self.engine = self.new_engine()
        for number in range(6):
            id_ = FunctionId(f"f{number}")
            cpu = rng.random() < 0.6
            need = Need(0, slots=3) if cpu else rng.choice([Need(), Need(50, "spatial"), Need(slots=2)])
            self.functions[id_] = Function(
                id_, f"digest of {id_}", need, {"*": Profile(1.0, 0.5, rng.randint(2, 30) * MiB)},
                rng.choice([0, 0, 1, 2]), 12, 0, elastic=rng.random() < 0.7,
            )  # fmt: skip
            self.tell(m.FunctionDeployed(self.functions[id_]))
        self.tell(m.DeviceJoined(self.node.device))

    def new_engine(self) -> Engine:
        return Engine(
            policy=make_policy(limited(self.policy, 3)), replacement=Lru(), epoch=self.epoch,
            max_queue=30, learn=True,
        )  # fmt: skip

    def tell(self, event: m.Event) -> None:
        for command in self.engine.handle(event, self.now):
            if not isinstance(command, m.RejectCall):
                self.to_node.append(command)

    def write(self) -> None:
        for key in self.engine.take_changed():
            doc = self.engine.doc(key, self.now)
            if doc is None:
                self.store.pop(key, None)
            else:
                self.store[key] = msgspec.structs.replace(doc, epoch=self.epoch)

    def take_over(self) -> None:
        keep = self.rng.random()
        if keep < 0.4:
            self.write()
        store = self.store if keep < 0.8 else {}
        # The node obeys what was sent before the leader died, all of it or the first part.
        sent = self.rng.randint(0, len(self.to_node))
        for _ in range(sent if self.rng.random() < 0.5 else len(self.to_node)):
            self.node.execute(self.to_node.popleft())
        self.to_node.clear()
        for _ in range(self.rng.randint(0, 5)):
            self.node.happens(self.rng.randrange(2**16))
        self.node.said.clear()
        self.epoch += 1
        engine = self.engine = self.new_engine()
        for function in self.functions.values():
            engine.handle(m.FunctionDeployed(function), self.now)
        left = m.Restored()
        if "engine" in store:
            functions, devices = (
                tuple(doc for key, doc in store.items() if key.startswith(kind)) for kind in ("functions/", "devices/")
            )
            left = m.Restored(store["engine"], functions, devices, queued=False)
        engine.handle(left, self.now)
        self.node.now = self.now
        self.tell(m.DeviceJoined(self.node.device, snapshot_of(self.node.room, self.now)))
        for _ in range(self.rng.randint(0, 5)):
            self.node.happens(self.rng.randrange(2**16))
        while self.node.said:
            self.tell(self.node.said.popleft())
        self.tell(m.Serving())

    def reconnect(self) -> None:
        while self.to_node:
            self.node.execute(self.to_node.popleft())
        if self.rng.random() < 0.5:
            self.tell(m.DeviceLeft(DEVICE, "gone"))
            self.to_node.clear()
        self.node.happens(self.rng.randrange(2**16))
        self.node.said.clear()
        self.tell(m.DeviceJoined(self.node.device, snapshot_of(self.node.room, self.now)))

    def step(self) -> None:
        rng = self.rng
        self.now += rng.choice([0.0, 0.25, 1.0])
        self.node.now = self.now
        kind = rng.randrange(100)
        if (wake_at := self.engine.wake_at) is not None and wake_at <= self.now:
            self.tell(m.Woken())
        if kind < 25:
            self.calls += 1
            self.tell(m.Arrived(CallId(f"c{self.calls}"), FunctionId(f"f{rng.randrange(6)}"), None))
        elif kind < 50:
            self.node.happens(rng.randrange(2**16))
        elif kind < 70:
            for _ in range(rng.randint(1, 4)):
                if self.to_node:
                    self.node.execute(self.to_node.popleft())
        elif kind < 90:
            for _ in range(rng.randint(1, 4)):
                if self.node.said:
                    self.tell(self.node.said.popleft())
        elif kind < 93:
            self.tell(m.Scaled(FunctionId(f"f{rng.randrange(6)}"), rng.randrange(4)))
        elif kind < 95:
            self.write()
        elif kind < 97:
            self.take_over()
        elif kind < 98:
            self.reconnect()

    def rest(self) -> None:
        """All messages arrive, and all workers that end are gone."""
        for _ in range(10_000):
            if self.to_node:
                self.node.execute(self.to_node.popleft())
            elif self.node.said:
                self.tell(self.node.said.popleft())
            elif self.node.dying:
                worker, fact = self.node.dying[min(self.node.dying)]
                self.node.gone(worker, fact)
            else:
                return
        raise AssertionError("they never rest")


# An answer to what a worker was asked came after the node had been told something else.
@example(38, 30)
@example(39, 30)
@example(44, 30)
@examples(60)
@given(st.integers(0, 2**32), st.integers(0, 150))
def test_the_scheduler_promises_what_the_node_has_reserved(seed: int, steps: int) -> None:
    site = Site(seed)
    for _ in range(steps):
        site.step()
    site.rest()

    (device,) = site.engine.status(site.now).devices
    promised = {copy_id(each.function, each.copy): each.limit for each in device.resident}
    reserved = site.node.room.ledger.reserved
    held = {each.key: reserved.get(each.number, 0) for each in site.node.all()}
    assert promised == held
    assert sum(promised.values()) == site.node.room.ledger.used, "a worker that is gone holds memory"


def test_a_worker_that_waits_for_memory_is_started_with_what_the_scheduler_said_last() -> None:
    node = FakeNode(random.Random(0), 100 * MiB)
    first, second = (
        node.start(m.LoadCopy(1, 1, FunctionId(name), "", (Part(DEVICE, size * MiB),)))
        for name, size in (("first", 80), ("second", 50))
    )
    assert (first.state, second.state) == (WorkerState.STARTING, WorkerState.WAITING)

    node.execute(m.Resize(FunctionId("second"), DEVICE, 20 * MiB))

    assert second.state is WorkerState.STARTING
    assert node.room.ledger.reserved == {first.number: 80 * MiB, second.number: 20 * MiB}
