"""etcd, as the adapters use it: `Etcd`, its values and errors. The only package that knows etcd's client library."""

from gpufaas_adapters.etcd.client.client import Etcd
from gpufaas_adapters.etcd.client.failures import EtcdFull, EtcdRefused, EtcdUnreachable, ForeignKeys
from gpufaas_adapters.etcd.client.lease import EtcdLease, LeaseHold
from gpufaas_adapters.etcd.client.meta import META, open_store
from gpufaas_adapters.etcd.client.settings import EtcdSettings
from gpufaas_adapters.etcd.client.values import (
    MAX_OPERATIONS,
    Change,
    Compare,
    Deleted,
    DoDelete,
    DoGet,
    DoPut,
    Item,
    Listed,
    Operation,
    Put,
    Range,
    TxnResult,
    absent,
    created_at,
    present,
    unchanged,
)

__all__ = [
    "MAX_OPERATIONS", "META", "Change", "Compare", "Deleted", "DoDelete", "DoGet", "DoPut", "Etcd", "EtcdFull",
    "EtcdLease", "EtcdRefused", "EtcdSettings", "EtcdUnreachable", "ForeignKeys", "Item", "LeaseHold", "Listed",
    "Operation", "Put", "Range", "TxnResult", "absent", "created_at", "open_store", "present", "unchanged",
]  # fmt: skip
