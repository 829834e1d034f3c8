"""JSON values in etcd. One that cannot be read (changed by hand, or by a later version) is logged and left out."""

import logging
from typing import TypeVar

import msgspec

from gpufaas_adapters.etcd.client import Etcd, Item

log = logging.getLogger(__name__)

_T = TypeVar("_T")


def decoded(item: Item, kind: type[_T]) -> _T | None:
    """Return the value; None: it cannot be read."""
    try:
        return msgspec.json.decode(item.value, type=kind)
    except ValueError as exc:  # msgspec's are
        log.error("store.unreadable key=%s reason=%s", item.key, exc)
        return None


async def read_all(etcd: Etcd, prefix: str, kind: type[_T]) -> dict[str, _T]:
    """Return the values below *prefix*, by what follows it, in the order of the keys."""
    items = (await etcd.range(prefix)).items
    return {item.key.removeprefix(prefix): value for item in items if (value := decoded(item, kind)) is not None}
