"""
Workload files: ``gpufaas simulate --workload W.json``. docs/simulator.md describes the format.

Reading is strict: an unknown key, a wrong type or an impossible value is an error that names file and line.
"""

from __future__ import annotations

import difflib
import math
import re
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec
from msgspec import UNSET, Struct, UnsetType

from gpufaas_core.model import Bytes, DeviceId, Seconds
from gpufaas_simulator.workload import (
    ANY_KIND,
    DEFAULT_KIND,
    DEFAULT_NAMESPACE,
    MB,
    UNBOUNDED,
    BadWorkload,
    Change,
    Cost,
    DeviceJoins,
    DeviceLeaves,
    FunctionScaled,
    FunctionUpdated,
    NodeLeaves,
    SimulatedDevice,
    SimulatedFunction,
    TimedChange,
    Workload,
    arrivals,
    no_device_for,
)

# --- the form of the file ---------------------------------------------------------------------------------------------


class _DeviceEntry(Struct, forbid_unknown_fields=True):
    id: str
    memory_mb: float
    kind: str = DEFAULT_KIND
    node: str | None = None


class _CostEntry(Struct, forbid_unknown_fields=True, omit_defaults=True):
    occupation_mb: float
    load_s: float
    infer_s: float
    host_load_s: float | None = None


class _FunctionEntry(Struct, forbid_unknown_fields=True, omit_defaults=True):
    occupation_mb: float | UnsetType = UNSET
    load_s: float | UnsetType = UNSET
    infer_s: float | UnsetType = UNSET
    host_load_s: float | None = None
    kinds: dict[str, _CostEntry] = {}
    namespace: str = DEFAULT_NAMESPACE
    slots: int | None = None
    min_copies: int = 0
    max_queue: int | None = None
    timeout_s: float | None = None


class _NodeEntry(Struct, forbid_unknown_fields=True):
    host_memory_mb: float


class _JoinEntry(TimedChange, frozen=True, tag="device_joins"):
    device: _DeviceEntry


class _UpdateEntry(TimedChange, frozen=True, tag="function_updated", omit_defaults=True):
    function: str
    occupation_mb: float | UnsetType = UNSET
    load_s: float | UnsetType = UNSET
    infer_s: float | UnsetType = UNSET
    host_load_s: float | None = None


_ChangeEntry = _JoinEntry | DeviceLeaves | NodeLeaves | _UpdateEntry | FunctionScaled


class _ArrivalEntry(Struct, array_like=True):
    t: float
    function: str
    infer_s: float = math.nan
    """The true service time of this call. NaN, which JSON does not have: as in the function's costs."""
    more: Any = UNSET
    """Must stay unset. It is here because msgspec does not say which array is too long."""


class _FileEntry(Struct, forbid_unknown_fields=True):
    devices: list[_DeviceEntry]
    functions: dict[str, msgspec.Raw]  # read one by one, so that an error names the function
    arrivals: list[_ArrivalEntry]
    nodes: dict[str, _NodeEntry] = {}
    changes: list[_ChangeEntry] = []


# --- reading ----------------------------------------------------------------------------------------------------------

_Step = str | int
_AT: Final = re.compile(r" - at `(?P<key>key in )?\$(?P<path>.*)`$")
_STEP: Final = re.compile(r"\.(?P<name>[^.\[\]]+)|\[(?P<index>\d+)\]|(?P<any>\[\.\.\.\])")
_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]|[^\s{}\[\]:,"]+')
_BYTE: Final = re.compile(r"\(byte (\d+)\)")
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*)`$")
_MISSING: Final = re.compile(r"Object missing required field `(.*)`$")


def read_workload(path: Path) -> Workload:
    """:raises BadWorkload: the file is missing, or is no workload; the message names file and line"""
    try:
        content = path.read_bytes()
    except OSError as exc:
        raise BadWorkload(f"{path}: it cannot be read ({exc.strerror}): name a workload file") from exc
    if not content.strip():
        raise BadWorkload(f"{path}:1: the file is empty: it must be a JSON object with devices, functions and arrivals")
    return _WorkloadReader(str(path), content).workload(path.stem)


class _WorkloadReader:
    def __init__(self, path: str, content: bytes) -> None:
        self.path = path
        self.content = content

    def workload(self, name: str) -> Workload:
        file = self.decode(self.content, _FileEntry, ())
        devices = [self.device(each, ("devices", at)) for at, each in enumerate(file.devices)]
        if not devices:
            self.fail(("devices",), "there are no devices: name at least one")
        seen: set[str] = set()
        for at, each in enumerate(devices):
            if each.id in seen:
                self.fail(("devices", at), f"device {each.id} is there twice: give each an id of its own")
            seen.add(each.id)
        functions = [
            self.function(name, self.decode(bytes(raw), _FunctionEntry, ("functions", name)))
            for name, raw in file.functions.items()
        ]
        index = {each.name: at for at, each in enumerate(functions)}
        host_memory = {node: self.size(each.host_memory_mb, ("nodes", node, "host_memory_mb"))
                       for node, each in file.nodes.items()}  # fmt: skip
        changes = self.changes(file.changes, index, devices)
        times, calls, service_s = self.arrivals(file.arrivals, index)
        found = Workload(devices, functions, times, calls, changes, host_memory, name, service_s)
        everywhere = list(found.all_devices)
        for function in functions:
            if (reason := no_device_for(function, everywhere)) is not None:
                self.fail(("functions", function.name), reason)
        for at, change in enumerate(changes):
            if isinstance(change, FunctionUpdated) and change.costs is not None:
                updated = SimulatedFunction(change.function, change.costs)
                if (reason := no_device_for(updated, everywhere)) is not None:
                    self.fail(("changes", at), reason)
        return found

    def device(self, given: _DeviceEntry, where: tuple[_Step, ...]) -> SimulatedDevice:
        if not given.id:
            self.fail((*where, "id"), "a device needs an id: write for example g0")
        node = given.id.rpartition("/")[0] if given.node is None else given.node
        memory = self.size(given.memory_mb, (*where, "memory_mb"))
        return SimulatedDevice(DeviceId(given.id), memory, given.kind, node)

    def function(self, name: str, given: _FunctionEntry) -> SimulatedFunction:
        where = ("functions", name)
        costs = {kind: self.cost(each, (*where, "kinds", kind)) for kind, each in given.kinds.items()}
        if (general := self.general_cost(given, where)) is not None:
            costs[ANY_KIND] = general
        if not costs:
            self.fail(where, f"function {name} has no costs: give occupation_mb, load_s and infer_s")
        for key, least in (("slots", 1), ("min_copies", 0), ("max_queue", 1)):
            value = getattr(given, key)
            if value is not None and value < least:
                self.fail((*where, key), f"{key} is {value}: write a whole number, {least} or more")
        if given.timeout_s is not None:
            self.seconds(given.timeout_s, (*where, "timeout_s"))
        max_queue = UNBOUNDED if given.max_queue is None else given.max_queue
        return SimulatedFunction(
            name, costs, given.namespace, given.slots, given.min_copies, max_queue, given.timeout_s
        )  # fmt: skip

    def general_cost(self, given: _FunctionEntry | _UpdateEntry, where: tuple[_Step, ...]) -> Cost | None:
        """Return the costs for devices of any kind: the three figures beside the name. None: there are none."""
        figures = {key: getattr(given, key) for key in ("occupation_mb", "load_s", "infer_s")}
        missing = [key for key, value in figures.items() if value is UNSET]
        if len(missing) == len(figures):
            return None
        if missing:
            self.fail(where, f"{missing[0]} is missing: give occupation_mb, load_s and infer_s")
        return self.cost(_CostEntry(**figures, host_load_s=given.host_load_s), where)

    def cost(self, given: _CostEntry, where: tuple[_Step, ...]) -> Cost:
        occupation = self.size(given.occupation_mb, (*where, "occupation_mb"))
        load_s = self.seconds(given.load_s, (*where, "load_s"))
        infer_s = self.seconds(given.infer_s, (*where, "infer_s"))
        host_load_s = None if given.host_load_s is None else self.seconds(given.host_load_s, (*where, "host_load_s"))
        return Cost(occupation, load_s, infer_s, host_load_s)

    def changes(
        self, given: list[_ChangeEntry], functions: Mapping[str, int], devices: list[SimulatedDevice]
    ) -> list[Change]:
        found: list[Change] = []
        there = {each.id: each.node for each in devices}
        last = 0.0
        for at, each in enumerate(given):
            where = ("changes", at)
            self.seconds(each.at_s, (*where, "t"))
            if each.at_s < last:
                self.fail(where, f"its time {each.at_s:g} is before the one above ({last:g}): sort changes by t")
            last = each.at_s
            match each:
                case _JoinEntry(t, device):
                    joining = self.device(device, (*where, "device"))
                    if joining.id in there:
                        self.fail(where, f"device {joining.id} is there already: give it another id")
                    there[joining.id] = joining.node
                    found.append(DeviceJoins(t, joining))
                case DeviceLeaves(_, device_id):
                    if device_id not in there:
                        self.fail(where, f"there is no device {device_id!r} at that time: name one of {_few(there)}")
                    del there[device_id]
                    found.append(each)
                case NodeLeaves(_, node):
                    if node not in there.values():
                        self.fail(where, f"there is no node {node!r} at that time: give devices a node")
                    there = {device_id: of for device_id, of in there.items() if of != node}
                    found.append(each)
                case _UpdateEntry(t, function):
                    self.known(function, functions, where)
                    general = self.general_cost(each, where)
                    found.append(FunctionUpdated(t, function, None if general is None else {ANY_KIND: general}))
                case FunctionScaled(_, function, copies):
                    self.known(function, functions, where)
                    if copies < 0:
                        self.fail((*where, "copies"), f"copies is {copies}: write a whole number, 0 or more")
                    found.append(each)
        return found

    def arrivals(
        self, given: list[_ArrivalEntry], functions: Mapping[str, int]
    ) -> tuple[array[float], array[int], array[float] | None]:
        pairs: list[tuple[Seconds, int]] = []
        service_s: array[float] | None = None
        last = 0.0
        for at, each in enumerate(given):
            time, function = each.t, each.function
            if each.more is not UNSET:
                self.fail(("arrivals", at, 3), f"arrival {at} is too long: write time, function and at most infer_s")
            known = functions.get(function)
            if known is None:
                self.known(function, functions, ("arrivals", at))
                raise AssertionError("unreachable: the line above fails")
            # In this form, a time that is not a number fails too.
            if not time >= last or time == math.inf:
                where = ("arrivals", at)
                self.seconds(time, where)
                self.fail(
                    where, f"arrival {at} at {time:g} s is before the one above it ({last:g} s): sort them by time"
                )
            last = time
            pairs.append((time, known))
            if not math.isnan(each.infer_s):
                if service_s is None:
                    service_s = array("d", [math.nan]) * len(given)
                service_s[at] = self.seconds(each.infer_s, ("arrivals", at, 2), f"infer_s of arrival {at}")
        return *arrivals(pairs), service_s

    # --- checks ---

    def known(self, function: str, functions: Mapping[str, int], where: tuple[_Step, ...]) -> None:
        if function not in functions:
            near = difflib.get_close_matches(function, functions, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "add it to functions"
            self.fail(where, f"there is no function {function!r}: {hint}")

    def size(self, megabytes: float, where: tuple[_Step, ...]) -> Bytes:
        if not 0 < megabytes < math.inf:
            self.fail(where, f"{where[-1]} is {megabytes:g}: write a number of megabytes above 0")
        return round(megabytes * MB)

    def seconds(self, given: float, where: tuple[_Step, ...], what: str = "") -> Seconds:
        if not 0 <= given < math.inf:
            what = what or (where[-1] if isinstance(where[-1], str) else "the time")
            self.fail(where, f"{what} is {given:g}: write a number of seconds, 0 or more")
        return given

    def decode(self, content: bytes, shape: Any, where: tuple[_Step, ...]) -> Any:
        try:
            return msgspec.json.decode(content, type=shape)
        except msgspec.ValidationError as exc:
            message = str(exc)
            at = _AT.search(message)
            steps = [*where, *_steps(at["path"] if at else "")]
            message = message[: at.start()] if at else message
            fields = _fields(shape)
            if unknown := _UNKNOWN.match(message):
                near = difflib.get_close_matches(unknown[1], fields, n=1)
                hint = f"did you mean {near[0]!r}?" if near else "remove it, or see docs/simulator.md"
                self.fail((*steps, unknown[1]), f"unknown key {unknown[1]!r}: {hint}")
            if missing := _MISSING.match(message):
                self.fail(tuple(steps), f"{missing[1]} is missing: add it, see docs/simulator.md")
            self.fail(tuple(steps), f"{_dotted(steps)} is wrong ({message}): see docs/simulator.md")
        except msgspec.DecodeError as exc:
            found = _BYTE.search(str(exc))
            line = content.count(b"\n", 0, int(found[1])) + 1 if found else content.count(b"\n") + 1
            raise BadWorkload(f"{self.path}:{line}: this is no JSON ({exc}): correct it") from exc

    def fail(self, where: tuple[_Step, ...], message: str) -> NoReturn:
        line = line_of(self.content.decode(errors="replace"), where)
        raise BadWorkload(f"{self.path}:{line}: {message}")


def line_of(text: str, where: tuple[_Step, ...]) -> int:
    """Return the line, from 1, at which the value at *where* begins in *text*, or the nearest one around it."""
    best, depth = 1, 0
    path: list[_Step] = []  # of the value that comes next
    key_next = False
    line, seen = 1, 0
    for token in _TOKEN.finditer(text):
        line += text.count("\n", seen, token.start())
        seen = token.start()
        mark = token[0]
        if mark == ":":
            continue
        if mark == ",":
            if path and isinstance(path[-1], int):
                path[-1] += 1
            else:
                key_next = True
            continue
        if mark in "}]":
            path.pop()
            key_next = False
            continue
        if key_next and mark != "{":
            path[-1] = msgspec.json.decode(mark) if mark.startswith('"') else mark
            key_next = False
        if len(path) > depth and tuple(path) == where[: len(path)]:
            best, depth = line, len(path)
            if depth == len(where):
                return best
        if mark == "{":
            path.append("")
            key_next = True
        elif mark == "[":
            path.append(0)
    return best


def _steps(path: str) -> list[_Step]:
    return [
        int(each["index"]) if each["index"] else each["name"] for each in _STEP.finditer(path) if not each["any"]
    ]  # fmt: skip


def _dotted(steps: list[_Step]) -> str:
    return "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in steps).lstrip(".") or "the file"


def _fields(shape: Any) -> list[str]:
    shapes = (shape, _FileEntry, _DeviceEntry, _CostEntry, _FunctionEntry, _NodeEntry, _UpdateEntry, FunctionScaled)
    return [field.encode_name for each in shapes for field in msgspec.structs.fields(each)]


def _few(names: Iterable[str]) -> str:
    known = list(names)
    return ", ".join(known[:5]) + (", …" if len(known) > 5 else "")


# --- writing ----------------------------------------------------------------------------------------------------------


def workload_json(workload: Workload) -> bytes:
    """Return *workload* in the format that `read_workload` reads: one line per device, function, change and arrival."""
    encode = msgspec.json.Encoder().encode
    names = [encode(each.name) for each in workload.functions]
    functions = [name + b": " + encode(_as_function(each))
                 for name, each in zip(names, workload.functions, strict=True)]  # fmt: skip
    called = [b"[%s, %s]" % (encode(time), names[call])
              for time, call in zip(workload.times, workload.calls, strict=True)]  # fmt: skip
    if workload.service_s is not None:
        called = [each if math.isnan(infer_s) else each[:-1] + b", %s]" % encode(infer_s)
                  for each, infer_s in zip(called, workload.service_s, strict=True)]  # fmt: skip
    parts = [
        b'"devices": [\n%s\n]' % b",\n".join(encode(_as_device(each)) for each in workload.devices),
        b'"functions": {\n%s\n}' % b",\n".join(functions),
    ]
    if workload.host_memory:
        parts.append(
            b'"nodes": %s' % encode({node: _NodeEntry(size / MB) for node, size in workload.host_memory.items()})
        )
    if workload.changes:
        parts.append(b'"changes": [\n%s\n]' % b",\n".join(encode(_as_change(each)) for each in workload.changes))
    parts.append(b'"arrivals": [\n%s\n]' % b",\n".join(called))
    return b"{%s}\n" % b",\n".join(parts)


def _as_device(each: SimulatedDevice) -> _DeviceEntry:
    return _DeviceEntry(each.id, each.memory / MB, each.kind, each.node)


def _as_cost(cost: Cost) -> _CostEntry:
    return _CostEntry(cost.occupation / MB, cost.load_s, cost.service_s, cost.host_load_s)


def _as_function(each: SimulatedFunction) -> _FunctionEntry:
    found = _FunctionEntry(
        kinds={kind: _as_cost(cost) for kind, cost in each.costs.items() if kind != ANY_KIND},
        namespace=each.namespace,
        slots=each.slots,
        min_copies=each.min_copies,
        max_queue=None if each.max_queue == UNBOUNDED else each.max_queue,
        timeout_s=each.timeout_s,
    )
    if (cost := each.costs.get(ANY_KIND)) is not None:
        found.occupation_mb, found.load_s, found.infer_s = cost.occupation / MB, cost.load_s, cost.service_s
        found.host_load_s = cost.host_load_s
    return found


def _as_change(change: Change) -> _ChangeEntry:
    match change:
        case DeviceJoins(at_s, device):
            return _JoinEntry(at_s, _as_device(device))
        case FunctionUpdated(at_s, function, costs):
            cost = (costs or {}).get(ANY_KIND)
            if cost is None:
                return _UpdateEntry(at_s, function)
            return _UpdateEntry(
                at_s, function, cost.occupation / MB, cost.load_s, cost.service_s, cost.host_load_s
            )  # fmt: skip
    return change
