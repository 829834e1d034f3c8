"""
Carries out the engine's orders, and keeps the ledger of them, during one term of a leader.

An order is noted before its node is started, and a release before it is stopped. So whatever a dead leader had begun is
known to the next one: `begin` tells its engine the open orders, and each look at the provider's list finishes the rest.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Final

from msgspec.structs import replace

from gpufaas_core import messages as m
from gpufaas_core._types import Seconds
from gpufaas_core.errors import StorageFailed
from gpufaas_core.model import DeviceId, FunctionId, NodeId, Offer, OrderId, name_of, node_of
from gpufaas_core.orders import NO_NODE, NodeOffer, Stay
from gpufaas_providers.ports import Held, Ledger, Provider

log = logging.getLogger(__name__)

ANSWER_S: Final[Seconds] = 60.0
"""A provider that does not answer for so long has failed."""
JOIN_S: Final[Seconds] = 60.0
"""A node may take so much longer to join than its offer says."""
LOOK_S: Final[Seconds] = 10.0
"""How often the provider is asked for its list."""
KEPT_S: Final[Seconds] = 62 * 86400.0
"""How long closed stays are kept."""


class Broker:
    """
    See module. `execute` and `joined` do not wait; `run` does the work.

    :param tell: the engine is told events by it
    :param busy: returns for how long the devices of each node were busy since they joined, in all
    :param look_s: how often the provider is asked for its list
    """

    def __init__(
        self,
        name: str,
        provider: Provider,
        offers: Sequence[NodeOffer],
        ledger: Ledger,
        tell: Callable[[m.Event], None],
        *,
        busy: Callable[[], Mapping[NodeId, Seconds]] = dict,
        clock: Callable[[], Seconds] = time.time,
        answer_s: Seconds = ANSWER_S,
        join_s: Seconds = JOIN_S,
        look_s: Seconds = LOOK_S,
    ) -> None:
        self._name, self._provider, self._ledger, self._tell, self._clock = name, provider, ledger, tell, clock
        self._offers = {each.kind: each for each in offers}
        self._answer_s, self._join_s, self._look_s = answer_s, join_s, look_s
        self.open: dict[OrderId, Stay] = {}
        """The stays that have not ended, by order."""
        self._busy: set[OrderId] = set()
        """Orders whose node is being started or stopped."""
        self._work: asyncio.Queue[Callable[[], Any]] = asyncio.Queue()
        self._writing = asyncio.Lock()
        self._begun = asyncio.Event()
        """The ledger is read: before, each node seems to be one that nobody needs."""
        self._busy_s, self._used_s = busy, dict[NodeId, Counter[str]]()

    async def begin(self) -> m.Offered:
        """Read the ledger; return what the engine is told at the start of the term. :raises StorageFailed:"""
        now = self._clock()
        for each in await self._ledger.stays():
            if not each.until:
                self.open[each.order] = each
            elif each.until < now - KEPT_S:
                await self._ledger.forget(each.order)
        orders = ((each.order, each.kind) for each in self.open.values() if not each.joined_at and not each.releasing)
        self._begun.set()
        return replace(self._offered(), ordered=tuple(orders))

    async def run(self) -> None:
        """Do what `execute` and `joined` ask, and look at the provider's list every so often, without end."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._look_on())
            while True:
                work = await self._work.get()
                tasks.create_task(work())

    def execute(self, command: m.ProcureNodes | m.ReleaseNode) -> None:
        """Order a node, or give one back. What comes of it, the engine is told later."""
        if isinstance(command, m.ProcureNodes):
            offer = self._offers[command.kind]
            stay = Stay(command.order, command.kind, self._clock(), offer.devices, offer.price_per_h)
            self.open[stay.order] = stay
            self._begin(stay.order, self._start)
            return
        found = next((each for each in self.open.values() if each.node == command.node), None)
        if found is None:
            log.warning("node.not_ordered id=%s: nobody takes it back", command.node)
        else:
            self.open[found.order] = replace(found, releasing=True)
            self._begin(found.order, self._stop)

    def joined(self, order: OrderId, node: NodeId) -> None:
        """A node has joined that names *order*, perhaps not for the first time."""
        stay = self.open.get(order)
        if stay is not None and not stay.joined_at:
            since = stay.since or self._clock()
            self.open[order] = replace(stay, node=node, since=since, joined_at=self._clock())
            self._work.put_nowait(lambda: self._note(order))

    def finished(self, device: DeviceId, function: FunctionId, seconds: Seconds) -> None:
        """Calls of *function* have ended there, which took so long in all."""
        self._used_s.setdefault(node_of(device), Counter())[name_of(function)] += seconds  # type: ignore[assignment]

    # --- within ---

    async def _note_use(self) -> None:
        busy_s, used_s, self._used_s = self._busy_s(), self._used_s, {}
        for order, stay in list(self.open.items()):
            functions = used_s.get(stay.node, Counter()) + Counter(stay.used_s)
            now = replace(stay, busy_s=max(stay.busy_s, busy_s.get(stay.node, 0.0)), used_s=dict(functions))
            if now != stay:
                self.open[order] = now
                await self._note(order)

    def _offered(self) -> m.Offered:
        there = Counter(each.kind for each in self.open.values())
        return m.Offered(
            tuple(
                Offer(each.kind, each.memory, each.devices, each.price_per_h or 0.0, each.start_s,
                      max(0, each.limit - there[each.kind]))
                for each in self._offers.values()
            )
        )  # fmt: skip

    def _begin(self, order: OrderId, work: Callable[[OrderId], Any]) -> None:
        async def do() -> None:
            try:
                await work(order)
            finally:
                self._busy.discard(order)

        self._busy.add(order)
        self._work.put_nowait(do)

    async def _start(self, order: OrderId) -> None:
        stay = self.open[order]
        offer = self._offers.get(stay.kind)
        if offer is None:
            why = f"nodes of kind {stay.kind} are not offered any more"
        elif not await self._note(order):
            why = "the order could not be noted"
        else:
            try:
                async with asyncio.timeout(self._answer_s):
                    await self._started(await self._provider.start(order, offer))
                return
            except TimeoutError:
                why = f"provider {self._name} gave no answer in {self._answer_s:g} s"
            except Exception as exc:  # of a provider's own code: its text is the reason
                why = f"provider {self._name}: {exc}"
        await self._close(order, self._clock(), why)

    async def _started(self, held: Held) -> None:
        stay = self.open.get(held.order)
        if stay is not None:
            self.open[held.order] = replace(stay, node=held.node, since=held.since)
            await self._note(held.order)

    async def _stop(self, order: OrderId) -> None:
        await self._note_use()
        stay = self.open[order]
        if await self._note(order) and await self._ended(stay.node):
            await self._close(order, self._clock())

    async def _ended(self, node: NodeId) -> bool:
        """Have the provider stop *node*; False: it did not, and is asked again."""
        try:
            async with asyncio.timeout(self._answer_s):
                await self._provider.stop(node)
        except Exception as exc:  # of a provider's own code
            log.warning("node.not_stopped id=%s reason=%s", node, exc or type(exc).__name__)
            return False
        return True

    async def _close(self, order: OrderId, until: Seconds, why: str = "") -> None:
        """The node of the order has ended, or none comes. One that comes nevertheless is found in the list."""
        stay = self.open[order]
        failed = not stay.joined_at and not stay.releasing
        since = min(stay.since or until, until)
        self.open[order] = replace(stay, since=since, until=until, why=why if failed else "")
        if not await self._note(order):
            self.open[order] = stay  # the next look tries again
            return
        del self.open[order]
        if failed:
            log.warning("order.failed order=%s kind=%s reason=%s", order, stay.kind, why)
            self._tell(m.OrderFailed(order, why))
        self._tell(self._offered())

    async def _note(self, order: OrderId) -> bool:
        """Write what is known of the order; False: it is not written."""
        async with self._writing:
            stay = self.open.get(order)
            try:
                return stay is not None and await self._ledger.put(stay)
            except StorageFailed as exc:
                log.warning("order.not_noted order=%s reason=%s", order, exc)
                return False

    async def _look_on(self) -> None:
        await self._begun.wait()
        while True:
            known = set(self.open) - self._busy  # what comes meanwhile may not be in the list
            try:
                async with asyncio.timeout(self._answer_s):
                    held = await self._provider.list()
            except Exception as exc:  # of a provider's own code
                log.warning("provider.no_list name=%s reason=%s", self._name, exc or type(exc).__name__)
            else:
                await self._note_use()
                await self._settle(held, known)
            await asyncio.sleep(self._look_s)

    async def _settle(self, held: Sequence[Held], known: Set[OrderId]) -> None:
        """
        Adopt or give back what is there, close what has ended, start what was noted only, fail what never joins.

        :param known: the orders that were open, and not being worked at, when the list was asked for
        """
        of_order = {each.order: each for each in held}
        for each in held:
            if each.order not in self.open and not each.until:
                log.warning("node.given_back id=%s order=%s: nobody needs it", each.node, each.order)
                await self._ended(each.node)
        now = self._clock()
        for order, stay in list(self.open.items()):
            there = of_order.get(order)
            if order in self._busy or order not in known:
                continue
            if there is not None and there.until:
                await self._close(order, there.until, f"node {there.node} ended before it joined")
            elif there is None and stay.node != NO_NODE:
                await self._close(order, now, f"node {stay.node} ended before it joined")
            elif there is None:
                self._begin(order, self._start)
            elif stay.releasing:
                self._begin(order, self._stop)
            else:
                if stay.node == NO_NODE or stay.since != there.since:
                    await self._started(there)
                offer = self._offers.get(stay.kind)
                waits_s = self._join_s + (0.0 if offer is None else offer.start_s)
                if not stay.joined_at and now > stay.asked_at + waits_s and await self._ended(there.node):
                    await self._close(order, self._clock(), f"node {there.node} did not join within {waits_s:g} s")
