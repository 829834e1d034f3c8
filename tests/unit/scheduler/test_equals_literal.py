"""The engine's indexes change the cost of a decision, never the decision."""

from collections.abc import Callable
from heapq import heappop, heappush

from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.scheduler import literal
from tests.unit.scheduler.world import limited

from gpufaas_cache_manager.replacement import Lru
from gpufaas_core import messages as m
from gpufaas_core.model import CallId, Device, DeviceId, Function, FunctionId, Profile
from gpufaas_scheduler.engine import Engine
from gpufaas_scheduler.policies import make_policy

TICK = 1 / 1024
"""All times are multiples of it, so that sums of floats are exact and ties are ties on both sides."""


NEVER = float("inf")


class Both:
    """The engine and the literal scheduler in one world, told the same facts; after each both have done the same."""

    def __init__(self, functions: list[tuple[int, int, int]], policy: str, limit: int) -> None:
        self.functions = [
            literal.LiteralFunction(f"f{i}", size, load * TICK, service * TICK)
            for i, (size, load, service) in enumerate(functions)
        ]
        self.literal = literal.Literal(self.functions, policy, limit)
        self.engine = Engine(policy=make_policy(limited(policy, limit)), replacement=Lru(), learn=False)
        for each in self.functions:
            profile = Profile(each.load_s, each.service_s, each.size)
            function = Function(FunctionId(each.name), "", profiles={"*": profile})
            self.engine.handle(m.FunctionDeployed(function), 0.0)
        self.fates: dict[str, list[tuple[int, int, bool]]] = {}
        """Of each start of a call: ticks off its service, ticks off its load, whether the node refuses it."""
        self.seen = 0
        self.rejected = 0
        self.lost: set[int] = set()
        self.calendar: list[tuple[float, int, int, m.Event]] = []
        self.serial = 0

    def at(self, time: float, event: m.Event) -> None:
        """Completions come before arrivals at the same instant."""
        self.serial += 1
        heappush(self.calendar, (time, isinstance(event, m.Arrived | m.CallerLeft), self.serial, event))

    def go(self) -> int:
        """Run to the end; return the number of decisions that were compared."""
        while self.calendar:
            overdue = min(map(self.literal.overdue_at, self.literal.devices), default=NEVER)
            assert (NEVER if self.engine.wake_at is None else self.engine.wake_at) == overdue
            if overdue < self.calendar[0][0]:
                self.tell(m.Woken(), overdue)
                continue
            now, _, serial, event = heappop(self.calendar)
            if serial not in self.lost:
                self.tell(event, now)
        return len(self.literal.decisions)

    def tell(self, event: m.Event, now: float) -> None:
        self.literal.tell(now)
        match event:
            case m.Arrived(call, function):
                self.literal.arrive(call, function)
            case m.Finished(_, device):
                self.literal.finish(device)
            case m.Loaded(function, device):
                self.literal.loaded(device, function)
            case m.NodeRefused(_, device):
                self.literal.refuse(device)
            case m.CallerLeft(call):
                self.literal.cancel(call)
            case m.DeviceJoined(device):
                self.literal.join(device.id, device.memory)
            case m.DeviceLeft(device):
                # What was going on there comes to no end any more.
                self.lost |= {
                    serial for _, _, serial, later in self.calendar if getattr(later, "device", None) == device
                }
                self.literal.leave(device)
        self.literal.settle()
        done = []
        rejected = []
        for command in self.engine.handle(event, now):
            match command:
                case m.StartCall(grant):
                    victims = tuple(each.rpartition("#")[0] for each in grant.victims)
                    done.append(literal.Decision(now, grant.call, grant.device, not grant.cold, victims, grant.local))
                    self.start(grant, now)
                case m.RejectCall(call):
                    rejected.append(call)
        assert done == self.literal.decisions[self.seen :], f"after {event}"
        assert rejected == self.literal.rejected[self.rejected :], f"after {event}"
        self.seen = len(self.literal.decisions)
        self.rejected = len(self.literal.rejected)

    def start(self, grant: m.Grant, now: float) -> None:
        fates = self.fates[grant.call]
        service_off, load_off, refused = fates.pop() if len(fates) > 1 else fates[0]
        function = next(each for each in self.functions if each.name == grant.function)
        if refused:
            self.at(now + TICK, m.NodeRefused(grant.call, grant.device, "no"))
            return
        load_s = max(TICK, function.load_s + load_off * TICK) if grant.cold else 0.0
        service_s = max(TICK, function.service_s + service_off * TICK)
        if grant.cold:
            self.at(now + load_s, m.Loaded(grant.function, grant.device, load_s, 0, grant.copy))
        self.at(now + load_s + service_s, m.Finished(grant.call, grant.device, service_s))


FUNCTIONS = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=8)
FATES = st.tuples(st.integers(-5, 5), st.integers(-5, 5), st.integers(0, 9).map(lambda n: n == 0))
CALLS = st.lists(
    st.tuples(
        st.one_of(st.just(0), st.integers(0, 12)),  # ticks after the one before
        st.integers(0, 99),  # function
        st.lists(FATES, min_size=1, max_size=3),
        st.one_of(st.none(), st.none(), st.none(), st.integers(0, 60)),  # cancelled so many ticks later
    ),
    min_size=1,
    max_size=60,
)
DEVICES = st.lists(st.integers(2, 16), min_size=1, max_size=5)
CHANGES = st.lists(st.tuples(st.integers(1, 200), st.integers(0, 4)), max_size=2)
LIMITS = st.sampled_from([0, 1, 2, 3, 5, 25])


@examples(600)
@given(FUNCTIONS, DEVICES, CALLS, CHANGES, st.sampled_from(["lb", "lalb", "lalb-o3"]), LIMITS)
def test_decisions_are_those_of_the_literal_scan(
    functions: list[tuple[int, int, int]],
    devices: list[int],
    calls: list[tuple[int, int, list[tuple[int, int, bool]], int | None]],
    changes: list[tuple[int, int]],
    policy: str,
    limit: int,
) -> None:
    """With devices too small for some functions, refusals, cancelled calls, wrong estimates, and devices that leave."""
    both = Both(functions, policy, limit if policy == "lalb-o3" else 0)
    for number, memory in enumerate(devices):
        both.tell(m.DeviceJoined(Device(DeviceId(f"d{number}"), "gpu", memory)), 0.0)
    now = 0.0
    for number, (gap, function, fates, cancelled) in enumerate(calls):
        now += gap * TICK
        call = CallId(f"c{number}")
        both.fates[call] = list(fates)
        both.at(now, m.Arrived(call, FunctionId(f"f{function % len(functions)}")))
        if cancelled is not None:
            both.at(now + cancelled * TICK, m.CallerLeft(call))
    gone = set()
    for ticks, number in changes:
        if number < len(devices) and number not in gone:
            gone.add(number)
            both.at(ticks * TICK, m.DeviceLeft(DeviceId(f"d{number}"), "gone"))
            back = Device(DeviceId(f"d{number}"), "gpu", devices[number])
            both.at((ticks + 30) * TICK, m.DeviceJoined(back))

    both.go()


def test_a_long_queue_gives_the_literal_decisions_too() -> None:
    """Hundreds wait at once, as small examples never do."""
    import random

    for seed in range(4):
        rng = random.Random(seed)
        choose: Callable[[int, int], int] = rng.randint
        both = Both([(choose(1, 8), choose(5, 40), choose(3, 12)) for _ in range(12)], "lalb-o3", choose(1, 25))
        for number in range(4):
            both.tell(m.DeviceJoined(Device(DeviceId(f"d{number}"), "gpu", choose(6, 20))), 0.0)
        now = 0.0
        for number in range(600):
            now += choose(0, 3) * TICK
            both.fates[f"c{number}"] = [(choose(-2, 2), choose(-2, 2), rng.random() < 0.05)]
            function = min(choose(0, 11), choose(0, 11))
            both.at(now, m.Arrived(CallId(f"c{number}"), FunctionId(f"f{function}")))

        assert both.go() >= 500
