"""
A greedy placement that predicts how much neighbours slow each other down, and keeps every goal in spite of it. Ours.

A device's multiprocessors and its warps are asked for by all that run on it; what is asked for beyond the whole
stretches every batch by that factor. A replica is placed where it slows its neighbours least, and only where all of
them are still in time, with the time to fill a batch and one batch before it, and are busy for at most 85 % of the
time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from gpufaas_core._types import Seconds
from gpufaas_scheduler.plans.placement import problem
from gpufaas_scheduler.plans.placement.problem import FULL, Option, Options, Problem, Replica, Result, options
from gpufaas_scheduler.plans.placement.programmes import latest

BUSIEST: Final = 0.85
_PARTS: Final = (1.0, 0.75, 0.5, 0.25)
"""Of what is asked for: when not all can be served, this much is tried."""


@dataclass(frozen=True, slots=True)
class _Placed:
    model: str
    option: Option
    rate: float
    """Requests per second that it gets."""
    goal: Seconds

    def is_well(self, slower: float) -> bool:
        busy = self.rate * self.option.latency * slower / self.option.batch
        return busy <= BUSIEST and latest(self.option, self.rate, slower) <= self.goal


@dataclass(slots=True)
class _Room:
    id: str
    kind: str
    placed: list[_Placed] = field(default_factory=list)

    def slower(self, new: _Placed | None = None) -> float:
        """Return by which factor all that run there are slowed down, *new* included."""
        there = [*self.placed, new] if new else self.placed
        compute = sum(each.option.compute for each in there) / 100
        warps = sum(each.option.warps for each in there) / 100
        return max(1.0, compute, warps)

    def takes(self, new: _Placed) -> bool:
        memory = sum(each.option.memory for each in self.placed) + new.option.memory
        if memory > FULL or any(each.model == new.model for each in self.placed):
            return False
        slower = self.slower(new)
        return all(each.is_well(slower) for each in [*self.placed, new])


def solve(asked: Problem) -> Result:
    """Return the placement; models that ask for most compute are placed first."""
    found = options(asked, [each.kind for each in asked.devices], "wsm")
    rooms = [_Room(each.id, each.kind) for each in asked.devices]
    why = dict(found.why_none)
    goodput: dict[Replica, float] = {}
    names = [name for name in asked.models if found.batches(name)]
    for name in sorted(names, key=lambda name: (-_asked_for(asked, found, name), name)):
        placed = _place(asked, found, name, rooms)
        if not placed:
            why[name] = "beside its neighbours, or alone, it would miss its goal on every device"
        for room, new in placed:
            room.placed.append(new)
            goodput[Replica(name, room.id, new.option.batch, None)] = new.option.goodput
    return problem.answer(asked, goodput, why)


def _asked_for(asked: Problem, found: Options, name: str) -> float:
    """Return the compute that a model asks for, in percent of a device, with its most thrifty batch."""
    every = [option for of in found.of[name].values() for option in of.values()]
    return min(asked.models[name].rps / each.goodput * each.compute for each in every)


def _place(asked: Problem, found: Options, name: str, rooms: Sequence[_Room]) -> list[tuple[_Room, _Placed]]:
    """Return where the replicas of a model go: all it is asked for, or the largest part of that, on fewest devices."""
    model = asked.models[name]
    limit = min(len(rooms), model.max_replicas or len(rooms))
    for part in _PARTS:
        for count in range(1, limit + 1):
            for batch in found.batches(name):
                placed = _spread(asked, found, name, batch, count, model.rps * part / count, rooms)
                if len(placed) == count:
                    return placed
    return []


def _spread(
    asked: Problem, found: Options, name: str, batch: int, count: int, rate: float, rooms: Sequence[_Room]
) -> list[tuple[_Room, _Placed]]:
    """Return the *count* rooms that a replica slows down least; fewer where fewer take one."""
    model = asked.models[name]
    ranked: list[tuple[float, int, _Room, _Placed]] = []
    for index, room in enumerate(rooms):
        option = found.on(name, room.kind).get(batch)
        if option is None:
            continue
        new = _Placed(name, option, rate, model.slo_ms / 1000)
        if room.takes(new):
            ranked.append((room.slower(new), index, room, new))
    ranked.sort(key=lambda each: each[:2])
    return [(room, new) for _, _, room, new in ranked[:count]]
