"""The right of calls to run. A struct, since one is made for each call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from gpufaas_core.model import Seconds
from gpufaas_scheduler.world.conditions import Condition

if TYPE_CHECKING:
    from gpufaas_scheduler.world.call import Call
    from gpufaas_scheduler.world.state import Copy


class Grant(Struct, eq=False, gc=False):
    """
    The right of one or several calls of a queued function to run on a copy, from the decision until the last of them
    has ended.
    """

    number: int
    calls: tuple[Call, ...]
    copy: Copy
    compute: int
    """What it holds of the device's compute; 0: nothing, or another grant of its copy holds it for both."""
    estimate_s: Seconds = 0.0
    """Its service time, estimated when it began."""
    free_at: Seconds = 0.0
    """When it should end, with the load before it."""
    alone: bool = False
    """Certainly: it is of one call, and holds all compute of the one device of its copy."""
    open: int = 1
    """The number of its calls that have not ended."""
    neighbours: int = 0
    """The most grants that held compute of the device beside it."""
    adopted: bool = False
    """An older engine made it, or nobody: its number is not one of this engine's."""
    ended: int = 0
    """The number of its calls that had ended before it was adopted."""

    @property
    def size(self) -> int:
        """The number of calls that it was made for."""
        return len(self.calls) + self.ended

    @property
    def condition(self) -> Condition:
        return Condition(self.size, self.copy.share, self.neighbours)
