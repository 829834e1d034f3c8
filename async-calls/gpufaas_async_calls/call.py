"""
The states of an asynchronous call, as values: accepted, claimed, and the outcomes of attempts.

::

    accepted ──► queued ──► (running) ──► done                      no callback was asked for
                   ▲            ├───────► callback ──► done | dead  its answer is kept until it is delivered
                   └── retry ───┴───────► dead                      no attempt is left, or none would help
    any of these but done and dead ─────► cancelled                 it was taken back

Running is not written down: a call that was claimed and has no outcome is queued again when the platform starts. So
each call is executed at least once. What ends is kept for a while, a dead call with what is needed to try it again.
"""

from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from msgspec import Struct

from gpufaas_core.units import Seconds

Header: TypeAlias = tuple[bytes, bytes]
Body: TypeAlias = bytes | Path
"""Bytes, or the file that holds them, which belongs to the queue."""

Phase = Literal["queued", "callback"]
"""What a call that has not ended waits for: to be executed, or for its callback to be delivered."""
State = Literal["queued", "running", "callback", "done", "dead", "cancelled"]

INLINE_BODY: Final = 256 * 1024
"""A request's body beyond this is a file beside the queue."""
INLINE_ANSWER: Final = 1024 * 1024
"""An answer beyond this is a file, too."""
MAX_ANSWER: Final = 256 * 1024 * 1024
"""The largest answer that is kept for a callback: one without end must not fill the disk."""


class AcceptedCall(Struct, frozen=True):
    """A request to be executed later: everything that a worker and a callback need."""

    id: str
    """X-Call-Id. Not unique: callers may send one, and functions pass theirs on."""
    function: str
    """``NAME.NAMESPACE``."""
    name: str
    """The name that the URL had."""
    path: bytes
    """Raw, what follows the name: empty, or beginning with ``/``."""
    query: bytes
    headers: tuple[Header, ...]
    callback_url: str | None
    start_ns: int
    """X-Start-Time: when it was accepted, Unix nanoseconds."""
    body: Body = b""

    @property
    def accepted_at(self) -> float:
        return self.start_ns / 1e9


class KeptAnswer(Struct, frozen=True):
    """What became of an execution, kept until the callback has it."""

    status: int
    headers: tuple[Header, ...]
    body: Body
    duration_s: Seconds
    attempts_allowed: int
    """X-Retry-Max, by the policy that held when it was executed."""


class ClaimedCall(Struct, frozen=True):
    """A call that is worked on. It is not claimed again until its outcome is written, or the platform starts again."""

    key: int
    """The queue's own name for it."""
    call: AcceptedCall
    attempts: int = 0
    """Executions that count, so far."""
    deliveries: int = 0
    """Attempts to deliver its callback, so far."""
    answer: KeptAnswer | None = None
    exhausted: str | None = None
    """Why it is a dead letter once its callback is delivered; None: it is done then."""


class _Outcome(Struct, frozen=True):
    key: int
    """The key of its `ClaimedCall`."""
    at: float
    """When it came, in Unix seconds, or when it is tried again."""


class Done(_Outcome, frozen=True):
    """The call was executed, and its callback, if there is one, was delivered."""

    status: int
    attempts: int


class Retry(_Outcome, frozen=True):
    """Execute it again, not before `at`."""

    attempts: int
    status: int
    reason: str


class Deliver(_Outcome, frozen=True):
    """The call was executed: deliver `answer` to its callback. With `exhausted`, it is a dead letter then."""

    attempts: int
    answer: KeptAnswer
    exhausted: str | None = None


class Redeliver(_Outcome, frozen=True):
    """Deliver its callback again, not before `at`."""

    deliveries: int
    reason: str


class Dead(_Outcome, frozen=True):
    """No more of it without an operator. Its request is kept, and its answer if only the callback is missing."""

    attempts: int
    status: int | None
    reason: str
    undelivered: bool = False


Outcome: TypeAlias = Done | Retry | Deliver | Redeliver | Dead


# --- how a call changes, by the names of its fields in a queue ---


def settled(outcome: Outcome) -> dict[str, Any]:
    """Return what *outcome* changes, but for requests and answers."""
    match outcome:
        case Done() | Dead():
            phase, reason = ("dead", outcome.reason) if isinstance(outcome, Dead) else ("done", None)
            ended = {"phase": phase, "due_at": None, "ended_at": outcome.at, "reason": reason}
            return {**ended, "attempts": outcome.attempts, "status": outcome.status}
        case Retry():
            waits = {"due_at": outcome.at, "reason": outcome.reason}
            return {**waits, "attempts": outcome.attempts, "status": outcome.status}
        case Deliver():
            waits = {"phase": "callback", "due_at": outcome.at, "reason": outcome.exhausted}
            done = {"attempts": outcome.attempts, "status": outcome.answer.status, "exhausted": outcome.exhausted}
            return {**waits, **done}
        case Redeliver():
            return {"due_at": outcome.at, "reason": outcome.reason, "deliveries": outcome.deliveries}


def cancelled(now: float) -> dict[str, Any]:
    return {"phase": "cancelled", "due_at": None, "ended_at": now, "reason": "it was cancelled"}


def requeued(phase: Phase, now: float) -> dict[str, Any]:
    """A dead letter waits again in *phase*."""
    waits = {"phase": phase, "due_at": now, "ended_at": None, "reason": None, "exhausted": None, "deliveries": 0}
    return waits if phase == "callback" else {**waits, "attempts": 0}


class CancelledCall(Struct, frozen=True):
    """A call that was taken back. A later outcome of it only ends its claim."""

    key: int
    function: str
    is_claimed: bool
    is_ours: bool = True
    """False: another gateway had accepted it, and counts it."""


class CallStatus(Struct, frozen=True):
    """What may be told of a call: never its body, headers or answer."""

    id: str
    function: str
    state: State
    attempts: int
    deliveries: int
    status: int | None
    """The status of the last execution."""
    reason: str | None
    accepted_at: float
    ended_at: float | None
    due_at: float | None
    """When it is tried next, at the earliest."""


class Waiting(Struct, frozen=True):
    """Calls of one function in one phase."""

    phase: Phase
    function: str
    count: int
    due_at: float
    """When the earliest of them is due."""
