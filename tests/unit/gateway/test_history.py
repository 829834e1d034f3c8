"""What was deployed, by whom, and back to it; an update that changes nothing."""

from typing import Any

import httpx
import pytest
from tests.unit.gateway.conftest import Gateway

from gpufaas_core.errors import GpufaasError
from gpufaas_core.model import Failing
from gpufaas_gateway.history import KEPT

FUNCTIONS, ECHO = "/system/functions", "/system/function/echo"


async def history(gateway: Gateway) -> list[dict[str, Any]]:
    answer = await gateway.client.get(f"{ECHO}/revisions")
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()
    return found


async def updated(gateway: Gateway, **env: str) -> str:
    """Update echo; return its new revision."""
    (await gateway.client.put(FUNCTIONS, json=gateway.body(envVars=env))).raise_for_status()
    return gateway.found().record.revision


async def test_a_deployment_answers_its_revision(gateway: Gateway) -> None:
    for method in ("POST", "PUT"):
        body = gateway.body(envVars={"by": method})
        answer = await gateway.client.request(method, FUNCTIONS, json=body)

        assert answer.headers["X-Gpufaas-Revision"] == gateway.found().record.revision


async def rolled_back(gateway: Gateway, **body: str) -> httpx.Response:
    return await gateway.client.post(f"{ECHO}/rollback", json=body or None)


async def test_a_history_says_what_was_deployed_when_and_by_whom(gateway: Gateway) -> None:
    agent = {"User-Agent": "faas-cli/0.17 (linux)"}
    await gateway.client.post(FUNCTIONS, json=gateway.body(), headers=agent)
    first = gateway.found().record.revision
    await gateway.admin.put(FUNCTIONS, json=gateway.body(envVars={"n": "2"}))

    newest, oldest = await history(gateway)

    assert newest["revision"] == gateway.found().record.revision
    assert (newest["by"], newest["spec"]["env_vars"], newest["digest"]) == ("admin", {"n": "2"}, gateway.bundle)
    assert (oldest["revision"], oldest["by"], oldest["status"]) == (first, "faas-cli/0.17", "superseded")
    assert "status" not in newest, "it serves"
    assert newest["at"] == 1_795_215_653.5


async def test_a_rollback_deploys_the_one_before_anew_and_a_second_one_goes_forth_again(gateway: Gateway) -> None:
    await gateway.deployed(envVars={"n": "1"})
    first = gateway.found().record.revision
    second = await updated(gateway, n="2")

    answer = await rolled_back(gateway)

    third = gateway.found().record.revision
    assert (answer.status_code, answer.json()) == (200, {"revision": third, "to": first})
    assert gateway.found().record.spec.env_vars == {"n": "1"}
    assert [each["revision"] for each in await history(gateway)] == [third, second, first]
    assert (await rolled_back(gateway)).json()["to"] == second


async def test_the_revision_that_takes_the_calls_again_stays_in_the_history_and_so_do_its_files(
    gateway: Gateway,
) -> None:
    """After ten updates of an idle function, which are all on trial, it was forgotten, and its files were collected."""
    await gateway.deployed(envVars={"n": "0"})
    first = gateway.found().record.revision

    last = [await updated(gateway, n=str(each)) for each in range(1, KEPT + 2)][-1]

    assert gateway.found().record.handover.before is not None
    kept = [each["revision"] for each in await history(gateway)]
    assert (kept[0], kept[-1], len(kept)) == (last, first, KEPT)


async def test_a_rollback_goes_to_the_revision_that_it_names(gateway: Gateway) -> None:
    await gateway.deployed(envVars={"n": "1"})
    first = gateway.found().record.revision
    await updated(gateway, n="2")
    third = await updated(gateway, n="3")

    await rolled_back(gateway, revision=first)
    assert gateway.found().record.spec.env_vars == {"n": "1"}

    assert (await rolled_back(gateway, revision=gateway.found().record.revision)).status_code == 200, "it starts anew"
    assert gateway.found().record.revision not in (first, third)


async def test_a_rollback_that_cannot_be_done_says_why(gateway: Gateway) -> None:
    await gateway.deployed(envVars={"n": "1"})
    first = gateway.found().record.revision
    alone = await rolled_back(gateway)
    unknown = await rolled_back(gateway, revision="r0")
    other = gateway.artifacts.add(b"other")
    gateway.workers.bundle(other)
    await gateway.client.put(FUNCTIONS, json=gateway.body(annotations={"gpufaas.bundle": other}))
    del gateway.artifacts.content[gateway.bundle]

    gone = await rolled_back(gateway)

    assert (alone.status_code, unknown.status_code, gone.status_code) == (409, 404, 409)
    assert alone.text == "function echo has no revision before the one that serves: deploy an earlier one\n"
    assert unknown.text == f"function echo has no revision 'r0' among its last {KEPT}: there are {first}\n"
    assert f"the files of revision {first} of function echo were removed" in gone.text
    assert gateway.found().record.revision in gone.text, "which are there"
    assert [each.get("gone", False) for each in await history(gateway)] == [False, True]
    assert (await gateway.client.get("/system/function/nobody/revisions")).status_code == 404
    assert (await gateway.client.post("/system/function/nobody/rollback")).status_code == 404


async def test_an_update_that_changes_nothing_makes_no_revision(gateway: Gateway) -> None:
    before = await gateway.deployed(envVars={"n": "1"})

    answer = await gateway.client.put(FUNCTIONS, json=gateway.body(envVars={"n": "1"}))

    assert (answer.status_code, answer.text) == (202, "")
    assert answer.headers["X-Gpufaas-Revision"] == before.partition("@")[2]
    assert gateway.found().function_id == before
    assert gateway.scheduler.removed == []
    assert len(await history(gateway)) == 1


@pytest.mark.parametrize("case", ["secrets", "image", "failing", "unavailable"])
async def test_an_update_to_the_same_makes_a_revision_where_that_may_differ(gateway: Gateway, case: str) -> None:
    gateway.secrets.create("openfaas-fn", "key", b"1")
    gateway.workers.containers = True
    body = gateway.body(
        **({"secrets": ["key"]} if case == "secrets" else {}), **({"annotations": {}} if case == "image" else {})
    )
    (await gateway.client.post(FUNCTIONS, json=body)).raise_for_status()
    before = gateway.found().function_id
    if case == "failing":
        gateway.scheduler.now.failing[before] = Failing("no such file", 1, 0.0, 0.0)
    if case == "unavailable":
        gateway.workers.define_failure = GpufaasError("damaged")
        await gateway.deployer.load()
        gateway.workers.define_failure = None

    answer = await gateway.client.put(FUNCTIONS, json=body)

    assert answer.status_code == 200, answer.text
    assert gateway.found().function_id != before


async def test_a_function_of_a_release_without_histories_can_be_rolled_back_to(gateway: Gateway) -> None:
    await gateway.deployed(envVars={"n": "1"})
    first = gateway.found().record.revision
    gateway.store.histories.clear()
    assert [each["revision"] for each in await history(gateway)] == [first]

    await updated(gateway, n="2")

    assert (await rolled_back(gateway)).json()["to"] == first
