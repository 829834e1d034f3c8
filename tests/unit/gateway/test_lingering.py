"""
A caller who is answered before all was read can read the answer: the connection is not reset.

The caller sends more than the kernel's buffers take, and reads only then, as many clients do.
"""

import asyncio
import gc
import socket
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.unit.gateway.conftest import OnLoop, front_of, listening
from tests.waiting import LIMIT_S, eventually

from gpufaas_core.errors import BodyTooLarge, CallCancelled
from gpufaas_gateway.answering import Answer, Early, refusal
from gpufaas_gateway.http import bounds, lingering
from gpufaas_gateway.http.bounded_websocket import BoundedWebSocket
from gpufaas_gateway.http.connection import HttpConnection
from gpufaas_gateway.request import Request

MUCH = b"x" * (24 * 1024 * 1024)
WEBSOCKET = (
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers before it reads anything."""
    if scope["type"] == "websocket":
        await receive()
        if scope["path"] == "/broken":
            await send({"type": "websocket.accept"})
            await receive()
            return
        await send({"type": "websocket.http.response.start", "status": 403, "headers": []})
        await send({"type": "websocket.http.response.body", "body": b"no"})
        return
    await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"no"})


async def too_large(*_: object) -> Answer:
    return refusal(BodyTooLarge("no"), [])


class Gateway:
    port: int

    async def ask(self, said: bytes, then: bytes = MUCH, last: bytes = b"") -> bytes:
        """Send all before anything is read, but *last*; return all that is answered."""
        with socket.create_connection(("127.0.0.1", self.port)) as sock:
            sock.settimeout(LIMIT_S)
            return await asyncio.to_thread(self._talk, sock, said, then, last)

    def _talk(self, sock: socket.socket, said: bytes, then: bytes, last: bytes) -> bytes:
        sock.sendall(said)
        sock.sendall(then)
        answer = sock.recv(65_536) if last else b""
        sock.sendall(last)
        while piece := sock.recv(65_536):
            answer += piece
        return answer


@asynccontextmanager
async def opened(run: Any = too_large, http: Any = HttpConnection, app: Any = app) -> AsyncIterator[Gateway]:
    gateway = Gateway()
    async with listening(http, app, BoundedWebSocket, front=front_of(run)) as gateway.port:
        yield gateway


def head(line: str, *headers: str) -> bytes:
    return "\r\n".join([line, "Host: x", *headers, "", ""]).encode()


LENGTH = f"Content-Length: {2 * len(MUCH)}"
REFUSED: dict[str, tuple[bytes, int]] = {
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01" * 20, 400),
    "two hosts": (head("POST / HTTP/1.1", "Host: y", LENGTH), 400),
    "target": (head(f"POST /{'a' * 65_535} HTTP/1.1", LENGTH), 414),
    "head": (b"POST / HTTP/1.1\r\nHost: x\r\na: ", 431),
    "headers": (head("POST / HTTP/1.1", *["a: b"] * 1001, LENGTH), 431),
    "coding": (head("POST / HTTP/1.1", "Transfer-Encoding: gzip"), 501),
    "answered early": (head("POST / HTTP/1.1", "Connection: close", LENGTH), 413),
    "answered early, 1.0": (head("POST / HTTP/1.0", LENGTH), 413),
    "function": (head("POST /function/f HTTP/1.1", "Connection: close", LENGTH), 413),
    "chunk": (head("POST /function/f HTTP/1.1", "Transfer-Encoding: chunked") + b"zz", 400),
    "WebSocket": (head("GET / HTTP/1.1", *WEBSOCKET.decode().split("\r\n")[:-1]), 403),
    "WebSocket's path": (head("GET /\x7f HTTP/1.1", *WEBSOCKET.decode().split("\r\n")[:-1]), 400),
    "WebSocket's frame": (head("GET /broken HTTP/1.1", *WEBSOCKET.decode().split("\r\n")[:-1]), 101),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_caller_who_sends_all_before_it_reads_reads_the_whole_refusal(on_loop: OnLoop, what: str) -> None:
    said, status = REFUSED[what]

    async def test() -> None:
        async with opened() as gateway:
            answer = await gateway.ask(said)

        first, _, rest = answer.partition(b"\r\n\r\n")
        assert first.startswith(b"HTTP/1.1 %d " % status), first
        if status == 101:
            assert rest.startswith((b"\x88",)), "a Close frame"
            assert rest[2:4] == (1002).to_bytes(2, "big"), "which says why"
        else:
            length = int(first.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            assert len(rest) == length, "and nothing behind it"

    on_loop(test())


async def silent(port: int) -> socket.socket:
    """Return a connection that was refused and is not closed by its caller."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setblocking(False)
    async with asyncio.timeout(LIMIT_S):
        assert (await asyncio.get_running_loop().sock_recv(sock, 65_536)).startswith(b"HTTP/1.1 503 ")
    return sock


def is_closed(sock: socket.socket) -> bool:
    """Whether the other end takes nothing more."""
    try:
        sock.send(b"x")
        sock.send(b"x")
    except OSError:
        return True
    return False


def test_a_connection_too_many_is_told_when_to_try_again(on_loop: OnLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "callers_share", lambda: 0)

    async def test() -> None:
        async with opened() as gateway:
            answer = await gateway.ask(b"POST / HTTP/1.1\r\nHost: x\r\n" + LENGTH.encode() + b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nRetry-After: 1\r\n" in answer

    on_loop(test())


def test_callers_who_do_not_close_hold_a_bounded_number_of_connections(
    on_loop: OnLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has sent nothing for the longest time is the first to go: hardly anything comes that would reset it."""
    monkeypatch.setattr(bounds, "callers_share", lambda: 0)
    monkeypatch.setattr(lingering, "lingering_share", lambda: 3)

    async def test() -> None:
        async with opened() as gateway:
            held = [await silent(gateway.port) for _ in range(3)]
            held[0].send(b"GET / HTTP/1.1\r\n\r\n")
            await eventually(lambda: list(lingering._lingering)[2].getpeername() == held[0].getsockname())
            held += [await silent(gateway.port) for _ in range(2)]

            assert len(lingering._lingering) == 3
            assert [each.recv(1) for each in held] == [b""] * 5, "none was reset"
            await eventually(lambda: [is_closed(each) for each in held] == [False, True, True, False, False])
            for each in held:
                each.close()
            await eventually(lambda: not lingering._lingering)

    on_loop(test())


def test_no_caller_is_waited_for_without_end(on_loop: OnLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "callers_share", lambda: 0)
    monkeypatch.setattr(bounds, "REST_S", 0.2)

    async def test() -> None:
        async with opened() as gateway:
            with await silent(gateway.port), await silent(gateway.port) as sends:
                await eventually(lambda: is_closed(sends))
                await eventually(lambda: not lingering._lingering)

    on_loop(test())


def test_a_call_whose_body_breaks_off_is_over_while_its_caller_is_waited_for(on_loop: OnLoop) -> None:
    over = asyncio.Event()

    async def waits(request: Request, *_: object) -> Answer:
        assert request.caller is not None
        try:
            while True:
                await request.caller.receive()
        except CallCancelled:
            over.set()
            raise

    async def test() -> None:
        async with opened(waits) as gateway:
            with socket.create_connection(("127.0.0.1", gateway.port)) as sock:
                sock.sendall(head("POST /function/f HTTP/1.1", "Transfer-Encoding: chunked") + b"zz\r\n")
                async with asyncio.timeout(LIMIT_S):
                    await over.wait()
                assert lingering._lingering
                assert (await asyncio.to_thread(sock.recv, 65_536)).startswith(b"HTTP/1.1 400 ")

    on_loop(test())


@pytest.mark.parametrize("what", ["no HTTP", "function"])
def test_a_connection_that_was_waited_for_leaves_nothing_for_the_garbage_collector(on_loop: OnLoop, what: str) -> None:
    made: list[weakref.ref[HttpConnection]] = []

    class Seen(HttpConnection):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            made.append(weakref.ref(self))

    async def test() -> None:
        async with opened(http=Seen) as gateway:
            gc.collect()
            gc.disable()
            try:
                await gateway.ask(REFUSED[what][0])
                await eventually(lambda: made[0]() is None)
            finally:
                gc.enable()

    on_loop(test())


@pytest.mark.parametrize("behind", [b"no HTTP\r\n\r\n", head("POST / HTTP/1.1", "Host: y", LENGTH)])
@pytest.mark.parametrize("path", ["/", "/function/f"])
def test_requests_before_one_that_is_refused_are_answered(on_loop: OnLoop, path: str, behind: bytes) -> None:
    """The refusal was taken for the answer to the first one, or there was none to any of them."""

    async def test() -> None:
        async with opened() as gateway:
            answer = await gateway.ask(2 * head(f"GET {path} HTTP/1.1") + behind)
            assert answer.count(b"HTTP/1.1 413 ") == 2
            assert answer.count(b"HTTP/1.1 ") == 2

    on_loop(test())


@pytest.mark.parametrize("path", ["/", "/function/f"])
def test_a_refusal_is_not_taken_for_the_rest_of_an_answer(on_loop: OnLoop, path: str) -> None:
    """A body broke off after the answer had begun: the refusal of one was the end of the other."""
    length = [(b"content-length", b"500")]

    async def begins(_: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass

    async def run(request: Request, early: Early) -> Answer:
        assert request.caller is not None
        early(Answer(200, length, b"begun"))
        while True:
            await request.caller.receive()

    async def test() -> None:
        async with opened(run, app=begins) as gateway:
            answer = await gateway.ask(head(f"POST {path} HTTP/1.1", "Transfer-Encoding: chunked"), b"", b"zz\r\n")
            assert answer.endswith(b"\r\n\r\nbegun")

    on_loop(test())
