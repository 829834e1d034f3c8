"""Whether a plan can be carried out: `check`. Pure; names the first mistake."""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from gpufaas_core.constraints import COMPUTE, NOT_CAPPED, TIME_SLICING
from gpufaas_core.errors import BadPlan
from gpufaas_core.model import Bytes, Device, DeviceId, Function, Replica
from gpufaas_core.scaling import PREFIX
from gpufaas_core.units import format_bytes

_MOST_WAIT_S: Final = 10.0
"""As of the annotation ``gpufaas.batch-wait``."""
_NAMES_SHOWN: Final = 10


def check(
    replicas: Sequence[Replica], functions: Mapping[str, Function], devices: Iterable[Device],
    in_force: Iterable[Replica] = (),
) -> None:  # fmt: skip
    """
    :param functions: by ``NAME.NAMESPACE``, the revisions that take calls
    :param in_force: these may stay if their function or device has gone: it may come back. Functions whose replicas
        are as they were are not asked about again: a later edit of theirs keeps nobody from planning others
    :raises BadPlan: *replicas* cannot all be there: says which of them, and why
    """
    there, before = {each.id: each for each in devices}, _by_function(in_force)
    new = {name for name, mine in _by_function(replicas).items() if before.get(name) != mine}
    by_function: dict[str, list[Replica]] = {}
    by_device: dict[DeviceId, list[Replica]] = {}
    for number, each in enumerate(replicas, 1):
        mine = by_function.setdefault(each.function, [])
        known = each.function in functions and each.device in there
        if each.function in new and (known or each not in before.get(each.function, ())):
            for reason in _mistakes(each, mine, functions, there):
                raise BadPlan(f"replica {number}, {each.function} on {each.device}: {reason}")
        if known:
            by_device.setdefault(each.device, []).append(each)
        mine.append(each)
    for name in sorted(new & functions.keys()):
        _check_bounds(name, len(by_function[name]), functions[name])
    for device, beside in by_device.items():
        if any(each.function in new for each in beside):
            _check_device(there[device], beside, functions)


def _by_function(replicas: Iterable[Replica]) -> dict[str, list[Replica]]:
    found: dict[str, list[Replica]] = {}
    for each in replicas:
        found.setdefault(each.function, []).append(each)
    return found


def _mistakes(
    each: Replica, others: Sequence[Replica], functions: Mapping[str, Function], devices: Mapping[DeviceId, Device]
) -> Iterator[str]:
    """Yield what is wrong with one replica; *others*: the earlier ones of its function."""
    function, device = functions.get(each.function), devices.get(each.device)
    if function is None:
        yield f"there is no such function{_near(each.function, functions)}"
        return
    if device is None:
        yield f"there is no such device: there {_listed(sorted(devices))}"
        return
    need = function.need
    if any(other.device == each.device for other in others):
        yield "it is there twice: a function has one replica on a device"
    if need.reserved <= 0:
        yield "its calls are not placed (a CPU function, or one of gpufaas.sharing share), and cannot be planned"
    slots = 1 if need.sharing == "time" else max(1, need.slots)
    for name, value, most, of in (
        ("share", each.share, device.compute, "the compute of the device"),
        ("reserve", each.reserve, device.compute, "the compute of the device"),
        ("slots", each.slots, slots, "what the function declares (gpufaas.slots)"),
        ("batch", each.batch, max(1, need.batch_max), "what the function declares (gpufaas.batch-max)"),
    ):
        if not 0 <= value <= most:
            yield f"{name} {value} is not within 0 and {most}, {of}"
    if each.share and each.reserve:
        yield "share and reserve exclude each other: a share caps the copy and holds compute, a reserve does neither"
    if each.share and need.sharing != "auto":
        yield f"its function is {need.sharing}, and only functions with gpufaas.sharing auto may have a share"
    if each.reserve and need.sharing not in ("auto", "spatial"):
        yield f"its function is {need.sharing}, and only with gpufaas.sharing auto or spatial may it have a reserve"
    if each.share and (held := device.labels.get(COMPUTE)) in (NOT_CAPPED, TIME_SLICING):
        yield f"the device cannot hold a copy to its share ({COMPUTE}={held}): use reserve, which caps nothing"
    if not (each.share or each.reserve) and need.compute > device.compute:
        yield f"the function needs {need.compute} % of the compute, and the device has {device.compute} %"
    if each.wait_s is not None:
        if (each.batch or need.batch_max) <= 1:
            yield "wait is for batches, and it has none: the function declares none (gpufaas.batch-max), or batch is 1"
        if not 0 <= each.wait_s <= _MOST_WAIT_S:
            yield f"wait {each.wait_s:g} s is not within 0 and {_MOST_WAIT_S:g} s"
    if others and others[0].wait_s != each.wait_s:
        yield f"its wait is not that on {others[0].device}: all replicas of a function have the same"
    for constraint in function.constraints:
        if not constraint.satisfied_by(device.labels):
            yield f"the function asks for devices with {constraint}"


def _check_bounds(name: str, replicas: int, function: Function) -> None:
    least, most = function.min_copies, function.max_copies
    if replicas < least:
        raise BadPlan(f"{name} has {replicas} replicas, and {PREFIX}min asks for {least}: plan more, or lower it")
    if most and replicas > most:
        raise BadPlan(f"{name} has {replicas} replicas, and {PREFIX}max allows {most}: plan fewer, or raise it")


def _check_device(device: Device, replicas: Sequence[Replica], functions: Mapping[str, Function]) -> None:
    if (shares := sum(each.share for each in replicas)) > device.compute:
        whose = " + ".join(f"{each.share} of {each.function}" for each in replicas if each.share)
        raise BadPlan(f"the shares on {device.id} are {shares} % together, over its {device.compute} %: {whose}")
    for each in replicas:
        takes = 0 if each.share else each.reserve or functions[each.function].need.compute
        if takes > device.compute - shares:
            raise BadPlan(
                f"{each.function} needs {takes} % of {device.id} while it runs, and shares hold {shares} % of its "
                f"{device.compute} % for good: give it a share or a lower reserve, or plan it elsewhere"
            )
    sizes = [(_memory(functions[each.function], device), each.function) for each in replicas]
    if (memory := sum(size for size, _ in sizes)) > device.memory:
        whose = " + ".join(f"{format_bytes(size)} of {name}" for size, name in sizes)
        raise BadPlan(
            f"the replicas on {device.id} need {format_bytes(memory)} together, over its "
            f"{format_bytes(device.memory)}: {whose}"
        )


def _memory(function: Function, device: Device) -> Bytes:
    """Return what a copy of *function* reserves there; 0 if nothing is known of it."""
    profile = function.profiles.get(device.kind) or function.profiles.get("*")
    return max(function.floor, 0 if profile is None else profile.occupation)


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)  # namespaces, which are alike, count
    return f": did you mean {near[0]}?" if near else ": deploy it first (gpufaas list)"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"are {', '.join(names[:_NAMES_SHOWN])}{more}" if names else "are none"
