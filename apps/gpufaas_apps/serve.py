"""
``gpufaas serve``: the whole platform in one process tree. The composition root of embedded mode.

The serving process has gateway, scheduler and GPU manager in one event loop; the fork server beside it has torch
imported, and forks the workers.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import socket
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from gpufaas_apps import policy_state
from gpufaas_apps.container_listener import ContainerListener
from gpufaas_apps.data_directory import credentials_of, login_offered, owned
from gpufaas_apps.front import Front, Parts
from gpufaas_apps.machine import Machine, connect, container_engine, lines_of
from gpufaas_apps.one_node import OneNode
from gpufaas_apps.options import ServeOptions
from gpufaas_apps.process import age_s, first_of, listen, prepare_process, run_loop
from gpufaas_apps.server import GRACE_S
from gpufaas_apps.stores import Stores
from gpufaas_apps.watchdog import notify
from gpufaas_core import compiled
from gpufaas_core.errors import GpufaasError, InvalidSpec, StorageFailed
from gpufaas_core.messages import Planned
from gpufaas_core.model import NodeId, Seconds
from gpufaas_core.origin import Origins
from gpufaas_gateway.auth import Credentials
from gpufaas_gpu_manager.metrics import NodeFamilies
from gpufaas_gpu_manager.node import Node
from gpufaas_gpu_manager.supervisor import ContainerEngine
from gpufaas_planner.shell import PlannerShell
from gpufaas_scheduler.journal import Header, Journal
from gpufaas_scheduler.scaler import Scaler, Watched
from gpufaas_scheduler.service import SchedulerService

_COLLECT_EVERY_S: Final[Seconds] = 3600.0
_KEEP_UNUSED_S: Final[Seconds] = 86_400.0
"""For so long, a revision that was replaced or removed can be deployed again without another upload."""
_KEEP_PRUNED_S: Final[Seconds] = 600.0
"""The same for `gpufaas prune`: what was just uploaded may be for a deployment that is under way."""
_MAX_QUEUE_IN_ALL: Final = 10_000
_NODE: Final = NodeId("local")


def run(options: ServeOptions) -> None:
    """
    Serve until SIGTERM or Ctrl-C.

    :raises GpufaasError: it cannot start: the port is taken, the data directory cannot be used, a device is not there
    """
    prepare_process(logging.WARNING, isolated=options.isolation != "none")
    with owned(options.data) as spool, listen(options.host, options.port, "--port") as listening:
        credentials = credentials_of(options)
        options = replace(options, port=listening.getsockname()[1])  # port 0 is any that is free
        run_loop(_main(options, credentials, spool, listening), GRACE_S)


async def _main(options: ServeOptions, credentials: Credentials | None, spool: Path, listening: socket.socket) -> None:
    await composed(options, credentials, spool).run(listening, login_offered(options, credentials))


def composed(options: ServeOptions, credentials: Credentials | None, spool: Path) -> "ServeApp":
    """Open what the platform stands on, and compose it. Needs the event loop. :raises GpufaasError: as `run`"""
    machine, origins = Machine.opened(options, _NODE), Origins()
    header = Header(
        policy=options.policy,
        epoch=time.time_ns() // 1_000_000,  # grows from run to run: grants of an earlier run are refused
        max_queue=max(_MAX_QUEUE_IN_ALL, options.max_queue),
    )
    engine = header.engine()
    journal = _open_journal(options.journal, header) if options.journal else None
    scheduler = SchedulerService(engine, journal=journal)
    stores = Stores(options.data, options.history_size)
    listener = ContainerListener(options.host, options.port, guarded=credentials is not None)
    # Of this data directory: what another platform on this machine runs is left alone.
    instance = hashlib.sha256(bytes(options.data)).hexdigest()[:16]
    containers = container_engine(
        options.functions, instance, f"http://gateway.openfaas:{options.port}", listener.found
    )
    node = machine.node(options.data, stores, scheduler.report, containers, origins, options.url)
    gone: list[str] = []
    parts = Parts(
        credentials=credentials, spool=spool, store=stores.functions, artifacts=stores.artifacts,
        secrets=stores.secrets, logs=stores.logs, end_logs=stores.logs.end_followers,
        scheduler=scheduler, node=node.grants, here=True, workers=node.functions, usage_of=node.host.usage_of,
        origins=origins,
        nodes=OneNode(scheduler.status, node.functions, gone, lambda: node.makes),
        plan_store=stores.plans, tell_plan=lambda plan: scheduler.handle(Planned(plan)),
        async_queue=stores.async_queue, gone=gone, fault=lambda: node.fault,
        planner=lambda why: planner.asked(why),
        standbys=node.host.blank, prune=lambda dry: stores.collect(front.catalogue, _KEEP_PRUNED_S, dry),
    )  # fmt: skip
    front = Front(options, parts, listener)
    front.metrics.show(NodeFamilies(node))
    planner = PlannerShell(options.planner, engine.snapshot, front.plans)
    return ServeApp(options, stores, journal, scheduler, node, containers, front, gone, planner)


@dataclass(slots=True, eq=False)
class ServeApp:
    """Gateway, scheduler and node in one event loop; see `composed`."""

    _options: ServeOptions
    _stores: Stores
    _journal: Journal | None
    _scheduler: SchedulerService
    _node: Node
    _containers: ContainerEngine | None
    _front: Front
    _gone: list[str]
    """Lines for people, one for each device that was given up."""
    _planner: PlannerShell
    _fatal: BaseException | None = None

    def __post_init__(self) -> None:
        self._scheduler.on_fatal = self._fail

    async def run(self, listening: socket.socket, login: contextlib.AbstractContextManager[None]) -> None:
        """
        Serve until the process is asked to stop. The port is closed and calls are drained; then workers end, then the
        stores that they wrote to are closed. All of it is within *login*.

        :raises GpufaasError: the scheduler failed
        """
        front = self._front
        scaler = Scaler(self._watched, self._scheduler.status, self._scheduler.scale)
        await connect(self._containers, self._options.functions)
        policy_state.restore(self._scheduler, self._stores.plans)
        self._scheduler.join(self._node, self._node.devices())
        for plan in self._stores.plans.history()[:1]:
            front.plans.learn(plan)
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(login)
            if self._journal is not None:
                stack.callback(self._journal.close)
            stack.callback(self._stores.close)
            stack.push_async_callback(self._node.close)
            stack.push_async_callback(front.callbacks.close)
            background = (
                self._load(),
                front.keeper.keep(front.stopped, self._learn),
                policy_state.keep(self._scheduler, self._stores.plans, front.stopped),
                scaler.run(front.stopped),
                first_of(self._node.watch_devices(self._lose), front.stopped.wait()),
                self._start_workers(),
            )
            await front.run(listening, background)
        if self._fatal is not None:
            raise GpufaasError(f"the scheduler failed and the platform stopped: {self._fatal!r}") from self._fatal

    def _fail(self, error: BaseException) -> None:
        """The scheduler failed: callers that wait are answered, and the process ends with the error."""
        if self._fatal is None:
            self._fatal = error
        self._front.server.stop()

    def _lose(self, note: str) -> None:
        self._gone.append(note)
        logging.getLogger("node").error("%s", note)

    async def _load(self) -> None:
        await self._front.deployer.load()
        self._front.async_calls.begin()
        # Only what is loaded is known to be used, and can be planned.
        idle = [self._front.profiling.run_idle(self._front.catalogue)] if self._options.profile_idle else []
        await first_of(self._collect(), self._planner.run(), *idle)

    async def _collect(self) -> None:
        """Remove artifacts that no function uses any more, at the start and every hour."""
        stopped = self._front.stopped
        while not stopped.is_set():
            try:
                await self._stores.collect(self._front.catalogue, _KEEP_UNUSED_S)
            except StorageFailed as exc:
                logging.getLogger("artifacts").warning("not collected, will be tried again: %s", exc)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), _COLLECT_EVERY_S)

    def _learn(self) -> None:
        for each in self._scheduler.engine.take_learnt():
            self._front.keeper.learn(each)

    def _watched(self) -> dict[str, Watched]:
        """Return the functions whose labels have a rule that acts, and their load."""
        front = self._front
        ruled = [
            (each, rule)
            for each in front.catalogue.everywhere()
            if each.unavailable is None and (rule := each.options.scaling) is not None and rule.acts
        ]
        cpu_s = self._node.host.cpu_seconds() if any(rule.type == "cpu" for _, rule in ruled) else {}
        pending = front.async_calls.backlog.counts()
        return {
            each.full_name: Watched(
                each.function_id, rule, each.stats.begun, each.stats.finished, each.stats.inflight,
                pending.get(each.full_name, 0), cpu_s.get(each.function_id, 0.0),
            )
            for each, rule in ruled
        }  # fmt: skip

    async def _start_workers(self) -> None:
        """Start the fork server once the port is open: it imports torch for a second, for which no caller waits."""
        if not await self._front.server.opened():
            return
        await self._node.start()
        greet(self._options, self._node)
        notify("READY=1")


def _open_journal(path: Path, header: Header) -> Journal:
    try:
        return Journal(path, header)
    except FileExistsError:
        raise InvalidSpec(
            f"--journal {path}: it is there already; name a new file, journals are not overwritten"
        ) from None
    except OSError as exc:
        raise StorageFailed(f"--journal {path}: it cannot be written ({exc.strerror})") from exc


def greet(options: ServeOptions, node: Node) -> None:
    """Print what is served where, and what is wrong with it."""
    lines = [f"gateway    {options.url}      OpenFaaS API; stop with Ctrl-C"]
    form = compiled.said()
    lines.append(f"scheduler  {options.policy}{'' if form == 'Python' else f'; engine: {form}'}")
    for line in (*lines, *lines_of(node), f"data       {options.data}"):
        print(f"✓ {line}", flush=True)
    if node.enforcement.why:
        print(f"! {node.enforcement.why}", file=sys.stderr, flush=True)
    print(f"ready in {age_s():.1f} s (pid {os.getpid()})", flush=True)
