"""
The scheduler at the other end of a link (ports: `invoke.PlacementPort`, `ports.Scheduler`).

One connection to the scheduler that leads, with any number of calls in flight on it. While there is no leader, calls to
models that the last view shows ready go straight to their node (`_without_leader`); the others wait for one, within
`PATIENCE_S`. A new connection, to the same scheduler or to the next, begins with what this gateway has: calls that run
are named, those that wait are placed again with their age.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

import msgspec

from gpufaas_core import wire
from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.connection import Identity, Link
from gpufaas_core.errors import InvalidSpec, LeaseRefused, UnknownFunction
from gpufaas_core.leader_link import LeaderLink
from gpufaas_core.messages import Lease, Outer
from gpufaas_core.model import CallId, DeviceId, EngineStatus, Explanation, Function, FunctionId, NodeId, Seconds

log = logging.getLogger(__name__)

PATIENCE_S: Final[Seconds] = 10.0
"""How long a call waits for a scheduler that leads."""
WITHOUT_LEADER: Final = -1
"""The number of a lease that no scheduler granted."""
_NOBODY: Final = EngineStatus("", (), {}, {})


class _Waiting:
    """A call that has no lease yet."""

    __slots__ = (
        "call", "deadline", "endless", "function", "future", "outer", "retold", "sent", "since", "size",
    )  # fmt: skip

    def __init__(
        self, call: CallId, function: FunctionId, since: float, deadline: float, future: asyncio.Future[Lease]
    ) -> None:
        self.call = call
        """As its gateway calls it."""
        self.sent = call
        """As the scheduler knows it: another one after each reconnection, since what it knows may be half over."""
        self.function = function
        self.since = since
        self.deadline = deadline
        self.future = future
        self.size = 0.0
        """Of its request; 0.0 if that is not known."""
        self.outer: Outer | None = None
        self.endless = False
        self.retold = False
        """Its function was said to be unknown, and was told about once more."""


def _place(call: _Waiting, now: float) -> wire.Place:
    left_s, age_s = call.deadline - now, now - call.since
    return wire.Place(call.sent, call.function, left_s, age_s, call.size, call.outer, call.endless)


class RemoteScheduler:
    """See module. `leaders` keeps the connection; one event loop owns it."""

    def __init__(self, me: Identity, *, on_view: Callable[[wire.View], None] = lambda _: None) -> None:
        """:param on_view: told of nodes and residents when they change"""
        self.me = me
        self.name = f"{me.id}.{me.boot}"
        self.view: wire.View | None = None
        self.leaders = LeaderLink(me, self)
        self._on_view = on_view
        self._loop = asyncio.get_running_loop()
        self._link: Link | None = None
        self._epoch = 0
        self._waiting: dict[CallId, _Waiting] = {}
        """By the id that the scheduler knows."""
        self._sent: dict[CallId, CallId] = {}
        """Ids as sent, of calls for which they are not their own."""
        self._running: dict[CallId, FunctionId] = {}
        """Calls with a lease that are not over, by the id in it."""
        self._functions: dict[FunctionId, tuple[Function, WorkerSpec]] = {}
        self._early: dict[CallId, Lease] = {}
        """Leases that came before the refusal of the one before."""
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._serial = 0
        self._ready: dict[FunctionId, list[tuple[DeviceId, int]]] | None = None
        self._direct: dict[DeviceId, int] = {}
        self._unlinked: list[NodeId] = []

    # --- the invocation path ---

    def place(
        self,
        call: CallId,
        function: FunctionId,
        timeout_s: Seconds,
        size: float = 0.0,
        outer: Outer | None = None,
        endless: bool = False,
    ) -> Lease | asyncio.Future[Lease]:
        now = self._loop.time()
        future: asyncio.Future[Lease] = self._loop.create_future()
        link = self._link
        if link is None:
            lease = self._without_leader(call, function)
            if lease is not None:
                self._running[call] = function
                return lease
            self._loop.call_later(min(PATIENCE_S, timeout_s), self._give_up, future)
        waiting = self._waiting[call] = _Waiting(call, function, now, now + timeout_s, future)
        waiting.size, waiting.outer, waiting.endless = size, outer, endless
        if link is not None:
            link.send(_place(waiting, now))
        return future

    def again(self, call: CallId) -> asyncio.Future[Lease]:
        """Return the next lease of *call*, whose last one was refused."""
        sent = self._sent.get(call, call)
        for each in self._waiting.values():
            if each.call == call:
                return each.future  # it was granted anew already, or is about to be
        function = self._running.pop(sent, None) or self._running.pop(call, None)
        future: asyncio.Future[Lease] = self._loop.create_future()
        if function is None:
            future.set_exception(LeaseRefused(f"call {call} is not known any more: call again"))
            return future
        now = self._loop.time()
        waiting = self._waiting[sent] = _Waiting(call, function, now, now + PATIENCE_S * 6, future)
        waiting.sent = sent
        granted = self._early.pop(sent, None)
        if granted is not None:
            self._granted(granted)
        elif self._link is not None:
            self._link.send(wire.Again(sent))
        else:
            self._loop.call_later(PATIENCE_S, self._give_up, future)
        return future

    def cancel(self, call: CallId) -> None:
        sent = self._sent.pop(call, call)
        self._waiting.pop(sent, None)
        self._running.pop(sent, None)
        if self._link is not None:
            self._link.send(wire.Cancel(sent))

    def over(self, call: CallId) -> None:
        """Its caller was answered."""
        sent = self._sent.pop(call, call) if self._sent else call
        self._running.pop(sent, None)
        if self._early and self._early.pop(sent, None) is not None and self._link is not None:
            self._link.send(wire.Cancel(sent))  # nobody will open it

    def unreachable(self, call: CallId, device: DeviceId, reason: str) -> None:
        """The node of a lease could not be reached. *call* as in the lease."""
        if self._link is not None:
            self._link.send(wire.Unreachable(call, device, reason))

    def unlinked(self, nodes: list[NodeId]) -> None:
        """The doors of *nodes* are not reached from here."""
        if nodes != self._unlinked:
            self._unlinked = nodes
            if self._link is not None:
                self._link.send(wire.Unlinked(nodes))

    # --- management ---

    def deploy(self, function: Function, worker: WorkerSpec) -> None:
        self._functions[function.id] = (function, worker)
        if self._link is not None:
            self._link.send(wire.Deploy(function, worker))

    def remove(self, function: FunctionId, drain: bool) -> None:
        self._functions.pop(function, None)
        if self._link is not None:
            self._link.send(wire.Remove(function, drain))

    def scale(self, function: FunctionId, copies: int) -> None:
        if self._link is None:
            raise LeaseRefused("no scheduler leads at the moment: scale again in a few seconds")
        self._link.send(wire.Scale(function, copies))

    def counted(self, functions: dict[str, tuple[int, int, int, int]]) -> None:
        if self._link is not None:
            self._link.send(wire.Counted(functions))

    def status(self) -> EngineStatus:
        """As the scheduler last said it: at most half a second old while one leads."""
        return _NOBODY if self.view is None else self.view.status

    async def explain(self, call: CallId) -> Explanation | None:
        found: Explanation | None = msgspec.json.decode(await self.ask("explain", call), type=Explanation | None)
        return found

    async def ask(self, what: str, value: str) -> bytes:
        """
        Return the scheduler's answer, JSON.

        :raises InvalidSpec: what was asked cannot be
        :raises LeaseRefused: no scheduler leads, or it went away
        """
        if self._link is None:
            raise LeaseRefused("no scheduler leads at the moment: ask again in a few seconds")
        self._serial += 1
        number = self._serial
        future = self._asked[number] = self._loop.create_future()
        self._link.send(wire.Ask(number, what, value))
        try:
            answer: bytes = await asyncio.wait_for(future, PATIENCE_S)
        except TimeoutError:
            raise LeaseRefused("the scheduler does not answer: ask again in a few seconds") from None
        finally:
            self._asked.pop(number, None)
        return answer

    def nodes(self) -> list[wire.NodeView]:
        return [] if self.view is None else self.view.nodes

    async def drain(self, node: str, drain: bool) -> None:
        await self.ask("drain" if drain else "undrain", node)

    @property
    def connected(self) -> bool:
        return self._link is not None

    # --- the connection ---

    def begin(self, link: Link) -> None:
        is_new, self._epoch = link.epoch != self._epoch, link.epoch
        self._link = link
        self._early.clear()
        link.send(wire.Present(list(self._running)))
        link.send(wire.Unlinked(self._unlinked))
        now = self._loop.time()
        waiting, self._waiting = self._waiting, {}
        for each in sorted(waiting.values(), key=lambda each: each.since):
            if not is_new:
                self._place_anew(each, now)
            elif not each.future.done():
                # What its predecessor left has this id, and with it the call's place in the queue.
                self._waiting[each.sent] = each
                link.send(_place(each, now))
        if waiting:
            log.info("scheduler.placed_anew calls=%d", len(waiting))

    def _another_id(self, sent: CallId) -> CallId:
        self._serial += 1
        stem, _, name = sent.rpartition("@")
        return CallId(f"{stem.partition('~')[0]}~{self._serial}@{name}")

    def _place_anew(self, waiting: _Waiting, now: float) -> None:
        if waiting.future.done() or self._link is None:
            return
        waiting.sent = self._sent[waiting.call] = self._another_id(waiting.sent)
        self._waiting[waiting.sent] = waiting
        self._link.send(_place(waiting, now))

    def end(self) -> None:
        self._link = None
        for question in self._asked.values():
            if not question.done():
                question.set_exception(LeaseRefused("the scheduler went away: ask again in a few seconds"))
        self._asked.clear()
        # Those that can do without a leader do so; the others have until their patience is over.
        for sent, each in list(self._waiting.items()):
            # By another id: the scheduler that we lost may have granted this one elsewhere, and would wait for its end.
            lease = self._without_leader(self._another_id(sent), each.function)
            if lease is not None:
                del self._waiting[sent]
                each.sent = self._sent[each.call] = lease.call
                self._running[lease.call] = each.function
                if not each.future.done():
                    each.future.set_result(lease)
            else:
                self._loop.call_later(PATIENCE_S, self._give_up, each.future)

    def _give_up(self, future: asyncio.Future[Lease]) -> None:
        if not future.done() and self._link is None:
            future.set_exception(
                LeaseRefused(f"no scheduler leads since {PATIENCE_S:g} s, and no copy is known to be ready: call again")
            )

    def heard(self, message: Any) -> None:
        kind = type(message)
        if kind is wire.Granted:
            self._granted(message.lease)
        elif kind is wire.Rejected:
            self._rejected(message)
        elif kind is wire.Unknown:
            waiting = self._waiting.pop(message.call, None)
            if waiting is not None:
                self._place_anew(waiting, self._loop.time())
        elif kind is wire.View:
            self.view = message
            self._ready = None
            self._on_view(message)
        elif kind is wire.Answered:
            future = self._asked.pop(message.number, None)
            if future is not None and not future.done():
                if message.error:
                    future.set_exception(InvalidSpec(message.error))
                else:
                    future.set_result(message.value)

    def _granted(self, lease: Lease) -> None:
        waiting = self._waiting.pop(lease.call, None)
        if waiting is None:
            if lease.call in self._running:
                # Granted anew before its refusal is known here.
                self._early[lease.call] = lease
            elif self._link is not None:
                self._link.send(wire.Cancel(lease.call))  # its caller went while the lease was on its way
            return
        self._running[lease.call] = waiting.function
        if not waiting.future.done():
            waiting.future.set_result(lease)

    def _rejected(self, rejected: wire.Rejected) -> None:
        waiting = self._waiting.pop(rejected.call, None)
        if waiting is None:
            return
        error = wire.make_error(rejected.code, rejected.message, rejected.retry_after_s)
        known = self._functions.get(waiting.function)
        if isinstance(error, UnknownFunction) and known is not None and not waiting.retold and self._link is not None:
            # It was deployed a moment ago, by another gateway: this scheduler will know it when it is told.
            waiting.retold = True
            self._link.send(wire.Deploy(*known))
            self._place_anew(waiting, self._loop.time())
            return
        if not waiting.future.done():
            waiting.future.set_exception(error)

    # --- without a leader ---

    def _without_leader(self, call: CallId, function: FunctionId) -> Lease | None:
        """
        Return a lease of our own for a copy that was ready when a scheduler was last heard; None: there is none.

        The node serves it only if the copy is there and ready, one call at a time where the device is exclusive; so no
        memory is promised, and nothing is loaded, without a scheduler.
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
        copies = self._ready.get(function, [])
        if not copies:
            return None
        known = self._functions.get(function)
        device, copy = min(copies, key=lambda each: self._direct.get(each[0], 0))
        self._direct[device] = self._direct.get(device, 0) + 1
        digest = "" if known is None else known[0].digest
        return Lease(self._epoch, WITHOUT_LEADER, call, function, digest, device, False, 0, copy=copy)
