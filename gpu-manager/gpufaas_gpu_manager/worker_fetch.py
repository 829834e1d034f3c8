"""The fetch of what a worker needs. Not watched as a load is: the fetcher gives up what makes no progress."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.errors import LoadFailed
from gpufaas_core.model import Seconds


class WorkerFetch:
    """What one worker waits for before it starts; `run` once."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.took_s: Seconds | None = None
        """None: nothing was fetched, or not yet."""
        self.tier = ""
        """Where it came from: ``peer`` or ``store``; empty: it was here."""
        self._spec = spec
        self._going: asyncio.Future[str] | None = None

    @property
    def goes_on(self) -> bool:
        return self._going is not None

    def cancel(self) -> None:
        if self._going is not None:
            self._going.cancel()

    async def run(self, fetch: Callable[[WorkerSpec], Awaitable[str]], killed_for: Callable[[], str]) -> None:
        """
        Bring what the worker needs to this node.

        :raises LoadFailed: the worker was ended meanwhile
        """
        began = time.monotonic()
        self._going = asyncio.ensure_future(fetch(self._spec))
        try:
            await asyncio.wait([self._going])
            if self._going.cancelled():
                raise LoadFailed(killed_for() or "it was not needed any more")
            self.tier = self._going.result()
        finally:
            self._going.cancel()  # of no effect but when this task itself is cancelled
            self._going, self.took_s = None, time.monotonic() - began
