"""Options that several services share."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from gpufaas_apps.options import (
    DEFAULT_ASYNC_QUEUE_LIMIT,
    DEFAULT_MAX_ASYNC_QUEUE,
    DEFAULT_MAX_BODY,
    DEFAULT_MAX_QUEUE,
    DEFAULT_PORT,
    ClusterOptions,
    DeviceOptions,
    FrontOptions,
    PolicyOptions,
)
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.units import Bytes, format_bytes, parse_bytes
from gpufaas_scheduler.policies import DEFAULT_O3_LIMIT, DEFAULT_POLICY, DEFAULT_WAIT_BOUND_S, make_policy

F = TypeVar("F", bound=Callable[..., Any])
_FILE: Final = click.Path(dir_okay=False, path_type=Path)
_DIRECTORY: Final = click.Path(file_okay=False, path_type=Path)
_QUEUE: Final = re.compile(r"([a-zA-Z0-9][-._a-zA-Z0-9]{0,62})=([0-9]{1,9})(?::([0-9]{1,9}))?")
_ID: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?")


def _all(*options: Callable[[F], F]) -> Callable[[F], F]:
    def decorate(command: F) -> F:
        for each in reversed(options):
            command = each(command)
        return command

    return decorate


def _size(_: click.Context, __: click.Parameter, text: str | None) -> Bytes:
    if text is None:
        return DEFAULT_MAX_BODY
    try:
        size = parse_bytes(text)
    except InvalidSpec as exc:
        raise click.BadParameter(str(exc)) from exc
    if size <= 0:
        raise click.BadParameter(f"{text!r} must be more than nothing: write for example 100MiB")
    return size


def _queues(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    queues: dict[str, tuple[int, int]] = {}
    for text in given:
        found = _QUEUE.fullmatch(text)
        numbers = [] if found is None else [int(found[2]), int(found[3] or DEFAULT_ASYNC_QUEUE_LIMIT)]
        if found is None or min(numbers) < 1:
            raise click.BadParameter(f"{text!r} is not NAME=CONCURRENCY[:LIMIT]: write for example reports=4:10000")
        if found[1] in queues:
            raise click.BadParameter(f"{found[1]} is given twice: say it once")
        queues[found[1]] = numbers[0], numbers[1]
    return queues


def _policy(_: click.Context, __: click.Parameter, name: str) -> str:
    try:
        make_policy(name)
    except InvalidSpec as exc:
        raise click.BadParameter(str(exc)) from exc
    return name


def _endpoints(_: click.Context, __: click.Parameter, text: str) -> tuple[str, ...]:
    endpoints = tuple(each.strip() for each in text.split(",") if each.strip())
    if not endpoints:
        raise click.BadParameter("no endpoint is given: name at least one, as HOST:PORT")
    return endpoints


def _id(_: click.Context, __: click.Parameter, name: str | None) -> str | None:
    if name is not None and not _ID.fullmatch(name):
        raise click.BadParameter(f"{name!r} is no name: use a-z, 0-9, '-' and '.', at most 63, as in gpu-node-1")
    return name


front_options = _all(
    click.option(
        "--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True, help="Port to serve."
    ),
    click.option("--host", default="127.0.0.1", show_default=True, help="Address to serve on; 0.0.0.0 is all of them."),
    click.option(
        "--auth", type=click.Choice(("on", "off", "auto")), default="auto", show_default=True,
        help="Ask for user and password; functions stay public. auto: unless only this machine reaches --host.",
    ),
    click.option(
        "--auth-dir", type=_DIRECTORY, metavar="DIR",
        help="Has the files basic-auth-user and basic-auth-password. [default: auth in --data, made at the first "
        "start]",
    ),
    click.option(
        "--profile", "profiles", multiple=True, metavar="NAME=CONSTRAINT[,CONSTRAINT]",
        help="What the annotation com.openfaas.profile: NAME means, as in a100=nvidia.com/gpu.product=NVIDIA-A100; may "
        "be repeated. gpu and nvidia-gpu are there: any CUDA device.",
    ),
    click.option(
        "--max-queue", type=click.IntRange(1), default=DEFAULT_MAX_QUEUE, show_default=True,
        help="Calls of one function that may wait; more are answered 429.",
    ),
    click.option(
        "--max-async-queue", type=click.IntRange(1), default=DEFAULT_MAX_ASYNC_QUEUE, show_default=True,
        help="Asynchronous calls of one function that have not ended; more are answered 429.",
    ),
    click.option(
        "--async-queue", "async_queues", multiple=True, callback=_queues, metavar="NAME=CONCURRENCY[:LIMIT]",
        help="How many asynchronous calls of the functions that name this queue (annotation com.openfaas.queue) run at "
        "once, and how many may not have ended; may be repeated. Functions that name none use faas-request, with 64 at "
        "once and 16 of one function; a queue that is not given here has 16.",
    ),
    click.option(
        "--allow-local-callbacks", is_flag=True,
        help="Let X-Callback-Url name addresses of this machine or its link, such as 127.0.0.1.",
    ),
    click.option(
        "--builder-secret", type=_FILE, metavar="FILE",
        help="Build images of sources, for whoever signs them with the payload secret in FILE: publish "
        "--remote-builder. Needs docker.",
    ),
    click.option("--builder-push", is_flag=True, help="Push what was built to the registry in its name, too."),
    click.option(
        "--max-body", callback=_size, metavar="SIZE",
        help=f"Largest request body. [default: {format_bytes(DEFAULT_MAX_BODY)}]",
    ),
)  # fmt: skip
"""Of whatever has a gateway in it; the names are those of `FrontOptions`."""

device_options = _all(
    click.option(
        "--device", "devices", multiple=True, metavar="DEVICE",
        help="cuda:N, cuda:N=SIZE or cpu:N=SIZE, with labels of its own behind commas; may be repeated. [default: the "
        "GPUs that there are, else two CPU devices from half of the free memory]",
    ),
    click.option(
        "--label", "labels", multiple=True, metavar="KEY=VALUE",
        help="Label all devices, for functions whose constraints ask for it; may be repeated.",
    ),
    click.option(
        "--functions", type=click.Choice(("process", "docker", "kubernetes", "auto")),
        default="auto", show_default=True,
        help="Run functions that have only an image: not at all (process), in Docker, as pods of the Kubernetes that "
        "this runs in, or in Docker if its engine answers when they are deployed (auto). Those built from templates "
        "are processes.",
    ),
    click.option(
        "--memory-enforcement", type=click.Choice(("auto", "cgroup", "watcher", "rlimit")), default="auto",
        show_default=True,
        help="What holds a worker on a CPU device, and all that it starts, to its memory: the kernel (cgroup), or a "
        "watcher where no control groups can be had. rlimit: private memory only.",
    ),
)  # fmt: skip
"""The names are those of `DeviceOptions`."""

policy_options = _all(
    click.option(
        "--policy", default=DEFAULT_POLICY, show_default=True, callback=_policy, metavar="NAME",
        help="lb: any idle device; lalb: where the model is, when that is sooner; lalb-o3: and hits may overtake; "
        "least-wait: what relieves the most waiting, with replicas; or one that is installed.",
    ),
    click.option(
        "--o3-limit", type=click.IntRange(0), default=DEFAULT_O3_LIMIT, show_default=True,
        help="lalb-o3: how often one waiting call may be overtaken.",
    ),
    click.option(
        "--wait-bound", "wait_bound_s", type=click.FloatRange(0, max_open=True, max=float("inf")),
        default=DEFAULT_WAIT_BOUND_S, show_default=True, metavar="SECONDS",
        help="least-wait: who waits so long has a device reserved, one at a time.",
    ),
    click.option(
        "--replacement", type=click.Choice(("lru", "cost-aware")), default="lru", show_default=True,
        help="Which models are evicted first.",
    ),
    click.option(
        "--journal", type=_FILE, metavar="FILE", help="Write every event of the scheduler there, to be replayed."
    ),
)  # fmt: skip
"""The names are those of `PolicyOptions`."""

cluster_options = _all(
    click.option(
        "--id", "id_", callback=_id, envvar="GPUFAAS_ID", metavar="NAME",
        help="This process's name in the cluster; no other of its kind may have it.",
    ),
    click.option(
        "--etcd", default="127.0.0.1:2379", show_default=True, callback=_endpoints, envvar="GPUFAAS_ETCD",
        metavar="HOST:PORT[,...]", help="Where etcd is; its members, if there are several.",
    ),
    click.option(
        "--etcd-prefix", default="/gpufaas", show_default=True, envvar="GPUFAAS_ETCD_PREFIX", metavar="PREFIX",
        help="Begins all of our keys: another one for another cluster.",
    ),
    click.option("--etcd-ca", type=_FILE, metavar="FILE", help="Who may have signed etcd's certificate."),
    click.option("--etcd-cert", type=_FILE, metavar="FILE", help="Our certificate for etcd."),
    click.option("--etcd-key", type=_FILE, metavar="FILE", help="Its key."),
    click.option("--etcd-user", default="", metavar="NAME", help="Our user in etcd, if it asks for one."),
    click.option("--etcd-password-file", type=_FILE, metavar="FILE", help="Has its password."),
    click.option(
        "--token-file", type=_FILE, envvar="GPUFAAS_TOKEN_FILE", metavar="FILE",
        help="Has the cluster's token, the same for every service: who has it may join.",
    ),
    click.option("--tls-ca", type=_FILE, metavar="FILE", help="Encrypt between services: who signs certificates."),
    click.option("--tls-cert", type=_FILE, metavar="FILE", help="Our certificate."),
    click.option("--tls-key", type=_FILE, metavar="FILE", help="Its key."),
)  # fmt: skip
"""The names are those of `ClusterOptions`; see `split`."""


def status_option(port: int) -> Callable[[F], F]:
    return click.option(
        "--status-port", type=click.IntRange(0, 65535), default=port, show_default=True,
        help="Has /healthz, /readyz and /metrics.",
    )  # fmt: skip


def cluster_of(given: dict[str, Any]) -> ClusterOptions:
    """Take what belongs to `ClusterOptions` out of *given*."""
    given["id"] = given.pop("id_")
    for option, name in (("--id", "id"), ("--token-file", "token_file")):
        if given[name] is None:
            raise click.UsageError(f"{option} is missing")
    names = [name for name in ClusterOptions.__dataclass_fields__ if name in given]
    return ClusterOptions(**{name: given.pop(name) for name in names})


def front_of(given: dict[str, Any]) -> FrontOptions:
    if given["builder_push"] and given["builder_secret"] is None:
        raise click.UsageError("--builder-push goes with --builder-secret: without it nothing is built")
    for name in ("auth_dir", "builder_secret"):
        given[name] = given[name].expanduser() if given[name] else None
    names = [name for name in FrontOptions.__dataclass_fields__ if name in given]
    return FrontOptions(**{name: given.pop(name) for name in names})


def devices_of(given: dict[str, Any]) -> DeviceOptions:
    return DeviceOptions(**{name: given.pop(name) for name in DeviceOptions.__dataclass_fields__})


def policy_of(given: dict[str, Any]) -> PolicyOptions:
    return PolicyOptions(**{name: given.pop(name) for name in PolicyOptions.__dataclass_fields__})
