"""Options that several services share."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from gpufaas_apps.options import (
    UID_RANGE,
    ClusterOptions,
    DeviceOptions,
    FrontOptions,
    ServeOptions,
    default_data_dir,
    uid_range,
)
from gpufaas_cli.declare import F, option, options, parsed
from gpufaas_core.cost import Cost
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.orders import NodeOffer
from gpufaas_core.units import Bytes, format_bytes, parse_bytes
from gpufaas_scheduler.policies import DEFAULT_POLICY, policy_spec
from gpufaas_scheduler.solving import solver_named

_T = TypeVar("_T")
_FILE: Final = click.Path(dir_okay=False, path_type=Path)
_DIRECTORY: Final = click.Path(file_okay=False, path_type=Path)
_PORT: Final = click.IntRange(0, 65535)
_COUNT: Final = click.IntRange(1)
_QUEUE: Final = re.compile(r"([a-zA-Z0-9][-._a-zA-Z0-9]{0,62})=([0-9]{1,9})(?::([0-9]{1,9}))?")
_ID: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?")


def _size(text: str) -> Bytes:
    size = parse_bytes(text)
    if size <= 0:
        raise InvalidSpec(f"{text!r} must be more than nothing: write for example 100MiB")
    return size


def _queues(given: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    queues: dict[str, tuple[int, int]] = {}
    for text in given:
        found = _QUEUE.fullmatch(text)
        numbers = [] if found is None else [int(found[2]), int(found[3] or 1_000_000)]
        if found is None or min(numbers) < 1:
            raise InvalidSpec(f"{text!r} is not NAME=CONCURRENCY[:LIMIT]: write for example reports=4:10000")
        if found[1] in queues:
            raise InvalidSpec(f"{found[1]} is given twice: say it once")
        queues[found[1]] = numbers[0], numbers[1]
    return queues


def _endpoints(text: str) -> tuple[str, ...]:
    endpoints = tuple(each.strip() for each in text.split(",") if each.strip())
    if not endpoints:
        raise InvalidSpec("no endpoint is given: name at least one, as HOST:PORT")
    return endpoints


def _id(name: str) -> str:
    if not _ID.fullmatch(name):
        raise InvalidSpec(f"{name!r} is no name: use a-z, 0-9, '-' and '.', at most 63, as in gpu-node-1")
    return name


def _offers(path: str) -> tuple[NodeOffer, ...]:
    from gpufaas_providers.offers import read_offers

    return read_offers(Path(path)) if path else ()


def _provider(name: str) -> str:
    from gpufaas_providers.offers import provider_named

    return provider_named(name) if name else ""


front_options = options(
    option("--port", type=_PORT, default=FrontOptions.port, metavar="PORT", says="Port to listen on."),
    option("--host", default="127.0.0.1", metavar="ADDRESS",
           says="Address to listen on; 0.0.0.0: all addresses of this machine."),
    option("--auth", type=click.Choice(("on", "off", "auto")), default="auto",
           says="Ask for user and password; functions stay public. auto is on: functions reach this port, too."),
    option("--auth-dir", type=_DIRECTORY, callback=parsed(Path.expanduser), metavar="DIR",
           says="Has the files basic-auth-user and basic-auth-password. [default: auth in --data, made at the first "
           "start]"),
    option("--profile", "profiles", multiple=True, metavar="NAME=CONSTRAINT[,CONSTRAINT]",
           says="Meaning of the annotation com.openfaas.profile: NAME, as in a100=nvidia.com/gpu.product=NVIDIA-A100; "
           "repeatable. gpu and nvidia-gpu are known: any CUDA device."),
    option("--max-queue", type=_COUNT, default=FrontOptions.max_queue, metavar="N",
           says="Calls of one function that may wait; more are answered 429."),
    option("--max-async-queue", type=_COUNT, default=FrontOptions.max_async_queue, metavar="N",
           says="Asynchronous calls of one function that have not ended; more are answered 429."),
    option("--async-queue", "async_queues", multiple=True, callback=parsed(_queues), metavar="NAME=CONCURRENCY[:LIMIT]",
           says="How many asynchronous calls of the functions that name this queue (annotation com.openfaas.queue) "
           "run at once, and how many may not have ended; repeatable. Functions that name none use faas-request, with "
           "64 at once and 16 of one function; a queue that is not given here has 16."),
    option("--allow-local-callbacks", is_flag=True,
           says="Let X-Callback-Url name addresses of this machine or its link, such as 127.0.0.1."),
    option("--max-body", callback=parsed(_size), metavar="SIZE", default=format_bytes(FrontOptions.max_body),
           says="Largest request body."),
)  # fmt: skip
"""Of every process that contains a gateway; the names are those of `FrontOptions`."""

device_options = options(
    option("--device", "devices", multiple=True, metavar="DEVICE",
           says="cuda:N, cuda:N=SIZE, cpu:N=SIZE or cpu:N=SIZE,cores=NUMBER, with labels of its own behind commas; or, "
           "to try policies without the hardware, emulated:N=SIZE,kind=KIND,profile=FILE, which takes the time that "
           "FILE says and computes nothing; repeatable. [default: all GPUs of this machine, else two CPU devices from "
           "half of the free memory]"),
    option("--label", "labels", multiple=True, metavar="KEY=VALUE",
           says="Label all devices, for functions whose constraints ask for it; repeatable."),
    option("--functions", type=click.Choice(("process", "docker", "kubernetes", "auto")), default="auto",
           says="Run functions that have only an image: not at all (process), in Docker, as pods of the Kubernetes "
           "that this runs in, or in Docker if its engine answers when they are deployed (auto). Functions that were "
           "built from templates are processes."),
    option("--memory-enforcement", type=click.Choice(("auto", "cgroup", "watcher", "rlimit")), default="auto",
           says="What keeps a worker on a CPU device, and all that it starts, within its memory: the kernel (cgroup), "
           "or a watcher where there are no control groups. rlimit: private memory only."),
    option("--host-cache", callback=parsed(parse_bytes), metavar="SIZE",
           says="Keep weights in so much memory of this machine, beside that of its devices, so that starts need not "
           "read them from the disk; 0: keep none. [default: an eighth of the memory]"),
    option("--park", type=click.Choice(("auto", "on", "off")), default="auto", is_flag=False, flag_value="on",
           says="Park models that are evicted: their processes stay, stopped, within the memory of --host-cache, and "
           "wake at the next miss. Where --host-cache has no room, they end. auto: on CPU devices."),
    option("--standby", type=click.IntRange(0, 64), default=DeviceOptions.standby, metavar="N",
           says="Keep N blank processes that have torch imported, so that a cold start does not wait until one is "
           "forked. GPUs, and CPU devices with cores, have N each. 0: none."),
    option("--isolation", type=click.Choice(("none", "best", "strict")), default="best", envvar="GPUFAAS_ISOLATION",
           says="Keep functions that are processes from each other, from the platform, and from what is not theirs: by "
           "all that this machine allows (best); or do not start without all of it (strict). See gpufaas isolation "
           "check."),
    option("--uid-range", default=UID_RANGE, callback=parsed(uid_range), envvar="GPUFAAS_UID_RANGE",
           metavar="FIRST-LAST", says="The uids of functions, one for each, where the platform is root. No user, and "
           "no other platform of this machine, may have one of them."),
    option("--bind", "binds", multiple=True, envvar="GPUFAAS_BIND", metavar="PATH[:rw]",
           says="Let all functions read this directory of the machine, such as data sets, or write to it as far as "
           "their uids may (:rw); repeatable. They see none else beside their own, and Python's and the system's."),
)  # fmt: skip
"""The names are those of `DeviceOptions`."""

policy_options = options(
    option("--policy", default=DEFAULT_POLICY, callback=parsed(policy_spec), metavar="SPEC",
           says="lb: any idle device; lalb: where the model is, when that is sooner; lalb-o3: as lalb, and hits may "
           "overtake; least-wait: what shortens waiting most, with replicas; or one that is installed. With "
           "options, as in lalb-o3:o3_limit=10, and roles, as in least-wait+replacement=cost-aware; gpufaas policies "
           "lists them."),
    option("--journal", type=_FILE, metavar="FILE", says="Write every event of the scheduler there, to be replayed."),
    option("--planner", default="", callback=parsed(solver_named), metavar="NAME",
           says="Have this solver, which is installed, plan where copies are. [default: none; people may]"),
)  # fmt: skip
"""The names are those of `PolicyOptions`."""

offer_options = options(
    option("--offers", default="", callback=parsed(_offers), metavar="FILE",
           says="Kinds of nodes that the policy may order, with memory, price and limit. [default: none]"),
    option("--provider", default="", callback=parsed(_provider), metavar="NAME",
           says="Who starts the nodes that are ordered: local (on this machine), or one that is installed."),
)  # fmt: skip
"""The names are those of `SchedulerOptions`."""

history_option = option(
    "--history-size", callback=parsed(parse_bytes), metavar="SIZE", default=format_bytes(ServeOptions.history_size),
    says="Keep files that only earlier revisions of functions need within this size: the newest that fit; 0: none.",
)  # fmt: skip

cluster_options = options(
    option("--id", "id_", callback=parsed(_id), envvar="GPUFAAS_ID", metavar="NAME",
           says="This process's name in the cluster; unique among those of its kind."),
    option("--etcd", default="127.0.0.1:2379", callback=parsed(_endpoints), envvar="GPUFAAS_ETCD",
           metavar="HOST:PORT[,...]", says="Address of etcd, or of its members."),
    option("--etcd-prefix", default="/gpufaas", envvar="GPUFAAS_ETCD_PREFIX", metavar="PREFIX",
           says="Beginning of all our keys: each cluster has another one."),
    option("--etcd-ca", type=_FILE, metavar="FILE", says="Authority that signs etcd's certificate."),
    option("--etcd-cert", type=_FILE, metavar="FILE", says="Our certificate for etcd."),
    option("--etcd-key", type=_FILE, metavar="FILE", says="Key of that certificate."),
    option("--etcd-user", default="", metavar="NAME", says="Our user in etcd, if it asks for one."),
    option("--etcd-password-file", type=_FILE, metavar="FILE", says="Has the password of that user."),
    option("--token-file", type=_FILE, envvar="GPUFAAS_TOKEN_FILE", metavar="FILE",
           says="Has the cluster's token, the same for every service: a service with it may join."),
    option("--tls-ca", type=_FILE, metavar="FILE", says="Encrypt between services: authority that signs certificates."),
    option("--tls-cert", type=_FILE, metavar="FILE", says="Our certificate for other services."),
    option("--tls-key", type=_FILE, metavar="FILE", says="Key of that certificate."),
)  # fmt: skip
"""The names are those of `ClusterOptions`; see `cluster_of`."""

secrets_key = option("--secrets-key", type=_FILE, metavar="FILE",
                     says="Key that secrets are sealed with, the same for gateways and nodes; a gateway makes one."
                     )  # fmt: skip


def workers_option(says: str) -> Callable[[F], F]:
    return option("--gateway-workers", "workers", type=click.IntRange(1, 64), default=1, metavar="N", says=says)


def data_option(what: str, folder: str = "") -> Callable[[F], F]:
    says = f"Folder where {what} are kept. [default: {folder}~/.local/share/gpufaas]"
    return option("--data", type=_DIRECTORY, metavar="DIR", says=says)


def status_option(port: int) -> Callable[[F], F]:
    return option(
        "--status-port", type=_PORT, default=port, metavar="PORT", says="Port of /healthz, /readyz and /metrics."
    )


def data_folder(given: dict[str, Any], name: str = "") -> Path:
    """Take ``--data`` out of *given*; *name* is the folder of this service, where none is given."""
    folder: Path | None = given.pop("data")
    return (folder or default_data_dir() / name).expanduser().resolve()


def taken(kind: type[_T], given: dict[str, Any]) -> _T:
    """Take the options out of *given* that are fields of *kind*, and return one of them."""
    names = kind.__dataclass_fields__  # type: ignore[attr-defined]
    return kind(**{name: given.pop(name) for name in names if name in given})


def cluster_of(given: dict[str, Any]) -> ClusterOptions:
    given["id"] = given.pop("id_")
    for name in ("id", "token_file"):
        if given[name] is None:
            raise click.UsageError(f"--{name.replace('_', '-')} is missing")
    return taken(ClusterOptions, given)


def read_costs(path: Path) -> Mapping[str, Mapping[str, Cost]]:
    """Read the cost model of emulated devices, in the format of the simulator's workloads."""
    from gpufaas_simulator.explicit import read_costs

    return read_costs(path)
