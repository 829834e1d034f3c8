"""The routes of plans: what is shown, what is taken, and one line for each mistake."""

from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.gateway.conftest import DEVICE, Gateway

from gpufaas_apps.plan_api import plan_routes
from gpufaas_core.errors import GrantRefused
from gpufaas_core.model import PlannedCopy, PlanStatus

PLAN, ECHO = "/system/plan", "echo.openfaas-fn"
ON = {"function": "echo", "device": DEVICE.id}
SHOWN = {"function": ECHO, "device": DEVICE.id}
NEVER = {"version": 0, "replicas": [], "by": "", "at": 0.0, "why": "", "expected": {}, "notes": [], "planner": {}}


class Planner:
    """Counts who asked, and says what the test sets."""

    def __init__(self) -> None:
        self.status: dict[str, Any] = {}
        self.asked: list[str] = []
        self.refuses: Exception | None = None

    async def ask(self, why: str) -> dict[str, Any]:
        self.asked += [why] if why else []
        if self.refuses is not None:
            raise self.refuses
        return self.status


@pytest.fixture
def planner() -> Planner:
    """There is none at first."""
    return Planner()


@pytest.fixture
async def gateway(gateway: Gateway, planner: Planner) -> Gateway:
    """With the routes, and a function."""
    gateway.app.include_router(plan_routes(gateway.catalogue, gateway.plans, gateway.scheduler.status, planner.ask))
    gateway.catalogue.loaded = True
    await gateway.deployed()
    return gateway


async def test_nothing_is_planned_at_first(gateway: Gateway) -> None:
    assert (await gateway.client.get(PLAN)).json() == NEVER
    assert (await gateway.client.get(f"{PLAN}/history")).json() == []


async def test_a_plan_is_applied_shown_and_listed_with_who_applied_it(gateway: Gateway) -> None:
    body = {"replicas": [ON], "why": "at night", "expected": {"calls_per_s": 2}, "base": 0}

    answer = await gateway.client.put(PLAN, json=body, headers={"User-Agent": "gpufaas-cli/1"})

    made = answer.json()
    assert answer.status_code == 200
    assert made == {
        "version": 1, "replicas": [SHOWN], "by": "gpufaas-cli/1", "at": made["at"], "why": "at night",
        "expected": {"calls_per_s": 2.0},
    }  # fmt: skip
    shown = (await gateway.client.get(PLAN)).json()
    assert shown["replicas"] == [{**SHOWN, "share": 0, "reserve": 0, "slots": 0, "batch": 0, "wait_s": None,
                                  "pinned": False, "state": "unknown", "reason": ""}]  # fmt: skip
    assert {**shown, "replicas": made["replicas"]} == {**NEVER, **made}
    assert (await gateway.client.get(f"{PLAN}/history")).json() == [made]
    assert (await gateway.client.get(f"{PLAN}/1")).json() == made


async def test_what_became_of_each_replica_is_shown_once_the_scheduler_knows_the_plan(gateway: Gateway) -> None:
    await gateway.client.put(PLAN, json={"replicas": [ON]})
    became = PlannedCopy(ECHO, DEVICE.id, state="absent", reason="no room")

    states = []
    for version in (9, 1):
        gateway.scheduler.now = replace(gateway.scheduler.now, plan=PlanStatus(version, (became,)))
        (shown,) = (await gateway.client.get(PLAN)).json()["replicas"]
        states.append((shown["state"], shown["reason"]))

    assert states == [("unknown", ""), ("absent", "no room")]


async def test_who_has_logged_in_is_named(gateway: Gateway) -> None:
    await gateway.admin.put(PLAN, json={"replicas": []})
    await gateway.client.put(PLAN, json={"replicas": []}, headers={"User-Agent": ""})

    assert [each["by"] for each in (await gateway.client.get(f"{PLAN}/history")).json()] == ["anonymous", "admin"]


@pytest.mark.parametrize("path", ["", "/history", "/1"])
async def test_plans_are_behind_the_password(gateway: Gateway, path: str) -> None:
    assert (await gateway.stranger.get(f"{PLAN}{path}")).status_code == 401


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "why"),
    [
        ("PUT", "", {}, 400, "body:1: replicas is missing: write a list"),
        ("PUT", "", {"replicas": [{**ON, "shar": 4}]}, 400, "unknown key 'shar' in replicas[0]: did you mean 'share'?"),
        ("PUT", "", {"replicas": [{**ON, "share": "4"}]}, 400, 'replicas[0].share is "4": write a whole number'),
        (
            "PUT",
            "",
            {"replicas": [{**ON, "device": "n9/a"}]},
            400,
            "on n9/a: there is no such device",
        ),
        ("PUT", "", {"replicas": [], "base": 3}, 409, "plan 1 by me came in between (first): look at it"),
        ("PUT", "", {"replicas": [{**ON, "namespace": "dev"}]}, 400, "replica 1, echo.dev on n1/cpu:0"),
        ("POST", "/rollback", {"version": 3}, 404, "version 3 of the plan is not kept: 1 to 1 are"),
        ("POST", "/rollback", {"version": 1, "base": 0}, 409, "plan 1 by me came in between"),
        ("POST", "/pin", {"function": "echo"}, 400, "device is missing"),
        ("POST", "/pin", {**ON, "function": "ech"}, 400, f"there is no such function: did you mean {ECHO}?"),
        (
            "POST",
            "/pin",
            {**ON, "function": ECHO, "namespace": "dev"},
            400,
            f"{ECHO}.dev on n1/cpu:0: there is no such",
        ),
        ("POST", "/unpin", {"function": "echo"}, 400, f"{ECHO} is pinned nowhere"),
        ("POST", "/make", None, 400, "no planner runs: start gpufaas serve"),
        ("GET", "/7", None, 404, "version 7 of the plan is not kept"),
    ],
)
async def test_a_mistake_gets_one_line_and_changes_nothing(
    gateway: Gateway, method: str, path: str, body: object, status: int, why: str
) -> None:
    first = (await gateway.client.put(PLAN, json={"replicas": [], "why": "first"}, headers={"User-Agent": "me"})).json()

    answer = await gateway.client.request(method, f"{PLAN}{path}", json=body)

    assert answer.status_code == status, answer.text
    assert why in answer.text
    assert answer.text.count("\n") == 1
    assert (await gateway.client.get(f"{PLAN}/history")).json() == [first]


async def test_a_plan_of_an_earlier_version_is_put_in_force_again(gateway: Gateway) -> None:
    for replicas in ([ON], []):
        await gateway.client.put(PLAN, json={"replicas": replicas})

    made = (await gateway.client.post(f"{PLAN}/rollback", json={"version": 1, "base": 2})).json()

    assert (made["version"], made["replicas"], made["why"]) == (3, [SHOWN], "rollback to 1")


async def test_a_function_is_pinned_and_unpinned(gateway: Gateway) -> None:
    pinned = (await gateway.client.post(f"{PLAN}/pin", json={**ON, "slots": 1})).json()
    unpinned = (await gateway.client.post(f"{PLAN}/unpin", json=ON)).json()

    assert pinned["replicas"] == [{**SHOWN, "slots": 1, "pinned": True}]
    assert (unpinned["version"], unpinned.get("replicas", [])) == (2, [])


async def test_the_planner_says_what_it_does_and_can_be_asked(gateway: Gateway, planner: Planner) -> None:
    planner.status = {"solver": "test", "version": 1}
    first = (await gateway.client.put(PLAN, json={"replicas": [ON]})).json()

    answer = await gateway.admin.post(f"{PLAN}/make")

    assert answer.json() == first
    assert planner.asked == ["admin asked"]
    assert (await gateway.client.get(PLAN)).json()["planner"] == planner.status


async def test_a_plan_that_could_not_be_made_is_refused_with_the_reason(gateway: Gateway, planner: Planner) -> None:
    planner.status = {"solver": "test", "last_error": "no answer after 60 s"}

    answer = await gateway.admin.post(f"{PLAN}/make")

    assert (answer.status_code, answer.text.strip()) == (400, "the planner made no plan: no answer after 60 s")


async def test_a_planner_that_plans_nothing_says_so(gateway: Gateway, planner: Planner) -> None:
    planner.status = {"solver": "test", "version": 0}

    answer = await gateway.admin.post(f"{PLAN}/make")

    assert (answer.status_code, answer.text.strip()) == (
        400, "the planner plans no copies: no plan is in force (gpufaas list)",
    )  # fmt: skip


async def test_without_a_scheduler_the_plan_is_shown_all_the_same(gateway: Gateway, planner: Planner) -> None:
    planner.refuses = GrantRefused("no scheduler leads")

    assert (await gateway.client.get(PLAN)).json() == {**NEVER, "planner": {"last_error": "no scheduler leads"}}
