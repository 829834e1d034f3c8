"""
The gateway of a serving process: HTTP, the invocation path, the management API, asynchronous calls, the stop.

`serve` composes it with a scheduler and a node in the same process, `gateway` with those of a cluster.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from msgspec.structs import replace
from starlette.types import ASGIApp

from gpufaas_apps.container_listener import ContainerListener
from gpufaas_apps.cost_api import cost_routes
from gpufaas_apps.metrics_view import MetricsOfAll
from gpufaas_apps.options import FrontOptions
from gpufaas_apps.plan_api import plan_routes
from gpufaas_apps.server import GRACE_S, GatewayServer, configured
from gpufaas_async_calls.api import PREFIX as ASYNC_PREFIX
from gpufaas_async_calls.api import AsyncInvocations, async_routes
from gpufaas_async_calls.callbacks import HttpCallbacks
from gpufaas_async_calls.calls import AsyncCalls
from gpufaas_async_calls.ports import AsyncQueue
from gpufaas_async_calls.retry import WHILE_MISSING, RetryPolicy, read_policy
from gpufaas_async_calls.settings import AsyncSettings, QueueSettings
from gpufaas_core.model import Function, PlacementPlan
from gpufaas_core.orders import Stay
from gpufaas_core.origin import Origins
from gpufaas_core.revision import git_revision
from gpufaas_gateway.annotations import DEFAULT_QUEUE
from gpufaas_gateway.api import management_app
from gpufaas_gateway.auth import CleanPaths, Credentials, Guard, WithoutWorkers
from gpufaas_gateway.calls import Calls
from gpufaas_gateway.deploy import Deployer
from gpufaas_gateway.fronts import openfaas
from gpufaas_gateway.fronts.table import Fronts
from gpufaas_gateway.fronts.websocket import WebSocketCalls
from gpufaas_gateway.function_api import UsageOf
from gpufaas_gateway.http.exchange import HttpFront
from gpufaas_gateway.keeper import Keeper
from gpufaas_gateway.metrics import Metrics
from gpufaas_gateway.node_api import ClusterNodes, node_routes
from gpufaas_gateway.placement import read_profiles
from gpufaas_gateway.platform_api import prune_routes
from gpufaas_gateway.ports import Artifacts, LogReader, NodePort, PlacementPort, Scheduler, SecretStore, Store, Workers
from gpufaas_gateway.profile_api import profile_routes
from gpufaas_gateway.profiling import Profiling
from gpufaas_gateway.spec import Defaults
from gpufaas_planner.plans import Plans, PlanStore
from gpufaas_scheduler.plans.placement import kernels


class PlacingScheduler(Scheduler, PlacementPort, Protocol):
    """All that a gateway asks of a scheduler."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a gateway is composed of: in one process the objects themselves, in a cluster what reaches them."""

    credentials: Credentials | None
    """What management routes ask for; None: nothing."""
    spool: Path
    """The directory for large bodies of running calls."""
    store: Store
    artifacts: Artifacts
    secrets: SecretStore
    logs: LogReader
    end_logs: Callable[[], None]
    """Ends answers that follow a log."""
    scheduler: PlacingScheduler
    node: NodePort
    here: bool
    """`node` is in this process."""
    workers: Workers
    usage_of: UsageOf
    nodes: ClusterNodes
    origins: Origins
    async_queue: AsyncQueue
    metrics_of_all: str = ""
    """Where several processes share the port: the URL of the metrics of all."""
    call_suffix: str = ""
    """Ends the ids of this gateway's calls, where several gateways share a scheduler."""
    gone: Sequence[str] = ()
    """A line for each device of this process that was given up."""
    fault: Callable[[], str] = lambda: ""
    """Returns why no model can be loaded: what is wrong with the node of this process, or that no scheduler leads."""
    standbys: Callable[[], dict[str, int]] | None = None
    """Returns the processes of that node which wait to become workers, for people."""
    plan_store: PlanStore
    tell_plan: Callable[[PlacementPlan], None] = lambda _: None
    """Tells the engine of this process the plan in force."""
    planner: Callable[[str], Awaitable[dict[str, Any]]]
    """Asks the planner, see `PlannerShell.asked`; empty: there is none."""
    stays: Callable[[], Awaitable[list[Stay]]] | None = None
    """Returns the ledger of nodes that were ordered; None: this platform orders none."""
    prune: Callable[[bool], Awaitable[tuple[int, int]]] | None = None
    """Removes artifacts that nothing names, unless told to run dry; returns how many, and their bytes."""


class Front:
    """Composed by the constructor; `run` serves until the process is asked to stop and open calls have ended."""

    def __init__(self, options: FrontOptions, parts: Parts, listener: ContainerListener) -> None:
        self._options = options
        self._parts = parts
        self.stopped = asyncio.Event()
        """The port is closed, and open calls have ended."""
        self.failed = asyncio.Event()
        """A task in the background has failed: the process ends."""
        product = f"gpufaas/{version('gpufaas')}"
        self.metrics = Metrics(
            parts.scheduler.status,
            lambda: ((each.stats, each.replicas, each.options.scaling) for each in self.catalogue.everywhere()),
            lambda: self.async_calls.backlog.counts(),
            lambda: self.async_calls.queues(),
        )
        defaults = Defaults(
            max_body=options.max_body, max_queue=options.max_queue, profiles=read_profiles(options.profiles)
        )
        self.deployer = Deployer(
            parts.store, parts.artifacts, parts.workers, parts.scheduler, defaults, secrets=parts.secrets
        )
        self.catalogue = self.deployer.catalogue
        self.keeper = Keeper(parts.store, self.catalogue)
        self.plans = Plans(parts.plan_store, self._placeable, parts.workers.devices, parts.tell_plan)
        self.deployer.plan = self.plans.in_force
        calls_of = partial(
            Calls, scheduler=parts.scheduler, node=parts.node, spool=parts.spool, served_by=product,
            call_suffix=parts.call_suffix, here=parts.here,
        )  # fmt: skip
        calls = calls_of(self.catalogue)
        self.profiling = Profiling(parts.store, parts.workers, parts.scheduler, calls_of, kernels.wsm)
        websocket_calls = WebSocketCalls(calls.run, self.catalogue)
        self.deployer.handovers.on_replaced = websocket_calls.close_old
        self.callbacks = HttpCallbacks(product, allow_local=options.allow_local_callbacks, gateway=options.url)
        self.async_calls = self._async_calls(calls)
        async_invocations = AsyncInvocations(
            self.catalogue, self.async_calls, served_by=product, callbacks=self.callbacks
        )
        management = self.metrics.counted(self._management(async_invocations))
        if parts.metrics_of_all:
            management = MetricsOfAll(management, parts.metrics_of_all, self.metrics.render)
        management = WithoutWorkers(management)
        fronts = Fronts(
            parts.origins,
            calls={openfaas.PREFIX: openfaas.OpenFaasFront(calls.run)},
            websockets={openfaas.PREFIX: websocket_calls},
            posted={ASYNC_PREFIX: async_invocations},
            rest=management,
        )
        self.server = GatewayServer(configured(fronts, HttpFront(fronts.target)), listener.open, self._stopping)
        listener.serve(fronts, self.server, lambda app, admits: configured(app, HttpFront(fronts.target, admits)))

    def _async_calls(self, calls: Calls) -> AsyncCalls:
        options = self._options
        settings = AsyncSettings(
            max_queue=options.max_async_queue,
            grace_s=GRACE_S,
            queues={name: QueueSettings(*bounds) for name, bounds in options.async_queues.items()},
        )
        return AsyncCalls(
            self._parts.async_queue, calls.run, self.callbacks, self._retry_policy, settings, queue_of=self._queue_of
        )

    def _management(self, async_invocations: AsyncInvocations) -> ASGIApp:
        """Return the app of all routes that are not on the hot path."""
        parts = self._parts
        app = management_app(
            self.deployer, parts.scheduler, parts.logs, parts.artifacts, self.metrics, parts.secrets,
            version=version("gpufaas"), commit=git_revision(), orchestration=self._orchestration,
            usage_of=parts.usage_of, fault=parts.fault, gone=parts.gone, standbys=parts.standbys,
        )  # fmt: skip
        app.include_router(
            async_routes(self.async_calls, async_invocations, lambda name: self.catalogue.find(name) is not None)
        )
        app.include_router(node_routes(parts.nodes))
        if parts.stays is not None:
            app.include_router(cost_routes(parts.stays))
        app.include_router(plan_routes(self.catalogue, self.plans, parts.scheduler.status, parts.planner))
        app.include_router(profile_routes(self.catalogue, self.profiling))
        if parts.prune is not None:
            app.include_router(prune_routes(self.catalogue, parts.prune))
        return CleanPaths(app if parts.credentials is None else Guard(app, parts.credentials))

    def _placeable(self) -> dict[str, Function]:
        """Return what plans may name, with what has been learnt of it, by full name."""
        return {
            each.full_name: replace(each.function, profiles={**each.function.profiles, **each.profiles})
            for each in self.catalogue.everywhere()
            if each.unavailable is None
        }

    def _orchestration(self) -> str:
        """Return what functions run as, now: processes, and what nodes make of images."""
        return " and ".join(["processes", *sorted({each.makes for each in self._parts.nodes.nodes()} - {""})])

    def _retry_policy(self, name: str) -> RetryPolicy:
        found = self.catalogue.find(name)
        return WHILE_MISSING if found is None else read_policy(found.record.spec.annotations)

    def _queue_of(self, name: str) -> str:
        found = self.catalogue.find(name)
        return DEFAULT_QUEUE if found is None else found.options.async_queue

    async def run(
        self, listening: socket.socket, background: Sequence[Coroutine[Any, Any, None]],
        may_open: Awaitable[None] | None = None,
    ) -> None:  # fmt: skip
        """
        Serve until the process is asked to stop: first the port is closed, then open calls end. *background* runs
        meanwhile, and ends by itself once `stopped` is set. A task of it that fails stops the server in the same way;
        then what it raised is raised.

        :param may_open: the port is opened after it; None: at once
        """
        failures: list[Exception] = []

        async def essential(task: Coroutine[Any, Any, None]) -> None:
            try:
                await task
            except Exception as exc:
                failures.append(exc)
                self.failed.set()
                self.server.stop()

        async with asyncio.TaskGroup() as tasks:
            for each in (self.async_calls.run(), *background):
                tasks.create_task(essential(each))
            try:
                if may_open is not None:
                    await may_open
                await self.server.serve(sockets=[listening])
            finally:
                self.stopped.set()
                self.async_calls.finish()
        if failures:
            raise failures[0]

    async def _stopping(self) -> None:
        """The port is about to close: end what would keep connections open for the whole grace."""
        self._parts.end_logs()
        self.async_calls.stop()
