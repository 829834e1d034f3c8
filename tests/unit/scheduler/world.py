"""Builder for tests of the engine: a `World` checks after every event that nothing impossible happened."""

from collections.abc import Iterator, Sequence
from typing import Self

from msgspec.structs import replace
from tests.unit.scheduler.indexes import check_indexes

from gpufaas_cache_manager.replacement import REPLACEMENTS
from gpufaas_core import messages as m
from gpufaas_core.explanation import Explanation
from gpufaas_core.model import (
    CallId,
    Device,
    DeviceId,
    EngineStatus,
    Function,
    FunctionId,
    Need,
    Profile,
    ResidentStatus,
)
from gpufaas_scheduler.engine import Engine
from gpufaas_scheduler.policies import DEFAULT_POLICY, SchedulingPolicy, make_policy
from gpufaas_scheduler.world.costs import Costs
from gpufaas_scheduler.world.world import World as State


def limited(policy: str, limit: int) -> str:
    """Return the spec of *policy*, with this limit on overtaking if it has one."""
    return f"{policy}:o3_limit={limit}" if policy == "lalb-o3" else policy


class World:
    """
    An engine with a clock that the test moves. Commands of the last event are in `out`, all of them in `log`.

    Functions are called by name; sizes are in bytes, and small.
    """

    def __init__(
        self,
        policy: str | SchedulingPolicy = DEFAULT_POLICY,
        *,
        limit: int = 25,
        learn: bool = False,
        max_queue: int = 10_000,
        replacement: str = "lru",
    ) -> None:
        chosen = make_policy(limited(policy, limit)) if isinstance(policy, str) else policy
        self.engine = Engine(policy=chosen, replacement=REPLACEMENTS[replacement](), max_queue=max_queue, learn=learn)
        self.now = 0.0
        self._status: tuple[list[m.Command], float, EngineStatus] | None = None
        """The last answer of `status`, with the commands of the last event and the time."""
        self.redeployed = False
        """A function may declare something else now than when its copies were loaded."""
        self.dropped = False
        """The last refusal took a loading model off its device."""
        self.out: list[m.Command] = []
        self.log: list[m.Command] = []
        self.functions: dict[FunctionId, Function] = {}
        self.removed: set[FunctionId] = set()
        self.succeeds: dict[FunctionId, FunctionId] = {}
        self.running: dict[str, m.Grant] = {}
        self.waiting: dict[str, FunctionId] = {}
        self.arrived: set[str] = set()
        self.nested: set[str] = set()
        """Calls that calls have made."""
        self.ended: set[str] = set()
        """Calls that had their answer: one each."""
        self.aborted: set[str] = set()
        self.capped: set[tuple[str, str, int]] = set()
        """Copies that run their calls within a share, as `where` names them."""
        self.parts: dict[tuple[str, int], set[str]] = {}
        """The devices of each copy that has several, by function and number."""
        self.orphans: set[str] = set()
        """Hits on a worker whose own first call was refused, so that it never came to be: the node refuses them too."""

    # --- facts ---

    def device(
        self, name: str, memory: int = 100, kind: str = "gpu", *, ahead: bool = False, loads_parts: bool = False
    ) -> None:
        self.tell(m.DeviceJoined(Device(DeviceId(name), kind, memory, ahead=ahead, loads_parts=loads_parts)))

    def deploy(
        self,
        name: str,
        size: int = 10,
        load_s: float = 3.0,
        service_s: float = 1.0,
        *,
        slots: int | None = None,
        min_copies: int = 0,
        max_queue: int = 1000,
        max_copies: int = 0,
        kind: str = "*",
        floor: int = 0,
        elastic: bool = False,
        succeeds: str = "",
    ) -> None:
        """With `slots` it is a CPU function."""
        self.tell(
            m.FunctionDeployed(
                Function(
                    FunctionId(name), f"digest of {name}", Need(100 if slots is None else 0, slots=slots or 1),
                    {kind: Profile(load_s, service_s, size)}, min_copies, max_queue, max_copies,
                    floor=floor, elastic=elastic,
                ),
                FunctionId(succeeds) if succeeds else None,
            )
        )  # fmt: skip

    def set_up(
        self,
        functions: str,
        devices: str,
        *,
        memory: int = 100,
        device_kind: str = "gpu",
        ahead: bool = False,
        warm: str = "",
        **declared: object,
    ) -> Self:
        """Add devices, and functions that are all *declared* alike; the first device holds those of *warm*, idle."""
        for name in functions.split():
            self.deploy(name, **declared)
        place = {"memory": memory, "kind": device_kind, **({"ahead": True} if ahead else {})}
        first, *others = devices.split()
        self.device(first, **place)
        for name in warm.split():
            self.warm(name, first)
        for name in others:
            self.device(name, **place)
        return self

    def call(self, name: str, function: str, deadline: float | None = None) -> list[m.Command]:
        return self.tell(m.Arrived(CallId(name), FunctionId(function), deadline))

    def calls(self, which: int | range | str, function: str) -> None:
        """Calls c0, c1 and so on arrive, one after the other; or those that are named."""
        numbers = range(which) if isinstance(which, int) else which
        for name in which.split() if isinstance(which, str) else [f"c{number}" for number in numbers]:
            self.call(name, function)

    def scale(self, function: str, copies: int) -> list[m.Command]:
        return self.tell(m.Scaled(FunctionId(function), copies))

    def loaded(self, function: str, device: str, copy: int = 0, load_s: float = 3.0) -> list[m.Command]:
        return self.tell(m.Loaded(FunctionId(function), DeviceId(device), load_s, 0, copy))

    def numbered(self, event: m.Event) -> m.Event:
        """An event about copy 0 where there is none is about the only copy on its device: tests need not count."""
        if getattr(event, "copy", None) != 0 or event.device not in [each.device.id for each in self.status.devices]:
            return event
        there = [each.copy for each in self.on(event.device).resident if each.function == event.function]
        return replace(event, copy=there[0]) if len(there) == 1 else event

    def finish(self, call: str, service_s: float = 1.0, *, ok: bool = True) -> list[m.Command]:
        """The call ends; if it was cold, its worker got ready first."""
        grant = self.running[call]
        if grant.cold and self.model(grant.function, grant.device, grant.copy).loading:
            self.loaded(grant.function, grant.device, grant.copy)
        return self.tell(m.Finished(CallId(call), grant.device, service_s, ok))

    def refuse(self, call: str, *, opened: bool = False) -> list[m.Command]:
        return self.tell(m.NodeRefused(CallId(call), self.running[call].device, "no", opened))

    def warm(self, function: str, device: str) -> None:
        """Make *function* resident on the only idle device, *device*."""
        name = f"warm-{function}-{device}"
        self.call(name, function)
        assert self.running[name].device == device
        self.finish(name)

    def tell(self, event: m.Event) -> list[m.Command]:
        if isinstance(event, m.NodeRefused):
            grant = self.running[event.call]
            held = self.on(grant.device).resident
            self.dropped = any(
                (each.function, each.copy) == (grant.function, grant.copy) and each.loading for each in held
            )
        event = self.numbered(event)
        draining, copies = self.draining, self.copies
        self.out = self.engine.handle(event, self.now)
        self.log += self.out
        self._follow(event)
        check(self.status, self)
        check_indexes(self.engine)
        for command in self.out:
            if isinstance(command, m.StartCall) and not command.grant.local:
                place = where(command.grant)
                late = command.grant.call not in self.nested and place in draining & self.draining
                assert not late, f"{place} is surplus and got a new call"
        if isinstance(event, m.Arrived) and event.call in self.running:
            self._check_choice(self.running[event.call])
        if isinstance(event, m.Arrived | m.Finished | m.CallerLeft | m.Loaded | m.Measured | m.Woken | m.Scaled):
            present = self.copies
            giving = {old for new, old in self.succeeds.items() if new not in self.removed}  # room to that one
            for function in self.functions.keys() - self.removed - giving:  # of one that is gone, all are evicted
                least = min(self.functions[function].min_copies, copies.get(function, 0))
                assert present.get(function, 0) >= least, f"{function} has fewer than its minimum"
        return self.out

    def _check_choice(self, grant: m.Grant) -> None:
        """The call that has just come was given to a copy that runs the fewest."""
        if grant.cold or self.functions[grant.function].need.compute:
            return
        others = [each for device in self.status.devices for each in device.resident
                  if each.function == grant.function and not each.draining]  # fmt: skip
        chosen = self.model(grant.function, grant.device, grant.copy)
        ready = [each.running for each in others if not each.loading] or [each.running for each in others]
        assert chosen.running <= min([*ready, chosen.running - 1]) + 1, f"{where(grant)} runs more than another"

    def _follow(self, event: m.Event) -> None:
        """Keep our own account of each call, from the facts and commands alone."""
        match event:
            case m.Arrived(call, function):
                self.arrived.add(call)
                self.waiting[call] = function
                if event.outer is not None:
                    self.nested.add(call)
            case m.Finished(call, device):
                if call in self.running and self.running[call].device == device:
                    del self.running[call]
                    self.ended.add(call)
            case m.NodeRefused(call):
                grant = self.running.pop(call)
                self.orphans.discard(call)
                if call in self.aborted:
                    self.ended.add(call)
                else:
                    self.waiting[call] = grant.function
                if grant.cold and self.dropped:
                    self.orphans |= {name for name, each in self.running.items() if where(each) == where(grant)}
            case m.CallerLeft(call):
                if self.waiting.pop(call, None) is not None:
                    self.ended.add(call)
            case m.CopyFailed() | m.WorkerExited():
                self._over(lambda grant: where(grant) == where(event))
            case m.DeviceLeft(device):
                self._over(lambda grant: device in [each.device for each in grant.parts], orphans=True)
            case m.DeviceJoined(device):
                self._over(lambda grant: grant.device == device.id, orphans=True)
            case m.FunctionDeployed(function):
                self.redeployed = self.redeployed or function.id in self.functions
                known = self.functions.get(function.id)
                if known is not None and (known.need.compute or function.need.compute):
                    function = replace(function, need=known.need)  # the engine keeps it
                self.functions[function.id] = function
                self.removed.discard(function.id)
                if event.succeeds is not None:
                    self.succeeds[function.id] = event.succeeds
            case m.FunctionRemoved(function):
                self.removed.add(function)
        for command in self.out:
            loads = command.grant if isinstance(command, m.StartCall) else command
            if isinstance(loads, m.Grant | m.LoadCopy) and len(loads.parts) > 1:
                self.parts[loads.function, loads.copy] = {each.device for each in loads.parts}
            match command:
                case m.StartCall(grant):
                    for call in grant.calls:
                        assert call in self.waiting, f"{call} was started without waiting"
                        del self.waiting[call]
                        self.running[call] = grant
                case m.RejectCall(call):
                    assert call in self.waiting, f"{call} was rejected without waiting"
                    del self.waiting[call]
                    self.ended.add(call)
                case m.Abort(call):
                    if not command.unbegun:
                        self.aborted.add(call)
                case m.SetLimit():
                    (self.capped.add if command.share else self.capped.discard)(where(command))

    def _over(self, gone, *, orphans: bool = False) -> None:  # type: ignore[no-untyped-def]
        for call, grant in list(self.running.items()):
            if gone(grant) and (orphans or call not in self.orphans):
                del self.running[call]
                self.ended.add(call)

    # --- questions ---

    @property
    def copies(self) -> dict[FunctionId, int]:
        """Of each function that has any, without those that drain."""
        there = {(each.function, each.copy) for _, each in self._residents() if not each.draining}
        return _counts(function for function, _ in there)

    @property
    def draining(self) -> set[tuple[str, str, int]]:
        """As `where` names them."""
        return {(each.function, device, each.copy) for device, each in self._residents() if each.draining}

    def loading(self) -> list[tuple[FunctionId, DeviceId, int]]:
        return [(each.function, device, each.copy) for device, each in self._residents() if each.loading]

    def hear(self) -> None:
        """All silent copies are heard again."""
        for device, each in list(self._residents()):
            if each.silent:
                self.tell(m.CopySilent(each.function, device, each.copy, False))

    def _residents(self) -> Iterator[tuple[DeviceId, ResidentStatus]]:
        """Those since the last event: time does not change them."""
        found = self._status
        known = found is not None and found[0] is state_of(self.engine).out
        for device in (found[2] if known else self.status).devices:
            for each in device.resident:
                yield device.device.id, each

    @property
    def status(self) -> EngineStatus:
        """Of the engine now. It is asked for many times between two events, each of which makes a list of commands."""
        last, found = state_of(self.engine).out, self._status
        if found is None or found[0] is not last or found[1] != self.now:
            self._status = found = last, self.now, self.engine.status(self.now)
        return found[2]

    def on(self, device: str):  # type: ignore[no-untyped-def]
        return next(each for each in self.status.devices if each.device.id == device)

    def models(self, device: str) -> list[str]:
        """In LRU order, least recently used first."""
        return [each.function for each in self.on(device).resident]

    def model(self, function: str, device: str, copy: int | None = None):  # type: ignore[no-untyped-def]
        return next(
            each for each in self.on(device).resident if each.function == function and copy in (None, each.copy)
        )

    def explain(self, call: str) -> Explanation:
        return explanation(self.engine, call, self.now)

    def costs(self, function: str) -> Costs:
        """What is known of it on GPUs."""
        found = state_of(self.engine).functions[FunctionId(function)].costs["gpu"]
        assert found is not None
        return found

    @property
    def message(self) -> str:
        """The words of the rejection that the last event ended with."""
        assert isinstance(self.out[-1], m.RejectCall)
        return self.out[-1].message

    @property
    def started(self) -> list[tuple[str, str]]:
        """(call, device) of the last event."""
        return starts(self.out)

    @property
    def rejected(self) -> list[tuple[str, str]]:
        """(call, code) of the last event."""
        return [(each.call, each.code) for each in self.out if isinstance(each, m.RejectCall)]


def world_of(
    functions: str,
    devices: str = "a",
    *,
    policy: str | SchedulingPolicy = DEFAULT_POLICY,
    learn: bool = False,
    **more: object,
) -> World:
    """Return a world that is `set_up` so."""
    return World(policy, learn=learn).set_up(functions, devices, **more)


def two_devices(policy: str = "lalb-o3", **options: object) -> World:
    """Return a world where a holds f, b holds g; both idle, a with more starts. Each takes one function of size 60."""
    world = World(policy, **options)
    for name in "fgh":
        world.deploy(name, size=60)
    world.device("a")
    world.warm("f", "a")
    world.device("b")
    world.call("occupy", "f")
    world.warm("g", "b")
    world.finish("occupy")
    return world


def state_of(engine: Engine) -> State:
    """Return what *engine* decides from, for tests of its parts. All others ask the engine itself."""
    return engine._world


def explanation(engine: Engine, call: str, now: float) -> Explanation:
    found = engine.explain(CallId(call), now)
    assert found is not None
    return found


def where(what) -> tuple[str, str, int]:  # type: ignore[no-untyped-def]
    """Return which copy a message is about."""
    return (what.function, what.device, what.copy)


def starts(commands: Sequence[m.Command]) -> list[tuple[str, str]]:
    grants = [each.grant for each in commands if isinstance(each, m.StartCall)]
    return [(call, grant.device) for grant in grants for call in grant.calls]


def check(status: EngineStatus, world: World) -> None:
    """What holds after every event, whatever the policy."""
    reserving: dict[str, int] = {}
    running: dict[tuple[str, str, int], int] = {}
    granted = [grant for call, grant in world.running.items() if call not in world.orphans]
    calls = _counts((grant.function, part.device, grant.copy) for grant in granted for part in grant.parts)
    grants = {grant.number: grant for grant in granted}
    for grant in grants.values():
        for part in grant.parts:
            place = (grant.function, part.device, grant.copy)
            running[place] = running.get(place, 0) + 1
            need = world.functions[grant.function].need
            holds = running[place] == 1 or need.sharing == "spatial"  # else one hold is for all grants of a copy
            if need.compute and holds and place not in world.capped:
                reserving[part.device] = reserving.get(part.device, 0) + 1
    for device in status.devices:
        name = device.device.id
        assert device.used == sum(each.memory for each in device.resident)
        assert device.used <= device.device.memory, f"{name} holds more than it has"
        assert sum(each.limit for each in device.resident) <= device.device.memory, f"{name} promises more than it has"
        if device.busy and not reserving.get(name, 0):
            assert any(each.loading for each in device.resident), f"{name} is busy with nothing"
        else:
            assert reserving.get(name, 0) == device.busy, (
                f"calls that reserve compute on {name}: {reserving.get(name, 0)}"
            )
        queued = [each.function for each in device.resident if world.functions[each.function].need.compute]
        assert len(set(queued)) == len(queued), f"two copies of a model function on {name}"
        for model in device.resident:
            place = (model.function, name, model.copy)
            assert model.running == calls.get(place, 0)
            need = world.functions[model.function].need
            ahead = need.batch_max > 1 or (device.device.ahead and need.slots == 1)
            assert running.pop(place, 0) <= need.slots + ahead, "one batch or call may go ahead"
            assert model.limit >= model.memory
            floor = min(world.functions[model.function].floor, device.device.memory)
            assert model.memory >= floor or world.redeployed, f"{model.function} has less than it declares"
            used = model.running or model.loading or device.local_queue
            assert not model.draining or used or model.silent, f"{model.function} could go from {name}"
        assert device.local_queue == 0 or device.busy
    places: dict[tuple[str, int], list[str]] = {}
    for device in status.devices:
        for each in device.resident:
            places.setdefault((each.function, each.copy), []).append(device.device.id)
    for name, devices in places.items():
        assert len(devices) == 1 or set(devices) == world.parts.get(name), f"copy {name} is on {devices}"
        assert len(devices) == len(world.parts.get(name, devices)), f"a part of copy {name} is missing"
    for function, copies in world.copies.items():
        bounds = world.functions[function]
        assert bounds.need.compute or not bounds.max_copies or copies <= max(bounds.min_copies, bounds.max_copies)
    for function, desired in status.desired.items():
        bounds = world.functions[function]
        assert bounds.min_copies <= desired <= max(bounds.min_copies, bounds.max_copies or desired)
        assert desired or not status.queued.get(function), f"{function} waits at zero"
    assert status.queued == _counts(world.waiting.values()), "a call was lost, or counted twice"
    assert status.running == _counts(grant.function for grant in world.running.values())
    assert not running, f"calls run where their function is not: {running}"


def _counts(functions) -> dict[FunctionId, int]:  # type: ignore[no-untyped-def]
    counted: dict[FunctionId, int] = {}
    for function in functions:
        counted[function] = counted.get(function, 0) + 1
    return counted
