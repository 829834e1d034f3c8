"""`gpufaas secret` where it is more than one request: a folder of secrets. Logins for registries."""

import base64
import json
from pathlib import Path

import pytest
from tests.unit.cli.conftest import Run
from tests.unit.cli.wire_log import Reply, WireLog


def write(folder: Path, **files: bytes) -> None:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("_", "-")).write_bytes(content)


# --- apply ---


def test_every_file_becomes_a_secret_and_what_is_there_is_updated(run: Run, wire: WireLog, here: Path) -> None:
    wire.answer("GET", "/system/secrets", [{"name": "old", "namespace": "dev"}])
    write(here / ".secrets", new=b" abc\n", old=b"\xff\x00", **{".gitkeep": b""})
    (here / ".secrets/folder").mkdir()

    result = run("secret", "apply", "-n", "dev")

    assert result.exit_code == 0, result.output
    assert wire.requests() == [
        ("GET", "/system/secrets?namespace=dev"), ("POST", "/system/secrets"), ("PUT", "/system/secrets"),
    ]  # fmt: skip
    assert [each.json for each in wire.sent if each.method != "GET"] == [
        {"name": "new", "namespace": "dev", "value": "abc", "rawValue": base64.b64encode(b" abc\n").decode()},
        {"name": "old", "namespace": "dev", "rawValue": base64.b64encode(b"\xff\x00").decode()},
    ]
    assert "Creating secret: new.dev\nCreated: 200 OK\nUpdating secret: old.dev\nUpdated: 200 OK\n" in result.output
    assert "abc" not in result.output


def test_one_that_cannot_be_applied_does_not_stop_the_others(run: Run, wire: WireLog, here: Path) -> None:
    wire.answer("GET", "/system/secrets", [])
    wire.answer("POST", "/system/secrets", Reply(507, b"disk full"), 201)
    write(here / ".secrets", a=b"1", b=b"2", empty=b" \n", Bad=b"3")

    result = run("secret", "apply")

    assert result.exit_code == 1
    assert [each.json["name"] for each in wire.sent if each.method == "POST"] == ["a", "b"]
    assert ".secrets/a: disk full" in result.stderr
    assert ".secrets/empty: the value of empty is empty" in result.stderr
    assert ".secrets/Bad: 'Bad' is not the name of a secret" in result.stderr
    assert result.stderr.endswith("gpufaas: 3 of 4 secrets not applied: Bad, a, empty\n")


def test_without_a_folder_or_files_it_is_said(run: Run, wire: WireLog, here: Path) -> None:
    missing = run("secret", "apply")
    (here / ".secrets").mkdir()
    empty = run("secret", "apply")

    assert (missing.exit_code, "it should have a file for each secret" in missing.stderr) == (1, True)
    assert (empty.exit_code, empty.stdout) == (0, "No secrets found in .secrets.\n")
    assert wire.sent == []


# --- logins for registries ---


def test_a_registry_login_is_written_as_docker_reads_it(run: Run, here: Path) -> None:
    first = run("registry-login", "-u", "me", "-s", "--server", "127.0.0.1:5000", data="pass:word\n")
    second = run("registry-login", "--username", "you", "--password-stdin", data="x")

    assert (first.exit_code, first.stdout) == (0, "\nWrote ./credentials/config.json..OK\n")
    assert second.exit_code == 0
    assert json.loads((here / "credentials/config.json").read_text()) == {
        "auths": {
            "127.0.0.1:5000": {"auth": base64.b64encode(b"me:pass:word").decode()},
            "https://index.docker.io/v1/": {"auth": base64.b64encode(b"you:x").decode()},
        }
    }
    assert (here / "credentials/config.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ("-s", "the user is missing"),
        ("-u me -s", "the password is missing"),
        ("-u me", "the password is missing"),
        ("-u me -s --password x", "exclude each other"),
    ],
)
def test_a_registry_login_that_cannot_be_is_refused(run: Run, here: Path, args: str, why: str) -> None:
    result = run("registry-login", *args.split())

    assert (result.exit_code, why in result.stderr) == (2, True)
    assert not (here / "credentials").exists()


def test_a_broken_login_file_is_left_alone(run: Run, here: Path) -> None:
    (here / "credentials").mkdir()
    (here / "credentials/config.json").write_text("[1]")

    result = run("registry-login", "-u", "me", "--password", "x")

    assert (result.exit_code, "is not docker's JSON" in result.stderr) == (1, True)
    assert (here / "credentials/config.json").read_text() == "[1]"


@pytest.mark.parametrize(
    ("command", "request_", "status", "says"),
    [
        ("secret update a --from-literal x", ("PUT", "/system/secrets"), 404, "'gpufaas secret create' makes one"),
        ("secret remove a", ("DELETE", "/system/secrets"), 404, "'gpufaas secret list' shows which there are"),
        ("namespace create dev", ("POST", "/system/namespace/"), 409, "'gpufaas namespace update' changes"),
        ("namespace get dev", ("GET", "/system/namespace/dev"), 404, "'gpufaas namespace list' shows which there are"),
        ("namespace remove dev", ("DELETE", "/system/namespace/dev"), 404, "there is no namespace dev"),
        ("namespace quota dev", ("GET", "/system/namespace/dev/quota"), 404, "there is no namespace dev"),
    ],
)
def test_a_name_that_is_not_there_or_taken_is_told_with_the_command_that_helps(
    run: Run, wire: WireLog, command: str, request_: tuple[str, str], status: int, says: str
) -> None:
    wire.answer(*request_, Reply(status, b"create it with POST", {"X-OpenFaaS-Internal": "gateway"}))

    result = run(*command.split())

    assert result.exit_code == 1
    assert says in result.stderr
    assert "POST" not in result.stderr
