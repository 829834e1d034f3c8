"""
Usher: models are grouped so that heavy users of compute meet heavy users of memory, and each group is placed by itself.

Two requirements stand for a batch: compute (highest occupancy; with `wao`, its mean over time) and memory. A
configuration of a group gives each model a batch and a number of replicas; the one that serves most is taken, of equals
the one with fewest devices. Not told by the source, and settled here: models by name before they are matched, the mean
over all profiled batches for their distance, larger groups first, smaller batches first.

Source: Shubha et al., "Usher", OSDI 2024, as re-implemented in Elvinger's thesis.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from gpufaas_core.errors import GpufaasError
from gpufaas_scheduler.plans.placement import problem
from gpufaas_scheduler.plans.placement.problem import FULL, Device, Option, Options, Problem, Replica, Result, options
from gpufaas_scheduler.plans.problem import EPSILON

MOST_IN_GROUP: Final = 4
MULTIPLES: Final = 6
"""The most times that a model may have the replicas that its largest batch needs."""
_HEAVY: Final = 1.2


@dataclass(frozen=True, slots=True)
class Choice:
    """Of one model: its batch, on each kind of device, and how many replicas are placed at most."""

    model: str
    batch: int
    replicas: int
    rps: float
    compute: float
    """Of one replica, in percent; the least where kinds of devices differ."""
    most: float
    """Requests per second that it serves at most."""


@dataclass(frozen=True, slots=True)
class Room:
    """What is placed on one device."""

    device: Device
    compute: float = 0.0
    memory: float = 0.0
    placed: tuple[tuple[str, Option], ...] = ()

    def fits(self, model: str, option: Option) -> bool:
        return (
            self.compute + option.compute <= FULL
            and self.memory + option.memory <= FULL
            and all(name != model for name, _ in self.placed)
        )

    def plus(self, model: str, option: Option) -> "Room":
        compute, memory = self.compute + option.compute, self.memory + option.memory
        return Room(self.device, compute, memory, (*self.placed, (model, option)))


def solve(asked: Problem, metric: Literal["ao", "wao"], groups: Sequence[Sequence[str]] | None = None) -> Result:
    """
    Return the placement.

    :param groups: in the order in which they are placed; else they are made as Usher makes them
    """
    found = options(asked, [each.kind for each in asked.devices], metric)
    rooms = [Room(each) for each in asked.devices]
    if groups is None:
        groups = group([name for name in asked.models if found.batches(name)], asked, metric)
    why = dict(found.why_none)
    for names in groups:
        rooms = _place_group(asked, found, names, rooms, why)
    goodput = {
        Replica(name, room.device.id, option.batch, option.compute): option.goodput
        for room in rooms
        for name, option in room.placed
    }
    return problem.answer(asked, goodput, why, notes=[f"groups: {'; '.join(', '.join(each) for each in groups)}"])


def group(names: Sequence[str], asked: Problem, metric: str) -> list[list[str]]:
    """
    Return the groups of *names*, the largest first: in each round, groups whose compute and memory differ least are
    matched.

    If many matchings are equally good, as with models that all want compute, which one is taken is the library's
    choice.

    :raises GpufaasError: networkx is not installed
    """
    try:
        import networkx
    except ImportError as exc:
        raise GpufaasError("Usher's groups are matched by networkx: pip install 'gpufaas[plans]'") from exc
    means = {name: _means(asked, name, metric) for name in names}
    groups = [[name] for name in sorted(names)]
    for _ in range(int(math.log2(MOST_IN_GROUP))):
        graph = networkx.Graph()
        for (i, one), (j, other) in itertools.combinations(enumerate(groups), 2):
            compute, memory = (sum(means[name][what] for name in (*one, *other)) for what in (0, 1))
            graph.add_edge(i, j, weight=abs(compute - memory))
        pairs = sorted(sorted(pair) for pair in networkx.min_weight_matching(graph))
        matched = {index for pair in pairs for index in pair}
        groups = [groups[i] + groups[j] for i, j in pairs] + [
            each for index, each in enumerate(groups) if index not in matched
        ]
        groups.sort(key=min)
    return sorted(groups, key=lambda each: (-len(each), min(each)))


def _means(asked: Problem, name: str, metric: str) -> tuple[float, float]:
    """Return the mean compute and the mean memory of a model, over all of its profiled batches, in percent."""
    kinds = dict.fromkeys(each.kind for each in asked.devices)
    batches = [batch for kind in kinds for batch in asked.models[name].measured(kind).values()]
    measured = [(getattr(each, metric), each.memory_pct) for each in batches]
    known = [(compute, memory) for compute, memory in measured if compute is not None and memory is not None]
    return statistics.fmean(compute for compute, _ in known), statistics.fmean(memory for _, memory in known)


def _place_group(
    asked: Problem, found: Options, names: Sequence[str], rooms: list[Room], why: dict[str, str]
) -> list[Room]:
    """Return *rooms* with the best configuration of the group; *rooms* stays as it is."""
    choices = []
    for name in names:
        if of := list(_choices(asked, found, name)):
            choices.append(of)
        else:
            why[name] = "it needs more replicas than there are devices"
    best, best_served, best_used = rooms, 0.0, 0
    for configuration in itertools.product(*choices):
        most = math.fsum(each.most for each in configuration)
        if most < best_served - EPSILON or (most <= best_served + EPSILON and _fewest(configuration) >= best_used):
            continue
        placed, served = _place(configuration, found, rooms)
        used = sum(len(after.placed) > len(before.placed) for before, after in zip(rooms, placed, strict=True))
        if served > best_served + EPSILON or (served >= best_served - EPSILON and used < best_used):
            best, best_served, best_used = placed, served, used
    return best


def _fewest(configuration: Sequence[Choice]) -> int:
    """Return how many devices all replicas take at least."""
    compute = math.fsum(each.replicas * each.compute for each in configuration)
    return max([math.ceil(compute / FULL), *(each.replicas for each in configuration)])


def _choices(asked: Problem, found: Options, name: str) -> Iterator[Choice]:
    """Yield what one model may have: as many replicas as its largest batch needs, or a multiple of that."""
    model, devices = asked.models[name], len(asked.devices)
    rates = {
        batch: max(of[batch].goodput for of in found.of[name].values() if batch in of) for batch in found.batches(name)
    }
    if not rates:
        return
    limit = min(devices, model.max_replicas or devices)
    needed = math.ceil(model.rps / rates[max(rates)] - EPSILON)
    for batch, rate in rates.items():
        enough = math.ceil(model.rps / rate - EPSILON)
        compute = min(of[batch].compute for of in found.of[name].values() if batch in of)
        counts = {min(needed * i, enough) for i in range(1, MULTIPLES + 1) if needed * i <= limit}
        for count in sorted(counts):
            yield Choice(name, batch, count, model.rps, compute, min(model.rps, count * rate))


def _place(configuration: Sequence[Choice], found: Options, rooms: Sequence[Room]) -> tuple[list[Room], float]:
    """Return the rooms with as many of the replicas as there is room for, and what they serve together."""
    placed = list(rooms)
    ours: set[int] = set()
    served = 0.0
    for choice in _in_order(configuration, found):
        rate = 0.0
        for _ in range(choice.replicas):
            if rate >= choice.rps - EPSILON:
                break
            index = _best_fit(choice, found, placed, ours)
            if index is None:
                break
            option = found.on(choice.model, placed[index].device.kind)[choice.batch]
            placed[index] = placed[index].plus(choice.model, option)
            ours.add(index)
            rate += option.goodput
        served += min(choice.rps, rate)
    return placed, served


def _best_fit(choice: Choice, found: Options, rooms: Sequence[Room], ours: set[int]) -> int | None:
    """Return the room for one more replica: of the group, else of others, else empty; of these the fullest."""
    ranked = []
    for index, room in enumerate(rooms):
        option = found.on(choice.model, room.device.kind).get(choice.batch)
        if option is not None and room.fits(choice.model, option):
            rank = 0 if index in ours else 1 if room.placed else 2
            ranked.append((rank, 200 - room.compute - room.memory if rank < 2 else 0.0, index))
    return min(ranked)[2] if ranked else None


def _in_order(configuration: Sequence[Choice], found: Options) -> list[Choice]:
    """Return the models in the order of placing: heavy on memory and heavy on compute in turn, then the others."""
    of = {
        choice: next(of[choice.batch] for of in found.of[choice.model].values() if choice.batch in of)
        for choice in configuration
    }
    memory, compute, neutral = [], [], []
    for choice, option in sorted(of.items(), key=lambda pair: (-(pair[1].compute + pair[1].memory), pair[0].model)):
        if option.memory >= _HEAVY * option.compute:
            memory.append(choice)
        elif option.compute >= _HEAVY * option.memory:
            compute.append(choice)
        else:
            neutral.append(choice)
    turns = itertools.chain.from_iterable(itertools.zip_longest(memory, compute))
    return [*filter(None, turns), *neutral]
