"""``gpufaas node``: starts a node of a cluster (`gpufaas_apps.node` does the rest); lists, describes, drains nodes."""

import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from gpufaas import Client
from gpufaas_apps.options import DeviceOptions, NodeOptions
from gpufaas_cli import declare, flags, output
from gpufaas_cli.build_target import environments
from gpufaas_cli.cluster_flags import (
    cluster_of,
    cluster_options,
    data_folder,
    data_option,
    device_options,
    read_costs,
    secrets_key,
    status_option,
    taken,
)
from gpufaas_core.constraints import isolation_of
from gpufaas_core.errors import GpufaasError
from gpufaas_core.units import format_bytes

if TYPE_CHECKING:
    from gpufaas_core.environment import Environment

_LOOK_EVERY_S: Final = 0.5
_SHOWN: Final = ("torch", "numpy")
"""Packages that functions ask for most; all of them are in ``/system/environments``."""


# The environment of a container may say all that a node needs: without options it starts, and shows no help.
@declare.group("node", invoke_without_command=True, no_args_is_help=not os.environ.get("GPUFAAS_ID"))
@declare.option("--listen", default="", metavar="HOST:PORT",
                says="Where gateways send calls. [default: 127.0.0.1:7080, or 0.0.0.0:7080 with "
                "--advertise]")  # fmt: skip
@declare.option("--advertise", default="", metavar="HOST:PORT",
                says="Its address for other machines. [default: this machine's name, with the port of "
                "--listen]")  # fmt: skip
@data_option("bundles, weights and logs", "node-ID in ")
@declare.option("--object-store", default="", metavar="URL",
                says="Fetch there what no other node has: dir:/path or s3://bucket/prefix?endpoint=URL.")  # fmt: skip
@secrets_key
@declare.option("--gateway-url", default="", metavar="URL", says="Value of OPENFAAS_URL for functions.")
@declare.option("--order", default="", metavar="ORDER", says="The order for which a provider starts it.")
@device_options
@status_option(7081)
@cluster_options
@click.pass_context
def command(ctx: click.Context, /, **given: Any) -> None:
    """
    Start a node of a cluster, with its devices and the workers on them; or, with a command, look after nodes.

    It stops on Ctrl-C or SIGTERM. 'gpufaas node drain' first lets its calls end.

    Examples:
      gpufaas node --id n1 --token-file token --etcd 10.0.0.2:2379 --advertise 10.0.0.6:7080
      gpufaas node --id n1 --token-file token --device cuda:0 --device cuda:1=20GiB --label zone=a
      gpufaas node list
      gpufaas node drain n1
    """
    if ctx.invoked_subcommand is not None:
        return
    cluster = cluster_of(given)
    data = data_folder(given, f"node-{cluster.id}")
    given["read_costs"] = read_costs
    options = NodeOptions(cluster=cluster, devices=taken(DeviceOptions, given), data=data, **given)
    with declare.needing("node", "node,cluster"):
        from gpufaas_apps import node

        node.run(options)


def _memory(devices: Sequence[Mapping[str, Any]]) -> str:
    used, total = (sum(each[key] for each in devices) for key in ("used", "memory"))
    return f"{format_bytes(used)} of {format_bytes(total)}"


def _state(node: Mapping[str, Any]) -> str:
    return f"{node['state']}{output.format_age(node.get('ageSeconds'))}"


def _show_nodes(nodes: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        (each["name"], _state(each), str(len(each["devices"])), _memory(each["devices"]), str(each["residentCopies"]),
         str(each["running"]), "; ".join(isolation_of(one["labels"] for one in each["devices"])), each["note"])
        for each in nodes
    ]  # fmt: skip
    output.table(("Node", "State", "Devices", "Memory", "Copies", "Running", "Isolation", "Note"), rows)


@command.command("list")
@declare.shows(_show_nodes)
@flags.client
def list_nodes(client: Client) -> Sequence[Mapping[str, Any]]:
    """
    List the nodes of the cluster.

    Examples:
      gpufaas node list
      gpufaas node list --json
    """
    return client.nodes()


def _show_offers(status: Mapping[str, Any]) -> None:
    ordered = list(status["ordered"].values())
    rows = [
        (each["kind"], str(each["devices"]), format_bytes(each["memory"]), f"{each['price_per_h']:g}",
         f"{each['delay_s']:g} s", str(each["limit"]), str(ordered.count(each["kind"])),
         status["unmet"].get(each["kind"], ""))
        for each in status["offers"]
    ]  # fmt: skip
    output.table(("Kind", "Devices", "Memory each", "Price/h", "Start", "More", "Ordered", "Last failure"), rows)


@command.command("offers")
@declare.shows(_show_offers)
@flags.client
def offers(client: Client) -> dict[str, Any]:
    """
    List the kinds of nodes that the policy may order, and what became of orders. None: no scheduler has --offers.

    Examples:
      gpufaas node offers
    """
    status = client.status()
    return {"offers": status["offers"], "ordered": status["ordered"], "unmet": status["unmet"]}


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
    if as_json:
        output.show_json(found)
        return
    provided = [each for each in environments(client) or () if name in each.nodes]
    output.aligned(
        [("Name", found["name"]), ("State", _state(found)), ("Address", found["address"]),
         ("Version", found["version"] or "unknown"), ("Joined", f"{found['joinedSeconds']:.0f} s ago"),
         ("Note", found["note"] or "none"), *(("Provides", _described(each)) for each in provided)]
    )  # fmt: skip
    for each in found["devices"]:
        labels = ", ".join(f"{key}={value}" for key, value in sorted(each["labels"].items()))
        output.show(f"\n{each['id']}  {each['kind']}  {_memory([each])}, {each['running']} running  {labels}")
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
@declare.option("--timeout", type=click.FloatRange(0), default=300.0, metavar="SECONDS",
                says="How long to wait for its calls.")  # fmt: skip
@flags.client
def drain(name: str, undo: bool, no_wait: bool, timeout: float, client: Client) -> None:
    """
    Give a node no new calls, so that it can be stopped: its calls end, and waiting ones go elsewhere.

    Examples:
      gpufaas node drain n1             wait until nothing runs there any more
      gpufaas node drain n1 --undo      take it back
    """
    client.drain_node(name, not undo)
    if undo or no_wait:
        output.show(f"Node {name} takes calls again" if undo else f"Node {name} drains")
        return
    until = time.monotonic() + timeout
    while (state := client.node(name))["running"] or state["state"] not in ("draining", "drained"):
        if time.monotonic() > until:
            raise GpufaasError(
                f"{state['running']} calls still run on node {name} after {timeout:g} s: it takes no new ones; "
                "wait on with the same command, or stop it all the same, and they are answered 502"
            )
        time.sleep(_LOOK_EVERY_S)
    output.show(f"Node {name} is drained: stop it when you like")
