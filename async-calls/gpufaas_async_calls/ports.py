"""What asynchronous calls need from outside. Adapters are in `gpufaas_adapters`."""

from collections.abc import Sequence
from typing import Protocol

from gpufaas_async_calls.call import AcceptedCall, CallStatus, CancelledCall, ClaimedCall, Outcome, Phase, Waiting
from gpufaas_async_calls.spool_file import SpoolFile


class AsyncQueue(Protocol):
    """
    Keeps asynchronous calls until they have ended, and for a while after. Calls block, and may come from several
    threads.

    Every method raises `StorageFailed` when the data cannot be written or read; then nothing has changed.
    """

    def write(self, accepted: Sequence[AcceptedCall], outcomes: Sequence[Outcome]) -> None:
        """
        Keep *accepted*, which are due at once, and the outcomes of claimed calls, which ends their claims. All or
        nothing; durable when it returns. The files of calls that are done are removed. The outcome of a call that was
        cancelled meanwhile is dropped, with its files.
        """

    def claim(self, phase: Phase, function: str, now: float, limit: int) -> tuple[list[ClaimedCall], float | None]:
        """
        Return at most *limit* calls of *function* (``NAME.NAMESPACE``) that wait in *phase* and are due, the longest
        due first; and when the next unclaimed one is due. A claim ends with `write`, or with this process.
        """

    def cancel(self, calls: Sequence[str], now: float) -> list[list[CancelledCall]]:
        """
        Cancel, for each of these ids, every call that has not ended; durable when it returns. The status of a call is
        kept; its request and answer are removed, those of a claimed one when its claim ends.
        """

    def get(self, call: str) -> CallStatus | None:
        """Return the status of the latest call of this id: callers may use one twice."""

    def list_dead(self, function: str | None = None, limit: int = 1000) -> list[CallStatus]:
        """Return dead letters, the oldest first."""

    def requeue(self, call: str, now: float) -> Waiting | None:
        """Let a dead letter wait again, for its callback if only that is missing; None: there is none of that id."""

    def discard(self, call: str) -> bool:
        """Forget the dead letters of that id; return whether there were any."""

    def waiting(self) -> list[Waiting]:
        """Return how many calls have not ended, by phase and function; claimed ones count."""

    def new_file(self) -> SpoolFile:
        """Return a file for a body of more than `INLINE_BODY`; it belongs to the call that is written with it."""
