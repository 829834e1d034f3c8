"""
The rules that real clients of OpenFaaS depend on, by number: one test or more for each.

Rule 22 (faas-cli waits 60 s, whatever we do) and the half of rule 23 about what the CLI drops concern clients; they are
here as what a server can do about them.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.unit.gateway.conftest import DEVICE, Gateway, calling, is_platform_error

from gpufaas_core.answer_spool import AnswerSpool
from gpufaas_core.errors import GpufaasError
from gpufaas_core.logs import Printed
from gpufaas_core.messages import Grant
from gpufaas_core.model import Asked, CallId, Device, DeviceId, EngineStatus, Failing, FunctionId, Part, Seconds
from gpufaas_core.units import GiB
from gpufaas_core.wire.bodies import STREAM
from gpufaas_core.wire.heads import AnswerHead, CallHead
from gpufaas_gateway.calls import Calls
from gpufaas_gateway.spec import Namespace

RFC_3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[-+]\d\d:\d\d)")


# --- functions that answer at once ---


class Exchange:
    load_s: Seconds = 0.0
    phases: tuple[tuple[str, Seconds], ...] = ()
    tier: str = "disk"
    end: Any = None
    loading_s = 0.0

    def __init__(self, grant: Grant, body: bytes, answer: AnswerHead, more: bool) -> None:
        self.grant = grant
        self.body = bytearray(body)
        self._answer = answer
        self._whole = asyncio.Event()
        if not more:
            self._whole.set()

    async def answer(self) -> tuple[AnswerHead, bytes, bool]:
        await self._whole.wait()
        return self._answer, bytes(self.body), True

    async def chunk(self) -> bytes | None:
        return None

    def when_runs(self, tell: Callable[[], None]) -> None:
        tell()

    async def send_body(self, piece: bytes) -> None:
        self.body += piece

    async def end_body(self) -> None:
        self._whole.set()

    @property
    def unread(self) -> int:
        return 0

    def keep_for(self, spool: AnswerSpool) -> None:
        pass

    def close(self) -> None:
        pass

    def fail(self, error: GpufaasError) -> None:
        if not self._whole.is_set():
            raise error


@dataclass
class Functions:
    """Scheduler and node of the invocation path: every call is a hit, and echoed."""

    answer: AnswerHead = field(default_factory=lambda: AnswerHead(200, [(b"content-type", b"text/plain")]))
    called: list[tuple[FunctionId, CallHead]] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    asked: list[Asked | None] = field(default_factory=list)

    def place(
        self, call: CallId, function: FunctionId, timeout_s: Seconds, size: float = 0.0,
        outer: object = None, endless: bool = False, asked: Asked | None = None,
    ) -> Grant:  # fmt: skip
        assert timeout_s > 0
        assert (outer, endless) == (None, False)
        self.sizes.append(size)
        self.asked.append(asked)
        return Grant(1, 1, (call,), function, "", (Part(DEVICE.id, 0),), cold=False)

    def on_grant(self, call: CallId, begin: object) -> None: ...

    def again(self, call: CallId) -> asyncio.Future[Grant]:
        raise NotImplementedError

    def cancel(self, call: CallId) -> None:
        del call

    def over(self, call: CallId) -> None:
        del call

    def call(self, grant: Grant, head: CallHead, body: bytes | memoryview) -> Exchange:
        self.called.append((grant.function, head))
        return Exchange(grant, bytes(body), self.answer, head.body_mode == STREAM)


@pytest.fixture
def functions() -> Functions:
    return Functions()


@pytest.fixture
async def callers(gateway: Gateway, functions: Functions, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with calling(Calls(gateway.catalogue, functions, functions, tmp_path).run) as client:
        yield client


# --- the rules ---


async def test_01_put_of_a_function_that_does_not_exist_is_404(gateway: Gateway) -> None:
    assert (await gateway.admin.put("/system/functions", json=gateway.body())).status_code == 404


async def test_02_deploy_and_update_answer_200_or_202(gateway: Gateway) -> None:
    """faas-cli tries PUT, wants 404 for a new function, then POST; 201 and 204 it takes for errors (§1 items 1-3)."""
    first = await gateway.admin.put("/system/functions", json=gateway.body())
    created = await gateway.admin.post("/system/functions", json=gateway.body())
    again = await gateway.admin.post("/system/functions", json=gateway.body())
    updated = await gateway.admin.put("/system/functions", json=gateway.body(labels={"n": "2"}))

    assert (first.status_code, created.status_code, again.status_code, updated.status_code) == (404, 202, 409, 200)
    assert created.content == b""
    assert is_platform_error(first)
    assert is_platform_error(again)


async def test_03_nothing_is_answered_204(gateway: Gateway) -> None:
    steps = [
        ("POST", "/system/namespace/", {"name": "dev"}),
        ("PUT", "/system/namespace/dev", {"name": "dev"}),
        ("DELETE", "/system/namespace/dev", {"name": "dev"}),
        ("POST", "/system/secrets", {"name": "key", "value": "a"}),
        ("PUT", "/system/secrets", {"name": "key", "value": "b"}),
        ("DELETE", "/system/secrets", {"name": "key"}),
        ("POST", "/system/functions", gateway.body()),
        ("PUT", "/system/functions", gateway.body(labels={"n": "2"})),
        ("POST", "/system/scale-function/echo", {"serviceName": "echo", "replicas": 1}),
        ("POST", "/system/alert", {"status": "firing", "alerts": []}),
        ("DELETE", "/system/functions", {"functionName": "echo"}),
    ]

    answers = [await gateway.admin.request(method, path, json=body) for method, path, body in steps]

    assert [each.status_code for each in answers] == [201, 202, 202, 201, 202, 202, 202, 200, 202, 200, 202]


async def test_04_secrets_answer_what_the_cli_takes(gateway: Gateway) -> None:
    """The dance of ``secret create --replace`` is POST, 409, PUT; 204 would be an error to it (§1 items 3 and 4)."""
    body = {"name": "api-key", "value": "a"}
    created = await gateway.admin.post("/system/secrets", json=body)
    again = await gateway.admin.post("/system/secrets", json=body)
    updated = await gateway.admin.put("/system/secrets", json={**body, "value": "new"})
    listed = await gateway.admin.get("/system/secrets")
    removed = await gateway.admin.request("DELETE", "/system/secrets", json={"name": "api-key"})
    gone = await gateway.admin.request("DELETE", "/system/secrets", json={"name": "api-key"})
    late = await gateway.admin.put("/system/secrets", json=body)

    assert [each.status_code for each in (created, again, updated, removed, gone, late)] == [
        201, 409, 202, 202, 404, 404,
    ]  # fmt: skip
    assert listed.json() == [{"name": "api-key", "namespace": "openfaas-fn"}]
    assert (await gateway.admin.get("/system/secrets")).text == "[]"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/system/functions", {"functionName": "echo"}),
        ("/system/secrets", {"name": "key"}),
        ("/system/namespace/dev", {"name": "dev", "labels": {"openfaas": "1"}}),
    ],
)
async def test_05_deletes_carry_a_json_body(gateway: Gateway, path: str, body: dict[str, object]) -> None:
    await gateway.deployed()
    gateway.secrets.create("openfaas-fn", "key", b"a")
    await gateway.deployer.namespaces.create(Namespace("dev"))

    answer = await gateway.admin.request("DELETE", path, json=body)
    again = await gateway.admin.request("DELETE", path, json=body)

    assert (answer.status_code, again.status_code) == (202, 404)


async def test_06_the_default_namespace_is_openfaas_fn(
    gateway: Gateway, callers: httpx.AsyncClient, functions: Functions
) -> None:
    function = await gateway.deployed()

    answers = [await callers.post(path) for path in ("/function/echo.openfaas-fn", "/function/echo")]

    assert [each.status_code for each in answers] == [200, 200]
    assert {called for called, _ in functions.called} == {function}


async def test_07_invocations_need_no_password_and_pass_one_on(
    gateway: Gateway, callers: httpx.AsyncClient, functions: Functions
) -> None:
    await gateway.deployed()

    await callers.post("/function/echo")
    await callers.post("/function/echo", headers={"Authorization": "Bearer of-the-function"})

    sent = [dict(head.headers).get(b"authorization") for _, head in functions.called]
    assert sent == [None, b"Bearer of-the-function"]


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
async def test_08_an_empty_bearer_token_is_401(gateway: Gateway, method: str) -> None:
    answer = await gateway.stranger.request(method, "/system/functions", headers={"Authorization": "Bearer "})

    assert answer.status_code == 401


async def test_09_401_names_the_realm_that_clients_know(gateway: Gateway) -> None:
    answer = await gateway.stranger.get("/system/functions")

    assert (answer.status_code, answer.content) == (401, b"invalid credentials")
    assert answer.headers["www-authenticate"] == 'Basic realm="Restricted"'
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.headers["content-length"] == "19"


async def test_10_info_has_no_null_and_nothing_empty(gateway: Gateway) -> None:
    info = (await gateway.admin.get("/system/info")).json()

    assert isinstance(info["provider"], dict)
    assert info["provider"]["provider"] not in ("", "faasd")
    for release in (info["provider"]["version"], info["version"]):
        assert release["sha"]
        assert release["release"] == "0.1.0"
        assert isinstance(release["commit_message"], str)
    assert info["provider"]["orchestration"]
    assert info["arch"]


@pytest.mark.parametrize("replicas", [0, 1, 3])
async def test_11_integers_are_json_integers(gateway: Gateway, replicas: int) -> None:
    await gateway.deployed()
    await gateway.admin.post("/system/scale-function/echo", json={"serviceName": "echo", "replicas": replicas})

    text = (await gateway.admin.get("/system/functions")).text

    assert re.findall(r'"(?:r|availableR)eplicas":([^,}]*)', text) == [str(replicas), "1"]
    assert re.findall(r'"invocationCount":([^,}]*)', text) == ["0"]


async def test_12_times_have_a_zone(gateway: Gateway) -> None:
    await gateway.deployed()
    gateway.logs.extend("echo.openfaas-fn", "w1", [Printed("hello")])

    (listed,) = (await gateway.admin.get("/system/functions")).json()
    line = json.loads((await gateway.admin.get("/system/logs?name=echo")).text)

    for text in (listed["createdAt"], line["timestamp"]):
        assert RFC_3339.fullmatch(text)
        assert datetime.fromisoformat(text).tzinfo is not None


async def test_13_values_of_maps_are_strings(gateway: Gateway) -> None:
    refused = [
        await gateway.admin.post("/system/functions", json=gateway.body(**{name: {"a": 1}}))
        for name in ("labels", "envVars", "annotations")
    ]
    taken = await gateway.admin.post("/system/functions", json=gateway.body(labels=None, envVars=None, new={"a": 1}))
    (listed,) = (await gateway.admin.get("/system/functions")).json()

    assert [each.status_code for each in refused] == [400, 400, 400]
    assert taken.status_code == 202
    assert "new" not in listed, "what is not known is ignored"
    for name in ("labels", "annotations"):
        assert all(isinstance(value, str) for value in listed[name].values())


async def test_14_an_empty_list_is_an_array(gateway: Gateway) -> None:
    for path in ("/system/functions", "/system/functions?namespace=none", "/system/secrets"):
        answer = await gateway.admin.get(path)
        assert (answer.status_code, answer.text) == (200, "[]")
        assert answer.headers["content-type"] == "application/json"


async def test_15_logs_are_lines_of_json(gateway: Gateway) -> None:
    await gateway.deployed()
    for text in ("one", "two", "three"):
        gateway.logs.extend("echo.openfaas-fn", "w1", [Printed(text)])

    answer = await gateway.admin.get("/system/logs?follow=0&name=echo&tail=2&since=2020-01-01T00%3A00%3A00.5%2B00%3A00")

    assert (answer.status_code, answer.headers["content-type"].partition(";")[0]) == (200, "application/x-ndjson")
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert [line["text"].rstrip("\n") for line in lines] == ["two", "three"]
    assert lines[0].keys() == {"name", "namespace", "instance", "timestamp", "text"}
    assert {(line["name"], line["namespace"], line["instance"]) for line in lines} == {("echo", "openfaas-fn", "w1")}


async def test_16_namespaces_are_strings(gateway: Gateway) -> None:
    await gateway.deployer.namespaces.create(Namespace("dev"))

    assert (await gateway.admin.get("/system/namespaces")).json() == ["dev", "openfaas-fn"]


async def test_17_healthz_is_public_and_200(gateway: Gateway) -> None:
    answer = await gateway.stranger.get("/healthz")
    head = await gateway.stranger.head("/healthz")

    assert (answer.status_code, answer.text, head.status_code) == (200, "OK", 200)


async def test_18_bodies_come_whole_or_in_chunks(gateway: Gateway, callers: httpx.AsyncClient) -> None:
    gateway.workers.bundle(gateway.bundle, kind="http")
    deployment = json.dumps(gateway.body()).encode()

    async def chunks(body: bytes) -> AsyncIterator[bytes]:
        for start in range(0, len(body), 5):
            yield body[start : start + 5]

    created = await gateway.admin.post("/system/functions", content=chunks(deployment))
    chunked = await callers.post("/function/echo", content=chunks(b"hello in pieces"))
    whole = await callers.post("/function/echo", content=b"hello")

    assert created.status_code == 202
    assert (chunked.content, whole.content) == (b"hello in pieces", b"hello")


async def test_19_redirects_are_passed_through(
    gateway: Gateway, callers: httpx.AsyncClient, functions: Functions
) -> None:
    await gateway.deployed()
    functions.answer = AnswerHead(302, [(b"location", b"http://elsewhere/")])

    answer = await callers.get("/function/echo")

    assert (answer.status_code, answer.headers["location"]) == (302, "http://elsewhere/")


def everywhere(body: dict[str, object]) -> Iterator[tuple[str, dict[str, object]]]:
    yield "?namespace=dev", body
    yield "", {**body, "namespace": "dev"}


@pytest.mark.parametrize("where", [0, 1], ids=["query", "body"])
async def test_20_the_namespace_is_in_query_or_body(gateway: Gateway, where: int) -> None:
    await gateway.deployer.namespaces.create(Namespace("dev"))
    steps = [
        ("POST", "/system/functions", gateway.body(), 202),
        ("PUT", "/system/functions", gateway.body(labels={"n": "2"}), 200),
        ("POST", "/system/scale-function/echo", {"serviceName": "echo", "replicas": 2}, 202),
        ("DELETE", "/system/functions", {"functionName": "echo"}, 202),
        ("POST", "/system/secrets", {"name": "key", "value": "a"}, 201),
        ("PUT", "/system/secrets", {"name": "key", "value": "a"}, 202),
        ("DELETE", "/system/secrets", {"name": "key"}, 202),
    ]

    for method, path, asked, status in steps:
        query, body = list(everywhere(asked))[where]
        answer = await gateway.admin.request(method, path + query, json=body)
        assert answer.status_code == status, (method, path, answer.text)


async def test_20_gets_have_it_in_the_query(gateway: Gateway) -> None:
    await gateway.deployer.namespaces.create(Namespace("dev"))
    await gateway.deployed(namespace="dev")
    gateway.logs.extend("echo.dev", "w1", [Printed("hello")])
    gateway.secrets.create("dev", "key", b"a")

    for path in ("functions", "function/echo", "logs?name=echo", "secrets"):
        answer = await gateway.admin.get(f"/system/{path}{'&' if '?' in path else '?'}namespace=dev")
        assert answer.status_code == 200
        assert '"namespace":"dev"' in answer.text


async def test_21_a_name_is_split_at_its_last_dot(
    gateway: Gateway, callers: httpx.AsyncClient, functions: Functions
) -> None:
    await gateway.deployer.namespaces.create(Namespace("dev"))
    function = await gateway.deployed(namespace="dev")

    called = await callers.post("/function/echo.dev/path?a=1")
    unknown = [await callers.post(path) for path in ("/function/echo", "/function/a.echo.dev", "/function/echo.")]

    assert called.status_code == 200
    assert [(each, head.path, head.query) for each, head in functions.called] == [(function, "/path", b"a=1")]
    assert [each.status_code for each in unknown] == [404, 404, 404]


async def test_22_a_function_has_as_long_as_the_cli_waits(gateway: Gateway) -> None:
    await gateway.deployed()
    found = gateway.catalogue.find("echo")

    assert found is not None
    assert found.timeout_s == 60.0


@pytest.mark.parametrize(
    "fields",
    [
        {"limits": {"nvidia.com/gpu": "1"}},
        {"requests": {"nvidia.com/gpu": "1"}},
        {"constraints": ["gpu=true"]},
        {"labels": {"com.openfaas.profile": "gpu"}},
        {"annotations": {"com.openfaas.profile": "nvidia-gpu"}},
        {"annotations": {"gpufaas.device": "cuda"}},
    ],
)
async def test_23_a_gpu_may_be_asked_for_in_every_way(gateway: Gateway, fields: dict[str, Any]) -> None:
    gpu = Device(DeviceId("n1/cuda:0"), "Test GPU", 8 * GiB, {"gpu": "true"})
    gateway.workers.joined = [gpu, Device(DeviceId("n1/cpu:0"), "cpu", 2 * GiB, {"gpu": "false"})]
    if "annotations" in fields:
        fields = {"annotations": {**fields["annotations"], "gpufaas.bundle": gateway.bundle}}

    function = await gateway.deployed(**fields)

    status = (await gateway.admin.get("/system/function/echo")).json()
    for name, value in fields.items():
        assert status[name] == ({**value, "faas_function": "echo"} if name == "labels" else value)
    assert [str(each) for each in gateway.scheduler.functions[function].constraints] == ["gpu=true"]


@pytest.mark.parametrize("resource", ["nvidia.com/gpu", "amd.com/gpu", "intel.com/gpu"])
async def test_23_a_gpu_that_is_not_there_is_not_ignored(gateway: Gateway, resource: str) -> None:
    answer = await gateway.client.post("/system/functions", json=gateway.body(limits={resource: "1"}))

    assert answer.status_code == 400
    assert f"limits {resource}" in answer.text


ABSENT = ("envProcess", "envVars", "constraints", "secrets", "limits", "requests", "readOnlyRootFilesystem")


@pytest.mark.parametrize("fields", [{}, dict.fromkeys((*ABSENT, "labels"))], ids=["absent", "null"])
async def test_24_absent_is_the_default_and_stays_absent(gateway: Gateway, fields: dict[str, Any]) -> None:
    await gateway.deployed(**fields)

    status = (await gateway.admin.get("/system/function/echo")).json()

    assert {*ABSENT, "usage"}.isdisjoint(status)
    assert status["labels"] == {"faas_function": "echo"}


async def test_25_labels_and_annotations_may_be_empty_and_the_rest_absent(gateway: Gateway) -> None:
    body = {"service": "nodeinfo", "image": "ghcr.io/openfaas/nodeinfo:latest", "labels": {}, "annotations": {}}

    answer = await gateway.admin.put("/system/functions", json=body)

    assert answer.status_code == 404


# --- what else the route table says (§3.2, §3.10, appendix B) ---


async def test_root_sends_browsers_to_the_guarded_page(gateway: Gateway) -> None:
    root = await gateway.stranger.get("/")

    assert (root.status_code, root.headers["location"]) == (307, "/ui/")
    assert (await gateway.stranger.get("/ui/")).status_code == 401
    assert (await gateway.stranger.get("/docs")).status_code == 401
    page = (await gateway.admin.get("/ui/")).text
    assert "<title>gpufaas</title>" in page
    assert "availableReplicas" not in page, "it would show 1/0 for a function at zero: the page has what is loaded"


@pytest.mark.parametrize("path", ["/system/telemetry", "/system/nothing", "/nothing", "/redoc"])
async def test_unknown_paths_are_404(gateway: Gateway, path: str) -> None:
    answer = await gateway.admin.get(path)

    assert (answer.status_code, answer.text) == (404, "404 page not found\n")


async def test_a_wrong_method_is_405_and_empty(gateway: Gateway) -> None:
    answer = await gateway.admin.patch("/system/functions")

    assert (answer.status_code, answer.content) == (405, b"")
    assert answer.headers["allow"] == "DELETE, GET, POST, PUT"
    assert (await gateway.admin.post("/system/info")).status_code == 405


async def test_readiness_needs_a_device(gateway: Gateway) -> None:
    ready = await gateway.stranger.get("/readyz")
    gateway.scheduler.now = type(gateway.scheduler.now)("lalb", (), {}, {})
    not_yet = await gateway.stranger.get("/readyz")

    assert (ready.status_code, not_yet.status_code) == (200, 503)
    assert "no device" in not_yet.text


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("echo", {"serviceName": "echo", "replicas": 0}, 202),
        ("echo", {"serviceName": "echo", "replicas": 500}, 202),
        ("echo", {"replicas": 2}, 202),
        ("echo.openfaas-fn", {"serviceName": "echo", "replicas": 2}, 202),
        ("none", {"serviceName": "none", "replicas": 2}, 404),
        ("echo", {"serviceName": "other", "replicas": 2}, 400),
        ("echo", {"serviceName": "echo"}, 400),
        ("echo", {"serviceName": "echo", "replicas": -1}, 400),
        ("echo", {"serviceName": "echo", "replicas": 1.5}, 400),
        ("echo", {"serviceName": "echo", "replicas": "2"}, 400),
        ("echo", {"serviceName": "echo", "replicas": True}, 400),
        ("echo", {"serviceName": "echo", "replicas": 10**30}, 400),
        ("echo", [], 400),
    ],
)
async def test_scaling_says_what_it_took(gateway: Gateway, path: str, body: Any, status: int) -> None:
    function = await gateway.deployed()

    answer = await gateway.admin.post(f"/system/scale-function/{path}", json=body)

    assert answer.status_code == status, answer.text
    assert gateway.scheduler.scaled == ([(function, body["replicas"])] if status == 202 else [])


async def test_replicas_show_at_once_how_many_are_wanted(gateway: Gateway) -> None:
    await gateway.deployed()
    await gateway.admin.post("/system/scale-function/echo", json={"replicas": 5})
    more = (await gateway.admin.get("/system/function/echo")).json()
    await gateway.admin.post("/system/scale-function/echo", json={"replicas": 0})
    none = (await gateway.admin.get("/system/function/echo")).json()

    assert (more["replicas"], more["availableReplicas"]) == (5, 1)
    assert (none["replicas"], none["availableReplicas"]) == (0, 1), "faas-cli ready takes 0 for not ready"


async def test_a_function_that_cannot_be_called_is_not_available(gateway: Gateway) -> None:
    function = await gateway.deployed()
    shown = []
    for why in (
        {"failing": {function: Failing("exit status 3", 1, 0.0, 0.0)}},
        {"kept_out": {function: "no room"}},
        {},
    ):
        gateway.scheduler.now = EngineStatus("lalb", (), {}, {}, **why)
        shown.append((await gateway.admin.get("/system/function/echo")).json()["availableReplicas"])

    assert shown == [0, 0, 1]


def alert(*names: str, status: str = "firing") -> dict[str, object]:
    labels = [{"alertname": "APIHighInvocationRate", "function_name": name} for name in names]
    return {"status": status, "receiver": "scale-up", "alerts": [{"status": status, "labels": each} for each in labels]}


async def test_alerts_scale_by_the_factor_up_to_the_maximum(gateway: Gateway) -> None:
    labels = {"com.openfaas.scale.min": "2", "com.openfaas.scale.max": "5", "com.openfaas.scale.factor": "30"}
    await gateway.deployed(labels=labels)
    wanted = []

    for status in ("firing", "firing", "firing", "resolved", "resolved"):
        answer = await gateway.admin.post("/system/alert", json=alert("echo.openfaas-fn", status=status))
        assert (answer.status_code, answer.content) == (200, b"")
        wanted.append((await gateway.admin.get("/system/function/echo")).json()["replicas"])

    assert wanted == [4, 5, 5, 2, 2]
    assert len(gateway.scheduler.scaled) == 4, "an alert that fires at the maximum sets the number again: it holds"


async def test_alerts_can_be_turned_off_and_say_what_failed(gateway: Gateway) -> None:
    await gateway.deployed(labels={"com.openfaas.scale.factor": "0"})

    answer = await gateway.admin.post("/system/alert", json=alert("echo", "none", "nor-this"))
    malformed = await gateway.admin.post("/system/alert", content=b"{")

    assert (answer.status_code, answer.text.count("is not deployed\n")) == (500, 2)
    assert malformed.status_code == 400
    assert gateway.scheduler.scaled == []
