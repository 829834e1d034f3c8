"""A call between a front and `calls.Calls`: request and answer, without types of a protocol."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from msgspec import Struct

from gpufaas_core.driven import Driven
from gpufaas_core.errors import CallCancelled, GpufaasError
from gpufaas_core.messages import Outer
from gpufaas_gateway.call_body import Caller
from gpufaas_gateway.call_headers import BODILESS, Header, ReadHead, error_headers
from gpufaas_gateway.call_life import CallLife
from gpufaas_gateway.catalogue import Deployed
from gpufaas_gateway.errors import status_of
from gpufaas_gateway.ports import CallExchange

SWITCHED: Final = 101


class Request(Struct):
    """A call as its caller makes it."""

    name: str
    """The name of the function, ``NAME`` or ``NAME.NAMESPACE``."""
    method: str = "POST"
    path: str = "/"
    """Raw, what follows the name; begins with ``/``."""
    query: bytes = b""
    headers: Sequence[Header] = ()
    """Names in lower case; not changed."""
    body: bytes | None = b""
    """The whole body; None: it comes from `caller`."""
    caller: Caller | None = None
    """Who may go away before there is an answer; None: nobody can."""
    client: tuple[str, int] | None = None
    """The caller's address and port, if there is a connection."""
    outer: Outer | None = None
    """The worker that makes the call; None: the call comes from outside."""
    upgrade: Sequence[Header] = ()
    """
    Headers that ask the function to switch protocols. The answer is then a stream in both directions, and the time
    limit of the call holds only until it begins.
    """
    read: ReadHead | None = None
    """What was read in the headers, if they were read; not changed."""
    driven: Driven | None = None
    """What runs the call; None: the current task."""
    send: "Callable[[Answer], None] | None" = None
    """
    Is given a whole answer before the call is counted, perhaps with its headers as lines. What it does not send, it
    sends when the call has ended.
    """


class Answer(Struct):
    """The function's answer, or the platform's own if there is an error."""

    status: int
    headers: list[Header]
    """Empty if there are `lines`."""
    body: bytes | memoryview = b""
    """The whole body, unless there is a `stream`. Memory for large ones is lent: do not keep it."""
    stream: "AnswerStream | None" = None
    lines: bytes = b""
    """The headers, Content-Length included, as they are sent."""
    error: GpufaasError | None = None
    """Why the function has not answered; `body` is its text."""


def refusal(error: GpufaasError, more: list[Header]) -> Answer:
    """Return the platform's answer to a call that ends with *error*; *more* are headers beside those of the error."""
    text = str(error).encode()
    return Answer(status_of(error), error_headers(error, len(text)) + more, text, error=error)


def let_go(error: BaseException | None) -> None:
    """
    Drop what *error*, which was handled, refers to: the frames that it went through refer to it again, and only the
    garbage collector could free them all.
    """
    while error is not None:
        following = error.__cause__ or error.__context__
        error.__traceback__ = error.__cause__ = error.__context__ = None
        error = following


class BrokenAnswer(Exception):
    """An answer broke off after it had begun. The caller must see that it is not whole. Not a bug of the platform."""


Run = Callable[[Request], Awaitable[Answer]]
"""`Calls.run`, as the fronts use it."""


class AnswerStream:
    """
    The body of an answer that streams. Use it as a context, and read it within that.

    At the end of the context the rest is given up. A `GpufaasError` within it becomes `BrokenAnswer`.
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
        :param first: the part of the body that came with the head
        :param whole: *first* is all of it
        :param switched: the function has switched protocols
        :param on_cancel: called once, when nobody wants the rest
        :param on_end: called at the end of the context
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

    def pour(self, sink: Callable[[bytes], bool]) -> None:
        """Give further pieces to *sink* as they come, as long as it takes them; `chunk` returns the others."""
        if self._call.stream is None and not self._bodiless:  # else each piece is noted
            self._exchange.sink = sink

    async def send(self, data: bytes) -> None:
        """Send *data* to a function that has switched protocols; return when there is room for more."""
        await self._exchange.send_body(data)

    def fail(self, error: GpufaasError) -> None:
        """Raise *error* in the reader."""
        self._call.fail(error)

    def count_as(self, status: int) -> None:
        """Count the call with *status* in place of the answer's."""
        self._call.status = status

    def cancel(self) -> None:
        """Give up the rest of the answer, and the call's place."""
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
