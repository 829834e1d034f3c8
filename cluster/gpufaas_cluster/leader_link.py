"""
The link that a gateway or node keeps to the scheduler that leads. It connects again when the link breaks, or when
another scheduler leads.

`follow` says which scheduler leads, and so do schedulers that turn us away because they do not lead. A link to a
scheduler of an older epoch than was seen is closed: that one does not know yet that another one leads.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from typing import Final, Protocol, TypeVar

from gpufaas_cluster.connection import Identity, Link, NotReached, TurnedAway, connect
from gpufaas_core._types import Seconds

log = logging.getLogger(__name__)

_BACKOFF_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0)
_STANDBY_RETRY_S: Final[Seconds] = 0.1
"""A standby may lead in a moment."""
_OLDER_RETRY_S: Final[Seconds] = 0.2
T = TypeVar("T")

TWIN_S: Seconds = 10.0
"""The scheduler notices within 3 s that our own earlier run is gone. What has our id after so long is alive."""


class Party(Protocol):
    """The gateway or node that has the link."""

    def begin(self, link: Link) -> None:
        """There is a link to a leader: send what it needs to know."""

    def heard(self, message: object) -> None:
        """The leader sent a message. Messages that it sent before `end` may still come."""

    def end(self) -> None:
        """The link is over."""


class LeaderLink:
    """`run` keeps the link while `follow` says to whom. One event loop owns it."""

    def __init__(self, me: Identity, party: Party) -> None:
        self.me = me
        self.leader = ""
        """The address of the scheduler that leads; empty: none is known."""
        self.refused = ""
        """Why there is no link, if that is known; empty while there is one."""
        self.epoch = 0
        """The highest that was seen."""
        self._party = party
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    async def follow(self, leaders: AsyncIterator[str]) -> None:
        """Follow *leaders*: the addresses of schedulers that lead; empty while none does."""
        async for address in leaders:
            self.leader = address
            self._changed.set()

    async def run(self) -> None:
        """
        Keep the link until cancelled.

        :raises TurnedAway: for `TWIN_S` another one with our id was there
        """
        tries, twin_since = 0, None
        while True:
            if not self.leader:
                self._changed.clear()
                await self._changed.wait()
                continue
            address = self.leader
            try:
                link = await self._connect(address)
            except (NotReached, TurnedAway) as exc:
                if not isinstance(exc, TurnedAway) or exc.code != "duplicate":
                    twin_since = None
                elif twin_since is None:
                    twin_since = self._loop.time()
                elif self._loop.time() - twin_since > TWIN_S:
                    raise
                tries = await self._wait_after(exc, address, tries)
                continue
            tries, twin_since = 0, None
            if link.epoch < self.epoch:
                link.close("an older scheduler")
                await asyncio.sleep(_OLDER_RETRY_S)
                continue
            why = await self._attend(link, address)
            log.warning("scheduler.lost address=%s reason=%s", address, why)

    async def _wait_after(self, exc: NotReached | TurnedAway, address: str, tries: int) -> int:
        """Wait after a failed try; return how many have failed in a row."""
        if is_standby := isinstance(exc, TurnedAway) and exc.code == "not_leader":
            self.leader = exc.leader or self.leader
        elif str(exc) != self.refused:
            log.warning("scheduler.unreachable address=%s reason=%s", address, exc)
        self.refused = str(exc)
        if isinstance(exc, NotReached) and self.leader not in ("", address):
            return 0
        self._changed.clear()
        delay_s = _STANDBY_RETRY_S if is_standby else _BACKOFF_S[min(tries, len(_BACKOFF_S) - 1)]
        try:
            await asyncio.wait_for(self._changed.wait(), delay_s * random.uniform(0.8, 1.2))
        except TimeoutError:
            return tries + 1
        return 0  # another scheduler leads

    async def _attend(self, link: Link, address: str) -> str:
        """Use *link* as long as it lives and its scheduler leads; return why that ended."""
        self.epoch, self.refused = link.epoch, ""
        try:
            self._party.begin(link)
            log.info("scheduler.connected address=%s epoch=%d", address, link.epoch)
            return await self._until_moved(address, link.attend(self._party.heard)) or "another one leads"
        finally:
            link.close(f"this {self.me.role} goes elsewhere")
            self._party.end()

    async def _connect(self, address: str) -> Link:
        """
        Return a link to the leader at *address*. Stop when another one leads: a suspended scheduler still takes
        connections, and does not answer.

        :raises NotReached: it does not answer, or another one leads now
        :raises TurnedAway: it refused us
        """
        link = await self._until_moved(address, self._loop.create_task(connect(address, self.me)))
        if link is None:
            raise NotReached(f"{address} did not answer, and another one leads")
        return link

    async def _until_moved(self, address: str, work: asyncio.Future[T]) -> T | None:
        """Return what *work* gives; None: another scheduler than that at *address* led before, and it is cancelled."""
        moved = self._loop.create_task(self._moved(address))
        try:
            await asyncio.wait((work, moved), return_when=asyncio.FIRST_COMPLETED)
            return work.result() if work.done() else None
        finally:
            moved.cancel()
            work.cancel()

    async def _moved(self, address: str) -> None:
        """Return when another scheduler leads. If none does, wait: etcd may be down."""
        while self.leader in ("", address):
            self._changed.clear()
            await self._changed.wait()
