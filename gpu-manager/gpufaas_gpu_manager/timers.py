"""The timers of one owner, by name."""

import asyncio
from collections.abc import Callable

from gpufaas_core.model import Seconds


class Timers:
    def __init__(self) -> None:
        self._handles: dict[str, asyncio.TimerHandle] = {}

    def later(self, name: str, delay: Seconds, action: Callable[[], None]) -> None:
        """Call *action* after *delay*, in place of what was set under *name*."""
        self.cancel(name)
        self._handles[name] = asyncio.get_running_loop().call_later(delay, action)

    def cancel(self, name: str) -> None:
        handle = self._handles.pop(name, None)
        if handle is not None:
            handle.cancel()

    def close(self) -> None:
        for handle in self._handles.values():
            handle.cancel()
        self._handles.clear()
