"""The machine of a node, as its options say: devices, the host tier, what holds workers, and the container engine."""

import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from gpufaas_adapters.files.secrets import SecretFiles
from gpufaas_apps.options import DeviceOptions
from gpufaas_cache_manager.artifacts import ArtifactStore
from gpufaas_cache_manager.bundles import BundleStore
from gpufaas_cache_manager.host_tier import HostTier
from gpufaas_core import constraints
from gpufaas_core.bundle import WeightsFile, WorkerSpec
from gpufaas_core.constraints import ISOLATED_BY, ISOLATION
from gpufaas_core.descriptors import weights_share
from gpufaas_core.errors import GpufaasError, InvalidSpec
from gpufaas_core.logs import FunctionLogs
from gpufaas_core.messages import Event
from gpufaas_core.model import NodeId
from gpufaas_core.origin import Origins
from gpufaas_core.units import Bytes, MiB, format_bytes
from gpufaas_gpu_manager.devices import NodeDevice, described, open_devices
from gpufaas_gpu_manager.enforcement import Enforcement
from gpufaas_gpu_manager.host_cache import HostCache
from gpufaas_gpu_manager.isolation import levels
from gpufaas_gpu_manager.isolation.binds import checked
from gpufaas_gpu_manager.isolation.ids import Uids, written
from gpufaas_gpu_manager.isolation.ports import etcd_here
from gpufaas_gpu_manager.isolation.walls import PORTS, Walls
from gpufaas_gpu_manager.launch.networks import OnNetworks
from gpufaas_gpu_manager.machine_memory import total_memory
from gpufaas_gpu_manager.node import Node
from gpufaas_gpu_manager.settings import NodeSettings
from gpufaas_gpu_manager.supervisor import ContainerEngine

log = logging.getLogger("node")

_SHARE: Final = 8
"""By default the host tier is this part of the memory."""


class NodeStores:
    """What a node keeps in its data directory. :raises StorageFailed: one of them cannot be used"""

    def __init__(self, data: Path) -> None:
        self.artifacts = ArtifactStore(data / "artifacts")
        self.bundles = BundleStore(data / "bundles", self.artifacts)
        self.logs = FunctionLogs(data / "logs")
        self.secrets = SecretFiles(data / "secrets", data / "secret-mounts")


@dataclass(frozen=True, slots=True)
class Machine:
    """The devices that are open, what holds their workers to their memory, and the bytes of the host tier."""

    given: DeviceOptions
    devices: list[NodeDevice]
    enforcement: Enforcement
    host_budget: Bytes

    @classmethod
    def opened(cls, given: DeviceOptions, node: NodeId) -> "Machine":
        """Open the devices of *node*. Raises as `open_devices` and `host_budget`."""
        budget, enforcement = host_budget(given.host_cache), Enforcement(given.memory_enforcement)
        devices = open_devices(
            given.devices, node, given.labels, enforcement.name, given.read_costs, enforcement.shares_by, given.standby,
            given.isolation,
        )  # fmt: skip
        return cls(given, devices, enforcement, budget)

    def node(
        self,
        data: Path,
        stores: NodeStores,
        report: Callable[[Event], None],
        containers: ContainerEngine | None,
        origins: Origins,
        url: str,
        fetch: Callable[[WorkerSpec], Awaitable[str]] | None = None,
        etcd: Sequence[str] = (),
    ) -> Node:
        """
        Return the node of these devices; for *report*, *containers* and *fetch* see `Node`.

        :param data: the platform's directory, with *stores* in it
        :param url: the value of OPENFAAS_URL for functions; empty: they have none
        :param etcd: the endpoints of the cluster
        :raises InvalidSpec: as `isolation_of`
        """
        given = self.given
        walls, uids = isolation_of(given, data, self.devices, etcd)
        settings = NodeSettings(
            env={"OPENFAAS_URL": url} if url else {}, secrets=stores.secrets, origins=origins, standby=given.standby,
            sockets=data / "sockets", scratch=data / "scratch", park=given.park, isolation=walls, uids=uids,
        )  # fmt: skip
        return Node(
            self.devices, stores.bundles, stores.logs, report, log.warning, settings, containers, fetch,
            self.enforcement, host_cache=_host_cache(self.host_budget, stores.artifacts),
        )  # fmt: skip


def lines_of(node: Node) -> Iterator[str]:
    """Yield the lines that greet people about the devices of *node*, and what holds their workers."""
    devices = node.devices()
    yield from (f"device     {described(each)}" for each in devices)
    yield from (f"isolation  {each}" for each in constraints.isolation_of(each.labels for each in devices))


def host_budget(asked: Bytes | None) -> Bytes:
    """
    Return the size of the host tier: *asked*, or an eighth of the memory of this machine or container.

    :raises InvalidSpec: there is less memory than *asked*
    """
    memory = total_memory()
    if asked is None:
        return memory // _SHARE // MiB * MiB
    if asked > memory:
        raise InvalidSpec(
            f"--host-cache {format_bytes(asked)}: there are {format_bytes(memory)} of memory here, "
            "also for the workers: give it less"
        )
    return asked


def _host_cache(budget: Bytes, artifacts: ArtifactStore) -> HostCache:
    def on_corrupt(weights: WeightsFile) -> None:
        with contextlib.suppress(GpufaasError):  # loads get this error, too
            artifacts.recheck(weights.sha256)

    return HostCache(HostTier(budget, weights_share()), log.warning, on_corrupt)


def isolation_of(
    given: DeviceOptions, data: Path, devices: Sequence[NodeDevice], etcd: Sequence[str] = ()
) -> tuple[Walls, Uids | None]:
    """
    Return what holds workers that are processes, and the uids of their functions, if they have some. The labels of
    *devices* say it, and the log what a level lacks here.

    :param data: the platform's directory
    :param etcd: the endpoints of the cluster
    :raises InvalidSpec: --bind names what functions may not see; or the level is strict, and something is missing
    """
    level = given.isolation
    walls = levels.walls(level, checked(given.binds, data), str(data))
    for each in levels.tried()[1] if level == "best" else ():
        if each.needed and not each.works:
            log.warning("--isolation best goes without %s: %s", each.name, each.why)
    try:
        uids = Uids(data / "uids", given.uid_range, strict=walls.strict) if walls.uids else None
    except InvalidSpec as exc:
        if walls.strict:
            raise
        walls, uids = replace(walls, uids=False), None
        log.warning("functions have no uids of their own: %s", exc)
    if walls != Walls():
        walls = replace(walls, etcd=etcd_here(etcd))
        for port in walls.etcd if walls.landlock < PORTS else ():
            log.warning("an etcd at port %d asks for no login, and functions reach it: give it one (--etcd-user)", port)
    words = str(walls) if uids is None else str(walls).replace("uids", f"uids {written(uids.range)}")
    for device in devices:
        device.device = replace(device.device, labels={**device.device.labels, ISOLATION: level, ISOLATED_BY: words})
    return walls, uids


def container_engine(
    functions: str, instance: str, gateway: str, on_networks: OnNetworks | None
) -> ContainerEngine | None:
    """
    Return the engine for *functions*, not connected yet; None: functions of images do not run here.

    :param instance: names the platform that owns the containers; `connect` removes those of its earlier run
    :param gateway: its URL as containers reach it; see `Containers`
    :param on_networks: as of `Networks`
    :raises InvalidSpec: Kubernetes is asked for, and this is not a pod, or its client is not installed
    """
    if functions == "process":
        return None
    if functions == "kubernetes":
        try:
            from gpufaas_gpu_manager.launch.kubernetes import Pods
            from gpufaas_gpu_manager.launch.kubernetes_api import access_from
            from gpufaas_gpu_manager.launch.pod_manifest import settings_from
        except ModuleNotFoundError as exc:
            raise InvalidSpec(f"{exc.name} is not installed: pip install 'gpufaas[kubernetes]'") from None

        return Pods(instance, access_from(os.environ), settings_from(os.environ))
    from gpufaas_gpu_manager.launch import containers

    return containers.Containers(instance, gateway, on_networks)


async def connect(engine: ContainerEngine | None, functions: str) -> None:
    """
    Connect *engine*, unless *functions* is ``auto``: then it is connected for the first image.

    :raises InvalidSpec: the engine that was asked for cannot be used; says what is missing
    """
    if engine is not None and functions != "auto":
        await engine.start()
