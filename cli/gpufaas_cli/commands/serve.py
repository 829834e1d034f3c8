"""``gpufaas serve``: reads its options; `gpufaas_apps.serve` does the rest."""

from typing import Any

import click

from gpufaas_apps.options import ServeOptions
from gpufaas_cli import declare
from gpufaas_cli.cluster_flags import (
    data_folder,
    data_option,
    device_options,
    front_options,
    history_option,
    policy_options,
    read_costs,
    workers_option,
)


@declare.command("serve")
@front_options
@data_option("functions, weights and logs")
@device_options
@policy_options
@history_option
@workers_option("1: more processes that take calls are for gpufaas gateway, in a cluster.")
def command(**given: Any) -> None:
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
