"""One attempt at an asynchronous call: its execution, or the delivery of its callback. Its result is an `Outcome`."""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpufaas_async_calls.call import (
    INLINE_ANSWER,
    MAX_ANSWER,
    AcceptedCall,
    ClaimedCall,
    Dead,
    Deliver,
    Done,
    Header,
    KeptAnswer,
    Outcome,
    Redeliver,
    Retry,
)
from gpufaas_async_calls.callbacks import CallbackFailed, CallbackRefused, HttpCallbacks
from gpufaas_async_calls.retry import GiveUp, RetryPolicy, TryAgain, backoff_s, decide, parse_retry_after
from gpufaas_async_calls.spool_file import KeptBody, SpoolFile
from gpufaas_core.errors import BadAnswer, StorageFailed
from gpufaas_core.hop_by_hop import HOP_BY_HOP
from gpufaas_core.units import Bytes, format_bytes
from gpufaas_gateway.answering import Answer, Run
from gpufaas_gateway.request import Request

log = logging.getLogger(__name__)

_NEVER_TO_CALLBACK: Final = HOP_BY_HOP | {
    b"content-length", b"x-call-id", b"x-start-time", b"x-duration-seconds", b"x-function-name", b"x-function-status",
    b"x-retry", b"x-retry-max", b"user-agent", b"host", b"x-callback-url",
}  # fmt: skip
_PIECE: Final[Bytes] = 256 * 1024


@dataclass(frozen=True, eq=False)
class Attempts:
    run: Run
    callbacks: HttpCallbacks
    policy_of: Callable[[str], RetryPolicy]
    callback_retry: RetryPolicy
    new_file: Callable[[], SpoolFile]
    rng: random.Random
    clock: Callable[[], float]

    async def execute(self, claimed: ClaimedCall) -> Outcome:
        call = claimed.call
        policy = self.policy_of(call.function)
        answer = AnswerKeeper(None if call.callback_url is None else self.new_file)
        began = time.perf_counter()
        kept = False
        try:
            try:
                await answer.take(await execute(self.run, call))
            except Exception as exc:  # whatever it is, it is an answer that may be tried again
                if not answer.begun:
                    log.exception("async.execution_failed call=%s function=%s", call.id, call.function)
                answer.failed(f"the answer broke off: {exc}", 502 if answer.begun else 500)
            duration_s = time.perf_counter() - began
            now = self.clock()
            retry_after_s = parse_retry_after(found, now) if (found := answer.header(b"retry-after")) else None
            decision = decide(policy, answer.status, answer.internal, retry_after_s, claimed.attempts, self.rng)
            attempts = claimed.attempts + 1
            exhausted: str | None = None
            match decision:
                case TryAgain(wait_s, attempts):
                    return Retry(claimed.key, now + wait_s, attempts, answer.status, answer.reason)
                case GiveUp(reason):
                    exhausted = f"{answer.reason}; {reason}"
            if call.callback_url is None:
                if exhausted is not None:
                    return Dead(claimed.key, now, attempts, answer.status, exhausted)
                return Done(claimed.key, now, answer.status, attempts)
            try:
                body = await answer.body.keep()
            except StorageFailed as exc:
                # It was executed, but what it answered is lost: that is an attempt like any other that failed.
                log.warning("async.answer_not_kept call=%s: %s", call.id, exc)
                wait_s = backoff_s(attempts, policy.min_wait_s, policy.max_wait_s, self.rng)
                return Retry(claimed.key, now + wait_s, attempts, answer.status, str(exc))
            kept = True
            given = KeptAnswer(answer.status, tuple(answer.headers), body, duration_s, policy.attempts)
            return Deliver(claimed.key, now, attempts, given, exhausted)
        finally:
            if not kept:
                answer.body.discard()

    async def deliver(self, claimed: ClaimedCall) -> Outcome:
        call, answer = claimed.call, claimed.answer
        assert answer is not None
        assert call.callback_url is not None
        policy = self.callback_retry
        deliveries = claimed.deliveries + 1
        headers = [pair for pair in answer.headers if pair[0].lower() not in _NEVER_TO_CALLBACK]
        headers += [
            (b"X-Call-Id", call.id.encode("latin-1")),
            (b"X-Start-Time", b"%d" % call.start_ns),
            (b"X-Duration-Seconds", b"%.6f" % answer.duration_s),
            (b"X-Function-Name", call.name.encode("latin-1")),
            (b"X-Function-Status", b"%d" % answer.status),
            (b"X-Retry", b"%d" % claimed.attempts),
            (b"X-Retry-Max", b"%d" % answer.attempts_allowed),
        ]
        reason: str
        try:
            await self.callbacks.deliver(call.callback_url, headers, answer.body)
        except CallbackFailed as exc:
            now, reason = self.clock(), str(exc)
            if deliveries < policy.attempts:
                wait_s = backoff_s(deliveries, policy.min_wait_s, policy.max_wait_s, self.rng)
                return Redeliver(claimed.key, now + wait_s, deliveries, reason)
            reason += f"; the last of {policy.attempts} attempts failed"
        except CallbackRefused as exc:
            now, reason = self.clock(), str(exc)
        else:
            now = self.clock()
            if claimed.exhausted is None:
                return Done(claimed.key, now, answer.status, claimed.attempts)
            return Dead(claimed.key, now, claimed.attempts, answer.status, claimed.exhausted)
        log.warning("async.callback_gave_up call=%s function=%s: %s", call.id, call.function, reason)
        if claimed.exhausted is not None:
            return Dead(claimed.key, now, claimed.attempts, answer.status, f"{claimed.exhausted}; {reason}")
        return Dead(claimed.key, now, claimed.attempts, answer.status, reason, undelivered=True)


class AnswerKeeper:
    """Keeps an answer: in memory as long as it is small, then in a file. Without a callback, only its size."""

    def __init__(self, new_file: Callable[[], SpoolFile] | None) -> None:
        self.status = 500
        self.headers: list[Header] = []
        self.begun = False
        self._new_file = new_file
        self.body = KeptBody(new_file, INLINE_ANSWER)

    @property
    def internal(self) -> bool:
        """Whether the platform answered, not the function."""
        return self.header(b"x-openfaas-internal") is not None

    @property
    def reason(self) -> str:
        text = f"status {self.status}"
        if self.internal and self.body.pieces:
            text += " of the platform: " + b"".join(self.body.pieces)[:500].decode("utf-8", "replace").strip()
        return text

    def header(self, name: bytes) -> str | None:
        return next((value.decode("latin-1") for key, value in self.headers if key.lower() == name), None)

    async def take(self, answer: Answer) -> None:
        """Read it to its end."""
        self.status, self.headers = answer.status, answer.headers
        self.begun = True
        if answer.stream is None:
            self._keep(bytes(answer.body))
            return
        with answer.stream as stream:
            while (piece := await stream.chunk()) is not None:
                self._keep(piece)

    def _keep(self, piece: bytes) -> None:
        if not piece or (self._new_file is None and not self.internal):
            return
        if self.body.size + len(piece) > MAX_ANSWER:
            raise BadAnswer(f"it has more than the {format_bytes(MAX_ANSWER)} that are kept for a callback")
        self.body.write(piece)

    def failed(self, why: str, status: int) -> None:
        """Replace what came so far by the platform's own answer."""
        self.body.discard()
        self.status = status
        self.headers = [(b"x-openfaas-internal", b"gateway"), (b"content-type", b"text/plain; charset=utf-8")]
        self.body = KeptBody(self._new_file, INLINE_ANSWER)
        self.body.write(why.encode())


async def execute(run: Run, call: AcceptedCall) -> Answer:
    """Return what *run* (`Calls.run`) answers. :raises CallCancelled: the call was ended before there was an answer"""
    if isinstance(call.body, Path):
        body, size = None, call.body.stat().st_size
        caller = _FileCaller(call.body, size)
    else:
        body, size, caller = call.body, len(call.body), None
    headers = [*call.headers, (b"x-call-id", call.id.encode("latin-1")), (b"content-length", b"%d" % size)]
    path = call.path.decode("latin-1") or "/"
    return await run(Request(call.function, "POST", path, call.query, headers, body, caller=caller))


class _FileCaller:
    """`Caller` whose body is a file, and who never goes away."""

    def __init__(self, path: Path, size: Bytes) -> None:
        self._path = path
        self._size = size
        self._at: Bytes = 0

    async def receive(self) -> tuple[bytes, bool]:
        if self._at >= self._size:
            await asyncio.Event().wait()
        piece = await asyncio.to_thread(self._read)
        self._at = self._at + len(piece) if piece else self._size
        return piece, self._at < self._size

    def on_gone(self, tell: Callable[[], None] | None) -> bool:  # noqa: ARG002 - the port's
        return True

    def _read(self) -> bytes:
        with self._path.open("rb") as file:  # each time: nothing tells when the file is not needed any more
            file.seek(self._at)
            return file.read(_PIECE)
