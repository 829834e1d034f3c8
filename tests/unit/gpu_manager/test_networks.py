"""The networks of namespaces, in an engine that only keeps them. tests/integration has the real one."""

import asyncio
from typing import Any

import pytest
from docker.errors import APIError
from tests.waiting import eventually

from gpufaas_core.errors import InvalidSpec
from gpufaas_gpu_manager.launch.networks import Networks


class Made:
    """A network of the engine."""

    def __init__(self, engine: "Engine", number: int, name: str, labels: dict[str, str]) -> None:
        self.id, self.name, self.busy = str(number), name, False
        config = [{"Gateway": f"10.0.{number}.1", "Subnet": f"10.0.{number}.0/24"}]
        self.attrs = {"Labels": labels, "IPAM": {"Config": config}}
        self._engine = engine

    def reload(self) -> None: ...

    def remove(self) -> None:
        if self.busy:
            raise APIError("it has active endpoints")
        self._engine.there.remove(self)


class Engine:
    def __init__(self) -> None:
        self.there: list[Made] = []
        self.full = False
        self._numbers = iter(range(1, 99))
        self.networks = self

    def create(self, name: str, labels: dict[str, str] | None = None, **_: Any) -> Made:
        if self.full:
            raise APIError("500", explanation="could not find an available, non-overlapping IPv4 address pool")
        made = Made(self, next(self._numbers), name, labels or {})
        self.there.append(made)
        return made

    def list(self, names: Any = (), filters: Any = None) -> list[Made]:
        wanted = (filters or {}).get("label", [])
        labels = dict(each.split("=") for each in ([wanted] if isinstance(wanted, str) else wanted))
        named = [each for each in self.there if any(part in each.name for part in names or [""])]
        return [each for each in named if labels.items() <= each.attrs["Labels"].items()]

    def names(self) -> set[str]:
        return {each.name for each in self.there}


class Heard:
    """The subnet of each address at which the gateway was told to listen."""

    def __init__(self) -> None:
        self.subnets: dict[str, str] = {}

    async def on_network(self, address: str, subnet: str) -> None:
        if subnet:
            self.subnets[address] = subnet
        else:
            del self.subnets[address]


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def networks(engine: Engine, heard: Heard) -> Networks:
    networks = Networks("instance", heard.on_network)
    networks.open(engine)
    return networks


async def test_each_namespace_has_a_network_in_which_the_gateway_listens(
    networks: Networks, engine: Engine, heard: Heard
) -> None:
    first, second, again = [await networks.of(each) for each in ("a", "b", "a")]

    assert first == again != second
    assert engine.names() == {"gpufaas-a-instance", "gpufaas-b-instance"}
    assert heard.subnets == {first.host: first.subnet, second.host: second.subnet}


async def test_functions_of_a_namespace_that_start_at_once_are_in_one_network(
    networks: Networks, engine: Engine
) -> None:
    found = await asyncio.gather(*(networks.of("a") for _ in range(5)))

    assert len(set(found)) == len(engine.there) == 1


async def test_a_network_goes_with_its_namespace_once_no_container_is_in_it(
    networks: Networks, engine: Engine, heard: Heard
) -> None:
    kept, gone = await networks.of("kept"), await networks.of("gone")
    engine.there[1].busy = True

    networks.keep({"kept"})
    networks.keep({"kept"})
    await asyncio.sleep(0)
    assert heard.subnets == {kept.host: kept.subnet, gone.host: gone.subnet}
    engine.there[1].busy = False

    def only_one() -> bool:
        networks.drop()  # its container has been removed
        return heard.subnets == {kept.host: kept.subnet}

    await eventually(only_one)
    assert engine.names() == {"gpufaas-kept-instance"}


async def test_a_network_that_somebody_removed_is_made_again(networks: Networks, engine: Engine) -> None:
    first = await networks.of("a")
    engine.there.clear()

    again = await networks.of("a")

    assert again.id != first.id
    assert [each.id for each in engine.there] == [again.id]


async def test_an_engine_without_more_addresses_is_told_what_to_do(networks: Networks, engine: Engine) -> None:
    engine.full = True

    with pytest.raises(InvalidSpec, match=r"no network for namespace a: .*docker network prune.*default-address-pools"):
        await networks.of("a")


@pytest.mark.parametrize("busy", [False, True])
def test_the_one_network_of_older_releases_goes_unless_one_runs(engine: Engine, heard: Heard, busy: bool) -> None:
    engine.create("gpufaas").busy = busy
    engine.create("gpufaas", {"com.docker.compose.project": "theirs"})
    engine.create("gpufaas_default")
    engine.create("left", {"gpufaas.instance": "instance", "gpufaas.namespace": "a"})
    engine.create("of another", {"gpufaas.instance": "another", "gpufaas.namespace": "a"})

    Networks("instance", heard.on_network).open(engine)

    assert [each.id for each in engine.there] == (["1"] if busy else []) + ["2", "3", "5"]
