"""The devices of a node, and the container engine that ``--functions`` asks for, as its options say."""

import os

from gpufaas_apps.options import DeviceOptions
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.model import NodeId
from gpufaas_gpu_manager.devices import NodeDevice, open_devices
from gpufaas_gpu_manager.enforcement import Enforcement
from gpufaas_gpu_manager.launch.networks import OnNetworks
from gpufaas_gpu_manager.supervisor import ContainerEngine


def opened_devices(given: DeviceOptions, node: NodeId) -> tuple[list[NodeDevice], Enforcement]:
    """Return the devices of *node*, and what holds its workers to their memory. Raises as `open_devices`."""
    enforcement = Enforcement(given.memory_enforcement)
    devices = open_devices(
        given.devices, node, given.labels, enforcement.name, given.read_costs, enforcement.shares_by, given.standby,
        given.isolation,
    )  # fmt: skip
    return devices, enforcement


def container_engine(
    functions: str, instance: str, gateway: str, on_networks: OnNetworks | None
) -> ContainerEngine | None:
    """
    Return the engine for *functions*, not connected yet; None: functions of images do not run here.

    :param instance: names the platform that owns the containers; `connect` removes those of its earlier run
    :param gateway: its URL as containers reach it; see `Containers`
    :param on_networks: as of `Networks`
    :raises InvalidSpec: Kubernetes is asked for, and this is not a pod, or its client is not installed
    """
    if functions == "process":
        return None
    if functions == "kubernetes":
        try:
            from gpufaas_gpu_manager.launch.kubernetes import Pods
            from gpufaas_gpu_manager.launch.kubernetes_api import access_from
            from gpufaas_gpu_manager.launch.pod_manifest import settings_from
        except ModuleNotFoundError as exc:
            raise InvalidSpec(f"{exc.name} is not installed: pip install 'gpufaas[kubernetes]'") from None

        return Pods(instance, access_from(os.environ), settings_from(os.environ))
    from gpufaas_gpu_manager.launch import containers

    return containers.Containers(instance, gateway, on_networks)


async def connect(engine: ContainerEngine | None, functions: str) -> None:
    """
    Connect *engine*, unless *functions* is ``auto``: then it is connected for the first image.

    :raises InvalidSpec: the engine that was asked for cannot be used; says what is missing
    """
    if engine is not None and functions != "auto":
        await engine.start()
