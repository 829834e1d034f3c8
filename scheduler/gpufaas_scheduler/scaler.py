"""
The autoscaler: once a second it measures the functions whose owner is their labels, and says how many copies they
should have. It is beside the invocation path: a call of a function at zero waits for the engine, not for this loop.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from gpufaas_core.model import EngineStatus, FunctionId, Seconds
from gpufaas_core.scaling import ScalingRule
from gpufaas_scheduler.autoscale import FunctionLoad, History, desired_copies, remember

log = logging.getLogger(__name__)

RATE_S: Final[Seconds] = 5.0
"""Rates are means over this time. Over 1 s they would jump with every burst; OpenFaaS CE's 10 s rise late."""


@dataclass(frozen=True, slots=True)
class Watched:
    """A function with a rule, and its counters since the platform started."""

    function: FunctionId
    """The present revision."""
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
    """CPU time of its living workers; it drops when one ends."""


@dataclass(slots=True)
class _Tracked:
    history: History
    samples: deque[tuple[Seconds, Watched]] = field(default_factory=deque)
    """The samples of the last `RATE_S`, and the one before."""


@dataclass(slots=True)
class Scaler:
    """`tick` decides once; `run` calls it until it is stopped."""

    watched: Callable[[], Mapping[str, Watched]]
    """Returns the functions with a rule that acts, by ``NAME.NAMESPACE``."""
    status: Callable[[], EngineStatus]
    """Returns the engine's status; called if there are such functions."""
    scale: Callable[[FunctionId, int, Seconds], None]
    """Called for each change, with the time for which it holds: none."""
    every_s: Seconds = 1.0
    _seen: dict[str, _Tracked] = field(default_factory=dict)

    async def run(self, stopped: asyncio.Event) -> None:
        """Call `tick` at each interval until *stopped*."""
        clock = asyncio.get_running_loop().time
        while not stopped.is_set():
            try:
                await asyncio.wait_for(stopped.wait(), self.every_s)
            except TimeoutError:
                self.tick(clock())

    def tick(self, now: Seconds) -> None:
        """
        Measure all functions with a rule, and scale those that should have another number of copies.

        A function that the plan in force names is left to it, while one of its devices in the plan is there.
        """
        watched = self.watched()
        if watched:
            status = self.status()
            replicas = status.plan.copies if status.plan else ()
            planned = {each.function for each in replicas if each.state != "away"}
            watched = {name: each for name, each in watched.items() if name not in planned}
        for name in self._seen.keys() - watched.keys():
            del self._seen[name]
        if not watched:
            return
        copies = Counter(each.function for device in status.devices for each in device.resident if not each.draining)
        held = set(status.held)
        for name, each in watched.items():
            seen = self._seen.setdefault(name, _Tracked(History(now)))
            load = self._observe(seen, each, now)
            current = status.desired.get(each.function, copies[each.function])
            wanted = desired_copies(each.rule, load, current, now, seen.history, held=each.function in held)
            if wanted != current:
                log.info("function.scaled id=%s copies=%d before=%d", each.function, wanted, current)
                self.scale(each.function, wanted, 0.0)

    def _observe(self, seen: _Tracked, new: Watched, now: Seconds) -> FunctionLoad:
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
                # Step by step, so that a worker that ends affects one step only.
                times = [sample.cpu_s for _, sample in samples] + [new.cpu_s]
                used_s = sum(max(0.0, later - before) for before, later in pairwise(times))
                millicores = 1000 * used_s / (now - since)
        load = FunctionLoad(rps, new.inflight, millicores, new.queued, arrived)
        seen.history = remember(new.rule, load, now, seen.history)
        samples.append((now, new))
        return load
