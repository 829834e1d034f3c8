"""
How many calls start together, of a function whose batches adapt to its latency goal: additive increase, multiplicative
decrease (AIMD), as in Clipper (Crankshaw et al., NSDI 2017).

A full batch within the time allowed makes the next one larger by one call; one that took longer, smaller by a tenth.

The time allowed is half of the goal, while calls can keep it. Once the queue is so long that the next calls will break
the goal, only a higher throughput helps: then a batch may take all of the goal (any time, if one call alone takes more
than that), and grows above the half as long as each call costs less in a larger one.
"""

from typing import Final, NamedTuple

from msgspec import Struct

from gpufaas_core.model import Seconds

GOAL_SHARE: Final = 0.5
"""A batch may take this share of the goal: a call that just missed one waits for its end, and then for its own."""
DECREASE: Final = 0.9
INCREASE: Final = 1.0
PAYS: Final = 0.95
"""A larger batch pays if it takes at most this share of the time for each of its calls."""


class Behind(NamedTuple):
    """The next calls that wait will break the goal."""

    alone_s: Seconds
    """What one call takes by itself."""
    larger_s: Seconds
    """What a batch of one more call should take. What was not seen yet counts as the nearest one seen: it is tried."""


def next_size(
    size: float, calls: int, took_s: Seconds, goal_s: Seconds, most: int, behind: Behind | None = None
) -> float:
    """Return the size after a batch of *calls* that took *took_s*. Its whole part counts. From 1 to *most*."""
    full = calls >= int(size)
    if took_s <= goal_s * GOAL_SHARE:
        return min(float(most), size + INCREASE) if full else size
    if behind is not None:
        limit_s = goal_s if behind.alone_s <= goal_s else max(took_s, behind.larger_s)
        if took_s <= limit_s and (calls == 1 or took_s <= PAYS * behind.alone_s * calls):
            pays = behind.larger_s * calls <= PAYS * took_s * (calls + 1)
            return min(float(most), size + INCREASE) if full and pays and behind.larger_s <= limit_s else size
    return max(1.0, min(size, float(calls)) * DECREASE)


FIRST_TRIES: Final = 16
MOST_TRIES: Final = 1024


class Room(Struct):
    """
    How many calls of a batch fit into memory, after one ran out of it. Half of that one, and one more after so many
    batches of the size that is known to fit. The calls of each batch that runs out fail, so this number doubles each
    time.
    """

    calls: int
    good: int = 0
    """Batches of that size since it was set."""
    tries: int = FIRST_TRIES

    @classmethod
    def after(cls, calls: int, before: "Room | None") -> "Room":
        """A batch of *calls* ran out of memory."""
        return cls(max(1, calls // 2), 0, FIRST_TRIES if before is None else min(MOST_TRIES, before.tries * 2))

    def fitted(self, calls: int) -> None:
        """A batch of *calls* did not run out of memory. A larger one had begun before."""
        if calls == self.calls:
            self.good += 1
            if self.good >= self.tries:
                self.calls, self.good = self.calls + 1, 0
