"""
Which calls a worker has begun, in memory that it shares with its node. Behind the counts, that memory has room for
large bodies and answers (`areas`).

If it dies, the node places those again that it had not begun. The worker counts, for each slot, the calls and batches
that it begins, before any of the author's code runs; that costs no system call. The node counts what it sends. Where
memory files are forbidden, it takes all calls for begun.

The node can take back what the worker has not begun: a call behind another one, or all if the worker gives no sign
of life. It marks the number. The worker looks at the mark after it has counted a call, and does not run what is marked.
The node looks at the count some ms after it has set the mark (`GRACE_S`). So one of the two always sees what the other
wrote: if the count is below the number then, the worker will find the mark.
"""

import ctypes
import fcntl
import mmap
import os
from collections.abc import MutableSequence
from typing import Final, NamedTuple, cast

from gpufaas_core.model import Seconds
from gpufaas_functions.staged import HUGE, map_file

_NAME: Final = "gpufaas-begun"
AREAS_AT: Final = HUGE
"""The place at which the room for bodies begins."""
AREAS_BYTES: Final = 64 * 1024 * 1024
"""Of that room. It takes memory where it is used."""
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_COUNT: Final = ctypes.c_uint64
UNKNOWN: Final = -1
"""In place of a count: what was sent may all be begun."""
GRACE_S: Final[Seconds] = 0.005
"""What a processor has written is seen by all others long before."""


class Counts(NamedTuple):
    """Of each slot."""

    begun: MutableSequence[int]
    """The number of calls and batches that the worker has begun."""
    taken: MutableSequence[int]
    """The number of the call or batch that it must not begin, as `taken` writes it; 0: none."""

    def begin(self, slot: int, number: int) -> bool:
        """Count *number* as begun, at the worker. Return whether it runs: False if the node has taken it back."""
        self.begun[slot] = number
        mark = self.taken[slot]
        return not mark or not is_taken(number, mark)


def taken(number: int, calls: int) -> int:
    """Return what is written where this number of *calls*, one or two, is taken back from *number* on."""
    return 2 * number + calls - 1


def is_taken(number: int, mark: int) -> bool:
    """Return whether *number* is one of those that *mark* was written of."""
    return 0 <= number - (mark >> 1) <= (mark & 1) and mark > 0


def no_counts(slots: int, begun: int = 0) -> Counts:
    """Return counts that the other end does not see. :param begun: what they say"""
    return Counts([begun] * slots, [0] * slots)


def open_counts(slots: int) -> int:
    """
    Return the descriptor of a memory file with the counts of *slots*. A worker cannot make it smaller.

    :raises OSError: there can be no more open files
    """
    descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        try:
            os.ftruncate(descriptor, AREAS_AT + AREAS_BYTES)
        except OSError:  # files may not be as large here (RLIMIT_FSIZE): there is no room for bodies
            os.ftruncate(descriptor, 2 * slots * ctypes.sizeof(_COUNT))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def shared_in(descriptor: int, slots: int) -> "tuple[Counts, ctypes.Array[ctypes.c_char]]":
    """
    Return the counts, which both ends see, and the whole memory; *descriptor* can be closed.

    :raises MemoryError: there is no room to map it
    """
    whole = map_file(descriptor, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED)
    numbers = _COUNT * slots
    begun, taken = numbers.from_buffer(whole), numbers.from_buffer(whole, ctypes.sizeof(numbers))  # it stays mapped
    return Counts(cast(MutableSequence[int], begun), cast(MutableSequence[int], taken)), whole
