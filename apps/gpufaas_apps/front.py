"""
The gateway's side of a serving process: HTTP in, the invocation path, the management API, asynchronous calls, the stop.

`serve` composes it with a scheduler and a node in the same process, `gateway` with ones that are elsewhere.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Protocol

import uvicorn

from gpufaas_apps.inner_door import InnerDoor
from gpufaas_apps.options import FrontOptions
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.model import NodeId
from gpufaas_core.origin import Origins
from gpufaas_core.revision import git_revision
from gpufaas_core.wire import NodeView
from gpufaas_gateway.api import management_app
from gpufaas_gateway.async_api import METHOD as ASYNC_METHOD
from gpufaas_gateway.async_api import PREFIX as ASYNC_PREFIX
from gpufaas_gateway.async_api import AsyncInvocations, async_routes
from gpufaas_gateway.async_call import DEFAULT_QUEUE
from gpufaas_gateway.async_calls import AsyncCalls
from gpufaas_gateway.async_execution import execute
from gpufaas_gateway.async_settings import AsyncSettings, QueueSettings
from gpufaas_gateway.auth import CleanPaths, Credentials, Guard
from gpufaas_gateway.builds import Builds, build_routes
from gpufaas_gateway.callbacks import HttpCallbacks
from gpufaas_gateway.calls import Calls
from gpufaas_gateway.deploy import Deployer
from gpufaas_gateway.function_api import UsageOf
from gpufaas_gateway.invoke import PREFIX, Invocations, Receive, Send
from gpufaas_gateway.keeper import Keeper
from gpufaas_gateway.metrics import Metrics
from gpufaas_gateway.node_api import Cluster, node_routes
from gpufaas_gateway.origins import FromWorkers
from gpufaas_gateway.placement import read_profiles
from gpufaas_gateway.ports import (
    Artifacts,
    AsyncQueue,
    FunctionLogs,
    NodePort,
    PlacementPort,
    Scheduler,
    Secrets,
    Store,
    Workers,
)
from gpufaas_gateway.protocol import BoundedHttp, BoundedWebSocket
from gpufaas_gateway.request import BrokenAnswer
from gpufaas_gateway.retry import WHILE_MISSING, RetryPolicy, read_policy
from gpufaas_gateway.spec import Defaults
from gpufaas_gateway.websocket_calls import MAX_MESSAGE, WebSocketCalls, refuse_elsewhere

GRACE_S: Final = 10
"""How long open calls may take to end when the process is asked to stop."""


class PlacingScheduler(Scheduler, PlacementPort, Protocol):
    """What a gateway asks of a scheduler, whole."""


class Front:
    """
    Made before the server starts; `serve` returns when the process is asked to stop and open calls have ended.

    :param call_suffix: ends the ids of this gateway's calls, where several gateways share a scheduler
    """

    def __init__(
        self,
        options: FrontOptions,
        credentials: Credentials | None,
        spool: Path,
        *,
        store: Store,
        artifacts: Artifacts,
        workers: Workers,
        scheduler: PlacingScheduler,
        node: NodePort,
        secrets: Secrets,
        logs: FunctionLogs,
        async_queue: AsyncQueue,
        usage_of: UsageOf,
        end_logs: Callable[[], None],
        builds: Builds | None = None,
        door: InnerDoor | None = None,
        call_suffix: str = "",
        cluster: Cluster | None = None,
        origins: Origins,
        gone: Sequence[str] = (),
        fault: Callable[[], str] = lambda: "",
        makes: Callable[[], str] = str,
    ) -> None:
        """:param makes: of images, by the only node, where there is no *cluster*: see `NodeView`"""
        product = f"gpufaas/{version('gpufaas')}"
        nodes = cluster or _Alone(scheduler, workers, gone, makes)
        self.options = options
        self.builds = builds
        self._end_logs = end_logs
        self.door = door or InnerDoor(options.host, options.port, guarded=credentials is not None)
        self.metrics = Metrics(
            scheduler.status, lambda: self.async_calls.backlog.counts(), lambda: self.async_calls.queues()
        )
        defaults = Defaults(
            max_body=options.max_body, max_queue=options.max_queue, profiles=read_profiles(options.profiles)
        )
        self.deployer = Deployer(store, artifacts, workers, scheduler, self.metrics, defaults, secrets=secrets)
        self.catalogue = self.deployer.catalogue
        self.keeper = Keeper(store, self.catalogue)
        calls = Calls(self.catalogue, scheduler, node, spool, served_by=product, call_suffix=call_suffix)
        invocations = Invocations(calls.run)
        websocket_calls = WebSocketCalls(calls.run, self.catalogue)
        self.deployer.on_replaced = websocket_calls.close_old
        management = management_app(
            self.deployer, scheduler, logs, artifacts, self.metrics, secrets, version=version("gpufaas"),
            commit=git_revision(), orchestration=lambda: orchestration(nodes.nodes()), usage_of=usage_of, fault=fault,
            gone=gone,
        )  # fmt: skip
        self.management = management
        self.callbacks = HttpCallbacks(product, allow_local=options.allow_local_callbacks)
        self.async_calls = AsyncCalls(
            async_queue,
            lambda call: execute(calls.run, call),
            self.callbacks,
            self._retry_policy,
            AsyncSettings(
                max_queue=options.max_async_queue,
                grace_s=GRACE_S,
                queues={name: QueueSettings(*bounds) for name, bounds in options.async_queues.items()},
            ),
            queue_of=self._queue_of,
        )
        async_invocations = AsyncInvocations(
            self.catalogue, self.async_calls, served_by=product, allow_local_callbacks=options.allow_local_callbacks
        )
        management.include_router(
            async_routes(self.async_calls, async_invocations, lambda name: self.catalogue.find(name) is not None)
        )
        management.include_router(build_routes(builds))
        management.include_router(node_routes(nodes))
        # All but `/function/`, which is public and on the hot path, comes through here.
        guarded = self.metrics.counted(
            CleanPaths(management if credentials is None else Guard(management, credentials))
        )

        async def app(scope: Any, receive: Receive, send: Send) -> None:
            try:
                if scope["type"] == "http" and scope["raw_path"].startswith(PREFIX):
                    await invocations(scope, receive, send)
                elif (
                    scope["type"] == "http"
                    and scope["raw_path"].startswith(ASYNC_PREFIX)
                    and scope["method"] == ASYNC_METHOD
                ):
                    await async_invocations(scope, receive, send)
                elif scope["type"] == "websocket":
                    to_function = scope["raw_path"].startswith(PREFIX)
                    await (websocket_calls if to_function else refuse_elsewhere)(scope, receive, send)
                else:
                    await guarded(scope, receive, send)
            except BrokenAnswer:
                raise  # the server closes the connection, which is the message
            except Exception:
                logging.getLogger("gateway").exception("a request failed in the platform itself: %s", scope.get("path"))
                raise

        from_anybody = FromWorkers(app, origins)
        self.server = _Server(_configured(from_anybody), self)
        self.door.serve(from_anybody, self.server, _configured)

    def _retry_policy(self, name: str) -> RetryPolicy:
        found = self.catalogue.find(name)
        return WHILE_MISSING if found is None else read_policy(found.record.spec.annotations)

    def _queue_of(self, name: str) -> str:
        found = self.catalogue.find(name)
        return DEFAULT_QUEUE if found is None else found.async_queue

    async def stopping(self) -> None:
        """The door is about to close: what would hold it open for the whole grace is ended."""
        self._end_logs()
        self.async_calls.stop()
        if self.builds is not None:
            await self.builds.close()

    async def ended(self, task: Awaitable[None]) -> None:
        """A side task that dies takes the server with it: never one that only says it is well."""
        try:
            await task
        except BaseException:
            self.server.should_exit = True
            raise

    async def serve(self, listening: socket.socket, stopped: asyncio.Event) -> None:
        try:
            await self.server.serve(sockets=[listening])
        finally:
            stopped.set()
            self.async_calls.finish()

    async def started(self) -> bool:
        """Return once the door is open; False: it will not be."""
        while not self.server.started:  # the server offers nothing to wait for; this is once, at start-up
            if self.server.should_exit:
                return False
            await asyncio.sleep(0.005)
        return True


def orchestration(nodes: Iterable[NodeView]) -> str:
    """Return what functions run as, now: processes, and what *nodes* make of images."""
    return " and ".join(["processes", *sorted({each.makes for each in nodes} - {""})])


class _Alone:
    """The one node of a platform that is one process."""

    def __init__(self, scheduler: Scheduler, workers: Workers, gone: Sequence[str], makes: Callable[[], str]) -> None:
        self._workers = workers
        self._makes = makes
        self._gone = gone
        self.status = scheduler.status

    def nodes(self) -> list[NodeView]:
        note = "; ".join(self._gone)
        devices, makes = list(self._workers.devices()), self._makes()
        return [NodeView(NodeId("local"), "", devices, False, note, version("gpufaas"), makes=makes)]

    async def drain(self, node: str, drain: bool) -> None:  # noqa: ARG002 - the port's
        raise InvalidSpec(
            "this platform is one process, whose only node is its own: stop it instead; nodes of a cluster can be "
            "drained (gpufaas node)"
        )


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, front: Front) -> None:
        super().__init__(config)
        self._front = front

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """
        As uvicorn's, which raises what it caught again when it has served: the watchdog would take that for a second
        signal. Once it has served, what comes is the watchdog's alone, so that we end whole.
        """
        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            signal.signal(number, self.handle_exit)
        try:
            yield
        finally:
            for number in numbers:
                signal.signal(number, lambda *_: None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        await self._front.door.open()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._front.stopping()
        await super().shutdown(sockets)


def _configured(app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        interface="asgi3",
        http=BoundedHttp,
        ws=BoundedWebSocket,
        ws_max_size=MAX_MESSAGE,
        ws_per_message_deflate=False,  # a context for each connection; what is worth it compresses its messages
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,  # X-Forwarded-* are passed on as they came
        timeout_keep_alive=75,
        timeout_graceful_shutdown=GRACE_S,
        backlog=2048,
    )
