"""The remote builder's two routes, as OpenFaaS's clients use them."""

import asyncio
import io
import json
import tarfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.unit.gateway.conftest import CREDENTIALS, Gateway, client_of, is_platform_error
from tests.unit.gateway.fakes import FakeBuilder

from gpufaas_core.errors import InvalidSpec
from gpufaas_core.remote_build import BuildConfig, Signer
from gpufaas_core.sealing import make_keys, seal
from gpufaas_gateway.auth import CleanPaths, Guard
from gpufaas_gateway.builds import Builds, BuildSettings, build_routes

SECRET = b"payload-secret"
KEYS = make_keys()
LIMIT = 1 << 20
CONFIG: dict[str, Any] = {"image": "me/fn:0.1", "buildArgs": {"A": "1"}, "platforms": ["linux/amd64"]}
DOCKERFILE = {"Dockerfile": b"FROM x\n"}


def packed(
    config: object = CONFIG, files: dict[str, bytes] = DOCKERFILE, *more: tarfile.TarInfo, **root: bytes
) -> bytes:
    """A tar as OpenFaaS's client makes it: the context first, with its folder, then the configuration."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        folder = tarfile.TarInfo("context")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o700
        tar.addfile(folder)
        named = {f"context/{name}": content for name, content in files.items()}
        if config is not None:
            named["com.openfaas.docker.config"] = config if isinstance(config, bytes) else json.dumps(config).encode()
        for name, content in {**named, **root}.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o4755
            tar.addfile(member, io.BytesIO(content))
        for member in more:
            tar.addfile(member, io.BytesIO(b"x" * member.size) if member.isreg() else None)
    return made.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, link
    return made


def signed(body: bytes, secret: bytes = SECRET) -> dict[str, str]:
    signer = Signer(secret)
    signer.update(body)
    return {"X-Build-Signature": signer.header(), "Content-Type": "application/octet-stream"}


class Site:
    """The routes before a fake builder, behind the password that others need; `client` has none."""

    def __init__(self, gateway: Gateway, spool: Path) -> None:
        self.builder, self.spool = FakeBuilder(), spool
        self.builds = Builds(self.builder, BuildSettings(SECRET + b"\n", KEYS.private, spool, LIMIT))
        gateway.app.include_router(build_routes(self.builds))
        self.client = client_of(CleanPaths(Guard(gateway.app, CREDENTIALS)))

    async def build(self, body: bytes, **headers: str) -> httpx.Response:
        return await self.client.post("/build", content=body, headers={**signed(body), **headers})

    async def streamed(self, body: bytes) -> list[dict[str, Any]]:
        answer = await self.build(body, Accept="application/x-ndjson")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-ndjson")
        return [json.loads(line) for line in answer.text.splitlines()]

    async def failure(self, body: bytes) -> str:
        *_, last = await self.streamed(body)
        assert last["status"] == "failed"
        return str(last["error"])


@pytest.fixture
async def site(gateway: Gateway, tmp_path: Path) -> AsyncIterator[Site]:
    spool = tmp_path / "spool"
    spool.mkdir()
    site = Site(gateway, spool)
    yield site
    await site.builds.close()
    await site.client.aclose()
    assert list(spool.iterdir()) == []
    assert site.builder.running == 0


async def settled(claim: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not claim():
            await asyncio.sleep(0)


async def test_a_signed_context_is_built_and_the_log_comes_line_by_line(site: Site) -> None:
    files = {**DOCKERFILE, "function/handler.py": b"pass", "function/" + "x" * 150: b"long"}

    told = await site.streamed(packed(CONFIG, files))

    assert [(each["status"], each["log"]) for each in told] == [
        ("in_progress", ["step 1"]), ("in_progress", ["step 2"]), ("success", []),
    ]  # fmt: skip
    assert {each["image"] for each in told} == {"me/fn:0.1"}
    assert site.builder.built == [(BuildConfig("me/fn:0.1", {"A": "1"}, ("linux/amd64",)), files, {})]


async def test_without_asking_for_a_stream_there_is_one_object_at_the_end(site: Site) -> None:
    answer = await site.build(packed())

    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"log": ["step 1", "step 2"], "image": "me/fn:0.1", "status": "success", "error": ""}


async def test_a_build_that_fails_is_said_with_the_word_that_clients_know(site: Site) -> None:
    site.builder.failure = InvalidSpec("docker build of me/fn:0.1 failed: no such base")

    assert await site.failure(packed()) == "docker build of me/fn:0.1 failed: no such base"


async def test_secrets_are_unsealed_for_the_builder_only(site: Site) -> None:
    key = (await site.client.get("/publickey")).json()
    assert key == {"key_id": KEYS.public[:8], "algorithm": "nacl/box", "public_key": KEYS.public}

    sealed = seal(key["public_key"], {"npm": b"s3cret"}).encode()
    told = await site.streamed(packed(CONFIG, DOCKERFILE, **{"com.openfaas.secrets": sealed}))

    assert site.builder.built[0][2] == {"npm": b"s3cret"}
    assert "s3cret" not in json.dumps(told)
    other = seal(make_keys().public, {"npm": b"s3cret"}).encode()
    assert "sealed for another one" in await site.failure(packed(CONFIG, DOCKERFILE, **{"com.openfaas.secrets": other}))


@pytest.mark.parametrize("given", [None, "", "sha256=", "sha256=" + "0" * 64, "sha1=" + "0" * 40, "sha256=" + "Z" * 64])
async def test_what_is_not_signed_is_refused(site: Site, given: str | None) -> None:
    headers = {} if given is None else {"X-Build-Signature": given}

    answer = await site.client.post("/build", content=packed(), headers=headers)

    assert (answer.status_code, site.builder.built) == (403, [])
    assert is_platform_error(answer)
    assert "payload secret" in answer.text


async def test_a_signature_is_of_one_secret_and_one_body(site: Site) -> None:
    body = packed()

    for headers, content in ((signed(body, b"another"), body), (signed(body), body + b"\0")):
        assert (await site.client.post("/build", content=content, headers=headers)).status_code == 403
    assert site.builder.built == []


async def test_a_body_over_the_limit_is_refused(site: Site) -> None:
    body = packed(CONFIG, {**DOCKERFILE, "large": b"x" * LIMIT})

    answer = await site.build(body)

    assert answer.status_code == 413
    assert "over 1 MiB" in answer.text


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (member("../out"), "leads out of it"),
        (member("context/../../out"), "leads out of it"),
        (member("/etc/passwd"), "leads out of it"),
        (member("context/link", tarfile.SYMTYPE, "/etc/passwd"), "neither a file nor a directory"),
        (member("context/link", tarfile.LNKTYPE, "context/Dockerfile"), "neither a file nor a directory"),
        (member("context/dev", tarfile.CHRTYPE), "neither a file nor a directory"),
        (member("context/pipe", tarfile.FIFOTYPE), "neither a file nor a directory"),
    ],
)
async def test_a_tar_has_files_and_directories_in_it_and_nothing_else(
    site: Site, bad: tarfile.TarInfo, why: str
) -> None:
    assert why in await site.failure(packed(CONFIG, DOCKERFILE, bad))
    assert site.builder.built == []


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "not a whole tar"),
        (b"no tar at all" * 100, "not a whole tar"),
        (packed(CONFIG, {**DOCKERFILE, "x": b"x" * 4096})[:3000], "not a whole tar"),
        (packed(CONFIG, {"other": b""}), "no context/Dockerfile"),
        (packed(None), "no file com.openfaas.docker.config"),
        (packed(b"{"), "com.openfaas.docker.config"),
        (packed({}), "missing required field `image`"),
        (packed({"image": "--privileged"}), "'--privileged' is not image"),
        (packed({"image": "a b"}), "'a b' is not image"),
        (packed({"image": "x", "buildArgs": {"-o": "1"}}), "'-o' is not the name of a build argument"),
        (packed({"image": "x", "buildArgs": {"a": "\0"}}), "NUL byte"),
        (packed({"image": "x", "platforms": ["--help"]}), "'--help' is not a platform"),
        (packed(CONFIG, DOCKERFILE, **{"com.openfaas.secrets": b"\xff"}), "is not text"),
        (packed(CONFIG, DOCKERFILE, **{"com.openfaas.secrets": b"x" * (LIMIT - 8192)}), "no sealed secrets"),
        (
            packed(CONFIG, DOCKERFILE, **{"com.openfaas.secrets": seal(KEYS.public, {"a,src=/etc": b""}).encode()}),
            "is not the name of a secret",
        ),
    ],
)
async def test_what_cannot_be_built_is_a_failure_that_says_why(site: Site, body: bytes, why: str) -> None:
    assert why in await site.failure(body)
    assert site.builder.built == []


async def test_permissions_stay_but_those_that_give_rights_do_not(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, tarfile.TarInfo] = {}

    async def build(_: object, context: Any, __: object) -> AsyncIterator[str]:
        with tarfile.open(fileobj=context) as tar:
            seen.update({each.name: each for each in tar})
        yield "looked"

    monkeypatch.setattr(site.builder, "build", build)
    await site.streamed(packed())

    assert (seen["Dockerfile"].mode, seen["Dockerfile"].uid) == (0o755, 0)


async def test_builds_wait_for_each_other_and_too_many_are_refused(site: Site) -> None:
    site.builder.gate.clear()
    waiting = [asyncio.create_task(site.build(packed(), Accept="application/x-ndjson")) for _ in range(16)]
    await settled(lambda: site.builder.running and site.builds.begun == 16)

    refused = await site.build(packed())
    site.builder.gate.set()
    answers = await asyncio.gather(*waiting)

    assert (refused.status_code, refused.headers["retry-after"]) == (429, "10")
    assert all(each.text.splitlines()[-1].count('"success"') for each in answers)
    assert "waiting for another build to end" in "".join(each.text for each in answers)
    assert (len(site.builder.built), site.builder.most_at_once) == (16, 1)


async def test_a_builder_that_is_closed_ends_its_builds(site: Site) -> None:
    site.builder.gate.clear()
    building = asyncio.create_task(site.build(packed(), Accept="application/x-ndjson"))
    await settled(lambda: site.builder.running)

    await site.builds.close()

    assert json.loads((await building).text.splitlines()[-1])["error"] == "the platform is stopping: build it again"


async def test_a_platform_that_does_not_build_says_so(gateway: Gateway) -> None:
    gateway.app.include_router(build_routes(None))

    for answer in (await gateway.stranger.post("/build", content=b""), await gateway.stranger.get("/publickey")):
        assert answer.status_code == 404
        assert "serve --builder-secret" in answer.text


async def test_an_empty_payload_secret_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match="payload secret is empty"):
        Builds(FakeBuilder(), BuildSettings(b" \n", KEYS.private, tmp_path, LIMIT))
