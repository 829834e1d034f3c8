"""
The body of a call on its way from the caller to the function: whole in memory, in a file, or as it comes.

The body of a model function's call is whole before a device is asked for: a slow caller must not hold a device.
"""

import asyncio
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from gpufaas_core.errors import BodyTooLarge, CallCancelled, GpufaasError, GrantRefused, StorageFailed
from gpufaas_core.units import Bytes, format_bytes
from gpufaas_core.wire.bodies import FILE, INLINE, STREAM
from gpufaas_gateway.body_memory import LEAST, MOST, QUICK_S, BodyMemory, Filler
from gpufaas_gateway.catalogue import ServedRevision
from gpufaas_gateway.errors import BodyTooSlow
from gpufaas_gateway.ports import CallExchange

SPOOL_ABOVE: Final[Bytes] = 1024 * 1024
"""A larger body waits on disk. If a body for a CPU function may be larger, it streams."""
BODY_BYTES_PER_S: Final = 500
"""A body that streams more slowly uses up its `gpufaas.body-patience` (Apache has the same rate)."""
_HELD_BYTES: Final[Bytes] = 64 * 1024
"""The most bytes that are kept of a body that streams while its call waits. The server keeps as many, too."""


class Caller(Protocol):
    """The caller of a call: a connection, or a file of an asynchronous call."""

    async def receive(self) -> tuple[bytes, bool]:
        """
        Return the next piece of the body, and whether more follows. After the last piece it waits.

        :raises CallCancelled: the caller went away; also after the last piece
        """

    def on_gone(self, tell: Callable[[], None] | None) -> bool:  # noqa: ARG002 - for those that tell
        """
        Have *tell* called when the caller goes away, or nothing any more if it is None. False: only `receive` says so,
        at which a task has to wait.
        """
        return False


Body = tuple[bytes | memoryview, int, str, Bytes]
"""
The bytes that the call begins with; how the body travels (`core/wire/bodies.py`); its file; its size, 0 if unknown.
A body in a file begins with no bytes, one that streams with its first piece.
"""


async def read_rest(
    piece: bytes, caller: Caller, deployed: ServedRevision, length: int, spool: Path, memory: BodyMemory | None = None
) -> Body:  # fmt: skip
    """
    Read the rest of a body that began with *piece*, unless it streams: that of a CPU function which may be over
    `SPOOL_ABOVE`.

    :param length: as the caller declared it, -1: not
    :param memory: for large bodies that go to a node in this process; None: it is elsewhere
    :raises CallCancelled: the caller went away
    :raises BodyTooLarge: it is larger than the function takes
    :raises StorageFailed: *spool* cannot be written
    """
    streams = not deployed.compute and not 0 <= length <= SPOOL_ABOVE
    if LEAST <= length <= MOST and memory is not None and isinstance(caller, Filler):
        lent = memory.take(length)
        if lent is not None:
            there = await caller.fill(lent[1], piece, QUICK_S if streams else None)
            if there == length:
                return lent[0], INLINE, "", length
            if there:
                piece = bytes(lent[0][:there])
            del lent
    if streams:
        return piece, STREAM, "", 0
    pieces, size, more, file, path = [piece], len(piece), True, None, ""
    try:
        while more:
            piece, more = await caller.receive()
            size += len(piece)
            if size > deployed.max_body:
                raise too_large(deployed, size)
            pieces.append(piece)
            if size > SPOOL_ABOVE:
                if file is None:
                    fd, path = tempfile.mkstemp(prefix="body-", dir=spool)
                    file = os.fdopen(fd, "wb")
                for each in pieces:
                    file.write(each)
                pieces.clear()
        if file is None:
            return b"".join(pieces), INLINE, "", size
        file.close()
        return b"", FILE, path, size
    except BaseException as exc:
        if file is not None:
            file.close()
            remove(path)
        if isinstance(exc, OSError):
            raise StorageFailed(
                f"the body of {format_bytes(size)} could not be kept in {spool} ({exc.strerror}): "
                "make room there, or send less"
            ) from exc
        raise


def remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


class BodyStream:
    """
    The rest of a body that streams: kept while its call waits, then passed on as it comes.

    A call that runs holds a slot, so its body must go on: the time for which we wait for the caller is limited
    (`gpufaas.body-patience`). Each piece of the body gives some of that time back, each piece of an answer all.
    """

    def __init__(
        self, caller: Caller, deployed: ServedRevision, size: Bytes, fail: Callable[[GpufaasError], None]
    ) -> None:
        """
        :param size: of the piece that the call begins with
        :param fail: ends the call
        """
        self._caller = caller
        self._deployed = deployed
        self._size = size
        self._fail = fail
        self._loop = asyncio.get_running_loop()
        self._held: deque[tuple[bytes, bool]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._pace: asyncio.TimerHandle | None = None
        self._awaits = False
        """We wait for the caller; the function could take more."""
        self._due = 0.0
        """When the wait for the caller ends, unless a piece comes."""

    async def hold(self) -> None:
        """
        Receive while the call waits, up to a bound. Beyond it a caller who leaves is noticed when the call is placed.

        :raises CallCancelled: the caller went away
        """
        size = 0
        while size <= _HELD_BYTES:
            piece, more = await self._caller.receive()
            self._held.append((piece, more))
            size += len(piece)

    def begin(self, exchange: CallExchange) -> None:
        """Pass it on to *exchange*, until `end`."""
        patience_s = self._deployed.options.body_patience_s
        self._due = time.perf_counter() + patience_s
        self._pace = self._loop.call_later(patience_s, self._keep_pace)
        self._task = self._loop.create_task(self._pass_on(exchange))

    def end(self) -> None:
        """Stop. What the exchange did not take is kept for another `begin`."""
        self._stop_pace()
        if self._task is not None:
            self._task.cancel()
            self._task = None
            self._awaits = False

    def answered(self) -> None:
        """A piece of the answer went to the caller."""
        if self._pace is not None:
            self._due = time.perf_counter() + self._deployed.options.body_patience_s

    async def _pass_on(self, exchange: CallExchange) -> None:
        """Pass the body on as it comes, then listen to the caller, who may hang up."""
        held, size, deployed = self._held, self._size, self._deployed
        while True:
            if not held:
                self._awaits = True
                try:
                    held.append(await self._caller.receive())
                except CallCancelled as error:
                    self._fail(error.with_traceback(None))  # not with this frame, which has the exchange
                    return
                self._awaits = False
            piece, more = held[0]  # kept until the node has taken it: after a refusal it is sent again
            size += len(piece)
            if size > deployed.max_body:
                self._fail(too_large(deployed, size))
                return
            try:
                if piece:
                    due = self._due - time.perf_counter()
                    await exchange.send_body(piece)  # this time is the function's, not the caller's
                    patience_s = min(deployed.options.body_patience_s, due + len(piece) / BODY_BYTES_PER_S)
                    self._due = time.perf_counter() + patience_s
                if not more:
                    self._stop_pace()
                    await exchange.end_body()
            except GrantRefused:
                return
            held.popleft()

    def _keep_pace(self) -> None:
        """Fail the call if its caller was waited for too long; else look again when that can be."""
        patience_s = self._deployed.options.body_patience_s
        left_s = self._due - time.perf_counter()
        if left_s <= 0.0 and self._awaits:
            self._pace = None
            self._fail(
                BodyTooSlow(
                    f"the body for {self._deployed.name} comes too slowly: over {patience_s:g} s, fewer than "
                    f"{BODY_BYTES_PER_S} bytes/s of it came, and nothing was answered (annotation "
                    "gpufaas.body-patience; a body of at most 1 MiB with a Content-Length may take all of the time "
                    "limit)"
                )
            )
            return
        self._pace = self._loop.call_later(left_s if left_s > 0.0 else patience_s, self._keep_pace)

    def _stop_pace(self) -> None:
        if self._pace is not None:
            self._pace.cancel()
            self._pace = None


def too_large(deployed: ServedRevision, size: Bytes) -> BodyTooLarge:
    return BodyTooLarge(
        f"the body has {format_bytes(size)} or more, but {deployed.name} takes at most "
        f"{format_bytes(deployed.max_body)}: send less, or deploy it with a larger gpufaas.max-body"
    )
