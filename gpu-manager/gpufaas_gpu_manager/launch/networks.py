"""
The functions' networks in the Docker engine: one for each namespace, because the engine lets nothing pass between two.

So containers of one namespace reach each other, the gateway on this machine's address in their network, and the
outside. Each platform has its own, and removes them when it stops.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from gpufaas_core.errors import InvalidSpec
from gpufaas_gpu_manager.launch.docker_images import explanation

INSTANCE: Final = "gpufaas.instance"
"""The label of what belongs to a platform."""
_NAMESPACE: Final = "gpufaas.namespace"

OnNetworks = Callable[[Mapping[str, str]], Awaitable[None]]
"""Called with the networks that are there: the subnet of each by this machine's address in it."""


class Network(NamedTuple):
    id: str
    host: str
    """This machine's address in it."""
    subnet: str


class Networks:
    """See module. :param instance: the platform that they belong to"""

    client: Any
    """The engine."""

    def __init__(self, instance: str, on_networks: OnNetworks | None) -> None:
        self._instance = instance
        self._on_networks = on_networks
        self._changing = asyncio.Lock()
        self._joining: Counter[str] = Counter()
        """Containers that are not in the network of their namespace yet."""

    @contextlib.asynccontextmanager
    async def joined(self, namespace: str) -> AsyncIterator[Network]:
        """
        Give the network of *namespace*, made if need be, which is not removed meanwhile.

        :raises InvalidSpec: the engine makes no more
        """
        self._joining[namespace] += 1
        try:
            yield (await asyncio.shield(self._with(namespace)))[namespace]
        finally:
            self._joining[namespace] -= 1

    async def _with(self, namespace: str) -> dict[str, Network]:
        async with self._changing:
            there = await asyncio.to_thread(self._there, namespace)
            if self._on_networks is not None:
                await self._on_networks({each.host: each.subnet for each in there.values()})
            return there

    def _there(self, namespace: str) -> dict[str, Network]:
        """Return the networks by namespace, with that of *namespace*: somebody may have pruned it. Blocks."""
        from docker.errors import APIError, DockerException

        labels = {INSTANCE: self._instance, _NAMESPACE: namespace}
        name = f"gpufaas-{namespace}-{self._instance}"
        try:
            found = self.client.networks.list(filters={"label": f"{INSTANCE}={self._instance}"})
            there = {each.attrs["Labels"][_NAMESPACE]: each for each in found}
            if namespace not in there:
                make = partial(self.client.networks.create, name, driver="bridge", labels=labels)
                try:
                    there[namespace] = make()
                except APIError:  # it has about 30 ranges of addresses: return those that are not in use
                    for other in [each for each in there if not self._joining[each]]:
                        with contextlib.suppress(APIError):  # it has containers
                            there[other].remove()
                            del there[other]
                    there[namespace] = make()
            of = {key: (each.id, each.attrs["IPAM"]["Config"][0]) for key, each in there.items()}
            return {key: Network(id_, config["Gateway"], config["Subnet"]) for key, (id_, config) in of.items()}
        except (DockerException, OSError, LookupError) as exc:
            raise InvalidSpec(
                f"the Docker engine makes no network for namespace {namespace}: {explanation(exc)}: if it has no more "
                "addresses, set default-address-pools in its daemon.json"
            ) from exc
