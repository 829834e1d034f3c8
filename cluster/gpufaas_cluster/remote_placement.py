"""
Calls that a scheduler at the other end of a link places (port: `ports.PlacementPort`).

While no scheduler leads, calls of functions that the last view shows ready go straight to their node
(`_without_leader`). Others wait for a leader, `NO_LEADER_S` at most.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gpufaas_cluster import control
from gpufaas_cluster.connection import Link
from gpufaas_cluster.error_codes import make_error
from gpufaas_cluster.kept_grants import KeptGrants
from gpufaas_core.errors import GrantRefused
from gpufaas_core.messages import Grant, Outer
from gpufaas_core.model import CallId, DeviceId, FunctionId, NodeId, Part, Seconds, gateway_of, node_of

log = logging.getLogger(__name__)

NO_LEADER_S: Final[Seconds] = 10.0
"""How long a call waits for a scheduler to lead."""
WITHOUT_LEADER: Final = -1
"""The number of a grant that no scheduler granted."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A call that has no grant yet. `size` and what follows it as in `Arrived`."""

    call: CallId
    """Its id at this gateway."""
    sent: CallId
    """Its id at the scheduler: another one after each reconnection, since what it knows may be half over."""
    function: FunctionId
    since: float
    deadline: float
    future: asyncio.Future[Grant]
    size: float = 0.0
    outer: Outer | None = None
    endless: bool = False
    goal_s: Seconds | None = None
    begin: Callable[[Grant], None] | None = None
    """See `on_grant`."""

    def granted(self, grant: Grant) -> None:
        if not self.future.done():
            if self.begin is not None:
                self.begin(grant)
            self.future.set_result(grant)

    def message(self, now: float) -> control.PlaceCall:
        left_s, age_s = self.deadline - now, now - self.since
        return control.PlaceCall(
            self.sent, self.function, left_s, age_s, self.size, self.outer, self.endless, self.goal_s
        )


class RemotePlacement:
    """The calls of one gateway. `RemoteScheduler` has the link, and passes on what comes on it."""

    def __init__(self) -> None:
        self.view: control.ClusterState | None = None
        self._loop = asyncio.get_running_loop()
        self.kept = KeptGrants(self._loop, self._send)
        self._link: Link | None = None
        self._epoch = 0
        self._waiting: dict[CallId, _Waiting] = {}
        """By the id that the scheduler knows."""
        self._sent: dict[CallId, CallId] = {}
        """Ids as sent, of calls for which they are not their own."""
        self._running: dict[CallId, FunctionId] = {}
        """Calls with a grant that are not over, by the id in it."""
        self._digests: dict[FunctionId, str] = {}
        """The digest of the bundle of each deployed revision."""
        self._early: dict[CallId, Grant] = {}
        """Grants that came before the refusal of the one before."""
        self._serial = 0
        self._ready: dict[FunctionId, list[tuple[DeviceId, int]]] | None = None
        """Copies that the view shows ready; None: look at the view first."""
        self._direct: dict[DeviceId, int] = {}
        self._unlinked: list[NodeId] = []

    def place(
        self,
        call: CallId,
        function: FunctionId,
        timeout_s: Seconds,
        size: float = 0.0,
        outer: Outer | None = None,
        endless: bool = False,
        goal_s: Seconds | None = None,
    ) -> Grant | asyncio.Future[Grant]:
        now = self._loop.time()
        if self.kept.idle and outer is None and not endless:
            kept = self.kept.take(function, call, now, (now + timeout_s, size, goal_s))
            if kept is not None:
                sent = self._sent[call] = kept.calls[0]
                self._running[sent] = function
                return kept
        future: asyncio.Future[Grant] = self._loop.create_future()
        link = self._link
        if link is None:
            grant = self._without_leader(call, function)
            if grant is not None:
                self._running[call] = function
                return grant
            self._loop.call_later(min(NO_LEADER_S, timeout_s), self._give_up, future)
        waiting = self._waiting[call] = _Waiting(
            call, call, function, now, now + timeout_s, future, size, outer, endless, goal_s
        )
        if link is not None:
            link.send(waiting.message(now))
        return future

    def on_grant(self, call: CallId, begin: Callable[[Grant], None]) -> None:
        """Have *begin* called with the grant of *call*, if it waits for one, before its future has it."""
        waiting = self._waiting.get(call)
        if waiting is not None:
            waiting.begin = begin

    def again(self, call: CallId) -> asyncio.Future[Grant]:
        """Return the next grant of *call*, whose last one was refused."""
        sent = self._sent.get(call, call)
        for each in self._waiting.values():
            if each.call == call:
                return each.future  # the next grant was made already, or will be
        dropped = self.kept.drop(sent)
        if dropped is not None and dropped.asked is not None:
            return self._ask_after_all(call, dropped.grant.function, *dropped.asked)
        function = self._running.pop(sent, None) or self._running.pop(call, None)
        future: asyncio.Future[Grant] = self._loop.create_future()
        if function is None:
            future.set_exception(GrantRefused(f"call {call} is not known any more: call again"))
            return future
        now = self._loop.time()
        self._waiting[sent] = _Waiting(call, sent, function, now, now + NO_LEADER_S * 6, future)
        granted = self._early.pop(sent, None)
        if granted is not None:
            self._granted(granted)
        elif self._link is not None:
            self._link.send(control.PlaceAgain(sent))
        else:
            self._loop.call_later(NO_LEADER_S, self._give_up, future)
        return future

    def _ask_after_all(
        self, call: CallId, function: FunctionId, deadline: float, size: float, goal_s: Seconds | None
    ) -> asyncio.Future[Grant]:
        """Place *call*, whose kept grant was refused, as a new one. That grant is given up."""
        self.cancel(call)
        placed = self.place(call, function, deadline - self._loop.time(), size, goal_s=goal_s)
        if not isinstance(placed, Grant):
            return placed
        future: asyncio.Future[Grant] = self._loop.create_future()
        future.set_result(placed)
        return future

    def cancel(self, call: CallId) -> None:
        sent = self._sent.pop(call, call)
        if self.kept.left(sent, call):
            return
        self.kept.drop(sent)
        self._waiting.pop(sent, None)
        self._running.pop(sent, None)
        self._early.pop(sent, None)
        self._send(control.CancelCall(sent))

    def over(self, call: CallId) -> None:
        """Its caller was answered."""
        sent = self._sent.pop(call, call) if self._sent else call
        if self.kept.left(sent, call):
            return
        self._running.pop(sent, None)
        self.kept.over(sent)
        if self._early and self._early.pop(sent, None) is not None:
            self._send(control.CancelCall(sent))  # no call will open it

    def unreachable(self, grant: Grant, reason: str) -> None:
        """Report that the node of a grant could not be reached."""
        self._send(control.NodeUnreachable(grant.call, grant.device, reason, grant.epoch, grant.number))

    def _send(self, message: control.Message) -> None:
        if self._link is not None:
            self._link.send(message)

    def _resend(self, link: Link, is_new: bool) -> None:
        """Place the calls that wait again. *is_new*: another scheduler leads than before."""
        now = self._loop.time()
        waiting, self._waiting = self._waiting, {}
        for each in sorted(waiting.values(), key=lambda each: each.since):
            if not is_new:
                self._place_anew(each, now)
            elif not each.future.done():
                # The last leader's state has this id, and with it the call's place in the queue.
                self._waiting[each.sent] = each
                link.send(each.message(now))
        if waiting:
            log.info("scheduler.placed_anew calls=%d", len(waiting))

    def _another_id(self, call: CallId) -> CallId:
        """Return an id for *call* that the scheduler does not know; its end says the gateway, as before."""
        self._serial += 1
        suffix = f"@{gateway_of(call)}"
        return CallId(f"{call.removesuffix(suffix)}~{self._serial}{suffix}")

    def _place_anew(self, waiting: _Waiting, now: float) -> None:
        if waiting.future.done() or self._link is None:
            return
        waiting.sent = self._sent[waiting.call] = self._another_id(waiting.call)
        self._waiting[waiting.sent] = waiting
        self._link.send(waiting.message(now))

    def _go_on_without(self) -> None:
        """Send calls that need no leader straight to their node; have the others wait for one."""
        for sent, each in list(self._waiting.items()):
            # By another id: the scheduler that we lost may have granted this one elsewhere, and waits for its end.
            grant = self._without_leader(self._another_id(each.call), each.function)
            if grant is not None:
                del self._waiting[sent]
                each.sent = self._sent[each.call] = grant.call
                self._running[grant.call] = each.function
                each.granted(grant)
            else:
                self._loop.call_later(NO_LEADER_S, self._give_up, each.future)

    def _give_up(self, future: asyncio.Future[Grant]) -> None:
        if not future.done() and self._link is None:
            future.set_exception(
                GrantRefused(
                    f"no scheduler leads since {NO_LEADER_S:g} s, and no copy is known to be ready: call again"
                )
            )

    def _granted(self, grant: Grant, keep_s: Seconds = 0.0) -> None:
        waiting = self._waiting.pop(grant.call, None)
        if waiting is None:
            if grant.call in self._running:
                # The next grant came before the refusal of the last one.
                self._early[grant.call] = grant
            else:
                self._send(control.CancelCall(grant.call))  # its caller went while the grant was on its way
            return
        self._running[grant.call] = waiting.function
        if keep_s > 0.0 and waiting.outer is None and not waiting.endless:
            self.kept.granted(grant, waiting.call, keep_s, waiting.deadline)
        waiting.granted(grant)

    def _rejected(self, rejected: control.CallRejected) -> None:
        waiting = self._waiting.pop(rejected.call, None)
        if waiting is not None and not waiting.future.done():
            waiting.future.set_exception(make_error(rejected.code, rejected.message, rejected.retry_after_s))

    def _unknown(self, call: CallId) -> None:
        """The scheduler does not know *call* (any more)."""
        waiting = self._waiting.pop(call, None)
        if waiting is not None:
            self._place_anew(waiting, self._loop.time())

    def _without_leader(self, call: CallId, function: FunctionId) -> Grant | None:
        """
        Return a grant of our own for a copy that the last view shows ready, at a node that is reached, if there is one.

        The node serves it only if the copy is there and ready, as far as the device's compute goes. So
        without a scheduler no memory is promised, and nothing is loaded.
        """
        if self.view is None:
            return None
        if self._ready is None:
            self._ready = {}
            for each in self.view.status.devices:
                for resident in each.resident:
                    if not resident.loading and not resident.draining:
                        copies = self._ready.setdefault(resident.function, [])
                        copies.append((each.device.id, resident.copy))
        copies = [each for each in self._ready.get(function, []) if node_of(each[0]) not in self._unlinked]
        if not copies:
            return None
        device, copy = min(copies, key=lambda each: self._direct.get(each[0], 0))
        self._direct[device] = self._direct.get(device, 0) + 1
        digest = self._digests.get(function, "")
        return Grant(self._epoch, WITHOUT_LEADER, (call,), function, digest, (Part(device, 0),), False, copy=copy)
