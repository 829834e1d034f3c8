"""Where callbacks may go, and that they go there and nowhere else."""

import asyncio
import ipaddress
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from gpufaas_async_calls.callbacks import CallbackFailed, CallbackRefused, HttpCallbacks, why_not
from gpufaas_core.errors import InvalidSpec

Answering = Callable[[bytes], bytes]


class Receiver:
    """An HTTP server of one answer for each request; `requests` has head and body as they came."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self.answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
        self.connections = 0

    async def __aenter__(self) -> "Receiver":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/hook?a=1"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = next(
                    int(line.partition(b":")[2])
                    for line in head.split(b"\r\n")
                    if line.lower().startswith(b"content-length")
                )
                self.requests.append(head + await reader.readexactly(size))
                writer.write(self.answer)
        except asyncio.IncompleteReadError:
            writer.close()


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with Receiver() as made:
        yield made


@pytest.fixture
async def callbacks() -> AsyncIterator[HttpCallbacks]:
    made = HttpCallbacks("gpufaas/1", allow_local=True)
    yield made
    await made.close()


def resolving_to(*addresses: str) -> Callable[[str, int, int], Awaitable[list[tuple[int, str]]]]:
    async def resolve(_host: str, _port: int, _family: int = 0) -> list[tuple[int, str]]:
        return [(socket.AF_INET6 if ":" in each else socket.AF_INET, each) for each in addresses]

    return resolve


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.9.9.9", "0.0.0.0", "0.1.2.3", "169.254.169.254", "224.0.0.1", "240.0.0.1", "255.255.255.255",
        "::1", "::", "fe80::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::7f00:1",
        "2002:7f00:1::", "::127.0.0.1", "fd00:ec2::254", "100.100.100.200",
    ],
)  # fmt: skip
def test_addresses_of_this_machine_and_its_link_are_refused(address: str) -> None:
    assert why_not(ipaddress.ip_address(address)) is not None


@pytest.mark.parametrize(
    "address", ["93.184.216.34", "10.1.2.3", "192.168.0.9", "172.16.0.1", "2606:4700::1", "fd12::1"]
)
def test_public_and_private_addresses_are_allowed(address: str) -> None:
    """Receivers usually are in the network of the cluster."""
    assert why_not(ipaddress.ip_address(address)) is None


@pytest.mark.parametrize(
    "url",
    [
        "", "receiver", "//receiver/", "ftp://receiver/", "file:///etc/passwd", "gopher://receiver/", "http://",
        "http:///path", "http://receiver:99999/", "http://receiver:x/", "http://[::1", "http://re ceiver/",
        "http://receiver/\r\nX-Evil: 1", "http://receiver/\x00", "http://récepteur/", "http://r/" + "x" * 5000,
    ],
)  # fmt: skip
def test_what_is_no_http_url_is_refused_when_the_call_comes(url: str) -> None:
    with pytest.raises(InvalidSpec, match="X-Callback-Url"):
        HttpCallbacks("gpufaas/1", allow_local=True).check(url)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8080/", "http://[::1]/", "https://localhost/", "http://LOCALHOST./", "http://0.0.0.0/",
            "http://user@169.254.169.254/latest", "http://[::ffff:127.0.0.1]/", "http://[fe80::1%25eth0]/"],
)  # fmt: skip
def test_addresses_that_are_not_allowed_are_refused_when_the_call_comes_unless_the_operator_allows(url: str) -> None:
    with pytest.raises(InvalidSpec, match="--allow-local-callbacks"):
        HttpCallbacks("gpufaas/1", allow_local=False).check(url)
    HttpCallbacks("gpufaas/1", allow_local=True).check(url)


def test_names_are_taken_as_they_are_until_they_are_resolved() -> None:
    HttpCallbacks("gpufaas/1", allow_local=False).check("https://receiver.example:8443/a?b=c")


@pytest.mark.parametrize(
    "url",
    [
        "http://gateway.openfaas:8080/function/f?a=1", "http://gateway:8080/function/f?a=1",
        "http://Gateway.openfaas.svc.cluster.local:8080/function/f?a=1", "http://gateway.openfaas:OWN/function/f?a=1",
        "http://user:secret@gateway.openfaas.svc:8080/function/f?a=1#b", "http://127.0.0.1:OWN/function/f?a=1",
        "http://localhost:OWN/function/f?a=1", "http://gateway.openfaas:8080/from/token/function/f?a=1",
        "http://gateway:8080/async-function/f/%2e%2E/a//b/../../../system/functions?a=%20",
    ],
)  # fmt: skip
async def test_a_function_of_this_gateway_is_called_whatever_its_gateway_is_called(
    receiver: Receiver, url: str
) -> None:
    """Functions chain others by names that OpenFaaS's gateway has, which do not resolve: nothing arrived."""
    callbacks = HttpCallbacks("gpufaas/1", gateway=f"http://127.0.0.1:{receiver.port}")
    url = url.replace("OWN", str(receiver.port))
    callbacks.check(url)

    await callbacks.deliver(url, [], b"answer")

    target = re.sub(r"^http://[^/]*(/from/token)?|#b$", "", url)
    assert receiver.requests[0].startswith(f"POST {target} HTTP/1.1\r\n".encode()), "never below /system/"
    assert b"uthorization" not in receiver.requests[0], "the gateway's password is not for functions"
    await callbacks.close()


@pytest.mark.parametrize(
    "url",
    [
        "http://gateway.openfaas:8080/system/functions", "http://gateway.openfaas:8080/function", "http://gateway/function/f",
        "https://gateway.openfaas:8080/function/f", "http://gateway.openfaas:9090/function/f",
        "http://gateway.example:8080/function/f", "http://gateway.openfaas:8080/from/token/../system/functions",
        "http://gateway:8080@other.example:8080/function/f", "http://gateway.openfaas.:8080/function/f", "http://gateway:8080//function/f",
        "http://gateway:8080/%66unction/f", "http://gateway:8080/from/a/from/b/function/f",
        "http://gateway:8080?/function/f", "http://gateway:8080#/function/f",
    ],
)  # fmt: skip
async def test_all_else_is_as_far_away_as_its_address(receiver: Receiver, url: str) -> None:
    callbacks = HttpCallbacks(
        "gpufaas/1", gateway=f"http://127.0.0.1:{receiver.port}", resolver=resolving_to("127.0.0.1")
    )

    with pytest.raises(CallbackRefused, match="is loopback, where callbacks must not go"):
        await callbacks.deliver(url, [], b"x")

    with pytest.raises(InvalidSpec):
        callbacks.check(f"http://127.0.0.1:{receiver.port}/system/functions")
    assert receiver.connections == 0
    await callbacks.close()


async def test_callers_who_name_ever_more_hosts_do_not_fill_the_memory() -> None:
    """The answer for each is kept for a minute: with 30,000 of them, each further 202 took 5 ms of the gateway."""
    asked: list[str] = []

    async def resolve(host: str, _port: int, _family: int = 0) -> list[tuple[int, str]]:
        asked.append(host)
        raise OSError("Name or service not known")

    callbacks = HttpCallbacks("gpufaas/1", resolver=resolve)

    doubts = [await callbacks.doubt(f"http://r{each}.example/", lambda _: None) for each in range(2000)]

    assert len(asked) == len([each for each in doubts if each]) < 1000
    assert doubts[0] == await callbacks.doubt("http://r0.example/", lambda _: None) != ""
    await callbacks.close()


async def test_body_and_headers_arrive(receiver: Receiver, callbacks: HttpCallbacks) -> None:
    headers = [(b"content-type", b"text/x"), (b"X-Call-Id", b"7"), (b"set-cookie", b"a"), (b"set-cookie", b"b")]

    await callbacks.deliver(receiver.url, headers, b"answer")
    await callbacks.deliver(receiver.url, [], b"")

    head, _, body = receiver.requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /hook?a=1 HTTP/1.1\r\n")
    assert body == b"answer"
    lines = head.split(b"\r\n")
    for line in (
        b"content-type: text/x",
        b"X-Call-Id: 7",
        b"set-cookie: a",
        b"set-cookie: b",
        b"User-Agent: gpufaas/1",
    ):
        assert line in lines
    assert receiver.connections == 1, "the connection is kept"


async def test_a_body_in_a_file_arrives(receiver: Receiver, callbacks: HttpCallbacks, tmp_path: Path) -> None:
    file = tmp_path / "body"
    file.write_bytes(b"x" * 300_000)

    await callbacks.deliver(receiver.url, [], file)

    assert receiver.requests[0].partition(b"\r\n\r\n")[2] == b"x" * 300_000


@pytest.mark.parametrize("status", [500, 503, 429, 408])
async def test_a_receiver_in_trouble_is_tried_again(receiver: Receiver, callbacks: HttpCallbacks, status: int) -> None:
    receiver.answer = b"HTTP/1.1 %d No\r\nContent-Length: 0\r\n\r\n" % status

    with pytest.raises(CallbackFailed, match=f"answered {status}"):
        await callbacks.deliver(receiver.url, [], b"x")


@pytest.mark.parametrize("status", [301, 307, 400, 404])
async def test_a_receiver_that_says_no_is_not(receiver: Receiver, callbacks: HttpCallbacks, status: int) -> None:
    receiver.answer = b"HTTP/1.1 %d No\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n" % (status, receiver.url.encode())

    with pytest.raises(CallbackRefused, match=f"answered {status}"):
        await callbacks.deliver(receiver.url, [], b"x")

    assert len(receiver.requests) == 1


async def test_a_receiver_that_is_not_there_is_tried_again(callbacks: HttpCallbacks) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))

        with pytest.raises(CallbackFailed, match=r"http://127\.0\.0\.1"):
            await callbacks.deliver(f"http://user:secret@127.0.0.1:{taken.getsockname()[1]}/token", [], b"x")


async def test_no_failure_shows_the_secrets_of_its_url(callbacks: HttpCallbacks, receiver: Receiver) -> None:
    receiver.answer = b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n"

    with pytest.raises(CallbackRefused) as caught:
        await callbacks.deliver(f"http://user:secret@127.0.0.1:{receiver.port}/token?key=hidden", [], b"x")

    assert not any(secret in str(caught.value) for secret in ("secret", "token", "hidden"))


async def test_the_connection_goes_to_the_address_that_was_looked_at(receiver: Receiver) -> None:
    """Resolved once: a second answer of the name server's would not be asked for."""
    asked: list[str] = []

    async def resolve(host: str, _port: int, _family: int = 0) -> list[tuple[int, str]]:
        asked.append(host)
        return [(socket.AF_INET, "127.0.0.1")]

    callbacks = HttpCallbacks("gpufaas/1", allow_local=True, resolver=resolve)

    await callbacks.deliver(f"http://receiver.example:{receiver.port}/", [], b"x")

    assert asked == ["receiver.example"]
    assert b"Host: receiver.example" in receiver.requests[0]
    await callbacks.close()


@pytest.mark.parametrize("addresses", [("127.0.0.1",), ("93.184.216.34", "::1"), ("169.254.169.254", "10.0.0.1")])
async def test_a_name_with_any_address_that_is_not_allowed_is_refused(
    receiver: Receiver, addresses: tuple[str, ...]
) -> None:
    callbacks = HttpCallbacks("gpufaas/1", resolver=resolving_to(*addresses))

    with pytest.raises(CallbackRefused, match=r"receiver\.example is .*must not go"):
        await callbacks.deliver(f"http://receiver.example:{receiver.port}/", [], b"x")

    assert receiver.connections == 0
    await callbacks.close()


@pytest.mark.parametrize("host", ["127.1", "2130706433", "0x7f.1", "localhost"])
async def test_odd_spellings_of_loopback_are_refused(receiver: Receiver, host: str) -> None:
    callbacks = HttpCallbacks("gpufaas/1")

    with pytest.raises((CallbackRefused, CallbackFailed)):
        await callbacks.deliver(f"http://{host}:{receiver.port}/", [], b"x")

    assert receiver.connections == 0
    await callbacks.close()
