"""What every `Provider` does: the fake that tests use, and real processes of this machine."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.providers.fakes import Clock, FakeProvider

from gpufaas_core.errors import InvalidSpec
from gpufaas_core.model import NodeId, OrderId
from gpufaas_core.orders import NodeOffer
from gpufaas_core.units import MiB
from gpufaas_providers.local import LocalProvider
from gpufaas_providers.ports import Joining, Provider

ONE, TWO = OrderId("1-1"), OrderId("1-2")
OFFER = NodeOffer("cpu", 100 * MiB)


def local(root: Path) -> LocalProvider:
    """Its nodes wait for an etcd that is not there."""
    (root / "token").write_text("0123456789abcdef")
    return LocalProvider(Joining(("--etcd", "127.0.0.1:1", "--token-file", str(root / "token")), root))


@pytest.fixture(params=["fake", "local"])
async def provider(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Provider]:
    made: Provider = FakeProvider(Clock()) if request.param == "fake" else local(tmp_path)
    yield made
    for each in await made.list():
        await made.stop(each.node)


async def test_a_node_is_there_from_its_start_until_it_is_stopped(provider: Provider) -> None:
    assert await provider.list() == []
    held = await provider.start(ONE, OFFER)
    assert (held.order, held.until) == (ONE, 0.0)
    assert await provider.list() == [held]

    await provider.stop(held.node)

    (ended,) = await provider.list()
    assert (ended.node, ended.order, ended.since) == (held.node, ONE, held.since)
    assert ended.until >= held.since


async def test_an_order_that_comes_again_starts_no_second_node(provider: Provider) -> None:
    first, again, other = await asyncio.gather(*(provider.start(each, OFFER) for each in (ONE, ONE, TWO)))

    assert first == again
    assert first.node != other.node
    assert [each.order for each in await provider.list()] == [ONE, TWO]
    await provider.stop(first.node)
    assert (await provider.start(ONE, OFFER)).until, "it was there, and is not started again"


async def test_a_node_that_is_not_there_need_not_be_stopped(provider: Provider) -> None:
    await provider.stop(NodeId("nobody"))
    held = await provider.start(ONE, OFFER)
    await provider.stop(held.node)
    await provider.stop(held.node)


async def test_a_local_node_outlives_the_provider_that_started_it_and_the_next_one_knows_and_stops_it(
    tmp_path: Path,
) -> None:
    held = await local(tmp_path).start(ONE, OFFER)
    successor = local(tmp_path)
    assert await successor.list() == [held]

    await successor.stop(held.node)

    assert (await successor.list())[0].until


async def test_a_local_node_whose_processes_are_killed_has_ended(tmp_path: Path) -> None:
    provider = local(tmp_path)
    held = await provider.start(ONE, OFFER)
    group = tmp_path / "local" / held.node / "group"
    os.killpg(int(group.read_text()), signal.SIGKILL)

    async def ended() -> bool:
        return bool((await provider.list())[0].until)

    while not await ended():
        await asyncio.sleep(0.01)


async def test_local_nodes_have_cpu_devices(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match="none of kind A100"):
        await local(tmp_path).start(ONE, NodeOffer("A100", MiB))
    assert await local(tmp_path).list() == []
