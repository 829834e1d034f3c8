"""Runs a coroutine without a task: it begins at once, and goes on when what it waits for is there."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Final


class _Pause:
    """Awaited by a coroutine that is `Driven`: it goes on at `Driven.resume`."""

    __slots__ = ()

    def __await__(self) -> Any:
        yield self


PAUSE: Final = _Pause()


class Driven:
    """
    One coroutine. It may await futures, `PAUSE`, and ``asyncio.sleep(0)``. There is no current task while it runs, so
    it cannot use ``asyncio.timeout``.

    A task costs a turn of the loop at its beginning, and one at each thing that it waits for.
    """

    __slots__ = ("_awaited", "_cancelled", "_coroutine", "_loop", "_paused")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._coroutine: Coroutine[Any, Any, None] | None = None
        self._awaited: asyncio.Future[Any] | None = None
        self._paused = False
        self._cancelled = False
        """`cancel` was called, and the coroutine does not know it yet."""

    def drive(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run *coroutine* up to where it waits."""
        self._coroutine = coroutine
        self._go_on()

    def resume(self) -> None:
        """End a `PAUSE`; nothing, if it does not pause."""
        if self._paused:
            self._paused = False
            self._go_on()

    def awake(self, _: object) -> None:
        """As `resume`, for what calls back with an argument."""
        self.resume()

    def cancel(self, msg: object = None) -> bool:  # noqa: ARG002 - as tasks have it
        """Raise `asyncio.CancelledError` in the coroutine, where it waits."""
        if self._coroutine is None:
            return False
        if self._awaited is not None and self._awaited.cancel():
            return True
        self._cancelled = True
        if self._paused:
            self._paused = False
            self._loop.call_soon(self._go_on)
        return True

    def uncancel(self) -> int:
        """Nothing: as tasks have it."""
        return 0

    def ended(self) -> None:
        """The coroutine has ended."""

    def _go_on(self, _: object = None) -> None:
        coroutine = self._coroutine
        assert coroutine is not None
        self._awaited = None
        try:
            if self._cancelled:
                self._cancelled = False
                awaited = coroutine.throw(asyncio.CancelledError())
            else:
                awaited = coroutine.send(None)
        except BaseException as exc:
            self._coroutine = None
            self.ended()
            if not isinstance(exc, StopIteration | asyncio.CancelledError):
                raise
            return
        if awaited is PAUSE:
            self._paused = True
            if self._cancelled:
                self.cancel()
        elif awaited is None:
            self._loop.call_soon(self._go_on)
        else:
            self._awaited = awaited
            awaited.add_done_callback(self._go_on)
            if self._cancelled and awaited.cancel():
                self._cancelled = False
