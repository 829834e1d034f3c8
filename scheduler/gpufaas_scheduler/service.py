"""
The scheduler as its gateways and nodes use it: places calls, and carries the engine's commands to nodes.

In the same process, a gateway that asks for a placement gets the answer from the same function call whenever a grant
can be granted at once.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from gpufaas_core import messages as m
from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.errors import GpufaasError, GrantRefused
from gpufaas_core.explanation import Explanation
from gpufaas_core.model import (
    NO_ORDER,
    Asked,
    CallId,
    Device,
    DeviceId,
    EngineStatus,
    Function,
    FunctionId,
    OrderId,
    Seconds,
    Taken,
    gateway_of,
    node_of,
)
from gpufaas_core.snapshot import DeviceSnapshot, StagedWeights
from gpufaas_scheduler.driver import EngineDriver, JournalPort
from gpufaas_scheduler.engine import Engine
from gpufaas_scheduler.ports import NodeCommands, Provider
from gpufaas_scheduler.rejections import rejection

HELD_S: Final[Seconds] = 120.0
"""A number of copies that a person or an alert has set holds for so long, unless the load needs more."""


OnAnswer = Callable[[CallId, m.Grant | GpufaasError], None]


class SchedulerService:
    """
    See module. One event loop owns it.

    `engine` is for questions only: events go through `handle`.

    :param on_fatal: gets an exception of the engine, after which the process must end
    """

    def __init__(
        self,
        engine: Engine,
        *,
        journal: JournalPort | None = None,
        on_fatal: Callable[[BaseException], None] = lambda _: None,
    ) -> None:
        self.engine = engine
        self.driver = driver = EngineDriver(engine, self._carry_out, self._fail, journal)
        self.handle = driver.handle
        self._now = driver.now
        self.on_fatal = on_fatal
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[CallId, asyncio.Future[m.Grant]] = {}
        self._begin: dict[CallId, Callable[[m.Grant], None]] = {}
        """See `on_grant`."""
        self._refused: dict[CallId, asyncio.Future[m.Grant]] = {}
        self._nodes: dict[DeviceId, NodeCommands] = {}
        """The node of each device."""
        self.gateways: dict[str, OnAnswer] = {}
        """What gets the answers for gateways of other processes, by the name that ends the ids of their calls."""
        self.provider: Provider | None = None
        """None: no nodes are ordered. The engine orders none that nobody offers (`messages.Offered`)."""
        self._placing: CallId | None = None
        self._placed: m.Grant | GpufaasError | None = None

    # --- the gateway of this process ---

    def place(
        self,
        call: CallId,
        function: FunctionId,
        timeout_s: Seconds,
        size: float = 0.0,
        outer: m.Outer | None = None,
        endless: bool = False,
        asked: Asked | None = None,
    ) -> m.Grant | asyncio.Future[m.Grant]:
        """
        Ask for the right to run *call*: return a grant if it is granted at once, else a future of it.

        :param size: it, and what follows it, are those of `Arrived`
        :raises GpufaasError: it was rejected at once; the future raises the same when that happens later
        """
        self._placing, self._placed = call, None
        now = self._now()
        self.handle(m.Arrived(call, function, now + timeout_s, 0.0, size, outer, endless, asked), now)
        self._placing, placed = None, self._placed
        if placed is None:
            future: asyncio.Future[m.Grant] = self._loop.create_future()
            self._waiting[call] = future
            return future
        if isinstance(placed, GpufaasError):
            raise placed
        return placed

    def on_grant(self, call: CallId, begin: Callable[[m.Grant], None]) -> None:
        """Have *begin* called with the grant of *call*, if it waits for one, before its future has it."""
        if call in self._waiting:
            self._begin[call] = begin

    def again(self, call: CallId) -> asyncio.Future[m.Grant]:
        """Return the next grant of *call*, whose last one the node refused; it kept its place in the queue."""
        future = self._refused.pop(call, None)
        if future is None:
            future = self._waiting.get(call) or self._loop.create_future()
            self._waiting[call] = future
        return future

    def over(self, call: CallId) -> None:
        """Its caller was answered. In the same process, nothing is kept of a call that has its grant."""

    def cancel(self, call: CallId) -> None:
        """The caller of *call* is gone, or its time is up: remove it from the queue, or stop it."""
        self._waiting.pop(call, None)
        self._begin.pop(call, None)
        self._refused.pop(call, None)
        self.handle(m.CallerLeft(call))

    # --- nodes ---

    def join(
        self, node: NodeCommands, devices: Iterable[Device | DeviceSnapshot],
        staged: tuple[StagedWeights, ...] | None = None, order: OrderId = NO_ORDER,
    ) -> None:  # fmt: skip
        """
        *node*, which was started for *order*, has these devices now: empty ones, or with what their snapshots say; and
        *staged* in its host tier.
        """
        for each in devices:
            device, snapshot = (each, None) if isinstance(each, Device) else (each.device, each)
            self._nodes[device.id] = node
            self.handle(m.DeviceJoined(device, snapshot, staged, order))
            if order and self.provider is not None:
                self.provider.joined(order, device.node)

    def part(self, node: NodeCommands) -> None:
        """*node* is gone. Its devices have left before."""
        self._nodes = {device: each for device, each in self._nodes.items() if each is not node}

    def report(self, fact: m.Event) -> None:
        """A node says what happened."""
        if isinstance(fact, m.NodeRefused):
            call = fact.call
            here = gateway_of(call) not in self.gateways
            if call != self._placing and here and self.engine.heeds(fact):
                # The gateway of this process, which has the grant already, asks for the next one when it learns of the
                # refusal: that may be after it is granted.
                self._waiting[call] = self._refused[call] = self._loop.create_future()
        elif self.provider is not None and isinstance(fact, m.Finished):
            function = self.engine.function_of(fact.call)
            if function is not None:
                self.provider.finished(fact.device, function, fact.service_s * (1 + fact.further))
        self.handle(fact)

    # --- functions and status ---

    def deploy(
        self,
        function: Function,
        worker: WorkerSpec | None = None,  # noqa: ARG002 - the nodes know it
        succeeds: FunctionId | None = None,
    ) -> None:
        self.handle(m.FunctionDeployed(function, succeeds))

    def remove(self, function: FunctionId, drain: bool) -> None:
        self.handle(m.FunctionRemoved(function, drain))

    async def probe(self, function: Function, worker: WorkerSpec) -> None:
        self.deploy(function, worker)

    def end_probe(self, function: FunctionId) -> None:
        self.remove(function, drain=False)

    def profiled(self, function: FunctionId, kind: str, taken: Taken) -> None:
        self.handle(m.Profiled(function, kind, taken))

    def scale(self, function: FunctionId, copies: int, hold_s: Seconds = HELD_S) -> None:
        """Let *function* have so many copies, within its bounds; see `Scaled`. An unknown function is ignored."""
        self.handle(m.Scaled(function, copies, hold_s))

    def status(self) -> EngineStatus:
        return self.engine.status(self._now())

    async def explain(self, call: CallId) -> Explanation | None:
        """Say why *call* was started where it was, or why it waits; None: it is not known any more."""
        return self.engine.explain(call, self._now())

    # --- within ---

    def _carry_out(self, command: m.Command) -> None:
        if isinstance(command, m.StartCall):
            grant = command.grant
            calls = grant.calls
            self._answer(calls[0], grant)
            if len(calls) > 1:
                for other in calls[1:]:
                    self._answer(other, grant.of(other))
            if not grant.cold:
                return  # on a hit the call itself opens the grant; on a miss the node need not wait for it
            node = self._nodes.get(grant.device)
        elif isinstance(command, m.RejectCall):
            self._answer(command.call, rejection(command))
            return
        elif isinstance(command, m.ProcureNodes | m.ReleaseNode):
            if self.provider is not None:  # else an older engine asked for it
                self.provider.execute(command)
            return
        elif isinstance(command, m.FetchBundle | m.Stage):
            node = next((each for device, each in self._nodes.items() if node_of(device) == command.node), None)
        else:
            node = self._nodes.get(command.device)
        if node is not None:  # else it left after the engine decided, and its devices with it
            node.execute(command)

    def _answer(self, call: CallId, answer: m.Grant | GpufaasError) -> None:
        if call == self._placing:
            self._placed = answer
            return
        if self.gateways and (gateway := self.gateways.get(gateway_of(call))) is not None:
            gateway(call, answer)
            return
        future = self._waiting.pop(call, None)
        begin = self._begin.pop(call, None)
        if future is None or future.done():
            return
        if isinstance(answer, GpufaasError):
            future.set_exception(answer)
            return
        if begin is not None:
            begin(answer)
        future.set_result(answer)

    def _fail(self, error: BaseException) -> None:
        self.on_fatal(error)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(GrantRefused("the scheduler failed and the platform stops: call again"))
