"""
Calls that a scheduler at the other end of a link places (port: `ports.PlacementPort`).

While no scheduler leads, calls of functions that the last view shows ready go straight to their node
(`_without_leader`). Others wait for a leader, `NO_LEADER_S` at most.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from gpufaas_cluster import control
from gpufaas_cluster.connection import Link
from gpufaas_cluster.error_codes import make_error
from gpufaas_cluster.kept_grants import KeptGrants
from gpufaas_cluster.placed_call import GRANTED, GRANTED_AGAIN, KEPT, WAITING, PlacedCall
from gpufaas_core.errors import GrantRefused
from gpufaas_core.messages import Grant, Outer
from gpufaas_core.model import Asked, CallId, DeviceId, FunctionId, NodeId, Part, Seconds, gateway_of, node_of

log = logging.getLogger(__name__)

NO_LEADER_S: Final[Seconds] = 10.0
"""How long a call waits for a scheduler to lead."""
WITHOUT_LEADER: Final = -1
"""The number of a grant that no scheduler granted."""


class RemotePlacement:
    """The calls of one gateway. `RemoteScheduler` has the link, and passes on what comes on it."""

    def __init__(self) -> None:
        self.view: control.ClusterState | None = None
        self._loop = asyncio.get_running_loop()
        self.kept = KeptGrants(self._loop, self._give_back)
        self._link: Link | None = None
        self._epoch = 0
        self._calls: dict[CallId, PlacedCall] = {}
        """All that have not ended, by the scheduler's id."""
        self._sent: dict[CallId, CallId] = {}
        """The scheduler's ids of calls for which these are not their own."""
        self._digests: dict[FunctionId, str] = {}
        """The digest of the bundle of each deployed revision."""
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
        asked: Asked | None = None,
    ) -> Grant | asyncio.Future[Grant]:
        now = self._loop.time()
        if self.kept.idle and outer is None and not endless:
            taken = self.kept.take(function, call, now, (now + timeout_s, size, asked))
            if taken is not None:
                assert taken.grant is not None
                self._sent[call] = taken.id
                return taken.grant
        placed = PlacedCall(call, call, function, now, now + timeout_s, size, outer, endless, asked)
        self._calls[call] = placed
        if self._link is None and (grant := self._without_leader(call, function)) is not None:
            placed.granted(grant)
            return grant
        placed.future = future = self._loop.create_future()
        if self._link is not None:
            self._link.send(placed.message(now))
        else:
            self._loop.call_later(min(NO_LEADER_S, timeout_s), self._give_up, future)
        return future

    def on_grant(self, call: CallId, begin: Callable[[Grant], None]) -> None:
        """Have *begin* called with the grant of *call*, if it waits for one, before its future has it."""
        placed = self._held(call, self._sent.get(call, call))
        if placed is not None and placed.state == WAITING:
            placed.begin = begin

    def again(self, call: CallId) -> asyncio.Future[Grant]:
        """Return the next grant of *call*, whose last one was refused."""
        placed = self._held(call, self._sent.get(call, call))
        if placed is not None and placed.took is not None:
            return self._ask_after_all(call, placed.function, *placed.took)
        if placed is not None and placed.future is not None:
            return placed.future
        future: asyncio.Future[Grant] = self._loop.create_future()
        if placed is None:
            future.set_exception(GrantRefused(f"call {call} is not known any more: call again"))
            return future
        early = placed.next_grant
        placed.waits(future)
        if early is not None:
            self._granted(early)
        elif self._link is not None:
            self._link.send(control.PlaceAgain(placed.id))
        else:
            self._loop.call_later(NO_LEADER_S, self._give_up, future)
        return future

    def _ask_after_all(
        self, call: CallId, function: FunctionId, deadline: float, size: float, asked: Asked | None
    ) -> asyncio.Future[Grant]:
        """Place *call*, whose kept grant was refused, as a new one. That grant is given up."""
        self.cancel(call)
        placed = self.place(call, function, deadline - self._loop.time(), size, asked=asked)
        if not isinstance(placed, Grant):
            return placed
        future: asyncio.Future[Grant] = self._loop.create_future()
        future.set_result(placed)
        return future

    def cancel(self, call: CallId) -> None:
        placed = self._held(call, self._sent.pop(call, call))
        if placed is not None:
            del self._calls[placed.id]
            self._send(control.CancelCall(placed.id))

    def over(self, call: CallId) -> None:
        """Its caller was answered."""
        placed = self._held(call, self._sent.pop(call, call))
        if placed is None:
            return
        granted = placed.state == GRANTED
        if granted and placed.answered and not placed.stale:
            self.kept.keep(placed)
            return
        del self._calls[placed.id]
        if placed.answered or not granted:
            # Its node reports no end, and whoever leads now may be of an older release; or no call opens its grant.
            self._send(control.CancelCall(placed.id))

    def unreachable(self, grant: Grant, reason: str) -> None:
        """Report that the node of a grant could not be reached."""
        self._send(control.NodeUnreachable(grant.call, grant.device, reason, grant.epoch, grant.number))

    def may_keep(self, grant: Grant) -> PlacedCall | None:
        """Return the call that has *grant*, which begins now; None: the grant is over with its call."""
        placed = self._calls.get(grant.call)
        return placed if placed is not None and placed.until and placed.grant is grant else None

    # --- within ---

    def _held(self, call: CallId, sent: CallId) -> PlacedCall | None:
        """Return *call*, by its id at the scheduler, too; None: it has ended, and another may have its grant."""
        placed = self._calls.get(sent)
        return placed if placed is not None and placed.holder == call else None

    def _send(self, message: control.Message) -> None:
        if self._link is not None:
            self._link.send(message)

    def _give_back(self, kept: PlacedCall) -> None:
        assert kept.grant is not None
        del self._calls[kept.id]
        self._send(control.ReturnGrant(kept.id, kept.grant.device, kept.calls, kept.service_s))

    def _linked(self, link: Link) -> None:
        """A scheduler leads: say which calls run, and place again those that wait."""
        is_new, self._epoch, self._link = link.epoch != self._epoch, link.epoch, link
        waiting, running = [], []
        for each in self._calls.values():
            if each.state == WAITING:
                waiting.append(each)
            else:
                each.state, each.next_grant = GRANTED, None
                running.append(each.id)
        link.send(control.RunningCalls(running))
        link.send(control.UnreachedNodes(self._unlinked))
        now = self._loop.time()
        for each in sorted(waiting, key=lambda each: each.since):
            if each.future is None or each.future.done():
                del self._calls[each.id]
            elif is_new:  # the last leader's state has this id, and with it the call's place in the queue
                link.send(each.message(now))
            else:
                self._place_anew(each)
        if waiting:
            log.info("scheduler.placed_anew calls=%d", len(waiting))

    def _lost(self) -> None:
        """The link is lost: calls that need no leader go straight to their node, others wait for one."""
        self._link = None
        self.kept.idle.clear()
        for each in list(self._calls.values()):
            if each.state == KEPT:
                del self._calls[each.id]  # it is the scheduler's, once that hears of us again
            elif each.state != WAITING:
                each.stale = True
            else:
                # By another id: the scheduler that we lost may have granted this one elsewhere, and waits for its end.
                grant = self._without_leader(self._another_id(each.holder), each.function)
                if grant is not None:
                    self._rename(each, grant.call)
                    each.granted(grant)
                elif each.future is not None:
                    self._loop.call_later(NO_LEADER_S, self._give_up, each.future)

    def _another_id(self, call: CallId) -> CallId:
        """Return an id for *call* that the scheduler does not know; its end says the gateway, as before."""
        self._serial += 1
        suffix = f"@{gateway_of(call)}"
        return CallId(f"{call.removesuffix(suffix)}~{self._serial}{suffix}")

    def _rename(self, placed: PlacedCall, id_: CallId) -> None:
        del self._calls[placed.id]
        placed.id = self._sent[placed.holder] = id_
        self._calls[id_] = placed

    def _place_anew(self, placed: PlacedCall) -> None:
        self._rename(placed, self._another_id(placed.holder))
        self._send(placed.message(self._loop.time()))

    def _give_up(self, future: asyncio.Future[Grant]) -> None:
        if not future.done() and self._link is None:
            future.set_exception(
                GrantRefused(
                    f"no scheduler leads since {NO_LEADER_S:g} s, and no copy is known to be ready: call again"
                )
            )

    def _granted(self, grant: Grant, keep_s: Seconds = 0.0) -> None:
        placed = self._calls.get(grant.call)
        if placed is None or placed.state == KEPT:
            self._send(control.CancelCall(grant.call))  # its caller went while the grant was on its way
        elif placed.state != WAITING:
            placed.state, placed.next_grant = GRANTED_AGAIN, grant
        else:
            keeps = keep_s > 0.0 and placed.outer is None and not placed.endless
            placed.granted(grant, self._loop.time() + keep_s if keeps else 0.0)

    def _rejected(self, rejected: control.CallRejected) -> None:
        placed = self._calls.get(rejected.call)
        if placed is None or placed.future is None:
            return
        del self._calls[rejected.call]
        if not placed.future.done():
            error = make_error(rejected.code, rejected.message, rejected.retry_after_s, rejected.details)
            placed.future.set_exception(error)

    def _unknown(self, call: CallId) -> None:
        """The scheduler does not know *call* (any more)."""
        placed = self._calls.get(call)
        if placed is not None and placed.future is not None and not placed.future.done():
            self._place_anew(placed)

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
