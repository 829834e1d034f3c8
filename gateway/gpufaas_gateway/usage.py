"""The counts of each function, kept without labels and locks, and the state of queues. `metrics` shows them."""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct

from gpufaas_core.units import Seconds

BOUNDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BATCH_BOUNDS: Final = (1, 2, 4, 8, 16, 32, 64, 128)
BUCKETS: Final = len(BOUNDS) + 1  # the last one is +Inf
SUM: Final = BUCKETS  # index of the sum of seconds, behind the buckets


@dataclass(slots=True, eq=False)
class FunctionStats:
    """The counts of one function, over all its revisions. The event loop that serves calls owns it."""

    name: str
    """``NAME.NAMESPACE``, the value of the label function_name."""
    saved_before: int = 0
    """Calls of earlier runs of the platform."""
    saved: int = 0
    """How many of `finished` the store has."""
    begun: int = 0
    """Counted by who begins a call; `observe` follows at its end."""
    finished: int = 0
    by_code: dict[int, list[float]] = field(default_factory=dict)
    """By status: the count of each bucket (not cumulative), then the sum of seconds."""
    batches: dict[int, int] = field(default_factory=dict)
    """Calls that ran together with others, by the number of these and itself."""
    batch_waits: list[float] = field(default_factory=list)
    """As one of `by_code`: how long calls were held back for others of their batch. Empty: none was."""
    hits: int = 0
    misses: int = 0
    queue_s: Seconds = 0.0
    load_s: Seconds = 0.0
    run_s: Seconds = 0.0

    def observe(
        self,
        code: int,
        seconds: Seconds,
        hit: bool | None = None,
        queue_s: Seconds = 0.0,
        load_s: Seconds = 0.0,
        run_s: Seconds = 0.0,
    ) -> None:
        """
        Count a call that ended with status *code* after *seconds*. Under 1 us (tests/unit/gateway/test_metrics.py).

        :param hit: whether its model was resident; None if the call never got a worker
        """
        counts = self.by_code.get(code)
        if counts is None:
            counts = self.by_code[code] = [0.0] * (BUCKETS + 1)
        counts[bisect_left(BOUNDS, seconds)] += 1
        counts[SUM] += seconds
        self.finished += 1
        if hit:
            self.hits += 1
        elif hit is not None:
            self.misses += 1
        self.queue_s += queue_s
        self.load_s += load_s
        self.run_s += run_s

    def observe_batch(self, size: int, held_s: Seconds = 0.0) -> None:
        """Count a call that was held back for *held_s*, or ran in a batch of *size*. `observe` has counted it, too."""
        if size > 1:
            self.batches[size] = self.batches.get(size, 0) + 1
        if held_s:
            self.batch_waits = self.batch_waits or [0.0] * (BUCKETS + 1)
            self.batch_waits[bisect_left(BOUNDS, held_s)] += 1
            self.batch_waits[SUM] += held_s

    @property
    def grants(self) -> float:
        """How often its handler was entered for the calls of this gateway: of a batch of n, each call is one n-th."""
        alone = self.hits + self.misses - sum(self.batches.values())
        return alone + sum(calls / size for size, calls in self.batches.items())

    @property
    def inflight(self) -> int:
        return self.begun - self.finished

    @property
    def invocations(self) -> int:
        """All calls that ended, also in earlier runs of the platform."""
        return self.saved_before + self.finished


class QueueStatus(Struct, frozen=True):
    """The state of a queue of asynchronous calls, in calls."""

    concurrency: int
    limit: int
    pending: int
    """Calls that have not ended."""
    running: int
    delivering: int
    """Callbacks under way."""
