"""
What OpenFaaS's certifier asks of every provider, and what its clients rely on beside that, against one served platform
with a password. Each test speaks HTTP as faas-cli and the SDKs do. The certifier's images print their environment, a
digest or a secret; `FUNCTION` does all three.
"""

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from tests.integration.conftest import HTTP, LIMIT_S, Platform, until
from tests.integration.test_async import Receiver

FUNCTION = """
    import hashlib, os

    def handle(event, context):
        what, _, name = event.path.strip("/").partition("/")
        if what == "env":
            return {"body": dict(os.environ)}
        if what == "secret":
            return {"body": open(os.path.join(os.environ["secret_mount_path"], name)).read()}
        if what == "redirect":
            return {"statusCode": 302, "headers": {"Location": os.environ["destination"]}}
        if what == "print":
            print(event.text)
            return {"body": "printed"}
        if what == "fail":
            return {"statusCode": 418, "body": "short and stout", "headers": {"X-Kind": "teapot"}}
        if what == "seen":
            headers = {key.lower(): value for key, value in event.headers.items()}
            seen = {"method": event.method, "path": event.path, "query": dict(event.query), "headers": headers}
            return {"body": {**seen, "text": event.text}}
        return {"body": hashlib.sha512(event.body).hexdigest()}
"""
SCALE = "com.openfaas.scale."
Deploy = Callable[..., str]


@pytest.fixture(scope="module")
def platform(module_platform: Callable[..., Platform]) -> Platform:
    running = module_platform("--auth", "on", "--device", "cpu:0=1GiB", "--allow-local-callbacks").start()
    running.http.auth = ("admin", (running.data / "auth" / "basic-auth-password").read_text())
    return running


@pytest.fixture(scope="module")
def bundle(platform: Platform) -> str:
    built = platform.build("certified", FUNCTION, HTTP)
    sent = platform.http.put(f"/system/artifacts/{built.digest}", content=built.bundle_tar.read_bytes())
    assert sent.status_code == 201
    return built.digest


@pytest.fixture
def deploy(platform: Platform, bundle: str) -> Iterator[Deploy]:
    """Deploys, as faas-cli does it: update what is there, else create it. What it deployed is removed at the end."""
    made: dict[tuple[str, str], None] = {}

    def deploy(name: str, annotations: dict[str, str] | None = None, **fields: Any) -> str:
        spec = {"service": name, "image": "functions/alpine:latest", "network": "func_functions", **fields}
        answer = platform.deploy_spec({**spec, "annotations": {"gpufaas.bundle": bundle, **(annotations or {})}})
        assert answer.status_code in (200, 202), answer.text
        namespace = fields.get("namespace", "openfaas-fn")
        made[name, namespace] = None
        return f"/function/{name}.{namespace}"

    yield deploy
    for name, namespace in made:
        platform.http.request("DELETE", "/system/functions", json={"functionName": name, "namespace": namespace})


@pytest.fixture
def stranger(platform: Platform) -> Iterator[httpx.Client]:
    """Who has no password."""
    with httpx.Client(base_url=platform.url, timeout=LIMIT_S, trust_env=False) as client:
        yield client


def described(platform: Platform, name: str, **query: str) -> dict[str, Any]:
    answer = platform.http.get(f"/system/function/{name}", params=query)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


# --- who may ---


def test_every_route_of_the_system_asks_for_the_password(platform: Platform, stranger: httpx.Client) -> None:
    paths = platform.http.get("/openapi.json").json()["paths"]
    asked = [
        (method, re.sub(r"\{.*?\}", "x", path))
        for path, methods in paths.items() if path.startswith(("/system/", "/ui/"))
        for method in methods if method in ("get", "post", "put", "delete", "head")
    ]  # fmt: skip

    for login in (None, ("admin", "wrong"), ("nobody", "")):
        for method, path in asked:
            refused = stranger.request(method, path, auth=login)
            assert refused.status_code == 401, (method, path)
            assert refused.headers["www-authenticate"] == 'Basic realm="Restricted"'
    logged_out = b"GET /system/functions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \r\n\r\n"  # as faas-cli has it
    assert platform.exchange(logged_out).startswith(b"HTTP/1.1 401 ")
    assert len(asked) > 20
    assert stranger.get("/healthz").status_code == 200
    assert stranger.get("/function/none").status_code == 404
    assert stranger.post("/async-function/none").status_code == 404


def test_the_provider_and_the_gateway_have_names_and_versions(platform: Platform) -> None:
    info = platform.http.get("/system/info").json()

    provider = info["provider"]
    assert all((provider["provider"], provider["orchestration"], info["arch"]))
    for version in (provider["version"], info["version"]):
        assert all((version["release"], version["sha"]))


# --- functions ---


def test_what_was_deployed_is_shown_as_it_was_sent_and_is_replaced_by_an_update(
    platform: Platform, deploy: Deploy
) -> None:
    fields = {
        "envProcess": "sha512sum", "envVars": {"custom_env": "custom_env_value"}, "constraints": ["gpu=false"],
        "limits": {"memory": "128Mi", "cpu": "500m"}, "requests": {"memory": "64Mi", "cpu": "100m"},
        "readOnlyRootFilesystem": True, "labels": {"upstream_uri": "example.com", "canary_build": "true"},
    }  # fmt: skip
    notes = {"important-date": "Fri Aug 10 08:21:00 BST 2018", "some-json": '{ "a": {"b": ["GML",\t"XML"]} }'}
    path = deploy("stronghash", notes, **fields)
    called = platform.call(path, b"hello")
    first = described(platform, "stronghash")
    (listed,) = platform.http.get("/system/functions", params={"namespace": "openfaas-fn"}).json()

    for found in (first, listed):
        assert (found["name"], found["namespace"], found["image"]) == (
            "stronghash", "openfaas-fn", "functions/alpine:latest",
        )  # fmt: skip
        assert {name: found[name] for name in fields if name != "labels"} == {
            name: value for name, value in fields.items() if name != "labels"
        }
        assert fields["labels"] | {"faas_function": "stronghash"} == found["labels"]
        assert notes.items() <= found["annotations"].items()
        assert datetime.fromisoformat(found["createdAt"]).tzinfo is not None
        assert (found["replicas"], found["availableReplicas"]) == (1, 1)
    assert called.text == hashlib.sha512(b"hello").hexdigest()
    assert listed["invocationCount"] == 1

    deploy("stronghash", envVars={"other": "2"})
    second = described(platform, "stronghash")

    assert second["envVars"] == {"other": "2"}
    assert not {"envProcess", "constraints", "limits", "requests", "readOnlyRootFilesystem"} & second.keys()
    assert "custom_env" not in platform.call(f"{path}/env").json()


def test_what_is_not_there_or_is_there_already_is_said(platform: Platform, bundle: str, deploy: Deploy) -> None:
    spec = {"service": "certified", "image": "x", "annotations": {"gpufaas.bundle": bundle}}
    updated = platform.http.put("/system/functions", json=spec)
    deploy("certified")

    statuses = {
        "created twice": platform.http.post("/system/functions", json=spec).status_code,
        "described": platform.http.get("/system/function/none").status_code,
        "invoked": platform.call("/function/none").status_code,
        "removed": platform.http.request("DELETE", "/system/functions", json={"functionName": "none"}).status_code,
        "removed without a name": platform.http.request("DELETE", "/system/functions", json={}).status_code,
        "no image": platform.http.post("/system/functions", json={"service": "b"}).status_code,
        "a bad name": platform.http.post("/system/functions", json={**spec, "service": "B_c"}).status_code,
        "an unknown secret": platform.http.put("/system/functions", json={**spec, "secrets": ["no"]}).status_code,
        "a bad size": platform.http.put("/system/functions", json={**spec, "limits": {"memory": "much"}}).status_code,
    }

    assert updated.status_code == 404
    assert statuses == {
        "created twice": 409, "described": 404, "invoked": 404, "removed": 404, "removed without a name": 400,
        "no image": 400, "a bad name": 400, "an unknown secret": 400, "a bad size": 400,
    }  # fmt: skip


def test_a_removed_function_is_neither_listed_nor_called(platform: Platform, deploy: Deploy) -> None:
    path = deploy("passing")

    assert platform.http.request("DELETE", "/system/functions", json={"functionName": "passing"}).status_code == 202

    assert platform.http.get("/system/functions").json() == []
    assert platform.call(path).status_code == 404


# --- calls ---


def test_a_function_sees_method_path_query_headers_and_body(platform: Platform, deploy: Deploy) -> None:
    path = deploy("seer", envVars={"custom_env": "custom_env_value"})

    for method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
        answer = platform.http.request(
            method, f"{path}/seen/deep", params={"testing": "1"}, content=b"body", headers={"X-Custom": "yes"}
        )
        seen = answer.json()
        assert (answer.status_code, seen["method"], seen["text"]) == (200, method, "body")
        assert (seen["path"], seen["query"]) == ("/seen/deep", {"testing": "1"})
        assert seen["headers"]["x-custom"] == "yes"
        assert seen["headers"]["x-forwarded-host"] == f"127.0.0.1:{platform.port}"
        assert answer.headers["x-call-id"] == seen["headers"]["x-call-id"]
        assert int(answer.headers["x-start-time"]) > 0
    env = platform.call(f"{path}/env").json()
    assert (env["custom_env"], env["OPENFAAS_NAME"], env["OPENFAAS_NAMESPACE"]) == (
        "custom_env_value", "seer", "openfaas-fn",
    )  # fmt: skip


def test_status_headers_and_redirects_are_the_functions(deploy: Deploy, stranger: httpx.Client) -> None:
    path = deploy("redirector", envVars={"destination": "http://example.com"})

    moved = stranger.get(f"{path}/redirect")
    failed = stranger.get(f"{path}/fail", headers={"X-Call-Id": "mine", "Authorization": "Bearer of-the-function"})
    seen = stranger.get(f"{path}/seen", headers={"Authorization": "Bearer of-the-function"}).json()

    assert (moved.status_code, moved.headers["location"]) == (302, "http://example.com")
    assert (failed.status_code, failed.text, failed.headers["x-kind"]) == (418, "short and stout", "teapot")
    assert failed.headers["x-call-id"] == "mine"
    assert "x-openfaas-internal" not in failed.headers
    assert seen["headers"]["authorization"] == "Bearer of-the-function"


def test_a_call_for_later_is_called_back_with_its_status(platform: Platform, deploy: Deploy) -> None:
    path = deploy("later").replace("/function/", "/async-function/")

    with contextlib.closing(Receiver()) as receiver:
        accepted = platform.call(f"{path}/fail", b"x", headers={"X-Callback-Url": receiver.url})
        call = accepted.headers["x-call-id"]
        until(lambda: call in receiver.got)
    headers, body = receiver.only(call)

    assert (accepted.status_code, accepted.content) == (202, b"")
    assert int(accepted.headers["x-start-time"]) > 0
    assert (headers["x-function-status"], body, headers["x-kind"]) == ("418", b"short and stout", "teapot")
    assert headers["x-function-name"] == "later.openfaas-fn"
    assert float(headers["x-duration-seconds"]) >= 0
    assert platform.call(path, headers={"X-Callback-Url": "::"}).status_code == 400


# --- secrets and namespaces ---


def test_a_secret_is_created_read_updated_and_removed_and_never_shown(platform: Platform, deploy: Deploy) -> None:
    secret = {"name": "secret-name", "value": "this-is-the-secret-value"}
    created = platform.http.post("/system/secrets", json=secret)
    again = platform.http.post("/system/secrets", json=secret)
    path = deploy("reader", secrets=["secret-name"])
    first = platform.call(f"{path}/secret/secret-name").text
    listed = platform.http.get("/system/secrets")
    updated = platform.http.put("/system/secrets", json={**secret, "value": "edited"})
    second = platform.call(f"{path}/secret/secret-name").text
    removed = platform.http.request("DELETE", "/system/secrets", json={"name": "secret-name"})
    missing = platform.http.put("/system/secrets", json=secret)

    statuses = [each.status_code for each in (created, again, updated, removed, missing)]
    assert statuses == [201, 409, 202, 202, 404]
    assert (first, second) == (secret["value"], "edited")
    assert listed.json() == [{"name": "secret-name", "namespace": "openfaas-fn"}]
    assert platform.http.get("/system/secrets").json() == []


def test_a_namespace_has_functions_secrets_and_labels_of_its_own(platform: Platform, deploy: Deploy) -> None:
    body = {"name": "dev", "labels": {"openfaas": "1", "team": "a"}, "annotations": {"openfaas": "1"}}
    created = platform.http.post("/system/namespace/", json=body)
    listed = platform.http.get("/system/namespaces").json()
    read = platform.http.get("/system/namespace/dev").json()
    platform.http.post("/system/secrets", json={"name": "key", "value": "of dev", "namespace": "dev"})
    paths = [deploy("twin", envVars={"whose": "default"}), deploy("twin", namespace="dev", secrets=["key"])]

    seen = [platform.call(f"{path}/env").json().get("whose") for path in paths]
    names = [
        [each["namespace"] for each in platform.http.get("/system/functions", params={"namespace": each}).json()]
        for each in ("openfaas-fn", "dev", "none")
    ]

    assert (created.status_code, sorted(listed)) == (201, ["dev", "openfaas-fn"])
    assert read == body
    assert (seen, names) == (["default", None], [["openfaas-fn"], ["dev"], []])
    assert described(platform, "twin", namespace="dev")["secrets"] == ["key"]
    assert platform.call(f"{paths[1]}/secret/key").text == "of dev"
    assert platform.http.get("/system/secrets").json() == []
    assert platform.http.put("/system/namespace/dev", json={**body, "labels": {"openfaas": "1"}}).status_code == 202
    assert platform.http.request("DELETE", "/system/namespace/dev", json={"name": "dev"}).status_code == 409
    platform.http.request("DELETE", "/system/functions", json={"functionName": "twin", "namespace": "dev"})
    assert platform.http.request("DELETE", "/system/namespace/dev", json={"name": "dev"}).status_code == 202
    assert platform.http.request("DELETE", "/system/namespace/openfaas-fn", json={}).status_code == 400
    assert platform.http.get("/system/namespaces").json() == ["openfaas-fn"]


# --- logs ---


def logs(platform: Platform, **query: object) -> list[dict[str, Any]]:
    answer = platform.http.get("/system/logs", params={"name": "logger", **query})
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def test_logs_are_told_by_number_by_time_and_as_they_come(platform: Platform, deploy: Deploy) -> None:
    path = deploy("logger")
    for text in (b"one", b"two", b"three"):
        platform.call(f"{path}/print", text)
    until(lambda: [each["text"].strip() for each in logs(platform)] == ["one", "two", "three"])

    tail = logs(platform, tail=2, follow="false")
    times = [datetime.fromisoformat(each["timestamp"]) for each in logs(platform, tail=-1)]
    since = logs(platform, since=times[1].isoformat(), follow=0)
    future = logs(platform, since=(datetime.now(UTC) + timedelta(hours=1)).isoformat())

    assert [each["text"].strip() for each in tail] == ["two", "three"]
    assert all(each["name"] == "logger" and each["namespace"] == "openfaas-fn" and each["instance"] for each in tail)
    assert [each["text"].strip() for each in since] in (["two", "three"], ["three"])
    assert future == []
    assert platform.http.get("/system/logs", params={"name": "none"}).status_code == 404
    assert platform.http.get("/system/logs", params={"name": "logger", "tail": "many"}).status_code == 422

    followed: list[str] = []
    read = threading.Event()
    params = {"name": "logger", "follow": "1", "tail": "1"}
    with platform.http.stream("GET", "/system/logs", params=params) as stream:
        for line in stream.iter_lines():
            followed.append(json.loads(line)["text"].strip())
            if followed == ["three"] and not read.is_set():
                read.set()
                platform.call(f"{path}/print", b"four")
            if followed[-1] == "four":
                break
    assert followed == ["three", "four"]


# --- copies ---


def scale(platform: Platform, name: str, replicas: int, field: str = "serviceName") -> None:
    answer = platform.http.post(f"/system/scale-function/{name}", json={field: name, "replicas": replicas})
    assert answer.status_code == 202, answer.text
    assert described(platform, name)["replicas"] == replicas


def alert(platform: Platform, name: str, status: str) -> int:
    """Send what AlertManager sends for the community edition's rule; return the number of copies after it."""
    labels = {"alertname": "APIHighInvocationRate", "function_name": f"{name}.openfaas-fn"}
    body = {"status": status, "receiver": "scale-up", "alerts": [{"status": status, "labels": labels}]}
    answer = platform.http.post("/system/alert", json=body)
    assert (answer.status_code, answer.content) == (200, b"")
    return int(described(platform, name)["replicas"])


def test_copies_are_scaled_up_down_and_to_zero_and_a_call_brings_one_back(platform: Platform, deploy: Deploy) -> None:
    path = deploy("scaled")

    scale(platform, "scaled", 2)
    until(lambda: described(platform, "scaled")["availableReplicas"] == 2)
    scale(platform, "scaled", 1)
    until(lambda: described(platform, "scaled")["availableReplicas"] == 1)
    scale(platform, "scaled", 0, field="service")  # as the certifier calls it

    answer = platform.call(path, b"hello")

    assert (answer.status_code, answer.text) == (200, hashlib.sha512(b"hello").hexdigest())
    assert described(platform, "scaled")["replicas"] == 1


def test_an_idle_function_goes_to_zero_if_its_labels_say_so_and_a_call_brings_it_back(
    platform: Platform, deploy: Deploy
) -> None:
    path = deploy("idle", labels={f"{SCALE}max": "2", f"{SCALE}zero": "true", f"{SCALE}zero-duration": "500ms"})

    for _ in range(2):
        assert platform.call(path, b"hello").status_code == 200
        until(lambda: described(platform, "idle")["replicas"] == 0)


def test_the_labels_bound_what_alerts_do(platform: Platform, deploy: Deploy) -> None:
    deploy("minimum", labels={f"{SCALE}min": "2"})
    deploy("alerted", labels={f"{SCALE}min": "1", f"{SCALE}max": "4", f"{SCALE}factor": "50", f"{SCALE}type": "alert"})
    deploy("fixed", labels={f"{SCALE}min": "2", f"{SCALE}max": "2"})
    deploy("plain")

    assert described(platform, "minimum")["replicas"] == 2
    assert [alert(platform, "alerted", each) for each in ("firing", "firing", "firing")] == [3, 4, 4]
    assert alert(platform, "alerted", "resolved") == 1
    assert [alert(platform, "fixed", each) for each in ("firing", "resolved")] == [2, 2]
    assert [alert(platform, "plain", each) for each in ("firing", "firing", "resolved")] == [3, 5, 1]  # 10 % of 20
    assert platform.http.post("/system/alert", content=b"{").status_code == 400
    platform.http.post("/system/scale-function/alerted", json={"serviceName": "alerted", "replicas": 9})
    assert described(platform, "alerted")["replicas"] == 4
