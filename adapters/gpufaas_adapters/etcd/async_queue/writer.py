"""`Writer`: writes calls that were accepted, and what became of those that were claimed."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from msgspec.structs import replace

import gpufaas_adapters.etcd.async_queue.records as records
from gpufaas_adapters.etcd.async_queue.bodies import Bodies
from gpufaas_adapters.etcd.async_queue.dead_letters import DeadLetters
from gpufaas_adapters.etcd.async_queue.owned import OwnedCalls
from gpufaas_adapters.etcd.async_queue.owner import QueueOwner
from gpufaas_adapters.etcd.async_queue.records import AnswerRecord, CallRecord, StoredCall, bodies_of, encode, path_of
from gpufaas_adapters.etcd.async_queue.steps import WriteStep, commit
from gpufaas_adapters.etcd.client import DoDelete, DoPut, Etcd, Operation, present, unchanged
from gpufaas_async_calls.call import AcceptedCall, CallStatus, Dead, Deliver, Done, Outcome, Redeliver, Retry, settled
from gpufaas_core.units import Seconds

log = logging.getLogger(__name__)

_BUCKET_S: Final[Seconds] = 60.0
"""Calls that end within so long share a lease: etcd keeps leases in memory, and forgets them one by one."""


@dataclass(eq=False)
class Writer:
    """See module."""

    etcd: Etcd
    owner: QueueOwner
    owned: OwnedCalls
    bodies: Bodies
    dead_letters: DeadLetters
    done_kept_s: int
    """How long the status of a done or cancelled call is kept."""
    _unanswered: list[StoredCall] = field(default_factory=list)
    """Calls that were refused because etcd did not answer; they may have been written."""
    _ended_lease: tuple[int, Seconds] = 0, -2 * _BUCKET_S
    """The lease of calls that have ended lately, and when it was granted."""

    async def write(self, accepted: Sequence[AcceptedCall], outcomes: Sequence[Outcome]) -> None:
        taken: list[StoredCall] = []
        refused: list[AcceptedCall] = []
        try:
            settled = [await self._settled(outcome) for outcome in outcomes]
            steps = [step for step in settled if step is not None]
            steps += [await self._accepted(call, taken, refused) for call in accepted]
            await commit(self.etcd, steps)
            if refused:
                raise self.owner.lease_ended()
        except BaseException:
            for call in taken:
                self.owned.drop(call)
                self.bodies.release(call.key)  # the sender removes its files
            self._unanswered += taken
            raise

    async def delete_refused(self) -> None:
        """Delete from etcd what was refused, and may be there. Done before any other write."""
        while self._unanswered:
            call = self._unanswered[-1]
            await self.etcd.txn((), (DoDelete(call.path()), DoDelete(bodies_of(call.key), below=True)))
            self._unanswered.pop()

    async def _accepted(self, call: AcceptedCall, taken: list[StoredCall], refused: list[AcceptedCall]) -> WriteStep:
        key = self.owner.new_key()
        body, puts = await self.bodies.store(key, "request", call.body)
        owned = StoredCall(key, CallRecord.of(call, self.owner.name, body), 0)
        taken.append(owned)

        def done(revision: int) -> None:
            owned.revision = revision
            self.owned.add(owned)

        async def not_done() -> None:
            refused.append(call)

        put = DoPut(owned.path(), encode(owned.record))
        return WriteStep([present(self.owner.path)], [put, *puts], done, not_done)

    async def _settled(self, outcome: Outcome) -> WriteStep | None:
        """Return how *outcome* is written; None: there is nothing to write, the call is not ours any more."""
        call = self.owned.get(outcome.key)
        if call is None:
            left = outcome.answer.body if isinstance(outcome, Deliver) else b""
            self.bodies.remove_files(outcome.key, *([left] if isinstance(left, Path) else []))
            return None
        if not call.is_claimed:
            return None  # an earlier write, which failed later, has written it
        changed, operations = await self._rewritten(call, outcome)

        def done(revision: int) -> None:
            self.owned.drop(call)
            if changed is not None:
                self.owned.add(StoredCall(call.key, changed, revision))
            elif isinstance(outcome, Done):
                self.bodies.remove_files(call.key)

        compares = [unchanged(call.path(), call.revision)]
        return WriteStep(compares, operations, done, lambda: self._refused(call, outcome))

    async def _refused(self, call: StoredCall, outcome: Outcome) -> None:
        """The call was changed since we read it: find out whether it is still ours."""
        record, key = call.record, call.key
        item = await self.etcd.get(call.path())
        found = records.read_calls(() if item is None else (item,))
        self.owned.drop(call)
        ends = isinstance(outcome, Done | Dead)  # then the caller of `write` stops counting it
        if found and found[0].record.owner == self.owner.name:
            # A request wrote it whose answer did not reach us; or another gateway had it for a while.
            self.owned.add(found[0])
            if ends:
                self.owned.found(found)
            return
        self.bodies.remove_files(key)
        log.warning("async.outcome_dropped call=%s function=%s", record.id, record.function)
        if not ends:
            self.owned.on_lost(key, record.function, False)

    async def _rewritten(self, call: StoredCall, outcome: Outcome) -> tuple[CallRecord | None, list[Operation]]:
        """Return the call as it goes on waiting (None: it has ended), and the operations that write the outcome."""
        record, key = call.record, call.key
        changed = replace(record, **settled(outcome))
        puts: list[DoPut] = []
        match outcome:
            case Done():
                return None, await self.ending(key, changed.seen())
            case Dead():
                self.dead_letters.added()
                dead = changed if outcome.undelivered else replace(changed, answer=None)
                of_answer = [] if outcome.undelivered else [DoDelete(records.body_of(key, "answer"), below=True)]
                return None, [DoDelete(call.path()), DoPut(call.path(records.DEAD), encode(dead)), *of_answer]
            case Deliver():
                body, puts = await self.bodies.store(key, "answer", outcome.answer.body)
                changed = replace(changed, answer=AnswerRecord.of(outcome.answer, body))
            case Retry() | Redeliver():
                pass
        return changed, [DoPut(call.path(), encode(changed)), *puts]

    async def ending(self, key: int, status: CallStatus) -> list[Operation]:
        """Return the operations that delete a call and keep its *status* for a while."""
        lease, granted_at = self._ended_lease
        now = self.etcd.clock()
        if now - granted_at >= _BUCKET_S:
            lease = await self.etcd.grant_once(self.done_kept_s + round(_BUCKET_S))
            self._ended_lease = lease, now
        return [
            DoDelete(path_of(records.CALLS, status.id, key)),
            DoDelete(bodies_of(key), below=True),
            DoPut(path_of(records.ENDED, status.id, key), encode(status), lease),
        ]
