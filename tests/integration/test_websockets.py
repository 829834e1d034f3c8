"""WebSockets through the gateway to functions that speak them, with a client and functions of the same library."""

import asyncio
import contextlib
import json
import signal
import socket
import textwrap
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from tests.files import sha256, tar_of
from tests.integration.conftest import ECHO, HTTP, LIMIT_S, Peak, Platform, until
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as connect_sync

SERVER = """
    import asyncio, http, json, os, signal
    from websockets.asyncio.server import serve

    async def talk(connection):
        path = connection.request.path.partition("?")[0]
        if path == "/seen":
            headers = [[name.lower(), value] for name, value in connection.request.headers.raw_items()]
            await connection.send(json.dumps({"path": connection.request.path, "headers": headers}))
        elif path == "/goodbye":
            await connection.close(4001, "enough")
        elif path == "/pid":
            await connection.send(str(os.getpid()))
        elif path == "/pieces":
            await connection.send(["one ", "two ", "three"])
        elif path == "/flood":
            for number in range(1000):
                sending = asyncio.ensure_future(connection.send(b"x" * 65536))
                if not (await asyncio.wait([sending], timeout=0.5))[0]:
                    print("held up", flush=True)
                await sending
            print("sent all", flush=True)
        elif path == "/large":
            await connection.send(b"x" * (17 << 20))
        elif path == "/ping":
            await (await connection.ping())
            await connection.send("answered")
        try:
            async for message in connection:
                await connection.send(message)
        finally:
            said = connection.protocol.close_rcvd
            print("closed", said.code if said else 1006, said.reason if said else "", flush=True)

    def answer(connection, request):
        if request.path == "/plain":
            return connection.respond(http.HTTPStatus.OK, "plain")
        if request.path == "/no":
            response = connection.respond(http.HTTPStatus.UNAUTHORIZED, "not you")
            response.headers["X-Why"] = "because"
            return response
        if request.path == "/slow":
            return asyncio.sleep(60)

    def choose(connection, offered):
        return next((each for each in ("chat.v2", "chat.v1") if each in offered), None)

    async def main():
        port = int(os.environ["PORT"])
        async with serve(
            talk, "127.0.0.1", port, select_subprotocol=choose, process_request=answer, max_size=None
        ) as server:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.close)
            await server.wait_closed()

    import logging
    logging.getLogger("websockets").setLevel(logging.CRITICAL)
    asyncio.run(main())
"""


def deploy(platform: Platform, name: str = "talk", **annotations: str) -> str:
    """Deploy SERVER as a bundle of kind server, or update it; return its URL."""
    manifest = {"kind": "server", "template": "test", "command": ["python", "main.py"]}
    texts = {"gpufaas.json": json.dumps(manifest), "function/main.py": textwrap.dedent(SERVER)}
    bundle = tar_of({path: text.encode() for path, text in texts.items()})
    digest = sha256(bundle)
    platform.http.put(f"/system/artifacts/{digest}", content=bundle).raise_for_status()
    asked = {"gpufaas.bundle": digest} | {f"gpufaas.{key.replace('_', '-')}": each for key, each in annotations.items()}
    spec = {"service": name, "image": name, "annotations": asked}
    answer = platform.deploy_spec(spec)
    assert answer.is_success, answer.text
    return url_of(platform, name)


def url_of(platform: Platform, name: str) -> str:
    return f"ws://127.0.0.1:{platform.port}/function/{name}"


def open_(url: str, **options: Any) -> ClientConnection:
    return connect_sync(url, open_timeout=LIMIT_S, close_timeout=LIMIT_S, proxy=None, **options)


def closed(connection: ClientConnection) -> tuple[int, str]:
    """Wait for the end of *connection*; return its code and reason."""
    try:
        while True:
            connection.recv(LIMIT_S)
    except ConnectionClosed as exc:
        return (exc.rcvd.code, exc.rcvd.reason) if exc.rcvd is not None else (1006, "")


def test_messages_go_both_ways_as_text_and_bytes(platform: Platform) -> None:
    url = deploy(platform)

    with open_(url) as connection:
        for message in ("text, ü and 𝄞", b"\x00\xff bytes", "", b"", "x" * 70_000):
            connection.send(message)
            assert connection.recv(LIMIT_S) == message
        assert platform.running() == 1
        assert connection.response.headers["X-Gpufaas-Device"] == "local/cpu:0"

    until(platform.is_idle)


def test_a_connection_is_a_call_in_flight_of_its_namespaces_quota(platform: Platform) -> None:
    url = deploy(platform)
    quota = "/system/namespace/openfaas-fn/quota"
    platform.http.put(quota, json={"maxInFlight": 1}).raise_for_status()
    try:
        with open_(url):
            with pytest.raises(InvalidStatus) as refused:
                open_(url)
            assert platform.http.get(quota).json()["used"]["inFlight"] == 1
        until(lambda: platform.http.get(quota).json()["used"]["inFlight"] == 0)
        with open_(url) as connection:
            connection.send("again")
            assert connection.recv(LIMIT_S) == "again"
    finally:
        platform.http.delete(quota).raise_for_status()

    assert refused.value.response.status_code == 429
    assert refused.value.response.headers["Retry-After"] == "1"


def test_large_messages_and_those_in_pieces_arrive_whole(platform: Platform) -> None:
    url = deploy(platform)
    large = bytes(range(256)) * (12 * 4096)

    with open_(url, max_size=None) as connection:
        connection.send(large)
        assert connection.recv(LIMIT_S) == large
        connection.send([b"a" * 100_000, b"b" * 100_000])
        assert connection.recv(LIMIT_S) == b"a" * 100_000 + b"b" * 100_000
    with open_(f"{url}/pieces") as connection:
        assert connection.recv(LIMIT_S) == "one two three"


def test_the_handshake_arrives_as_it_was_sent(platform: Platform) -> None:
    url = deploy(platform)

    with open_(f"{url}/seen?a=%20b&c", additional_headers={"X-A": "1", "X-Call-Id": "mine"}) as connection:
        seen = json.loads(connection.recv(LIMIT_S))

    headers = dict(seen["headers"])
    assert seen["path"] == "/seen?a=%20b&c"
    assert headers["x-a"] == "1"
    assert headers["x-call-id"] == connection.response.headers["X-Call-Id"] == "mine"
    assert headers["host"] == headers["x-forwarded-host"] == f"127.0.0.1:{platform.port}"
    assert headers["x-forwarded-for"].startswith("127.0.0.1:")
    assert "sec-websocket-extensions" not in headers


def test_the_function_chooses_the_subprotocol(platform: Platform) -> None:
    url = deploy(platform)

    with open_(url, subprotocols=["chat.v1", "other"]) as connection:
        assert connection.subprotocol == "chat.v1"
    with open_(url) as connection:
        assert connection.subprotocol is None


def test_close_codes_go_both_ways(platform: Platform) -> None:
    url = deploy(platform)

    with open_(f"{url}/goodbye") as connection:
        assert closed(connection) == (4001, "enough")
    with open_(url) as connection:
        connection.close(4002, "had enough")

    until(lambda: "closed 4002 had enough" in platform.log("talk"))
    until(platform.is_idle)


def test_a_caller_who_vanishes_is_noticed(platform: Platform) -> None:
    with open_(deploy(platform)) as connection:
        connection.socket.shutdown(socket.SHUT_RDWR)

        until(platform.is_idle)
    until(lambda: "closed 1006" in platform.log("talk"))


def test_pings_are_answered(platform: Platform) -> None:
    url = deploy(platform)

    with open_(f"{url}/ping") as connection:
        assert connection.recv(LIMIT_S) == "answered"
        assert connection.ping().wait(LIMIT_S)


def test_a_slow_reader_holds_the_function_up_and_not_our_memory(platform: Platform) -> None:
    url = deploy(platform)
    with open_(f"{url}/pid") as connection:
        connection.recv(LIMIT_S)
    peak = Peak(platform.pid)

    with open_(f"{url}/flood", max_queue=1) as connection:
        until(lambda: "held up" in platform.log("talk"))
        assert "sent all" not in platform.log("talk")
        for _ in range(1000):
            assert len(connection.recv(LIMIT_S)) == 65536

    assert peak.growth < 20 << 20


def test_a_worker_that_dies_ends_its_connections_with_1011(platform: Platform) -> None:
    with open_(f"{deploy(platform)}/pid") as connection:
        pid = int(connection.recv(LIMIT_S))
        psutil.Process(pid).send_signal(signal.SIGKILL)

        code, reason = closed(connection)

    assert (code, reason) == (1011, "talk broke off without a goodbye")
    until(platform.is_idle)
    with open_(f"ws://127.0.0.1:{platform.port}/function/talk") as connection:
        connection.send("again")
        assert connection.recv(LIMIT_S) == "again"


def test_a_function_that_is_removed_ends_its_connections_with_1001(platform: Platform) -> None:
    with open_(deploy(platform)) as connection:
        platform.remove("talk")

        assert closed(connection)[0] == 1001
    until(platform.is_empty)


def test_after_an_update_callers_are_asked_to_connect_again(platform: Platform) -> None:
    """Or the old revision would live as long as its last caller."""
    with open_(deploy(platform)) as connection:
        deploy(platform, timeout="7s")

        assert closed(connection) == (1012, "talk was updated: connect again")
    until(lambda: "closed 1001" in platform.log("talk"))
    until(platform.is_idle)


def test_a_platform_that_stops_says_1012(make_platform: Callable[..., Platform]) -> None:
    platform = make_platform("--device", "cpu:0=400MiB").start()
    with open_(deploy(platform)) as connection:
        connection.send("x")
        connection.recv(LIMIT_S)
        platform.signal(signal.SIGTERM)

        assert closed(connection)[0] == 1012
    assert platform.wait() == 0


def test_a_message_that_is_too_large_is_refused_with_1009(platform: Platform) -> None:
    url = deploy(platform, max_body="1Mi")

    with open_(url) as connection:
        with contextlib.suppress(ConnectionClosed):  # it may be told before it has sent all
            connection.send(b"x" * (2 << 20))
        assert closed(connection) == (1009, "talk takes at most 1 MiB")
    with open_(f"{url}/large", max_size=None) as connection:
        assert closed(connection)[0] == 1009
    until(platform.is_idle)


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/function/nobody", 404, "there is no function 'nobody'"),
        ("/function/echo", 501, "echo does not speak WebSocket"),
        ("/function/talk/plain", 501, "talk answered a WebSocket handshake with 200"),
        ("/function/talk/no", 401, "not you"),
        ("/function/talk/slow", 504, "within 1 s, its time limit"),
        ("/system/functions", 400, "WebSockets are for functions"),
        ("/healthz", 400, "WebSockets are for functions"),
        ("/async-function/talk", 400, "WebSockets are for functions"),
    ],
)
def test_what_is_no_websocket_is_refused_in_words(platform: Platform, path: str, status: int, text: str) -> None:
    deploy(platform, timeout="1s" if status == 504 else "60s")
    platform.deploy("echo", ECHO, HTTP)

    with pytest.raises(InvalidStatus) as caught:
        open_(f"ws://127.0.0.1:{platform.port}{path}")

    response = caught.value.response
    assert response.status_code == status
    assert text in (response.body or b"").decode()
    assert response.headers.get("X-Why") == ("because" if path.endswith("/no") else None)
    assert (response.headers.get("X-OpenFaaS-Internal") == "gateway") is (not path.endswith("/no"))
    until(platform.is_idle)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /function/talk HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 9000,
        b"GET /function/talk/\xc3\xbc HTTP/1.1\r\nHost: x",
        b"GET /function/talk HTTP/1.1\r\nHost: x\r\nContent-Length: 5",
        b"POST /function/talk HTTP/1.1\r\nHost: x",
    ],
)
def test_a_bad_handshake_is_refused_and_its_connection_closed(platform: Platform, head: bytes) -> None:
    with platform.socket() as sock:
        sock.sendall(
            head + b"\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        answer = b""
        while piece := sock.recv(65536):
            answer += piece

    assert answer.startswith(b"HTTP/1.1 4")


def test_it_is_counted_as_one_call(platform: Platform) -> None:
    with open_(deploy(platform)) as connection:
        for _ in range(5):
            connection.send("x")
            connection.recv(LIMIT_S)
    until(platform.is_idle)

    def counted() -> bool:
        shown = platform.http.get("/metrics").text
        return 'gateway_function_invocation_total{code="101",function_name="talk.openfaas-fn"} 1.0' in shown

    until(counted)


async def test_connections_that_are_dropped_leave_nothing_behind(platform: Platform) -> None:
    url = await asyncio.to_thread(deploy, platform)
    with open_(url) as first:
        await asyncio.to_thread(first.send, "x")
    await asyncio.to_thread(until, platform.is_idle)
    before = platform.open_files()

    async def drop(number: int) -> None:
        connection = await connect(url, open_timeout=LIMIT_S, proxy=None)
        await connection.send("x" * 1000)
        if number % 3 == 0:
            assert await connection.recv() == "x" * 1000
        if number % 2:
            connection.transport.abort()
        await connection.close()

    for batch in range(4):
        await asyncio.gather(*(drop(batch * 50 + number) for number in range(50)))

    await asyncio.to_thread(until, platform.is_idle)
    await asyncio.to_thread(until, lambda: platform.open_files() <= before + 8)
    assert (await asyncio.to_thread(platform.http.get, "/function/talk/plain")).text == "plain"


def test_plain_calls_go_on_beside_a_connection(platform: Platform) -> None:
    with open_(deploy(platform)) as connection:
        for _ in range(3):
            assert platform.http.get("/function/talk/plain").text == "plain"
            connection.send("x")
            assert connection.recv(LIMIT_S) == "x"
