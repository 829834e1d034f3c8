"""The commands that serve: they read their options; `gpufaas_apps` does the rest."""

from typing import Any

import click

from gpufaas_apps.options import FrontOptions, GatewayOptions, PolicyOptions, SchedulerOptions, ServeOptions
from gpufaas_cli import declare
from gpufaas_cli.cluster_flags import (
    cluster_of,
    cluster_options,
    data_folder,
    data_option,
    device_options,
    front_options,
    history_option,
    offer_options,
    policy_options,
    read_costs,
    secrets_key,
    status_option,
    taken,
    workers_option,
)


@declare.command("serve")
@front_options
@data_option("functions, weights and logs")
@device_options
@policy_options
@history_option
@declare.option("--profile-idle", is_flag=True, says="Take profiles of models unasked, on devices that are idle.")
@workers_option("1: more processes that take calls are for gpufaas gateway, in a cluster.")
def serve(**given: Any) -> None:
    """
    Start the whole platform on this machine: gateway, scheduler, cache and workers in one process tree.

    Stops on Ctrl-C or SIGTERM; started again with the same --data, every function is still deployed.

    Examples:
      gpufaas serve
      gpufaas serve --device cpu:0=2GiB --device cpu:1=2GiB
      gpufaas serve --device cuda:0 --device cuda:1=20GiB --policy lalb-o3:o3_limit=10
      gpufaas serve --device cuda:0,tier=gold --device cpu:0=4GiB --label zone=a
      gpufaas serve --device emulated:0=16GiB,kind=v100,profile=costs.json
      gpufaas serve --host 0.0.0.0 --auth-dir /run/secrets
      gpufaas serve --isolation strict --bind /data --bind /var/cache/models:rw
      gpufaas serve --port 9090 --data ./.gpufaas --journal events.jsonl
    """
    if given.pop("workers") > 1:
        raise click.UsageError(
            "serve takes calls in one process. For --gateway-workers, run a cluster on this machine: etcd, gpufaas "
            "scheduler, gpufaas node with these devices, and gpufaas gateway --gateway-workers N (docs/operations.md)"
        )
    options = ServeOptions(data=data_folder(given), read_costs=read_costs, **given)
    with declare.needing("serve", "serve"):
        from gpufaas_apps import serve

        serve.run(options)


@declare.command("gateway")
@front_options
@data_option("uploads and accepted asynchronous calls", "gateway-ID in ")
@declare.option("--object-store", default="", metavar="URL",
                says="Keep bundles and weights there as well: dir:/path or "
                "s3://bucket/prefix?endpoint=URL.")  # fmt: skip
@secrets_key
@declare.option("--advertise", default="", metavar="HOST",
                says="Name or address from which nodes fetch uploads. [default: --host, or this machine's "
                "name]")  # fmt: skip
@workers_option(
    "Take calls in N processes that share the port, where one core is not enough for them. Their status ports are "
    "those after --status-port, which speaks for all."
)
@status_option(7091)
@cluster_options
def gateway(**given: Any) -> None:
    """
    Start a gateway of a cluster. Any number of them serve the same functions.

    With --gateway-workers it starts and watches several processes: one that dies takes its own calls along, and is
    started again.

    On Ctrl-C or SIGTERM it answers the calls that it has, within 10 s, and stops.

    Examples:
      gpufaas gateway --id g1 --token-file token --etcd 10.0.0.2:2379 --host 0.0.0.0
      gpufaas gateway --id g1 --token-file token --secrets-key secrets.key --object-store dir:/mnt/weights
      gpufaas gateway --id g1 --token-file token --host 0.0.0.0 --gateway-workers 4
    """
    cluster = cluster_of(given)
    given["data"] = data_folder(given, f"gateway-{cluster.id}")
    options = GatewayOptions(cluster=cluster, front=taken(FrontOptions, given), **given)
    with declare.needing("gateway", "gateway,cluster"):
        from gpufaas_apps import gateway, gateway_processes

        (gateway if options.workers == 1 else gateway_processes).run(options)


@declare.command("scheduler")
@declare.option("--listen", default="", metavar="HOST:PORT",
                says="Where gateways and nodes connect. [default: 127.0.0.1:7070, or 0.0.0.0:7070 with "
                "--advertise]")  # fmt: skip
@declare.option("--advertise", default="", metavar="HOST:PORT",
                says="Its address for other machines. [default: this machine's name, with the port of "
                "--listen]")  # fmt: skip
@status_option(7071)
@cluster_options
@policy_options
@offer_options
@data_option("what the provider of nodes keeps", "scheduler-ID in ")
def scheduler(**given: Any) -> None:
    """
    Start a scheduler of a cluster. It waits until no other leads, and then decides for all gateways and nodes.

    It stops on Ctrl-C or SIGTERM, and another one takes over at once; if it dies, after a lease of 5 s.

    Examples:
      gpufaas scheduler --id s1 --token-file token --etcd 10.0.0.2:2379 --advertise 10.0.0.5:7070
      gpufaas scheduler --id s1 --token-file token --policy lalb-o3:o3_limit=10
      gpufaas scheduler --id s1 --token-file token --offers offers.yml --provider local
    """
    cluster = cluster_of(given)
    if bool(given["offers"]) != bool(given["provider"]):
        raise click.UsageError("--offers and --provider go together: give both, or none")
    given["data"] = data_folder(given, f"scheduler-{cluster.id}")
    options = SchedulerOptions(cluster=cluster, policy=taken(PolicyOptions, given), **given)
    with declare.needing("scheduler", "cluster"):
        from gpufaas_apps import scheduler

        scheduler.run(options)
