"""A call as a front and `calls.Calls` pass it to each other, in no protocol's words."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from msgspec import Struct

from gpufaas_core.errors import CallCancelled, GpufaasError
from gpufaas_core.messages import Outer
from gpufaas_gateway.call_body import Caller
from gpufaas_gateway.call_headers import BODILESS, Header, error_headers
from gpufaas_gateway.call_life import CallLife
from gpufaas_gateway.catalogue import Deployed
from gpufaas_gateway.errors import status_of
from gpufaas_gateway.ports import CallExchange

SWITCHED: Final = 101


class Request(Struct):
    """A call as its caller makes it."""

    name: str
    """Of the function, ``NAME`` or ``NAME.NAMESPACE``."""
    method: str = "POST"
    path: str = "/"
    """Raw, what follows the name; begins with ``/``."""
    query: bytes = b""
    headers: Sequence[Header] = ()
    """Names in lower case; not changed."""
    body: bytes | None = b""
    """All of it; None: it comes from `caller`."""
    caller: Caller | None = None
    """May go away before there is an answer; None: waits in any case."""
    client: tuple[str, int] | None = None
    """Its address and port, if it has one."""
    outer: Outer | None = None
    """The worker that makes the call, if one does."""
    upgrade: Sequence[Header] = ()
    """
    Headers that ask the function to switch protocols: the answer is then a stream in both directions, and the call has
    a time limit only until it begins.
    """


class Answer(Struct):
    """What a call is answered: the function's answer, or the platform's own where there is none."""

    status: int
    headers: list[Header]
    body: bytes = b""
    """All of it, unless there is a `stream`."""
    stream: "AnswerStream | None" = None
    error: GpufaasError | None = None
    """Why there is no answer of the function's; `body` is its text then."""


def refusal(error: GpufaasError, more: list[Header]) -> Answer:
    """Return the platform's answer to a call that ends with *error*: its text, and its headers and *more*."""
    text = str(error).encode()
    return Answer(status_of(error), error_headers(error, len(text)) + more, text, error=error)


class BrokenAnswer(Exception):
    """An answer broke off after it had begun: its caller must see that it is half. Not an error of the platform's."""


Run = Callable[[Request], Awaitable[Answer]]
"""`Calls.run`, as the fronts use it."""


class AnswerStream:
    """
    What comes of an answer after its head; a context, within which it is read.

    What is not read until the context's end is given up. An error in it, also one of the reader's own, ends it with
    `BrokenAnswer`.
    """

    def __init__(
        self,
        call: CallLife,
        exchange: CallExchange,
        first: bytes,
        whole: bool,
        *,
        switched: bool,
        on_cancel: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        """
        :param first: of the body, what came with the head
        :param whole: that is all of it
        :param switched: the function has switched protocols
        :param on_cancel: told once that the rest is not wanted
        :param on_end: told at the end of the context
        """
        self._call = call
        self._exchange = exchange
        self._first = first
        self._ended = whole
        self._switched = switched
        self._on_cancel = on_cancel
        self._on_end = on_end
        self._cancelled = self._passed = False
        self._bodiless = call.status in BODILESS

    @property
    def deployed(self) -> Deployed:
        """The revision that answers."""
        assert self._call.deployed is not None
        return self._call.deployed

    async def chunk(self) -> bytes | None:
        """
        Return the next piece; None at the end.

        :raises GpufaasError: it broke off
        """
        call = self._call
        if self._first:
            piece, self._first = self._first, b""
            return piece
        if call.stream is not None and self._passed:
            call.stream.answered()
        self._passed = True
        while not self._ended:
            found = await self._exchange.chunk()
            if found is None:
                self._ended = True
                if not self._switched:
                    call.run_s = self._exchange.end.run_s
                call.stop_watching()
            elif not self._bodiless:
                return found
        return None

    async def send(self, data: bytes) -> None:
        """Send to a function that has switched protocols; returns when there is room for more."""
        await self._exchange.send_body(data)

    def fail(self, error: GpufaasError) -> None:
        """Who reads it gets *error*."""
        self._call.fail(error)

    def count_as(self, status: int) -> None:
        """Let its call be counted with *status*, and not with that of its head."""
        self._call.status = status

    def cancel(self) -> None:
        """Nobody will read what has not come yet: the call's place is free from now on."""
        if not self._ended and not self._cancelled:
            self._cancelled = True
            self._call.stop_watching()
            self._on_cancel()

    def __enter__(self) -> "AnswerStream":
        return self

    def __exit__(self, _: object, exc: BaseException | None, __: object) -> None:
        call, error = self._call, exc if isinstance(exc, GpufaasError) else None
        if isinstance(exc, asyncio.CancelledError):
            if call.was_cancelled_by_us():
                error = call.error
            else:
                call.status = status_of(CallCancelled())
        if error is not None:
            call.status = status_of(error)
        if self._switched:
            call.run_s = time.perf_counter() - call.began - call.queue_s - call.load_s
        self.cancel()
        self._on_end()
        if error is not None:
            # Nothing may follow half an answer: the caller must see that it is half.
            raise BrokenAnswer(str(error)) from error
