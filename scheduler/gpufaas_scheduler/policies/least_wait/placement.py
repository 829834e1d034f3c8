"""On which idle device a model is loaded, with which victims, and which of its idle holders takes a call."""

from collections.abc import Collection, Iterator
from math import inf

from msgspec import Struct

from gpufaas_core.model import CopyId, FunctionId
from gpufaas_scheduler.contract import DeviceView, FunctionView, ResidentView, View, WaitingCall
from gpufaas_scheduler.policies.least_wait.estimates import Estimates
from gpufaas_scheduler.policies.least_wait.tuning import CANDIDATES, CROWDED, HOLDERS, HORIZON_S


class Room(Struct, frozen=True):
    """An idle device for a load."""

    device: DeviceView
    victims: tuple[CopyId, ...]
    worth: float
    """The worth of the victims, in seconds of waiting per second."""


class Rooms:
    """Finds a device for a function or a call. Each action needs a new one, as its estimates do."""

    __slots__ = ("_estimates", "_view")

    def __init__(self, view: View, estimates: Estimates) -> None:
        self._view = view
        self._estimates = estimates

    def cheapest(self, function: FunctionView, candidates: int = CANDIDATES) -> Room | None:
        """Return the idle device without *function* where loading it costs least."""
        view = self._view
        best: Room | None = None
        least = (inf, 0)
        devices = view.least_used(function, candidates)
        for device in devices:
            if view.holds_function(device, function):
                continue
            room = self.room(function, device)
            if room is None:
                continue
            if len(devices) == 1:
                return room
            crowd_s = CROWDED * function.load_s(device.kind) * self._crowd(device, room.victims)
            cost = (room.worth * HORIZON_S + crowd_s, device.order)
            if best is None or cost < least:
                best, least = room, cost
        return best

    def room(self, function: FunctionView, device: DeviceView) -> Room | None:
        """Return the victims of the least worth that make room for *function* on *device*, found greedily."""
        view = self._view
        estimates, kind = self._estimates, device.kind
        need = view.occupation(device, function)
        if need is None:
            return None
        need -= view.free(device)
        if need <= 0:
            return Room(device, (), 0.0)
        models = []
        one: tuple[float, CopyId] | None = None
        for each in self._evictable(device):
            worth, memory, name = estimates.worth(each.owner, kind), each.memory, each.key
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
        return Room(device, victims, worth)

    def _evictable(self, device: DeviceView) -> Iterator[ResidentView]:
        """Yield the copies on *device* that may all be evicted together."""
        seen: dict[FunctionId, int] = {}
        for each in self._view.residents(device):
            others = 0 if each.owner.exclusive else seen.get(each.owner.id, 0)
            if self._view.evictable(each, others):
                seen[each.owner.id] = others + 1
                yield each

    def _crowd(self, device: DeviceView, victims: Collection[CopyId]) -> float:
        """Return the demand for the models that stay on *device*, each divided by the number of its copies."""
        demand = 0.0
        for each in self._view.residents(device):
            owner = each.owner
            if owner.exclusive and owner.copies and each.key not in victims:
                demand += self._view.rate(owner) * owner.service_s(device.kind) / owner.copies
        return demand

    def anywhere(self, call: WaitingCall) -> DeviceView | None:
        """Return an idle device without the model of *call* that has room for it, with evictions if need be."""
        view = self._view
        for device in view.least_used(call.owner, view.idle_count):
            if not view.holds(device, call) and view.fits(device, call):
                return device
        return None

    def idle_holder(self, call: WaitingCall) -> DeviceView | None:
        """Return the idle device that holds the model of *call* and whose other models would be missed least."""
        view = self._view
        found = view.idle_holders(call, HOLDERS)
        if len(found) <= 1:
            return found[0] if found else None
        demand = self._estimates.demand
        best: DeviceView | None = None
        least = inf
        for device in found:
            missed = 0.0
            for each in view.residents(device):
                owner = each.owner
                if owner.exclusive and owner.id != call.function:
                    missed += view.rate(owner) * demand ** (owner.copies - 1)
            if missed < least:
                best, least = device, missed
        return best


def _by_worth(model: tuple[float, float, int, CopyId]) -> float:
    return model[1]
