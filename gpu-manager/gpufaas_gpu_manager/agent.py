"""
A node's end of the link to the scheduler: facts go up, commands come down.

The link is made anew whenever it breaks, to whoever leads then, and begins with a snapshot of what is here. Facts of
the time between are not kept: the snapshot has what is left of them. The node goes on serving calls that have a lease.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final

import msgspec

from gpufaas_core import wire
from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.connection import Identity, Link, NotReached, TurnedAway, connect
from gpufaas_core.errors import GpufaasError
from gpufaas_core.messages import Abort, Event, Evict, Load, Resize, Start
from gpufaas_core.model import FunctionId, Seconds
from gpufaas_gpu_manager.node import Node

log = logging.getLogger(__name__)

_BACKOFF_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0)
_USED_EVERY_S: Final[Seconds] = 1.0


class Agent:
    """
    `run` keeps the link; `report` is what the node is given to tell its facts to. One event loop owns it.

    `connected` says whether a scheduler hears us; `refused` why the last one did not want us.
    """

    def __init__(
        self,
        me: Identity,
        address: str,
        *,
        prepare: Callable[[WorkerSpec], None] = lambda _: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        :param address: where gateways reach the node's door
        :param prepare: told of revisions whose bundle should be here soon, whether or not anybody calls them
        """
        self.me = me
        self.address = address
        self.node: Node | None = None
        self.leader = ""
        self.refused = ""
        self.note = ""
        self._prepare = prepare
        self._clock = clock
        self._link: Link | None = None
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._epoch = 0
        self._tasks: set[asyncio.Task[object]] = set()

    @property
    def connected(self) -> bool:
        return self._link is not None

    def report(self, fact: Event) -> None:
        """Tell the scheduler; nothing is kept while there is none."""
        if self._link is not None:
            self._link.send(wire.Fact(fact))

    def tell(self, note: str) -> None:
        """Have people see *note* beside this node; empty: it is over."""
        self.note = note
        if self._link is not None:
            self._link.send(wire.Noted(note))

    async def follow(self, leaders: AsyncIterator[str]) -> None:
        """Learn from *leaders* who leads: addresses, empty while nobody does."""
        async for address in leaders:
            self.leader = address
            self._changed.set()

    async def run(self) -> None:
        """Keep the link until cancelled."""
        tries = 0
        while True:
            if not self.leader:
                self._changed.clear()
                await self._changed.wait()
                continue
            address = self.leader
            try:
                link = await self._connect(address)
            except (NotReached, TurnedAway) as exc:
                if isinstance(exc, TurnedAway) and exc.code == "not_leader":
                    if exc.leader not in ("", address):
                        self.leader = exc.leader
                elif str(exc) != self.refused:
                    log.warning("scheduler.unreachable address=%s reason=%s", address, exc)
                self.refused = str(exc)
                if isinstance(exc, NotReached) and self.leader not in ("", address):
                    tries = 0
                    continue
                self._changed.clear()
                is_there = isinstance(exc, TurnedAway) and exc.code == "not_leader"  # and may lead in a moment
                delay = _BACKOFF_S[1 if is_there else min(tries, len(_BACKOFF_S) - 1)] * random.uniform(0.8, 1.2)
                tries += 1
                try:
                    await asyncio.wait_for(self._changed.wait(), delay)
                    tries = 0  # somebody else leads, and may be about to begin
                except TimeoutError:
                    pass
                continue
            if link.epoch < self._epoch:
                link.close("an older scheduler")  # it does not know yet that another one leads
                await asyncio.sleep(_BACKOFF_S[2])
                continue
            tries = 0
            why = await self._serve(link, address)
            log.warning("scheduler.lost address=%s reason=%s", address, why)

    async def _serve(self, link: Link, address: str) -> str:
        """Obey the scheduler behind *link* for as long as it is there and leads; return why that ended."""
        node = self.node
        assert node is not None
        lost: asyncio.Future[str] = self._loop.create_future()
        link.attend(self._heard, lambda why: None if lost.done() else lost.set_result(why))
        self._epoch, self.refused = link.epoch, ""
        node.obey(link.epoch)
        link.send(wire.Joining(self.address, _encoded(node), self._clock()))
        self._link = link
        if self.note:
            link.send(wire.Noted(self.note))
        log.info("scheduler.connected address=%s epoch=%d", address, link.epoch)
        self._changed.clear()
        moved = self._loop.create_task(self._moved(address))
        used = self._loop.create_task(self._tell_used(link, node))
        try:
            await asyncio.wait((lost, moved), return_when=asyncio.FIRST_COMPLETED)
            return lost.result() if lost.done() else "another one leads"
        finally:
            self._link = None
            moved.cancel()
            used.cancel()
            link.close("this node goes elsewhere")

    async def _connect(self, address: str) -> Link:
        """
        Return a link to *address*, as long as it is the leader's: one that stands still takes connections, too.

        :raises NotReached: nobody answers, or somebody else leads now
        :raises TurnedAway: it does not want us
        """
        connecting = self._loop.create_task(connect(address, self.me))
        moved = self._loop.create_task(self._moved(address))
        try:
            await asyncio.wait((connecting, moved), return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                raise NotReached(f"{address} did not answer, and another one leads")
            return connecting.result()
        finally:
            moved.cancel()
            connecting.cancel()

    async def _moved(self, address: str) -> None:
        """Return when somebody else leads. That nobody does is no reason to leave: the store may be down."""
        while self.leader in ("", address):
            self._changed.clear()
            await self._changed.wait()

    async def _tell_used(self, link: Link, node: Node) -> None:
        """CPU time of the workers, which some scaling rules go by; said only when it changed."""
        before: dict[FunctionId, Seconds] = {}
        while True:
            await asyncio.sleep(_USED_EVERY_S)
            now = await asyncio.to_thread(node.cpu_seconds)
            if now != before:
                before = now
                link.send(wire.Used(now))

    def _heard(self, message: Any) -> None:
        node = self.node
        assert node is not None
        if type(message) is wire.Do:
            command = message.command
            if isinstance(command, Start):
                node.open(command.lease)
            elif isinstance(command, Abort):
                node.abort(command.call, command.device)
            elif isinstance(command, Resize):
                node.resize(command.function, command.device, command.memory, command.copy)
            elif isinstance(command, Load):
                node.load(command)
            elif isinstance(command, Evict):
                node.evict(command.function, command.device, command.copy)
        elif type(message) is wire.Check:
            for call, device in message.doubted:
                node.settle(call, device)
            if self._link is not None:
                self._link.send(wire.Holds(message.number, _encoded(node)))
        elif type(message) is wire.Define:
            node.expect(message.worker)
            if message.worker.image:
                self._spawn(self._pull(node, message.worker))
            elif message.fetch:
                self._prepare(message.worker)
        elif type(message) is wire.Forget:
            self._spawn(node.forget(message.function))

    def _spawn(self, work: Coroutine[Any, Any, object]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pull(self, node: Node, spec: WorkerSpec) -> None:
        """Have the image here before somebody calls it."""
        try:
            await node.define(spec)
        except GpufaasError as exc:
            log.warning("image.not_pulled image=%s reason=%s", spec.image, exc)


def _encoded(node: Node) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(node.snapshot()))
