"""The options of the services: the CLI's commands fill them in, the services read them."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from gpufaas_core.cost import Cost
from gpufaas_core.orders import NodeOffer
from gpufaas_core.units import Bytes, GiB, MiB
from gpufaas_gpu_manager.isolation.ids import UID_RANGE as UID_RANGE
from gpufaas_gpu_manager.isolation.ids import uid_range as uid_range
from gpufaas_scheduler.policies import DEFAULT_POLICY, PolicySpec

DEFAULT_SCHEDULER_PORT: Final = 7070
DEFAULT_NODE_PORT: Final = 7080


@dataclass(frozen=True, kw_only=True)
class FrontOptions:
    """The options of every process with a gateway in it."""

    port: int = 8080
    host: str = "127.0.0.1"
    auth: Literal["on", "off", "auto"] = "auto"
    """Whether the management routes ask for a password; auto: as on, since functions reach them as others do."""
    auth_dir: Path | None = None
    """The directory of ``basic-auth-user`` and ``basic-auth-password``. None: in *data*, made if need be."""
    data: Path = Path()
    """The directory of all that is durable: functions, artifacts, logs."""
    profiles: tuple[str, ...] = ()
    """``NAME=CONSTRAINT[,CONSTRAINT]``: what the annotation ``com.openfaas.profile`` may name, beside gpu and
    nvidia-gpu."""
    max_queue: int = 1000
    """Calls that may wait, per function, unless it says otherwise."""
    max_async_queue: int = 100_000
    """Asynchronous calls of one function that have not ended."""
    async_queues: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Queues of asynchronous calls by name: how many run at once, and how many may not have ended."""
    allow_local_callbacks: bool = False
    """Whether X-Callback-Url may name an address of this machine or its link."""
    max_body: Bytes = 100 * MiB
    """Largest request body, in bytes, unless the function says otherwise."""

    @property
    def url(self) -> str:
        """Where this machine reaches the gateway."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "localhost") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """What decides."""

    policy: PolicySpec = field(default_factory=lambda: PolicySpec(DEFAULT_POLICY))
    journal: Path | None = None
    """Every event of the engine goes here as a JSON line, to be replayed."""
    planner: str = ""
    """The solver that makes plans (`gpufaas_scheduler.solving`); empty: nobody does but people."""


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """The devices of a node, and how it runs functions."""

    devices: tuple[str, ...] = ()
    """``cpu:0=2GiB``, ``cuda:0``, ``cuda:0=20GiB``, ``emulated:0=16GiB,kind=v100,profile=FILE``. Empty: the
    CUDA devices there are, else two CPU devices from half of the free memory."""
    read_costs: Callable[[Path], Mapping[str, Mapping[str, Cost]]] | None = field(default=None, compare=False)
    """Reads the profiles of emulated devices: see `gpufaas_gpu_manager.devices.ReadCosts`."""
    labels: tuple[str, ...] = ()
    """``KEY=VALUE``, of all devices: what constraints of functions may ask for."""
    functions: Literal["process", "docker", "kubernetes", "auto"] = "auto"
    """How functions of images run: not at all, in Docker, as pods, in Docker if it answers when they are deployed."""
    memory_enforcement: Literal["auto", "cgroup", "watcher", "rlimit"] = "auto"
    """What holds workers on CPU devices to their memory; auto: control groups, else the watcher."""
    host_cache: Bytes | None = None
    """Memory for weights, in bytes, beside that of the devices; None: an eighth of the machine's; 0: none."""
    park: Literal["auto", "on", "off"] = "auto"
    """Evicted models of handlers stay in memory as stopped processes, within `host_cache`; auto: of CPU devices."""
    standby: int = 1
    """Blank processes that wait to become workers; 0: each worker is forked when it starts."""
    isolation: Literal["none", "best", "strict"] = "best"
    """What holds workers that are processes; see `gpufaas_gpu_manager.isolation`."""
    uid_range: range = field(default_factory=lambda: uid_range(UID_RANGE))
    """The uids of functions, where they have some of their own."""
    binds: tuple[str, ...] = ()
    """Directories that all functions see: ``PATH`` to read, ``PATH:rw`` to write, too."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions(FrontOptions, DeviceOptions, PolicyOptions):
    """The whole platform in one process tree, on this machine."""

    history_size: Bytes = 10 * GiB
    """What bundles, parts and weights that only earlier revisions name may take on the disk, in bytes."""
    profile_idle: bool = False
    """Profiles are taken unasked, on devices that are idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """The options of every service of a cluster: its name, etcd, the token, certificates and the status port."""

    id: str
    etcd: tuple[str, ...] = ("127.0.0.1:2379",)
    etcd_prefix: str = "/gpufaas"
    etcd_ca: Path | None = None
    etcd_cert: Path | None = None
    etcd_key: Path | None = None
    etcd_user: str = ""
    etcd_password_file: Path | None = None
    token_file: Path = Path()
    """The file with the cluster's token; a service that has it may join."""
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    status_port: int = 0
    """The port of ``/healthz``, ``/readyz`` and ``/metrics``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    cluster: ClusterOptions
    policy: PolicyOptions
    offers: tuple[NodeOffer, ...] = ()
    """The kinds of nodes that the policy may order."""
    provider: str = ""
    """Who starts them; empty: nobody does."""
    data: Path = Path()
    """The directory of what the provider keeps."""
    listen: str = ""
    """Empty: the loopback address, or all addresses if `advertise` names one that is not this machine's own."""
    advertise: str = ""
    """The address at which gateways and nodes reach it; empty: the listening address, if that names a host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    cluster: ClusterOptions
    devices: DeviceOptions
    data: Path
    listen: str = ""
    advertise: str = ""
    object_store: str = ""
    secrets_key: Path | None = None
    gateway_url: str = ""
    """The value of OPENFAAS_URL for functions."""
    order: str = ""
    """The order for which a provider started it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    cluster: ClusterOptions
    front: FrontOptions
    object_store: str = ""
    secrets_key: Path | None = None
    advertise: str = ""
    """The name or address by which nodes reach this machine. Empty: that it listens on, else its host name."""
    workers: int = 1
    """Processes on the one port; above 1, `gpufaas_apps.gateway_processes` starts them."""
    metrics_of_all: str = ""
    """Of one process of several, the URL of the metrics of all; it shares its port, and opens it once it knows the
    functions."""


def default_data_dir() -> Path:
    """``$XDG_DATA_HOME/gpufaas``, which is ``~/.local/share/gpufaas`` unless it was moved."""
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "gpufaas"
