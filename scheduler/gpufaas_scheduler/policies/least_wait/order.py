"""What to do next: which call is served, by a hit or a load, and which calls wait for their holders."""

from collections.abc import Iterator, Sequence
from itertools import islice
from math import inf
from typing import Final, TypeAlias

from msgspec.structs import replace

from gpufaas_core.model import FunctionId, Seconds
from gpufaas_scheduler.contract import DEVICE, Load, Option, Promise, Start, Why, start_on
from gpufaas_scheduler.policies.least_wait.placement import Room, Rooms
from gpufaas_scheduler.policies.least_wait.tuning import (
    BEHIND,
    CANDIDATES,
    FAR_BEHIND,
    HORIZON_S,
    LOAD_PRICE,
    LONG_LOAD,
    NEAR,
    RELIEF_SHARE,
    REPLACE,
    REPLICA_SHARE,
    RESERVED,
    RIVALS,
)
from gpufaas_scheduler.roles import WaitsView
from gpufaas_scheduler.view_contract import WaitingCall
from gpufaas_scheduler.view_nouns import DeviceView

HIT: Final = Why("the device was idle and held the model, and no call for a model on it had waited longer")

Found: TypeAlias = tuple[Start | Load, FunctionId]
"""An action, and the function that it is for."""


class Order:
    """Finds the next action."""

    __slots__ = (
        "_held_at_bound",
        "bound_s",
        "estimates",
        "look_at",
        "near_s",
        "now",
        "promises",
        "refused",
        "rooms",
        "view",
    )

    def __init__(self, view: WaitsView, bound_s: Seconds, rooms: Rooms) -> None:
        self.view = view
        self.now = view.now
        self.bound_s = bound_s
        self._held_at_bound = Why(f"it had waited over {bound_s:g} s, and an idle device held its model")
        self.near_s = NEAR * bound_s or 1e-300  # with no bound at all, each age is beyond it
        self.refused: set[FunctionId] = set()
        """Functions that the engine refused an action for in this run."""
        self.rooms = rooms
        self.estimates = rooms.estimates
        self.promises: list[Promise] = []
        self.look_at: Seconds | None = None
        """When the next promise ends to a call that waits beside an idle device."""

    def action(self) -> Found | None:
        """Return the next action and its function; None: there is none until an event, or until `look_at`."""
        view, queue = self.view, self.view.queue
        self.now = view.now
        self.rooms.expire()  # since the last action, or the last run
        self.promises = []
        self.look_at = None
        oldest = queue.first()
        if oldest is None:
            return None
        if self._at_bound(oldest):
            action = self._reserve(oldest)
            if action is not None:
                return action
        hit = self._hit()
        if hit is not None:
            call, device = hit
            rival = self._rival(call, device, oldest)
            return (start_on(device, call, HIT), call.function) if rival is None else rival
        for call in view.orphans(RIVALS):
            room = None if call.function in self.refused else self.rooms.cheapest(call.owner)
            if room is not None:
                return self._load_for(call, room, "no device held the model, and loading it here costs least")
        self.estimates.refresh()
        for call in islice(self._heads(), RIVALS) if self.refused else queue.oldest(RIVALS):
            action = self._replica(call)
            if action is not None:
                return action
        return None

    def _reserve(self, oldest: WaitingCall) -> Found | None:
        """
        At the bound, return the start of the oldest call on an idle device that holds its model, or, for one call at a
        time, on one that loads it. The other devices are for the other calls.
        """
        view = self.view
        if not self.refused:  # the first turn of the loop, without a walk through the queue
            device = self.rooms.idle_holder(oldest)
            if device is not None:
                return start_on(device, oldest, self._held_at_bound), oldest.function
            if view.reserved:
                return None
        for call in self._heads():
            if not self._at_bound(call):
                break
            device = self.rooms.idle_holder(call)
            if device is not None:
                return start_on(device, call, self._held_at_bound), call.function
            if view.reserved:
                break
            device = self.rooms.anywhere(call)
            if device is None or self.estimates.comes(call.owner):
                continue
            soonest = view.soonest_left(call)
            if soonest is not None and soonest[1] < call.owner.load_on(device):
                break  # a device that holds it comes sooner
            room = self.rooms.cheapest(call.owner) or self.rooms.cheapest(call.owner, view.idle_count)
            if room is not None:
                found = self._load_for(call, room, f"it had waited over {self.bound_s:g} s: one device is for it")
                assert isinstance(found[0], Start)
                load_s, service_s = call.owner.load_on(room.device), call.owner.service_s(room.device.kind)
                self.estimates.refresh()
                pause_s = max(load_s + service_s, load_s / (RESERVED * self.estimates.devices))
                return replace(found[0], reserved_s=pause_s), call.function
        view.queue.rewind()
        return None

    def _hit(self) -> tuple[WaitingCall, DeviceView] | None:
        """Return the oldest call whose model an idle device holds, and that device."""
        view = self.view
        oldest = view.oldest_hit(self.refused)
        if oldest is None:
            return None
        best = self.rooms.idle_holder(oldest)
        return None if best is None else (oldest, best)

    def _rival(self, hit: WaitingCall, device: DeviceView, oldest: WaitingCall) -> Found | None:
        """Return a load on *device* that relieves more waiting per second than *hit* does."""
        view, refused, pull = self.view, self.refused, self._pull
        kind = device.kind
        least = pull(hit) / hit.owner.service_s(kind)
        if hit.owner.batch_max > 1:
            together = max(1, min(hit.owner.waiting, hit.owner.batch_size(kind)))
            least = together * pull(hit) / hit.owner.serve_s(kind, together)
        best: tuple[float, WaitingCall, Room] | None = None
        rivals = view.orphans(RIVALS)
        if oldest.number < hit.number and oldest.owner.copies and not view.holds(device, oldest):
            rivals.append(oldest)
        for call in rivals:
            if refused and call.function in refused:
                continue
            owner = call.owner
            figures = owner.costs[kind]
            if figures is None:
                continue
            load_s, relieved = figures.load_s, float(owner.waiting)
            if owner.copies:
                relieved *= REPLICA_SHARE / (owner.copies + 1)
            relief = RELIEF_SHARE * relieved * pull(call)
            if relief < least * load_s:
                continue  # not even where loads are shortest, if its calls took no time
            if owner.near:
                load_s = owner.load_on(device)
            served_s = relieved * figures.service_s if owner.batch_max < 2 else owner.serve_s(kind, relieved)
            if relief < least * (load_s + served_s):
                continue
            if best is not None and relief / (load_s + served_s) <= best[0]:
                continue  # even without victims, it would not be the best
            if owner.copies and (owner.loading or self.estimates.wait_s(call) < FAR_BEHIND * load_s):
                continue
            room = self.rooms.room(owner, device)
            if room is None:
                continue
            index = relief / (load_s + room.worth * HORIZON_S + served_s)
            if index > least and (best is None or index > best[0]):
                best = (index, call, room)
        if best is None:
            return None
        rule = "its load relieved more waiting per second of the device than the oldest call that it held the model for"
        return self._load_for(best[1], best[2], rule, ("hit", hit.function, hit.owner.service_s(kind)))

    def _replica(self, call: WaitingCall) -> Found | None:
        """Return a load for *call*, which has busy holders, on an idle device without its model; None: it waits."""
        owner, estimates, rooms = call.owner, self.estimates, self.rooms
        if not 0 < owner.copies < estimates.devices or call.function in self.refused or estimates.comes(owner):
            return None
        # The cheap estimates first: nearly every such call is right to wait.
        least_used = self.view.least_used(owner, CANDIDATES)
        if not least_used:
            return None
        kind = least_used[0].kind
        load_s = owner.load_s(kind)
        price = LOAD_PRICE + estimates.demand + estimates.pressure
        broken = call.promised_at is not None and self.now >= call.promised_at + load_s
        if not broken and self._has_to_wait(call, least_used, load_s, price):
            self._wait(call, load_s)
            return None
        gain = estimates.saved(owner, owner.copies, kind, load_s * price)
        worthwhile = HORIZON_S * gain > load_s * price
        wait_s = 0.0 if worthwhile else estimates.wait_s(call, BEHIND * load_s)
        if not (worthwhile or broken) and wait_s < BEHIND * load_s:
            self._wait(call, load_s)
            return None
        if not worthwhile:
            gain = estimates.saved(owner, owner.copies, kind)
        found = rooms.rooms(owner) or (rooms.rooms(owner, self.view.idle_count) if broken else [])
        if not found:
            self._wait(call, load_s)
            return None
        if not broken and len({each.device.kind for each in found}) == 1:
            load_s = owner.load_s(found[0].device.kind)
            if not self._can_pay(call, found[0].worth, load_s, gain, price):
                self._wait(call, load_s)
                return None
        if worthwhile:
            wait_s = estimates.wait_s(call)
        room = rooms.best(owner, found)
        load_s = owner.load_on(room.device)
        waiting: Option = ("wait", call.function, wait_s)
        if broken:
            rule = "what it waited for was later than had been estimated, by more than a load takes"
            return self._load_for(call, room, rule, waiting)
        late_s = wait_s - BEHIND * load_s
        if late_s >= 0.0 and late_s > HORIZON_S * (room.worth - gain):
            return self._load_for(call, room, "its holders were further behind than a load takes", waiting)
        if owner.loadable and HORIZON_S * (gain - REPLACE * room.worth) > load_s * price:
            options = (waiting, ("load", room.device.id, load_s))
            why = Why("a replica is worth more than its load", options)
            return Load(owner.id, room.device.part, DEVICE, room.victims, why), owner.id
        self._wait(call, load_s)
        return None

    def _has_to_wait(self, call: WaitingCall, devices: Sequence[DeviceView], load_s: Seconds, price: float) -> bool:
        """Return whether a load for *call* would not pay even if it gained the most, and its victims were the least."""
        owner, rooms = call.owner, self.rooms
        gain = rooms.bounds.most(owner, devices[0].kind, load_s * price)
        if HORIZON_S * gain > load_s * price:
            floor = rooms.floor.below(owner, devices)
            return floor > 0.0 and not self._can_pay(call, floor, load_s, gain, price)
        return self.estimates.wait_s(call, BEHIND * load_s) < BEHIND * load_s

    def _can_pay(self, call: WaitingCall, worth: float, load_s: Seconds, gain: float, price: float) -> bool:
        """
        Return whether a load for *call* would pay if its victims were worth only *worth*. Nearly always it would not,
        and the choice of a room is saved.
        """
        if HORIZON_S * (gain - REPLACE * worth) > load_s * price:
            return True
        enough_s = BEHIND * load_s + max(0.0, HORIZON_S * (worth - gain))
        return self.estimates.wait_s(call, enough_s) >= enough_s

    def _wait(self, call: WaitingCall, load_s: Seconds) -> None:
        """Let *call* wait for its holders beside an idle device, for the estimated wait and one load at most."""
        now, at = self.now, call.promised_at
        if at is None:
            wait_s = self.estimates.wait_s(call)
            at = now if wait_s == inf else now + wait_s  # there is nothing to wait for: load as soon as there is room
            self.promises.append(Promise(call.id, at))
        if at <= now:
            at += load_s
        if at > now and (self.look_at is None or at < self.look_at):
            self.look_at = at

    def _load_for(self, call: WaitingCall, room: Room, rule: str, *others: Option) -> Found:
        load: Option = ("load", room.device.id, call.owner.load_on(room.device) + HORIZON_S * room.worth)
        return Start((call.id,), None, room.device.part, room.victims, Why(rule, (load, *others))), call.function

    def weigh(self, call: WaitingCall) -> Why:
        view = self.view
        options: list[Option] = []
        if call.promised_at is not None:
            options.append(("promised", call.function, call.promised_at - call.arrived_at))
        if call.owner.copies:
            options.append(("wait", call.function, self.estimates.wait_s(call)))
        room = self.rooms.cheapest(call.owner)
        if room is not None:
            load_s = call.owner.load_on(room.device)
            options.append(("load", room.device.id, load_s + HORIZON_S * room.worth))
        if not view.idle_count:
            rule = "all devices are busy"
        elif room is None:
            rule = "no idle device has room for it"
        elif call.owner.copies:
            rule = "waiting for a device that holds the model costs less than another load"
        else:
            rule = "an older call comes first"
        return Why(rule, tuple(options))

    def _heads(self) -> Iterator[WaitingCall]:
        """Yield the first waiting call of each function, oldest first, and set each aside until the next rewind."""
        queue = self.view.queue
        while (call := queue.first()) is not None:
            queue.set_aside(call)
            if call.function not in self.refused:
                yield call

    def _at_bound(self, call: WaitingCall) -> bool:
        """Return whether *call* would reach the bound if a load began now; of a long load, half the bound counts."""
        left_s = self.bound_s - (self.now - call.arrived_at)
        if left_s <= 0.0 or left_s > LONG_LOAD * self.bound_s:
            return left_s < 0.0
        devices = self.view.least_used(call.owner, 1)
        return bool(devices) and left_s < call.owner.load_on(devices[0])

    def _pull(self, call: WaitingCall) -> Seconds:
        """Return the weighted age of *call*: the weight grows without limit near the bound, so few calls reach it."""
        age = self.now - call.arrived_at
        near = age / self.near_s
        return age * 1e4 if near >= 1.0 else age / (1.0 - near * near * near)
