"""Logins: kept where faas-cli keeps them, sent with every command, shown by none."""

import base64
import stat
from pathlib import Path

import pytest
import yaml
from tests.unit.cli.conftest import Run
from tests.unit.cli.wire_log import Reply, WireLog

from gpufaas_cli import config

BASIC = "Basic " + base64.b64encode(b"admin:secret").decode()


def kept(file: Path) -> list[dict[str, str]]:
    return list(yaml.safe_load(file.read_text())["auths"])


def test_a_login_is_tried_then_kept_in_the_file_of_faas_cli(run: Run, wire: WireLog, here: Path) -> None:
    result = run("login", "--password-stdin", data="secret\n")

    file = here / "home/.openfaas/config.yml"
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == f"credentials saved for admin {wire.url}"
    assert wire.requests() == [("GET", "/system/functions")]
    assert wire.sent[0].headers["authorization"] == BASIC
    assert kept(file) == [{"gateway": wire.url, "auth": "basic", "token": BASIC.removeprefix("Basic ")}]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_a_wrong_password_is_not_kept_and_is_exit_code_3(run: Run, wire: WireLog, here: Path) -> None:
    wire.answer("GET", "/system/functions", Reply(401, b"invalid credentials"))

    result = run("login", "-s", data="wrong")

    assert result.exit_code == 3
    assert result.stderr == "gpufaas: Unable to login, either username or password is incorrect\n"
    assert not (here / "home/.openfaas").exists()


def test_a_password_on_the_command_line_is_warned_of(run: Run, wire: WireLog) -> None:
    result = run("login", "-u", "me", "-p", "secret")

    assert "WARNING! Using --password is insecure" in result.stderr
    assert f"credentials saved for me {wire.url}" in result.stdout
    assert "secret" not in result.output


@pytest.mark.parametrize(
    ("args", "data", "message"),
    [
        (["-s"], "", "the password is missing"),
        ([], "", "the password is missing"),
        (["-s", "-p", "x"], "y", "exclude each other"),
        (["-u", "", "-s"], "y", "--username must not be empty"),
        (["-s", "--timeout", "soon"], "y", "'soon' is not a duration"),
        (["-s", "-g", "http://me:secret@gateway"], "y", "give the user with -u"),
    ],
)
def test_a_login_without_its_parts_is_wrong_usage(run: Run, args: list[str], data: str, message: str) -> None:
    result = run("login", *args, data=data)

    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    "command",
    [
        "list", "describe a", "remove a", "logs a", "secret list", "secret create k --from-literal v",
        "secret remove k",
        "namespace list", "namespace create a", "namespace remove a", "async status c", "async dead", "async retry c",
        "async cancel c", "version", "deploy --image x --name a", "top --once", "ready a --attempts 1",
    ],
)  # fmt: skip
def test_every_command_says_who_it_is(run: Run, wire: WireLog, command: str) -> None:
    run("login", "-s", data="secret")
    del wire.sent[:]

    run(*command.split())

    assert wire.sent
    assert {each.headers.get("authorization") for each in wire.sent} == {BASIC}


def test_a_token_goes_before_the_login_and_the_url_before_both(run: Run, wire: WireLog) -> None:
    run("login", "-s", data="secret")

    run("list", "--token", "abc")
    run("list", "-k", "abc", "-g", wire.url.replace("//", "//me:own@"))

    assert wire.sent[-2].headers["authorization"] == "Bearer abc"
    assert wire.sent[-1].headers["authorization"] == "Basic " + base64.b64encode(b"me:own").decode()


@pytest.mark.usefixtures("wire")
def test_a_login_is_sent_to_its_gateway_only(run: Run) -> None:
    run("login", "-s", data="secret")
    with WireLog() as other:
        run("list", "-g", other.url)

        assert "authorization" not in other.sent[0].headers


def test_logout_forgets_one_gateway(run: Run, wire: WireLog, here: Path) -> None:
    file = here / "home/.openfaas/config.yml"
    assert run("logout").exit_code == 1
    assert not file.parent.exists(), "a home that cannot be written is no error"
    run("login", "-s", data="secret")
    config.save_login(config.basic("https://other", "me", "x"))

    result = run("logout")

    assert (result.exit_code, result.stdout) == (0, f"credentials removed for {wire.url}\n")
    assert [each["gateway"] for each in kept(file)] == ["https://other"]
    assert run("logout").exit_code == 1


def test_a_file_of_logins_that_is_a_link_stays_one(run: Run, wire: WireLog, here: Path) -> None:
    file, linked = here / "home/.openfaas/config.yml", here / "dotfiles.yml"
    file.parent.mkdir(parents=True)
    file.symlink_to(linked)

    run("login", "-s", data="secret")

    assert file.is_symlink()
    assert [each["gateway"] for each in kept(linked)] == [wire.url]


def test_what_faas_cli_wrote_is_read_and_what_we_do_not_know_stays(run: Run, wire: WireLog, here: Path) -> None:
    file = here / "home/.openfaas/config.yml"
    file.parent.mkdir(parents=True)
    file.write_text(
        f"auths:\n- gateway: {wire.url}/\n  auth: oauth2\n  token: jwt\n  options:\n  - name: a\n    value: b\n"
        "- gateway: https://other\n  auth: basic\n  token: bWU6eA==\n  options: [{name: c, value: d}]\nextra: 1\n"
    )

    run("list")
    run("login", "-s", data="secret")

    assert wire.sent[0].headers["authorization"] == "Bearer jwt"
    content = yaml.safe_load(file.read_text())
    assert content["extra"] == 1
    assert content["auths"][0]["options"] == [{"name": "c", "value": "d"}]
    assert content["auths"][1] == {"gateway": wire.url, "auth": "basic", "token": BASIC.removeprefix("Basic ")}


@pytest.mark.parametrize(
    ("env", "file"),
    [
        ({}, "home/.openfaas/config.yml"),
        ({"OPENFAAS_CONFIG": "own"}, "own/config.yml"),
        ({"CI": "true"}, ".openfaas/config.yml"),
        ({"CI": "1"}, ".openfaas/config.yml"),
        ({"CI": "no"}, "home/.openfaas/config.yml"),
        ({"CI": "true", "OPENFAAS_CONFIG": "own"}, "own/config.yml"),
    ],
)
def test_where_logins_are_kept(
    run: Run, wire: WireLog, here: Path, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], file: str
) -> None:
    for key, value in env.items():
        monkeypatch.setenv(key, value)

    assert run("login", "-s", data="secret").exit_code == 0
    assert kept(here / file)[0]["gateway"] == wire.url


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("content", ["auths: {a: b}\n", "- a\n", "a: [\n", "auths: [a]\n"])
def test_a_broken_file_is_named_and_left_alone(run: Run, here: Path, content: str) -> None:
    file = here / "home/.openfaas/config.yml"
    file.parent.mkdir(parents=True)
    file.write_text(content)

    result = run("login", "-s", data="secret")

    assert result.exit_code == 1
    assert f"{file}: it is not" in result.stderr
    assert file.read_text() == content


@pytest.mark.usefixtures("here")
def test_an_unencrypted_gateway_elsewhere_is_warned_of(
    run: Run,
) -> None:
    config.save_login(config.basic("http://gateway.invalid", "me", "x"))

    result = run("list", "-g", "http://gateway.invalid")

    assert "WARNING! The connection to the gateway is not encrypted" in result.stderr


# --- secrets: where values come from ---


def test_a_value_comes_from_stdin_trimmed_unless_told_otherwise(run: Run, wire: WireLog) -> None:
    run("secret", "create", "k", data=" a b \n")
    run("secret", "create", "k", "--no-trim", data=" a b \n")
    run("secret", "create", "k", "--no-trim", "--from-literal", " x ")

    assert [each.json["value"] for each in wire.sent] == ["a b", " a b \n", " x "]


def test_bytes_that_are_no_text_are_sent_as_they_are(run: Run, wire: WireLog, here: Path) -> None:
    (here / "key").write_bytes(b"\xff\x00\n")

    run("secret", "create", "k", "--from-file", "key")

    assert wire.sent[0].json == {"name": "k", "rawValue": base64.b64encode(b"\xff\x00\n").decode()}


def test_a_secret_that_is_there_is_replaced_when_that_is_meant(run: Run, wire: WireLog) -> None:
    wire.answer("POST", "/system/secrets", Reply(409, b"there"))
    wire.answer("PUT", "/system/secrets", 202)

    refused = run("secret", "create", "k", "--from-literal", "v")
    replaced = run("secret", "create", "k", "--from-literal", "v", "--replace")

    assert refused.exit_code == 1
    assert "there is a secret 'k' already" in refused.stderr
    assert replaced.stdout.splitlines()[-1] == "Updated: 202 Accepted"
    assert wire.requests()[1:] == [("POST", "/system/secrets"), ("PUT", "/system/secrets")]
    assert wire.sent[1].body == wire.sent[2].body


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["Bad_Name", "--from-literal", "v"], "is not the name of a secret"),
        (["k", "--from-literal", " "], "is empty"),
        (["k"], "is empty"),
        (["k", "--from-literal", "v", "--from-file", "f"], "exclude each other"),
    ],
)
def test_a_secret_without_its_parts_is_wrong_usage(run: Run, wire: WireLog, args: list[str], message: str) -> None:
    result = run("secret", "create", *args)

    assert (result.exit_code, wire.sent) == (2, [])
    assert message in result.stderr


def test_secrets_are_listed_as_faas_cli_does(run: Run, wire: WireLog) -> None:
    wire.answer("GET", "/system/secrets", [{"name": "b", "namespace": "x"}, {"name": "a", "namespace": "x"}], [])

    assert run("secret", "list").stdout == "\nNAME\na\nb\n\n"
    assert run("secret", "list").stdout == "No secrets found.\n"


# --- asynchronous calls and readiness ---


def test_what_became_of_a_call_is_shown(run: Run, wire: WireLog) -> None:
    call = {"callId": "c-1", "function": "a.openfaas-fn", "state": "dead", "attempts": 3, "status": None}
    wire.answer("GET", "/async/c-1", call)
    wire.answer("GET", "/async/c-2", 404)
    wire.answer("GET", "/system/async/dead", [call], [])

    assert run("async", "status", "c-1").stdout == (
        "Call id:  c-1\nFunction: a.openfaas-fn\nState:    dead\nAttempts: 3\n"
    )
    assert "knows no call c-2" in run("async", "status", "c-2").stderr
    assert run("async", "dead").stdout.split() == ["CALL", "ID", "FUNCTION", "STATE", "ATTEMPTS", "c-1",
                                                   "a.openfaas-fn", "dead", "3"]  # fmt: skip
    assert run("async", "dead").stdout == "No dead calls.\n"


def test_dead_calls_are_queued_again_each_by_itself(run: Run, wire: WireLog) -> None:
    wire.answer("POST", "/system/async/dead/c-1/retry", 404)
    wire.answer("POST", "/system/async/dead/c-2/retry", 202)

    result = run("async", "retry", "c-1", "c-2")

    assert result.exit_code == 1
    assert "c-1: the gateway knows no call c-1" in result.stderr
    assert result.stdout == "Queued again: c-2\n"


def test_calls_are_cancelled_each_by_itself(run: Run, wire: WireLog) -> None:
    wire.answer("DELETE", "/async-function/c-1", 404)
    wire.answer("DELETE", "/async-function/c-2", 409)
    wire.answer("DELETE", "/async-function/c%2F3", 202)

    result = run("async", "cancel", "c-1", "c-2", "c/3")

    assert result.exit_code == 1
    assert "c-1: the gateway knows no call c-1" in result.stderr
    assert "c-2: " in result.stderr
    assert result.stdout == "Cancelled: c/3\n"


def test_ready_waits_for_the_gateway_or_for_a_function(run: Run, wire: WireLog) -> None:
    wire.answer("GET", "/healthz", 503, 200)
    wire.answer("GET", "/system/function/a", 404, {"name": "a", "availableReplicas": 0}, {"availableReplicas": 2})

    gateway = run("ready", "--interval", "1ms")
    function = run("ready", "a", "--interval", "1ms", "--attempts", "3")

    assert gateway.stdout == ("[1/60] Waiting for gateway\n[2/60] Waiting for gateway\nGateway is ready\n")
    assert function.stdout.splitlines()[-2:] == ["[3/3] Waiting for function a", "Function a is ready"]


def test_ready_gives_up(run: Run, wire: WireLog) -> None:
    wire.answer("GET", "/healthz", 502)

    result = run("ready", "--interval", "1ms", "--attempts", "2")

    assert result.exit_code == 1
    assert "the gateway is not ready after 2 attempts" in result.stderr
    assert run("ready", "-g", "http://127.0.0.1:9", "--attempts", "1").exit_code == 1
