"""The CLI sends what the real faas-cli sends, by a log of its requests."""

import base64
import hashlib
import hmac
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cli.conftest import Run
from tests.unit.cli.wire_log import Reply, WireLog


@pytest.fixture(autouse=True)
def key_file(here: Path) -> None:
    (here / "key.txt").write_text(" abc\n")


SECRET = {"name": "k", "value": "abc"}
OF_FILE = {"name": "k", "value": "abc", "rawValue": base64.b64encode(b" abc\n").decode()}
DEV = {"name": "dev", "annotations": {"openfaas": "1"}, "labels": {"openfaas": "1", "team": "a"}}
HELLO = {"service": "hello", "image": "x", "labels": {}, "annotations": {}}


@pytest.mark.parametrize(
    ("command", "requests", "body"),
    [
        ("secret create k --from-literal=abc", [("POST", "/system/secrets")], SECRET),
        ("secret create k --from-file=key.txt", [("POST", "/system/secrets")], OF_FILE),
        ("secret update k --from-literal abc", [("PUT", "/system/secrets")], SECRET),
        ("secret update k --from-literal abc -n dev", [("PUT", "/system/secrets")], {**SECRET, "namespace": "dev"}),
        ("secret remove k", [("DELETE", "/system/secrets")], {"name": "k"}),
        ("namespace create dev -l team=a", [("POST", "/system/namespace/")], DEV),
        ("ns update dev --label team=a", [("PUT", "/system/namespace/dev")], DEV),
        (
            "namespace remove dev",
            [("DELETE", "/system/namespace/dev")],
            {"name": "dev", "labels": {"openfaas": "1"}},
        ),
        ("deploy --image x --name hello", [("PUT", "/system/functions")], HELLO),
        ("deploy --image x --name hello --no-update", [("POST", "/system/functions")], HELLO),
        (
            "deploy --image x --name hello --no-update --replace",
            [("DELETE", "/system/functions"), ("POST", "/system/functions")],
            HELLO,
        ),
        (
            "deploy --image=x --name hello --update=false --replace=true --readonly=false --tls-no-verify=F",
            [("DELETE", "/system/functions"), ("POST", "/system/functions")],
            HELLO,
        ),
        ("deploy --image x --name hello --update=1 --replace --replace=0", [("PUT", "/system/functions")], HELLO),
        (
            "secret create k --from-file=key.txt --trim=false",
            [("POST", "/system/secrets")],
            {**OF_FILE, "value": " abc\n"},
        ),
        (
            "secret create k --from-literal --trim=false",
            [("POST", "/system/secrets")],
            {"name": "k", "value": "--trim=false"},
        ),
        ("secret create --from-literal abc -n=dev -- k", [("POST", "/system/secrets")], {**SECRET, "namespace": "dev"}),
        ("remove hello", [("DELETE", "/system/functions")], {"functionName": "hello"}),
        ("remove hello -n dev", [("DELETE", "/system/functions")], {"functionName": "hello", "namespace": "dev"}),
    ],
)
def test_what_changes_something_is_sent_as_faas_cli_does(
    run: Run, wire: WireLog, command: str, requests: list[tuple[str, str]], body: dict[str, Any]
) -> None:
    result = run(*command.split())

    assert result.exit_code == 0, result.output
    assert wire.requests() == requests
    assert wire.sent[-1].json == body
    assert wire.sent[-1].headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("command", "requests"),
    [
        ("list", ["/system/functions"]),
        ("list -n dev", ["/system/functions?namespace=dev"]),
        ("describe hello", ["/system/function/hello?usage=1", "/system/functions"]),
        ("secret list", ["/system/secrets"]),
        ("secret list -n dev", ["/system/secrets?namespace=dev"]),
        ("namespace list", ["/system/namespaces"]),
        ("namespaces", ["/system/namespaces"]),
        ("namespace get dev", ["/system/namespace/dev"]),
        ("ready", ["/healthz"]),
        ("ready hello", ["/system/function/hello?usage=1"]),
        ("async status c-1", ["/async/c-1"]),
        ("async dead", ["/system/async/dead"]),
    ],
)
def test_what_only_reads_is_asked_as_faas_cli_does(run: Run, wire: WireLog, command: str, requests: list[str]) -> None:
    wire.answer("GET", "/system/function/hello", {"name": "hello", "availableReplicas": 1})
    wire.answer("GET", "/system/secrets", [{"name": "k"}])
    wire.answer("GET", "/system/namespaces", ["openfaas-fn", "dev"])
    wire.answer("GET", "/system/namespace/dev", DEV)
    wire.answer("GET", "/async/c-1", {"callId": "c-1", "state": "queued"})
    wire.answer("GET", "/system/async/dead", [{"callId": "c-1", "function": "a.openfaas-fn", "attempts": 3}])

    result = run(*command.split())

    assert result.exit_code == 0, result.output
    assert wire.requests() == [("GET", each) for each in requests]


def test_version_asks_for_info_once(run: Run, wire: WireLog) -> None:
    assert run("version").exit_code == 0
    assert wire.requests(but="") == [("GET", "/system/info")]


def test_the_whole_of_a_stack_entry_is_deployed(run: Run, wire: WireLog, here: Path) -> None:
    (here / "env.yml").write_text("environment:\n  greeting: from-file\n  exec_timeout: 1m\n")
    (here / "stack.yml").write_text(
        """\
version: 1.0
provider: {name: openfaas}
functions:
  hello:
    image: ttl.sh/hello:0.1
    fprocess: python index.py
    environment: {greeting: inline}
    environment_file: [env.yml]
    secrets: [api-key]
    constraints: ["gpu=true"]
    labels: {com.openfaas.scale.min: 1, com.openfaas.scale.zero: true}
    annotations: {topic: cron-function, schedule: "*/5 * * * *"}
    limits: {memory: 256Mi, cpu: 200m}
    requests: {memory: 128Mi, cpu: 100m}
    readonly_root_filesystem: true
"""
    )
    wire.answer("PUT", "/system/functions", 404)
    wire.answer("POST", "/system/functions", 202)

    result = run("deploy", "-e", "extra=1")

    assert result.exit_code == 0, result.output
    assert wire.requests() == [("PUT", "/system/functions"), ("POST", "/system/functions")]
    assert wire.sent[-1].json == {
        "service": "hello", "image": "ttl.sh/hello:0.1", "envProcess": "python index.py",
        "envVars": {"exec_timeout": "1m", "extra": "1", "greeting": "from-file"},
        "constraints": ["gpu=true"], "secrets": ["api-key"],
        "labels": {"com.openfaas.scale.min": "1", "com.openfaas.scale.zero": "true"},
        "annotations": {"schedule": "*/5 * * * *", "topic": "cron-function"},
        "limits": {"memory": "256Mi", "cpu": "200m"}, "requests": {"memory": "128Mi", "cpu": "100m"},
        "readOnlyRootFilesystem": True,
    }  # fmt: skip
    assert "Deploying: hello.\n\nDeployed. 202 Accepted.\nURL: " in result.stdout


def test_flags_go_before_the_stack_file_and_secrets_are_joined(run: Run, wire: WireLog, here: Path) -> None:
    (here / "stack.yml").write_text(
        "provider: {name: openfaas}\nfunctions:\n  a:\n    image: x\n    fprocess: file\n    secrets: [one]\n"
        "    constraints: [file=1]\n    labels: {a: file, b: file}\n    limits: {memory: 1Mi, cpu: 1m}\n"
        "    namespace: file\n"
    )

    result = run(
        "deploy", "--fprocess", "flag", "--secret", "two", "--secret", "one", "--constraint", "flag=1", "-l", "a=flag",
        "--annotation", "c=flag", "--memory-limit", "2Mi", "--cpu-request", "3m", "--readonly", "-n", "flag",
    )  # fmt: skip

    assert result.exit_code == 0, result.output
    assert wire.sent[-1].json == {
        "service": "a", "image": "x", "namespace": "flag", "envProcess": "flag", "constraints": ["file=1"],
        "secrets": ["one", "two"], "labels": {"a": "flag", "b": "file"}, "annotations": {"c": "flag"},
        "limits": {"memory": "2Mi", "cpu": "1m"}, "requests": {"cpu": "3m"}, "readOnlyRootFilesystem": True,
    }  # fmt: skip


# --- invoke ---


@pytest.mark.parametrize(("body", "answer"), [(b'{"n": 1}', {"n": 1}), (b"plain", "plain")])
@pytest.mark.parametrize("status", [200, 500])
def test_invoke_with_json_shows_the_answer_in_an_object(
    run: Run, wire: WireLog, status: int, body: bytes, answer: object
) -> None:
    headers = {"X-Call-Id": "c1", "Server-Timing": "queue;dur=1, run;dur=250", "X-Gpufaas-Start": "hit"}
    wire.answer("POST", "/function/f", Reply(status, body, headers))

    result = run("invoke", "f", "--json")

    found = json.loads(result.stdout)
    assert result.exit_code == int(status == 500)
    assert (found["status"], found["answer"], found["call"]) == (status, answer, "c1")
    assert (found["start"], found["phases"]) == ("hit", {"queue": 0.001, "run": 0.25})


def test_an_invocation_carries_no_login_unless_it_is_asked_to(run: Run, wire: WireLog) -> None:
    run("login", "-s", data="secret")
    run("invoke", "hello", "--query", "a=1", "-H", "X-Foo: bar", data="hi\n")
    run("invoke", "hello", "-n", "dev", "-m", "GET", "--auth")

    plain, with_login = wire.sent[-2:]
    assert (plain.method, plain.path, plain.body) == ("POST", "/function/hello?a=1", b"hi\n")
    assert plain.headers["content-type"] == "text/plain"
    assert plain.headers["x-foo"] == "bar"
    assert "authorization" not in plain.headers
    assert (with_login.method, with_login.path) == ("GET", "/function/hello.dev")
    assert with_login.headers["authorization"] == "Basic " + base64.b64encode(b"admin:secret").decode()


def test_a_body_is_signed(run: Run, wire: WireLog) -> None:
    result = run("invoke", "hook", "--sign", "X-Hub-Signature-256", "--key", "k", data=b"body")

    assert result.exit_code == 0
    assert (
        wire.sent[0].headers["x-hub-signature-256"] == "sha256=" + hmac.new(b"k", b"body", hashlib.sha256).hexdigest()
    )
    assert run("invoke", "hook", "--sign", "X").exit_code == 2


@pytest.mark.parametrize("flag", ["-a", "--async"])
def test_an_asynchronous_call_tells_its_id_on_stderr(run: Run, wire: WireLog, flag: str) -> None:
    wire.answer("POST", "/async-function/hello/x", Reply(202, headers={"X-Call-Id": "c-1"}))

    result = run("invoke", "hello/x", flag, "-H", "X-Callback-Url: http://a/b", data=b"in")

    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "Function submitted asynchronously.\nCall id: c-1\n"
    assert wire.requests() == [("POST", "/async-function/hello/x")]
    assert wire.sent[0].headers["x-callback-url"] == "http://a/b"
    assert wire.sent[0].body == b"in"


def test_an_asynchronous_call_that_is_not_accepted_fails(run: Run, wire: WireLog) -> None:
    wire.answer("POST", "/async-function/hello", Reply(429, b"the queue is full\n"))

    result = run("invoke", "hello", "--async")

    assert (result.exit_code, result.stdout) == (1, "the queue is full\n")


# --- what gateways of others answer ---


@pytest.mark.parametrize("status", [200, 201, 202])
def test_any_success_is_one(run: Run, wire: WireLog, status: int) -> None:
    """faas-cli takes 201 of a deploy and of a removed secret for a failure; nothing is gained by that."""
    for method in ("POST", "PUT", "DELETE"):
        for path in ("/system/functions", "/system/secrets", "/system/namespace/", "/system/namespace/a"):
            wire.answer(method, path, status)

    for command in ("deploy --image x --name a", "remove a", "secret create k --from-literal v", "secret remove k",
                    "namespace create a", "namespace remove a"):  # fmt: skip
        assert run(*command.split()).exit_code == 0, command


@pytest.mark.parametrize(
    "command", ["secret create k --from-literal v", "secret update k --from-literal v", "secret remove k"]
)
def test_a_secret_that_fails_is_exit_code_1(run: Run, wire: WireLog, command: str) -> None:
    """faas-cli ends with 0 here (appendix B), so that scripts go on without the secret."""
    for method in ("POST", "PUT", "DELETE"):
        wire.answer(method, "/system/secrets", Reply(500, b"the disk is full"))

    result = run(*command.split())

    assert (result.exit_code, result.stderr) == (1, "gpufaas: the disk is full\n")


def test_lists_that_are_null_or_have_more_in_them_are_read(run: Run, wire: WireLog) -> None:
    wire.answer("GET", "/system/functions", Reply(body=b"null"))
    assert run("list", "-q").stdout == ""

    wire.answer("GET", "/system/functions", [{"name": "a", "labels": None, "replicas": None, "new": [1]}])
    assert run("list", "-q").stdout == "a\n"
    wire.answer("GET", "/system/functions", {})
    assert run("list").exit_code == 3


def test_a_header_as_it_was_written_of_old_is_sent_and_warned_about(run: Run, wire: WireLog) -> None:
    result = run("invoke", "hello", "-H", "X-Callback-Url=http://a/b", "-H", "X-Foo: a=b", data="x")

    assert result.exit_code == 0, result.stderr
    assert wire.sent[-1].headers["x-callback-url"] == "http://a/b"
    assert "write -H 'X-Callback-Url: ...'" in result.stderr
    assert (wire.sent[-1].headers["x-foo"], result.stderr.count("WARNING")) == ("a=b", 1)


def test_logs_follow_when_asked(run: Run, wire: WireLog) -> None:
    run("logs", "--follow", "hello")
    run("logs", "-t", "5", "hello")
    run("logs", "hello", "--tail=false", "--lines=10")  # faas-cli's: there, --tail is a switch
    run("logs", "hello", "-t=true", "--lines", "10")

    assert [each.path for each in wire.sent] == [
        "/system/logs?name=hello&follow=true&tail=100",
        "/system/logs?name=hello&follow=false&tail=5",
        "/system/logs?name=hello&follow=false&tail=10",
        "/system/logs?name=hello&follow=true&tail=10",
    ]


def test_a_deployment_may_be_given_a_time_limit(run: Run, wire: WireLog) -> None:
    del wire

    assert run("deploy", "--image", "x", "--name", "hello", "--timeout", "1m30s").exit_code == 0
    assert run("deploy", "--image", "x", "--name", "hello", "--timeout", "soon").exit_code == 2
    with SlowGateway() as slow:
        result = run("deploy", "--image", "x", "--name", "hello", "--timeout", "100ms", "-g", slow.url)
    assert (result.exit_code, "did not answer in time" in result.stderr) == (3, True)


class SlowGateway(WireLog):
    """Takes its time over deployments: until it is left."""

    def __init__(self) -> None:
        super().__init__()
        self._over = threading.Event()
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # its caller has gone

    def _reply(self, method: str, path: str) -> Reply:
        if method == "PUT":
            self._over.wait(60)
        return super()._reply(method, path)

    def __exit__(self, *given: object) -> None:
        self._over.set()
        super().__exit__(*given)


def test_what_is_no_text_is_not_sent_and_is_one_line_that_shows_it(run: Run, wire: WireLog) -> None:
    result = run("deploy", "--image", "x", "--name", "a", "-e", "KEY=a\udcff")

    assert (result.exit_code, result.stderr.count("\n"), wire.requests()) == (2, 1, [])
    assert '"KEY":"a\\udcff' in result.stderr


def test_a_gpu_in_the_stack_file_is_sent_which_faas_cli_drops(run: Run, wire: WireLog, here: Path) -> None:
    (here / "stack.yaml").write_text(
        "provider: {name: openfaas}\nfunctions: {f: {image: f:1, limits: {memory: 1Gi, nvidia.com/gpu: 1}}}\n"
    )
    wire.answer("PUT", "/system/functions", 200)

    result = run("deploy")

    assert result.exit_code == 0, result.output
    assert wire.sent[-1].json["limits"] == {"memory": "1Gi", "nvidia.com/gpu": "1"}


def test_a_function_that_has_printed_nothing_is_told_as_that(run: Run, wire: WireLog) -> None:
    wire.answer("GET", "/system/logs", Reply(200, b""))

    assert run("logs", "hello").stderr == "gpufaas: hello has printed nothing yet\n"
    assert run("logs", "hello", "--json").stderr == ""
