"""`Bodies` of requests and answers: pieces in etcd, and files for large ones while this process works on them."""

import asyncio
import io
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec

import gpufaas_adapters.etcd.async_queue.records as records
from gpufaas_adapters.etcd.async_queue.records import (
    MAX_BODY,
    BodyRecord,
    BodyTooLargeForEtcd,
    CallRecord,
    Part,
    body_of,
)
from gpufaas_adapters.etcd.client import DoGet, DoPut, Etcd
from gpufaas_async_calls.call import INLINE_ANSWER, Body
from gpufaas_async_calls.spool_file import SpoolFile, remove_files

_READ_AT_ONCE = 32


class Bodies:
    """:param folder: of files; emptied here"""

    def __init__(self, etcd: Etcd, folder: Path) -> None:
        self._etcd = etcd
        self._folder = folder
        self._files: dict[tuple[int, Part], Path] = {}
        folder.mkdir(parents=True, exist_ok=True)
        remove_files([each for each in folder.iterdir() if each.is_file()])

    def new_file(self) -> SpoolFile:
        return _LimitedFile(self._folder / secrets.token_hex(16))

    async def store(self, key: int, part: Part, body: Body) -> tuple[BodyRecord, list[DoPut]]:
        """
        Return how *body* is kept, and what of it must still be written: a large one is written here, piece by piece,
        before the call that names it.

        :raises BodyTooLargeForEtcd: it has more than `MAX_BODY`
        """
        if isinstance(body, Path):
            self._files[key, part] = body
            size = await asyncio.to_thread(lambda: body.stat().st_size)
        else:
            size = len(body)
        if size > MAX_BODY:
            raise BodyTooLargeForEtcd
        prefix = body_of(key, part)
        if isinstance(body, bytes) and size <= records.PIECE:
            puts = [DoPut(f"{prefix}0000", body)] if body else []
            return BodyRecord(size, len(puts)), puts
        number = 0
        with body.open("rb") if isinstance(body, Path) else io.BytesIO(body) as file:
            while piece := await asyncio.to_thread(file.read, records.PIECE):
                await self._etcd.put(f"{prefix}{number:04}", piece)
                number += 1
        return BodyRecord(size, number), []

    async def load(self, calls: Sequence[tuple[int, CallRecord]]) -> dict[int, tuple[Body, Body]]:
        """Return the bodies of request and answer, by key of the call; left out is a call whose bodies are gone."""
        wanted = {(key, part): body for key, record in calls for part, body in record.bodies}
        found: dict[tuple[int, Part], Body] = {}
        small: list[tuple[int, Part]] = []
        for at, body in wanted.items():
            if not body.bytes:
                found[at] = b""
            elif (file := self._files.get(at)) is not None:
                found[at] = file
            elif body.bytes <= INLINE_ANSWER:
                small.append(at)
            elif (fetched := await self._fetched(*at, body.count)) is not None:
                found[at] = fetched
        for start in range(0, len(small), _READ_AT_ONCE):
            some = small[start : start + _READ_AT_ONCE]
            read = await self._etcd.txn((), [DoGet(body_of(*at), below=True) for at in some])
            for at, items in zip(some, read.found, strict=True):
                whole = b"".join(item.value for item in items)
                if len(whole) == wanted[at].bytes:
                    found[at] = whole
        return {
            key: (found[key, "request"], found.get((key, "answer"), b""))
            for key, record in calls
            if all((key, part) in found for part, _ in record.bodies)
        }

    async def _fetched(self, key: int, part: Part, count: int) -> Path | None:
        file = self.new_file()
        try:
            for number in range(count):
                item = await self._etcd.get(f"{body_of(key, part)}{number:04}")
                if item is None:
                    file.discard()
                    return None
                file.write(item.value)
            path = await asyncio.to_thread(file.keep)
        except BaseException:
            file.discard()
            raise
        self._files[key, part] = path
        return path

    def release(self, key: int) -> list[Path]:
        """Return the files of a call; the queue does not remove them any more."""
        parts: tuple[Part, Part] = ("request", "answer")
        return [path for part in parts if (path := self._files.pop((key, part), None)) is not None]

    def remove_files(self, key: int, *more: Path) -> None:
        remove_files([*self.release(key), *more])

    async def remove_orphans(self) -> None:
        """Delete pieces of bodies whose gateway died before it wrote the call."""
        pieces = await self._etcd.keys(records.BODIES)
        bases: set[int] = set()
        for item in (await self._etcd.range(records.GATEWAYS)).items:
            bases.add(msgspec.json.decode(item.value, type=records.GatewayRecord).base or item.create_revision)
        named: set[int] = set()
        for prefix in (records.CALLS, records.DEAD, records.CALLS):  # a call that moves is seen in one of them
            named |= {records.key_of(key) for key in await self._etcd.keys(prefix)}
        for key in {int(each.removeprefix(records.BODIES).partition("/")[0], 16) for each in pieces} - named:
            if key >> 32 not in bases:
                await self._etcd.delete(records.bodies_of(key), below=True)


class _LimitedFile(SpoolFile):
    """Refuses a body that is too large for etcd as soon as it is."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._size = 0

    def write(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size > MAX_BODY:
            raise BodyTooLargeForEtcd
        super().write(piece)
