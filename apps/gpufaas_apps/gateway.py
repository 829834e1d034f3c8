"""
``gpufaas gateway``: HTTP in; functions from etcd, leases from the scheduler that leads, calls to the nodes' doors.

Stateless but for the bodies that it spools: any number of gateways serve the same functions.
"""

import asyncio
import contextlib
import logging
import socket
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from gpufaas_apps.cluster import identity, leader_addresses, opened
from gpufaas_apps.front import GRACE_S, Front
from gpufaas_apps.options import GatewayOptions
from gpufaas_apps.process import first_of, on_signals, run_service
from gpufaas_apps.serve import _builds, _credentials, _listen, _own
from gpufaas_apps.status import Status, status_served
from gpufaas_apps.watchdog import notify
from gpufaas_apps.weights import GatewayArtifacts, Weights
from gpufaas_cache_manager.artifacts import ArtifactStore
from gpufaas_cache_manager.bundles import BundleStore
from gpufaas_core import wire
from gpufaas_core.errors import GpufaasError, InvalidSpec, StorageFailed
from gpufaas_core.model import DeviceId
from gpufaas_core.origin import Origins
from gpufaas_gateway.ports import Secrets
from gpufaas_gateway.remote_nodes import RemoteNodes
from gpufaas_gateway.remote_scheduler import RemoteScheduler
from gpufaas_gateway.remote_workers import RemoteLogs, RemoteWorkers
from gpufaas_store.async_queue import EtcdAsyncQueue
from gpufaas_store.election import register
from gpufaas_store.etcd import Etcd, Listed, Put
from gpufaas_store.functions import COUNTS, EntryChanged, EntryRemoved, EtcdFunctionStore, QuotaChanged
from gpufaas_store.secrets import EtcdSecrets, SecretsKey, create_key_file

if TYPE_CHECKING:
    from pathlib import Path

    from gpufaas_gateway.auth import Credentials

log = logging.getLogger("gateway")

_COUNT_EVERY_S = 1.0


def run(options: GatewayOptions) -> None:
    front = options.front
    with _own(front.data) as spool, _listen(front.host, front.port) as listening:
        credentials = _credentials(front)
        front = replace(front, port=listening.getsockname()[1])
        run_service(_main(replace(options, front=front), credentials, spool, listening), GRACE_S)


async def _main(
    options: GatewayOptions, credentials: "Credentials | None", spool: "Path", listening: "socket.socket"
) -> None:
    me = identity(options.cluster, "gateway")
    status = Status(ready=lambda: "waits for etcd")
    stop = asyncio.Event()
    on_signals(stop)
    async with status_served(status, options.front.host, options.cluster.status_port) as status_port:
        print(f"✓ gateway    {me.id} will serve port {options.front.port}, status at port {status_port}", flush=True)
        notify("READY=1")
        door = asyncio.Event()
        opening = asyncio.create_task(_run(options, credentials, spool, listening, status, status_port, door))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((opening, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        # Once the door opens, a signal is the server's, which ends in peace; before, it ends the wait for etcd.
        if not opening.done() and not door.is_set():
            opening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await opening


async def _run(
    options: GatewayOptions, credentials: "Credentials | None", spool: "Path", listening: "socket.socket",
    status: Status, status_port: int, door: asyncio.Event,
) -> None:  # fmt: skip
    me = identity(options.cluster, "gateway")
    data = options.front.data
    async with opened(options.cluster) as etcd:
        store = EtcdFunctionStore(etcd)
        secrets = await _secrets(etcd, options.secrets_key)
        artifacts = ArtifactStore(data / "artifacts")
        weights = Weights(me, artifacts, BundleStore(data / "bundles", artifacts), options.object_store)
        await weights.open()
        nodes = RemoteNodes(me, lambda call, device, reason: scheduler.unreachable(call, DeviceId(device), reason))

        def on_view(view: wire.View) -> None:
            nodes.set_nodes(view.nodes)

        scheduler = RemoteScheduler(me, on_view=on_view)
        nodes.watchers.add(lambda: scheduler.unlinked(nodes.unlinked()))
        workers = RemoteWorkers(nodes)
        logs = RemoteLogs(nodes)
        async_queue = await EtcdAsyncQueue.open(etcd, me.id, data / "async")
        front = Front(
            options.front, credentials, spool, store=store,
            artifacts=GatewayArtifacts(artifacts, weights, asyncio.get_running_loop()),
            workers=workers, scheduler=scheduler, node=nodes, secrets=secrets, logs=logs, async_queue=async_queue,
            usage_of=workers.usage_of, end_logs=logs.end_followers, call_suffix=f"@{scheduler.name}",
            builds=_builds(options.front, spool), cluster=scheduler, origins=Origins(me.token),
        )  # fmt: skip
        status.more = weights.served
        status.metrics = front.metrics.render_own
        catalogue = front.catalogue
        listed, limited = asyncio.Event(), asyncio.Event()

        async def follow_leader() -> None:
            await scheduler.leaders.follow(leader_addresses(etcd))

        async def follow_functions() -> None:
            seen: set[str] = set()
            async with aclosing(store.watch_entries()) as changes:
                async for change in changes:
                    match change:
                        case EntryChanged(entry):
                            seen.add(entry.record.full_name)
                            if entry.worker is not None and entry.function is not None and entry.is_complete:
                                front.deployer.adopt(entry.record, entry.worker, entry.function)
                        case EntryRemoved(name):
                            seen.discard(name)
                            front.deployer.dropped(name)
                        case Listed():
                            for each in catalogue.everywhere():
                                if each.full_name not in seen:
                                    front.deployer.dropped(each.full_name)
                            await limited.wait()  # no call gets past a quota because it is an early one
                            catalogue.complete()
                            listed.set()

        async def follow_namespaces() -> None:
            async with aclosing(etcd.watch("v1/namespaces/")) as changes:
                async for _ in changes:
                    try:
                        await front.deployer.namespaces.load()
                    except StorageFailed as exc:
                        log.warning("namespaces.not_read, will be at the next change: %s", exc)

        async def follow_quotas() -> None:
            seen: set[str] = set()
            async with aclosing(store.watch_quotas()) as changes:
                async for change in changes:
                    match change:
                        case QuotaChanged(namespace, None):
                            seen.discard(namespace)
                            front.deployer.quotas.adopt(namespace, None)
                        case QuotaChanged(namespace, quota):
                            seen.add(namespace)
                            front.deployer.quotas.adopt(namespace, quota)
                        case Listed():
                            front.deployer.quotas.keep_only(seen)
                            limited.set()

        async def follow_counts() -> None:
            """What other gateways counted shows here too."""
            async with aclosing(etcd.watch(COUNTS)) as changes:
                async for change in changes:
                    if isinstance(change, Put) and change.item.value.isdigit():
                        namespace, _, name = change.item.key.removeprefix(COUNTS).partition("/")
                        found = catalogue.find(f"{name}.{namespace}")
                        if found is not None:
                            found.stats.saved_before = max(0, int(change.item.value) - found.stats.saved)

        async def count() -> None:
            """Tell the scheduler what functions with a scaling rule are asked for."""
            while True:
                await asyncio.sleep(_COUNT_EVERY_S)
                pending = front.async_calls.backlog.counts()
                counted = {
                    each.full_name: (
                        each.stats.begun, each.stats.finished, each.stats.inflight, pending.get(each.full_name, 0)
                    )
                    for each in catalogue.everywhere()
                    if each.scaling is not None
                }  # fmt: skip
                if counted:
                    scheduler.counted(counted)

        async def begin_async() -> None:
            await listed.wait()
            front.async_calls.begin()
            await front.async_calls.counted.wait()
            await async_queue.follow(front.async_calls.find, front.async_calls.lose)

        def ready() -> str:
            if not catalogue.loaded:
                return "functions are being read from etcd"
            if not scheduler.connected:
                return f"no scheduler: {scheduler.leaders.leader or 'none leads'}"
            return ""

        status.ready = ready
        about = {"id": me.id, "boot": me.boot, "version": me.version, "port": options.front.port}
        registration = await register(etcd, f"v1/gateways/{me.id}", msgspec.json.encode(about), same=lambda _: True)
        weights.join(etcd, registration, f"http://{_own_name(options)}:{status_port}")
        stopped = asyncio.Event()

        async def side_tasks() -> None:
            try:
                await first_of(
                    follow_leader(), follow_functions(), follow_namespaces(), follow_quotas(), follow_counts(),
                    scheduler.leaders.run(), count(), begin_async(),
                    weights.run(), stopped.wait(),
                )  # fmt: skip
            except GpufaasError:
                log.exception("a side task failed")
                raise

        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(front.ended(side_tasks()))
                tasks.create_task(front.ended(front.async_calls.run()))
                tasks.create_task(front.ended(front.keeper.keep(stopped)))
                tasks.create_task(_say(front, options))
                door.set()
                await front.serve(listening, stopped)
        finally:
            await registration.close()
            await front.callbacks.close()
            await nodes.close()
            await async_queue.stop()


def _own_name(options: GatewayOptions) -> str:
    """Return by which name nodes reach this machine."""
    if options.advertise:
        return options.advertise
    host = options.front.host
    return socket.gethostname() if host in ("0.0.0.0", "::") else host


async def _secrets(etcd: Etcd, key_file: "Path | None") -> Secrets:
    if key_file is None:
        return _NoSecrets()
    key = SecretsKey.read(key_file) if key_file.exists() else create_key_file(key_file)
    secrets = EtcdSecrets(etcd, key)
    await secrets.check_key()
    return secrets


class _NoSecrets:
    """Of a cluster that was given no key to seal them with."""

    def names(self, namespace: str) -> list[str]:  # noqa: ARG002 - the port's
        return []

    def _none(self, *_: object) -> None:
        raise InvalidSpec(
            "this gateway keeps no secrets: start gateways and nodes with --secrets-key FILE, the same key for all"
        )

    create = update = remove = _none

    def drop(self, namespace: str) -> None:
        pass


async def _say(front: Front, options: GatewayOptions) -> None:
    if await front.started():
        print(f"✓ serves     http://{options.front.host}:{options.front.port}", flush=True)
