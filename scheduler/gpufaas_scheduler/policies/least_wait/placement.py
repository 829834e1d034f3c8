"""On which idle device a model is loaded, with which victims, and which of its idle holders takes a call."""

from collections.abc import Collection
from math import inf
from typing import TypeAlias

from msgspec import Struct

from gpufaas_core.model import Bytes, CopyId, DeviceId, FunctionId
from gpufaas_scheduler.policies.least_wait.bounds import Bounds
from gpufaas_scheduler.policies.least_wait.estimates import Estimates
from gpufaas_scheduler.policies.least_wait.floor import Floor
from gpufaas_scheduler.policies.least_wait.tuning import CANDIDATES, CROWDED, HOLDERS, HORIZON_S
from gpufaas_scheduler.roles import WaitsView
from gpufaas_scheduler.view_contract import WaitingCall
from gpufaas_scheduler.view_nouns import DeviceView, FunctionView


class Room(Struct, frozen=True):
    """An idle device for a load."""

    device: DeviceView
    victims: tuple[CopyId, ...]
    worth: float
    """The worth of the victims, in seconds of waiting per second."""


Victims: TypeAlias = tuple[float, tuple[CopyId, ...]]
"""Their worth and their names."""

_Model: TypeAlias = tuple[float, float, Bytes, CopyId, int]
"""A copy that may be evicted: its worth per byte, its worth, its memory, its name, and the compute that it holds."""


class Rooms:
    """Finds a device for a function or a call. What it knows is valid for one action, as its estimates are."""

    __slots__ = ("_shelves", "bounds", "estimates", "floor", "view")

    def __init__(self, view: WaitsView, estimates: Estimates) -> None:
        self.view = view
        self.estimates = estimates
        self.bounds = Bounds(view, estimates)
        self.floor = Floor(view, estimates, self.bounds)
        self._shelves: dict[DeviceId, list[_Model]] = {}
        """What may be evicted from a device, least recently used first."""

    def expire(self) -> None:
        """Something has changed."""
        self._shelves.clear()
        self.estimates.expire()
        self.bounds.expire()
        self.floor.expire()

    def cheapest(self, function: FunctionView, candidates: int = CANDIDATES) -> Room | None:
        """Return the idle device without *function* where loading it costs least."""
        rooms = self.rooms(function, candidates)
        return self.best(function, rooms) if rooms else None

    def rooms(self, function: FunctionView, candidates: int = CANDIDATES) -> list[Room]:
        """Return the idle devices where *function* may be loaded, those with the least worth of victims first."""
        found = []
        for device, lacking in self.view.places(function, candidates):
            victims = self._leaving(function, device, lacking)
            if victims is not None:
                found.append((victims[0], device.order, device, victims[1]))
        found.sort()
        return [Room(device, names, worth) for worth, _, device, names in found]

    def best(self, function: FunctionView, rooms: list[Room]) -> Room:
        """
        Return the one of *rooms* where loading *function* costs least: its victims, the demand for it, and the load,
        where nodes differ in that.
        """
        best = rooms[0]
        if len(rooms) == 1:
            return best
        least, near = (inf, 0), function.near
        for room in rooms:
            device = room.device
            cost_s = room.worth * HORIZON_S
            if cost_s > least[0]:
                break  # the victims of all others are worth as much, or more
            load_s = function.load_on(device) if near else function.load_s(device.kind)
            cost_s += CROWDED * load_s * self._crowd(device, room.victims)
            if near:
                cost_s += load_s
            cost = (cost_s, device.order)
            if cost < least:
                best, least = room, cost
        return best

    def room(self, function: FunctionView, device: DeviceView) -> Room | None:
        """Return the victims of the least worth that make room for *function* on *device*, found greedily."""
        view = self.view
        need = view.occupation(device, function)
        if need is None:
            return None
        victims = self._leaving(function, device, need - view.free(device))
        return None if victims is None else Room(device, victims[1], victims[0])

    def _leaving(self, function: FunctionView, device: DeviceView, lacking: Bytes) -> Victims | None:
        """Return the victims that free *lacking* bytes and the compute of *function*; None: they are too few."""
        short = function.compute - device.spare
        if short > 0 and function.plan:
            short = self.view.lacks(device, function)
        if short <= 0:
            return self._victims_of(self._shelf_of(device), lacking) if lacking > 0 else (0.0, ())
        models = self._shelf_of(device)
        leaving: list[_Model] = []
        for model in sorted([each for each in models if each[4]], key=_by_worth):
            leaving.append(model)
            short -= model[4]
            lacking -= model[2]
            if short <= 0:
                break
        else:
            return None
        worth, names = sum(map(_by_worth, leaving)), tuple([each[3] for each in leaving])
        if lacking <= 0:
            return worth, names
        others = self._victims_of([each for each in models if each not in leaving], lacking)
        return None if others is None else (worth + others[0], names + others[1])

    @staticmethod
    def _victims_of(models: list[_Model], lacking: Bytes) -> Victims | None:
        one: _Model | None = None
        for model in models:
            if model[2] >= lacking and (one is None or model[1] < one[1]):
                one = model
        if one is not None and (len(models) == 1 or min(models)[2] >= lacking):
            return one[1], (one[3],)
        chosen = []
        for model in sorted(models):
            chosen.append(model)
            lacking -= model[2]
            if lacking <= 0:
                break
        else:
            return None
        for model in sorted(chosen[:-1], key=_by_worth, reverse=True):
            if lacking + model[2] <= 0:
                lacking += model[2]
                chosen.remove(model)
        worth = sum(model[1] for model in chosen)
        if one is not None and one[1] <= worth:
            return one[1], (one[3],)
        return worth, tuple([model[3] for model in chosen])

    def _shelf_of(self, device: DeviceView) -> list[_Model]:
        found = self._shelves.get(device.id)
        if found is None:
            found, kind, worth_of = [], device.kind, self.estimates.worth
            for each in self.view.evictable(device):
                worth, memory = worth_of(each.owner, kind), each.memory
                found.append((worth / max(1, memory), worth, memory, each.id, each.share))
            self._shelves[device.id] = found
        return found

    def _crowd(self, device: DeviceView, victims: Collection[CopyId]) -> float:
        """Return the demand for the models that stay on *device*, each divided by the number of its copies."""
        demand = 0.0
        for each in self.view.residents(device):
            owner = each.owner
            if owner.placed and owner.copies and each.id not in victims:
                demand += self.view.rate(owner) * owner.service_s(device.kind) / owner.copies
        return demand

    def anywhere(self, call: WaitingCall) -> DeviceView | None:
        """Return an idle device without the model of *call* that has room for it, with evictions if need be."""
        view = self.view
        for device in view.least_used(call.owner, view.idle_count):
            if not view.holds(device, call) and view.fits(device, call):
                return device
        return None

    def idle_holder(self, call: WaitingCall) -> DeviceView | None:
        """Return the idle device that holds the model of *call* and whose other models would be missed least."""
        view = self.view
        found = view.idle_holders(call, HOLDERS)
        if len(found) <= 1:
            return found[0] if found else None
        self.estimates.refresh()
        demand, function = self.estimates.demand, call.function
        known: dict[FunctionId, float] = {}
        best: DeviceView | None = None
        least = inf
        for device in found:
            missed = 0.0
            for each in view.residents(device):
                owner = each.owner
                if owner.placed and owner.id != function:
                    its = known.get(owner.id)
                    if its is None:
                        its = known[owner.id] = view.rate(owner) * demand ** (owner.copies - 1)
                    missed += its
                    if missed >= least:
                        break
            else:
                if missed < least:
                    best, least = device, missed
        return best


def _by_worth(model: _Model) -> float:
    return model[1]
