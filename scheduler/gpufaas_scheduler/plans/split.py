"""
How the waiting requests of a function are split on one GPU: some run at once (spatial sharing), the others wait (time
sharing).

`n` requests form batches of `batch`. `n - y` of them run at once, as `k = (n - y) / batch` batches that slow one
another down; `y` wait. A batch alone takes `solo` and uses the fraction `fbr` of the device's memory bandwidth. The
last request ends after ``T(y) = solo * y / batch + solo * g(k)``, with ``g(k) = max(1, k * fbr) ** p``. `p` is 1 in the
paper; measured interference grows faster.

Source: PALDIA, IPDPS 2024, equation 1. Its printed form has its optimum at an end of the range; so there is a second
objective for requests that cannot all be in time: as many as possible are.
"""

import bisect
import math
from dataclasses import dataclass
from typing import Final

from gpufaas_scheduler.plans.problem import EPSILON, Milliseconds

_LARGEST: Final = 300.0
"""`exp` of it is far beyond any number of requests, and still a float."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """What one GPU makes of one function."""

    solo: Milliseconds
    """The time of one batch alone."""
    batch: int
    fbr: float
    """Fraction of the memory bandwidth that one batch uses alone; 0.2 is 20 %."""
    p: float = 1.0
    """How interference grows with the bandwidth that is asked for; at least 1."""
    most_batches: int | None = None
    """At once, by memory or by what the driver allows."""

    def at_once(self, n: int) -> int:
        """Return how many of *n* requests may run at once."""
        return n if self.most_batches is None else min(n, self.most_batches * self.batch)

    def together(self, requests: int) -> Milliseconds:
        """Return how long so many *requests* take at once."""
        if requests == 0:
            return 0.0
        asked = requests / self.batch * self.fbr
        try:
            return self.solo * (asked**self.p if asked > 1 else 1.0)
        except OverflowError:
            return math.inf

    def last_ends(self, n: int, y: int) -> Milliseconds:
        """Return T(y)."""
        return self.solo * y / self.batch + self.together(n - y)

    def in_time(self, n: int, y: int, goal: Milliseconds) -> int:
        """Return how many of *n* requests end within *goal* when *y* of them wait until the others are done."""
        first = self.together(n - y)
        then = math.floor(max(0.0, goal - first) * self.batch / self.solo)
        return (n - y if first < goal else 0) + min(y, then)

    def peak(self) -> float:
        """
        Return how many requests at once are best, as a real number without an upper limit.

        One more at once is one less that waits for ``solo / batch``. Until the bandwidth is used up it costs nothing;
        from there on its cost grows. The peak is where both are equal. It is the least T as well as the most in time.
        """
        if self.fbr == 0 or (self.p == 1 and self.fbr <= 1):
            return math.inf
        full = self.batch / self.fbr
        if self.p * self.fbr >= 1:
            return full
        exponent = -math.log(self.p * self.fbr) / (self.p - 1)
        return full * math.exp(exponent) if exponent < _LARGEST else math.inf


@dataclass(frozen=True, slots=True)
class Split:
    y: int
    """Requests that wait."""
    ends: Milliseconds | None
    """The last request; `None` when not all can be in time."""
    in_time: int


def split(n: int, sharing: Sharing, goal: Milliseconds) -> Split:
    """
    Return the split of *n* requests whose last one ends first; when that is not before *goal*, the one with most in
    time.

    Of equal splits, the one in which fewer wait. O(1) when all can be in time.
    """
    y, ends = 0, sharing.solo
    if n > sharing.batch:
        y, *others = _beside_the_peak(n, sharing)
        ends = sharing.last_ends(n, y)
        for other in others:
            if (found := sharing.last_ends(n, other)) < ends - EPSILON:
                y, ends = other, found
    if ends < goal - EPSILON:
        return Split(y, ends, n)
    y = _most_in_time(n, sharing, goal)
    return Split(y, None, sharing.in_time(n, y, goal))


def _beside_the_peak(n: int, sharing: Sharing) -> list[int]:
    """Return the y of which one has the least T, ascending. T is convex: that y lies beside the peak, or at an end."""
    most, peak = sharing.at_once(n), sharing.peak()
    at_once = {most} if peak >= most else {max(1, math.floor(peak)), math.floor(peak) + 1}
    return sorted(n - x for x in at_once)


def _most_in_time(n: int, sharing: Sharing, goal: Milliseconds) -> int:
    """
    Return the least y with most requests in time.

    Before it is rounded down, their number is concave in the requests that run at once, as long as those are in time.
    So the search goes from the peak to both sides, as far as the best number can still be reached.
    """
    allowed = range(1, sharing.at_once(n) + 1)
    most = bisect.bisect_left(allowed, goal, key=sharing.together)  # so many at once are in time
    best_y = n
    best = sharing.in_time(n, n, goal)
    if best == 0 and most == 0:
        return n - len(allowed)
    peak = math.floor(min(sharing.peak(), most))
    for side in (range(peak + 1, most + 1), range(peak, 0, -1)):
        for x in side:
            wait = (goal - sharing.together(x)) * sharing.batch / sharing.solo  # so many more have time to wait
            if min(n, x + wait) < best - EPSILON:
                break
            found = x + min(n - x, math.floor(wait))
            if found > best or (found == best and n - x < best_y):
                best_y, best = n - x, found
    return best_y
