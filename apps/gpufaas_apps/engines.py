"""What runs functions that have only an image, as ``--functions`` says: the engine of containers, or none."""

import os
from collections.abc import Awaitable, Callable

from gpufaas_gpu_manager.supervisor import Containers


async def opened_engine(
    functions: str, instance: str, gateway_port: int, on_network: Callable[[str, str], Awaitable[None]] | None = None
) -> Containers | None:
    """
    Return the engine, which is connected unless *functions* is ``auto``: then it is when it is needed first.

    :param instance: whose containers these are; what an earlier run of it left behind is removed
    :raises InvalidSpec: the engine that was asked for cannot be used; says what is missing
    """
    if functions == "process":
        return None
    if functions == "kubernetes":
        from gpufaas_gpu_manager.launch.kubernetes import Pods, settings_from
        from gpufaas_gpu_manager.launch.kubernetes_api import access_from

        pods = Pods(instance, access_from(os.environ), settings_from(os.environ))
        await pods.start()
        return pods
    from gpufaas_gpu_manager.launch import containers

    docker = containers.Containers(instance, gateway_port, on_network)
    if functions == "docker":
        await docker.start()
    return docker
