"""
A `Rig` with plans: they come, change, are rolled back and end while things break; some name functions that come later
or never, devices that are away, and more than a device has. And the leader dies: a successor goes on from the docs that
it wrote and from what nodes and gateways tell it.
"""

from dataclasses import dataclass

from msgspec.structs import replace
from tests.unit.scheduler.conformance import Rig, Worker

from gpufaas_core import messages as m
from gpufaas_core.model import (
    ALL_COMPUTE,
    CallId,
    CopyId,
    Device,
    DeviceId,
    Function,
    FunctionId,
    Need,
    PlacementPlan,
    Profile,
    Replica,
    copy_id,
    node_of,
)
from gpufaas_core.snapshot import (
    DeviceDoc,
    DeviceSnapshot,
    EngineDoc,
    FunctionDoc,
    ParkedSnapshot,
    ResidentDoc,
    ResidentSnapshot,
    RunningCall,
    StagedWeights,
)
from gpufaas_scheduler.docs import ENGINE_KEY
from gpufaas_scheduler.journal import Header

LATE = FunctionId("late")
"""A function that is deployed when plans may have named it already."""


@dataclass(frozen=True)
class Epoch:
    """What one engine was told, and what it said."""

    header: Header
    events: list[tuple[m.Event, float]]
    commands: list[list[m.Command]]


class PlannedRig(Rig):
    """See module."""

    def __init__(self, spec: str, seed: int, *, functions: int = 12, devices: int = 4, breaks: bool = True) -> None:
        self.past: list[Epoch] = []
        self.applied: list[tuple[Replica, ...]] = []
        """The plans so far; the last one is in force."""
        self.planned: dict[tuple[str, DeviceId], Replica] = {}
        """The last of `applied`."""
        self.leaving: set[CopyId] = set()
        """Copies that had been sent off when the plan came, or when their device was no longer drained."""
        self.store: dict[str, EngineDoc | FunctionDoc | DeviceDoc] = {}
        """What the engine wrote behind."""
        super().__init__(spec, seed, functions=functions, devices=devices, breaks=breaks)

    @property
    def epochs(self) -> list[Epoch]:
        return [*self.past, Epoch(self.header, self.events, self.commands)]

    def work(self, calls: int, per_s: float) -> None:
        super().work(calls, per_s)
        for number in range(12):
            self._at(self.rng.uniform(0.1, 0.8) * calls / per_s, self._change if number else self.take_over)
        self._at(calls / per_s / 2, self._late)

    def _late(self) -> None:
        self.deploy(LATE, Need(100, "auto", slots=2), Profile(1.5, 0.5, 20))
        self.call(LATE)

    # --- plans ---

    def apply(self, replicas: tuple[Replica, ...]) -> None:
        self.applied.append(replicas)
        self.planned = {(each.function, each.device): each for each in replicas}
        self._note_leaving()
        self.tell(m.Planned(PlacementPlan(len(self.applied), replicas)))

    def feasible(self) -> tuple[Replica, ...]:
        """
        Return a plan for the devices that are there: each copy has the memory and the compute that it says, and each
        device keeps two fifths of its memory for others.
        """
        rng, found = self.rng, list[Replica]()
        memory = {each.id: each.memory * 3 // 5 for each in self.devices.values()}
        compute = {each.id: each.compute for each in self.devices.values()}
        placed = [each for each in self.functions.values() if each.need.reserved]
        for function in rng.sample(placed, min(len(placed), rng.randint(3, 7))):
            for device in rng.sample(sorted(memory), min(len(memory), rng.choice((1, 1, 2)))):
                replica, need = self._replica(function, device), function.need
                takes = replica.share or replica.reserve or need.compute
                size = function.profile("gpu").occupation
                if size > memory[device] or takes > compute[device]:
                    continue
                memory[device] -= size
                # A share is held for good; what grants take is taken in turns, beside the shares.
                compute[device] = (
                    compute[device] - takes if replica.share else min(compute[device], ALL_COMPUTE - takes)
                )
                found.append(replica)
        return tuple(found)

    def _replica(self, function: Function, device: DeviceId) -> Replica:
        rng, need = self.rng, function.need
        share = rng.choice((0, 20, 40)) if need.sharing == "auto" else 0
        reserve = rng.choice((0, 30, 50)) if need.sharing in ("auto", "spatial") and not share else 0
        return Replica(function.id, device, share, reserve, rng.randint(0, need.slots), rng.randint(0, need.batch_max))

    def _wild(self) -> tuple[Replica, ...]:
        """Return a plan that nobody has checked: the engine has to live with it."""
        rng = self.rng
        names = [*self.functions, LATE, FunctionId("never")]
        found = {}
        for _ in range(rng.randint(1, 9)):
            name, device = rng.choice(names), DeviceId(f"n{rng.randrange(5)}/d")
            function = self.functions.get(name)
            if function is None or function.need.sharing == "auto":
                found[name, device] = Replica(name, device, rng.choice((0, 30, 70, 100)))
            elif function.need.reserved:
                found[name, device] = self._replica(function, device)
        return tuple(found.values())

    def _change(self) -> None:
        kind = self.rng.randrange(7)
        if kind < 2:
            self.apply(self.feasible())
        elif kind < 4:
            self.apply(self._wild())
        elif kind == 4:
            self.apply(self.rng.choice(self.applied) if self.applied else ())  # rolled back to
        elif kind == 5:
            self.apply(())
        else:
            self.take_over()

    def differences(self) -> list[str]:
        """
        Return where nodes and engine differ from the plan in force. After a `feasible` one, in quiet times, they do
        not.
        """
        found = []
        names, devices = {each for each, _ in self.planned}, {each.device for each in self.workers.values()}
        docs = {(device, each.function): each for device in devices for each in self._residents(device)}
        for (name, device), replica in self.planned.items():
            need, doc = self.functions[FunctionId(name)].need, docs.get((device, FunctionId(name)))
            wanted = replica.share, replica.reserve, replica.slots or need.slots, replica.batch or need.batch_max
            if doc is None or doc.loading:
                found.append(f"{name} is not on {device}")
            elif (limits := (doc.share, doc.reserve, doc.slots or need.slots, doc.batch or need.batch_max)) != wanted:
                found.append(f"{name} on {device} has share, reserve, slots and batch {limits}, not {wanted}")
        for worker in self.workers.values():
            name, device, need = worker.function, worker.device, self.functions[worker.function].need
            at, doc = (name, device), docs[device, name]
            if name in names and at not in self.planned:
                found.append(f"{name} is on {device}, where the plan has none")
            share = self.planned[at].share if at in self.planned else need.held
            if worker.share != share:
                found.append(f"the worker of {name} on {device} has a share of {worker.share} %, not of {share} %")
            if name not in names and (
                doc.reserve or doc.slots not in (0, need.slots) or doc.batch not in (0, need.batch_max)
            ):
                found.append(f"{name} on {device} is limited still: {doc}")
        return found

    def _residents(self, device: DeviceId) -> tuple[ResidentDoc, ...]:
        doc = self.engine.doc(f"devices/{device}", self.now)
        assert isinstance(doc, DeviceDoc)
        return doc.residents

    def _note_leaving(self) -> None:
        residents = [each for device in self.devices for each in self._residents(device)]
        self.leaving |= {copy_id(each.function, each.copy) for each in residents if each.draining}

    # --- what always holds ---

    def _drain(self, device: DeviceId, *, drain: bool = True) -> None:
        self._note_leaving()
        super()._drain(device, drain=drain)

    def _may_evict(self, worker: Worker) -> None:
        stays = (worker.function, worker.device) in self.planned and worker.device not in self.drained
        name = copy_id(worker.function, worker.number)
        assert not stays or name in self.leaving, f"{name} on {worker.device} is evicted, and the plan has it"

    def _takes(self, _worker: Worker, call: CallId) -> int:
        granted = self.engine._world.calls.by_id[call].granted
        return 0 if granted is None else granted.compute

    def _obey(self, command: m.Command) -> None:
        super()._obey(command)
        if isinstance(command, m.SetLimit):
            worker = next(
                each for each in self.workers.values()
                if (each.function, each.device, each.number) == (command.function, command.device, command.copy)
            )  # fmt: skip
            worker.takes = {number: self._takes(worker, min(calls)) for number, calls in worker.grants.items()}

    # --- takeover ---

    def take_over(self) -> None:
        """Another engine goes on from the docs, the nodes and the calls that wait, as a new leader does."""
        for key in self.engine.take_changed():
            doc = self.engine.doc(key, self.now)
            if doc is None:
                self.store.pop(key, None)
            else:
                self.store[key] = doc
        self.past.append(Epoch(self.header, self.events, self.commands))
        self.header = replace(self.header, epoch=self.header.epoch + 1)
        self.engine, self.events, self.commands = self.header.engine(), [], []
        for function in self.functions.values():
            self.tell(m.FunctionDeployed(function))
        kept = list(self.store.values())
        functions = tuple(each for each in kept if isinstance(each, FunctionDoc))
        devices = tuple(each for each in kept if isinstance(each, DeviceDoc))
        left = self.store.get(ENGINE_KEY)
        assert left is None or isinstance(left, EngineDoc)
        self.tell(m.Restored(left, functions, devices))
        for device in list(self.devices.values()):
            node = node_of(device.id)
            staged = [StagedWeights(each, 1) for each in sorted(self.staged.get(node, ()))]
            staged += [StagedWeights(each, 1, True) for each in sorted(self.staging.get(node, ()))]
            self.tell(m.DeviceJoined(device, self._snapshot(device), tuple(staged)))
        for call in self.open:
            if call not in self.running:
                self.tell(m.Arrived(call, self.called[call], None, self.now - self.arrived[call]))
        self.tell(m.Serving())

    def _snapshot(self, device: Device) -> DeviceSnapshot:
        here = [each for each in self.workers.values() if each.device == device.id]
        parked = [each for (where, _), each in self.parked.items() if where == device.id]
        return DeviceSnapshot(
            device,
            tuple(self._resident(each) for each in here),
            tuple(
                self._running(worker, number, call)
                for worker in here for number, calls in worker.grants.items() for call in sorted(calls)
            ),
            tuple(ParkedSnapshot(each.function, each.function, each.number, each.memory) for each in parked),
        )  # fmt: skip

    def _resident(self, worker: Worker) -> ResidentSnapshot:
        age_s = 0.0 if worker.ready else self.now - worker.began_at
        idle_s = self.now - worker.used_at
        return ResidentSnapshot(
            worker.function, worker.function, worker.memory, worker.number, idle_s, not worker.ready, age_s, worker.tier
        )

    def _running(self, worker: Worker, number: int, call: CallId) -> RunningCall:
        grant = self.grants[call]
        together = number if len(grant.calls) > 1 else 0
        return RunningCall(
            call, worker.function, worker.number, self.now - self.since[call], worker.ready, grant.cold,
            call in self.aborted, together, len(grant.calls),
        )  # fmt: skip
