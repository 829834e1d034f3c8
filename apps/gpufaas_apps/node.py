"""
``gpufaas node``: the GPU manager of one machine, as a process of its own: devices, workers, the door for gateways.

It registers in etcd under a lease, obeys the scheduler that leads, and takes calls from gateways.
"""

import asyncio
import contextlib
import logging
from contextlib import aclosing
from pathlib import Path

import msgspec

from gpufaas_apps.engines import opened_engine
from gpufaas_apps.options import DEFAULT_NODE_PORT, NodeOptions
from gpufaas_apps.service import (
    Status,
    advertised,
    first_of,
    identity,
    leader_addresses,
    listening,
    on_signals,
    opened,
    own_directory,
    run_service,
    status_served,
)
from gpufaas_apps.watchdog import notify
from gpufaas_apps.weights import Weights
from gpufaas_cache_manager.artifacts import ArtifactStore
from gpufaas_cache_manager.bundles import BundleStore
from gpufaas_core.connection import split_address
from gpufaas_core.logs import FunctionLogs
from gpufaas_core.model import NodeId
from gpufaas_core.origin import Origins
from gpufaas_core.units import format_bytes
from gpufaas_gateway.errors import UnknownName
from gpufaas_gateway.secret_files import SecretFiles
from gpufaas_gpu_manager.agent import Agent
from gpufaas_gpu_manager.devices import open_devices
from gpufaas_gpu_manager.door import Door
from gpufaas_gpu_manager.enforcement import Enforcement
from gpufaas_gpu_manager.metrics import node_metrics
from gpufaas_gpu_manager.node import Node
from gpufaas_gpu_manager.settings import NodeSettings
from gpufaas_store.election import register
from gpufaas_store.etcd import Etcd
from gpufaas_store.secrets import EtcdSecrets, SecretChanged, SecretRemoved, SecretsKey

log = logging.getLogger("node")

_FINISH_S = 8.0
"""Calls that run when the node is told to stop may take so long; whoever stops containers waits 10 s."""


def run(options: NodeOptions) -> None:
    own_directory(options.data, "--data")
    run_service(_main(options), _FINISH_S)


def empty(folder: Path) -> Path:
    """Return *folder*, made and emptied: what an earlier run spooled is of nobody."""
    folder.mkdir(parents=True, exist_ok=True)
    for each in folder.iterdir():
        each.unlink()
    return folder


async def _main(options: NodeOptions) -> None:
    me = identity(options.cluster, "node")
    enforcement = Enforcement(options.devices.memory_enforcement)
    devices = open_devices(options.devices.devices, NodeId(me.id), options.devices.labels, enforcement.name)
    stop = asyncio.Event()
    on_signals(stop)
    data = options.data
    logs = FunctionLogs(data / "logs")
    secrets = SecretFiles(data / "secrets", data / "secret-mounts")
    artifacts = ArtifactStore(data / "artifacts")
    bundles = BundleStore(data / "bundles", artifacts)
    containers = await opened_engine(options.devices.functions, f"node-{me.id}", 0, _no_inner_door)
    weights = Weights(me, artifacts, bundles, options.object_store)
    await weights.open()
    agent = Agent(me, "", prepare=weights.prefetch)
    node = Node(
        devices,
        bundles,
        logs,
        agent.report,
        log.warning,
        NodeSettings(
            env={"OPENFAAS_URL": options.gateway_url} if options.gateway_url else {},
            secrets=secrets,
            origins=Origins(me.token),
        ),
        containers,
        fetch=weights.fetch,
        enforcement=enforcement,
    )
    agent.node = node
    door = Door(node, logs, me, empty(data / "spool"))
    status = Status(metrics=lambda: node_metrics(node), more=weights.served)
    listen = listening(options.listen, options.advertise, DEFAULT_NODE_PORT)
    host, _ = split_address(listen)
    try:
        await door.open(listen)
        address = agent.address = advertised(listen, options.advertise, door.port)
        async with status_served(status, host, options.cluster.status_port) as status_port:
            for each in node.devices():
                print(f"✓ device     {each.id}  {format_bytes(each.memory)}", flush=True)
            print(f"✓ node       {me.id} at {address}, status at port {status_port}", flush=True)
            await node.start()
            notify("READY=1")
            status.ready = lambda: "waits for etcd"
            serving = asyncio.create_task(_serve(options, agent, node, weights, secrets, address, status_port, status))
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if not serving.done():
                serving.cancel()
            await asyncio.gather(serving, return_exceptions=not serving.done() or serving.cancelled())
    finally:
        # No scheduler hears us any more, so that nothing new comes; what runs may end.
        await door.finish(_FINISH_S)
        await door.close()
        await node.close()
        logs.close()


async def _serve(
    options: NodeOptions, agent: Agent, node: Node, weights: Weights, secrets: SecretFiles, address: str,
    status_port: int, status: Status,
) -> None:  # fmt: skip
    me = agent.me

    async def follow() -> None:
        await agent.leaders.follow(leader_addresses(etcd))

    async with opened(options.cluster) as etcd:
        about = {
            "id": me.id, "address": address, "boot": me.boot, "version": me.version,
            "devices": [msgspec.to_builtins(each) for each in node.devices()],
        }  # fmt: skip
        registration = await register(
            etcd,
            f"v1/nodes/{me.id}",
            msgspec.json.encode(about),
            same=lambda value: msgspec.json.decode(value).get("address") == address,
        )
        status.ready = lambda: (
            node.fault
            if agent.connected
            else f"no scheduler: {agent.leaders.refused or agent.leaders.leader or 'none leads'}"
        )
        host, _ = split_address(address)
        weights.join(etcd, registration, f"http://{host}:{status_port}")
        try:
            await first_of(
                follow(),
                node.watch_devices(agent.tell),
                agent.leaders.run(),
                weights.run(),
                _follow_secrets(etcd, options, secrets),
            )
        finally:
            await registration.close()


async def _follow_secrets(etcd: Etcd, options: NodeOptions, files: SecretFiles) -> None:
    """Have the secrets here as files, as they are in etcd; running functions see what changes."""
    if options.secrets_key is None:
        await asyncio.Event().wait()
        return
    sealed = EtcdSecrets(etcd, SecretsKey.read(options.secrets_key))
    await sealed.check_key()
    seen: set[tuple[str, str]] = set()
    async with aclosing(sealed.watch()) as changes:
        async for change in changes:
            match change:
                case SecretChanged(namespace, name, value):
                    seen.add((namespace, name))
                    await asyncio.to_thread(_put_secret, files, namespace, name, value)
                case SecretRemoved(namespace, name):
                    seen.discard((namespace, name))
                    await asyncio.to_thread(_drop_secret, files, namespace, name)
                case _:
                    for namespace in await asyncio.to_thread(files.namespaces):
                        for name in await asyncio.to_thread(files.names, namespace):
                            if (namespace, name) not in seen:
                                await asyncio.to_thread(_drop_secret, files, namespace, name)


def _put_secret(files: SecretFiles, namespace: str, name: str, value: bytes) -> None:
    try:
        files.update(namespace, name, value)
    except UnknownName:
        files.create(namespace, name, value)


def _drop_secret(files: SecretFiles, namespace: str, name: str) -> None:
    with contextlib.suppress(UnknownName):
        files.remove(namespace, name)


async def _no_inner_door(_: str, __: str) -> None:
    """Functions in containers reach the gateway by the cluster's own address."""
