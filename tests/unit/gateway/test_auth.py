"""Basic auth as in OpenFaaS: every route needs it, except those of a list."""

import base64
import logging
import os
import re
import socket
from pathlib import Path

import pytest
from starlette.responses import Response
from starlette.types import Message
from tests.unit.gateway.conftest import CREDENTIALS, Gateway, raw

from gpufaas_core import peers
from gpufaas_core.errors import InvalidSpec, StorageFailed
from gpufaas_gateway.auth import (
    PUBLIC,
    Credentials,
    WithoutWorkers,
    is_public,
    make_credentials,
    read_credentials,
)
from gpufaas_gateway.openapi import describe

PUBLIC_ROUTES = {"/healthz", "/readyz", "/metrics", "/"}
"""Said here once more, so that a longer list in the code is noticed."""


def basic(pair: bytes) -> str:
    return "Basic " + base64.b64encode(pair).decode()


RIGHT = basic("admin:pass:wörd".encode())


# --- deny by default ---


async def test_every_route_of_the_app_is_guarded_or_listed(gateway: Gateway) -> None:
    await gateway.deployed()
    walked = set()

    for template, methods in describe(gateway.app)["paths"].items():
        path = re.sub(r"{[^}]*}", "echo", template)
        if template in ("/function/{name}", "/async-function/{name}"):
            continue  # not of this app
        for method in methods:
            answer = await gateway.stranger.request(method, path)
            assert (answer.status_code != 401) == (path in PUBLIC_ROUTES), (method, path)
            walked.add(path)

    assert {"/system/functions", "/system/secrets", "/system/status", "/ui/", "/docs"} <= walked
    assert walked >= PUBLIC_ROUTES


@pytest.mark.parametrize(
    "path",
    ["/system/nothing", "/nothing", "/docs/more", "/redoc", "/docs/oauth2-redirect", "/system/telemetry",
     "/healthz/more", "/metricsx", "/function", "/functions/echo", "/FUNCTION/echo", "/async/1", "/ui", "/.env",
     "/oauth/token", "/build", "/publickey"],
)  # fmt: skip
async def test_what_does_not_exist_is_guarded_too(gateway: Gateway, path: str) -> None:
    assert (await gateway.stranger.get(path)).status_code == 401
    assert (await gateway.admin.get(path)).status_code == 404


def test_the_list_of_public_routes_is_this_one() -> None:
    elsewhere = {"/function/*", "/async-function/*"}  # not routes of the management app
    assert {path for _, path in PUBLIC} == PUBLIC_ROUTES | elsewhere
    assert is_public("DELETE", "/function/echo")
    assert is_public("POST", "/async-function/echo")
    assert not is_public("DELETE", "/async-function/1234")
    assert not is_public("GET", "/async-function/1234")
    assert not is_public("POST", "/healthz")


async def test_a_password_is_asked_for_before_the_body_is_read(gateway: Gateway) -> None:
    answer = await gateway.stranger.post("/system/functions", content=b"{")

    assert answer.status_code == 401


# --- the answer, and what opens ---


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (RIGHT, 200),
        (RIGHT.replace("Basic", "basic"), 200),
        (RIGHT.replace("Basic ", "Basic   "), 200),
        (basic(b"admin:wrong"), 401),
        (basic("admin:pass:wörd ".encode()), 401),
        (basic("Admin:pass:wörd".encode()), 401),
        (basic("root:pass:wörd".encode()), 401),
        (basic(b"admin:"), 401),
        (basic(b":"), 401),
        (basic(b""), 401),
        (basic(b"\xff\xfe:\x00"), 401),
        ("Basic", 401),
        ("Basic ", 401),
        ("Basic !!!!", 401),
        ("Basic YQ", 401),
        ("Bearer ", 401),
        ("Bearer", 401),
        ("Bearer abc.def.ghi", 401),
        (RIGHT.replace("Basic", "Bearer"), 401),
        ("Digest username=admin", 401),
        ("", 401),
        ("x" * 100_000, 401),
    ],
)
async def test_only_the_right_password_opens(gateway: Gateway, authorization: str, status: int) -> None:
    answer = await gateway.stranger.get("/system/functions", headers={"Authorization": authorization})

    assert answer.status_code == status


async def test_two_passwords_are_none(gateway: Gateway) -> None:
    """Which of them counts is a matter of taste, and a proxy in front may have another one."""
    headers = [("Authorization", RIGHT), ("Authorization", basic(b"admin:wrong"))]

    assert (await gateway.stranger.get("/system/functions", headers=headers)).status_code == 401


async def test_a_wrong_password_is_logged_without_it(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        await gateway.stranger.get("/system/functions", headers={"Authorization": basic(b"admin:hunter2")})

    assert "auth.refused peer=127.0.0.1" in caplog.text
    assert "hunter2" not in caplog.text
    assert base64.b64encode(b"admin:hunter2").decode() not in caplog.text


def test_the_password_is_not_shown_by_accident() -> None:
    assert "wörd" not in repr(CREDENTIALS)


# --- the files ---


def test_a_first_start_makes_a_password_that_only_its_owner_reads(tmp_path: Path) -> None:
    assert make_credentials(tmp_path / "auth")
    first = read_credentials(tmp_path / "auth")

    assert not make_credentials(tmp_path / "auth")

    assert read_credentials(tmp_path / "auth") == first
    assert first.user == "admin"
    assert len(first.password) >= 40
    assert (tmp_path / "auth").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "auth").iterdir()} == {0o600}


def test_every_platform_has_a_password_of_its_own(tmp_path: Path) -> None:
    make_credentials(tmp_path / "a")
    make_credentials(tmp_path / "b")

    assert read_credentials(tmp_path / "a") != read_credentials(tmp_path / "b")


def test_white_space_around_what_files_hold_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "basic-auth-user").write_text(" boss\r\n")
    (tmp_path / "basic-auth-password").write_text("\n a b \n")

    assert read_credentials(tmp_path) == Credentials("boss", "a b")


@pytest.mark.parametrize(
    ("user", "password", "message"),
    [
        (None, "p", "basic-auth-user cannot be read"),
        ("u", None, "basic-auth-password cannot be read"),
        ("u", " \n", "basic-auth-password is empty"),
        ("a:b", "p", "cannot have a ':'"),
    ],
)
def test_half_a_password_does_not_start(tmp_path: Path, user: str | None, password: str | None, message: str) -> None:
    for name, text in (("user", user), ("password", password)):
        if text is not None:
            (tmp_path / f"basic-auth-{name}").write_text(text)

    with pytest.raises(InvalidSpec, match=message):
        read_credentials(tmp_path)


def test_a_directory_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(StorageFailed, match="--auth-dir"):
        make_credentials(tmp_path / "file" / "auth")


# --- paths ---


@pytest.mark.parametrize(
    ("path", "location"),
    [
        ("//system/functions", "/system/functions"),
        ("/system//functions", "/system/functions"),
        ("/system/../healthz", "/healthz"),
        ("/system/./functions?namespace=a%20b", "/system/functions?namespace=a%20b"),
        ("/../../healthz", "/healthz"),
        ("/system/namespace//", "/system/namespace/"),
        ("/%2e%2e/healthz", "/healthz"),
        ("//evil.example/x", "/evil.example/x"),
        ("///evil.example/..", "/"),
        ("//function/echo", "/function/echo"),
        ("//a%0d%0aSet-Cookie:%20x", "/a%0D%0ASet-Cookie:%20x"),
    ],
)
async def test_unclean_paths_are_sent_on_to_the_clean_one(gateway: Gateway, path: str, location: str) -> None:
    answer = await raw(gateway.guarded, "GET", path)

    assert (answer.status_code, answer.headers["location"]) == (301, location)


@pytest.mark.parametrize("path", ["/.well-known/x", "/...", "/system/namespace/"])
async def test_clean_paths_are_left_alone(gateway: Gateway, path: str) -> None:
    assert (await gateway.stranger.get(path)).status_code == 401


@pytest.mark.parametrize("path", ["/system/function/a%2Fb", "/system/function/a%5cb", "/system/function/a%00"])
async def test_encoded_slashes_and_nul_are_refused(gateway: Gateway, path: str) -> None:
    answer = await raw(gateway.guarded, "GET", path, Authorization=RIGHT)

    assert answer.status_code == 400
    assert "encoded slash" in answer.text


async def test_a_path_that_only_looks_like_a_functions_reaches_nothing(gateway: Gateway) -> None:
    """Decoded it begins with /function/, raw it does not: no function is called, and no guarded route is reached."""
    for path in ("/%66unction/../system/functions", "/%66unction/echo"):
        assert (await raw(gateway.guarded, "GET", path)).status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/system/functions", 403),
        ("GET", "/metrics", 403),
        ("GET", "/ui/", 403),
        ("GET", "/nothing", 403),
        ("GET", "/healthz", 200),
        ("GET", "/readyz", 200),
        ("OPTIONS", "/async-function/a", 200),
    ],
)
async def test_a_worker_gets_public_routes_without_metrics_and_nothing_with_the_password(
    method: str, path: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "WORKERS", range(os.geteuid(), os.geteuid() + 1))
    app = WithoutWorkers(Response("answered"))
    said: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        said.append(message)

    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()) as end:
        ends = {"client": end.getsockname(), "server": end.getpeername()}
        await app({"type": "http", "method": method, "path": path, "headers": [], **ends}, receive, send)

    assert said[0]["status"] == status
