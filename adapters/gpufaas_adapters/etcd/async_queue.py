"""
`EtcdAsyncQueue`: the asynchronous calls of a cluster, in etcd (port: `gpufaas_gateway.ports.AsyncQueue`).

::

    v1/async/gateways/OWNER             under a lease: this gateway, in this life of it, works on what it owns
    v1/async/calls/ID/KEY               a call that has not ended, with its owner
    v1/async/bodies/KEY/request/0000    its body in pieces; .../answer/0000: that of its answer
    v1/async/dead/ID/KEY                a dead letter, with all that is needed to try it again
    v1/async/ended/ID/KEY               what became of it; under a lease: etcd forgets it
    v1/async/cancelled/OWNER/KEY        told to the owner of a call that another gateway took back

Every call belongs to the gateway that accepted it; claiming one of one's own is a matter of memory, and costs no write.
When a gateway's lease ends the others take its calls over (`follow`). Each change of a call is made on condition that
nobody changed it since, so that of two that believe to own it one is heard. Executed twice is: what a gateway had
claimed when it died or lost its lease.
"""

import asyncio
import logging
import secrets
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias, assert_never
from urllib.parse import quote

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gpufaas_adapters.etcd.blocking import Blocking
from gpufaas_adapters.etcd.client import (
    Compare,
    Deleted,
    DoDelete,
    DoDeletePrefix,
    DoPut,
    DoRange,
    Etcd,
    EtcdLease,
    Item,
    Listed,
    Operation,
    Put,
    absent,
    present,
    unchanged,
)
from gpufaas_adapters.etcd.election import TTL_S, Registration, register
from gpufaas_async_calls.call import (
    INLINE_ANSWER,
    AcceptedCall,
    Body,
    CallStatus,
    CancelledCall,
    ClaimedCall,
    Dead,
    Deliver,
    Done,
    KeptAnswer,
    Outcome,
    Phase,
    Redeliver,
    Retry,
    Waiting,
)
from gpufaas_async_calls.spool_file import SpoolFile, remove_files
from gpufaas_core.errors import BodyTooLarge, StorageAway, StorageFailed
from gpufaas_core.units import Bytes, KiB, MiB, Seconds, format_bytes

log = logging.getLogger(__name__)

ROOT: Final = "v1/async/"
GATEWAYS: Final = f"{ROOT}gateways/"
CALLS: Final = f"{ROOT}calls/"
BODIES: Final = f"{ROOT}bodies/"
DEAD: Final = f"{ROOT}dead/"
ENDED: Final = f"{ROOT}ended/"
CANCELLED: Final = f"{ROOT}cancelled/"

MAX_BODY: Final[Bytes] = 8 * MiB
"""Of a request, and of an answer: etcd is a store for small things, and keeps all of it in memory."""
PIECE: Final[Bytes] = 512 * KiB

# Below etcd's limits of 128 operations and 1.5 MiB for one transaction.
_MAX_OPERATIONS: Final = 100
_MAX_BYTES: Final[Bytes] = 1 * MiB
_TOLD_S: Final = 60
"""How long a gateway that was away may learn that a call of its own was cancelled; then it finds it gone."""
_BUCKET_S: Final[Seconds] = 60.0
"""Calls that end within so long share a lease: etcd keeps leases in memory, and forgets them one by one."""
_AGAIN_S: Final[Seconds] = 1.0
_DEAD_LOOKED_AT: Final = 100

_encode: Final = msgspec.json.encode
_Part: TypeAlias = Literal["request", "answer"]


class BodyTooLargeForEtcd(BodyTooLarge, StorageFailed):
    """413 to a caller; an execution whose answer is that large has failed."""


class _Gateway(Struct, frozen=True, omit_defaults=True):
    """Who it is; `base` is what the keys of its calls begin with, 0 in its first moment."""

    id: str
    base: int = 0


class _Pieces(Struct, frozen=True):
    bytes: int = 0
    count: int = 0


class _Answer(Struct, frozen=True):
    status: int
    headers: tuple[tuple[str, str], ...]
    duration_s: Seconds
    attempts_allowed: int
    body: _Pieces


class _Call(Struct, frozen=True, omit_defaults=True):
    """A call as it is kept, but for its bodies. Bytes of HTTP are text here, as latin-1."""

    id: str
    function: str
    name: str
    path: str
    query: str
    headers: tuple[tuple[str, str], ...]
    callback_url: str | None
    start_ns: int
    owner: str
    phase: Literal["queued", "callback", "dead"] = "queued"
    due_at: float | None = None
    ended_at: float | None = None
    attempts: int = 0
    deliveries: int = 0
    status: int | None = None
    reason: str | None = None
    exhausted: str | None = None
    body: _Pieces = _Pieces()
    answer: _Answer | None = None

    def seen(self, *, is_running: bool = False) -> CallStatus:
        state = "running" if is_running and self.phase == "queued" else self.phase
        return CallStatus(
            self.id, self.function, state, self.attempts, self.deliveries, self.status, self.reason,
            self.start_ns / 1e9, self.ended_at, self.due_at,
        )  # fmt: skip


class _Found(NamedTuple):
    item: Item
    key: int
    call: _Call


@dataclass(slots=True)
class _Held:
    """A call of ours, as far as we know."""

    key: int
    call: _Call
    revision: int
    is_claimed: bool = False

    @property
    def lane(self) -> tuple[Phase, str]:
        assert self.call.phase != "dead"
        return self.call.phase, self.call.function

    @property
    def place(self) -> tuple[float, int]:
        return self.call.due_at or 0.0, self.key


@dataclass(slots=True)
class _Step:
    """What is done together or not at all."""

    compares: list[Compare]
    operations: list[Operation]
    done: Callable[[int], None]
    """Told the revision."""
    refused: Callable[[], Awaitable[None]]
    """Awaited when a condition did not hold."""
    size: Bytes = field(init=False)

    def __post_init__(self) -> None:
        self.size = sum(len(each.value) + 200 for each in self.operations if isinstance(each, DoPut))


class _LimitedFile(SpoolFile):
    """Refuses what etcd would not take before all of it is here."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._size = 0

    def write(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size > MAX_BODY:
            raise _too_large()
        super().write(piece)


class EtcdAsyncQueue:
    """
    Made by `open`. The port's methods block, and are called from other threads than that of *etcd*'s loop; those that
    are coroutines belong to that loop.

    A `write` that etcd does not answer may have been done in part or whole: outcomes are told again by who told them,
    and calls that were not acknowledged are deleted as soon as etcd answers, unless this gateway dies before.
    """

    @classmethod
    async def open(
        cls,
        etcd: Etcd,
        gateway: str,
        folder: Path,
        *,
        done_kept_s: int = 900,
        dead_kept_s: Seconds = 7 * 86_400.0,
        dead_kept: int = 10_000,
        ttl_s: int = TTL_S,
    ) -> "EtcdAsyncQueue":
        """
        Say that this gateway is there, and take over the calls of those that are not.

        :param gateway: its id; another life of it is another owner
        :param folder: of large bodies, while this process works on them; emptied here
        :param done_kept_s: for how long the status of a done or cancelled call can be asked for
        :param dead_kept_s: the same of dead letters, which keep their requests; at most *dead_kept*
        :raises StorageFailed: etcd is away, or refuses
        """
        queue = cls(etcd, f"{gateway}-{secrets.token_hex(4)}", folder, done_kept_s, dead_kept_s, dead_kept)
        queue._registration = await register(etcd, queue._alive, _encode(_Gateway(gateway)), ttl_s=ttl_s)
        try:
            queue._seen_lease = queue._registration.lease
            await queue._learn_base(gateway)
            await queue._take_over([])
            await queue._remove_orphans()
        except BaseException:
            await queue.stop()
            raise
        return queue

    def __init__(
        self, etcd: Etcd, owner: str, folder: Path, done_kept_s: int, dead_kept_s: Seconds, dead_kept: int
    ) -> None:
        self.owner = owner
        self._etcd = etcd
        self._blocking = Blocking(etcd)
        self._folder = folder
        self._done_kept_s = done_kept_s
        self._dead_kept = dead_kept_s, dead_kept
        self._alive = f"{GATEWAYS}{owner}"
        self._registration: Registration
        self._seen_lease: EtcdLease
        """The one under which we know what is ours; under another it may be somebody else's."""
        self._base = 0
        self._serial = 0
        self._look = asyncio.Event()
        """Set when a request that was not answered may have made a call ours."""
        self._held: dict[int, _Held] = {}
        self._due: dict[tuple[Phase, str], list[tuple[float, int]]] = {}
        """Calls of ours that are not claimed, the longest due first."""
        self._files: dict[int, dict[_Part, Path]] = {}
        """Bodies that are on our disk too, by call."""
        self._unwanted: list[_Held] = []
        """Calls that were refused to their callers, and may be in etcd."""
        self._ended_lease = (0, -2 * _BUCKET_S)
        self._dead_told = 0
        self._lock = asyncio.Lock()
        self._on_found: Callable[[Sequence[Waiting]], None] = lambda _: None
        self._on_lost: Callable[[int, str, bool], None] = lambda *_: None
        folder.mkdir(parents=True, exist_ok=True)
        remove_files([each for each in folder.iterdir() if each.is_file()])

    async def stop(self) -> None:
        """What this gateway owns is the others' now."""
        await self._registration.close()

    async def follow(
        self,
        on_found: Callable[[Sequence[Waiting]], None],
        on_lost: Callable[[int, str, bool], None],
        on_trouble: Callable[[StorageFailed], None] | None = None,
    ) -> None:
        """
        Take over the calls of gateways that end, for ever; to be begun after `waiting` was asked.

        :param on_found: told how many calls are ours now that were not
        :param on_lost: told of a call that is ours no more (its key, its function, whether it was claimed): somebody
            cancelled it through another gateway, or took it over while we could not be seen
        :raises EtcdRefused: we may not watch
        """
        self._on_found, self._on_lost = on_found, on_lost
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_gateways(on_trouble))
            tasks.create_task(self._follow_cancelled(on_trouble))
            tasks.create_task(self._follow_doubts(on_trouble))

    # --- AsyncQueue ---

    def write(self, accepted: Sequence[AcceptedCall], outcomes: Sequence[Outcome]) -> None:
        self._blocking(self._write(accepted, outcomes))

    def claim(self, phase: Phase, function: str, now: float, limit: int) -> tuple[list[ClaimedCall], float | None]:
        return self._blocking(self._claim(phase, function, now, limit))

    def cancel(self, calls: Sequence[str], now: float) -> list[list[CancelledCall]]:
        return self._blocking(self._cancel(calls, now))

    def get(self, call: str) -> CallStatus | None:
        """Of a call that another gateway owns it is not told whether it runs: ``queued``."""
        return self._blocking(self._get(call))

    def list_dead(self, function: str | None = None, limit: int = 1000) -> list[CallStatus]:
        dead = [found.call for found in _read(self._blocking(self._etcd.range(DEAD)).items)]
        chosen = [each.seen() for each in dead if function in (None, each.function)]
        return sorted(chosen, key=lambda each: each.ended_at or 0.0)[:limit]

    def requeue(self, call: str, now: float) -> Waiting | None:
        return self._blocking(self._requeue(call, now))

    def discard(self, call: str) -> bool:
        return self._blocking(self._discard(call))

    def waiting(self) -> list[Waiting]:
        """Of our own: those of other gateways are theirs to count."""

        async def look() -> list[Waiting]:
            return _counted(self._held.values())

        return self._blocking(look())

    def new_file(self) -> SpoolFile:
        return _LimitedFile(self._folder / secrets.token_hex(16))

    def close(self) -> None:
        """`stop`, from another thread."""
        self._blocking(self.stop())

    # --- writing ---

    async def _write(self, accepted: Sequence[AcceptedCall], outcomes: Sequence[Outcome]) -> None:
        async with self._lock:
            await self._undo()
            steps: list[_Step] = []
            taken: list[_Held] = []
            refused: list[AcceptedCall] = []
            try:
                settled = [await self._settled(outcome) for outcome in outcomes]
                steps += [step for step in settled if step is not None]
                steps += [await self._accepted(call, taken, refused) for call in accepted]
                await self._commit(steps)
                if refused:
                    raise self._lease_ended()
            except BaseException:
                for held in taken:
                    self._drop(held)
                    self._files.pop(held.key, None)  # whoever sent them removes them
                self._unwanted += taken
                raise
            await self._prune()

    async def _accepted(self, call: AcceptedCall, taken: list[_Held], refused: list[AcceptedCall]) -> _Step:
        self._serial += 1
        key = self._base << 32 | self._serial
        pieces, puts = await self._stored(key, "request", call.body)
        kept = _Call(
            call.id, call.function, call.name, call.path.decode("latin-1"), call.query.decode("latin-1"),
            _text(call.headers), call.callback_url, call.start_ns, self.owner, due_at=call.accepted_at, body=pieces,
        )  # fmt: skip
        held = _Held(key, kept, 0)
        taken.append(held)

        def done(revision: int) -> None:
            held.revision = revision
            self._hold(held)

        async def not_done() -> None:
            refused.append(call)

        put = DoPut(_path(CALLS, call.id, key), _encode(kept))
        return _Step([present(self._alive)], [put, *puts], done, not_done)

    async def _settled(self, outcome: Outcome) -> _Step | None:
        """Return how one outcome is written; None: the claim only ends, for the call is not ours any more."""
        held = self._held.get(outcome.key)
        if held is None or not held.is_claimed:
            if held is None:
                left = outcome.answer.body if isinstance(outcome, Deliver) else b""
                self._remove_files(outcome.key, *([left] if isinstance(left, Path) else []))
            return None  # else it was told before, to a write that failed later
        changed, operations = await self._rewritten(held, outcome)

        def done(revision: int) -> None:
            self._drop(held)
            if changed is not None:
                self._hold(_Held(held.key, changed, revision))
            elif isinstance(outcome, Done):
                self._remove_files(held.key)

        compares = [unchanged(_path(CALLS, held.call.id, held.key), held.revision)]
        return _Step(compares, operations, done, lambda: self._refused(held, outcome))

    async def _refused(self, held: _Held, outcome: Outcome) -> None:
        """The call was written by somebody else since: find out whether it is ours still."""
        call, key = held.call, held.key
        found = _read(() if (item := await self._etcd.get(_path(CALLS, call.id, key))) is None else (item,))
        self._drop(held)
        if found and found[0].call.owner == self.owner:
            # It was written by a request whose answer did not reach us; or somebody had it for a while.
            again = _Held(key, found[0].call, found[0].item.mod_revision)
            self._hold(again)
            if isinstance(outcome, Done | Dead):  # whose callers count it out
                self._on_found(_counted([again]))
            return
        self._remove_files(key)
        log.warning("async.outcome_dropped call=%s function=%s", call.id, call.function)
        if not isinstance(outcome, Done | Dead):  # those count it out themselves
            self._on_lost(key, call.function, False)

    async def _rewritten(self, held: _Held, outcome: Outcome) -> tuple[_Call | None, list[Operation]]:
        """Return the call as it waits on (None: it does not), and the operations that write what became of it."""
        call, key = held.call, held.key
        at = _path(CALLS, call.id, key)
        puts: list[DoPut] = []
        match outcome:
            case Done():
                status = replace(
                    call.seen(), state="done", due_at=None, ended_at=outcome.at, status=outcome.status,
                    attempts=outcome.attempts, reason=None,
                )  # fmt: skip
                return None, await self._ending(key, call, status)
            case Dead():
                self._dead_told += 1
                dead = replace(
                    call, phase="dead", due_at=None, ended_at=outcome.at, attempts=outcome.attempts,
                    status=outcome.status, reason=outcome.reason, answer=call.answer if outcome.undelivered else None,
                )  # fmt: skip
                of_answer = [] if outcome.undelivered else [DoDeletePrefix(_body(key, "answer"))]
                return None, [DoDelete(at), DoPut(_path(DEAD, call.id, key), _encode(dead)), *of_answer]
            case Retry():
                changed = replace(
                    call, due_at=outcome.at, attempts=outcome.attempts, status=outcome.status, reason=outcome.reason
                )
            case Deliver():
                given = outcome.answer
                pieces, puts = await self._stored(key, "answer", given.body)
                answer = _Answer(given.status, _text(given.headers), given.duration_s, given.attempts_allowed, pieces)
                changed = replace(
                    call, phase="callback", due_at=outcome.at, attempts=outcome.attempts, status=given.status,
                    exhausted=outcome.exhausted, reason=outcome.exhausted, answer=answer,
                )  # fmt: skip
            case Redeliver():
                changed = replace(call, due_at=outcome.at, deliveries=outcome.deliveries, reason=outcome.reason)
            case _:
                assert_never(outcome)
        return changed, [DoPut(at, _encode(changed)), *puts]

    async def _ending(self, key: int, call: _Call, status: CallStatus) -> list[Operation]:
        lease = await self._lease_of_ended()
        return [
            DoDelete(_path(CALLS, call.id, key)),
            DoDeletePrefix(f"{BODIES}{key:024x}/"),
            DoPut(_path(ENDED, call.id, key), _encode(status), lease),
        ]

    async def _stored(self, key: int, part: _Part, body: Body) -> tuple[_Pieces, list[DoPut]]:
        """
        Return how *body* is kept, and what of it is still to be written: a large one is written here, piece by piece,
        before the call that names it.
        """
        if isinstance(body, Path):
            self._files.setdefault(key, {})[part] = body
            total = await asyncio.to_thread(lambda: body.stat().st_size)
            if total > MAX_BODY:
                raise _too_large()
            number = 0
            with body.open("rb") as file:
                while piece := await asyncio.to_thread(file.read, PIECE):
                    await self._etcd.put(f"{_body(key, part)}{number:04}", piece)
                    number += 1
            return _Pieces(total, number), []
        if len(body) > MAX_BODY:
            raise _too_large()
        puts = [
            DoPut(f"{_body(key, part)}{number:04}", body[start : start + PIECE])
            for number, start in enumerate(range(0, len(body), PIECE))
        ]
        if len(puts) > 1:
            for put in puts:
                await self._etcd.put(put.key, put.value)
            return _Pieces(len(body), len(puts)), []
        return _Pieces(len(body), len(puts)), puts

    async def _commit(self, steps: Sequence[_Step]) -> None:
        """As many at once as etcd takes; if a condition of one does not hold, each for itself."""
        part: list[_Step] = []
        for step in [*steps, None]:
            if part and (step is None or not _fits([*part, step])):
                await self._commit_part(part)
                part = []
            if step is not None:
                part.append(step)

    async def _commit_part(self, steps: Sequence[_Step]) -> None:
        compares = list(dict.fromkeys(each for step in steps for each in step.compares))
        outcome = await self._etcd.txn(compares, [each for step in steps for each in step.operations])
        if outcome.succeeded:
            for step in steps:
                step.done(outcome.revision)
        elif len(steps) == 1:
            await steps[0].refused()
        else:
            for step in steps:
                await self._commit_part([step])

    async def _undo(self) -> None:
        """Delete what was refused to its callers and may be there all the same."""
        while self._unwanted:
            held = self._unwanted[-1]
            await self._etcd.txn(
                (), (DoDelete(_path(CALLS, held.call.id, held.key)), DoDeletePrefix(f"{BODIES}{held.key:024x}/"))
            )
            self._unwanted.pop()

    async def _lease_of_ended(self) -> int:
        lease, granted_at = self._ended_lease
        now = self._etcd.clock()
        if now - granted_at >= _BUCKET_S:
            lease = await self._etcd.grant_once(self._done_kept_s + round(_BUCKET_S))
            self._ended_lease = lease, now
        return lease

    async def _prune(self) -> None:
        """Forget dead letters that are too old, or too many; now and then, for all of them are read."""
        if self._dead_told < _DEAD_LOOKED_AT:
            return
        self._dead_told = 0
        kept_s, kept = self._dead_kept
        dead = sorted(_read((await self._etcd.range(DEAD)).items), key=lambda each: each.call.ended_at or 0.0)
        newest = dead[-1].call.ended_at or 0.0 if dead else 0.0
        for number, (_, key, call) in enumerate(dead):
            if number < len(dead) - kept or (call.ended_at or 0.0) < newest - kept_s:
                await self._bury(key, call)

    async def _bury(self, key: int, call: _Call) -> None:
        await self._etcd.txn((), (DoDelete(_path(DEAD, call.id, key)), DoDeletePrefix(f"{BODIES}{key:024x}/")))
        self._remove_files(key)

    # --- claiming ---

    async def _claim(
        self, phase: Phase, function: str, now: float, limit: int
    ) -> tuple[list[ClaimedCall], float | None]:
        async with self._lock:
            due = self._due.get((phase, function), [])
            if due and not self._may_claim():
                # Others may be about to take them over: until etcd has answered they are nobody's.
                return [], max(due[0][0], now + _AGAIN_S)
            chosen = [self._held[key] for at, key in due[:limit] if at <= now]
            found = await self._bodies(chosen)
            claimed: list[ClaimedCall] = []
            for held in chosen:
                bodies = found.get(held.key)
                if bodies is None:
                    # Its owner is somebody else by now, who has ended it.
                    self._lose(held)
                    continue
                self._due[held.lane].remove(held.place)
                held.is_claimed = True
                claimed.append(_claimed(held, *bodies))
            left = self._due.get((phase, function), [])
            return claimed, left[0][0] if left else None

    def _may_claim(self) -> bool:
        lease = self._registration.lease
        return lease is self._seen_lease and not lease.lost.is_set() and lease.confirmed(self._etcd.clock())

    async def _bodies(self, chosen: Sequence[_Held]) -> dict[int, tuple[Body, Body]]:
        """Read what is to be worked on: by key the bodies of request and answer; left out: they are gone."""
        wanted: list[tuple[int, _Part, _Pieces]] = []
        for held in chosen:
            wanted.append((held.key, "request", held.call.body))
            if held.call.phase == "callback" and held.call.answer is not None:
                wanted.append((held.key, "answer", held.call.answer.body))
        found: dict[tuple[int, _Part], Body] = {}
        small = [
            each
            for each in wanted
            if 0 < each[2].bytes <= INLINE_ANSWER and each[1] not in self._files.get(each[0], {})
        ]
        for start in range(0, len(small), 32):
            part = small[start : start + 32]
            read = await self._etcd.txn((), [DoRange(_body(key, name)) for key, name, _ in part])
            for (key, name, pieces), items in zip(part, read.found, strict=True):
                body = b"".join(item.value for item in items)
                if len(body) == pieces.bytes:
                    found[key, name] = body
        for key, name, pieces in wanted:
            if (key, name) in found:
                continue
            if not pieces.bytes:
                found[key, name] = b""
            elif (file := self._files.get(key, {}).get(name)) is not None:
                found[key, name] = file
            elif pieces.bytes > INLINE_ANSWER and (fetched := await self._fetched(key, name, pieces)) is not None:
                found[key, name] = fetched
        return {
            held.key: (found[held.key, "request"], found.get((held.key, "answer"), b""))
            for held in chosen
            if all((key, name) in found for key, name, _ in wanted if key == held.key)
        }

    async def _fetched(self, key: int, part: _Part, pieces: _Pieces) -> Path | None:
        file = self.new_file()
        try:
            for number in range(pieces.count):
                item = await self._etcd.get(f"{_body(key, part)}{number:04}")
                if item is None:
                    file.discard()
                    return None
                file.write(item.value)
            path = await asyncio.to_thread(file.keep)
        except BaseException:
            file.discard()
            raise
        self._files.setdefault(key, {})[part] = path
        return path

    # --- cancelling, dead letters, looking ---

    async def _cancel(self, calls: Sequence[str], now: float) -> list[list[CancelledCall]]:
        async with self._lock:
            await self._undo()
            return [await self._cancel_one(call, now) for call in calls]

    async def _cancel_one(self, name: str, now: float) -> list[CancelledCall]:
        cancelled: list[CancelledCall] = []
        prefix = f"{CALLS}{_quoted(name)}/"
        for _ in range(10):  # as often as somebody changed one meanwhile
            found = _read((await self._etcd.range(prefix)).items)
            if not found:
                break
            for item, key, call in found:
                status = replace(call.seen(), state="cancelled", due_at=None, ended_at=now, reason="it was cancelled")
                operations = await self._ending(key, call, status)
                is_ours = call.owner == self.owner
                if not is_ours:
                    told = await self._etcd.grant_once(_TOLD_S)
                    operations.append(DoPut(f"{CANCELLED}{call.owner}/{key:024x}", _encode({"id": call.id}), told))
                if not (await self._etcd.txn((unchanged(item.key, item.mod_revision),), operations)).succeeded:
                    continue
                held = self._held.get(key)
                is_claimed = held is not None and held.is_claimed
                if held is not None:
                    self._drop(held)
                if not is_claimed:
                    self._remove_files(key)
                cancelled.append(CancelledCall(key, call.function, is_claimed, is_ours))
        return cancelled

    async def _get(self, name: str) -> CallStatus | None:
        at = _quoted(name)
        found = (await self._etcd.txn((), [DoRange(f"{each}{at}/") for each in (CALLS, DEAD, ENDED)])).found
        seen: list[tuple[float, int, CallStatus]] = []
        for _, key, call in [*_read(found[0]), *_read(found[1])]:
            held = self._held.get(key)
            status = call.seen(is_running=held is not None and held.is_claimed)
            seen.append((status.accepted_at, key, status))
        for item in found[2]:
            status = msgspec.json.decode(item.value, type=CallStatus)
            seen.append((status.accepted_at, _key_of(item.key), status))
        return max(seen, key=lambda each: each[:2])[2] if seen else None

    async def _requeue(self, name: str, now: float) -> Waiting | None:
        async with self._lock:
            while found := _read((await self._etcd.range(f"{DEAD}{_quoted(name)}/")).items):
                item, key, call = found[-1]
                phase: Phase = "queued" if call.answer is None else "callback"
                changed = replace(
                    call, phase=phase, due_at=now, ended_at=None, deliveries=0, exhausted=None, reason=None,
                    attempts=call.attempts if call.answer else 0, owner=self.owner,
                )  # fmt: skip
                at = _path(CALLS, call.id, key)
                try:
                    done = await self._etcd.txn(
                        (unchanged(item.key, item.mod_revision), present(self._alive)),
                        (DoDelete(item.key), DoPut(at, _encode(changed))),
                    )
                except StorageAway:
                    self._look.set()  # it may have been done
                    raise
                if done.succeeded:
                    self._hold(_Held(key, changed, done.revision))
                    return Waiting(phase, call.function, 1, now)
                if await self._etcd.get(self._alive) is None:
                    raise self._lease_ended()
            return None

    async def _discard(self, name: str) -> bool:
        async with self._lock:
            dead = _read((await self._etcd.range(f"{DEAD}{_quoted(name)}/")).items)
            for _, key, call in dead:
                await self._bury(key, call)
            return bool(dead)

    # --- what is ours ---

    def _hold(self, held: _Held) -> None:
        self._held[held.key] = held
        insort(self._due.setdefault(held.lane, []), held.place)

    def _drop(self, held: _Held) -> None:
        if self._held.get(held.key) is not held:
            return
        del self._held[held.key]
        due = self._due.get(held.lane, [])
        at = bisect_left(due, held.place)
        if at < len(due) and due[at] == held.place:
            del due[at]
        if not due:
            self._due.pop(held.lane, None)

    def _lose(self, held: _Held) -> None:
        self._drop(held)
        if not held.is_claimed:
            self._remove_files(held.key)
        self._on_lost(held.key, held.call.function, held.is_claimed)

    def _lease_ended(self) -> StorageAway:
        return StorageAway(
            f"this gateway's lease in etcd at {self._etcd.endpoint} has ended, and is being renewed: ask again"
        )

    def _remove_files(self, key: int, *more: Path) -> None:
        remove_files([*self._files.pop(key, {}).values(), *more])

    # --- other gateways ---

    async def _learn_base(self, gateway: str) -> None:
        """Keys of calls begin with the revision at which we came: no other life of a gateway has it."""
        item = await self._etcd.get(self._alive)
        if item is None:
            raise self._lease_ended()
        self._base = item.create_revision
        await self._registration.put(self._alive, _encode(_Gateway(gateway, self._base)))

    async def _follow_gateways(self, on_trouble: Callable[[StorageFailed], None] | None) -> None:
        async with aclosing(self._etcd.watch(GATEWAYS, on_trouble=on_trouble)) as changes:
            async for change in changes:
                match change:
                    case Put(item) if item.key == self._alive and self._registration.lease is not self._seen_lease:
                        await self._until_answered(self._reconcile, on_trouble)
                    case Deleted(key) if key == self._alive:
                        pass  # until it is there again, nothing of ours can be claimed
                    case Deleted() | Listed():
                        await self._until_answered(self._adopt, on_trouble)
                    case Put():
                        pass

    async def _follow_doubts(self, on_trouble: Callable[[StorageFailed], None] | None) -> None:
        while True:
            await self._look.wait()
            self._look.clear()
            await self._until_answered(self._adopt, on_trouble)

    async def _follow_cancelled(self, on_trouble: Callable[[StorageFailed], None] | None) -> None:
        async with aclosing(self._etcd.watch(f"{CANCELLED}{self.owner}/", on_trouble=on_trouble)) as changes:
            async for change in changes:
                if isinstance(change, Put):
                    async with self._lock:
                        if (held := self._held.get(_key_of(change.item.key))) is not None:
                            self._lose(held)

    async def _until_answered(
        self, work: Callable[[], Awaitable[None]], on_trouble: Callable[[StorageFailed], None] | None
    ) -> None:
        while True:
            try:
                await work()
                return
            except StorageAway as exc:
                if on_trouble is not None:
                    on_trouble(exc)
                await asyncio.sleep(_AGAIN_S)

    async def _adopt(self) -> None:
        mine: list[_Held] = []
        try:
            await self._take_over(mine)
        finally:
            if mine:
                log.info("async.taken_over calls=%d", len(mine))
                self._on_found(_counted(mine))

    async def _take_over(self, mine: list[_Held]) -> None:
        """
        Make ours what belongs to gateways that are not there. Several do this at once: each call has one winner.

        :param mine: gets what was won
        """
        async with self._lock:
            await self._undo()
            alive = {key.removeprefix(GATEWAYS) for key in await self._etcd.keys(GATEWAYS)}
            steps: list[_Step] = []
            for item, key, call in _read((await self._etcd.range(CALLS)).items):
                if call.owner == self.owner and key not in self._held:
                    # Won, or taken from the dead letters, by a request whose answer did not reach us.
                    held = _Held(key, call, item.mod_revision)
                    self._hold(held)
                    mine.append(held)
                elif call.owner != self.owner and call.owner not in alive:
                    steps.append(self._taken(item, key, replace(call, owner=self.owner), call.owner, mine))
            secrets.SystemRandom().shuffle(steps)  # so that two survivors seldom want the same ones
            await self._commit(steps)

    def _taken(self, item: Item, key: int, call: _Call, earlier: str, mine: list[_Held]) -> _Step:
        held = _Held(key, call, 0)

        def done(revision: int) -> None:
            held.revision = revision
            self._hold(held)
            mine.append(held)

        compares = [unchanged(item.key, item.mod_revision), absent(f"{GATEWAYS}{earlier}"), present(self._alive)]

        async def not_won() -> None:
            pass

        return _Step(compares, [DoPut(item.key, _encode(call))], done, not_won)

    async def _reconcile(self) -> None:
        """We could not be seen for a while: learn what is still ours."""
        async with self._lock:
            lease = self._registration.lease
            there = {found.key: found for found in _read((await self._etcd.range(CALLS)).items)}
            for held in list(self._held.values()):
                found = there.get(held.key)
                if found is None or found.call.owner != self.owner or found.item.mod_revision != held.revision:
                    self._lose(held)
            self._seen_lease = lease
        await self._adopt()

    async def _remove_orphans(self) -> None:
        """Pieces of bodies whose gateway died before it could write the call."""
        pieces = await self._etcd.keys(BODIES)
        bases: set[int] = set()
        for item in (await self._etcd.range(GATEWAYS)).items:
            bases.add(msgspec.json.decode(item.value, type=_Gateway).base or item.create_revision)
        named: set[int] = set()
        for prefix in (CALLS, DEAD, CALLS):  # a call that moves between the two is seen in one of them
            named |= {_key_of(key) for key in await self._etcd.keys(prefix)}
        for key in {int(each.removeprefix(BODIES).partition("/")[0], 16) for each in pieces} - named:
            if key >> 32 not in bases:
                await self._etcd.delete_prefix(f"{BODIES}{key:024x}/")


def _fits(steps: Sequence[_Step]) -> bool:
    return (
        sum(len(each.operations) for each in steps) <= _MAX_OPERATIONS
        and sum(len(each.compares) for each in steps) <= _MAX_OPERATIONS
        and sum(each.size for each in steps) <= _MAX_BYTES
    )


def _claimed(held: _Held, body: Body, answered: Body) -> ClaimedCall:
    kept = held.call
    call = AcceptedCall(
        kept.id, kept.function, kept.name, kept.path.encode("latin-1"), kept.query.encode("latin-1"),
        _raw(kept.headers), kept.callback_url, kept.start_ns, body,
    )  # fmt: skip
    answer = None
    if (given := kept.answer) is not None:
        answer = KeptAnswer(given.status, _raw(given.headers), answered, given.duration_s, given.attempts_allowed)
    return ClaimedCall(held.key, call, kept.attempts, kept.deliveries, answer, kept.exhausted)


def _counted(held: Iterable[_Held]) -> list[Waiting]:
    counts: Counter[tuple[Phase, str]] = Counter()
    first: dict[tuple[Phase, str], float] = {}
    for each in held:
        counts[each.lane] += 1
        first[each.lane] = min(first.get(each.lane, each.place[0]), each.place[0])
    return [Waiting(phase, function, count, first[phase, function]) for (phase, function), count in counts.items()]


def _read(items: Iterable[Item]) -> list[_Found]:
    """One that is unreadable (changed by hand) holds up no other."""
    found: list[_Found] = []
    for item in items:
        try:
            found.append(_Found(item, _key_of(item.key), msgspec.json.decode(item.value, type=_Call)))
        except ValueError as exc:  # msgspec's are
            log.error("store.unreadable key=%s reason=%s", item.key, exc)
    return found


def _text(headers: Iterable[tuple[bytes, bytes]]) -> tuple[tuple[str, str], ...]:
    return tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers)


def _raw(headers: Iterable[tuple[str, str]]) -> tuple[tuple[bytes, bytes], ...]:
    return tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in headers)


def _quoted(name: str) -> str:
    """Callers choose ids: no slash of theirs separates ours."""
    return quote(name, safe="")


def _path(prefix: str, name: str, key: int) -> str:
    return f"{prefix}{_quoted(name)}/{key:024x}"


def _body(key: int, part: _Part) -> str:
    return f"{BODIES}{key:024x}/{part}/"


def _key_of(path: str) -> int:
    return int(path.rpartition("/")[2], 16)


def _too_large() -> BodyTooLargeForEtcd:
    return BodyTooLargeForEtcd(
        f"the body of an asynchronous call may have {format_bytes(MAX_BODY)} in a cluster, and its answer too: send "
        "less, or send where it can be fetched from"
    )
