"""
The functions' networks in the Docker engine: one for each namespace, because the engine lets nothing pass between two.

So containers of one namespace reach each other, the gateway on this machine's address in their network, and the
outside. Each platform has its own. A network goes with the last function of its namespace.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Final, NamedTuple

from gpufaas_core.errors import InvalidSpec
from gpufaas_gpu_manager.launch.docker_images import explanation

INSTANCE: Final = "gpufaas.instance"
"""The label of what belongs to a platform."""
_NAMESPACE: Final = "gpufaas.namespace"
_SHARED: Final = "gpufaas"
"""The one network of all namespaces and platforms that older releases made."""


class Network(NamedTuple):
    id: str
    host: str
    """This machine's address in it."""
    subnet: str


async def unheard(address: str, subnet: str) -> None:
    """Nobody listens in the networks: containers reach the gateway by an address of its own."""


class Networks:
    """
    :param instance: the platform that they belong to
    :param on_network: called with this machine's address in a network that is there, and its subnet; empty: it is gone
    """

    def __init__(self, instance: str, on_network: Callable[[str, str], Awaitable[None]]) -> None:
        self._instance = instance
        self._on_network = on_network
        self._client: Any = None
        self._made: set[str] = set()
        self._needed: set[str] = set()
        """Namespaces."""
        self._changing = asyncio.Lock()
        self._dropping: asyncio.Task[None] | None = None

    def open(self, client: Any) -> None:
        """Remove what an earlier run left, and the shared one if no older platform uses it. Blocks."""
        self._client = client
        self.remove_but(())
        for each in client.networks.list(names=[_SHARED]):
            if each.name == _SHARED and not each.attrs["Labels"]:
                _remove(each)

    async def of(self, namespace: str) -> Network:
        """
        Return the network of *namespace*. It is made if need be: ``docker network prune`` may have removed it.

        :raises InvalidSpec: the engine makes no more
        """
        self._needed.add(namespace)
        async with self._changing:
            self._made.add(namespace)
            network = await asyncio.to_thread(self._there_or_made, namespace)
            await self._on_network(network.host, network.subnet)
        return network

    def keep(self, namespaces: Collection[str]) -> None:
        """Functions, or workers of them, are in *namespaces* only."""
        self._needed = set(namespaces)
        self.drop()

    def drop(self) -> None:
        """Remove networks that nobody needs. One with a container that is ending stays until this is asked again."""
        if self._made - self._needed and (self._dropping is None or self._dropping.done()):
            self._dropping = asyncio.get_running_loop().create_task(self._drop())

    async def _drop(self) -> None:
        async with self._changing:
            for namespace, host in await asyncio.to_thread(self.remove_but, self._needed):
                self._made.discard(namespace)
                await self._on_network(host, "")

    # --- in threads ---

    def _there_or_made(self, namespace: str) -> Network:
        from docker.errors import DockerException

        labels = {INSTANCE: self._instance, _NAMESPACE: namespace}
        try:
            found = self._client.networks.list(filters={"label": [f"{key}={value}" for key, value in labels.items()]})
            network = found[0] if found else self._client.networks.create(
                f"gpufaas-{namespace}-{self._instance[:8]}", driver="bridge", labels=labels
            )  # fmt: skip
            network.reload()
            return _described(network)
        except (DockerException, OSError, LookupError) as exc:
            reason = explanation(exc)
            if "address pool" in reason:
                reason += (
                    ": remove networks that nobody uses (docker network prune), or give the engine more and smaller "
                    "pools (default-address-pools in its daemon.json)"
                )
            raise InvalidSpec(f"the Docker engine makes no network for namespace {namespace}: {reason}") from exc

    def remove_but(self, namespaces: Collection[str]) -> list[tuple[str, str]]:
        """Remove the networks of others than *namespaces*; return namespace and this machine's address of each."""
        found = self._client.networks.list(filters={"label": f"{INSTANCE}={self._instance}"})
        others = [each for each in found if each.attrs["Labels"].get(_NAMESPACE) not in namespaces]
        return [(each.attrs["Labels"].get(_NAMESPACE), _described(each).host) for each in others if _remove(each)]


def _described(network: Any) -> Network:
    addresses = network.attrs["IPAM"]["Config"][0]
    return Network(network.id, addresses["Gateway"], addresses["Subnet"])


def _remove(network: Any) -> bool:
    """Remove *network*; False: it has containers, or somebody else removed it."""
    from docker.errors import APIError

    try:
        network.remove()
    except APIError:
        return False
    return True
