"""
The autoscaler's shell: looks at the functions that have a scaling rule once a second, and says how many copies they
should have. A control loop beside the invocation path: a call that arrives at zero waits for the engine, not for this.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from gpufaas_core.model import EngineStatus, FunctionId, Seconds
from gpufaas_core.scaling import ScalingRule
from gpufaas_scheduler.autoscale import FunctionLoad, History, desired_copies, remember

log = logging.getLogger(__name__)

RATE_S: Final[Seconds] = 5.0
"""Rates are means of so long: over one second they would jump with every burst; OpenFaaS CE's 10 s rise late."""


@dataclass(frozen=True, slots=True)
class Watched:
    """A function with a rule, and what was counted of it since the platform started."""

    function: FunctionId
    """The revision that is served now."""
    rule: ScalingRule
    begun: int
    """Calls that came in."""
    finished: int
    """Calls that ended."""
    inflight: int
    """Calls that wait or run."""
    queued: int = 0
    """Asynchronous calls that are pending."""
    cpu_s: Seconds = 0.0
    """CPU time of its living workers; less than before when one has ended."""


@dataclass(slots=True)
class _Tracked:
    history: History
    load: FunctionLoad = field(default_factory=FunctionLoad)
    samples: deque[tuple[Seconds, Watched]] = field(default_factory=deque)
    """Of the last `RATE_S`, and the one before."""


class Scaler:
    """`tick` decides once; `run` does so until it is told to stop."""

    def __init__(
        self,
        watched: Callable[[], Mapping[str, Watched]],
        status: Callable[[], EngineStatus],
        scale: Callable[[FunctionId, int], None],
        every_s: Seconds = 1.0,
    ) -> None:
        """
        :param watched: functions with a rule, by a name that outlives their revisions; asked once per tick
        :param status: the engine's; asked when there are any
        :param scale: told only what is to change
        """
        self._watched = watched
        self._status = status
        self._scale = scale
        self._every_s = every_s
        self._seen: dict[str, _Tracked] = {}

    async def run(self, stopped: asyncio.Event) -> None:
        """`tick` every so often until *stopped*."""
        clock = asyncio.get_running_loop().time
        while not stopped.is_set():
            try:
                await asyncio.wait_for(stopped.wait(), self._every_s)
            except TimeoutError:
                self.tick(clock())

    def tick(self, now: Seconds) -> None:
        """Look at every function with a rule, and scale those that should have another number of copies."""
        watched = self._watched()
        for name in self._seen.keys() - watched.keys():
            del self._seen[name]
        if not watched:
            return
        status = self._status()
        copies = _copies(status)
        for name, each in watched.items():
            seen = self._seen.setdefault(name, _Tracked(History(now)))
            self._observe(seen, each, now)
            current = status.desired.get(each.function, copies.get(each.function, 0))
            wanted = desired_copies(each.rule, seen.load, current, now, seen.history)
            if wanted != current:
                log.info("function.scaled id=%s copies=%d before=%d", each.function, wanted, current)
                self._scale(each.function, wanted)

    def load(self, name: str) -> FunctionLoad | None:
        """Return what was measured of a function at the last tick; None: it has no rule, or was not looked at yet."""
        seen = self._seen.get(name)
        return None if seen is None else seen.load

    def _observe(self, seen: _Tracked, new: Watched, now: Seconds) -> None:
        samples = seen.samples
        while len(samples) > 1 and now - samples[1][0] >= RATE_S:
            samples.popleft()
        rps = millicores = 0.0
        arrived = False
        if samples:
            arrived = new.begun > samples[-1][1].begun
            if now > samples[0][0]:
                since, old = samples[0]
                rps = max(0, new.finished - old.finished) / (now - since)
                # Step by step, so that a worker that ended is missing from one step only.
                times = [sample.cpu_s for _, sample in samples] + [new.cpu_s]
                used_s = sum(max(0.0, later - before) for before, later in pairwise(times))
                millicores = 1000 * used_s / (now - since)
        seen.load = FunctionLoad(rps, new.inflight, millicores, new.queued, arrived)
        seen.history = remember(new.rule, seen.load, now, seen.history)
        samples.append((now, new))


def _copies(status: EngineStatus) -> dict[FunctionId, int]:
    copies: dict[FunctionId, int] = {}
    for device in status.devices:
        for each in device.resident:
            if not each.draining:
                copies[each.function] = copies.get(each.function, 0) + 1
    return copies
