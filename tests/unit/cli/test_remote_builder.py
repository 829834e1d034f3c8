"""`publish` and `up --publish` with a remote builder: what goes over the wire is what OpenFaaS's builder reads."""

import hashlib
import hmac
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result
from tests.unit.cli.wire_log import Reply, WireLog

from gpufaas_core.sealing import make_keys, unseal

Run = Callable[..., Result]

STACK = """\
version: 1.0
provider: {name: openfaas}
functions:
  fn:
    lang: go
    handler: ./fn
    image: me/fn:0.1
    build_args: {A: "1", ADDITIONAL_PACKAGE: curl}
    build_options: [dev]
"""
BUILDER_SAYS = b"""\
{"log":["step 1"],"image":"me/fn:0.1","status":"in_progress"}

{"log":["step 2 ","step 3"],"image":"me/fn:0.1","status":"in_progress","new":"field"}
{"log":null,"image":"me/fn:0.1","status":"success"}
"""


@pytest.fixture(autouse=True)
def project(here: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """There is no docker."""
    monkeypatch.setenv("PATH", str(tmp_path_factory.mktemp("empty")))
    for name, content in {
        "stack.yaml": STACK,
        "template/go/template.yml": "language: go\nbuild_options:\n  - {name: dev, packages: [make]}\n",
        "template/go/Dockerfile": "FROM scratch\n",
        "fn/run.sh": "mine",
        "payload.txt": " payload-secret\n",
    }.items():
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (here / "fn/run.sh").chmod(0o755)
    (here / "fn/link").symlink_to("run.sh")


@pytest.fixture
def builder(wire: WireLog) -> Iterator[WireLog]:
    with WireLog() as builder:
        builder.answer("POST", "/build", Reply(202, BUILDER_SAYS))
        yield builder
    assert not any(each.path.startswith("/build") for each in wire.sent)


def publish(run: Run, builder: WireLog, *more: str) -> Result:
    return run("publish", "--remote-builder", f"{builder.url}/some/path", "--payload-secret", "payload.txt", *more)


def test_the_context_goes_as_a_signed_tar_and_the_log_comes_back(run: Run, builder: WireLog) -> None:
    result = publish(run, builder, "-b", "B=2", "--platforms", "linux/amd64,linux/arm64")

    assert result.exit_code == 0, result.output
    assert result.stderr == "  step 1\n  step 2\n  step 3\n"
    (sent,) = builder.sent
    assert (sent.method, sent.path, sent.headers["accept"]) == ("POST", "/build", "application/x-ndjson")
    assert sent.headers["content-type"] == "application/octet-stream"
    signature = hmac.new(b"payload-secret", sent.body, hashlib.sha256).hexdigest()
    assert sent.headers["x-build-signature"] == f"sha256={signature}"
    with tarfile.open(fileobj=io.BytesIO(sent.body)) as tar:
        members = {each.name: each for each in tar}
        config = json.load(tar.extractfile("com.openfaas.docker.config"))  # type: ignore[arg-type]
        assert tar.extractfile("context/function/link").read() == b"mine"  # type: ignore[union-attr]
    assert config == {
        "image": "me/fn:0.1",
        "buildArgs": {"A": "1", "B": "2", "ADDITIONAL_PACKAGE": "curl make"},
        "platforms": ["linux/amd64", "linux/arm64"],
    }
    assert list(members) == [
        "context", "context/Dockerfile", "context/function", "context/function/link", "context/function/run.sh",
        "context/template.yml", "com.openfaas.docker.config",
    ]  # fmt: skip
    assert members["context/function/run.sh"].mode == 0o755
    assert all(each.isreg() or each.isdir() for each in members.values())


def test_the_same_sources_are_the_same_bytes(run: Run, builder: WireLog) -> None:
    publish(run, builder)
    publish(run, builder)

    first, second = builder.sent
    assert first.body == second.body


def test_up_publishes_there_and_deploys_here(run: Run, builder: WireLog, wire: WireLog) -> None:
    args = ("up", "--publish", "--remote-builder", builder.url, "--payload-secret", "payload.txt")

    assert run(*args).exit_code == 0
    assert run(*args, "--skip-push").exit_code == 0

    configs = [config_of(each.body) for each in builder.sent]
    assert [each.get("skipPush", False) for each in configs] == [False, True]
    assert [each.json["image"] for each in wire.sent if each.method == "PUT"] == ["me/fn:0.1", "me/fn:0.1"]


def test_the_environment_may_name_it_all(run: Run, builder: WireLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENFAAS_REMOTE_BUILDER", builder.url)
    monkeypatch.setenv("OPENFAAS_PAYLOAD_SECRET", "payload.txt")

    assert run("publish").exit_code == 0
    assert len(builder.sent) == 1
    assert "needs docker" in run("up").stderr  # which does not publish, and was not asked to by a flag


@pytest.mark.parametrize("key_from", ["builder", "file", "text"])
def test_build_secrets_are_sealed(run: Run, builder: WireLog, here: Path, key_from: str) -> None:
    (here / "stack.yaml").write_text(STACK + "    build_secrets: {token: ./token.txt}\n")
    (here / "token.txt").write_text("s3cret")
    keys = make_keys()
    builder.answer("GET", "/publickey", {"key_id": "k1", "algorithm": "nacl/box", "public_key": keys.public})
    (here / "key.pub").write_text(keys.public + "\n")
    more = {"builder": (), "file": ("--builder-public-key", "key.pub"), "text": ("--builder-public-key", keys.public)}

    result = publish(run, builder, *more[key_from])

    assert result.exit_code == 0, result.output
    assert [each.path for each in builder.sent] == (["/publickey"] if key_from == "builder" else []) + ["/build"]
    body = builder.sent[-1].body
    assert b"s3cret" not in body
    with tarfile.open(fileobj=io.BytesIO(body)) as tar:
        sealed = tar.extractfile("com.openfaas.secrets").read().decode()  # type: ignore[union-attr]
    assert unseal(keys.private, sealed) == {"token": b"s3cret"}
    assert ("key_id: k1" in sealed) == (key_from == "builder")


def test_a_builder_that_tells_no_key_is_not_sent_secrets(run: Run, builder: WireLog, here: Path) -> None:
    (here / "stack.yaml").write_text(STACK + "    build_secrets: {token: ./token.txt}\n")
    missing = publish(run, builder)
    (here / "token.txt").write_text("s3cret")
    builder.answer("GET", "/publickey", 404)
    none = publish(run, builder)
    builder.answer("GET", "/publickey", {"public_key": "short"})
    wrong = publish(run, builder)

    assert "build secret token: token.txt: No such file or directory" in missing.stderr
    assert "gives no key to seal build secrets for (it answers 404)" in none.stderr
    assert "gives no key to seal build secrets for (it is not a public key" in wrong.stderr
    assert all(each.path == "/publickey" for each in builder.sent)


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (Reply(200, b'{"log":["x"],"status":"failed","error":"no such base"}'), "of me/fn:0.1 failed: no such base"),
        (Reply(200, b'{"status":"failed"}'), "of me/fn:0.1 failed: the builder did not say why"),
        (Reply(200, b'{"log":["x"],"status":"in_progress"}'), "stopped answering before me/fn:0.1 was built"),
        (Reply(200, b""), "stopped answering before me/fn:0.1 was built"),
        (Reply(200, b"<html>"), "sends what is no status of a build: <html>"),
        (Reply(403, b"wrong\nsecret"), "answers 403: wrong secret"),
    ],
)
def test_a_build_that_fails_is_one_line(run: Run, builder: WireLog, reply: Reply, why: str) -> None:
    builder.answer("POST", "/build", reply)

    result = publish(run, builder)

    assert result.exit_code == 1
    (line,) = [each for each in result.stderr.splitlines() if each.startswith("gpufaas: fn: ")]
    assert why in line


@pytest.mark.parametrize(
    ("args", "code", "why"),
    [
        ("publish --remote-builder http://127.0.0.1:9", 2, "needs --payload-secret FILE"),
        ("publish --remote-builder http://127.0.0.1:9 --payload-secret none", 1, "none: No such file"),
        ("publish --remote-builder http://127.0.0.1:9 --payload-secret empty", 1, "empty: it is empty"),
        ("publish --remote-builder ftp://x --payload-secret payload.txt", 1, "is not the URL of a remote builder"),
        ("publish --remote-builder http://127.0.0.1:9 --payload-secret payload.txt", 1, "cannot be reached"),
        (
            "publish --remote-builder http://127.0.0.1:9 --payload-secret payload.txt --extra-tag x", 2,
            "--extra-tag cannot be asked of a remote builder",
        ),
        (
            "publish --remote-builder http://127.0.0.1:9 --payload-secret payload.txt --builder-public-key none", 1,
            "neither base64 of 32 bytes nor a file",
        ),
        ("up --remote-builder http://127.0.0.1:9 --payload-secret payload.txt", 2, "goes with --publish"),
    ],
)  # fmt: skip
def test_what_is_missing_is_said(run: Run, wire: WireLog, here: Path, args: str, code: int, why: str) -> None:
    del wire
    (here / "empty").write_text("\n")

    result = run(*args.split())

    assert (result.exit_code, why in result.stderr) == (code, True), result.stderr


def config_of(body: bytes) -> dict[str, object]:
    with tarfile.open(fileobj=io.BytesIO(body)) as tar:
        found: dict[str, object] = json.load(tar.extractfile("com.openfaas.docker.config"))  # type: ignore[arg-type]
    return found
