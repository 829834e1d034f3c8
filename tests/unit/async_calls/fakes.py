"""Fakes of the ports of asynchronous calls, in memory; the queue passes the contract suite of its port."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from gpufaas_async_calls.call import (
    AcceptedCall,
    Body,
    CallStatus,
    CancelledCall,
    ClaimedCall,
    Dead,
    Deliver,
    Done,
    Header,
    Outcome,
    Phase,
    Redeliver,
    Retry,
    State,
    Waiting,
)
from gpufaas_async_calls.spool_file import SpoolFile, remove_files
from gpufaas_core.errors import GpufaasError, StorageFailed


@dataclass
class _Kept:
    claimed: ClaimedCall
    state: State
    due_at: float | None
    status: int | None = None
    reason: str | None = None
    ended_at: float | None = None
    is_claimed: bool = False

    def seen(self) -> CallStatus:
        call = self.claimed.call
        state: State = "running" if self.is_claimed and self.state == "queued" else self.state
        return CallStatus(
            call.id, call.function, state, self.claimed.attempts, self.claimed.deliveries, self.status,
            self.reason, call.accepted_at, self.ended_at, self.due_at,
        )  # fmt: skip


class MemoryAsyncQueue:
    """`AsyncQueue`. With `failure` set, every write raises it as `StorageFailed` and changes nothing."""

    def __init__(self, folder: Path) -> None:
        """:param folder: of large bodies"""
        self._folder = folder
        self._kept: dict[int, _Kept] = {}
        self._serial = 0
        self.failure: str | None = None
        self.writes: list[int] = []
        """How many calls each write kept."""

    def write(self, accepted: Sequence[AcceptedCall], outcomes: Sequence[Outcome]) -> None:
        self._may_write()
        for outcome in outcomes:
            self._settle(outcome)
        for call in accepted:
            self._serial += 1
            self._kept[self._serial] = _Kept(ClaimedCall(self._serial, call), "queued", call.accepted_at)
        self.writes.append(len(accepted))

    def claim(self, phase: Phase, function: str, now: float, limit: int) -> tuple[list[ClaimedCall], float | None]:
        free = sorted(
            (kept.due_at, key)
            for key, kept in self._kept.items()
            if kept.due_at is not None
            and not kept.is_claimed
            and (kept.state, kept.claimed.call.function) == (phase, function)
        )
        due = [key for at, key in free[:limit] if at <= now]
        for key in due:
            self._kept[key].is_claimed = True
        return [self._kept[key].claimed for key in due], free[len(due)][0] if len(free) > len(due) else None

    def cancel(self, calls: Sequence[str], now: float) -> list[list[CancelledCall]]:
        self._may_write()
        cancelled: list[list[CancelledCall]] = []
        for call in calls:
            cancelled.append([])
            for key, kept in self._kept.items():
                if kept.claimed.call.id == call and kept.due_at is not None:
                    kept.state, kept.due_at, kept.ended_at, kept.reason = "cancelled", None, now, "it was cancelled"
                    cancelled[-1].append(CancelledCall(key, kept.claimed.call.function, kept.is_claimed))
                    if not kept.is_claimed:
                        _remove_bodies(kept.claimed)
        return cancelled

    def get(self, call: str) -> CallStatus | None:
        found = [kept for kept in self._kept.values() if kept.claimed.call.id == call]
        return found[-1].seen() if found else None

    def list_dead(self, function: str | None = None, limit: int = 1000) -> list[CallStatus]:
        dead = [kept.seen() for kept in self._kept.values() if kept.state == "dead"]
        chosen = [each for each in dead if function in (None, each.function)]
        return sorted(chosen, key=lambda each: each.ended_at or 0.0)[:limit]

    def requeue(self, call: str, now: float) -> Waiting | None:
        self._may_write()
        dead = [kept for kept in self._kept.values() if kept.state == "dead" and kept.claimed.call.id == call]
        if not dead:
            return None
        kept = dead[-1]
        phase: Phase = "queued" if kept.claimed.answer is None else "callback"
        attempts = 0 if phase == "queued" else kept.claimed.attempts
        kept.state, kept.due_at, kept.ended_at, kept.reason = phase, now, None, None
        kept.claimed = replace(kept.claimed, attempts=attempts, deliveries=0, exhausted=None)
        return Waiting(phase, kept.claimed.call.function, 1, now)

    def discard(self, call: str) -> bool:
        self._may_write()
        dead = [key for key, kept in self._kept.items() if kept.state == "dead" and kept.claimed.call.id == call]
        for key in dead:
            _remove_bodies(self._kept.pop(key).claimed)
        return bool(dead)

    def waiting(self) -> list[Waiting]:
        groups: dict[tuple[Phase, str], list[float]] = {}
        for kept in self._kept.values():
            if kept.due_at is not None and (kept.state == "queued" or kept.state == "callback"):
                groups.setdefault((kept.state, kept.claimed.call.function), []).append(kept.due_at)
        return [Waiting(phase, function, len(due), min(due)) for (phase, function), due in sorted(groups.items())]

    def new_file(self) -> SpoolFile:
        return SpoolFile(self._folder / secrets.token_hex(16))

    def _settle(self, outcome: Outcome) -> None:
        kept = self._kept[outcome.key]
        kept.is_claimed = False
        if kept.due_at is None:
            _remove_bodies(kept.claimed)
            if isinstance(outcome, Deliver):
                _remove_bodies(replace(kept.claimed, answer=outcome.answer))
            return
        match outcome:
            case Done(_, at, status, attempts):
                _remove_bodies(kept.claimed)
                kept.state, kept.due_at, kept.ended_at, kept.status, kept.reason = "done", None, at, status, None
                kept.claimed = replace(kept.claimed, attempts=attempts, answer=None)
            case Retry(_, at, attempts, status, reason):
                kept.due_at, kept.status, kept.reason = at, status, reason
                kept.claimed = replace(kept.claimed, attempts=attempts)
            case Deliver(_, at, attempts, answer, exhausted):
                kept.state, kept.due_at, kept.status, kept.reason = "callback", at, answer.status, exhausted
                kept.claimed = replace(kept.claimed, attempts=attempts, answer=answer, exhausted=exhausted)
            case Redeliver(_, at, deliveries, reason):
                kept.due_at, kept.reason = at, reason
                kept.claimed = replace(kept.claimed, deliveries=deliveries)
            case Dead(_, at, attempts, status_or_none, reason, undelivered):
                kept.state, kept.due_at, kept.ended_at, kept.reason = "dead", None, at, reason
                kept.status = status_or_none
                if not undelivered:
                    kept.claimed = replace(kept.claimed, answer=None)
                kept.claimed = replace(kept.claimed, attempts=attempts)

    def _may_write(self) -> None:
        if self.failure is not None:
            raise StorageFailed(self.failure)


def _remove_bodies(claimed: ClaimedCall) -> None:
    bodies = [claimed.call.body, claimed.answer.body if claimed.answer else b""]
    remove_files([body for body in bodies if isinstance(body, Path)])


class FakeCallbacks:
    """As `HttpCallbacks`: remembers what was delivered; `failures` are raised first, one for each delivery."""

    def __init__(self) -> None:
        self.delivered: list[tuple[str, dict[str, str], bytes]] = []
        self.failures: list[GpufaasError] = []
        self.on_delivery: Callable[[], None] = lambda: None
        self.held: asyncio.Event | None = None
        """With it, a delivery that does not fail waits for it."""

    async def deliver(self, url: str, headers: Sequence[Header], body: Body) -> None:
        if self.failures:
            raise self.failures.pop(0)
        if self.held is not None:
            await self.held.wait()
        content = await asyncio.to_thread(body.read_bytes) if isinstance(body, Path) else body
        named = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}
        self.delivered.append((url, named, content))
        self.on_delivery()
