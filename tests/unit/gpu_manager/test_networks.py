"""The networks of namespaces, in an engine that only keeps them. tests/integration has the real one."""

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from docker.errors import APIError
from tests.waiting import eventually

from gpufaas_core.errors import InvalidSpec
from gpufaas_gpu_manager.launch.networks import Network, Networks


class Made:
    """A network of the engine."""

    def __init__(self, engine: "Engine", number: int, name: str, labels: dict[str, str]) -> None:
        self.id, self.name, self.busy = str(number), name, False
        config = [{"Gateway": f"10.0.{number}.1", "Subnet": f"10.0.{number}.0/24"}]
        self.attrs = {"Labels": labels, "IPAM": {"Config": config}}
        self._engine = engine

    def remove(self) -> None:
        if self.busy:
            raise APIError("it has active endpoints")
        self._engine.there.remove(self)


class Engine:
    def __init__(self) -> None:
        self.there: list[Made] = []
        self.most = 30
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.waits = False
        self._numbers = iter(range(1, 99))
        self.networks = self

    def create(self, name: str, labels: dict[str, str], **_: Any) -> Made:
        self.waits = True
        self.may_go_on.wait()
        if len(self.there) == self.most:
            raise APIError("500", explanation="could not find an available, non-overlapping IPv4 address pool")
        made = Made(self, next(self._numbers), name, labels)
        self.there.append(made)
        return made

    def list(self, filters: dict[str, str]) -> list[Made]:
        key, _, value = filters["label"].partition("=")
        return [each for each in self.there if each.attrs["Labels"].get(key) == value]

    def names(self) -> set[str]:
        return {each.name for each in self.there}


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def heard() -> dict[str, str]:
    """The subnets that the gateway was told of last, by its address in them."""
    return {}


@pytest.fixture
def networks(engine: Engine, heard: dict[str, str]) -> Networks:
    async def on_networks(there: Mapping[str, str]) -> None:
        heard.clear()
        heard.update(there)

    networks = Networks("instance", on_networks)
    networks.client = engine
    return networks


async def of(networks: Networks, namespace: str) -> Network:
    async with networks.joined(namespace) as network:
        return network


async def test_each_namespace_has_a_network_in_which_the_gateway_listens(
    networks: Networks, engine: Engine, heard: dict[str, str]
) -> None:
    engine.create("of another", {"gpufaas.instance": "another", "gpufaas.namespace": "a"})

    first, second, again = [await of(networks, each) for each in ("a", "b", "a")]

    assert first == again != second
    assert engine.names() == {"of another", "gpufaas-a-instance", "gpufaas-b-instance"}
    assert heard == {first.host: first.subnet, second.host: second.subnet}


async def test_functions_of_a_namespace_that_start_at_once_are_in_one_network_also_if_one_is_cancelled(
    networks: Networks, engine: Engine
) -> None:
    starts = [asyncio.create_task(of(networks, "a")) for _ in range(5)]
    engine.may_go_on.clear()
    await eventually(lambda: engine.waits)
    starts[0].cancel()
    await asyncio.sleep(0)
    engine.may_go_on.set()

    found = await asyncio.gather(*starts[1:])

    assert len(set(found)) == len(engine.there) == 1


async def test_a_network_that_somebody_removed_is_made_again(
    networks: Networks, engine: Engine, heard: dict[str, str]
) -> None:
    first, _ = await of(networks, "a"), await of(networks, "b")
    engine.there.clear()

    again = await of(networks, "a")

    assert again.id != first.id
    assert heard == {again.host: again.subnet}


async def test_an_engine_without_more_addresses_gives_those_of_a_network_in_which_no_container_is_or_starts(
    networks: Networks, engine: Engine, heard: dict[str, str]
) -> None:
    engine.most = 3
    busy, _ = await of(networks, "busy"), await of(networks, "idle")
    engine.there[0].busy = True
    async with networks.joined("starts") as starts:
        new = await of(networks, "new")

        assert heard == {each.host: each.subnet for each in (busy, starts, new)}
        engine.there[-1].busy = True
        with pytest.raises(InvalidSpec, match=r"no network for namespace more: .* set default-address-pools"):
            await of(networks, "more")

    assert engine.names() == {"gpufaas-busy-instance", "gpufaas-starts-instance", "gpufaas-new-instance"}
