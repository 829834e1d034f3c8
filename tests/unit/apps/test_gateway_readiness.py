"""What a gateway says while no scheduler leads: what is old is shown as old, and what is missing is said."""

from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI
from msgspec.structs import replace
from tests.unit.gateway.fakes import idle

from gpufaas_apps.gateway import GatewayApp
from gpufaas_apps.status import Status
from gpufaas_cluster import control
from gpufaas_cluster.connection import Identity, Link
from gpufaas_cluster.remote_placement import NO_LEADER_S
from gpufaas_cluster.remote_scheduler import RemoteScheduler
from gpufaas_core.model import Device, DeviceId, EngineStatus, NodeId, NodeView
from gpufaas_gateway.metrics import Metrics
from gpufaas_gateway.node_api import node_routes

LINK = cast(Link, SimpleNamespace(epoch=1, send=lambda _: None))
VIEW = control.ClusterState(
    [NodeView(NodeId("n1"), "h:1"), NodeView(NodeId("n2"), "h:2", note="its clock is off")],
    EngineStatus("lalb", (idle(Device(DeviceId("n1/cpu:0"), "cpu", 1000)),), {}, {}),
)


class Side:
    """A gateway's end of the link to the scheduler, with a clock that the test moves."""

    def __init__(self) -> None:
        self.scheduler = RemoteScheduler(Identity("gateway", "g1", "boot", b"token"))
        self.now = 100.0
        self.scheduler._loop = cast(Any, SimpleNamespace(time=lambda: self.now))
        self.scheduler._lost_at = self.now
        self.app = cast(GatewayApp, SimpleNamespace(_scheduler=self.scheduler))
        self.app._without_scheduler = lambda: GatewayApp._without_scheduler(self.app)  # type: ignore[method-assign]

    def leads(self, address: str = "s1:7070") -> None:
        self.scheduler.leaders.leader = address
        self.scheduler.begin(LINK)
        self.scheduler.heard(VIEW)

    def dies(self, leader: str = "") -> None:
        self.scheduler.leaders.leader = leader
        self.scheduler.end()

    async def readyz(self) -> tuple[int, str]:
        """Ask the status port."""
        front = cast(Any, SimpleNamespace(catalogue=SimpleNamespace(loaded=True)))
        status = Status(lambda: GatewayApp._why_not_ready(self.app, front))
        return await got(status.app, "/readyz")

    def fault(self) -> str:
        """What the public ``/readyz`` is told."""
        return GatewayApp._without_scheduler(self.app)

    async def nodes(self) -> Any:
        app = FastAPI()
        app.include_router(node_routes(self.scheduler))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://g") as client:
            return (await client.get("/system/nodes")).json()


async def got(app: Any, path: str) -> tuple[int, str]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://g") as client:
        answer = await client.get(path)
    return answer.status_code, answer.text.strip()


@pytest.fixture
async def side() -> Side:
    return Side()


async def test_a_hand_over_within_the_time_that_calls_wait_is_seen_by_no_load_balancer(side: Side) -> None:
    side.now += 1
    assert (await side.readyz())[0] == 503  # nobody ever led: there is nothing that it could serve

    side.leads()
    side.dies()
    side.now += NO_LEADER_S

    assert (await side.readyz(), side.fault()) == ((200, "ready"), "")


async def test_without_any_leader_gateways_stay_in_service_and_say_what_is_missing(side: Side) -> None:
    side.leads()
    side.dies()
    side.now += 35

    assert side.fault() == "no scheduler for 35 s: none leads"
    assert await side.readyz() == (200, "ready for models that are loaded; no scheduler for 35 s: none leads")

    side.leads()
    assert (await side.readyz(), side.fault()) == ((200, "ready"), "")


async def test_a_gateway_that_alone_does_not_reach_the_leader_goes_out_of_service(side: Side) -> None:
    side.leads()
    side.dies(leader="s2:7070")
    side.now += 35

    assert await side.readyz() == (503, "no scheduler for 35 s: s2:7070 is not reached")


async def test_what_a_scheduler_said_that_is_gone_has_its_age_until_the_next_one_says_more(side: Side) -> None:
    side.leads()
    assert [(each["state"], each["ageSeconds"]) for each in await side.nodes()] == [("ready", 0)] * 2

    side.dies()
    side.scheduler.heard(replace(VIEW))  # it was on its way
    side.scheduler.unlinked([NodeId("n1")])
    side.now += 35
    side.scheduler.begin(LINK)  # the next one leads, and has not yet said what there is

    assert [(each["state"], each["ageSeconds"]) for each in await side.nodes()] == [("unknown", 35)] * 2
    assert [each["note"] for each in await side.nodes()] == ["not reached by this gateway", "its clock is off"]
    metrics = Metrics(side.scheduler.status)
    assert b"gpufaas_status_age_seconds 35.0" in metrics.render_own()
    assert b"gpufaas_device_" not in metrics.render()

    side.scheduler.heard(VIEW)
    assert [(each["state"], each["note"]) for each in await side.nodes()] == [
        ("ready", ""),
        ("ready", "its clock is off"),
    ]
    assert b"gpufaas_device_" in metrics.render()
