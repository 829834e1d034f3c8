"""The bounds of asynchronous calls: how many at once, and how many in all."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpufaas_async_calls.call import Phase
from gpufaas_async_calls.retry import RetryPolicy
from gpufaas_core.units import Seconds
from gpufaas_gateway.annotations import DEFAULT_QUEUE


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """The bounds of one queue."""

    at_once: int
    """Executions."""
    limit: int
    """Calls that have not ended."""


@dataclass(frozen=True, slots=True)
class AsyncSettings:
    max_queue: int = 100_000
    """Calls of one function that have not ended."""
    queues: Mapping[str, QueueSettings] = field(default_factory=dict)
    """Queues with bounds of their own. What follows holds for the others."""
    queue_limit: int = 1_000_000
    """Calls of one queue that have not ended."""
    at_once_in_named: int = 16
    """Executions of a queue that functions name and that has no setting."""
    at_once: int = 64
    """Executions of the default queue, those that wait in the engine included."""
    at_once_per_function: int = 16
    """The most executions of one function in the default queue: other callers have half the slots of a CPU function's
    worker."""
    callbacks_at_once: int = 64
    """The most callbacks of one queue at a time."""
    callbacks_at_once_per_function: int = 16
    callback_retry: RetryPolicy = field(default_factory=lambda: RetryPolicy(10, frozenset(), 1.0, 120.0))
    """How callbacks are repeated: for about ten minutes; the codes are not used."""
    retry_after_s: Seconds = 5.0
    """What the answer of a full queue says in Retry-After."""
    grace_s: Seconds = 10.0
    """How long executions and callbacks may take to end when the platform is asked to stop."""

    def of_queue(self, queue: str) -> QueueSettings:
        if queue in self.queues:
            return self.queues[queue]
        return QueueSettings(self.at_once if queue == DEFAULT_QUEUE else self.at_once_in_named, self.queue_limit)

    def bounds(self, phase: Phase, queue: str) -> tuple[int, int]:
        """Return how many calls of *queue* may be worked on at once, and how many of one function."""
        if phase == "callback":
            return self.callbacks_at_once, self.callbacks_at_once_per_function
        at_once = self.of_queue(queue).at_once
        # The number of a named queue is for its functions together, also if there is only one.
        return at_once, self.at_once_per_function if queue == DEFAULT_QUEUE else at_once
