"""
The pauses after failed loads: the first two are retried at once, further ones after 1 s, 2 s, 4 s … up to 5 min. A
worker that ends right after it was ready counts as a failed load.
"""

from typing import Final

from gpufaas_core.model import Seconds
from gpufaas_core.snapshot import BackoffDoc

AT_ONCE: Final = 3
"""The failure in a row from which on the next load waits: a worker may be killed by chance, perhaps twice."""

FIRST_S: Final[Seconds] = 1.0
LONGEST_S: Final[Seconds] = 300.0

STEADY_S: Final[Seconds] = 10.0
"""If a worker ends after this long, its start was not the cause."""


class Backoff:
    """For a function whose last load failed, or whose worker is not steady yet. Times are on the engine's clock."""

    __slots__ = ("failures", "loaded_at", "reason", "retry_at", "since")

    def __init__(self) -> None:
        self.failures = 0
        """In a row."""
        self.reason: str | None = None
        """Why its last load failed; None: a copy serves, or has loaded since."""
        self.since: Seconds = 0.0
        """The time of the first of `failures`."""
        self.retry_at: Seconds = 0.0
        """The function is not loaded before this time."""
        self.loaded_at: Seconds | None = None
        """When a load succeeded; None: one has failed since."""

    def left_s(self, now: Seconds) -> Seconds:
        """Return how long the next load has to wait."""
        return max(0.0, self.retry_at - now)

    def failed(self, now: Seconds) -> bool:
        """Count a failed load. Return whether the next one has to wait."""
        if self.loaded_at is not None and now - self.loaded_at >= STEADY_S:
            self.failures = 0
        self.loaded_at = None
        if not self.failures:
            self.since = now
        self.failures += 1
        if self.failures < AT_ONCE:
            return False
        doublings = min(self.failures - AT_ONCE, 20)  # beyond `LONGEST_S`, below the overflow of a float
        self.retry_at = now + min(LONGEST_S, FIRST_S * 2.0**doublings)
        return True

    def loaded(self, now: Seconds) -> None:
        """A load succeeded: calls are accepted. The failures count until the worker has proved steady."""
        self.loaded_at = now
        self.retry_at = now
        self.reason = None

    def served(self, now: Seconds, cold: bool) -> bool:
        """
        A call succeeded. Return whether the failures are over.

        :param cold: its worker was loaded for it
        """
        self.reason = None
        return cold or (self.loaded_at is not None and now - self.loaded_at >= STEADY_S)

    def doc(self, now: Seconds) -> BackoffDoc:
        return BackoffDoc(
            self.failures, self.reason, now - self.since, self.retry_at - now,
            None if self.loaded_at is None else now - self.loaded_at,
        )  # fmt: skip


def restored(doc: BackoffDoc, since: Seconds) -> Backoff:
    """:param since: when *doc* was made"""
    backoff = Backoff()
    backoff.failures, backoff.reason = doc.failures, doc.reason
    backoff.since, backoff.retry_at = since - doc.for_s, since + doc.retry_in_s
    backoff.loaded_at = None if doc.loaded_for_s is None else since - doc.loaded_for_s
    return backoff
