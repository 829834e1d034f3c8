"""The file of ``--offers``, and the provider of ``--provider``."""

import difflib
import math
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from gpufaas_core.errors import InvalidSpec
from gpufaas_core.orders import NodeOffer
from gpufaas_core.units import parse_bytes
from gpufaas_providers.ports import Joining, Make, Provider

ENTRY_POINTS: Final = "gpufaas.providers"


class _Given(msgspec.Struct, forbid_unknown_fields=True):
    """An entry of the file; see `NodeOffer`."""

    kind: str
    memory: str
    devices: int = 1
    price_per_h: float | None = None
    start_s: float = 0.0
    limit: int = 1
    options: dict[str, str] = {}


class _File(msgspec.Struct, forbid_unknown_fields=True):
    offers: list[_Given]


def read_offers(path: Path) -> tuple[NodeOffer, ...]:
    """Read a file of offers, YAML or JSON. :raises InvalidSpec: it cannot be used; says which offer, and why"""
    try:
        given = msgspec.convert(yaml.safe_load(path.read_text()), _File)
    except OSError as exc:
        raise InvalidSpec(f"--offers {path}: {exc.strerror}") from exc
    except (ValueError, yaml.YAMLError) as exc:
        raise InvalidSpec(f"--offers {path}: {' '.join(str(exc).split())}") from exc
    found: dict[str, NodeOffer] = {}
    for number, each in enumerate(given.offers, 1):
        where = f"--offers {path}: offer {number}, {each.kind}"
        if each.kind in found:
            raise InvalidSpec(f"{where}: this kind is offered twice: say it once")
        price = each.price_per_h
        for name, value, least in (("price_per_h", price, 0), ("start_s", each.start_s, 0),
                                   ("devices", each.devices, 1), ("limit", each.limit, 0)):  # fmt: skip
            if value is not None and not (math.isfinite(value) and value >= least):
                raise InvalidSpec(f"{where}: {name} is {value:g}: it is a number of {least} or more")
        try:
            memory = parse_bytes(each.memory)
        except InvalidSpec as exc:
            raise InvalidSpec(f"{where}: memory: {exc}") from exc
        if not memory:
            raise InvalidSpec(f"{where}: memory is 0: write for example 2GiB")
        found[each.kind] = NodeOffer(
            each.kind, memory, each.devices, price, each.start_s, each.limit, each.options
        )  # fmt: skip
    if not found:
        raise InvalidSpec(f"--offers {path}: it offers nothing: leave --offers out, or name a kind")
    return tuple(found.values())


def provider_named(name: str) -> str:
    """Return *name* if there is such a provider. :raises InvalidSpec: there is none: says which there are"""
    there = _installed()
    if name not in there:
        near = difflib.get_close_matches(name, there, n=1)
        meant = f"did you mean {near[0]}?" if near else f"there are: {', '.join(sorted(there))}"
        raise InvalidSpec(f"there is no provider {name!r}: {meant}")
    return name


def provider(name: str, joining: Joining) -> Provider:
    """:raises InvalidSpec: there is no provider *name*"""
    make: Make = _installed()[provider_named(name)]()
    return make(joining)


def _installed() -> dict[str, Any]:
    """Return what loads each provider, by name."""
    from importlib.metadata import entry_points  # takes 15 ms, only needed where a provider is named

    return {"local": _local, **{each.name: each.load for each in entry_points(group=ENTRY_POINTS)}}


def _local() -> Make:
    from gpufaas_providers.local import LocalProvider

    return LocalProvider
