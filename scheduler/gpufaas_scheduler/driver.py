"""Tells the engine events in their order: gives it the clock, keeps the journal, and wakes it when time is up."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Final, Protocol

from gpufaas_core.messages import Command, Event, Woken
from gpufaas_core.model import Seconds
from gpufaas_core.snapshot import DeviceDoc, EngineDoc, FunctionDoc
from gpufaas_scheduler.engine import Engine

_FLUSH_WITHIN_S: Final = 0.05
"""A kill -9 loses at most this much of the journal. A write per event would slow down every call."""


class JournalPort(Protocol):
    def append(self, event: Event, now: Seconds) -> None: ...

    def flush(self) -> None: ...


@dataclass(slots=True, eq=False)
class EngineDriver:
    """The only caller of `Engine.handle`. One event loop owns it, so the engine needs no lock."""

    engine: Engine
    carry_out: Callable[[Command], None]
    """Executes a command of the engine."""
    on_fatal: Callable[[BaseException], None]
    """Called with an exception of the engine, after which the process must end."""
    journal: JournalPort | None
    on_event: Callable[[], None] | None = None
    """Called after each event: the engine may have changed what is written behind."""
    events: int = 0
    """How many the engine was told: as long as it is the same, nothing has changed."""
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _flush: asyncio.TimerHandle | None = None
    _timer: asyncio.TimerHandle | None = None
    _timer_at: Seconds = inf
    """When `_timer` is due."""
    now: Callable[[], Seconds] = field(init=False)

    def __post_init__(self) -> None:
        self.now = self._loop.time

    def handle(self, event: Event, now: Seconds | None = None) -> None:
        """Tell the engine *event* and carry out what it commands."""
        if now is None:
            now = self.now()
        self.events += 1
        if self.journal is not None:
            self.journal.append(event, now)
            if self._flush is None:
                self._flush = self._loop.call_later(_FLUSH_WITHIN_S, self._flush_journal)
        try:
            commands = self.engine.handle(event, now)
        except Exception as exc:
            # A wrong decision made quietly is worse than a stop: the journal replays this one.
            self.on_fatal(exc)
            raise
        if self.on_event is not None:
            self.on_event()
        for command in commands:
            self.carry_out(command)
        if self.engine.may_wake_before(self._timer_at):
            self._look_when_to_wake(now)

    def doc(self, key: str) -> DeviceDoc | FunctionDoc | EngineDoc | None:
        """Return the state to keep under *key*; see `Engine.doc`."""
        return self.engine.doc(key, self.now())

    def _look_when_to_wake(self, now: Seconds) -> None:
        wake_at = self.engine.wake_at
        # An earlier timer than needed is left: it wakes once too often, which is cheaper than a timer per call.
        if wake_at is None or wake_at >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = wake_at
        self._timer = self._loop.call_later(max(0.0, wake_at - now), self._wake)

    def _wake(self) -> None:
        self._timer, self._timer_at = None, inf
        self.handle(Woken())
        self._look_when_to_wake(self.now())

    def _flush_journal(self) -> None:
        self._flush = None
        if self.journal is not None:
            self.journal.flush()
