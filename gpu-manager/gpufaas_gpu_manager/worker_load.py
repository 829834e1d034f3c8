"""How a worker came to be ready: how long each part of its load took, and where its weights came from."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.errors import LoadFailed
from gpufaas_core.model import Seconds
from gpufaas_core.wire.heads import WARM, ReadyHead

Phases = tuple[tuple[str, Seconds], ...]


class WorkerLoad:
    """The load of one worker, or its wake. What it needs is fetched first, if it is not on its node."""

    def __init__(self) -> None:
        self.asked_at = self.begun_at = time.monotonic()
        """A call or a command wanted the worker, and then its memory was reserved."""
        self.tier = ""
        """Says where its weights came from, as `Loaded.tier`; empty: the worker is not ready."""
        self.warms = False
        """No call waits for the worker when it begins to load."""
        self.staged = False
        """All of its weights were given to it from host memory."""
        self.read_s: Seconds = 0.0
        """The time for which its weights were fetched and read."""
        self.warm_s: Seconds = 0.0
        """The part of its start that is no load."""
        self._fetch_s: Seconds = 0.0
        self._fetched_from = ""
        self._fetching: asyncio.Future[str] | None = None

    @property
    def fetches(self) -> bool:
        return self._fetching is not None

    def cancel(self) -> None:
        """End the fetch, if there is one."""
        if self._fetching is not None:
            self._fetching.cancel()

    async def fetch(
        self, spec: WorkerSpec, fetch: Callable[[WorkerSpec], Awaitable[str]], killed_for: Callable[[], str]
    ) -> None:
        """
        Bring what the worker needs to this node. Not watched as a load is: the fetcher gives up what does not go on.

        :raises LoadFailed: the worker was ended meanwhile
        """
        began = time.monotonic()
        self._fetching = asyncio.ensure_future(fetch(spec))
        try:
            await asyncio.wait([self._fetching])
            if self._fetching.cancelled():
                raise LoadFailed(killed_for() or "it was not needed any more")
            self._fetched_from = self._fetching.result()
        finally:
            self._fetching.cancel()  # of no effect but when this task itself is cancelled
            self._fetching, self._fetch_s = None, time.monotonic() - began

    def loaded(self, head: ReadyHead) -> Phases:
        """The worker is ready, and says *head*. Return the phases of its load."""
        within, fetch_s = dict(head.phases), self._fetch_s
        process_s = time.monotonic() - self.begun_at - sum(seconds for _, seconds in head.phases) - fetch_s
        self.warm_s, read_s = within.get(WARM, 0.0), within.pop("read", 0.0)
        self.read_s = read_s + fetch_s
        self.tier = self._fetched_from or ("host" if self.staged and head.staged else "disk")
        fetched = [("fetch", fetch_s)] if self._fetched_from else []
        read_s = read_s if fetched else self.read_s
        return self._phases([*fetched, ("process", process_s), ("read", read_s), *within.items()])

    def woken(self, phases: Sequence[tuple[str, Seconds]]) -> Phases:
        """The worker was parked, and can serve again."""
        self.tier, self.read_s, self.warm_s = "parked", 0.0, 0.0
        return self._phases(phases)

    def _phases(self, phases: Sequence[tuple[str, Seconds]]) -> Phases:
        return ("room", self.begun_at - self.asked_at), *phases
