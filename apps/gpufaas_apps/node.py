"""
``gpufaas node``: the GPU manager of one machine, as a process of its own: devices, workers, the server for calls.

It registers in etcd under a lease, obeys the scheduler that leads, and takes calls from gateways.
"""

import asyncio
import contextlib
import logging
import sys
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpufaas_adapters.etcd.client import Etcd
from gpufaas_adapters.etcd.election import Registration, register
from gpufaas_adapters.etcd.secrets import EtcdSecrets, SecretChanged, SecretRemoved, SecretsKey
from gpufaas_adapters.files.secrets import SecretFiles
from gpufaas_apps.cluster import advertised, identity, leader_addresses, listening, opened
from gpufaas_apps.machine import Machine, NodeStores, connect, container_engine, lines_of
from gpufaas_apps.options import DEFAULT_NODE_PORT, NodeOptions
from gpufaas_apps.process import asked_to_stop, first_of, own_directory, prepare_process, run_loop, settle
from gpufaas_apps.status import Status, status_served
from gpufaas_apps.watchdog import notify
from gpufaas_apps.weights import Weights
from gpufaas_cluster.agent import Agent
from gpufaas_cluster.call_server import CallServer
from gpufaas_cluster.connection import Identity, split_address
from gpufaas_core.model import NodeId
from gpufaas_core.origin import Origins
from gpufaas_gpu_manager.metrics import node_metrics
from gpufaas_gpu_manager.node import Node
from gpufaas_gpu_manager.supervisor import ContainerEngine

log = logging.getLogger("node")

_FINISH_S = 8.0
"""Calls may run on for so long when the node is told to stop. Docker and Kubernetes wait 10 s or more."""


def run(options: NodeOptions) -> None:
    prepare_process(isolated=options.devices.isolation != "none")
    own_directory(options.data, "--data")
    run_loop(_main(options), _FINISH_S)


async def _main(options: NodeOptions) -> None:
    stop = asked_to_stop()
    await composed(options, identity(options.cluster, "node")).run(stop)


def composed(options: NodeOptions, me: Identity) -> "NodeApp":
    """Open the node's devices and stores, and compose it. :raises GpufaasError: one of them cannot be used"""
    given, data = options.devices, options.data
    machine = Machine.opened(given, NodeId(me.id))
    containers = container_engine(given.functions, f"node-{me.id}", options.gateway_url, None)
    stores = NodeStores(data)
    weights = Weights(me, stores.artifacts, stores.bundles, options.object_store)
    agent = Agent(me, "", prepare=weights.prefetch, order=options.order)
    agent.node = machine.node(
        data, stores, agent.report, containers, Origins(me.token), options.gateway_url, weights.fetch,
        options.cluster.etcd,
    )  # fmt: skip
    return NodeApp(options, me, agent.node, containers, agent, weights, stores)


@dataclass(eq=False)
class NodeApp:
    """A node, its call server, and what it needs of the cluster: etcd, the scheduler that leads, weights, secrets."""

    _options: NodeOptions
    _me: Identity
    _node: Node
    _containers: ContainerEngine | None
    _agent: Agent
    _weights: Weights
    _stores: NodeStores

    def __post_init__(self) -> None:
        self._calls = CallServer(self._node, self._stores.logs, self._me, self._options.data / "spool")
        self._status = Status(metrics=lambda: node_metrics(self._node), more=self._weights.served)

    async def run(self, stop: asyncio.Event) -> None:
        """
        Serve until *stop*. First the node leaves its scheduler, so that no new calls come; then calls that run may end;
        then workers and logs are closed.
        """
        options = self._options
        listen = listening(options.listen, options.advertise, DEFAULT_NODE_PORT)
        host, _ = split_address(listen)
        await connect(self._containers, options.devices.functions)
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._stores.logs.close)
            stack.push_async_callback(self._node.close)
            stack.push_async_callback(self._close_calls)
            await self._weights.open()
            await self._calls.open(listen)
            self._agent.address = advertised(listen, options.advertise, self._calls.port)
            port = await stack.enter_async_context(status_served(self._status, host, options.cluster.status_port))
            for line in lines_of(self._node):
                print(f"✓ {line}", flush=True)
            if self._node.enforcement.why:
                print(f"! {self._node.enforcement.why}", file=sys.stderr, flush=True)
            print(f"✓ node       {self._me.id} at {self._agent.address}, status at port {port}", flush=True)
            await self._node.start()
            settle()
            notify("READY=1")
            self._status.ready = lambda: "waits for etcd"
            await first_of(self._take_part(port), stop.wait())

    async def _close_calls(self) -> None:
        await self._calls.finish(_FINISH_S)
        await self._calls.close()

    async def _take_part(self, status_port: int) -> None:
        """Run the tasks of a node in a cluster, without end. If one task fails, all end."""
        address = self._agent.address
        async with opened(self._options.cluster) as etcd:
            registration = await self._register(etcd)
            self._status.ready = self._why_not_ready
            host, _ = split_address(address)
            self._weights.join(etcd, registration, f"http://{host}:{status_port}")
            try:
                await first_of(
                    self._agent.leaders.follow(leader_addresses(etcd)),
                    self._node.watch_devices(self._agent.tell),
                    self._agent.leaders.run(),
                    self._weights.run(),
                    _follow_secrets(etcd, self._options.secrets_key, self._stores.secrets),
                )
            finally:
                await registration.close()

    async def _register(self, etcd: Etcd) -> Registration:
        me, address = self._me, self._agent.address
        about = {
            "id": me.id, "address": address, "boot": me.boot, "version": me.version,
            "devices": [msgspec.to_builtins(each) for each in self._node.devices()],
        }  # fmt: skip
        return await register(
            etcd,
            f"v1/nodes/{me.id}",
            msgspec.json.encode(about),
            same=lambda value: msgspec.json.decode(value).get("address") == address,
        )

    def _why_not_ready(self) -> str:
        if self._agent.connected:
            return self._node.fault
        leaders = self._agent.leaders
        return f"no scheduler: {leaders.refused or leaders.leader or 'none leads'}"


async def _follow_secrets(etcd: Etcd, key: Path | None, files: SecretFiles) -> None:
    """Keep *files* equal to the secrets in etcd; running functions see changes. Without a *key*, do nothing."""
    if key is None:
        await asyncio.Event().wait()
        return
    sealed = EtcdSecrets(etcd, SecretsKey.read(key))
    await sealed.check_key()
    known: set[tuple[str, str]] = set()
    async with aclosing(sealed.watch()) as changes:
        async for change in changes:
            if isinstance(change, SecretChanged):
                known.add((change.namespace, change.name))
                await asyncio.to_thread(files.put, change.namespace, change.name, change.value)
                continue
            if isinstance(change, SecretRemoved):
                known.discard((change.namespace, change.name))
            await asyncio.to_thread(files.keep_only, known)
