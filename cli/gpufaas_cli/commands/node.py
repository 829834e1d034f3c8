"""``gpufaas node``: a node of a cluster (`gpufaas_apps.node` does the rest), and what is to be said about nodes."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from gpufaas import Client
from gpufaas_apps.options import NodeOptions, default_data_dir
from gpufaas_cli import declare, flags, output
from gpufaas_cli.cluster_flags import cluster_of, cluster_options, device_options, devices_of, status_option
from gpufaas_cli.extra import needing
from gpufaas_cli.target import environments
from gpufaas_core.errors import GpufaasError
from gpufaas_core.units import format_bytes

if TYPE_CHECKING:
    from gpufaas_core.environment import Environment

_LOOK_EVERY_S: Final = 0.5
_SHOWN: Final = ("torch", "numpy")
"""Packages that functions ask for most; all of them are in ``/system/environments``."""


# The environment of a container may say all that a node needs: without options it starts, and shows no help.
@declare.group("node", invoke_without_command=True, no_args_is_help=not os.environ.get("GPUFAAS_ID"))
@click.option(
    "--listen", default="", metavar="HOST:PORT",
    help="Where gateways send calls to. [default: 127.0.0.1:7080, or 0.0.0.0:7080 with --advertise]",
)  # fmt: skip
@click.option(
    "--advertise", default="", metavar="HOST:PORT",
    help="Where they reach it from elsewhere. [default: this machine's name, with the port of --listen]",
)  # fmt: skip
@click.option(
    "--data", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
    help="Where bundles, weights and logs are kept. [default: node-ID in ~/.local/share/gpufaas]",
)  # fmt: skip
@click.option(
    "--object-store", default="", metavar="URL",
    help="Fetch what no other node has from there: dir:/path or s3://bucket/prefix?endpoint=URL.",
)  # fmt: skip
@click.option(
    "--secrets-key", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Has the key that secrets are sealed with, the same for gateways and nodes.",
)  # fmt: skip
@click.option("--gateway-url", default="", metavar="URL", help="What functions find in OPENFAAS_URL.")
@device_options
@status_option(7081)
@cluster_options
@click.pass_context
def command(
    ctx: click.Context, /, listen: str, advertise: str, data: Path | None, object_store: str, secrets_key: Path | None,
    gateway_url: str, **given: Any,
) -> None:  # fmt: skip
    """
    Start a node of a cluster: its devices, and the workers on them. Or, with a command, look after nodes.

    Stops on Ctrl-C or SIGTERM. 'gpufaas node drain' first lets it finish what it has.

    Examples:
      gpufaas node --id n1 --token-file token --etcd 10.0.0.2:2379 --advertise 10.0.0.6:7080
      gpufaas node --id n1 --token-file token --device cuda:0 --device cuda:1=20GiB --label zone=a
      gpufaas node list
      gpufaas node drain n1
    """
    if ctx.invoked_subcommand is not None:
        return
    devices = devices_of(given)
    cluster = cluster_of(given)
    options = NodeOptions(
        cluster=cluster, devices=devices, listen=listen, advertise=advertise, object_store=object_store,
        data=(data or default_data_dir() / f"node-{cluster.id}").expanduser().resolve(), secrets_key=secrets_key,
        gateway_url=gateway_url,
    )  # fmt: skip
    with needing("node", "node,cluster"):
        from gpufaas_apps import node

        node.run(options)


@command.command("list")
@declare.as_json
@flags.client
def list_nodes(as_json: bool, client: Client) -> None:
    """
    List the nodes of the cluster.

    Examples:
      gpufaas node list
      gpufaas node list --json
    """
    nodes = client.nodes()
    if as_json:
        output.show_json(nodes)
        return
    rows = [
        (
            each["name"], each["state"], str(len(each["devices"])),
            f"{format_bytes(sum(one['used'] for one in each['devices']))} of "
            f"{format_bytes(sum(one['memory'] for one in each['devices']))}",
            str(each["residentCopies"]), str(each["running"]), each["note"],
        )
        for each in nodes
    ]  # fmt: skip
    output.table(("Node", "State", "Devices", "Memory", "Resident", "Running", "Note"), rows)


@command.command("describe")
@click.argument("name")
@declare.as_json
@flags.client
def describe(name: str, as_json: bool, client: Client) -> None:
    """
    Show all about one node: its state, its devices, the packages that it provides.

    Examples:
      gpufaas node describe n1
      gpufaas node describe n1 --json
    """
    found = client.node(name)
    provided = [] if as_json else [each for each in environments(client) or () if name in each.nodes]
    if as_json:
        output.show_json(found)
        return
    output.aligned(
        [
            ("Name", found["name"]),
            ("State", found["state"]),
            ("Address", found["address"]),
            ("Version", found["version"] or "unknown"),
            ("Joined", f"{found['joinedSeconds']:.0f} s ago"),
            ("Note", found["note"] or "none"),
            *(("Provides", _described(each)) for each in provided),
        ]
    )
    for each in found["devices"]:
        labels = ", ".join(f"{key}={value}" for key, value in sorted(each["labels"].items()))
        used = f"{format_bytes(each['used'])} of {format_bytes(each['memory'])}"
        output.show(f"\n{each['id']}  {each['kind']}  {used}, {each['running']} running  {labels}")
        for function in each["resident"]:
            output.show(f"  {function}")


def _described(provided: "Environment") -> str:
    versions = (f"{name} {provided.distributions[name].version}" for name in _SHOWN if name in provided.distributions)
    python = f"Python {provided.python} ({provided.abi}, {provided.platforms[0]})"
    return ", ".join((python, *versions, f"{len(provided.distributions)} packages"))


@command.command("drain")
@click.argument("name")
@click.option("--undo", is_flag=True, help="Let it take calls again.")
@click.option("--no-wait", is_flag=True, help="Do not wait until its calls have ended.")
@click.option(
    "--timeout", type=click.FloatRange(0), default=300.0, show_default=True, metavar="SECONDS",
    help="How long to wait for its calls.",
)  # fmt: skip
@flags.client
def drain(name: str, undo: bool, no_wait: bool, timeout: float, client: Client) -> None:
    """
    Let a node take no new calls, so that it can be stopped: what runs there ends, what waits goes elsewhere.

    Examples:
      gpufaas node drain n1             wait until nothing runs there any more
      gpufaas node drain n1 --undo      take it back
    """
    client.drain_node(name, not undo)
    if undo:
        output.show(f"Node {name} takes calls again")
        return
    until = time.monotonic() + timeout
    state: Mapping[str, Any] = {}
    while not no_wait:
        state = client.node(name)
        if state["state"] in ("draining", "drained") and not state["running"]:
            break
        if time.monotonic() > until:
            raise GpufaasError(
                f"{state['running']} calls still run on node {name} after {timeout:g} s: it takes no new ones; "
                "wait on with the same command, or stop it all the same, and they are answered 502"
            )
        time.sleep(_LOOK_EVERY_S)
    output.show(f"Node {name} is drained: stop it when you like" if not no_wait else f"Node {name} drains")
