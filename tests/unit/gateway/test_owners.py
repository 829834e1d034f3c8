"""Who decides about the copies of a function, as `describe` says it, and who may not."""

import pytest
from msgspec.structs import astuple, replace
from tests.unit.gateway.conftest import Gateway
from tests.unit.gateway.test_contract_checklist import alert

from gpufaas_core.model import DeviceId, PlannedCopy, PlanStatus, Replica
from gpufaas_core.plans import PlanVersion

SCALE = "com.openfaas.scale."
ECHO = "echo.openfaas-fn"


def planned(gateway: Gateway, *states: str, pinned: bool = True) -> None:
    """Put a plan in force that has echo on a device for each of *states*: what the engine says of these copies."""
    replicas = tuple(Replica(ECHO, DeviceId(f"n/{i}"), 30, pinned=pinned) for i in range(len(states)))
    plan = PlanVersion(3, replicas, "alice")
    gateway.deployer.plan = lambda: plan
    copies = tuple(
        PlannedCopy(*astuple(each), state, f"why {state}") for each, state in zip(replicas, states, strict=True)
    )
    gateway.scheduler.now = replace(gateway.scheduler.now, plan=PlanStatus(3, copies))


async def detail(gateway: Gateway) -> dict[str, object]:
    answer = await gateway.client.get("/system/function/echo")
    found: dict[str, object] = answer.json()["gpufaas"]
    (listed,) = (await gateway.client.get("/system/functions")).json()
    assert listed["gpufaas"] == found
    return found


@pytest.mark.parametrize(
    ("labels", "owner", "why"),
    [
        ({}, "calls", "nothing is said: copies follow calls"),
        ({"team": "a"}, "calls", "nothing is said: copies follow calls"),
        ({f"{SCALE}min": "1", f"{SCALE}max": "2"}, "labels", f"labels {SCALE}max, {SCALE}min"),
        ({f"{SCALE}type": "alert"}, "calls", "its labels have no rule by load: copies follow calls"),
        ({f"{SCALE}max": "2", f"{SCALE}target": "5"}, "labels", f"labels {SCALE}max, {SCALE}target"),
        ({f"{SCALE}zero": "true", f"{SCALE}type": "rps"}, "labels", f"labels {SCALE}type, {SCALE}zero"),
    ],
)
async def test_labels_own_a_function_if_they_have_a_rule_and_its_calls_otherwise(
    gateway: Gateway, labels: dict[str, str], owner: str, why: str
) -> None:
    deployed = await gateway.deployed(labels=labels)

    found = await detail(gateway)

    assert gateway.scheduler.functions[deployed].owner == owner
    assert (found["owner"], found["ownerWhy"], found.get("plan")) == (owner, why, None)


@pytest.mark.parametrize("labels", [{}, {f"{SCALE}zero": "true"}])
async def test_a_plan_owns_what_it_names_whatever_its_labels_say(gateway: Gateway, labels: dict[str, str]) -> None:
    await gateway.deployed(labels=labels)
    planned(gateway, "resident", "absent")

    found = await detail(gateway)

    assert (found["owner"], found["ownerWhy"]) == ("plan", "plan 3 (by alice) pins it")
    assert isinstance(found["plan"], list)
    assert [(each["device"], each["share"], each["state"], each["reason"]) for each in found["plan"]] == [
        ("n/0", 30, "resident", "why resident"), ("n/1", 30, "absent", "why absent"),
    ]  # fmt: skip


async def test_while_no_device_of_the_plan_is_there_its_declared_owner_decides(gateway: Gateway) -> None:
    await gateway.deployed(labels={f"{SCALE}zero": "true"})
    planned(gateway, "away", pinned=False)

    found = await detail(gateway)

    assert found["owner"] == "labels"
    assert found["ownerWhy"] == f"label {SCALE}zero; plan 3 (by alice) names it, but its devices are gone or drained"


async def test_a_function_that_is_deployed_again_as_one_that_no_plan_can_name_has_its_declared_owner(
    gateway: Gateway,
) -> None:
    ours = {"gpufaas.bundle": gateway.bundle, "gpufaas.sharing": "share", "gpufaas.compute": "20"}
    await gateway.deployed(annotations=ours)
    planned(gateway, "absent")

    assert (await detail(gateway))["owner"] == "calls"
    assert (await gateway.client.post("/system/scale-function/echo", json={"replicas": 1})).status_code == 202


async def test_a_function_that_a_plan_owns_cannot_be_scaled_and_others_can(gateway: Gateway) -> None:
    await gateway.deployed()
    other = await gateway.deployed("other")
    planned(gateway, "resident")

    refused = await gateway.client.post("/system/scale-function/echo", json={"replicas": 2})
    answer = await gateway.client.post("/system/scale-function/other", json={"replicas": 2})

    assert (refused.status_code, refused.headers["x-gpufaas-error"]) == (409, "kept-by-plan")
    assert refused.text == (
        f"{ECHO} cannot be scaled: plan 3 (by alice) pins it: take it out of the plan first (gpufaas plan unpin echo, "
        "apply or rollback)\n"
    )
    assert answer.status_code == 202
    assert gateway.scheduler.scaled == [(other, 2)]


async def test_an_alert_scales_no_function_that_a_plan_owns_but_the_others_that_it_names(gateway: Gateway) -> None:
    await gateway.deployed()
    other = await gateway.deployed("other")
    planned(gateway, "resident")

    answer = await gateway.client.post("/system/alert", json=alert(ECHO, "other.openfaas-fn"))

    assert (answer.status_code, "plan 3 (by alice) pins it" in answer.text) == (409, True)
    assert gateway.scheduler.scaled == [(other, 3)]


async def test_a_planned_function_may_be_scaled_again_once_no_plan_names_it(gateway: Gateway) -> None:
    await gateway.deployed()
    planned(gateway, "resident")
    planned(gateway)

    assert (await gateway.client.post("/system/scale-function/echo", json={"replicas": 2})).status_code == 202
