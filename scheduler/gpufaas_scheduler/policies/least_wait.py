"""
Least wait: serve what relieves the most waiting per second of a device, and hold what would cost the most to miss.

*Objective.* The sum of all waits, in seconds of waiting per second, with few calls that wait beyond a bound. Everything
is put into that one unit:

- *A copy* of function f, of k copies, is worth ``rate(f) x (delay(f, k - 1) - delay(f, k))``. ``delay(f, 0)`` adds a
  load, weighted by how much of the cluster's time is in demand; ``delay(f, k)`` is the wait for one of k holders that
  all are busy, by Sakasegawa's approximation of the M/G/k queue: services are even, but a holder is also away for
  loads and for the other functions on it. So the last copy of a function that is called is worth a load for each call,
  a second copy of a busy one a queue, and a twelfth copy next to nothing.
- *Victims* are the models with the least worth that make enough room; a function that has calls waiting keeps its
  last copy if anything else can go.
- *Where to load*: the idle device on which the victims are worth the least; ties go to the less demanded device.
- *Whom to serve* on a device that became free: the oldest call that it holds the model for. Unless a load relieves
  more: n waiting calls of a function that no device holds, or whose holders are all far behind, weigh
  ``n x age / (load + victims + n x service)`` against ``age / service`` of the hit. So loads give way to hits while
  there is much to do, gather calls meanwhile, and cannot starve.
- *Which holder*, if several are idle: the one whose other models would be missed least while it is busy.
- *Wait or load*: a call whose holders are busy waits for them if they are sooner than a load, counting their queues.
  How soon is the mean residual life of what runs there: where times have a heavy tail, it grows while a call runs. If
  it waits, a replica is loaded on an idle device without it, when its worth over the horizon exceeds the load's
  device time and the worth of its victims.
- *Never idle beside work*: the first call of a function that waits beside an idle device is promised the wait that was
  estimated then. When that is over, it is looked at again; a load later, it is loaded, whatever the victims are worth.
- *Bound*: the oldest call, if it would wait for longer than `wait_bound_s`, has an idle device that holds its model, or
  else one that it is loaded on, one device at a time and for a share of all devices' time. Other calls go on.

There are no local queues: a call that waits for a holder waits in the global queue, so that each decision is made when
a device is free and not in advance. Nothing is used but arrivals so far, the profiles, and who holds and runs what.

*Cost* of a decision: O(models on the device + log of the waiting functions) for a hit; a load looks at
`_CANDIDATES` idle devices with their models, and at `_RIVALS` functions, however many there are. Independent of the
number of waiting calls.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice
from math import inf, sqrt
from typing import Final, NamedTuple, TypeAlias

from msgspec.structs import replace

from gpufaas_core.model import CopyId, FunctionId, Seconds
from gpufaas_scheduler.contract import (
    DeviceView,
    FunctionView,
    Load,
    Option,
    Plan,
    Promise,
    ResidentView,
    Start,
    View,
    WaitingCall,
    Why,
)

DEFAULT_WAIT_BOUND_S: Final = 30.0

# Found in simulations of specs' workloads (benchmarks/policy.py); none is sharp: halving or doubling one at a time
# changes mean waits by a few per cent.

_HORIZON_S: Final = 30.0
"""How long the presence or absence of a copy is taken to matter."""
_OWN_LOAD: Final = 0.25
"""Of a function's own demand, this share is felt by each of its holders beyond the cluster's mean: its calls are given
to the holder that is idle, and others avoid it."""
_SATURATED: Final = 0.98
_VARIABILITY: Final = 0.7
"""Squared coefficient of variation of how long a holder is away, for a call or for something else: 0 if it did nothing
but serve equal calls, 1 if the times were exponential."""
_SPREAD: Final = (1.0 + _VARIABILITY) / 2.0
"""What that does to a wait: by Kingman's factor, with arrivals that are independent."""
_LOAD_WEIGHT: Final = 3.0
"""A load occupies a device that others wait for: at full utilisation it counts so many times more."""
_INDEX_AGE: Final = 0.7
"""A load must relieve 1/0.7 as much as a hit, since what arrives meanwhile may be another hit."""
_REPLICA_SHARE: Final = 0.5
_FAR_BEHIND: Final = 2.5
"""Loads; a replica competes with hits only when its holders are so far behind."""
_BEHIND: Final = 1.1
"""Loads; a call does not wait for holders that are further behind if a device is idle."""
_REPLACE: Final = 1.5
"""A replica is loaded without a call if its worth exceeds its victims' by this factor."""
_LOAD_PRICE: Final = 0.3
"""And a load's device time, times this; plus utilisation, plus calls that wait for each device."""
_WAITING_WORTH: Final = 1e3
"""Of the last copy of a function that has calls waiting."""
_NEAR: Final = 0.95
"""Of the bound."""
_RESERVED: Final = 0.25
"""Loads for calls at the bound take no more than this share of all devices' time, lest they feed the overload that made
the calls wait: of few devices, one after the other would be all that they do."""
_CROWDED: Final = 0.3
"""Loads; how much an otherwise equal device is avoided when its models are in full demand."""

_CANDIDATES: Final = 16
_RIVALS: Final = 8
_HOLDERS: Final = 32
"""Of these many holders, the first idle ones are compared; of these many, the wait is estimated."""

_HIT: Final = Why("the device was idle and held the model, and no call for a model on it had waited longer")


_Found: TypeAlias = "tuple[Start | Load, FunctionId]"
"""An action, and the function that it is for."""


class _Place(NamedTuple):
    cost_s: Seconds
    order: int
    device: DeviceView
    victims: tuple[CopyId, ...]
    worth: float
    """Of the victims, in seconds of waiting per second."""


class LeastWait:
    """See module. `wait_bound_s`: see `policies.Settings`."""

    name = "least-wait"
    pass_limit = 0

    def __init__(self, wait_bound_s: Seconds = DEFAULT_WAIT_BOUND_S) -> None:
        self.wait_bound_s = wait_bound_s

    def plan(self, view: View) -> Plan:
        queue = view.queue
        refused: set[FunctionId] = set()
        while queue and view.idle_count:
            decision = _Decision(view, self.wait_bound_s, refused)
            found = decision.next()
            queue.rewind()
            yield from decision.promises
            if found is None:
                return decision.look_at
            action, function = found
            if (yield action) is not None:
                refused.add(function)  # the engine knows better; it is looked at again in the next run
        return None

    def weigh(self, view: View, call: WaitingCall) -> Why:
        decision = _Decision(view, self.wait_bound_s, set())
        try:
            return decision.weigh(call)
        finally:
            view.queue.rewind()


class _Decision:
    """The next action, and the figures that it is weighed with: they hold until something is done."""

    def __init__(self, view: View, bound_s: Seconds, refused: set[FunctionId]) -> None:
        self.view = view
        self.bound_s = bound_s
        self.refused = refused
        self.demand = min(0.95, view.utilisation)
        self.devices = view.device_count
        self.pressure = len(view.queue) / self.devices
        self._worth: dict[FunctionId, float] = {}
        self._kind = ""
        """Of the device that is looked at."""
        self.promises: list[Promise] = []
        self.look_at: Seconds | None = None
        """When a call that waits beside an idle device should be served by what it waits for, or is loaded."""

    # --- what to do ---

    def next(self) -> _Found | None:
        """An action and whose it is."""
        view, queue = self.view, self.view.queue
        oldest = queue.first()
        if oldest is None:
            return None
        if self._at_bound(oldest, view.now):
            action = self._reserve()
            if action is not None:
                return action
        hit = self._hit()
        if hit is not None:
            call, device = hit
            rival = self._rival(call, device, oldest)
            return (Start(call.id, device.id, None, _HIT), call.function) if rival is None else rival
        for call in view.orphans(_RIVALS):
            place = None if call.function in self.refused else self._place(call.owner)
            if place is not None:
                return self._load_for(call, place, "no device held the model, and loading it here costs least")
        for call in islice(self._heads(), _RIVALS):
            action = self._replica(call)
            if action is not None:
                return action
        return None

    def _reserve(self) -> _Found | None:
        """
        At the bound: the oldest call takes an idle device that holds its model, or, one call at a time, one that it is
        loaded on. Whoever waits less long has the other devices.
        """
        view = self.view
        for call in self._heads():
            if not self._at_bound(call, view.now):
                break
            device = self._idle_holder(call)
            if device is not None:
                why = Why(f"it had waited over {self.bound_s:g} s, and an idle device held its model")
                return Start(call.id, device.id, None, why), call.function
            if view.reserved:
                break
            device = self._any_place(call)
            if device is None:
                continue
            soonest = view.soonest_left(call)
            if soonest is not None and soonest[1] < call.owner.load_s(device.kind):
                break  # a device that holds it comes sooner
            place = self._place(call.owner) or self._place(call.owner, view.idle_count)
            if place is not None:
                found = self._load_for(call, place, f"it had waited over {self.bound_s:g} s: one device is for it")
                assert isinstance(found[0], Start)
                load_s, service_s = (each(place.device.kind) for each in (call.owner.load_s, call.owner.service_s))
                pause_s = max(load_s + service_s, load_s / (_RESERVED * self.devices))
                return replace(found[0], reserved_s=pause_s), call.function
        view.queue.rewind()
        return None

    def _hit(self) -> tuple[WaitingCall, DeviceView] | None:
        """The oldest call whose model an idle device holds, and that device."""
        view = self.view
        # Where few functions wait, one whose first holders are all busy gives way; where many do, it is looked for all.
        oldest = view.oldest_hit(self.refused, _HOLDERS if view.queue.functions <= view.idle_count else None)
        if oldest is None:
            return None
        best = self._idle_holder(oldest)
        return None if best is None else (oldest, best)

    def _rival(self, hit: WaitingCall, device: DeviceView, oldest: WaitingCall) -> _Found | None:
        """A load on *device* that relieves more waiting per second than *hit* does."""
        view = self.view
        kind = device.kind
        least = self._pull(hit) / hit.owner.service_s(kind)
        best: tuple[float, WaitingCall, _Place] | None = None
        rivals = view.orphans(_RIVALS)
        if oldest.number < hit.number and oldest.owner.copies and not view.holds(device, oldest):
            rivals.append(oldest)
        for call in rivals:
            owner = call.owner
            if call.function in self.refused:
                continue
            load_s, service_s, relieved = owner.load_s(kind), owner.service_s(kind), float(owner.waiting)
            if owner.copies:
                relieved *= _REPLICA_SHARE / (owner.copies + 1)
            relief = _INDEX_AGE * relieved * self._pull(call)
            if relief < least * (load_s + relieved * service_s):
                continue
            if owner.copies and (owner.loading or self._wait_s(call) < _FAR_BEHIND * load_s):
                continue
            place = self._room(owner, device)
            if place is None:
                continue
            index = relief / (load_s + place.worth * _HORIZON_S + relieved * service_s)
            if index > least and (best is None or index > best[0]):
                best = (index, call, place)
        if best is None:
            return None
        rule = "its load relieved more waiting per second of the device than the oldest call that it held the model for"
        return self._load_for(best[1], best[2], rule, ("hit", hit.function, hit.owner.service_s(kind)))

    def _replica(self, call: WaitingCall) -> _Found | None:
        """*call* has busy holders, and there is an idle device without its model."""
        owner = call.owner
        if call.function in self.refused or owner.copies == 0 or owner.copies >= self.devices:
            return None
        # What is cheap to know first: nearly every call that waits for its holders is right to do so.
        least_used = self.view.least_used(owner, 1)
        if not least_used:
            return None
        self._kind = least_used[0].kind
        load_s = owner.load_s(self._kind)
        gain = self._saved(owner, owner.copies)
        price = _LOAD_PRICE + self.demand + self.pressure
        worthwhile = _HORIZON_S * gain > load_s * price
        wait_s = self._wait_s(call, 0.0 if worthwhile else _BEHIND * load_s)
        broken = call.promised_at is not None and self.view.now >= call.promised_at + load_s
        if not (worthwhile or broken) and wait_s < _BEHIND * load_s:
            self._wait(call, load_s)
            return None
        place = self._place(owner) or (self._place(owner, self.view.idle_count) if broken else None)
        if place is None:
            self._wait(call, load_s)
            return None
        load_s = owner.load_s(place.device.kind)
        waiting: Option = ("wait", call.function, wait_s)
        if broken:
            rule = "what it waited for was later than had been estimated, by more than a load takes"
            return self._load_for(call, place, rule, waiting)
        late_s = wait_s - _BEHIND * load_s
        if late_s >= 0.0 and late_s > _HORIZON_S * (place.worth - gain):
            return self._load_for(call, place, "its holders were further behind than a load takes", waiting)
        if _HORIZON_S * (gain - _REPLACE * place.worth) > load_s * price:
            options = (waiting, ("load", place.device.id, load_s))
            why = Why("a replica is worth more than its load", options)
            return Load(owner.id, place.device.id, place.victims, why), owner.id
        self._wait(call, load_s)
        return None

    def _wait(self, call: WaitingCall, load_s: Seconds) -> None:
        """*call* waits for its holders beside an idle device: no longer than is estimated now, and a load."""
        now, at = self.view.now, call.promised_at
        if at is None:
            wait_s = self._wait_s(call)
            at = now if wait_s == inf else now + wait_s  # nothing is to be waited for: as soon as there is room
            self.promises.append(Promise(call.id, at))
        if at <= now:
            at += load_s
        if at > now and (self.look_at is None or at < self.look_at):
            self.look_at = at

    def _load_for(self, call: WaitingCall, place: _Place, rule: str, *others: Option) -> _Found:
        load: Option = ("load", place.device.id, call.owner.load_s(place.device.kind) + _HORIZON_S * place.worth)
        return Start(call.id, place.device.id, place.victims, Why(rule, (load, *others))), call.function

    def weigh(self, call: WaitingCall) -> Why:
        view = self.view
        options: list[Option] = []
        if call.promised_at is not None:
            options.append(("promised", call.function, call.promised_at - call.arrived_at))
        if call.owner.copies:
            options.append(("wait", call.function, self._wait_s(call)))
        place = self._place(call.owner)
        if place is not None:
            load_s = call.owner.load_s(place.device.kind)
            options.append(("load", place.device.id, load_s + _HORIZON_S * place.worth))
        if not view.idle_count:
            rule = "all devices are busy"
        elif place is None:
            rule = "no idle device has room for it"
        elif call.owner.copies:
            rule = "waiting for a device that holds the model costs less than another load"
        else:
            rule = "an older call comes first"
        return Why(rule, tuple(options))

    # --- figures ---

    def _heads(self) -> Iterator[WaitingCall]:
        """The first waiting call of each function, oldest first. Until the next rewind, those seen are set aside."""
        queue = self.view.queue
        while (call := queue.first()) is not None:
            queue.set_aside(call)
            if call.function not in self.refused:
                yield call

    def _at_bound(self, call: WaitingCall, now: Seconds) -> bool:
        """If a load began now, *call* would wait until the bound; of long loads, half the bound is counted."""
        left_s = self.bound_s - (now - call.arrived_at)
        if left_s <= 0.0 or left_s > 0.5 * self.bound_s:
            return left_s < 0.0
        devices = self.view.least_used(call.owner, 1)
        return bool(devices) and left_s < call.owner.load_s(devices[0].kind)

    def _pull(self, call: WaitingCall) -> Seconds:
        """The age of *call*, which grows without limit as it comes near the bound: few ever reach it."""
        age = self.view.now - call.arrived_at
        near = age / (_NEAR * self.bound_s) if self.bound_s > 0 else 1.0
        return age * 1e4 if near >= 1.0 else age / (1.0 - near * near * near)

    def _saved(self, function: FunctionView, copies: int) -> float:
        """What it saves to have one copy more than *copies*, in seconds of waiting per second."""
        rate, service_s, miss_s = self.view.rate(function), function.service_s(self._kind), self._miss_s(function)
        own = rate * service_s
        before_s = self._delay_s(function, copies, own, service_s, miss_s)
        return rate * (before_s - self._delay_s(function, copies + 1, own, service_s, miss_s))

    def _delay_s(self, function: FunctionView, copies: int, own: float, service_s: Seconds, miss_s: Seconds) -> Seconds:
        """Mean wait for one of *copies* holders, whom *own* calls ask for at once; about what a miss costs at most."""
        if function.exclusive:
            busy = max(own / copies, self.demand + _OWN_LOAD * own * (1.0 / copies - 1.0 / self.devices))
        else:
            copies *= function.slots
            busy = own / copies
        if busy >= _SATURATED:
            return miss_s * (1.0 + busy - _SATURATED)  # no queue has a mean there, but another copy helps still
        power: float = busy ** (sqrt(2.0 * (copies + 1)) - 1.0)
        return min(miss_s, _SPREAD * service_s * power / (copies * (1.0 - busy)))

    def _miss_s(self, function: FunctionView) -> Seconds:
        load_s = function.load_s(self._kind)
        if not function.exclusive:
            return load_s  # its load occupies no device
        return load_s * (1.0 + self.pressure + _LOAD_WEIGHT * self.demand)

    def _worth_of(self, function: FunctionView) -> float:
        """What losing one copy costs, in seconds of waiting per second."""
        worth = self._worth.get(function.id)
        if worth is None:
            copies = function.copies
            if copies > 1:
                worth = self._saved(function, copies - 1)
            elif function.waiting:
                worth = _WAITING_WORTH
            else:
                worth = self.view.rate(function) * self._miss_s(function)
            self._worth[function.id] = worth
        return worth

    def _room(self, function: FunctionView, device: DeviceView) -> _Place | None:
        """What it costs to load *function* on *device*: the victims of the least worth, found greedily."""
        view = self.view
        self._kind = device.kind
        need = view.occupation(device, function)
        if need is None:
            return None
        need -= view.free(device)
        if need <= 0:
            return _Place(0.0, device.order, device, (), 0.0)
        models = []
        one: tuple[float, CopyId] | None = None
        for each in self._evictable(device):
            worth, memory, name = self._worth_of(each.owner), each.memory, each.key
            models.append((worth / max(1, memory), worth, memory, name))
            if memory >= need and (one is None or worth < one[0]):
                one = (worth, name)
        models.sort()
        chosen = []
        for model in models:
            chosen.append(model)
            need -= model[2]
            if need <= 0:
                break
        else:
            return None
        for model in sorted(chosen[:-1], key=_by_worth, reverse=True):
            if need + model[2] <= 0:
                need += model[2]
                chosen.remove(model)
        worth = sum(model[1] for model in chosen)
        victims = tuple(model[3] for model in chosen)
        if one is not None and one[0] <= worth:
            worth, victims = one[0], (one[1],)
        return _Place(worth * _HORIZON_S, device.order, device, victims, worth)

    def _evictable(self, device: DeviceView) -> Iterator[ResidentView]:
        """What may leave *device*, all of it at once: of the copies of a CPU function, those above its minimum."""
        seen: dict[FunctionId, int] = {}
        for each in self.view.residents(device):
            others = 0 if each.owner.exclusive else seen.get(each.owner.id, 0)
            if self.view.evictable(each, others):
                seen[each.owner.id] = others + 1
                yield each

    def _crowd(self, device: DeviceView, victims: Collection[CopyId]) -> float:
        """The demand for what *device* would go on to hold, each function's divided by its copies."""
        demand = 0.0
        for each in self.view.residents(device):
            owner = each.owner
            if owner.exclusive and owner.copies and each.key not in victims:
                demand += self.view.rate(owner) * owner.service_s(device.kind) / owner.copies
        return demand

    def _any_place(self, call: WaitingCall) -> DeviceView | None:
        """An idle device without the model of *call* that has, or could be given, room for it."""
        view = self.view
        for device in view.least_used(call.owner, view.idle_count):
            if not view.holds(device, call) and view.fits(device, call):
                return device
        return None

    def _place(self, function: FunctionView, candidates: int = _CANDIDATES) -> _Place | None:
        """The idle device without *function* where loading it costs least."""
        view = self.view
        best: _Place | None = None
        devices = view.least_used(function, candidates)
        for device in devices:
            if view.holds_function(device, function):
                continue
            place = self._room(function, device)
            if place is None:
                continue
            if len(devices) == 1:
                return place
            crowd_s = _CROWDED * function.load_s(device.kind) * self._crowd(device, place.victims)
            place = place._replace(cost_s=place.cost_s + crowd_s)
            if best is None or place[:2] < best[:2]:
                best = place
        return best

    def _idle_holder(self, call: WaitingCall) -> DeviceView | None:
        """Of the idle devices that hold the model of *call*, the one whose other models would be missed least."""
        view = self.view
        found = view.idle_holders(call, _HOLDERS)
        if len(found) <= 1:
            return found[0] if found else None
        best: DeviceView | None = None
        least = inf
        for device in found:
            missed = 0.0
            for each in view.residents(device):
                owner = each.owner
                if owner.exclusive and owner.id != call.function:
                    missed += view.rate(owner) * self.demand ** (owner.copies - 1)
            if missed < least:
                best, least = device, missed
        return best

    def _wait_s(self, call: WaitingCall, enough_s: Seconds = 0.0) -> Seconds:
        """
        How long *call* waits for a holder by estimate: until one is free, and has served the calls that wait for what
        it holds, as far as they are its share. The first that is less than *enough_s* is answer enough.
        """
        view, owner = self.view, call.owner
        soonest = inf
        for device in islice(view.holders(call), _HOLDERS):
            kind = device.kind
            wait_s = view.left_s(device)
            for each in view.residents(device):
                other = each.owner
                if other.waiting and other.exclusive and other.copies:
                    wait_s += other.waiting * other.service_s(kind) / other.copies
            soonest = min(soonest, wait_s - owner.service_s(kind) / owner.copies)
            if soonest < enough_s:
                break
        return soonest


def _by_worth(model: tuple[float, float, int, CopyId]) -> float:
    return model[1]
