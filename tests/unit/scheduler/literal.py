"""
GPU-FaaS's scheduler as in algorithms 1 and 2 of the paper, and nothing else: explicit lists, explicit counters, every
scan from the head of the queue. The engine must make the same decisions; it shares no code with this one.

Two rules are not in the listing, which knows all times (docs/adr/0028). A holder that is late by the waiting call's
load time or more is no busy holder. And when a device is late by the load time of the first call in its local queue,
its local queue goes back to the global one, with numbers and passes, before whatever else happens at that moment; the
scheduling run after it is the same as that after the event.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class LiteralFunction:
    name: str
    size: int
    load_s: float
    service_s: float


@dataclass
class LiteralCall:
    name: str
    function: LiteralFunction
    number: int
    passes: int = 0
    refusals: int = 0
    cold: bool = False
    aborted: bool = False


@dataclass
class LiteralDevice:
    name: str
    joined: int
    memory: int
    lru: list[str] = field(default_factory=list)
    """Least recently used first."""
    starts: int = 0
    running: LiteralCall | None = None
    ends: float = 0.0
    loading: str | None = None
    local: list[LiteralCall] = field(default_factory=list)


@dataclass(frozen=True)
class Decision:
    time: float
    call: str
    device: str
    hit: bool
    victims: tuple[str, ...]
    local: bool


class Literal:
    def __init__(self, functions: list[LiteralFunction], policy: str, limit: int) -> None:
        self.functions = {each.name: each for each in functions}
        self.policy = policy
        self.limit = limit
        self.devices: list[LiteralDevice] = []
        self.queue: list[LiteralCall] = []
        self.arrived = 0
        self.joined = 0
        self.now = 0.0
        self.decisions: list[Decision] = []
        self.rejected: list[str] = []
        self.returned = False
        """Local queues went back, and no scheduling run followed yet."""

    # --- facts ---

    def tell(self, now: float) -> None:
        """Time has come to *now*; what happens then is told next, and `settle` after it."""
        self.now = now
        overdue = [device for device in self.devices if self.overdue_at(device) <= now]
        for device in overdue:
            for call in device.local:
                self.give_back(call)
            device.local = []
        self.returned = bool(overdue)

    def settle(self) -> None:
        if self.returned:
            self.run()

    def overdue_at(self, device: LiteralDevice) -> float:
        if device.running is None or not device.local:
            return float("inf")
        return device.ends + device.local[0].function.load_s

    def join(self, name: str, memory: int) -> None:
        self.devices.append(LiteralDevice(name, self.joined, memory))
        self.joined += 1
        self.run()

    def leave(self, name: str) -> None:
        device = self.device(name)
        self.devices.remove(device)
        for call in device.local:
            self.give_back(call)
        self.run()

    def arrive(self, name: str, function: str) -> None:
        needed = self.functions[function]
        if self.devices and all(needed.size > device.memory for device in self.devices):
            self.rejected.append(name)
            return
        self.queue.append(LiteralCall(name, needed, self.arrived))
        self.arrived += 1
        self.run()

    def finish(self, device_name: str) -> None:
        device = self.device(device_name)
        device.running = None
        self.start_local(device)
        self.run()

    def loaded(self, device_name: str, function: str) -> None:
        device = self.device(device_name)
        assert device.loading == function
        device.loading = None
        assert device.running is not None
        device.ends = self.now + device.running.function.service_s

    def refuse(self, device_name: str) -> None:
        device = self.device(device_name)
        call = device.running
        assert call is not None
        device.running = None
        if call.cold and device.loading == call.function.name:
            device.loading = None
            device.lru.remove(call.function.name)
            stranded = [each for each in device.local if each.function is call.function]
            for each in stranded:
                device.local.remove(each)
                self.give_back(each)
        call.refusals += 1
        if call.aborted:
            pass
        elif call.refusals == 3:
            self.rejected.append(call.name)
        else:
            self.give_back(call)
        self.start_local(device)
        self.run()

    def cancel(self, name: str) -> None:
        """A call that waits gives its place up; one that runs does not come back if it is refused."""
        self.queue = [call for call in self.queue if call.name != name]
        for device in self.devices:
            if device.running is not None and device.running.name == name:
                device.running.aborted = True
            if any(call.name == name for call in device.local):
                device.local = [call for call in device.local if call.name != name]
                self.run()
                return

    def device(self, name: str) -> LiteralDevice:
        return next(device for device in self.devices if device.name == name)

    def give_back(self, call: LiteralCall) -> None:
        self.queue.append(call)
        self.queue.sort(key=lambda each: each.number)

    def start_local(self, device: LiteralDevice) -> None:
        if device.local:
            self.start(device.local.pop(0), device, local=True)

    # --- 3.2 ---

    def run(self) -> None:
        self.returned = False
        if not self.queue:
            return
        idle = [device for device in self.devices if device.running is None]
        idle.sort(key=lambda device: (-device.starts, device.joined))
        for device in idle:
            if device.running is None and self.queue:
                if self.policy == "lb":
                    self.balance(device)
                else:
                    self.locality(device, idle)

    def balance(self, device: LiteralDevice) -> None:
        for call in self.queue:
            if self.can_start(call, device):
                self.take(call, device)
                return

    def locality(self, device: LiteralDevice, idle: list[LiteralDevice]) -> None:
        for call in list(self.queue):
            if call.function.name in device.lru:
                self.take(call, device)
                return
            if call.passes >= self.limit:
                if self.place(call, device, idle):
                    return
            else:
                call.passes += 1
        for call in list(self.queue):
            if self.place(call, device, idle):
                return

    # --- 3.3 ---

    def place(self, call: LiteralCall, device: LiteralDevice, idle: list[LiteralDevice]) -> bool:
        """Whether that used *device*."""
        name = call.function.name
        holders = [each for each in self.devices if name in each.lru]
        for each in idle:
            if each in holders and each.running is None:
                self.take(call, each)
                return False
        busy = [each for each in holders if each.running and self.now - each.ends < call.function.load_s]
        if busy:
            soonest = min(busy, key=lambda each: (self.finish_time(each), each.joined))
            if self.finish_time(soonest) < call.function.load_s:
                self.queue.remove(call)
                soonest.local.append(call)
                return False
        if self.can_start(call, device):
            self.take(call, device)
            return True
        return False

    def finish_time(self, device: LiteralDevice) -> float:
        return max(0.0, device.ends - self.now) + sum(call.function.service_s for call in device.local)

    # --- memory ---

    def victims(self, function: LiteralFunction, device: LiteralDevice) -> list[str] | None:
        free = device.memory - sum(self.functions[name].size for name in device.lru)
        chosen: list[str] = []
        pinned = {call.function.name for call in device.local}
        if device.running is not None:
            pinned.add(device.running.function.name)
        for name in device.lru:
            if free >= function.size:
                break
            if name not in pinned:
                chosen.append(name)
                free += self.functions[name].size
        return chosen if free >= function.size else None

    def can_start(self, call: LiteralCall, device: LiteralDevice) -> bool:
        return call.function.name in device.lru or self.victims(call.function, device) is not None

    def take(self, call: LiteralCall, device: LiteralDevice) -> None:
        self.queue.remove(call)
        self.start(call, device, local=False)

    def start(self, call: LiteralCall, device: LiteralDevice, local: bool) -> None:
        name = call.function.name
        hit = name in device.lru
        victims: list[str] = []
        device.ends = self.now + call.function.service_s
        if hit:
            device.lru.remove(name)
        else:
            found = self.victims(call.function, device)
            assert found is not None
            victims = found
            device.lru = [each for each in device.lru if each not in victims]
            device.ends += call.function.load_s
            device.loading = name
        device.lru.append(name)
        device.running = call
        device.starts += 1
        call.cold = not hit
        self.decisions.append(Decision(self.now, call.name, device.name, hit, tuple(victims), local))
