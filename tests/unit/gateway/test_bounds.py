"""What a connection may cost before it has sent a request."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.unit.gateway.conftest import listening

from gpufaas_gateway.http import bounds
from gpufaas_gateway.http.bounds import MAX_HEAD, BoundedHttp

LARGE = 32 * 1024 * 1024
"""More than the kernel's buffers between two sockets take."""


@dataclass
class Served:
    """A server on a port of its own; `heads` are the requests that reached the application."""

    port: int = 0
    heads: list[Any] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self.heads.append(scope["headers"])
        body, more = b"", scope["path"] != "/early"
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body")
        self.bodies.append(body)
        if scope["path"] == "/large":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % LARGE)]})
            await send({"type": "http.response.body", "body": b"x" * LARGE})
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def exchange(self, *pieces: bytes, answers: int = 1) -> bytes:
        """Send *pieces*; return what was answered until so many answers came, or the connection was closed."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        answer = b""
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            while answer.count(b"HTTP/1.1 ") < answers or not answer.endswith((b"ok", b"\n")):
                if not (more := await reader.read(65_536)):
                    break
                answer += more
        except ConnectionError:
            pass
        writer.close()
        return answer


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = Served()
    async with listening(BoundedHttp, served.app) as served.port:
        yield served


async def test_a_request_is_answered_and_the_next_one_too(served: Served) -> None:
    request = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"

    assert (await served.exchange(request, request, answers=2)).count(b"200 OK") == 2


@pytest.mark.parametrize("line", [b"GET /", b"GET / HTTP/0.9", b"GET / HTTP/2.0"])
async def test_another_version_is_refused(served: Served, line: bytes) -> None:
    assert b" 400 " in await served.exchange(line + b"\r\nHost: x\r\n\r\n")
    assert served.heads == []


async def test_a_head_may_be_large_but_not_endless(served: Served) -> None:
    large = b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * (MAX_HEAD - 65_536) + b"\r\n\r\n"
    endless = b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * (2 * MAX_HEAD)

    assert b" 200 " in await served.exchange(large)
    assert (await served.exchange(endless)).startswith(b"HTTP/1.1 431 ")
    assert len(served.heads) == 1


async def test_many_small_headers_are_a_large_head(served: Served) -> None:
    lines = b"".join(b"X-%d: a\r\n" % number for number in range(150_000))

    assert (await served.exchange(b"GET / HTTP/1.1\r\nHost: x\r\n" + lines)).startswith(b"HTTP/1.1 431 ")
    assert served.heads == []


async def test_a_head_that_does_not_end_is_given_up(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "HEAD_S", 0.2)
    whole = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"

    first = await served.exchange(b"GET / HTTP/1.1\r\nHost")
    later = await served.exchange(whole, b"GET / HTTP/1.1\r\nHost", answers=2)
    silent = await served.exchange()

    assert first.startswith(b"HTTP/1.1 408 ")
    assert (later.count(b" 200 "), later.count(b" 408 ")) == (1, 1)
    assert silent == b""


async def test_the_rest_of_a_body_that_was_answered_is_not_waited_for(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a client that sends a byte a minute holds the connection for ever, without a password."""
    monkeypatch.setattr(bounds, "REST_S", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\na")

    assert b" 200 " in await asyncio.wait_for(reader.read(), 5)
    writer.close()


@pytest.mark.parametrize("more", [b"b", b"\r\n"])
async def test_a_connection_that_nothing_follows_on_is_closed(served: Served, more: bytes) -> None:
    """Also when the last thing on it was no request: the rest of one, or an empty line."""

    def impatient(config: Any, **given: Any) -> BoundedHttp:
        config.timeout_keep_alive = 0.05
        return BoundedHttp(config=config, **given)

    async with listening(impatient, served.app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(more.strip()))
        answer = await reader.readuntil(b"ok")
        writer.write(more)

        assert b" 200 " in answer
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()


async def test_the_rest_of_a_body_is_taken_and_the_next_request_answered(served: Served) -> None:
    early = b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\na"

    assert (await served.exchange(early, b"bGET / HTTP/1.1\r\nHost: x\r\n\r\n", answers=2)).count(b" 200 ") == 2


async def test_trailers_are_not_kept(served: Served) -> None:
    """They come after the head's bound is passed, and there may be any number of them."""
    request = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n"
    trailers = b"".join(b"X-%d: a\r\n" % number for number in range(1000))

    assert b" 200 " in await served.exchange(request + trailers + b"\r\n")
    assert [[name for name, _ in head] for head in served.heads] == [[b"host", b"transfer-encoding"]]


async def test_what_is_no_http_is_refused_and_logged(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    answer = await served.exchange(
        b"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    )

    assert b" 400 " in answer
    assert "request.refused status=400 peer=127.0.0.1" in caplog.text


async def read_large(served: Served, pause_s: float) -> int:
    """Read a large answer by pieces, with pauses; return how much of it came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    size = 0
    try:
        while piece := await reader.read(8 * 1024 * 1024 if pause_s < 1 else 1):
            size += len(piece)
            await asyncio.sleep(pause_s)
            if pause_s >= 1:
                size += len(await asyncio.wait_for(reader.read(), 5))
    except ConnectionError:
        pass
    writer.close()
    return size


async def test_a_reader_who_does_not_read_is_cut_off(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is complete and its call over: nothing else ends the connection."""
    monkeypatch.setattr(bounds, "READER_S", 0.2)

    assert await read_large(served, pause_s=1.0) < LARGE


@pytest.mark.slow
async def test_a_reader_who_reads_slowly_is_served(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "READER_S", 2.0)

    assert await read_large(served, pause_s=0.02) >= LARGE


SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
CURL = (
    b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1:46475\r\nUser-Agent: curl/7.88.1\r\nAccept: */*\r\n"
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
    b"Content-Length: %d\r\nContent-Type: application/x-www-form-urlencoded\r\n\r\n%s" % (len(SMUGGLED), SMUGGLED)
)
JAVA = (
    b"POST /echo HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nContent-Length: %d\r\nHost: 127.0.0.1:46475\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAAAAYABgAA\r\nUpgrade: h2c\r\n"
    b"User-Agent: Java-http-client/17.0.15\r\n\r\n%s" % (len(SMUGGLED), SMUGGLED)
)
CHUNKED = (
    b"POST /echo HTTP/1.1\r\nHost: x\r\nUpgrade: TLS/1.0\r\nConnection: keep-alive\r\nConnection: upgrade\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(SMUGGLED), SMUGGLED)
)
NEXT = b"GET /next HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("request_", [CURL, JAVA, CHUNKED], ids=["curl", "java", "tls"])
async def test_an_offer_of_another_protocol_is_ignored(
    served: Served, request_: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clients' own bytes, split at every position: the body was lost, or taken for a request of its own."""
    received: list[int] = []
    take = BoundedHttp.data_received

    def data_received(self: BoundedHttp, data: bytes) -> None:
        received.append(len(data))
        take(self, data)

    monkeypatch.setattr(BoundedHttp, "data_received", data_received)
    sent = request_ + NEXT
    for at in range(1, len(sent)):
        for each in (served.bodies, served.heads, received):
            each.clear()
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(sent[:at])
        while sum(received) < at:
            await asyncio.sleep(0)
        writer.write(sent[at:])
        answer = b""
        while answer.count(b"ok") < 2:
            more = await asyncio.wait_for(reader.read(65_536), 5)
            assert more, (at, answer)
            answer += more
        writer.close()

        assert (answer.count(b" 200 OK"), served.bodies) == (2, [SMUGGLED, b""]), at
        names = [name for name, _ in served.heads[0]]
        assert b"upgrade" not in names
        assert b"http2-settings" not in names


async def test_an_offer_of_another_protocol_without_a_body(served: Served) -> None:
    request = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"

    assert (await served.exchange(request + request + NEXT, answers=3)).count(b" 200 OK") == 3


async def test_a_proxy_is_not_played(served: Served) -> None:
    assert b" 400 " in await served.exchange(b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n" + NEXT)
    assert served.heads == []


@pytest.mark.parametrize(("head", "status"), [
    (b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\nhi", 400),
    (b"POST / HTTP/1.1\r\nHost: x\r\nhost: y\r\n\r\n", 400),
    (b"POST / HTTP/1.0\r\nHost: x\r\nHost: x\r\n\r\n", 400),
    (b"POST / HTTP/1.0\r\n\r\n", 200),
    (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: Chunked\r\n\r\n0\r\n\r\n", 200),
    (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
    (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 501),
    (b"POST / HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: upgrade\r\nTransfer-Encoding: a\r\n\r\n", 501),
    (b"GET /" + b"a" * 65_534 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 200),
    (b"GET /" + b"a" * 65_535 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
    (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 999 + b"\r\n", 200),
    (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 100_000 + b"\r\n", 431),
], ids=range(12))  # fmt: skip
async def test_heads_that_nobody_should_send(served: Served, head: bytes, status: int) -> None:
    answer = await served.exchange(head)

    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert len(served.heads) == (status == 200)
