"""How a reservation follows from the measured peak of a worker's memory."""

from typing import Final

from gpufaas_core.units import Bytes, MiB

HEADROOM: Final = 1.1
HEADROOM_BYTES: Final = 16 * MiB
"""A reservation is the measured peak times `HEADROOM` plus this: allocators round up to blocks of 2 to 20 MiB, and
later inputs may be a little larger. Without it, each new peak would hit the limit before it is measured."""


def reservation(peak: Bytes) -> Bytes:
    """Return what is reserved for a worker whose peak memory was measured as *peak*."""
    return int(peak * HEADROOM) + HEADROOM_BYTES


def peak_of(reserved: Bytes) -> Bytes:
    """Return the peak that led to the reservation *reserved*, rounded up; 0: it is less than any."""
    return max(0, -int(-(reserved - HEADROOM_BYTES) // HEADROOM))
