"""
`EtcdFunctionStore`: what is deployed in a cluster (ports: `gpufaas_gateway.ports.FunctionStore`, `Quotas`).

::

    v1/functions/NS/NAME       FunctionEntry: the record, and what nodes and the scheduler need of it
    v1/counts/NS/NAME          calls ended so far; made and removed with the function
    v1/namespaces/NAME         v1/quotas/NS         v1/profiles/DIGEST/KIND
"""

import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from itertools import islice
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from gpufaas_adapters.etcd.blocking import Blocking
from gpufaas_adapters.etcd.client import (
    MAX_OPERATIONS,
    Deleted,
    DoDelete,
    DoGet,
    DoPut,
    Etcd,
    EtcdUnreachable,
    Item,
    Listed,
    Put,
    unchanged,
)
from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.errors import StorageFailed
from gpufaas_core.model import Function, Profile
from gpufaas_core.plausible import read_profile
from gpufaas_gateway.spec import FunctionRecord, Namespace, Quota

log = logging.getLogger(__name__)

_T = TypeVar("_T")

FUNCTIONS: Final = "v1/functions/"
COUNTS: Final = "v1/counts/"
NAMESPACES: Final = "v1/namespaces/"
QUOTAS: Final = "v1/quotas/"
PROFILES: Final = "v1/profiles/"

_encode: Final = msgspec.json.encode


class FunctionEntry(Struct, frozen=True):
    """All that is kept of a deployed function, for gateways, nodes and the scheduler."""

    record: FunctionRecord
    """Its count of calls is not kept here: 0."""
    worker: WorkerSpec | None = None
    """None: not yet known, or of an earlier revision only."""
    function: Function | None = None

    @property
    def is_complete(self) -> bool:
        """Whether worker and function are there, and of the record's revision."""
        mine = self.record.function_id
        return (
            self.worker is not None
            and self.worker.function == mine
            and self.function is not None
            and self.function.id == mine
        )


class EntryChanged(Struct, frozen=True, tag=True):
    entry: FunctionEntry


class EntryRemoved(Struct, frozen=True, tag=True):
    name: str
    """``NAME.NAMESPACE``"""


EntryChange: TypeAlias = EntryChanged | EntryRemoved | Listed


class QuotaChanged(Struct, frozen=True, tag=True):
    namespace: str
    quota: Quota | None
    """None: it has none any more."""


QuotaChange: TypeAlias = QuotaChanged | Listed


class EtcdFunctionStore:
    """
    The port's methods block, and are called from other threads than that of *etcd*'s loop; those that are coroutines
    belong to that loop. Closing *etcd* is its owner's business.

    What a `StorageFailed` leaves behind: nothing, but when etcd stopped answering in the middle (`EtcdUnreachable` with
    `maybe_done`): then it may have been done, and those who watch will see it.
    """

    def __init__(self, etcd: Etcd) -> None:
        self._etcd = etcd
        self._blocking = Blocking(etcd)

    # --- FunctionStore ---

    def put(self, record: FunctionRecord, worker: WorkerSpec | None = None, function: Function | None = None) -> None:
        def entry(before: FunctionEntry | None) -> FunctionEntry:
            kept_worker, kept_function = _rest(before)
            return FunctionEntry(record, worker or kept_worker, function or kept_function)

        self._blocking(self._put(record, entry))

    def remove(self, name: str) -> None:
        self._blocking(self._remove(name))

    def all(self) -> list[FunctionRecord]:
        return self._blocking(self._all())

    def save_profile(self, digest: str, kind: str, profile: Profile) -> None:
        self._blocking(self._etcd.put(f"{PROFILES}{digest}/{kind}", _encode(profile)))

    def profiles(self, digest: str) -> dict[str, Profile]:
        return self._blocking(self.read_profiles(digest))

    def add_invocations(self, counts: Mapping[str, int]) -> None:
        """All or none of `MAX_OPERATIONS` at a time; more are added in several steps."""
        names = iter(sorted(counts.items()))
        while part := dict(islice(names, MAX_OPERATIONS)):
            self._blocking(self._add(part))

    def put_namespace(self, namespace: Namespace) -> None:
        self._blocking(self._etcd.put(f"{NAMESPACES}{namespace.name}", _encode(namespace)))

    def remove_namespace(self, name: str) -> None:
        self._blocking(self._etcd.delete(f"{NAMESPACES}{name}"))

    def namespaces(self) -> list[Namespace]:
        return list(self._blocking(self._read(NAMESPACES, Namespace)).values())

    def close(self) -> None:
        pass

    # --- Quotas ---

    def put_quota(self, namespace: str, quota: Quota) -> None:
        self._blocking(self._etcd.put(f"{QUOTAS}{namespace}", _encode(quota)))

    def remove_quota(self, namespace: str) -> None:
        self._blocking(self._etcd.delete(f"{QUOTAS}{namespace}"))

    def quotas(self) -> dict[str, Quota]:
        return self._blocking(self._read(QUOTAS, Quota))

    # --- what a cluster needs beside the ports ---

    async def entry(self, name: str) -> FunctionEntry | None:
        """Return what is kept of ``NAME.NAMESPACE``."""
        item = await self._etcd.get(f"{FUNCTIONS}{_path(name)}")
        return _entry_of(item) if item else None

    async def entries(self) -> list[FunctionEntry]:
        """Return all that can be read, ordered by namespace and name."""
        items = (await self._etcd.range(FUNCTIONS)).items
        return _sorted([entry for item in items if (entry := _entry_of(item)) is not None])

    async def read_profiles(self, digest: str) -> dict[str, Profile]:
        """`profiles`, on the loop."""
        prefix = f"{PROFILES}{digest}/"
        found: dict[str, Profile] = {}
        for item in (await self._etcd.range(prefix)).items:
            try:
                found[item.key.removeprefix(prefix)] = read_profile(item.value)
            except ValueError as exc:
                log.warning("profile.unreadable key=%s: it is learnt again: %s", item.key, exc)
        return found

    async def write_profile(self, digest: str, kind: str, profile: Profile) -> None:
        """`save_profile`, on the loop."""
        await self._etcd.put(f"{PROFILES}{digest}/{kind}", _encode(profile))

    async def watch_entries(
        self, on_trouble: Callable[[StorageFailed], None] | None = None
    ) -> AsyncGenerator[EntryChange]:
        """Yield what is there, then `Listed`, then each change, for ever; see `Etcd.watch`."""
        async with aclosing(self._etcd.watch(FUNCTIONS, on_trouble=on_trouble)) as changes:
            async for change in changes:
                match change:
                    case Put(item):
                        if (entry := _entry_of(item)) is not None:
                            yield EntryChanged(entry)
                    case Deleted(key):
                        yield EntryRemoved(_name(key.removeprefix(FUNCTIONS)))
                    case Listed():
                        yield change

    async def watch_quotas(self) -> AsyncGenerator[QuotaChange]:
        """Yield what is there, then `Listed`, then each change, for ever; see `Etcd.watch`."""
        async with aclosing(self._etcd.watch(QUOTAS)) as changes:
            async for change in changes:
                match change:
                    case Put(item):
                        # An unreadable one is logged, and holds nobody to anything.
                        yield QuotaChanged(item.key.removeprefix(QUOTAS), _decoded(item, Quota))
                    case Deleted(key):
                        yield QuotaChanged(key.removeprefix(QUOTAS), None)
                    case Listed():
                        yield change

    # --- on the loop ---

    async def _put(self, record: FunctionRecord, make: Callable[[FunctionEntry | None], FunctionEntry]) -> None:
        path = _path(record.full_name)
        key, count = f"{FUNCTIONS}{path}", f"{COUNTS}{path}"
        held = await self._etcd.get(key)
        for _ in self._attempts(key):
            value = _kept(make(_entry_of(held) if held else None))
            unseen = unchanged(key, held.mod_revision if held else 0)
            put: list[DoPut] = [DoPut(key, value)]
            if held is None:
                put.append(DoPut(count, b"%d" % record.invocations))
            done = await self._etcd.txn((unseen,), put, (DoGet(key),))
            if done.succeeded:
                return
            held = next(iter(done.found[0]), None)

    async def _remove(self, name: str) -> None:
        path = _path(name)
        await self._etcd.txn((), (DoDelete(f"{FUNCTIONS}{path}"), DoDelete(f"{COUNTS}{path}")))

    async def _all(self) -> list[FunctionRecord]:
        counts = {item.key.removeprefix(COUNTS): item.value for item in (await self._etcd.range(COUNTS)).items}
        return [
            msgspec.structs.replace(entry.record, invocations=_number(counts.get(_path(entry.record.full_name))))
            for entry in await self.entries()
        ]

    async def _add(self, counts: Mapping[str, int]) -> None:
        keys = {f"{COUNTS}{_path(name)}": count for name, count in counts.items()}
        for _ in self._attempts(COUNTS):
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

    def _attempts(self, what: str) -> Iterator[None]:
        """
        As often as somebody else was faster: each time somebody got on.

        :raises EtcdUnreachable: for too long
        """
        end = time.monotonic() + 4 * self._etcd.settings.timeout_s
        while time.monotonic() < end:
            yield
        raise EtcdUnreachable(
            f"{what} in etcd at {self._etcd.endpoint} is written by others all the time: try again", maybe_done=False
        )

    async def _read(self, prefix: str, kind: type[_T]) -> dict[str, _T]:
        found: dict[str, _T] = {}
        for item in (await self._etcd.range(prefix)).items:
            if (value := _decoded(item, kind)) is not None:
                found[item.key.removeprefix(prefix)] = value
        return found


def _decoded(item: Item, kind: type[_T]) -> _T | None:
    """None: it is unreadable (changed by hand, or by a later version): one such value is no reason to serve nothing."""
    try:
        return msgspec.json.decode(item.value, type=kind)
    except msgspec.DecodeError as exc:
        log.error("store.unreadable key=%s reason=%s", item.key, exc)
        return None


def _entry_of(item: Item) -> FunctionEntry | None:
    return _decoded(item, FunctionEntry)


def _kept(entry: FunctionEntry) -> bytes:
    built: dict[str, Any] = msgspec.to_builtins(entry)
    del built["record"]["invocations"]
    return _encode(built)


def _rest(entry: FunctionEntry | None) -> tuple[WorkerSpec | None, Function | None]:
    return (entry.worker, entry.function) if entry else (None, None)


def _sorted(entries: Sequence[FunctionEntry]) -> list[FunctionEntry]:
    return sorted(entries, key=lambda entry: (entry.record.namespace, entry.record.name))


def _number(value: bytes | None) -> int:
    return int(value) if value is not None and value.isdigit() else 0


def _path(name: str) -> str:
    """``NS/NAME`` of ``NAME.NAMESPACE``: neither has a dot in it."""
    function, _, namespace = name.partition(".")
    return f"{namespace}/{function}"


def _name(path: str) -> str:
    namespace, _, function = path.partition("/")
    return f"{function}.{namespace}"
