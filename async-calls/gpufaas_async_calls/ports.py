"""What asynchronous calls need from outside. Adapters are in `gpufaas_adapters`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from gpufaas_async_calls.call import AcceptedCall, CallStatus, CancelledCall, ClaimedCall, Outcome, Phase, Waiting


class SpooledBody(Protocol):
    """A body on its way to the disk. Until `keep`, and after `discard`, it is nobody's. Raises `StorageFailed`."""

    def write(self, piece: bytes, /) -> None: ...

    def keep(self) -> Path: ...

    def discard(self) -> None: ...


class AsyncQueue(Protocol):
    """
    Keeps asynchronous calls until they have ended, and for a while after. Calls block, and may come from several
    threads.

    Every method raises `StorageFailed` when the data cannot be written or read; then nothing has changed.
    """

    def write(self, accepted: Sequence[AcceptedCall], outcomes: Sequence[Outcome]) -> None:
        """
        Keep the calls, which are due at once, and what became of claimed ones, which are claimed no longer. All or
        nothing; durable when it returns. The files of calls that are done are removed. Of a call that was cancelled
        meanwhile, the outcome is dropped, with its files.
        """
        ...

    def claim(self, phase: Phase, function: str, now: float, limit: int) -> tuple[list[ClaimedCall], float | None]:
        """
        Return calls of *function* (``NAME.NAMESPACE``) that wait in *phase* and are due, the longest due first, at most
        *limit*; and when the next one is due that is not claimed. A claim ends with `write`, or with its claimer.
        """
        ...

    def cancel(self, calls: Sequence[str], now: float) -> list[list[CancelledCall]]:
        """
        Take back, for each of these ids, every call of it that has not ended; durable when it returns. Its status is
        kept, its request and answer are not; those of a claimed one only until its claim ends.
        """
        ...

    def get(self, call: str) -> CallStatus | None:
        """Return what is known of a call by its id; of the latest, if callers used an id twice."""
        ...

    def list_dead(self, function: str | None = None, limit: int = 1000) -> list[CallStatus]:
        """Return dead letters, the oldest first."""
        ...

    def requeue(self, call: str, now: float) -> Waiting | None:
        """Let a dead letter wait again, for its callback if only that is missing; None: there is none of that id."""
        ...

    def discard(self, call: str) -> bool:
        """Forget the dead letters of that id; whether there were any."""
        ...

    def waiting(self) -> list[Waiting]:
        """Return how many calls have not ended, by phase and function; claimed ones count."""
        ...

    def new_file(self) -> SpooledBody:
        """Return where to write a body that is too large for a row; the call that is kept with it owns it then."""
        ...

    def close(self) -> None: ...
