"""``gpufaas serve``: reads its options; `serving` does the rest."""

import re
from pathlib import Path
from typing import Literal

import click

from gpufaas_cli.options import (
    DEFAULT_ASYNC_QUEUE_LIMIT,
    DEFAULT_MAX_ASYNC_QUEUE,
    DEFAULT_MAX_BODY,
    DEFAULT_MAX_QUEUE,
    DEFAULT_PORT,
    ServeOptions,
    default_data_dir,
)
from gpufaas_core.errors import GpufaasError, InvalidSpec
from gpufaas_core.units import Bytes, format_bytes, parse_bytes
from gpufaas_scheduler.policies import DEFAULT_O3_LIMIT, DEFAULT_POLICY, DEFAULT_WAIT_BOUND_S, make_policy

_REPLACEMENTS = ("lru", "cost-aware")
_QUEUE = re.compile(r"([a-zA-Z0-9][-._a-zA-Z0-9]{0,62})=([0-9]{1,9})(?::([0-9]{1,9}))?")


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


@click.command(
    "serve",
    short_help="Start the whole platform on this machine.",
    epilog="""
\b
Examples:
  gpufaas serve
  gpufaas serve --device cpu:0=2GiB --device cpu:1=2GiB
  gpufaas serve --device cuda:0 --device cuda:1=20GiB --policy lalb-o3 --o3-limit 25
  gpufaas serve --device cuda:0,tier=gold --device cpu:0=4GiB --label zone=a
  gpufaas serve --host 0.0.0.0 --auth-dir /run/secrets
  gpufaas serve --host 0.0.0.0 --builder-secret payload.txt
  gpufaas serve --port 9090 --data ./.gpufaas --journal events.jsonl
""",
)
@click.option("--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True, help="Port to serve.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to serve on; 0.0.0.0 is all of them.")
@click.option(
    "--auth", type=click.Choice(("on", "off", "auto")), default="auto", show_default=True,
    help="Ask for user and password; functions stay public. auto: unless only this machine reaches --host.",
)  # fmt: skip
@click.option(
    "--auth-dir", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
    help="Has the files basic-auth-user and basic-auth-password. [default: auth in --data, made at the first start]",
)  # fmt: skip
@click.option(
    "--data", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
    help="Where functions, weights and logs are kept. [default: ~/.local/share/gpufaas]",
)  # fmt: skip
@click.option(
    "--device", "devices", multiple=True, metavar="DEVICE",
    help="cuda:N, cuda:N=SIZE or cpu:N=SIZE, with labels of its own behind commas; may be repeated. [default: the GPUs "
    "that there are, else two CPU devices from half of the free memory]",
)  # fmt: skip
@click.option(
    "--label", "labels", multiple=True, metavar="KEY=VALUE",
    help="Label all devices, for functions whose constraints ask for it; may be repeated.",
)  # fmt: skip
@click.option(
    "--profile", "profiles", multiple=True, metavar="NAME=CONSTRAINT[,CONSTRAINT]",
    help="What the annotation com.openfaas.profile: NAME means, as in a100=nvidia.com/gpu.product=NVIDIA-A100; may be "
    "repeated. gpu and nvidia-gpu are there: any CUDA device.",
)  # fmt: skip
@click.option(
    "--functions", type=click.Choice(("process", "docker", "auto")), default="auto", show_default=True,
    help="Run functions that have only an image in Docker: never (process), always, or if its engine answers when they "
    "are deployed. Those built from templates are processes.",
)  # fmt: skip
@click.option(
    "--policy", default=DEFAULT_POLICY, show_default=True, metavar="NAME",
    help="lb: any idle device; lalb: where the model is, when that is sooner; lalb-o3: and hits may overtake; "
    "least-wait: what relieves the most waiting, with replicas; or one that is installed.",
)  # fmt: skip
@click.option(
    "--o3-limit", type=click.IntRange(0), default=DEFAULT_O3_LIMIT, show_default=True,
    help="lalb-o3: how often one waiting call may be overtaken.",
)  # fmt: skip
@click.option(
    "--wait-bound", type=click.FloatRange(0, max_open=True, max=float("inf")), default=DEFAULT_WAIT_BOUND_S,
    show_default=True, metavar="SECONDS", help="least-wait: who waited so long is not overtaken any more.",
)  # fmt: skip
@click.option(
    "--replacement", type=click.Choice(_REPLACEMENTS), default="lru", show_default=True,
    help="Which models are evicted first.",
)  # fmt: skip
@click.option(
    "--journal", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Write every event of the scheduler there, to be replayed.",
)  # fmt: skip
@click.option(
    "--max-queue", type=click.IntRange(1), default=DEFAULT_MAX_QUEUE, show_default=True,
    help="Calls of one function that may wait; more are answered 429.",
)  # fmt: skip
@click.option(
    "--max-async-queue", type=click.IntRange(1), default=DEFAULT_MAX_ASYNC_QUEUE, show_default=True,
    help="Asynchronous calls of one function that have not ended; more are answered 429.",
)  # fmt: skip
@click.option(
    "--async-queue", "async_queues", multiple=True, callback=_queues, metavar="NAME=CONCURRENCY[:LIMIT]",
    help="How many asynchronous calls of the functions that name this queue (annotation com.openfaas.queue) run at "
    "once, and how many may not have ended; may be repeated. Functions that name none use faas-request, with 64 at "
    "once and 16 of one function; a queue that is not given here has 16.",
)  # fmt: skip
@click.option(
    "--allow-local-callbacks", is_flag=True,
    help="Let X-Callback-Url name addresses of this machine or its link, such as 127.0.0.1.",
)  # fmt: skip
@click.option(
    "--builder-secret", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Build images of sources, for whoever signs them with the payload secret in FILE: publish --remote-builder. "
    "Needs docker.",
)  # fmt: skip
@click.option("--builder-push", is_flag=True, help="Push what was built to the registry in its name, too.")
@click.option(
    "--max-body", callback=_size, metavar="SIZE",
    help=f"Largest request body. [default: {format_bytes(DEFAULT_MAX_BODY)}]",
)  # fmt: skip
def command(
    port: int, host: str, auth: Literal["on", "off", "auto"], auth_dir: Path | None, data: Path | None,
    devices: tuple[str, ...], labels: tuple[str, ...], profiles: tuple[str, ...],
    functions: Literal["process", "docker", "auto"], policy: str, o3_limit: int, wait_bound: float, replacement: str,
    journal: Path | None, max_queue: int, max_async_queue: int, async_queues: dict[str, tuple[int, int]],
    allow_local_callbacks: bool, builder_secret: Path | None, builder_push: bool, max_body: Bytes,
) -> None:  # fmt: skip
    """
    Start the whole platform on this machine: gateway, scheduler, cache and workers in one process tree.

    Stops on Ctrl-C or SIGTERM; started again with the same --data, every function is still deployed.
    """
    if builder_push and builder_secret is None:
        raise click.UsageError("--builder-push goes with --builder-secret: without it nothing is built")
    try:
        make_policy(policy)
    except InvalidSpec as exc:
        raise click.BadParameter(str(exc), param_hint="--policy") from exc
    options = ServeOptions(
        port=port, host=host, auth=auth, auth_dir=auth_dir.expanduser() if auth_dir else None,
        data=(data or default_data_dir()).expanduser().resolve(), devices=devices, labels=labels,
        profiles=profiles, functions=functions, policy=policy, o3_limit=o3_limit,
        wait_bound_s=wait_bound, replacement=replacement, journal=journal, max_queue=max_queue, max_body=max_body,
        max_async_queue=max_async_queue, async_queues=async_queues, allow_local_callbacks=allow_local_callbacks,
        builder_secret=builder_secret.expanduser() if builder_secret else None, builder_push=builder_push,
    )  # fmt: skip
    try:
        from gpufaas_cli import serving

        serving.run(options)
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.startswith("gpufaas"):
            raise
        raise GpufaasError(
            f"'gpufaas serve' needs {exc.name}, which is not installed: pip install 'gpufaas[serve]'"
        ) from exc
    except InvalidSpec as exc:
        raise click.UsageError(str(exc)) from exc
