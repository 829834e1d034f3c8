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

from gpufaas_cluster import control
from gpufaas_core.messages import Grant
from gpufaas_core.model import CallId, FunctionId, Seconds

_TICK_S: Final[Seconds] = 0.01
"""A grant that no call takes is given back after one to two ticks."""
_APART_S: Final[Seconds] = 1.0
"""A call takes no grant of one whose deadline is further from its own: calls that it makes end by that deadline."""
_REMEMBERED: Final = 2000
"""Calls of which is known by which grant they ran; a scheduler remembers as many."""


class KeptGrant:
    """A grant that may be kept, or is."""

    __slots__ = ("answered", "asked", "calls", "deadline", "grant", "holder", "is_new", "service_s", "stale", "until")

    def __init__(self, grant: Grant, until: float, deadline: float) -> None:
        self.grant = grant
        self.until = until
        """No call takes it after this time."""
        self.deadline = deadline
        """That of the call to which it was granted."""
        self.holder: CallId | None = grant.calls[0]
        """The call that runs by it, by its id at this gateway."""
        self.asked: tuple[float, float, Seconds | None] | None = None
        """Deadline, size and goal of a holder that did not ask for it."""
        self.calls = 1
        """How many began by it."""
        self.service_s: Seconds = 0.0
        self.answered = False
        """The node has answered the last one, and did not report its end."""
        self.stale = False
        """The link over which it came is lost."""
        self.is_new = True
        """It is kept since the last tick."""

    def on_answer(self, run_s: Seconds) -> None:
        """The node has left the end of the call to us."""
        self.answered = True
        self.service_s += run_s


class KeptGrants:
    """:param send: sends a message to the scheduler that leads, if one does"""

    def __init__(self, loop: asyncio.AbstractEventLoop, send: Callable[[control.Message], None]) -> None:
        self.idle: dict[FunctionId, list[KeptGrant]] = {}
        """Those that no call has; the last one is taken first."""
        self._loop = loop
        self._send = send
        self._known: dict[CallId, KeptGrant] = {}
        """All, by the call to which they were granted."""
        self._ran: deque[tuple[CallId, CallId]] = deque(maxlen=_REMEMBERED)
        """Calls that ran by a grant of another one, and that one."""
        self._ticking = False

    def granted(self, grant: Grant, call: CallId, keep_s: Seconds, deadline: float) -> None:
        """*call*, of this id at the gateway, gets *grant*, which may be kept."""
        kept = self._known[grant.calls[0]] = KeptGrant(grant, self._loop.time() + keep_s, deadline)
        kept.holder = call

    def take(
        self, function: FunctionId, call: CallId, now: float, asked: tuple[float, float, Seconds | None]
    ) -> Grant | None:
        """Let *call* run by a grant that is kept for its function; None: there is none. *asked*: as in `KeptGrant`."""
        found = self.idle.get(function)
        while found and abs(asked[0] - found[-1].deadline) < _APART_S:
            kept = found.pop()
            if not found:
                del self.idle[function]
            if now < kept.until:
                kept.holder, kept.asked, kept.answered = call, asked, False
                kept.calls += 1
                self._ran.append((call, kept.grant.calls[0]))
                return kept.grant
            self._give_back(kept)
        return None

    def find(self, grant: Grant) -> KeptGrant | None:
        """Return what is known of *grant*, whose call begins now; None: it is over with its call."""
        kept = self._known.get(grant.calls[0]) if self._known else None
        return kept if kept is not None and kept.grant is grant else None

    def left(self, granted: CallId, call: CallId) -> bool:
        """Whether *call* has ended that had the grant of *granted*: we keep it, or another call has it."""
        kept = self._known.get(granted) if self._known else None
        return kept is not None and kept.holder != call

    def over(self, granted: CallId) -> None:
        """The call is over that has the grant of *granted*: keep it, or give it back."""
        kept = self._known.get(granted)
        if kept is None:
            return
        kept.holder = None
        if not kept.answered:
            del self._known[granted]  # its node has reported it
        elif kept.stale:
            del self._known[granted]
            self._send(control.CancelCall(granted))  # whoever leads now may be of an older release
        elif self._loop.time() >= kept.until:
            self._give_back(kept)
        else:
            kept.is_new = True
            self.idle.setdefault(kept.grant.function, []).append(kept)
            if not self._ticking:
                self._ticking = True
                self._loop.call_later(_TICK_S, self._tick)

    def drop(self, granted: CallId) -> KeptGrant | None:
        """The scheduler ends the grant of *granted*. Return what was known of it."""
        return self._known.pop(granted, None) if self._known else None

    def lost(self) -> None:
        """The link is lost: what runs goes on, and what is idle is the scheduler's, once it hears of us again."""
        for found in self.idle.values():
            for kept in found:
                del self._known[kept.grant.calls[0]]
        self.idle.clear()
        for kept in self._known.values():
            kept.stale = True

    def ran_by(self, call: str) -> CallId | None:
        """
        Return to which call the grant was made by which *call* ran, if that was another one. *call* may be the part of
        the id before ``#``.
        """
        sent = f"{call}#"
        return next((by for each, by in reversed(self._ran) if each == call or each.startswith(sent)), None)

    def _give_back(self, kept: KeptGrant) -> None:
        call = kept.grant.calls[0]
        self._known.pop(call, None)
        self._send(control.ReturnGrant(call, kept.grant.device, kept.calls, kept.service_s))

    def _tick(self) -> None:
        now, idle = self._loop.time(), self.idle
        self.idle = {}
        for function, found in idle.items():
            left = []
            for kept in found:
                if kept.is_new and now < kept.until:
                    kept.is_new = False
                    left.append(kept)
                else:
                    self._give_back(kept)
            if left:
                self.idle[function] = left
        self._ticking = bool(self.idle)
        if self._ticking:
            self._loop.call_later(_TICK_S, self._tick)
