"""``gpufaas gateway``: a gateway of a cluster; `gpufaas_apps.gateway` does the rest."""

from pathlib import Path
from typing import Any

import click

from gpufaas_apps.options import GatewayOptions, default_data_dir
from gpufaas_cli import declare
from gpufaas_cli.cluster_flags import cluster_of, cluster_options, front_of, front_options, status_option
from gpufaas_cli.extra import needing


@declare.command("gateway")
@front_options
@click.option(
    "--data", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
    help="Where uploads and accepted asynchronous calls are kept. [default: gateway-ID in ~/.local/share/gpufaas]",
)  # fmt: skip
@click.option(
    "--object-store", default="", metavar="URL",
    help="Keep bundles and weights there as well: dir:/path or s3://bucket/prefix?endpoint=URL.",
)  # fmt: skip
@click.option(
    "--secrets-key", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Secrets are sealed with the key in FILE, the same for gateways and nodes; made if it is not there.",
)  # fmt: skip
@click.option(
    "--advertise", default="", metavar="HOST",
    help="By which name or address nodes fetch from here what was uploaded. [default: --host, or this machine's name]",
)  # fmt: skip
@status_option(7091)
@cluster_options
def command(data: Path | None, object_store: str, secrets_key: Path | None, advertise: str, **given: Any) -> None:
    """
    Start a gateway of a cluster. Any number of them serve the same functions.

    Stops on Ctrl-C or SIGTERM, when the calls that it has are answered, within 10 s.

    Examples:
      gpufaas gateway --id g1 --token-file token --etcd 10.0.0.2:2379 --host 0.0.0.0
      gpufaas gateway --id g1 --token-file token --secrets-key secrets.key --object-store dir:/mnt/weights
    """
    cluster = cluster_of(given)
    given["data"] = (data or default_data_dir() / f"gateway-{cluster.id}").expanduser().resolve()
    options = GatewayOptions(
        cluster=cluster, front=front_of(given), object_store=object_store, secrets_key=secrets_key, advertise=advertise
    )
    with needing("gateway", "gateway,cluster"):
        from gpufaas_apps import gateway

        gateway.run(options)
