"""
``gpufaas gateway``: HTTP in; functions from etcd, grants from the scheduler that leads, calls to the nodes.

Stateless but for the bodies that it spools: any number of gateways serve the same functions.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from gpufaas_adapters.etcd.async_queue import EtcdAsyncQueue
from gpufaas_adapters.etcd.client import Etcd
from gpufaas_adapters.etcd.election import register
from gpufaas_adapters.etcd.functions import EtcdFunctionStore
from gpufaas_adapters.etcd.orders import EtcdLedger
from gpufaas_adapters.etcd.plans import EtcdPlans
from gpufaas_adapters.etcd.secrets import EtcdSecrets, SecretsKey, create_key_file
from gpufaas_apps.cluster import identity, leader_addresses, opened
from gpufaas_apps.container_listener import ContainerListener
from gpufaas_apps.data_directory import credentials_of, login_offered, owned
from gpufaas_apps.feed import EtcdFeed
from gpufaas_apps.front import Front, Parts
from gpufaas_apps.options import GatewayOptions
from gpufaas_apps.process import asked_to_stop, first_of, listen, prepare_process, run_loop
from gpufaas_apps.server import GRACE_S
from gpufaas_apps.status import Status, status_served
from gpufaas_apps.watchdog import notify
from gpufaas_apps.weights import Weights
from gpufaas_cache_manager.artifacts import ArtifactStore
from gpufaas_cache_manager.bundles import BundleStore
from gpufaas_cluster.connection import Identity
from gpufaas_cluster.remote_nodes import RemoteNodes
from gpufaas_cluster.remote_placement import NO_LEADER_S
from gpufaas_cluster.remote_scheduler import RemoteScheduler
from gpufaas_cluster.remote_workers import RemoteLogs, RemoteWorkers
from gpufaas_core.errors import GpufaasError, InvalidSpec
from gpufaas_core.model import Seconds
from gpufaas_core.origin import Origins
from gpufaas_gateway.auth import Credentials
from gpufaas_gateway.ports import ArtifactWriter, SecretStore

log = logging.getLogger("gateway")

_COUNT_EVERY_S: Final[Seconds] = 1.0


def run(options: GatewayOptions) -> None:
    front, shared = options.front, bool(options.metrics_of_all)
    prepare_process()
    with owned(front.data) as spool, listen(front.host, front.port, "--port", shared=shared) as listening:
        credentials = credentials_of(front)
        front = replace(front, port=listening.getsockname()[1])
        run_loop(_main(replace(options, front=front), credentials, spool, listening), GRACE_S)


async def _main(
    options: GatewayOptions, credentials: Credentials | None, spool: Path, listening: socket.socket
) -> None:
    stop = asked_to_stop()
    app = GatewayApp(options, identity(options.cluster, "gateway"), credentials, spool)
    with contextlib.nullcontext() if options.metrics_of_all else login_offered(options.front, credentials):
        await app.run(listening, stop)


class GatewayApp:
    """A gateway, with what it needs of the cluster: etcd, the scheduler that leads, and the nodes."""

    def __init__(self, options: GatewayOptions, me: Identity, credentials: Credentials | None, spool: Path) -> None:
        data = options.front.data
        self._options = options
        self._me = me
        self._credentials = credentials
        self._spool = spool
        self._artifacts = ArtifactStore(data / "artifacts")
        bundles = BundleStore(data / "bundles", self._artifacts)
        self._weights = Weights(me, self._artifacts, bundles, options.object_store)
        self._scheduler = RemoteScheduler(me, on_view=lambda view: self._nodes.set_nodes(view.nodes))
        self._nodes = RemoteNodes(me, self._scheduler.unreachable, self._scheduler.may_keep)
        self._nodes.watchers.add(lambda: self._scheduler.unlinked(self._nodes.unlinked()))
        self._status = Status(ready=lambda: "waits for etcd")
        self._opens = False
        """The port for calls is about to open: from now on the server reacts to signals."""

    async def run(self, listening: socket.socket, stop: asyncio.Event) -> None:
        """
        Serve until the process is asked to stop: by *stop* while it waits for etcd, by the server's own signal handler
        once it serves. The port is closed and calls are drained; then the gateway leaves the cluster.
        """
        front, status_port = self._options.front, self._options.cluster.status_port
        async with status_served(self._status, front.host, status_port) as port:
            print(f"✓ gateway    {self._me.id} will serve port {front.port}, status at port {port}", flush=True)
            notify("READY=1")
            serving = asyncio.create_task(self._serve(listening, port))
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if not serving.done() and not self._opens:
                serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving

    async def _serve(self, listening: socket.socket, status_port: int) -> None:
        options, me = self._options, self._me
        async with opened(options.cluster) as etcd, contextlib.AsyncExitStack() as stack:
            store = EtcdFunctionStore(etcd)
            secrets = await _secrets(etcd, options.secrets_key)
            await self._weights.open()
            async_queue = await EtcdAsyncQueue.open(etcd, me.id, options.front.data / "async")
            stack.push_async_callback(async_queue.stop)
            stack.push_async_callback(self._nodes.close)
            listener = ContainerListener(options.front.host, options.front.port, guarded=self._credentials is not None)
            front = Front(options.front, self._parts(etcd, store, secrets, async_queue), listener)
            stack.push_async_callback(front.callbacks.close)
            self._status.more = self._weights.served
            self._status.metrics = front.metrics.render_own
            self._status.ready = lambda: self._why_not_ready(front)
            about = {"id": me.id, "boot": me.boot, "version": me.version, "port": options.front.port}
            registration = await register(etcd, f"v1/gateways/{me.id}", msgspec.json.encode(about), same=lambda _: True)
            stack.push_async_callback(registration.close)
            self._weights.join(etcd, registration, f"http://{_own_name(options)}:{status_port}")
            feed = EtcdFeed(etcd, front.deployer, front.plans.learn)
            await front.run(
                listening,
                (self._take_part(etcd, front, feed, async_queue), front.keeper.keep(front.stopped), self._greet(front)),
                self._may_open(front, feed),
            )

    def _parts(self, etcd: Etcd, store: EtcdFunctionStore, secrets: SecretStore, async_queue: EtcdAsyncQueue) -> Parts:
        workers, logs = RemoteWorkers(self._nodes), RemoteLogs(self._nodes)
        return Parts(
            credentials=self._credentials,
            spool=self._spool,
            store=store,
            artifacts=GatewayArtifacts(self._artifacts, self._weights, asyncio.get_running_loop()),
            secrets=secrets,
            logs=logs,
            end_logs=logs.end_followers,
            scheduler=self._scheduler,
            node=self._nodes,
            here=False,
            workers=workers,
            usage_of=workers.usage_of,
            nodes=self._scheduler,
            origins=Origins(self._me.token),
            async_queue=async_queue,
            plan_store=EtcdPlans(etcd),
            stays=EtcdLedger(etcd).stays,
            planner=self._scheduler.planner,
            call_suffix=f"@{self._scheduler.name}",
            metrics_of_all=self._options.metrics_of_all,
            fault=self._without_scheduler,
        )

    async def _may_open(self, front: Front, feed: EtcdFeed) -> None:
        """
        Return when the port may be opened: at once, unless others share it. They take the calls until this process
        knows all functions.
        """
        if self._options.metrics_of_all:
            await first_of(feed.listed.wait(), front.failed.wait())
        self._opens = True

    async def _take_part(self, etcd: Etcd, front: Front, feed: EtcdFeed, async_queue: EtcdAsyncQueue) -> None:
        """Run the tasks of a gateway in a cluster until the server has stopped. If one task fails, all end."""
        leaders = self._scheduler.leaders
        try:
            await first_of(
                leaders.follow(leader_addresses(etcd)), leaders.run(), feed.run(), self._count(front),
                self._begin_async(front, feed, async_queue), self._weights.run(), front.stopped.wait(),
            )  # fmt: skip
        except GpufaasError:
            log.exception("a side task failed")
            raise

    async def _count(self, front: Front) -> None:
        """Tell the scheduler how often functions with a scaling rule are called."""
        while True:
            await asyncio.sleep(_COUNT_EVERY_S)
            pending = front.async_calls.backlog.counts()
            counted = {
                each.full_name: (
                    each.stats.begun, each.stats.finished, each.stats.inflight, pending.get(each.full_name, 0)
                )
                for each in front.catalogue.everywhere()
                if each.options.scaling is not None and each.options.scaling.acts
            }  # fmt: skip
            if counted:
                self._scheduler.counted(counted)

    async def _begin_async(self, front: Front, feed: EtcdFeed, async_queue: EtcdAsyncQueue) -> None:
        await feed.listed.wait()
        front.async_calls.begin()
        await front.async_calls.counted.wait()
        await async_queue.follow(front.async_calls.find, front.async_calls.lose)

    def _without_scheduler(self) -> str:
        """Return that there is no scheduler; empty: there is, or calls still wait for the next one (`NO_LEADER_S`)."""
        leaders, age_s = self._scheduler.leaders, self._scheduler.status().age_s
        if age_s == 0 or (self._scheduler.view is not None and age_s <= NO_LEADER_S):
            return ""
        why = (leaders.refused or f"{leaders.leader} is not reached") if leaders.leader else "none leads"
        return f"no scheduler for {age_s:.0f} s: {why}"

    def _why_not_ready(self, front: Front) -> str:
        """Return why others may serve calls better. If nobody leads, all are alike, and serve what is loaded."""
        if not front.catalogue.loaded:
            return "functions are being read from etcd"
        why = self._without_scheduler()
        if why and self._scheduler.view is not None and not self._scheduler.leaders.leader:
            return f"ready for models that are loaded; {why}"
        return why

    async def _greet(self, front: Front) -> None:
        if await front.server.opened():
            print(f"✓ serves     http://{self._options.front.host}:{self._options.front.port}", flush=True)


@dataclass(slots=True, eq=False)
class GatewayArtifacts:
    """Uploads to this gateway (`ports.Artifacts`). A complete one is announced and put in the object store."""

    _artifacts: ArtifactStore
    _weights: Weights
    _loop: asyncio.AbstractEventLoop

    def has(self, digest: str) -> bool:
        if self._artifacts.has(digest) and digest not in self._weights.unpublished:
            return True
        # Methods of this port run in threads. Any other holder will do.
        holders = asyncio.run_coroutine_threadsafe(self._weights.holders(digest), self._loop).result()
        if holders:
            return True
        store = self._weights.store
        return (
            store is not None and asyncio.run_coroutine_threadsafe(store.head(digest), self._loop).result() is not None
        )

    @contextlib.contextmanager
    def writer(self, digest: str) -> Generator[ArtifactWriter]:
        with self._artifacts.writer(digest) as writer:
            yield writer
        # The context is left in a thread, as it was entered in one.
        asyncio.run_coroutine_threadsafe(self._weights.publish(digest), self._loop).result()


def _own_name(options: GatewayOptions) -> str:
    """Return the name by which nodes reach this machine."""
    if options.advertise:
        return options.advertise
    host = options.front.host
    return socket.gethostname() if host in ("0.0.0.0", "::") else host


def key_of_secrets(key_file: Path | None) -> SecretsKey | None:
    """Return the key that secrets are sealed with, made if need be; None: this gateway keeps none."""
    if key_file is None:
        return None
    return SecretsKey.read(key_file) if key_file.exists() else create_key_file(key_file)


async def _secrets(etcd: Etcd, key_file: Path | None) -> SecretStore:
    key = key_of_secrets(key_file)
    if key is None:
        return _NoSecrets()
    secrets = EtcdSecrets(etcd, key)
    await secrets.check_key()
    return secrets


class _NoSecrets:
    """A gateway without --secrets-key has none."""

    def names(self, namespace: str) -> list[str]:  # noqa: ARG002 - the port's
        return []

    def _none(self, *_: object) -> None:
        raise InvalidSpec(
            "this gateway keeps no secrets: start gateways and nodes with --secrets-key FILE, the same key for all"
        )

    create = update = remove = _none

    def drop(self, namespace: str) -> None:
        pass
