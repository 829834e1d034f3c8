"""
How many calls start together, of a function whose batches adapt to its latency goal: additive increase, multiplicative
decrease (AIMD), as in Clipper (Crankshaw et al., NSDI 2017).

A full batch within the time allowed makes the next one larger by one call; one that took longer, smaller by a tenth.
"""

from typing import Final

from gpufaas_core.model import Seconds

GOAL_SHARE: Final = 0.5
"""A batch may take this share of the goal: a call that just missed one waits for its end, and then for its own."""
DECREASE: Final = 0.9
INCREASE: Final = 1.0


def next_size(size: float, calls: int, took_s: Seconds, goal_s: Seconds, most: int) -> float:
    """Return the size after a batch of *calls* that took *took_s*. Its whole part counts. From 1 to *most*."""
    if took_s > goal_s * GOAL_SHARE:
        return max(1.0, min(size, float(calls)) * DECREASE)
    return min(float(most), size + INCREASE) if calls >= int(size) else size
