"""A caller who closes only its direction (``nc -N``) gets its answers; one who has left is noticed."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.unit.gateway.conftest import OnLoop, serving
from tests.waiting import LIMIT_S, eventually

from gpufaas_gateway.answering import Answer
from gpufaas_gateway.http.half_closed import _watches
from gpufaas_gateway.request import Request

CALL, OTHER = b"GET /function/echo HTTP/1.%d\r\nHost: x\r\n\r\n", b"GET /other HTTP/1.%d\r\nHost: x\r\n\r\n"
STREAM = b"GET /stream HTTP/1.%d\r\nHost: x\r\n\r\n"


class Served:
    """Function calls and an application that answer when they may, and note who has left."""

    def __init__(self) -> None:
        self.may = asyncio.Event()
        self.begun = self.left = 0

    async def run(self, request: Request, *_: object) -> Answer:
        self.begun += 1
        assert request.caller is not None
        request.caller.on_gone(self._leave)
        await self.may.wait()
        request.caller.on_gone(None)
        return Answer(200, [(b"content-length", b"4")], b"done")

    def _leave(self) -> None:
        self.left += 1
        self.may.set()

    async def app(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        await receive()
        head = [] if scope["path"] == "/stream" else [(b"content-length", b"4")]
        start = {"type": "http.response.start", "status": 200, "headers": head}
        if scope["path"] == "/stream":
            await send(start)
            await send({"type": "http.response.body", "body": b"a piece", "more_body": True})
        self.begun += 1
        may, gone = asyncio.ensure_future(self.may.wait()), asyncio.ensure_future(receive())
        await asyncio.wait((may, gone), return_when=asyncio.FIRST_COMPLETED)
        if not may.done():
            self._leave()
            return
        if scope["path"] != "/stream":
            await send(start)
        await send({"type": "http.response.body", "body": b"done"})
        gone.cancel()


@asynccontextmanager
async def asked(said: bytes, begun: int = 1) -> AsyncIterator[tuple[Served, socket.socket]]:
    """Give a caller whose requests are being answered."""
    served = Served()
    async with serving(served.run, served.app) as port:
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.settimeout(LIMIT_S)
            sock.sendall(said)
            await eventually(lambda: served.begun == begun, "it is being answered")
            yield served, sock


def rest(sock: socket.socket) -> bytes:
    answer = b""
    while piece := sock.recv(65_536):
        answer += piece
    return answer


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("request_", [CALL, OTHER, STREAM], ids=["function", "other", "stream"])
def test_a_caller_who_has_closed_its_direction_gets_its_answer(on_loop: OnLoop, request_: bytes, version: int) -> None:
    async def check() -> None:
        async with asked(request_ % version) as (served, sock):
            sock.shutdown(socket.SHUT_WR)
            first = await asyncio.to_thread(sock.recv, 1)
            served.may.set()
            answer = first + await asyncio.to_thread(rest, sock)
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert answer.endswith(b"7\r\na piece\r\n04\r\ndone\r\n0\r\n\r\n" if request_ is STREAM else b"\r\n\r\ndone")
        assert served.left == 0

    on_loop(check())


@pytest.mark.parametrize(
    "request_", [CALL, OTHER, STREAM, CALL + OTHER], ids=["function", "other", "stream", "one behind it"]
)
def test_a_caller_who_has_left_is_noticed_while_its_answer_is_made(on_loop: OnLoop, request_: bytes) -> None:
    async def check() -> None:
        async with asked(request_.replace(b"%d", b"1")) as (served, sock):
            if request_ is STREAM:
                await asyncio.to_thread(sock.recv, 65_536)  # else it leaves with a reset
            sock.close()
            await eventually(lambda: served.left == 1, "it is noticed")

    on_loop(check())


def test_a_caller_who_half_closed_and_then_left_with_a_reset_is_noticed(on_loop: OnLoop) -> None:
    async def check() -> None:
        async with asked(CALL % 1) as (served, sock):
            sock.shutdown(socket.SHUT_WR)
            await asyncio.to_thread(sock.recv, 1, socket.MSG_PEEK)
            assert served.left == 0
            sock.close()  # with a byte unread
            await eventually(lambda: served.left == 1, "it is noticed")

    on_loop(check())


@pytest.mark.parametrize("behind", [b"", b"GET /function/half", b"no request\r\n\r\n"])
def test_all_requests_of_a_caller_who_half_closes_are_answered(on_loop: OnLoop, behind: bytes) -> None:
    async def check() -> None:
        async with asked(CALL % 1 * 2 + OTHER % 1 + behind) as (served, sock):
            sock.shutdown(socket.SHUT_WR)
            served.may.set()
            assert (await asyncio.to_thread(rest, sock)).count(b"HTTP/1.1 200 OK\r\n") == 3

    on_loop(check())


def test_all_callers_who_half_close_take_one_open_file_more(on_loop: OnLoop) -> None:
    async def check() -> None:
        served = Served()
        async with serving(served.run, served.app) as port:
            socks = [socket.create_connection(("127.0.0.1", port), LIMIT_S) for _ in range(8)]
            for each in socks:
                each.sendall(CALL % 1)
            await eventually(lambda: served.begun == len(socks), "all are being answered")
            before = len(os.listdir("/proc/self/fd"))
            for each in socks:
                each.shutdown(socket.SHUT_WR)
                await asyncio.to_thread(each.recv, 1, socket.MSG_PEEK)
            assert len(os.listdir("/proc/self/fd")) == before + 1
            for each in socks[:4]:
                each.close()
            await eventually(lambda: served.left == 4, "those that leave are noticed, and no others")
            for each in socks[4:]:
                assert (await asyncio.to_thread(rest, each)).endswith(b"done")
                each.close()
            left = before + 1 - 2 * len(socks)
            await eventually(lambda: len(os.listdir("/proc/self/fd")) == left, "the file stays for the next")
            assert not any(transports for _, transports in _watches.values())

    on_loop(check())
