"""
`EtcdFunctionStore`: what a gateway keeps in a cluster (ports: `gpufaas_gateway.ports.FunctionStore`, `QuotaStore`).

::

    v1/functions/NS/NAME       FunctionEntry: the record, and what nodes and the scheduler need of it
    v1/history/NS/NAME         its last revisions
    v1/counts/NS/NAME          calls ended so far; made and removed with the function
    v1/namespaces/NAME         v1/quotas/NS         v1/profiles/DIGEST/KIND
"""

import time
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final

import msgspec
from msgspec.structs import replace

from gpufaas_adapters.etcd.blocking import Blocking
from gpufaas_adapters.etcd.client import MAX_OPERATIONS, DoDelete, DoGet, DoPut, Etcd, EtcdUnreachable, Item, unchanged
from gpufaas_adapters.etcd.deployed import FUNCTIONS, QUOTAS, DeployedFunctions, FunctionEntry
from gpufaas_adapters.etcd.reading import decoded, read_all
from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.model import Function, Profile
from gpufaas_gateway.history import Revision, check_seen, noting
from gpufaas_gateway.spec import FunctionRecord, Namespace, Quota

COUNTS: Final = "v1/counts/"
HISTORY: Final = "v1/history/"
NAMESPACES: Final = "v1/namespaces/"


class EtcdFunctionStore:
    """
    The methods block, and are called from other threads than that of *etcd*'s loop.

    After a `StorageFailed` nothing has changed, unless it is an `EtcdUnreachable` with `maybe_done`: then it may have
    been done, and `DeployedFunctions.watch` will tell.
    """

    def __init__(self, etcd: Etcd) -> None:
        self._etcd = etcd
        self._deployed = DeployedFunctions(etcd)
        self._blocking = Blocking(etcd)

    def put(
        self,
        record: FunctionRecord,
        worker: WorkerSpec | None = None,
        function: Function | None = None,
        noted: Sequence[Revision] = (),
        seen: str | None = None,
    ) -> None:
        self._blocking(self._put(record, FunctionEntry(record, worker, function).encoded(), noted, seen))

    async def _put(self, record: FunctionRecord, entry: bytes, noted: Sequence[Revision], seen: str | None) -> None:
        path = _path(record.full_name)
        keys = [f"{FUNCTIONS}{path}", f"{HISTORY}{path}"]
        while True:  # until no other gateway has written in between
            function, history = (await self._etcd.txn((), [DoGet(key) for key in keys])).found
            there = decoded(function[0], FunctionEntry) if function else None
            check_seen(record.full_name, there.record if there else None, seen)
            history_now = noting(_revisions(history), record, noted)
            operations = [DoPut(keys[0], entry), DoPut(keys[1], msgspec.json.encode(history_now))]
            if not function:
                operations.append(DoPut(f"{COUNTS}{path}", b"%d" % record.invocations))
            read = zip(keys, (function, history), strict=True)
            same = [unchanged(key, items[0].mod_revision if items else 0) for key, items in read]
            if (await self._etcd.txn(same, operations)).succeeded:
                return

    def history(self, name: str) -> list[Revision]:
        item = self._blocking(self._etcd.get(f"{HISTORY}{_path(name)}"))
        return _revisions([item] if item else [])

    def remove(self, name: str) -> None:
        self._blocking(self._etcd.txn((), [DoDelete(f"{each}{_path(name)}") for each in (FUNCTIONS, COUNTS, HISTORY)]))

    def all(self) -> list[FunctionRecord]:
        async def read() -> list[FunctionRecord]:
            counts = {item.key.removeprefix(COUNTS): item.value for item in (await self._etcd.range(COUNTS)).items}
            records = [entry.record for entry in await self._deployed.entries()]
            return [replace(each, invocations=_number(counts.get(_path(each.full_name)))) for each in records]

        return self._blocking(read())

    def save_profile(self, digest: str, kind: str, profile: Profile) -> None:
        self._blocking(self._deployed.save_profile(digest, kind, profile))

    def profiles(self, digest: str) -> dict[str, Profile]:
        return self._blocking(self._deployed.profiles(digest))

    def add_invocations(self, counts: Mapping[str, int]) -> None:
        """Up to `MAX_OPERATIONS` are added all or none; more are added in several steps."""
        names = iter(sorted(counts.items()))
        while part := dict(islice(names, MAX_OPERATIONS)):
            self._blocking(self._add(part))

    async def _add(self, counts: Mapping[str, int]) -> None:
        """:raises EtcdUnreachable: other gateways wrote in between each time, for too long"""
        keys = {f"{COUNTS}{_path(name)}": count for name, count in counts.items()}
        end = time.monotonic() + 4 * self._etcd.settings.timeout_s
        while time.monotonic() < end:
            found = (await self._etcd.txn((), [DoGet(key) for key in keys])).found
            held = [items[0] for items in found if items]  # there is one as long as there is the function
            if not held:
                return
            done = await self._etcd.txn(
                [unchanged(item.key, item.mod_revision) for item in held],
                [DoPut(item.key, b"%d" % (_number(item.value) + keys[item.key])) for item in held],
            )
            if done.succeeded:
                return
        raise EtcdUnreachable(
            f"{COUNTS} in etcd at {self._etcd.endpoint} is written by others all the time: try again", maybe_done=False
        )

    def put_namespace(self, namespace: Namespace) -> None:
        self._blocking(self._etcd.put(f"{NAMESPACES}{namespace.name}", msgspec.json.encode(namespace)))

    def remove_namespace(self, name: str) -> None:
        self._blocking(self._etcd.delete(f"{NAMESPACES}{name}"))

    def namespaces(self) -> list[Namespace]:
        return list(self._blocking(read_all(self._etcd, NAMESPACES, Namespace)).values())

    def put_quota(self, namespace: str, quota: Quota) -> None:
        self._blocking(self._etcd.put(f"{QUOTAS}{namespace}", msgspec.json.encode(quota)))

    def remove_quota(self, namespace: str) -> None:
        self._blocking(self._etcd.delete(f"{QUOTAS}{namespace}"))

    def quotas(self) -> dict[str, Quota]:
        return self._blocking(read_all(self._etcd, QUOTAS, Quota))


def _revisions(found: Sequence[Item]) -> list[Revision]:
    return (decoded(found[0], list[Revision]) if found else None) or []


def _number(value: bytes | None) -> int:
    return int(value) if value is not None and value.isdigit() else 0


def _path(name: str) -> str:
    """``NS/NAME`` of ``NAME.NAMESPACE``: neither has a dot in it."""
    function, _, namespace = name.partition(".")
    return f"{namespace}/{function}"
