"""``gpufaas scheduler``: a scheduler of a cluster; `gpufaas_apps.scheduler` does the rest."""

from typing import Any

from gpufaas_apps.options import PolicyOptions, SchedulerOptions
from gpufaas_cli import declare
from gpufaas_cli.cluster_flags import cluster_of, cluster_options, policy_options, status_option, taken


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
def command(**given: Any) -> None:
    """
    Start a scheduler of a cluster. It waits until no other leads, and then decides for all gateways and nodes.

    It stops on Ctrl-C or SIGTERM, and another one takes over at once; if it dies, after a lease of 5 s.

    Examples:
      gpufaas scheduler --id s1 --token-file token --etcd 10.0.0.2:2379 --advertise 10.0.0.5:7070
      gpufaas scheduler --id s1 --token-file token --policy lalb-o3:o3_limit=10
    """
    options = SchedulerOptions(cluster=cluster_of(given), policy=taken(PolicyOptions, given), **given)
    with declare.needing("scheduler", "cluster"):
        from gpufaas_apps import scheduler

        scheduler.run(options)
