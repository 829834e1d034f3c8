"""`EtcdLedger`: the orders of nodes of a cluster, each at ``v1/orders/ORDER`` (port: `Ledger`)."""

from typing import Final

import msgspec

from gpufaas_adapters.etcd.client import Compare, DoPut, Etcd
from gpufaas_adapters.etcd.reading import read_all
from gpufaas_core.model import OrderId
from gpufaas_core.orders import Stay

_ORDERS: Final = "v1/orders/"


class EtcdLedger:
    """Only the leader writes. *leads*: `Leadership.compare` of it; None: for a reader."""

    def __init__(self, etcd: Etcd, leads: Compare | None = None) -> None:
        self._etcd = etcd
        self._leads = () if leads is None else (leads,)

    async def stays(self) -> list[Stay]:
        return list((await read_all(self._etcd, _ORDERS, Stay)).values())

    async def put(self, stay: Stay) -> bool:
        done = await self._etcd.txn(self._leads, (DoPut(_ORDERS + stay.order, msgspec.json.encode(stay)),))
        return done.succeeded

    async def forget(self, order: OrderId) -> None:
        await self._etcd.delete(_ORDERS + order)
