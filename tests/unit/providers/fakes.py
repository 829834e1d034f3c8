"""A provider and a ledger that outlive brokers, and can be made to fail, to hang, or to be where a leader dies."""

import asyncio
from collections.abc import Callable, Sequence

from gpufaas_core.errors import StorageFailed
from gpufaas_core.model import NodeId, OrderId
from gpufaas_core.orders import NodeOffer, Stay
from gpufaas_providers.ports import Held


class Clock:
    """Unix time that only moves when it is told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeProvider:
    """Its nodes are entries of `log`. `step` is told before and after each thing that it does."""

    def __init__(self, clock: Clock, step: Callable[[str], None] = lambda _: None) -> None:
        self.clock, self.step = clock, step
        self.log: dict[OrderId, Held] = {}
        """Its own log: what was started, and when that ended."""
        self.fails: Exception | None = None
        self.hangs = False
        self.asked = 0
        """How often `start` was called."""

    async def start(self, order: OrderId, offer: NodeOffer) -> Held:  # noqa: ARG002 - the port's
        self.asked += 1
        if self.fails is not None:
            raise self.fails
        if self.hangs:
            await asyncio.Event().wait()
        self.step("start")
        if order not in self.log:
            self.log[order] = Held(NodeId(f"node-{order}"), order, self.clock.now)
        self.step("started")
        return self.log[order]

    async def stop(self, node: NodeId) -> None:
        self.step("stop")
        for order, held in self.log.items():
            if held.node == node and not held.until:
                self.log[order] = Held(node, order, held.since, self.clock.now)
        self.step("stopped")

    async def list(self) -> Sequence[Held]:
        self.step("list")
        found = list(self.log.values())
        self.step("listed")
        return found

    @property
    def there(self) -> Sequence[OrderId]:
        return [order for order, held in self.log.items() if not held.until]


class FakeLedger:
    def __init__(self, step: Callable[[str], None] = lambda _: None) -> None:
        self.step = step
        self.kept: dict[OrderId, Stay] = {}
        self.away = False

    async def stays(self) -> list[Stay]:
        return list(self.kept.values())

    async def put(self, stay: Stay) -> bool:
        if self.away:
            raise StorageFailed("the ledger is away")
        self.step("put")
        self.kept[stay.order] = stay
        self.step("kept")
        return True

    async def forget(self, order: OrderId) -> None:
        self.kept.pop(order, None)
