"""The body of an answer while it comes, for the front that sends it on."""

import asyncio
from collections.abc import Callable
from typing import Final

from gpufaas_core.errors import CallCancelled, GpufaasError
from gpufaas_core.model import CallId
from gpufaas_gateway.call import Call
from gpufaas_gateway.call_headers import BODILESS
from gpufaas_gateway.errors import status_of

SWITCHED: Final = 101


class BrokenAnswer(Exception):
    """An answer broke off after it had begun. The caller must see that it is not whole. Not a bug of the platform."""


class AnswerStream:
    """
    The body of an answer that streams. Use it as a context, and read it within that.

    At the end of the context the rest is given up. A `GpufaasError` within it becomes `BrokenAnswer`.
    """

    def __init__(
        self, call: Call, status: int, first: bytes, whole: bool, cancel: Callable[[CallId], None],
        end: Callable[[Call], None],
    ) -> None:  # fmt: skip
        """
        :param status: of the function's answer
        :param first: the part of the body that came with the head
        :param whole: *first* is all of it
        :param cancel: called once with the scheduler's id of the call, when nobody wants the rest
        :param end: called at the end of the context
        """
        assert call.exchange is not None
        self.switched = bool(call.request.upgrade) and status == SWITCHED
        self.call = call
        self._exchange = call.exchange
        self._first = first
        self._ended = whole
        self._cancel = cancel
        self._end = end
        self._passed = False
        self._bodiless = status in BODILESS

    async def chunk(self) -> bytes | None:
        """
        Return the next piece; None at the end.

        :raises GpufaasError: it broke off
        """
        call = self.call
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
                if not self.switched and (end := self._exchange.end) is not None:
                    call.run_s = end.run_s
                call.stop_watching()
            elif not self._bodiless:
                return found
        return None

    def pour(self, sink: Callable[[bytes], bool]) -> None:
        """Give further pieces to *sink* as they come, as long as it takes them; `chunk` returns the others."""
        if self.call.stream is None and not self._bodiless:  # else each piece is noted
            self._exchange.sink = sink

    async def send(self, data: bytes) -> None:
        """Send *data* to a function that has switched protocols; return when there is room for more."""
        await self._exchange.send_body(data)

    def cancel(self) -> None:
        """Give up the rest of the answer, and the call's place."""
        if not self._ended:
            self._ended = True
            self.call.stop_watching()
            self._cancel(self.call.id)

    def __enter__(self) -> "AnswerStream":
        return self

    def __exit__(self, _: object, exc: BaseException | None, __: object) -> None:
        call, error = self.call, exc if isinstance(exc, GpufaasError) else None
        if isinstance(exc, asyncio.CancelledError):
            if call.was_cancelled_by_us():
                error = call.error
            else:
                call.status = status_of(CallCancelled())
        if error is not None:
            call.status = status_of(error)
        if self.switched:
            call.run_s = call.ran_s
        self.cancel()
        self._end(call)
        if error is not None:
            # Nothing may follow half an answer: the caller must see that it is half.
            raise BrokenAnswer(str(error)) from error
