"""The management routes, as real clients of OpenFaaS see them."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.gateway.conftest import DEVICE, Gateway, is_platform_error, raw, scope_of
from tests.unit.gateway.fakes import idle
from tests.waiting import LIMIT_S

from gpufaas_core.errors import InvalidSpec, StorageFailed
from gpufaas_core.explanation import Considered, Explanation
from gpufaas_core.logs import Printed
from gpufaas_core.model import CallId, EngineStatus, FunctionId, Profile, ResidentStatus
from gpufaas_core.units import GiB, MiB

# --- deploy, list, describe, remove ---


async def test_what_was_deployed_comes_back_identical(gateway: Gateway) -> None:
    gateway.workers.joined = [replace(DEVICE, labels={"gpu": "true"})]
    sent = gateway.body(
        envProcess="python index.py",
        envVars={"greeting": "from-file"},
        constraints=["gpu=true"],
        secrets=[],
        labels={"com.openfaas.scale.min": "1", "team": "a"},
        limits={"memory": "256Mi", "cpu": "200m", "nvidia.com/gpu": "1"},
        requests={"memory": "128Mi"},
        readOnlyRootFilesystem=True,
    )
    await gateway.client.post("/system/functions", json=sent)

    (listed,) = (await gateway.client.get("/system/functions")).json()
    described = (await gateway.client.get("/system/function/echo")).json()

    same = ("image", "envProcess", "envVars", "constraints", "secrets", "limits", "requests", "readOnlyRootFilesystem")
    assert {field: listed[field] for field in same} == {field: sent[field] for field in same}
    assert listed["annotations"] == sent["annotations"]
    assert listed["labels"] == {"com.openfaas.scale.min": "1", "team": "a", "faas_function": "echo"}
    assert (listed["name"], listed["namespace"]) == ("echo", "openfaas-fn")
    assert (listed["invocationCount"], "invocationCount" in described) == (0, False)
    assert described == {key: value for key, value in listed.items() if key != "invocationCount"}


async def test_numbers_and_times_are_what_go_can_parse(gateway: Gateway) -> None:
    await gateway.deployed()

    answer = await gateway.client.get("/system/function/echo")

    assert '"replicas":1,"availableReplicas":1,' in answer.text
    assert answer.json()["createdAt"] == "2026-11-20T23:00:53.500000Z"


async def test_invocations_are_counted_in_the_list(gateway: Gateway) -> None:
    await gateway.deployed()
    found = gateway.found()
    found.stats.begun += 1
    found.stats.observe(200, 0.1, hit=False)

    (listed,) = (await gateway.client.get("/system/functions")).json()

    assert listed["invocationCount"] == 1
    assert (listed["gpufaas"]["hits"], listed["gpufaas"]["misses"]) == (0, 1)


async def test_we_say_where_a_function_is_and_what_it_costs(gateway: Gateway) -> None:
    function = await gateway.deployed()
    resident = ResidentStatus(function, 300 * MiB, 0, False, False, 1.0)
    gateway.scheduler.now = EngineStatus("lalb", (replace(idle(DEVICE), used=300 * MiB, resident=(resident,)),), {}, {})
    found = gateway.found()
    found.profiles["cpu"] = Profile(1.0, 0.25, 300 * MiB, measured=True)
    gateway.usage = {function: (12.3456, 250 * MiB)}

    status = (await gateway.client.get("/system/function/echo", params={"usage": "1"})).json()

    ours = status["gpufaas"]
    assert (ours["devices"], ours["copies"]) == (["n1/cpu:0"], {"n1/cpu:0": 1})
    assert (ours["kind"], ours["bundle"], ours["memory"]) == ("model", gateway.bundle, 192 * MiB)
    assert ours["profiles"]["cpu"] == {
        "load_s": 1.0, "service_s": 0.25, "occupation": 300 * MiB, "measured": True, "estimated": [],
    }  # fmt: skip
    assert status["usage"] == {"cpu": 12.346, "totalMemoryBytes": 250 * MiB}


async def test_available_replicas_are_the_copies_that_take_calls(gateway: Gateway) -> None:
    """Several may be on one device; one that loads or drains is not ready for a call."""
    function = await gateway.deployed()
    copies = tuple(
        ResidentStatus(function, 10, 0, loading, False, 1.0, draining, copy)
        for copy, (loading, draining) in enumerate([(False, False)] * 3 + [(True, False), (False, True)])
    )
    gateway.scheduler.now = EngineStatus("lalb", (replace(idle(DEVICE), resident=copies),), {}, {}, {function: 4})

    described = (await gateway.client.get("/system/function/echo")).json()
    (listed,) = (await gateway.client.get("/system/functions")).json()

    assert [(each["replicas"], each["availableReplicas"]) for each in (described, listed)] == [(4, 3)] * 2
    assert (described["gpufaas"]["devices"], described["gpufaas"]["copies"]) == (["n1/cpu:0"], {"n1/cpu:0": 5})


@pytest.mark.parametrize(
    ("url", "status"),
    [
        ("/system/function/echo", 200),
        ("/system/function/echo.openfaas-fn", 200),
        ("/system/function/echo?namespace=openfaas-fn", 200),
        ("/system/function/echo.openfaas-fn?namespace=openfaas-fn", 200),
        ("/system/function/echo?namespace=dev", 404),
        ("/system/function/echo.dev", 404),
        ("/system/function/nothing", 404),
        ("/system/function/..%2f..%2fetc", 400),
    ],
)
async def test_functions_are_described_by_name_and_namespace(gateway: Gateway, url: str, status: int) -> None:
    await gateway.deployed()

    assert (await gateway.client.get(url)).status_code == status


async def test_the_list_is_of_one_namespace(gateway: Gateway) -> None:
    await gateway.deployed()

    assert len((await gateway.client.get("/system/functions?namespace=openfaas-fn")).json()) == 1
    assert len((await gateway.client.get("/system/functions?namespace=")).json()) == 1
    assert (await gateway.client.get("/system/functions?namespace=dev")).json() == []


@pytest.mark.parametrize("body", [{"functionName": "echo"}, {"functionName": "echo", "namespace": "openfaas-fn"}])
async def test_delete_carries_a_body(gateway: Gateway, body: dict[str, str]) -> None:
    await gateway.deployed()
    gateway.logs.extend("echo.openfaas-fn", "w1", [Printed("hello")])

    removed, again = await gateway.delete(body), await gateway.delete(body)

    assert (removed.status_code, again.status_code) == (202, 404)
    assert (await gateway.client.get("/system/functions")).json() == []
    assert not gateway.logs.known("echo", "openfaas-fn")


async def test_an_unavailable_function_is_listed_with_its_reason(tmp_path: Path, gateway: Gateway) -> None:
    await gateway.deployed()
    restarted = Gateway(tmp_path / "again")
    restarted.store.records = gateway.store.records
    restarted.workers.manifests.clear()
    await restarted.deployer.load()

    (listed,) = (await restarted.client.get("/system/functions")).json()

    assert (listed["replicas"], listed["availableReplicas"]) == (1, 0)
    assert gateway.bundle in listed["gpufaas"]["unavailable"]
    await restarted.client.aclose()


# --- bad input ---


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the body is not JSON: EOF"),
        (b"", "the body is missing"),
        (b"\xff\xfe", "the body is not JSON"),
        (b"[" * 5000, "the body is not JSON: recursion limit"),
        (b"[]", "the body: input should be an object"),
        (b"null", "the body: input should be an object"),
        (b"{}", "service is missing; image is missing"),
        (b'{"service":"","image":"x"}', "service is missing"),
        (b'{"service":null,"image":"x"}', "service: input should be a valid string"),
        (b'{"service":7,"image":"x"}', "service: input should be a valid string"),
        (b'{"service":"echo","image":"x","labels":{"a":1}}', "labels.a: input should be a valid string"),
        (b'{"service":"echo","image":"x","envVars":["a"]}', "envVars: input should be an object"),
        (b'{"service":"echo","image":"x","constraints":"a"}', "constraints: input should be a valid array"),
        (b'{"service":"echo","image":"x","limits":{"memory":5}}', "limits.memory: input should be a valid string"),
        (b'{"service":"echo","image":"x","readOnlyRootFilesystem":"yes"}', "readOnlyRootFilesystem: input should be"),
        (b'{"service":"Bad_Name","image":"x"}', "'Bad_Name' is not a function name"),
        (b'{"service":"echo","image":"x"}', "has only an image (x)"),
    ],
)
async def test_a_malformed_deployment_is_400_and_says_where(gateway: Gateway, body: bytes, message: str) -> None:
    answer = await gateway.client.post("/system/functions", content=body)

    assert answer.status_code == 400
    assert message in answer.text
    assert is_platform_error(answer)
    assert gateway.catalogue.everywhere() == []


@pytest.mark.parametrize(
    ("given", "queue"), [({}, "faas-request"), ({"com.openfaas.queue": " "}, "faas-request"),
                         ({"com.openfaas.queue": "reports.v1"}, "reports.v1")],
)  # fmt: skip
async def test_a_function_names_its_queue(gateway: Gateway, given: dict[str, str], queue: str) -> None:
    await gateway.deployed(annotations={"gpufaas.bundle": gateway.bundle, **given})

    found = gateway.found()
    assert found.options.async_queue == queue


@pytest.mark.parametrize("name", ["two words", "-a", "a/b", "a" * 64])
async def test_a_queue_that_cannot_be_is_400(gateway: Gateway, name: str) -> None:
    annotations = {"gpufaas.bundle": gateway.bundle, "com.openfaas.queue": name}

    answer = await gateway.client.post("/system/functions", json=gateway.body(annotations=annotations))

    assert answer.status_code == 400
    assert "annotation com.openfaas.queue: " in answer.text


async def test_many_errors_are_not_all_shown(gateway: Gateway) -> None:
    labels = {f"l{number}": number for number in range(100)}

    answer = await gateway.client.post("/system/functions", json=gateway.body(labels=labels))

    assert answer.text.endswith("; and 95 more\n")


@pytest.mark.parametrize("body", [b"{", b"{}", b'{"functionName":""}', b'{"functionName":1}'])
async def test_a_malformed_removal_is_400(gateway: Gateway, body: bytes) -> None:
    answer = await gateway.client.request("DELETE", "/system/functions", content=body)

    assert answer.status_code == 400
    assert is_platform_error(answer)


async def test_a_body_that_is_no_deployment_by_its_size_is_413(gateway: Gateway) -> None:
    answer = await gateway.client.post("/system/functions", content=b" " * (5 * MiB))

    assert answer.status_code == 413
    assert "4 MiB" in answer.text


async def test_a_full_disk_is_507(gateway: Gateway) -> None:
    gateway.store.failure = "cannot write functions.db: database or disk is full: free space"

    answer = await gateway.client.post("/system/functions", json=gateway.body())

    assert answer.status_code == 507
    assert "free space" in answer.text


# --- health, info, status, metrics ---


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_healthy_is_only_who_has_loaded_the_catalogue(tmp_path: Path, method: str) -> None:
    gateway = Gateway(tmp_path)

    before = await gateway.client.request(method, "/healthz")
    await gateway.deployer.load()
    after = await gateway.client.request(method, "/healthz")

    assert (before.status_code, after.status_code) == (503, 200)
    assert before.headers["retry-after"] == "1"
    assert after.text == ("OK" if method == "GET" else "")
    await gateway.client.aclose()


async def test_nothing_is_unknown_before_the_catalogue_is_loaded(tmp_path: Path) -> None:
    """404 would make clients create what is about to come."""
    gateway = Gateway(tmp_path)

    answers = [
        await gateway.client.get("/system/functions"),
        await gateway.client.get("/system/function/echo"),
        await gateway.client.put("/system/functions", json=gateway.body()),
        await gateway.delete({"functionName": "echo"}),
    ]

    assert [answer.status_code for answer in answers] == [503] * 4
    await gateway.client.aclose()


async def test_status_shows_devices_residents_and_functions(gateway: Gateway) -> None:
    function = await gateway.deployed()
    resident = ResidentStatus(function, 300, 1, False, True, 1.0)
    device = replace(idle(DEVICE), used=300, busy=True, resident=(resident,), hits=4)
    gateway.scheduler.now = EngineStatus("lalb-o3", (device,), {function: 2}, {function: 1})

    status = (await gateway.client.get("/system/status")).json()

    assert (status["policy"], status["queued"], status["running"]) == ("lalb-o3", {function: 2}, {function: 1})
    (shown,) = status["devices"]
    assert shown["device"] == {
        "id": "n1/cpu:0", "kind": "cpu", "memory": 2 * GiB, "labels": {}, "compute": 100, "host_memory": 0,
        "parks": False, "ahead": False, "fetches": True, "fetches_from": True, "fetches_ranges": True,
        "loads_parts": False, "price_per_h": 0.0,
    }  # fmt: skip
    assert (shown["used"], shown["hits"]) == (300, 4)
    (there,) = shown["resident"]
    assert (there["name"], there["memory"]) == ("echo.openfaas-fn", 300)
    assert status["functions"]["echo.openfaas-fn"]["id"] == function


async def test_metrics_are_prometheus_text(gateway: Gateway) -> None:
    await gateway.deployed()

    answer = await gateway.client.get("/metrics")

    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'gateway_service_count{function_name="echo.openfaas-fn"} 1.0' in answer.text
    assert 'gpufaas_device_memory_bytes{device="n1/cpu:0"}' in answer.text


# --- artifacts ---


async def test_artifacts_are_uploaded_once(gateway: Gateway) -> None:
    data = bytes(range(256)) * 20_000
    url = f"/system/artifacts/{hashlib.sha256(data).hexdigest()}"

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 65_536):
            yield data[start : start + 65_536]

    assert (await gateway.client.head(url)).status_code == 404
    assert (await gateway.client.put(url, content=pieces())).status_code == 201
    assert (await gateway.client.head(url)).status_code == 200
    assert (await gateway.client.put(url, content=data)).status_code == 201
    assert gateway.artifacts.content[hashlib.sha256(data).hexdigest()] == data


async def test_an_artifact_that_is_not_what_it_says_is_400(gateway: Gateway) -> None:
    answer = await gateway.client.put(f"/system/artifacts/{'a' * 64}", content=b"other bytes")

    assert answer.status_code == 400
    assert "a" * 64 in answer.text
    assert not gateway.artifacts.has("a" * 64)


@pytest.mark.parametrize("digest", ["abc", "A" * 64, "..%2f..%2fetc", "g" * 64])
async def test_a_digest_that_is_none_is_400(gateway: Gateway, digest: str) -> None:
    answer = await gateway.client.put(f"/system/artifacts/{digest}", content=b"x")

    assert answer.status_code in (400, 404)  # an encoded slash is another path
    assert len(gateway.artifacts.content) == 1


async def test_an_artifact_on_a_full_disk_is_507(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __enter__(self) -> "Full":
            return self

        def write(self, _data: bytes, /) -> int:
            raise StorageFailed("cannot write artifacts: no space left: free space")

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(gateway.artifacts, "writer", lambda _digest: Full())

    answer = await gateway.client.put(f"/system/artifacts/{'a' * 64}", content=b"x")

    assert answer.status_code == 507


async def test_an_upload_that_breaks_off_leaves_nothing(gateway: Gateway) -> None:
    digest = hashlib.sha256(b"half").hexdigest()
    parts = ({"type": "http.request", "body": b"half", "more_body": True}, {"type": "http.disconnect"})

    answer = await raw(gateway.app, "PUT", f"/system/artifacts/{digest}", *parts)

    assert answer.status_code == 499
    assert not gateway.artifacts.has(digest)


# --- logs ---


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ("name=echo", 2),
        ("name=echo&tail=-1", 2),
        ("name=echo.openfaas-fn", 2),
        ("name=echo&namespace=openfaas-fn", 2),
        ("name=echo&tail=1", 1),
        ("name=echo&tail=7&tail=1", 1),  # the last one wins
        ("name=echo&instance=w2", 1),
        ("name=echo&callId=id-3", 1),
        ("name=echo&callId=id-4", 0),
        ("name=echo&since=2020-11-20T22%3A50%3A53Z", 2),
        ("name=echo&since=2020-11-20T22%3A50%3A53.123456789%2B02%3A00", 2),
        ("name=echo&since=2020-11-20T22:50:53+00:00", 2),  # a plus sign that is not encoded
        ("name=echo&since=0001-01-01T00%3A00%3A00Z", 2),
        ("name=echo&since=2999-11-20T22%3A50%3A53Z", 0),
    ],
)
async def test_logs_take_the_parameters_of_real_clients(gateway: Gateway, query: str, count: int) -> None:
    await gateway.deployed()
    gateway.logs.extend("echo.openfaas-fn", "w1", [Printed("one")])
    gateway.logs.extend("echo.openfaas-fn", "w2", [Printed("two", "stdout", "id-3")])

    answer = await gateway.client.get(f"/system/logs?{query}")

    assert (answer.status_code, len(answer.text.splitlines())) == (200, count)


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("", 400),
        ("name=", 400),
        ("name=nothing", 404),
        ("name=echo&namespace=dev", 404),
        ("name=..%2f..%2fetc%2fpasswd", 404),
        ("name=echo&tail=many", 422),
        ("name=echo&since=yesterday", 422),
        ("name=echo&since=2020-11-20T22%3A50%3A53", 422),
    ],
)
async def test_logs_refuse_what_they_cannot_answer(gateway: Gateway, query: str, status: int) -> None:
    await gateway.deployed()

    answer = await gateway.client.get(f"/system/logs?{query}")

    assert answer.status_code == status
    assert is_platform_error(answer)


async def test_a_function_that_was_never_called_has_no_lines(gateway: Gateway) -> None:
    await gateway.deployed()

    answer = await gateway.client.get("/system/logs?name=echo")

    assert (answer.status_code, answer.text) == (200, "")


async def test_what_a_failed_deployment_printed_can_be_read(gateway: Gateway) -> None:
    gateway.workers.check_failure = InvalidSpec("does not import")
    gateway.workers.during_check = lambda: gateway.logs.extend("echo.openfaas-fn", "check", [Printed("Traceback ...")])
    await gateway.client.post("/system/functions", json=gateway.body())

    answer = await gateway.client.get("/system/logs?name=echo")

    assert "Traceback" in answer.text


@pytest.mark.parametrize("follow", ["true", "1"])
async def test_following_goes_on_until_the_client_leaves(gateway: Gateway, follow: str) -> None:
    await gateway.deployed()
    gateway.logs.extend("echo.openfaas-fn", "w1", [Printed("before")])
    gone = asyncio.Event()
    texts: list[str] = []

    async def receive() -> MutableMapping[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        if message.get("body"):
            texts.append(json.loads(message["body"])["text"])
            if texts == ["before"]:
                gateway.logs.extend("echo.openfaas-fn", "w1", [Printed("after")])
            else:
                gone.set()

    async with asyncio.timeout(LIMIT_S):
        await gateway.app(scope_of("GET", f"/system/logs?name=echo&follow={follow}"), receive, send)

    assert texts == ["before", "after"]


async def test_explain_says_why_a_call_is_where_it_is(gateway: Gateway) -> None:
    call = CallId("a/b#1")
    options = (Considered("load", "n1/cpu:0", 2.5),)
    gateway.scheduler.explanations[CallId("1")] = Explanation(
        call, FunctionId("f@1"), "least-wait", "running", 12.0, 0.5, hit=False, rule="because", options=options
    )

    answer = await gateway.client.get("/system/explain/1")
    unknown = await gateway.client.get("/system/explain/2")

    assert answer.status_code == 200
    assert answer.json()["rule"] == "because"
    assert answer.json()["options"] == [{"option": "load", "where": "n1/cpu:0", "estimate_s": 2.5}]
    assert unknown.status_code == 404
    assert "X-Call-Id" in unknown.text
