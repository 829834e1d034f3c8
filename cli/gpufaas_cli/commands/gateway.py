"""``gpufaas gateway``: a gateway of a cluster; `gpufaas_apps.gateway` and `gateway_processes` do the rest."""

from typing import Any

from gpufaas_apps.options import FrontOptions, GatewayOptions
from gpufaas_cli import declare
from gpufaas_cli.cluster_flags import (
    cluster_of,
    cluster_options,
    data_folder,
    data_option,
    front_options,
    secrets_key,
    status_option,
    taken,
    workers_option,
)


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
def command(**given: Any) -> None:
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
