"""What orders nodes for the scheduler that leads, and how these nodes get into its cluster."""

from gpufaas_adapters.etcd.client import Etcd
from gpufaas_adapters.etcd.election import Leadership
from gpufaas_adapters.etcd.orders import EtcdLedger
from gpufaas_apps.options import ClusterOptions, SchedulerOptions
from gpufaas_core.model import NodeId, Seconds
from gpufaas_providers.broker import Broker
from gpufaas_providers.offers import provider
from gpufaas_providers.ports import Joining
from gpufaas_scheduler.service import SchedulerService


def broker_of(options: SchedulerOptions, etcd: Etcd, leadership: Leadership, service: SchedulerService) -> Broker:
    """:raises InvalidSpec: the provider is not installed"""

    def busy() -> dict[NodeId, Seconds]:
        found: dict[NodeId, Seconds] = {}
        for each in service.status().devices:
            found[each.device.node] = found.get(each.device.node, 0.0) + each.busy_s
        return found

    maker = provider(options.provider, Joining(node_arguments(options.cluster), options.data))
    ledger = EtcdLedger(etcd, leadership.compare())
    return Broker(options.provider, maker, options.offers, ledger, service.handle, busy=busy)


def node_arguments(cluster: ClusterOptions) -> tuple[str, ...]:
    """Return the options of ``gpufaas node`` by which a node joins *cluster*."""
    given = ["--etcd", ",".join(cluster.etcd), "--etcd-prefix", cluster.etcd_prefix]
    for name in (
        "etcd_ca", "etcd_cert", "etcd_key", "etcd_user", "etcd_password_file", "token_file", "tls_ca", "tls_cert",
        "tls_key",
    ):  # fmt: skip
        value = getattr(cluster, name)
        if value:
            given += [f"--{name.replace('_', '-')}", str(value if name == "etcd_user" else value.absolute())]
    return tuple(given)
