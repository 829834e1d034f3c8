"""Both clients of the API against the platform."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.clients import Connect, connect
from tests.integration.conftest import ECHO, ECHO_MODEL, GATED, HTTP, LIMIT_S, TORCH, Platform, free_port, until

import gpufaas

__all__ = ["connect"]

STREAM = """
    def handle(event, context):
        return {"body": (each for each in ("one\\n", "two\\n"))}
"""
BREAKS_OFF = """
    def pieces():
        yield "one"
        raise RuntimeError("broken")

    def handle(event, context):
        return {"body": pieces()}
"""
FAILS = """
    def handle(event, context):
        return {"statusCode": 418, "body": "no coffee"}
"""


@pytest.fixture
def client(connect: Connect, platform: Platform) -> gpufaas.Client:
    return connect(platform.url, timeout_s=LIMIT_S)


@pytest.fixture
def namespace(client: gpufaas.Client) -> Iterator[str]:
    client.put_namespace("dev", {"team": "a"})
    yield "dev"
    client.remove_namespace("dev")


def test_a_function_from_its_upload_to_its_removal(client: gpufaas.Client, platform: Platform) -> None:
    built = platform.build("echo", ECHO, HTTP)
    assert not client.has_artifact(built.digest)
    client.put_artifact(built.digest, built.bundle_tar)
    assert client.has_artifact(built.digest)

    deployment = {"service": "echo", "image": "echo:1", "annotations": {"gpufaas.bundle": built.digest}}
    assert client.deploy(deployment).status == 202
    assert client.deploy(deployment).status == 202  # nothing has changed
    assert client.deploy(deployment | {"labels": {"team": "a"}}).status == 200
    with pytest.raises(gpufaas.Refused, match="exists") as refused:
        client.deploy(deployment, update=False)
    assert refused.value.code == "function-exists"

    assert [each["name"] for each in client.functions()] == ["echo"]
    assert client.function("echo")["gpufaas"]["bundle"] == built.digest
    assert client.invoke("echo", b"\x00\xff").content == b"\x00\xff"
    assert client.remove("echo")
    assert not client.remove("echo")
    with pytest.raises(gpufaas.UnknownFunction):
        client.function("echo")
    with pytest.raises(gpufaas.UnknownFunction, match="gpufaas list"):
        client.invoke("echo")


def test_an_answer_says_whether_its_worker_was_there(client: gpufaas.Client, platform: Platform) -> None:
    platform.deploy("echo", ECHO, HTTP)

    answers = [client.invoke("echo", {"n": 1}) for _ in range(2)]

    assert [each.json() for each in answers] == [{"n": 1}, {"n": 1}]
    assert [each.timing.start for each in answers] == ["disk", "hit"]
    assert [set(each.timing.phases) for each in answers] == [{"queue", "load", "run"}] * 2
    assert answers[0].timing.phases["load"] > 0
    assert answers[0].timing.device is not None
    assert len({each.call_id for each in answers}) == 2


def test_what_a_function_answers_is_no_error_until_it_is_asked_for(client: gpufaas.Client, platform: Platform) -> None:
    platform.deploy("fails", FAILS, HTTP)

    answer = client.invoke("fails")

    assert (answer.status, answer.text) == (418, "no coffee")
    with pytest.raises(gpufaas.FunctionFailed, match="418: no coffee"):
        answer.raise_for_status()


def test_an_answer_comes_as_the_function_makes_it(client: gpufaas.Client, platform: Platform) -> None:
    platform.deploy("stream", STREAM, HTTP)

    with client.stream("stream") as parts:
        assert parts.status == 200
        assert b"".join(parts) == b"one\ntwo\n"


def test_an_answer_without_an_end_is_said(client: gpufaas.Client, platform: Platform) -> None:
    platform.deploy("breaks-off", BREAKS_OFF, HTTP)
    got = []

    with pytest.raises(gpufaas.BrokeOff), client.stream("breaks-off") as parts:
        got += list(parts)
    with pytest.raises(gpufaas.BrokeOff):
        client.invoke("breaks-off")


def test_a_refusal_is_raised_by_a_stream_unless_it_is_wanted(client: gpufaas.Client) -> None:
    with pytest.raises(gpufaas.UnknownFunction), client.stream("nobody"):
        pass
    with client.stream("nobody", check=False) as parts:
        assert parts.status == 404
        assert b"there is no function 'nobody'" in b"".join(parts)


def test_a_call_for_later_is_waited_for_and_another_is_taken_back(client: gpufaas.Client, platform: Platform) -> None:
    platform.deploy("gated", GATED, HTTP)
    first, second = platform.gate(), platform.gate()

    call = client.invoke_async("gated", first.body)
    until(first.reached)
    until(lambda: call.status()["state"] == "running")
    with pytest.raises(gpufaas.NotEnded):
        call.wait(timeout_s=0.1)
    first.open()
    assert call.wait(LIMIT_S)["state"] == "done"

    call = client.invoke_async("gated", second.body)
    until(second.reached)
    call.cancel()
    assert call.wait(LIMIT_S)["state"] == "cancelled"
    second.open()
    assert client.dead_calls() == []
    with pytest.raises(gpufaas.UnknownCall):
        client.call("never-was")


def test_a_call_is_explained(client: gpufaas.Client, platform: Platform) -> None:
    platform.deploy(
        "model", "def load(device):\n    return 1\n\ndef handle(model, event, context):\n    return 'x'\n", TORCH
    )

    found = client.explain(client.invoke("model").call_id)

    assert found["function"].startswith("model.openfaas-fn")
    assert found["hit"] is False
    with pytest.raises(gpufaas.UnknownCall):
        client.explain("never-was")


def test_the_log_has_what_was_printed(client: gpufaas.Client, platform: Platform) -> None:
    platform.deploy("prints", "def handle(event, context):\n    print('said', event.text)\n    return 'x'\n", HTTP)
    call_id = client.invoke("prints", "one").call_id
    client.invoke("prints", "two")

    def said(**narrowed: str) -> list[str]:
        with client.logs("prints", **narrowed) as lines:
            return [each["text"].strip() for each in lines]

    until(lambda: {"said one", "said two"} <= set(said()))
    assert said(call_id=call_id) == ["said one"]
    with client.logs("prints", follow=True, call_id=call_id) as lines:
        assert next(iter(lines))["text"].strip() == "said one"


def test_namespaces_have_secrets_and_quotas(client: gpufaas.Client, namespace: str) -> None:
    assert set(client.namespaces()) == {"openfaas-fn", "dev"}
    client.put_namespace(namespace, {"team": "b"}, update=True)
    assert client.namespace(namespace)["labels"] == {"openfaas": "1", "team": "b"}

    client.put_secret("key", "abc", namespace)
    client.put_secret("key", b"\xff", namespace, update=True)
    with pytest.raises(gpufaas.Refused) as refused:
        client.put_secret("key", "abc", namespace)
    assert refused.value.status == 409
    assert client.secrets(namespace) == [{"name": "key", "namespace": namespace}]
    client.remove_secret("key", namespace)
    assert client.secrets(namespace) == []

    client.put_quota(namespace, {"maxFunctions": 0})
    assert client.quota(namespace)["maxFunctions"] == 0
    client.remove_quota(namespace)
    assert "maxFunctions" not in client.quota(namespace)


def test_a_namespace_may_not_have_more_than_its_quota(
    client: gpufaas.Client, platform: Platform, namespace: str
) -> None:
    built = platform.build("echo", ECHO, HTTP)
    client.put_artifact(built.digest, built.bundle_tar)
    client.put_quota(namespace, {"maxFunctions": 0})

    with pytest.raises(gpufaas.QuotaExceeded, match="dev"):
        client.deploy(
            {"service": "echo", "image": "x", "namespace": namespace, "annotations": {"gpufaas.bundle": built.digest}}
        )


def test_the_platform_says_what_it_is(client: gpufaas.Client) -> None:
    assert client.is_ready()
    assert client.info()["provider"]["provider"] == "gpufaas"
    assert [each["device"]["id"] for each in client.status()["devices"]] == ["local/cpu:0"]
    provided = client.environments()
    assert provided is not None
    assert provided[0]["implementation"] == "cp"
    assert [each["name"] for each in client.nodes()] == ["local"]
    assert client.node("local")["state"] == "ready"


def test_nobody_there_is_said(connect: Connect) -> None:
    client = connect(f"http://127.0.0.1:{free_port()}")

    assert not client.is_ready()
    with pytest.raises(gpufaas.GatewayUnreachable, match=r"no gateway answers at .*: start one with 'gpufaas serve'"):
        client.functions()


def test_a_file_that_is_gone_is_said_before_anything_is_sent(client: gpufaas.Client, tmp_path: Path) -> None:
    with pytest.raises(gpufaas.GpufaasError, match="build the function again"):
        client.put_artifact("0" * 64, tmp_path / "gone")


def test_the_examples_of_the_documentation_run(
    platform: Platform, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "client.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    platform.deploy("hello", ECHO_MODEL, TORCH)
    monkeypatch.setenv("OPENFAAS_URL", platform.url)
    names: dict[str, Any] = {}

    for each in blocks:
        exec(compile(each, "client.md", "exec", dont_inherit=True), names)

    said = capsys.readouterr().out
    assert len(blocks) == 8
    assert "200 {'text': 'hi'}" in said
    assert "hit local/cpu:0" in said
    assert "2 bytes" in said
    assert " done\n" in said
    assert "gpufaas list" in said
    assert "['calls decide again', 'pin hello.openfaas-fn on local/cpu:0'" in said
    names["client"].close()
