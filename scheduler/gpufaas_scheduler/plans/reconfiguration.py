"""
How a function moves to other hardware: in phases that survive a crash, because each can be begun again.

The old hardware serves until the route is switched; from provisioning to release both are paid for. Pure: the caller
does what `phase` says, tells what came of it, and keeps the phase where it outlives a crash.

Source: PALDIA, IPDPS 2024, reconfiguration of hardware.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Final

from gpufaas_core._types import Seconds

PROVISION_LIMIT: Final[Seconds] = 300.0
DRAIN_LIMIT: Final[Seconds] = 60.0


class Phase(StrEnum):
    """What is being done, in this order."""

    PROVISION = "provision"
    """Get a node of the target type, or take one that is there."""
    START = "start"
    """Start the containers, and wait until they are ready."""
    SWITCH = "switch"
    """Send new calls to the new hardware, by one atomic write."""
    DRAIN = "drain"
    """Let the calls on the old hardware end."""
    RELEASE = "release"
    """Give the old hardware back, unless other functions use it."""
    DONE = "done"
    GIVEN_UP = "given-up"
    """The old hardware serves on."""


_NEXT: Final[Mapping[Phase, Phase]] = dict(pairwise(each for each in Phase if each is not Phase.GIVEN_UP))
_BEFORE_THE_SWITCH: Final = (Phase.PROVISION, Phase.START)


@dataclass(frozen=True, slots=True)
class Reconfiguration:
    """One move of one function; a value, so that it can be kept and taken up by another process."""

    function: str
    target: str
    others: tuple[str, ...]
    """Types that would do as well, cheapest first: tried in turn when the target cannot be had."""
    since: Seconds
    """When the phase began."""
    phase: Phase = Phase.PROVISION
    begun: Seconds | None = None
    """When the first phase began; `None`: with this one."""

    @property
    def pays_for_both(self) -> bool:
        """Whether old and new hardware are held."""
        return self.phase in (Phase.START, Phase.SWITCH, Phase.DRAIN, Phase.RELEASE)

    def succeeded(self, now: Seconds) -> "Reconfiguration":
        """Return the move after what it was doing is done."""
        return self._to(_NEXT.get(self.phase, self.phase), now)

    def failed(self, now: Seconds, limit: Seconds = PROVISION_LIMIT) -> "Reconfiguration":
        """
        Return the move after what it was doing failed.

        Before the switch, the next type is tried, until there is none or *limit* is over since the first; then it is
        given up. From the switch on there is no way back: the same is done again.
        """
        if self.phase not in _BEFORE_THE_SWITCH:
            return self._to(self.phase, now)
        if not self.others or now - self._first >= limit:
            return self._to(Phase.GIVEN_UP, now)
        return replace(self._to(Phase.PROVISION, now), target=self.others[0], others=self.others[1:])

    def waited(self, in_flight: int, now: Seconds, limit: Seconds = DRAIN_LIMIT) -> "Reconfiguration":
        """Return the move after a look at the calls *in_flight* on the old hardware: drained, or *limit* is over."""
        if self.phase is Phase.DRAIN and (in_flight == 0 or now - self.since >= limit):
            return self.succeeded(now)
        return self

    @property
    def _first(self) -> Seconds:
        return self.since if self.begun is None else self.begun

    def _to(self, phase: Phase, now: Seconds) -> "Reconfiguration":
        return replace(self, phase=phase, since=now, begun=self._first)
