"""Quotas of namespaces: set, shown, stored, and enforced for deployments and calls."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from tests.unit.gateway.conftest import Gateway, calling, is_platform_error
from tests.unit.gateway.test_contract_checklist import Functions
from tests.waiting import LIMIT_S, eventually

from gpufaas_core.messages import Grant
from gpufaas_core.model import CallId, FunctionId, Seconds
from gpufaas_core.units import GiB, MiB
from gpufaas_gateway.calls import Calls
from gpufaas_gateway.errors import QuotaExceeded
from gpufaas_gateway.quotas import Gate
from gpufaas_gateway.revision import MODEL_BASE
from gpufaas_gateway.spec import DEFAULT_NAMESPACE, FunctionSpec, Namespace, Quota

QUOTA = "/system/namespace/dev/quota"


@pytest.fixture
async def dev(gateway: Gateway) -> Gateway:
    await gateway.deployer.namespaces.create(Namespace("dev"))
    return gateway


# --- set and shown ---


async def test_a_quota_is_set_shown_replaced_and_cleared(dev: Gateway) -> None:
    before = await dev.client.get(QUOTA)
    answers = [await dev.client.put(QUOTA, json={"maxFunctions": 3, "maxMemory": "8Gi"})]
    whole = await dev.client.get(QUOTA)
    answers.append(await dev.client.put(QUOTA, json={"maxInFlight": 4, "maxWaiting": 0, "maxFunctions": None}))
    replaced = await dev.client.get(QUOTA)
    answers.append(await dev.client.put(QUOTA, json=replaced.json()))
    again = await dev.client.get(QUOTA)
    answers.append(await dev.client.delete(QUOTA))
    after = await dev.client.get(QUOTA)

    assert [(each.status_code, each.content) for each in answers] == [(202, b"")] * 4
    nothing = {"functions": 0, "memory": 0}
    assert before.json() == after.json() == {"namespace": "dev", "used": nothing}
    assert whole.json() == {"namespace": "dev", "maxFunctions": 3, "maxMemory": 8 * GiB, "used": nothing}
    assert again.json() == replaced.json() == {
        "namespace": "dev", "maxInFlight": 4, "maxWaiting": 0, "used": {**nothing, "inFlight": 0, "waiting": 0},
    }  # fmt: skip
    assert dev.store.quotas() == {}


async def test_the_default_namespace_can_have_one(gateway: Gateway) -> None:
    answer = await gateway.client.put(f"/system/namespace/{DEFAULT_NAMESPACE}/quota", json={"maxFunctions": 0})

    assert answer.status_code == 202
    assert gateway.store.quotas() == {DEFAULT_NAMESPACE: Quota(max_functions=0)}


async def test_quotas_hold_after_a_restart_and_go_with_their_namespace(dev: Gateway, tmp_path: Path) -> None:
    await dev.client.put(QUOTA, json={"maxFunctions": 1})
    restarted = Gateway(tmp_path / "again")
    restarted.store.known_namespaces, restarted.store.known_quotas = dev.store.known_namespaces, dev.store.known_quotas
    await restarted.deployer.load()

    kept = (await restarted.client.get(QUOTA)).json()
    await restarted.client.delete("/system/namespace/dev")
    left = restarted.store.quotas()
    await restarted.client.post("/system/namespace/", json={"name": "dev"})
    anew = (await restarted.client.get(QUOTA)).json()
    await restarted.client.aclose()

    assert (kept["maxFunctions"], left, "maxFunctions" in anew) == (1, {}, False)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"maxFunctions": -1}, "maxFunctions: input should be greater than or equal to 0"),
        ({"maxFunctions": "3"}, "maxFunctions: input should be a valid integer"),
        ({"maxInFlight": 1.5}, "maxInFlight: input should be a valid integer"),
        ({"maxWaiting": True}, "maxWaiting: input should be a valid integer"),
        ({"maxMemory": "8 gigs"}, "maxMemory: '8 gigs'"),
        ({"maxMemory": "9" * 400}, "is not a memory size: write for example 512Mi"),
        ({"maxMemory": "999999999999999999Ti"}, "maxMemory: input should be less than or equal to"),
        ({"maxMemory": -5}, "maxMemory: input should be greater"),
        ({"maxFunction": 3}, "maxFunction is not a field that is known here; known are namespace, maxFunctions,"),
        ({"namespace": "other"}, "the body says 'other', the path 'dev'"),
        ([], "the body: input should be an object"),
    ],
)
async def test_what_is_no_quota_is_said_with_its_field(dev: Gateway, body: object, message: str) -> None:
    answer = await dev.client.put(QUOTA, json=body)

    assert (answer.status_code, message in answer.text) == (400, True), answer.text
    assert is_platform_error(answer)
    assert dev.store.quotas() == {}


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
async def test_a_namespace_that_is_not_there_has_none(gateway: Gateway, method: str) -> None:
    answer = await gateway.client.request(method, "/system/namespace/none/quota", json={"maxFunctions": 1})

    assert (answer.status_code, "namespace none not found" in answer.text) == (404, True)
    assert (await gateway.stranger.request(method, "/system/namespace/none/quota")).status_code == 401


async def test_a_full_disk_leaves_the_quota_that_is_kept(dev: Gateway) -> None:
    await dev.client.put(QUOTA, json={"maxInFlight": 2})
    dev.store.failure = "the disk is full"

    answers = [await dev.client.put(QUOTA, json={"maxInFlight": 9}), await dev.client.delete(QUOTA)]

    assert [each.status_code for each in answers] == [507, 507]
    assert (await dev.client.get(QUOTA)).json()["maxInFlight"] == 2


# --- deploying ---


async def test_a_function_too_many_is_refused_and_one_that_goes_makes_room(dev: Gateway) -> None:
    await dev.client.put(QUOTA, json={"maxFunctions": 2})
    await dev.deployed("a", namespace="dev")
    await dev.deployed("b", namespace="dev")
    await dev.deployed("elsewhere")

    refused = await dev.client.post("/system/functions", json=dev.body("c", namespace="dev"))
    updated = await dev.client.put("/system/functions", json=dev.body("b", namespace="dev", labels={"n": "2"}))
    await dev.delete({"functionName": "a", "namespace": "dev"})
    taken = await dev.client.post("/system/functions", json=dev.body("c", namespace="dev"))

    assert (refused.status_code, updated.status_code, taken.status_code) == (403, 200, 202)
    assert refused.headers["x-gpufaas-error"] == "quota-exceeded"
    assert "namespace dev is at its quota of functions (2 of 2), and c.dev would be one more" in refused.text
    assert "'gpufaas namespace quota dev --functions N'" in refused.text


async def test_memory_is_what_functions_reserve_as_often_as_copies_are_kept(dev: Gateway) -> None:
    await dev.client.put(QUOTA, json={"maxMemory": 1000 * MiB})
    await dev.deployed("derived", namespace="dev")
    pinned = {
        "annotations": {"gpufaas.bundle": dev.bundle, "gpufaas.memory": "300Mi"},
        "labels": {"com.openfaas.scale.min": "2"},
    }
    await dev.deployed("pinned", namespace="dev", **pinned)
    used = (await dev.client.get(QUOTA)).json()["used"]

    refused = await dev.client.post("/system/functions", json=dev.body("more", namespace="dev", **pinned))

    assert used == {"functions": 2, "memory": MODEL_BASE + 600 * MiB}
    assert refused.status_code == 403
    assert "more.dev reserves 600 MiB, and the other functions of namespace dev have 792 MiB of the 1000 MiB" in (
        refused.text
    )
    assert dev.catalogue.find("more.dev") is None
    assert len(dev.workers.forgotten) == 1, "the node drops what it had installed"


async def test_below_a_lowered_quota_everything_stays_and_may_shrink_but_not_grow(dev: Gateway) -> None:
    def of(memory: str) -> dict[str, object]:
        annotations = {"gpufaas.bundle": dev.bundle, "gpufaas.memory": memory}
        return dev.body("a", namespace="dev", annotations=annotations)

    await dev.client.post("/system/functions", json=of("400Mi"))
    await dev.client.put(QUOTA, json={"maxMemory": "100Mi", "maxFunctions": 0})

    grown, same, smaller = [
        await dev.client.put("/system/functions", json=of(each)) for each in ("401Mi", "400Mi", "200Mi")
    ]

    assert (grown.status_code, same.status_code, smaller.status_code) == (403, 202, 200)
    assert (await dev.client.get(QUOTA)).json()["used"] == {"functions": 1, "memory": 200 * MiB}


async def test_deployments_at_one_time_do_not_share_the_last_place(dev: Gateway) -> None:
    await dev.client.put(QUOTA, json={"maxFunctions": 1})

    answers = await asyncio.gather(
        *(dev.client.post("/system/functions", json=dev.body(name, namespace="dev")) for name in "abc")
    )

    assert sorted(each.status_code for each in answers) == [202, 403, 403]
    assert len(dev.catalogue.all("dev")) == 1


async def test_a_deployment_that_fails_gives_its_place_back(dev: Gateway) -> None:
    await dev.deployer.quotas.put("dev", Quota(max_functions=1))
    failed = FunctionSpec("a", "echo:1", "dev", annotations={"gpufaas.bundle": "0" * 64})

    for _ in range(2):
        answer = await dev.client.post("/system/functions", json={"service": "a", "image": "x", "namespace": "dev"})
        assert answer.status_code == 400
        with pytest.raises(Exception, match="no bundle"):
            await dev.deployer.deploy(failed, update=False)

    await dev.deployed("b", namespace="dev")
    with pytest.raises(QuotaExceeded):
        await dev.deployer.deploy(failed, update=False)


# --- calls ---


class Waiting(Functions):
    """A device that the test gives out: every call waits until `grant`."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[tuple[CallId, FunctionId, asyncio.Future[Grant]]] = []
        self.free = False
        self.cancelled: list[CallId] = []

    def place(
        self, call: CallId, function: FunctionId, timeout_s: Seconds, size: float = 0.0, *_: object, **__: object
    ) -> "Grant | asyncio.Future[Grant]":  # type: ignore[override]
        if self.free:
            return super().place(call, function, timeout_s, size)
        future: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        self.places.append((call, function, future))
        return future

    def cancel(self, call: CallId) -> None:
        self.cancelled.append(call)

    def grant(self) -> None:
        call, function, future = self.places.pop(0)
        future.set_result(super().place(call, function, 1.0))


class Callers:
    """Calls of echo.dev that begin and end as the test says."""

    def __init__(self, gateway: Gateway, functions: Waiting, client: httpx.AsyncClient) -> None:
        self.gateway = gateway
        self.functions = functions
        self.client = client

    async def call(self, path: str = "/function/echo.dev") -> httpx.Response:
        return await self.client.post(path, content=b"x")

    async def begin(self, count: int = 1) -> list["asyncio.Task[httpx.Response]"]:
        """Return once so many calls wait for their grant."""
        waiting = len(self.functions.places) + count
        begun = [asyncio.create_task(self.call()) for _ in range(count)]
        await eventually(lambda: len(self.functions.places) == waiting)
        return begun

    async def used(self) -> tuple[int, int]:
        used = (await self.gateway.client.get(QUOTA)).json()["used"]
        return used["inFlight"], used["waiting"]


@pytest.fixture
async def callers(dev: Gateway, tmp_path: Path) -> AsyncIterator[Callers]:
    await dev.deployed(namespace="dev")
    functions = Waiting()
    async with calling(Calls(dev.catalogue, functions, functions, tmp_path).run) as client:  # type: ignore[arg-type]
        yield Callers(dev, functions, client)


async def test_a_call_beyond_those_in_flight_is_told_to_come_again(callers: Callers) -> None:
    await callers.gateway.client.put(QUOTA, json={"maxInFlight": 2})
    begun = await callers.begin(2)

    refused = await callers.call()
    counted = await callers.used()
    callers.functions.grant()
    await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
    (next_one,) = await callers.begin()
    callers.functions.grant()
    callers.functions.grant()
    answers = await asyncio.gather(*begun, next_one)

    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert is_platform_error(refused) or refused.headers["x-openfaas-internal"] == "gateway"
    assert "namespace dev is at its quota of calls in flight (2 of 2, at this gateway)" in refused.text
    assert counted == (2, 2)
    assert [each.status_code for each in answers] == [200] * 3
    assert await callers.used() == (0, 0)


async def test_a_call_beyond_those_that_wait_is_refused_unless_a_device_is_free(callers: Callers) -> None:
    await callers.gateway.client.put(QUOTA, json={"maxWaiting": 1})
    (waits,) = await callers.begin()

    refused = await callers.call()
    callers.functions.free = True
    served = await callers.call()
    counted = await callers.used()
    callers.functions.grant()

    assert (refused.status_code, served.status_code, (await waits).status_code) == (429, 200, 200)
    assert "namespace dev is at its quota of calls waiting for a device (1 of 1, at this gateway)" in refused.text
    assert counted == (1, 1)
    assert await callers.used() == (0, 0)
    given_up = callers.functions.places.pop()
    assert given_up[0] in callers.functions.cancelled, "its place in the scheduler's queue is given back"
    assert given_up[2].cancelled()


async def test_other_namespaces_are_not_held_back(callers: Callers) -> None:
    await callers.gateway.deployed("other")
    await callers.gateway.client.put(QUOTA, json={"maxInFlight": 0})
    callers.functions.free = True

    assert (await callers.call()).status_code == 429
    assert (await callers.call("/function/other")).status_code == 200


async def test_a_quota_holds_for_revisions_and_functions_that_come_later(callers: Callers) -> None:
    await callers.gateway.client.put(QUOTA, json={"maxInFlight": 0})
    await callers.gateway.client.put("/system/functions", json=callers.gateway.body(namespace="dev"))
    await callers.gateway.deployed("later", namespace="dev")

    assert (await callers.call()).status_code == 429
    assert (await callers.call("/function/later.dev")).status_code == 429


async def test_calls_over_a_change_of_the_quota_are_counted_right(callers: Callers) -> None:
    """Who came when there was no limit is not counted when he leaves either."""
    (early,) = await callers.begin()
    await callers.gateway.client.put(QUOTA, json={"maxInFlight": 5})
    (counted,) = await callers.begin()
    before = await callers.used()
    await callers.gateway.client.put(QUOTA, json={"maxInFlight": 1})
    refused = await callers.call()
    for _ in range(2):
        callers.functions.grant()
    await asyncio.gather(early, counted)
    after = await callers.used()
    (last,) = await callers.begin()
    await callers.gateway.client.delete(QUOTA)
    callers.functions.grant()

    assert (before, refused.status_code, after) == ((1, 1), 429, (0, 0))
    assert (await last).status_code == 200
    assert callers.gateway.deployer.quotas.gate("dev") is None


async def test_a_caller_who_goes_away_leaves_room(callers: Callers) -> None:
    await callers.gateway.client.put(QUOTA, json={"maxInFlight": 1, "maxWaiting": 1})
    (gone,) = await callers.begin()
    gone.cancel()
    await asyncio.wait([gone])

    async with asyncio.timeout(LIMIT_S):
        while await callers.used() != (0, 0):
            await asyncio.sleep(0.01)
    callers.functions.free = True
    assert (await callers.call()).status_code == 200


def test_a_grant_that_is_refused_does_not_make_its_call_one_too_many() -> None:
    gate = Gate("dev")
    gate.max_waiting = 0
    passage = gate.enter()
    passage.granted()

    passage.wait()
    passage.wait()

    assert (gate.in_flight, gate.waiting) == (1, 1)
    passage.leave()
    assert (gate.in_flight, gate.waiting) == (0, 0)
