"""What its devices cannot enforce of a function's share, in a line for the person who deploys it."""

from collections.abc import Sequence
from typing import Final

from gpufaas_core.constraints import AFFINITY, COMPUTE, CORES, NOT_CAPPED, TIME_SLICING
from gpufaas_core.model import Device, Need

_SHOWN: Final = 3
_OF_A_SHARE: Final = {
    NOT_CAPPED: "not enforced on {}, so it may use more: give such a device cores, as in cpu:0=2GiB,cores=2",
    AFFINITY: "held to whole cores on {}: without control groups there are no fractions of a core",
    TIME_SLICING: "not enforced on {}: without MPS, processes take turns on a GPU",
}
_OF_NEIGHBOURS: Final = {TIME_SLICING: "calls take turns, and do not run side by side, on {}: there is no MPS"}


def not_enforced(need: Need, devices: Sequence[Device], *, image: bool = False) -> str:
    """
    Return what *devices*, on which a function with *need* may run, cannot enforce; empty: nothing.

    :param image: it runs in containers or pods
    """
    found = _of_its_share(need, devices)
    capped = [each.id for each in devices if CORES in each.labels] if image else []
    if not capped:
        return found
    together = (
        f"each of its containers is held to the cores of {_few(capped)}, or its share of them, but not all workers "
        "there together: with others they may use more"
    )
    return f"{found}; {together}" if found else together


def _of_its_share(need: Need, devices: Sequence[Device]) -> str:
    match need.sharing:
        case "share":
            said, begin = _OF_A_SHARE, f"its share of {need.compute} per cent is "
        case "spatial":
            said, begin = _OF_NEIGHBOURS, ""
        case _:
            return ""
    found: dict[str, list[str]] = {}
    for each in devices:
        by = each.labels.get(COMPUTE, "")
        if by in said:
            found.setdefault(by, []).append(each.id)
    return begin + "; ".join(said[by].format(_few(ids)) for by, ids in found.items()) if found else ""


def _few(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
    return ", ".join(ids[:_SHOWN]) + more
