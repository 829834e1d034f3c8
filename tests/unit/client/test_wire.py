"""The requests of both clients."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.fakes.clients import Connect
from tests.unit.cli.wire_log import Reply, WireLog

import gpufaas
from gpufaas_core import local_login

BASIC = "Basic YWRtaW46czNjcmV0"


@pytest.fixture
def wire() -> Iterator[WireLog]:
    with WireLog() as log:
        yield log


def test_management_is_told_who_asks_and_functions_are_not(connect: Connect, wire: WireLog) -> None:
    client = connect(wire.url, auth=("admin", "s3cret"))

    client.functions()
    client.invoke("a")

    assert [each.headers.get("authorization") for each in wire.sent] == [BASIC, None]
    assert {each.headers["user-agent"] for each in wire.sent} == {"gpufaas-python"}


def test_a_token_a_header_and_a_user_in_the_url_say_who_asks(connect: Connect, wire: WireLog) -> None:
    connect(wire.url, token="t").functions()
    connect(wire.url, auth=BASIC).functions()
    in_url = connect(wire.url.replace("//", "//admin:s3cret@"), token="t")
    in_url.functions()

    assert [each.headers["authorization"] for each in wire.sent] == ["Bearer t", BASIC, BASIC]
    assert in_url.shown == wire.url


def test_the_login_of_a_gateway_here_is_found_unless_another_is_given(
    connect: Connect, wire: WireLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    client = connect(wire.url)

    with local_login.offered(wire.url, "admin", "s3cret"):
        client.functions()
        client.invoke("a")
        connect(wire.url, token="t").functions()
        connect(wire.url.replace("//", "//me:mine@")).functions()
    client.functions()

    assert [each.headers.get("authorization") for each in wire.sent] == [
        BASIC, None, "Bearer t", "Basic bWU6bWluZQ==", None,
    ]  # fmt: skip


def test_the_environment_names_the_gateway(connect: Connect, wire: WireLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENFAAS_URL", f"{wire.url}/")
    assert connect().functions() == []

    monkeypatch.delenv("OPENFAAS_URL")
    assert connect().gateway == "http://127.0.0.1:8080"


def test_what_is_no_url_is_said(connect: Connect) -> None:
    with pytest.raises(gpufaas.GatewayUnreachable, match="gateway:8080 is not the URL of a gateway"):
        connect("gateway:8080")


def test_a_call_is_sent_with_its_query_headers_and_body(connect: Connect, wire: WireLog) -> None:
    wire.answer("PUT", "/function/a.dev/b", Reply(201, b"\xff", {"X-Call-Id": "c-1", "X-Gpufaas-Start": "hit"}))

    answer = connect(wire.url).invoke(
        "a/b", {"x": 1}, namespace="dev", method="PUT", query=[("k", "1"), ("k", "2")], headers={"X-Foo": "bar"}
    )

    (sent,) = wire.sent
    assert (sent.method, sent.path, sent.json) == ("PUT", "/function/a.dev/b?k=1&k=2", {"x": 1})
    assert (sent.headers["x-foo"], sent.headers["content-type"]) == ("bar", "application/json")
    assert (answer.status, answer.content, answer.call_id, answer.timing.start) == (201, b"\xff", "c-1", "hit")


def test_a_body_in_pieces_is_sent_as_it_comes(connect: Connect, wire: WireLog) -> None:
    connect(wire.url).invoke("a", iter([b"one ", b"two"]), headers={"Content-Length": "7"})

    assert wire.sent[0].body == b"one two"


def test_an_asynchronous_call_is_known_by_its_id(connect: Connect, wire: WireLog) -> None:
    wire.answer("POST", "/async-function/a", Reply(202, headers={"X-Call-Id": "c/1"}))
    running, done = ({"callId": "c/1", "function": "a", "state": each} for each in ("running", "done"))
    wire.answer("GET", "/async/c%2F1", running, done)

    call = connect(wire.url).invoke_async("a", "x", callback_url="http://done")

    assert wire.sent[0].headers["x-callback-url"] == "http://done"
    assert call.id == "c/1"
    assert call.wait()["state"] == "done"
    assert call.status() == done
    call.cancel()
    assert wire.requests()[-1] == ("DELETE", "/async-function/c%2F1")


def test_a_gateway_that_starts_is_waited_for(connect: Connect, wire: WireLog) -> None:
    wire.answer("GET", "/system/namespaces", Reply(503, b"starting", {"Retry-After": "0"}), ["openfaas-fn"])

    assert connect(wire.url).namespaces() == ["openfaas-fn"]


def test_logs_are_asked_for_with_all_that_narrows_them(connect: Connect, wire: WireLog) -> None:
    line = {"name": "a", "namespace": "dev", "instance": "w1", "timestamp": "2026-11-20T22:50:53Z", "text": "hi"}
    wire.answer("GET", "/system/logs", Reply(200, json.dumps(line).encode() + b"\n\n"))
    since = datetime(2026, 11, 20, 22, 50, tzinfo=UTC)

    with connect(wire.url).logs("a", "dev", tail=3, since=since, instance="w1", call_id="c-1") as lines:
        assert list(lines) == [line]

    assert wire.sent[0].path == (
        "/system/logs?name=a&follow=false&tail=3&namespace=dev&instance=w1&callId=c-1"
        "&since=2026-11-20T22%3A50%3A00.000000Z"
    )


def test_logs_that_are_none_and_those_of_nothing_are_errors(connect: Connect, wire: WireLog) -> None:
    wire.answer("GET", "/system/logs", Reply(200, b"<html>\n"), Reply(404, b"there is no a"))
    client = connect(wire.url)

    with pytest.raises(gpufaas.GatewayUnreachable, match="sends logs that are none"), client.logs("a") as lines:
        list(lines)
    with pytest.raises(gpufaas.UnknownFunction, match="there is no a"), client.logs("a"):
        pass


def test_a_secret_is_text_or_bytes(connect: Connect, wire: WireLog) -> None:
    client = connect(wire.url)

    client.put_secret("k", "abc", "dev")
    client.put_secret("k", b"\xff", update=True)

    assert wire.requests() == [("POST", "/system/secrets"), ("PUT", "/system/secrets")]
    assert [each.json for each in wire.sent] == [
        {"name": "k", "namespace": "dev", "value": "abc"},
        {"name": "k", "rawValue": "/w=="},
    ]


def test_an_upload_tells_its_progress(connect: Connect, wire: WireLog, tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"x" * (3 << 19))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    steps: list[int] = []

    connect(wire.url).put_artifact(digest, file, steps.append)

    assert wire.sent[0].body == file.read_bytes()
    assert wire.sent[0].headers["content-length"] == str(3 << 19)
    assert steps == [1 << 20, 1 << 19]


def test_a_gateway_that_takes_no_bundles_is_said(connect: Connect, wire: WireLog, tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"x")
    wire.answer("PUT", "/system/artifacts/0", 405)

    with pytest.raises(gpufaas.Refused, match="takes no bundles"):
        connect(wire.url).put_artifact("0", tmp_path / "weights")


def test_it_is_imported_without_the_platform() -> None:
    code = "import sys, gpufaas; print(*sorted({each.partition('.')[0] for each in sys.modules}))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()

    assert [each for each in shown if each.startswith("gpufaas")] == ["gpufaas", "gpufaas_core"]
    assert not {"msgspec", "yaml", "pydantic", "asyncio"} & set(shown)


def test_https_where_http_is_spoken_is_told_as_that() -> None:
    with WireLog() as plain:
        client = gpufaas.Client(plain.url.replace("http://", "https://"), verify=False)

        with pytest.raises(gpufaas.GatewayUnreachable, match="no encrypted connection to the gateway at https://"):
            client.info()
