"""
Grants that this gateway keeps when their call has ended, so that the next call of the function need not ask for one.

The scheduler says which may be kept, and how long (`control.Granted`). Their node says with each answer that it has not
reported the end of the call (`NodeAnswerHead.kept`): then the grant is ours until we give it back. In all other cases
it is over with the call, as any grant. The scheduler knows a kept grant, and whatever runs by it, by its first call.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from gpufaas_cluster.placed_call import GRANTED, KEPT, PlacedCall
from gpufaas_core.model import Asked, CallId, FunctionId, Seconds

_TICK_S: Final[Seconds] = 0.01
"""A grant that no call takes is given back after one to two ticks."""
_APART_S: Final[Seconds] = 1.0
"""A call takes no grant of one whose deadline is further from its own: calls that it makes end by that deadline."""
_NOBODY: Final = CallId("")
_REMEMBERED: Final = 2000
"""Calls of which is known by which grant they ran; a scheduler remembers as many."""


class KeptGrants:
    """:param give_back: ends a kept grant"""

    def __init__(self, loop: asyncio.AbstractEventLoop, give_back: Callable[[PlacedCall], None]) -> None:
        self.idle: dict[FunctionId, list[PlacedCall]] = {}
        """Those that no call has; the last one is taken first."""
        self._loop = loop
        self._give_back = give_back
        self._ran: deque[tuple[CallId, CallId]] = deque(maxlen=_REMEMBERED)
        """Calls that ran by a grant of another one, and that one."""
        self._ticking = False

    def take(
        self, function: FunctionId, call: CallId, now: float, took: tuple[float, float, Asked | None]
    ) -> PlacedCall | None:
        """Let *call* run by a grant that is kept for its function; None: there is none. *took*: see `PlacedCall`."""
        found = self.idle.get(function)
        while found and abs(took[0] - found[-1].deadline) < _APART_S:
            placed = found.pop()
            if not found:
                del self.idle[function]
            if now < placed.until:
                placed.state, placed.holder, placed.took, placed.answered = GRANTED, call, took, False
                placed.calls += 1
                self._ran.append((call, placed.id))
                return placed
            self._give_back(placed)
        return None

    def keep(self, placed: PlacedCall) -> None:
        """The call has ended that has the grant: keep it for the next one, or give it back."""
        placed.state, placed.holder, placed.is_new = KEPT, _NOBODY, True
        if self._loop.time() >= placed.until:
            self._give_back(placed)
            return
        self.idle.setdefault(placed.function, []).append(placed)
        if not self._ticking:
            self._ticking = True
            self._loop.call_later(_TICK_S, self._tick)

    def ran_by(self, call: str) -> CallId | None:
        """
        Return to which call the grant was made by which *call* ran, if that was another one. *call* may be the part of
        the id before ``#``.
        """
        sent = f"{call}#"
        return next((by for each, by in reversed(self._ran) if each == call or each.startswith(sent)), None)

    def _tick(self) -> None:
        now, idle = self._loop.time(), self.idle
        self.idle = {}
        for function, found in idle.items():
            left = []
            for placed in found:
                if placed.is_new and now < placed.until:
                    placed.is_new = False
                    left.append(placed)
                else:
                    self._give_back(placed)
            if left:
                self.idle[function] = left
        self._ticking = bool(self.idle)
        if self._ticking:
            self._loop.call_later(_TICK_S, self._tick)
