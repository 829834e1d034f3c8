"""``gpufaas serve``: reads its options; `gpufaas_apps.serve` does the rest."""

from pathlib import Path
from typing import Any

import click

from gpufaas_apps.options import ServeOptions, default_data_dir
from gpufaas_cli import declare
from gpufaas_cli.cluster_flags import device_options, front_options, policy_options
from gpufaas_cli.extra import needing


@declare.command("serve")
@front_options
@click.option(
    "--data", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
    help="Where functions, weights and logs are kept. [default: ~/.local/share/gpufaas]",
)  # fmt: skip
@device_options
@policy_options
def command(data: Path | None, **given: Any) -> None:
    """
    Start the whole platform on this machine: gateway, scheduler, cache and workers in one process tree.

    Stops on Ctrl-C or SIGTERM; started again with the same --data, every function is still deployed.

    Examples:
      gpufaas serve
      gpufaas serve --device cpu:0=2GiB --device cpu:1=2GiB
      gpufaas serve --device cuda:0 --device cuda:1=20GiB --policy lalb-o3 --o3-limit 25
      gpufaas serve --device cuda:0,tier=gold --device cpu:0=4GiB --label zone=a
      gpufaas serve --host 0.0.0.0 --auth-dir /run/secrets
      gpufaas serve --host 0.0.0.0 --builder-secret payload.txt
      gpufaas serve --port 9090 --data ./.gpufaas --journal events.jsonl
    """
    if given["builder_push"] and given["builder_secret"] is None:
        raise click.UsageError("--builder-push goes with --builder-secret: without it nothing is built")
    for name in ("auth_dir", "builder_secret"):
        given[name] = given[name].expanduser() if given[name] else None
    options = ServeOptions(data=(data or default_data_dir()).expanduser().resolve(), **given)
    with needing("serve", "serve"):
        from gpufaas_apps import serve

        serve.run(options)
