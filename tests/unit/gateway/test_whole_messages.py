"""A call whose request and answer are in one piece: on the wire it is as if it had gone through ASGI's messages."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from tests.unit.gateway.conftest import Gateway
from tests.unit.gateway.test_contract_checklist import Functions

from gpufaas_core.frames import AnswerHead
from gpufaas_gateway import invoke
from gpufaas_gateway.calls import Calls
from gpufaas_gateway.invoke import Invocations
from gpufaas_gateway.protocol import BoundedHttp

HOST = b"Host: x\r\n"


def hidden(app: Any) -> Any:
    """Wrap the server's `send`, so that only ASGI's messages remain."""

    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        await app(scope, receive, lambda message: send(message))

    return wrapped


@asynccontextmanager
async def server_of(app: Any) -> AsyncIterator[int]:
    """Serve *app*; give the port."""
    config = uvicorn.Config(
        app, interface="asgi3", http=BoundedHttp, ws="none", lifespan="off", port=0, log_config=None,
        server_header=False, date_header=False,
    )  # fmt: skip
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await server.shutdown()


async def said(port: int, sent: bytes) -> bytes:
    """Send *sent* in one piece; return all that the server says until it closes, without what differs by call."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    answer = await asyncio.wait_for(reader.read(-1), 10)
    writer.close()
    return re.sub(rb"(x-call-id|x-start-time|server-timing|x-duration-seconds): [^\r]*", rb"\1: -", answer)


LAST = b"Connection: close\r\n\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n" + LAST + b"1\r\na\r\n0\r\n\r\n"
EXPECTING = b"Expect: 100-continue\r\nContent-Length: 1\r\n" + LAST + b"a"


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"POST /function/echo HTTP/1.1\r\n" + HOST + b"Content-Length: 4\r\nConnection: close\r\n\r\nfour", None),
        (b"GET /function/echo/path?a=1 HTTP/1.1\r\n" + HOST + LAST, None),
        (b"GET /function/echo HTTP/1.0\r\n\r\n", None),
        (b"HEAD /function/echo HTTP/1.1\r\n" + HOST + LAST, AnswerHead(200, [], length=7)),
        (b"HEAD /function/echo HTTP/1.1\r\n" + HOST + LAST, AnswerHead(200, [])),
        (b"GET /function/echo HTTP/1.1\r\n" + HOST + LAST, AnswerHead(204, [])),
        (b"GET /function/echo HTTP/1.1\r\n" + HOST + LAST, AnswerHead(304, [(b"etag", b'"1"')])),
        (b"GET /function/nobody HTTP/1.1\r\n" + HOST + LAST, None),
        (b"POST /function/echo HTTP/1.1\r\n" + HOST + b"Content-Length: 200000\r\n" + LAST + b"x" * 200_000, None),
        (b"POST /function/echo HTTP/1.1\r\n" + HOST + CHUNKED, None),
        (b"POST /function/echo HTTP/1.1\r\n" + HOST + EXPECTING, None),
        (b"GET /function/echo HTTP/1.1\r\n" + HOST + b"\r\nGET /function/echo HTTP/1.1\r\n" + HOST + LAST, None),
    ],
    ids=[
        "body", "path", "http-1.0", "head-length", "head", "no-content", "not-modified", "error", "large", "chunked",
        "expect", "pipelined",
    ],
)  # fmt: skip
async def test_an_answer_in_one_piece_has_the_bytes_of_one_in_messages(
    gateway: Gateway, tmp_path: Path, sent: bytes, answer: AnswerHead | None
) -> None:
    await gateway.deployed()
    functions = Functions() if answer is None else Functions(answer)
    app = Invocations(Calls(gateway.catalogue, functions, functions, tmp_path).run)

    async with server_of(app) as whole, server_of(hidden(app)) as in_messages:
        assert await said(whole, sent) == await said(in_messages, sent) != b""


async def test_a_header_with_a_line_break_is_not_sent(gateway: Gateway, tmp_path: Path) -> None:
    await gateway.deployed()
    functions = Functions(AnswerHead(200, [(b"x-split", b"a\r\nb: c")]))

    async with server_of(Invocations(Calls(gateway.catalogue, functions, functions, tmp_path).run)) as port:
        assert b"b: c" not in await said(port, b"GET /function/echo HTTP/1.1\r\n" + HOST + LAST)


async def test_a_quick_call_needs_none_of_asgis_messages(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await gateway.deployed()
    functions, sent = Functions(), []
    app = Invocations(Calls(gateway.catalogue, functions, functions, tmp_path).run)
    as_one = invoke.send_answer
    monkeypatch.setattr(invoke, "send_answer", lambda *args: sent.append(as_one(*args)) or sent[-1])

    async with server_of(app) as port:
        await said(port, b"POST /function/echo HTTP/1.1\r\n" + HOST + b"Content-Length: 2\r\n" + LAST + b"ab")

    assert sent == [True]
