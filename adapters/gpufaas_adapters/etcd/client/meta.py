"""Whose keys are below our prefix, and of which layout: `META`."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from gpufaas_adapters.etcd.client.client import Etcd
from gpufaas_adapters.etcd.client.failures import EtcdUnreachable, ForeignKeys
from gpufaas_adapters.etcd.client.values import DoGet, DoPut, absent

META: Final = "v1/meta"
_LAYOUT: Final = 2
"""The version of the values below ``v1/``; what another release cannot read gets the next number. 2: functions have
needs."""


class Meta(Struct, frozen=True):
    product: str
    version: int


async def open_store(
    etcd: Etcd, on_wait: Callable[[str], None], retry_s: Sequence[float] = (0.5, 1.0, 2.0, 5.0)
) -> None:
    """
    Check that the keys below our prefix are ours; write `META` if there are none. Wait while etcd does not answer.

    :param on_wait: called with a line for the log after each vain request
    :param retry_s: pauses between requests; the last one is repeated
    :raises ForeignKeys: it belongs to another product, or to another version
    :raises EtcdRefused: we may not read or write there
    """
    tries = 0
    while True:
        try:
            return await _check_meta(etcd)
        except EtcdUnreachable as exc:
            pause_s = retry_s[min(tries, len(retry_s) - 1)]
            on_wait(f"{exc}; trying again in {pause_s:g} s")
            await asyncio.sleep(pause_s)
            tries += 1


async def _check_meta(etcd: Etcd) -> None:
    prefix = etcd.settings.prefix
    meta = await etcd.get(META)
    if meta is None:
        others = await etcd.keys("", limit=1)
        if others and others[0] != META:
            raise ForeignKeys(
                f"etcd at {etcd.endpoint} has keys below {prefix} that are not ours ({prefix}/{others[0]}): give "
                "another prefix, or another etcd"
            )
        mine = msgspec.json.encode(Meta("gpufaas", _LAYOUT))
        done = await etcd.txn((absent(META),), (DoPut(META, mine),), (DoGet(META),))
        if done.succeeded:
            return
        meta = done.found[0][0]  # another of us was faster
    try:
        found = msgspec.json.decode(meta.value, type=Meta)
    except msgspec.DecodeError:
        found = Meta("something else", 0)
    if found.product != "gpufaas":
        raise ForeignKeys(
            f"{prefix}/{META} in etcd at {etcd.endpoint} says {found.product}: give another prefix, or another etcd"
        )
    if 0 < found.version < _LAYOUT:
        raise ForeignKeys(
            f"what is below {prefix} in etcd at {etcd.endpoint} was written by an older version (keys of version "
            f"{found.version}, this one writes {_LAYOUT}): give another prefix, or delete these keys, and deploy the "
            "functions again"
        )
    if found.version > _LAYOUT:
        raise ForeignKeys(
            f"what is below {prefix} in etcd at {etcd.endpoint} was written by a newer version (keys of version "
            f"{found.version}, this one knows {_LAYOUT}): start that version, or give another prefix"
        )
