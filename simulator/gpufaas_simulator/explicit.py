"""
Workload files: ``gpufaas simulate --workload W.json``. docs/simulator.md describes the format.

Reading is strict: an unknown key, a wrong type or an impossible value is an error that names file and line.
"""

from __future__ import annotations

import difflib
import math
from array import array
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from string import digits
from typing import NoReturn, TypeVar

import msgspec
from msgspec import UNSET

from gpufaas_core.cost import ANY, Cost
from gpufaas_core.errors import BadPlan
from gpufaas_core.json_errors import UNREADABLE, Step, line_of, mistake
from gpufaas_core.model import ALL_COMPUTE, SHARINGS, Bytes, DeviceId, FunctionId, Seconds
from gpufaas_planner.check import check
from gpufaas_simulator import entries
from gpufaas_simulator.workload import (
    ANY_KIND,
    MB,
    UNBOUNDED,
    BadWorkload,
    Change,
    DeviceJoins,
    DeviceLeaves,
    FunctionScaled,
    FunctionUpdated,
    HostLoad,
    KindLeaves,
    NodeLeaves,
    NodeOffer,
    OfferChanges,
    PlanComes,
    SimulatedDevice,
    SimulatedFunction,
    Workload,
    arrivals,
    no_device_for,
)

_T = TypeVar("_T")

# --- reading ----------------------------------------------------------------------------------------------------------


def read_workload(path: Path) -> Workload:
    """:raises BadWorkload: the file is missing, or is no workload; the message names file and line"""
    return _WorkloadReader(path).workload()


def read_costs(path: Path) -> dict[str, Mapping[str, Cost]]:
    """
    Return the costs of the functions in a workload file, by name and by kind of device; the rest of it may be missing.

    :raises BadWorkload: as `read_workload`
    """
    return _WorkloadReader(path).costs()


class _WorkloadReader:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.content = path.read_bytes()
        except OSError as exc:
            raise BadWorkload(f"{path}: it cannot be read ({exc.strerror}): name a workload file") from exc
        if not self.content.strip():
            raise BadWorkload(
                f"{path}:1: the file is empty: it must be a JSON object with devices, functions and arrivals"
            )

    def workload(self) -> Workload:
        file = self.decode(entries.FileEntry)
        devices = [_device(each) for each in file.devices]
        seen: set[str] = set()
        for at, each in enumerate(devices):
            if each.id in seen:
                self.fail(("devices", at), f"device {each.id} is there twice: give each an id of its own")
            seen.add(each.id)
        functions = self.functions(file.functions)
        index = {each.name: at for at, each in enumerate(functions)}
        offers = [self.offer(each, at, file.offers) for at, each in enumerate(file.offers)]
        host_memory = {
            node: _size(each.host_memory_mb) for node, each in file.nodes.items() if each.host_memory_mb is not None
        }
        prices = {node: each.price_per_h for node, each in file.nodes.items() if each.price_per_h}
        changes = self.changes(file.changes, functions, devices, offers)
        times, calls, service_s = self.arrivals(file.arrivals, index)
        found = Workload(
            devices, functions, times, calls, changes, host_memory, self.path.stem, service_s, offers, prices,
            frozenset(node for node, each in file.nodes.items() if each.parks), file.planner,
        )  # fmt: skip
        everywhere = list(found.all_devices)
        for function in functions:
            if (reason := no_device_for(function, everywhere)) is not None:
                self.fail(("functions", function.name), reason)
        for at, change in enumerate(changes):
            if isinstance(change, FunctionUpdated) and change.costs is not None:
                updated = replace(functions[index[change.function]], costs=change.costs)
                if (reason := no_device_for(updated, everywhere)) is not None:
                    self.fail(("changes", at), reason)
        return found

    def costs(self) -> dict[str, Mapping[str, Cost]]:
        file = self.decode(entries.CostsEntry)
        return {each.name: each.costs for each in self.functions(file.functions)}

    def functions(self, given: dict[str, entries.FunctionEntry]) -> list[SimulatedFunction]:
        functions = [self.function(name, each) for name, each in given.items()]
        index = {each.name: at for at, each in enumerate(functions)}
        for function in functions:
            for inside, costs in ((), function.costs), (("planned",), function.planned):
                for kind, cost in costs.items():
                    of_kind = () if kind == ANY_KIND else ("kinds", kind)
                    for other in cost.beside:
                        if other != ANY:
                            self.known(other, index, ("functions", function.name, *inside, *of_kind, "beside"))
        return functions

    def offer(self, given: entries.OfferEntry, at: int, offers: list[entries.OfferEntry]) -> NodeOffer:
        if any(each.kind == given.kind for each in offers[:at]):
            self.fail(("offers", at), f"kind {given.kind} is offered twice: make it one offer")
        host = 0 if given.host_memory_mb is None else _size(given.host_memory_mb)
        return NodeOffer(
            given.kind, _size(given.memory_mb), given.devices, given.price_per_h, given.delay_s, given.limit,
            given.compute, host,
        )  # fmt: skip

    def function(self, name: str, given: entries.FunctionEntry) -> SimulatedFunction:
        where = ("functions", name)
        costs: dict[str, Cost] = {}
        for kind, each in given.kinds.items():
            cost = self.cost(each, (*where, "kinds", kind))
            if cost is None:
                self.fail((*where, "kinds", kind), "it has no costs: give occupation_mb, load_s and infer_s")
            costs[kind] = cost
        if (general := self.cost(given, where)) is not None:
            costs[ANY_KIND] = general
        if not costs:
            self.fail(where, f"function {name} has no costs: give occupation_mb, load_s and infer_s")
        self.check_sharing(given, where)
        return SimulatedFunction(
            name, costs, given.namespace, entries.need_of(given), given.min_copies,
            UNBOUNDED if given.max_queue is None else given.max_queue, given.timeout_s,
            self.planned(given, costs, (*where, "planned")), given.weight, given.priority, given.task, given.accuracy,
            given.idempotent,
        )  # fmt: skip

    def check_sharing(self, given: entries.FunctionEntry, where: tuple[Step, ...]) -> None:
        """As annotations of functions: see docs/writing-functions.md."""
        sharing, compute = given.sharing or SHARINGS[0], given.compute
        if sharing not in SHARINGS:
            self.fail((*where, "sharing"), f"sharing is {sharing!r}: write one of {', '.join(SHARINGS)}")
        beside = sharing in ("spatial", "share")
        if not beside and compute not in (None, ALL_COMPUTE):
            self.fail(
                (*where, "compute"),
                f"compute is {compute}, but a call has the whole device: remove it, or set sharing to spatial or share",
            )
        if beside and compute is None:
            self.fail((*where, "sharing"), f"sharing {sharing} needs compute: write a whole number from 1 to 100")
        if sharing == "time" and (given.slots or 1) > 1:
            self.fail(
                (*where, "slots"), f"slots is {given.slots}, but sharing time runs one grant at a time: remove one"
            )

    def planned(
        self, given: entries.FunctionEntry, costs: Mapping[str, Cost], where: tuple[Step, ...]
    ) -> dict[str, Cost]:
        """Return what the engine is told, where that is not true."""
        if given.planned is None:
            return {}
        found = {}
        for kind, each in [(ANY_KIND, given.planned), *given.planned.kinds.items()]:
            at = where if kind == ANY_KIND else (*where, "kinds", kind)
            if kind == ANY_KIND and msgspec.structs.replace(each, kinds={}) == entries.PlannedEntry():
                continue
            true = costs.get(kind)
            if true is None:
                what = "other kinds" if kind == ANY_KIND else f"kind {kind}"
                self.fail(at, f"costs are planned for {what}, but there are no true ones: add them, or remove these")
            found[kind] = Cost(
                true.occupation if each.occupation_mb is UNSET else _size(each.occupation_mb),
                true.load_s if each.load_s is UNSET else each.load_s,
                true.service_s if each.infer_s is UNSET else each.infer_s,
                None, None, each.use, tuple(sorted(each.batch.items())), tuple(sorted(each.share.items())), each.beside,
            )  # fmt: skip
        return found

    def cost(self, given: entries.CostEntry, where: tuple[Step, ...]) -> Cost | None:
        """Return the costs on devices of a kind, or of any, if they are beside the name. None: there are none."""
        occupation_mb, load_s, infer_s = given.occupation_mb, given.load_s, given.infer_s
        if occupation_mb is UNSET or load_s is UNSET or infer_s is UNSET:
            missing = [key for key in ("occupation_mb", "load_s", "infer_s") if getattr(given, key) is UNSET]
            further = ("host_load_s", "wake_s", "uses", "batch", "share", "beside", "near", "power", "start_s")
            plain = entries.CostEntry()
            if len(missing) == 3 and all(getattr(given, key) == getattr(plain, key) for key in further):
                return None
            self.fail(where, f"{missing[0]} is missing: give occupation_mb, load_s and infer_s")
        return Cost(
            _size(occupation_mb), load_s, infer_s, given.host_load_s, given.wake_s, given.use,
            tuple(sorted(given.batch.items())), tuple(sorted(given.share.items())), given.beside,
            given.near, given.power, given.start_s,
        )  # fmt: skip

    def changes(
        self, given: list[entries.ChangeEntry], deployed: list[SimulatedFunction], devices: list[SimulatedDevice],
        offers: list[NodeOffer],
    ) -> list[Change]:  # fmt: skip
        found: list[Change] = []
        there = {each.id: each for each in devices}
        functions = {each.name: at for at, each in enumerate(deployed)}
        offered = [each.kind for each in offers]
        kinds = {ANY_KIND, *offered, *(each.kind for each in devices)}
        procured = {f"{kind}-" for kind in offered}  # if such a node is not there at the time, nothing happens to it
        last = 0.0
        for at, each in enumerate(given):
            where = ("changes", at)
            if each.at_s < last:
                self.fail(where, f"its time {each.at_s:g} is before the one above ({last:g}): sort changes by t")
            last = each.at_s
            match each:
                case entries.JoinEntry(t, device):
                    joining = _device(device)
                    if joining.id in there:
                        self.fail(where, f"device {joining.id} is there already: give it another id")
                    there[joining.id] = joining
                    kinds.add(joining.kind)
                    found.append(DeviceJoins(t, joining))
                case DeviceLeaves(_, device_id):
                    if device_id not in there and device_id.rpartition("/")[0].rstrip(digits) not in procured:
                        known = ", ".join([*there][:5])
                        self.fail(where, f"there is no device {device_id!r} at that time: name one of {known}")
                    there.pop(device_id, None)
                    found.append(each)
                case NodeLeaves(_, node) | HostLoad(_, node):
                    if all(of.node != node for of in there.values()) and node.rstrip(digits) not in procured:
                        self.fail(where, f"there is no node {node!r} at that time: give devices a node")
                    found.append(each)
                    if isinstance(each, NodeLeaves):
                        there = {device_id: of for device_id, of in there.items() if of.node != node}
                case KindLeaves(_, kind):
                    if kind not in kinds:
                        self.fail(where, f"no device or offer is of kind {kind!r}: name {' or '.join(sorted(kinds))}")
                    found.append(each)
                case OfferChanges(_, kind):
                    if kind not in offered:
                        self.fail(where, f"kind {kind!r} is not offered: add it to offers, perhaps with limit 0")
                    found.append(each)
                case PlanComes(_, replicas):
                    plannable = {function.name: function.known_as(FunctionId(function.name)) for function in deployed}
                    try:
                        check(replicas, plannable, [device.known_as() for device in there.values()])
                    except BadPlan as exc:
                        self.fail(where, str(exc))
                    found.append(each)
                case entries.UpdateEntry():
                    self.known(each.function, functions, where)
                    general = self.cost(each, where)
                    costs = None if general is None else {ANY_KIND: general}
                    found.append(FunctionUpdated(each.at_s, each.function, costs))
                case FunctionScaled(_, function):
                    self.known(function, functions, where)
                    found.append(each)
        return found

    def arrivals(
        self, given: list[entries.ArrivalEntry], functions: Mapping[str, int]
    ) -> tuple[array[float], array[int], array[float] | None]:
        pairs: list[tuple[Seconds, int]] = []
        last = 0.0
        for at, each in enumerate(given):
            if each.more is not UNSET:
                self.fail(("arrivals", at, 3), f"arrival {at} is too long: write time, function and at most infer_s")
            known = self.known(each.function, functions, ("arrivals", at))
            if each.t < last:
                what = f"arrival {at} at {each.t:g} s is before the one above it ({last:g} s): sort them by time"
                self.fail(("arrivals", at), what)
            last = each.t
            pairs.append((each.t, known))
        service_s = array("d", [each.infer_s for each in given])
        return *arrivals(pairs), None if all(map(math.isnan, service_s)) else service_s

    # --- checks ---

    def known(self, function: str, functions: Mapping[str, int], where: tuple[Step, ...]) -> int:
        if function not in functions:
            near = difflib.get_close_matches(function, functions, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "add it to functions"
            self.fail(where, f"there is no function {function!r}: {hint}")
        return functions[function]

    def decode(self, shape: type[_T]) -> _T:
        try:
            return msgspec.json.decode(self.content, type=shape)
        except UNREADABLE as exc:
            raise BadWorkload(mistake(self.content, shape, exc, str(self.path))) from exc

    def fail(self, where: tuple[Step, ...], message: str) -> NoReturn:
        line = line_of(self.content.decode(errors="replace"), where)
        if where[:1] == ("functions",) and len(where) > 1 and not message.startswith("function "):
            kind = f", kind {where[3]}" if len(where) > 3 and where[2] == "kinds" else ""
            message = f"function {where[1]}{kind}: {message}"
        raise BadWorkload(f"{self.path}:{line}: {message}")


def _device(given: entries.DeviceEntry) -> SimulatedDevice:
    node = given.id.rpartition("/")[0] if given.node is None else given.node
    return SimulatedDevice(DeviceId(given.id), _size(given.memory_mb), given.kind, node, given.compute)


def _size(megabytes: float) -> Bytes:
    return round(megabytes * MB)
