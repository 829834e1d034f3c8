"""Passwords, namespaces and secrets on the real platform, and requests that only a raw socket can send."""

import contextlib
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from tests.integration.conftest import HTTP, LIMIT_S, Platform, until

READER = """
    import os

    def handle(event, context):
        root = os.environ.get("secret_mount_path", "")
        if not root:
            return {"statusCode": 200, "body": "none"}
        files = {name: open(os.path.join(root, name)).read() for name in sorted(os.listdir(root))}
        modes = sorted({oct(os.stat(os.path.join(root, name)).st_mode & 0o777) for name in files})
        return {"statusCode": 200, "body": {"files": files, "modes": modes}}
"""
ECHO = """
    def handle(event, context):
        return {"statusCode": 200, "body": event.body}
"""


@pytest.fixture(scope="module")
def platform(module_platform: Callable[..., Platform]) -> Platform:
    running = module_platform("--auth", "on", "--device", "cpu:0=1GiB").start()
    password = (running.data / "auth" / "basic-auth-password").read_text()
    running.http.auth = ("admin", password)
    return running


def deploy(platform: Platform, name: str, source: str, **fields: object) -> str:
    built = platform.build(name, source, HTTP)
    sent = platform.http.put(f"/system/artifacts/{built.digest}", content=built.bundle_tar.read_bytes())
    assert sent.status_code == 201
    annotations = {"gpufaas.bundle": built.digest, **fields.pop("annotations", {})}  # type: ignore[call-overload]
    body = {"service": name, "image": f"{name}:1", "annotations": annotations, **fields}
    answer = platform.deploy_spec(body)
    assert answer.status_code in (200, 202), answer.text
    return f"/function/{name}.{fields.get('namespace', 'openfaas-fn')}"


def test_the_password_is_in_a_file_and_nowhere_else(platform: Platform) -> None:
    path = platform.data / "auth" / "basic-auth-password"
    until(lambda: "ready in" in platform.said())

    assert path.stat().st_mode & 0o777 == 0o600
    assert str(path) in platform.said()
    assert path.read_text() not in platform.said()


def test_the_cli_of_this_user_needs_no_login_and_that_of_faas_cli_is_printed(platform: Platform) -> None:
    command = [sys.executable, "-m", "gpufaas_cli", "list", "-g", platform.url]

    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    file = platform.data / "auth" / "basic-auth-password"
    assert f"cat {file} | faas-cli login -u admin --password-stdin -g {platform.url}" in platform.said()


AS_WORKER = """
    import base64, encodings.idna, os, socket, sys
    uid, port, user_password, path, waits = sys.argv[1:]
    os.setresgid(int(uid), int(uid), int(uid)); os.setresuid(int(uid), int(uid), int(uid))
    sock = socket.create_connection(("127.0.0.1", int(port)))
    basic = base64.b64encode(user_password.encode()).decode()
    sock.sendall(f"PUT {path} HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\nContent-Length: 19\\r\\n"
                 f"Authorization: Basic {basic}"
                 "\\r\\n\\r\\n{\\"maxFunctions\\": 9}".encode())
    if waits == "waits":
        print(b"".join(iter(lambda: sock.recv(65_536), b"")).decode())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a worker's user")
def test_a_worker_is_refused_even_with_the_password_and_if_it_leaves_at_once(platform: Platform) -> None:
    quota = "/system/namespace/openfaas-fn/quota"
    pair = ":".join(("admin", (platform.data / "auth" / "basic-auth-password").read_text()))

    def ask(uid: int, waits: str) -> str:
        command = [sys.executable, "-c", textwrap.dedent(AS_WORKER), str(uid), str(platform.port), pair, quota, waits]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    until(lambda: "ready in" in platform.said())
    range_ = re.search(r"isolation .* (\d+)-\d+$", platform.said(), re.MULTILINE)
    worker = int(range_[1]) + 3 if range_ else 1_900_000_003
    before = platform.http.get(quota).json()
    refused = ask(worker, "waits")

    assert refused.startswith("HTTP/1.1 403 "), refused
    assert "functions cannot use this route" in refused
    until(lambda: not ask(worker, "leaves") and platform.said().count("worker.refused") > 1)  # one line a second
    assert platform.http.get(quota).json() == before
    assert ask(65534, "waits").startswith("HTTP/1.1 202 "), "with the password, another user of this machine may"
    assert platform.http.get(quota).json() != before
    platform.http.request("DELETE", quota).raise_for_status()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_nobody_of_the_same_user_looks_into_the_memory_of_the_platform(platform: Platform) -> None:
    """A function that is no root shares the platform's uid: the password is in that memory."""
    assert Path(f"/proc/{os.getpid()}/mem").stat().st_uid == os.geteuid()
    dropped = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "cat"]

    for name in ("environ", "maps", "mem"):
        looked = subprocess.run([*dropped, f"/proc/{platform.pid}/{name}"], capture_output=True, text=True, check=False)
        assert "Permission denied" in looked.stderr, name


def test_management_needs_the_password_and_calls_do_not(platform: Platform) -> None:
    path = deploy(platform, "echo", ECHO)

    with httpx.Client(base_url=platform.url, timeout=LIMIT_S, trust_env=False) as stranger:
        refused = [stranger.get(each) for each in ("/system/functions", "/docs", "/system/status", "/nothing")]
        called = stranger.post(path, content=b"hello")
        healthy = stranger.get("/healthz")

    assert {each.status_code for each in refused} == {401}
    assert (called.status_code, called.content, healthy.status_code) == (200, b"hello", 200)


def test_functions_live_in_namespaces(platform: Platform) -> None:
    assert platform.http.post("/system/namespace/", json={"name": "dev"}).status_code == 201
    path = deploy(platform, "twin", ECHO, namespace="dev")

    assert platform.call(path, b"x").content == b"x"
    assert platform.call("/function/twin", b"x").status_code == 404
    assert platform.http.delete("/system/namespace/dev").status_code == 409


def test_a_function_reads_its_secrets_as_files_and_sees_updates(platform: Platform) -> None:
    for name, value in (("key", "first"), ("other", "not yours")):
        assert platform.http.post("/system/secrets", json={"name": name, "value": value}).status_code == 201
    path = deploy(platform, "reader", READER, secrets=["key"])
    before = platform.call(path).json()

    assert platform.http.put("/system/secrets", json={"name": "key", "value": "second"}).status_code == 202
    after = platform.call(path)

    assert before == {"files": {"key": "first"}, "modes": ["0o600"]}
    assert after.json()["files"] == {"key": "second"}
    assert after.headers["x-gpufaas-start"] == "hit"  # the same worker: nothing was deployed again


def test_values_are_on_disk_in_files_of_their_own_only(platform: Platform) -> None:
    value = "a-value-to-search-for"
    platform.http.post("/system/secrets", json={"name": "searched", "value": value})
    path = deploy(platform, "searcher", READER, secrets=["searched"])
    platform.call(path)

    found = []
    for each in (Path(folder, name) for folder, _, names in os.walk(platform.data) for name in names):
        with contextlib.suppress(FileNotFoundError):  # the database removes its journals at any time
            if each.is_file() and value.encode() in each.read_bytes():
                found.append(each)

    assert {each.parent.parent.name for each in found} == {"secrets", "secret-mounts"}
    assert value not in platform.said()

    platform.http.request("DELETE", "/system/functions", json={"functionName": "searcher"})
    until(lambda: not list((platform.data / "secret-mounts").glob("searcher*")), "the mount goes with its function")


@pytest.mark.parametrize("last", ["check", "layer"])
def test_the_mount_of_a_removed_function_goes_with_whichever_of_its_processes_ends_last(
    platform: Platform, last: str
) -> None:
    """It stayed where that was no worker of calls: the one that had checked the handler, or had its imports."""
    platform.http.post("/system/secrets", json={"name": last, "value": "x"})
    slow_to_end = "import atexit, time\natexit.register(time.sleep, 1)\n" if last == "check" else ""
    preload = {"gpufaas.preload": "colorsys"} if last == "layer" else {}
    path = deploy(platform, f"ends-{last}", slow_to_end + textwrap.dedent(READER), secrets=[last], annotations=preload)
    if last == "layer":
        platform.call(path)
    mounts = platform.data / "secret-mounts"
    assert list(mounts.glob("ends*"))

    removed = platform.http.request("DELETE", "/system/functions", json={"functionName": f"ends-{last}"})

    assert removed.status_code == 202
    until(lambda: not list(mounts.glob("ends*")), "the mount goes with its function")


def test_a_function_without_secrets_has_no_directory(platform: Platform) -> None:
    assert platform.call(deploy(platform, "bare", READER)).text == "none"


# --- the socket ---


@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: +5\r\n",
        b"Content-Length: 5, 5\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"X: a\nTransfer-Encoding: chunked\r\n",
        b"X\0: a\r\n",
    ],
)
def test_a_body_whose_end_is_in_doubt_is_refused(platform: Platform, headers: bytes) -> None:
    """What one server takes for a body and the next one for a request is how requests are smuggled."""
    path = deploy(platform, "echo", ECHO)
    request = f"POST {path} HTTP/1.1\r\nHost: x\r\n".encode() + headers
    body = b"\r\n0\r\n\r\nGET /system/functions HTTP/1.1\r\nHost: x\r\n\r\n"

    answer = platform.exchange(request + body)

    assert re.match(rb"HTTP/1.1 400 |$", answer), answer
    assert platform.call(path, b"well").content == b"well"


@pytest.mark.parametrize("path", ["/function/..%2fsystem%2ffunctions", "/function/a%00b", "/function/%2e%2e/x"])
def test_names_with_tricks_are_no_functions(platform: Platform, path: str) -> None:
    answer = platform.exchange(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())

    assert answer.startswith(b"HTTP/1.1 404 ")


def test_a_missing_password_file_is_one_line(make_platform: Callable[..., Platform], tmp_path: Path) -> None:
    other = make_platform("--auth", "on", "--auth-dir", str(tmp_path / "none"), "--device", "cpu:0=1GiB")
    other.launch()

    assert other.wait() == 2
    assert "basic-auth-user cannot be read" in other.said()


def test_an_endless_head_is_refused(platform: Platform) -> None:
    request = b"GET /function/echo HTTP/1.1\r\nHost: x\r\nX: " + b"a" * (2 << 20)

    with platform.socket() as connection:
        try:
            connection.sendall(request)
            answer = connection.recv(65_536)
        except ConnectionError:
            answer = b""

    assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")
    until(lambda: "request.refused status=431" in platform.said())
