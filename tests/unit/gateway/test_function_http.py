"""
Calls of functions over HTTP. On the wire they are as if they had gone through ASGI: a plain application that does so is
the reference, and the bytes of both are compared.
"""

import asyncio
import gc
import random
import re
import socket
import weakref
from typing import Any
from urllib.parse import unquote

import pytest
import uvicorn
from tests.unit.gateway.conftest import DEVICE, Gateway, config_of, front_of, listening, nothing_else, serving
from tests.unit.gateway.test_calls import Endless, Streaming, Waiting
from tests.unit.gateway.test_contract_checklist import Exchange, Functions
from tests.waiting import eventually

from gpufaas_async_calls.api import AsgiCaller
from gpufaas_core.errors import CallCancelled, GpufaasError
from gpufaas_core.messages import Grant, Outer
from gpufaas_core.model import FunctionId
from gpufaas_core.origin import Origins
from gpufaas_core.wire.heads import AnswerHead, CallHead, EndHead
from gpufaas_gateway.answering import Answer, RunEarly
from gpufaas_gateway.call_headers import head_template
from gpufaas_gateway.fronts.openfaas import PREFIX
from gpufaas_gateway.http.bounded_websocket import BoundedWebSocket
from gpufaas_gateway.http.bounds import MAX_PIPELINED, BoundedHttp
from gpufaas_gateway.http.connection import HttpConnection
from gpufaas_gateway.request import Request
from gpufaas_gateway.usage import FunctionStats
from gpufaas_gpu_manager.exchange import Exchange as NodeExchange

HOST = b"Host: x\r\n"
LAST = b"Connection: close\r\n\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n" + LAST + b"1\r\na\r\n0\r\n\r\n"
EXPECTING = b"Expect: 100-continue\r\nContent-Length: 1\r\n" + LAST + b"a"
POST = b"POST /function/echo HTTP/1.1\r\n" + HOST
GET = b"GET /function/echo HTTP/1.1\r\n" + HOST
OPTIONS = b"OPTIONS /function/echo HTTP/1.1\r\n" + HOST
OTHER = b"GET /other HTTP/1.1\r\n" + HOST


def through_asgi(run: RunEarly) -> Any:
    """Return the reference."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if not scope["raw_path"].startswith(PREFIX):
            await nothing_else(scope, receive, send)
            return
        name, _, path = scope["raw_path"][len(PREFIX) :].partition(b"/")
        request = Request(
            name.decode("latin-1"), scope["method"], "/" + path.decode("latin-1"), scope["query_string"],
            scope["headers"], None, AsgiCaller(receive), scope.get("client"),
        )  # fmt: skip
        try:
            answer = await run(request)
        except CallCancelled:
            return
        start = {"type": "http.response.start", "status": answer.status, "headers": answer.headers}
        if answer.stream is None:
            await send(start)
            await send({"type": "http.response.body", "body": answer.body})
            return
        with answer.stream as stream:
            await send(start)
            if scope["method"] == "HEAD":
                stream.cancel()
            else:
                while (piece := await stream.chunk()) is not None:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    return app


async def said(port: int, *sent: bytes) -> bytes:
    """Send *sent*, piece by piece; return all that the server says until it closes, without what differs by call."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in sent:
        writer.write(piece)
        await asyncio.sleep(0.01)
    answer = await asyncio.wait_for(reader.read(-1), 10)
    writer.close()
    return without_varying(answer)


def without_varying(answer: bytes) -> bytes:
    """Return *answer* without what differs by call."""
    return re.sub(rb"(x-call-id|x-start-time|server-timing|x-duration-seconds): [^\r]*", rb"\1: -", answer)


async def compared(run: RunEarly, *sent: bytes) -> bytes:
    """Return what is answered, which is the same in both ways."""
    async with serving(run) as ours, listening(BoundedHttp, through_asgi(run)) as reference:
        answer = await said(ours, *sent)
        assert answer == await said(reference, *sent)
    return answer


def connected(run: RunEarly) -> tuple[HttpConnection, "Wire", uvicorn.server.ServerState]:
    """Return a connection without a socket, and where it writes to."""
    config, state, wire = config_of(HttpConnection, nothing_else), uvicorn.server.ServerState(), Wire()
    connection = HttpConnection(config=config, server_state=state, app_state={}, front=front_of(run))
    connection.connection_made(wire)
    return connection, wire, state


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (POST + b"Content-Length: 4\r\nConnection: close\r\n\r\nfour", None),
        (b"GET /function/echo/path?a=1#b HTTP/1.1\r\n" + HOST + LAST, None),
        (b"GET http://x/function/echo/path HTTP/1.1\r\n" + HOST + LAST, None),
        (b"GET /%66unction/echo HTTP/1.1\r\n" + HOST + LAST, None),
        (b"GET /function/\xc3\xa4 HTTP/1.1\r\n" + HOST + LAST, None),
        (b"GET /function/ HTTP/1.1\r\n" + HOST + LAST, None),
        (b"OPTIONS * HTTP/1.1\r\n" + HOST + LAST, None),
        (OPTIONS + b"Origin: a\r\nAccess-Control-Request-Method: b\r\n" + LAST, None),
        (b"GET /function/echo HTTP/1.0\r\n\r\n", None),
        (b"GET /function/echo HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", None),
        (b"HEAD /function/echo HTTP/1.1\r\n" + HOST + LAST, AnswerHead(200, [], length=7)),
        (b"HEAD /function/echo HTTP/1.1\r\n" + HOST + LAST, AnswerHead(200, [])),
        (b"HEAD /function/nobody HTTP/1.1\r\n" + HOST + LAST, None),
        (GET + LAST, AnswerHead(204, [])),
        (GET + LAST, AnswerHead(304, [(b"etag", b'"1"')])),
        (GET + LAST, AnswerHead(200, [(b"content-type", b"a"), (b"set-cookie", b"1"), (b"set-cookie", b"2")])),
        (GET + b"\r\n" + GET + LAST, AnswerHead(200, [(b"server", b"100%d"), (b"content-type", b"a")])),
        (GET + LAST, AnswerHead(200, [(b"server", b"a"), (b"content-type", b"a"), (b"x-duration-seconds", b"-")])),
        (GET + LAST, AnswerHead(200, [(b"server", b"a"), (b"x-call-id", b"a"), (b"content-type", b"a")])),
        (GET + LAST, AnswerHead(200, [(b"server", b"a"), (b"x-other", b"a")])),
        (GET + LAST, AnswerHead(200, [(b"x-%d" % number, b"a") for number in range(30)])),
        (b"GET /function/nobody HTTP/1.1\r\n" + HOST + LAST, None),
        (b"PROPFIND /function/echo HTTP/1.1\r\n" + HOST + LAST, None),
        (POST + b"Content-Length: 200000\r\n" + LAST + b"x" * 200_000, None),
        (POST + CHUNKED, None),
        (POST + EXPECTING, None),
        (POST + b"Expect: something\r\nContent-Length: 1\r\n" + LAST + b"a", None),
        (POST + b"Content-Length: 1\r\n" + LAST + b"ab", None),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nnonsense\r\n", None),
        (GET + b"Upgrade: h2c\r\nConnection: upgrade, close\r\nContent-Length: 1\r\n\r\na", None),
        (GET + b"X-Call-Id: mine\r\n" + LAST, None),
        (GET + b"\r\n" + GET + LAST, None),
        (GET + b"\r\n" + OTHER + b"\r\n" + GET + b"\r\n" + OTHER + LAST, None),
        (OTHER + b"\r\n" + GET + b"\r\nno request at all\r\n\r\n", None),
    ],
)  # fmt: skip
async def test_an_answer_has_the_bytes_that_it_has_through_asgi(
    gateway: Gateway, sent: bytes, answer: AnswerHead | None
) -> None:
    calls = await gateway.calls(Functions() if answer is None else Functions(answer))

    whole = await compared(calls.run, sent)
    assert whole.startswith(b"HTTP/1.1 ")
    if b"nonsense" not in sent and b"no request" not in sent:  # where the rest comes in time to be answered first
        at = len(sent) // 2
        assert await compared(calls.run, sent[:at], sent[at:]) == whole


@pytest.mark.parametrize(
    ("line", "at"),
    [("/Zoë?q=José", 0), ("/a?q=José", 24), ("/Zoë", 24), ("/a?q=é" + "é" * 99, 30), ("/a?q=" + "ö" * 30_000, 0)],
)
async def test_bytes_beyond_ascii_in_a_target_reach_the_function_percent_encoded(
    gateway: Gateway, line: str, at: int
) -> None:
    """They were 400, which they are not with OpenFaaS."""
    functions = Functions()
    calls = await gateway.calls(functions)
    sent = f"GET /function/echo{line} HTTP/1.1\r\n".encode() + HOST + LAST
    answer = await compared(calls.run, *(each for each in (sent[:at], sent[at : at + 5], sent[at + 5 :]) if each))

    if len(line) > 20_000:
        assert b" 414 " in answer, "the bound of a target is that of what is passed on"
        return
    head = functions.called[-1][1]
    assert head.path.isascii()
    assert unquote(head.path + (f"?{head.query.decode()}" if head.query else "")) == line


@pytest.mark.parametrize(
    "sent",
    [
        "GET /function/echo?q=é\x01 HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET /function/echo?q=é\x7f HTTP/1.1\r\nHost: x\r\n\r\n",
        "GÉT /function/echo HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET /function/echo?é HTTP/1.é\r\nHost: x\r\n\r\n",
        "\r\nGET /function/echo?é HTTP/1.1\r\nHost: x\r\n\r\n",
        "POST /function/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\néGET /é HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=("control", "delete", "method", "version", "behind an empty line", "behind a body"),
)
async def test_what_is_no_request_line_but_for_such_bytes_is_refused(gateway: Gateway, sent: str) -> None:
    functions = Functions()
    calls = await gateway.calls(functions)
    answer = await compared(calls.run, sent.encode())

    assert (b"HTTP/1.1 400 " in answer) != sent.startswith("POST"), "a whole request that came before is answered"
    assert [head.method for _, head in functions.called] == ["POST", "POST"] * sent.startswith("POST")


async def test_a_method_that_comes_in_two_pieces_is_not_taken_for_its_second_half(gateway: Gateway) -> None:
    functions = Functions()
    calls = await gateway.calls(functions)

    assert b"HTTP/1.1 400 " in await compared(
        calls.run, b"PROP", b"PATCH /function/echo?\xe9 HTTP/1.1\r\n" + HOST + LAST
    )
    assert not functions.called


class Gone(socket.socket):
    """The socket of a `Wire`: closed."""

    def __init__(self) -> None:
        super().__init__()
        self.close()

    def getpeername(self) -> tuple[str, int]:
        return "10.0.0.1", 1

    def getsockname(self) -> tuple[str, int]:
        return "10.0.0.2", 80


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__({"socket": Gone()})
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += b"" if self.closed else bytes(data)

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0


async def fed(http: Any, app: Any, *received: bytes, **of_protocol: Any) -> bytes:
    """Return what a connection says that receives so, each piece by itself."""
    config = config_of(http, app)
    connection = http(config=config, server_state=uvicorn.server.ServerState(), app_state={}, **of_protocol)
    wire = Wire()
    connection.connection_made(wire)
    for piece in received:
        if not wire.closed:
            connection.data_received(piece)
        for _ in range(40):
            await asyncio.sleep(0)
    connection.connection_lost(None)
    for _ in range(40):
        await asyncio.sleep(0)
    return without_varying(wire.written)


BODIES = (b"four", b"FOUR", b"hello world", b"")
OF_CALL = (b"x-call-id", b"x-start-time")
BODY = b"Content-Length: 4\r\n\r\n"
REPEATED = (
    b"\r\n\r\n",
    POST + b"Content-Length: 2\r\n\r\nab", POST + b"Content-Length: 12\r\n\r\nhello, world",
    POST + b"content-length:\t4 \r\n\r\nfour", POST + b"Content-Length: 04\r\nX: y\r\n\r\nfour",
    POST + b"Content-Length: 0\r\nX: y\r\n\r\n", POST + b"Content-Length: 99999999999\r\nX: y\r\n\r\n",
    POST + b"Content-Length: 2 4\r\n\r\nfour", POST + b"X: \r\n\tcontent-length: 2\r\n" + BODY + b"four",
    POST + b"Content-Length: 4\r\nContent-Length: 4\r\n\r\nfour", POST + b"X-Content-Length: 2\r\n" + BODY + b"four",
    POST + BODY + b"four", POST + BODY + b"FOUR", POST + BODY + b"fourGET", POST + BODY + b"four\r\n", POST + BODY,
    b"four", b"fo", b"ur", b"\r\n", b"\r", POST, HOST, GET + b"\r\n", GET + b"\r\n" + GET + b"\r\n", OTHER + b"\r\n",
    POST.replace(b"\r\n", b"\n") + BODY.replace(b"\r\n", b"\n") + b"\r\n\r\nxx",
    POST.replace(b"\r\n", b"\n") + BODY.replace(b"\r\n", b"\n") + b"ab\r\n\r\n", b"\r\n" + POST + BODY + b"four",
    b"\r\n\r\n" + GET + b"\r\n", POST + b"Transfer-Encoding: chunked\r\n\r\n4\r\nfour\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\n4\r\nfo", b"ur\r\n0\r\n\r\n",
    POST + b"X-Call-Id: a\r\n" + BODY + b"four",
    POST + b"Expect: 100-continue\r\n" + BODY + b"four",
    POST + b"Upgrade: h2c\r\nConnection: upgrade\r\n" + BODY + b"four",
    b"GET /function/echo HTTP/1.0\r\n\r\n", GET + LAST, b"POST /function/nobody HTTP/1.1\r\n" + HOST + BODY + b"four",
    b"HEAD /function/echo HTTP/1.1\r\n" + HOST + b"\r\n",
)  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_a_connection_repeats_is_read_as_by_a_parser(gateway: Gateway, seed: int) -> None:
    """A head that came before is known by its bytes, and not parsed again."""
    functions, rng = Functions(), random.Random(seed)
    calls = await gateway.calls(functions)

    def called() -> list[object]:
        seen = [
            (each.method, each.path, each.query, [pair for pair in each.headers if pair[0] not in OF_CALL])
            for _, each in functions.called
        ]
        functions.called.clear()
        return seen

    front, reference = front_of(calls.run), through_asgi(calls.run)
    sequences = [rng.choices(rng.sample(REPEATED, 4), k=rng.randrange(2, 9)) for _ in range(60)]
    if not seed:
        sequences = [[one, one, two, one] for one in REPEATED for two in REPEATED[:6]]

    for received in sequences:
        ours = await fed(HttpConnection, nothing_else, *received, front=front)
        given = called()
        assert ours == await fed(BoundedHttp, reference, *received), received
        assert given == called()


async def test_a_head_that_is_repeated_is_parsed_once(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    functions, parsed = Functions(), []
    calls = await gateway.calls(functions)
    parse = BoundedHttp.data_received
    monkeypatch.setattr(BoundedHttp, "data_received", lambda self, data: parsed.append(data) or parse(self, data))
    front = front_of(calls.run)

    answer = await fed(
        HttpConnection,
        nothing_else,
        *(POST + b"Content-Length: %d\r\n\r\n" % len(each) + each for each in BODIES),
        front=front,
    )

    assert (answer.count(b" 200 OK"), len(parsed)) == (4, 1)
    assert [re.search(rb"content-length: %d\r\n\r\n%b" % (len(each), each), answer) is not None for each in BODIES] == [
        True
    ] * 4
    assert [dict(head.headers)[b"content-length"] for _, head in functions.called] == [b"4", b"4", b"11", b"0"]


async def test_a_header_that_is_another_one_each_time_is_kept_for_few(gateway: Gateway) -> None:
    functions = Functions(AnswerHead(200, [(b"content-type", b"a"), (b"x-number", b"")]))
    calls = await gateway.calls(functions)
    front = front_of(calls.run)

    most = head_template.cache_info().maxsize
    assert most is not None
    for number in range(most + 10):
        functions.answer.headers[1] = (b"x-number", b"%d" % number)
        answer = await fed(HttpConnection, nothing_else, GET + b"\r\n", front=front)
        assert b"\r\nx-number: %d\r\n" % number in answer

    assert head_template.cache_info().currsize == most


class Pieces(Streaming):
    """Answers in pieces, with a head of its own."""

    def __init__(self, head: AnswerHead, *pieces: bytes, error: GpufaasError | None = None) -> None:
        super().__init__()
        self.head, self.pieces, self.error = head, pieces, error

    def call(self, grant: Grant, head: CallHead, body: bytes | memoryview) -> Exchange:  # noqa: ARG002 - the port's
        functions = self

        class InPieces(Exchange):
            left: list[bytes]

            async def answer(self) -> tuple[AnswerHead, bytes, bool]:
                return functions.head, b"", False

            async def chunk(self) -> bytes | None:
                await asyncio.sleep(0)
                if self.left:
                    return self.left.pop(0)
                if functions.error is not None:
                    raise functions.error
                return None

        exchange = InPieces(grant, b"", self.head, False)
        exchange.left = list(self.pieces)
        exchange.end = type("End", (), {"run_s": 0.0})
        return exchange


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
@pytest.mark.parametrize("functions", [
    Pieces(AnswerHead(200, []), b"one", b"", b"two"),
    Pieces(AnswerHead(200, []), b"a" * 300_000, b"b"),
    Pieces(AnswerHead(200, [(b"content-type", b"text/x")], length=6), b"one", b"two"),
    Pieces(AnswerHead(200, [], length=5), b"one", b"two"),
    Pieces(AnswerHead(200, [], length=7), b"one", b"two"),
    Pieces(AnswerHead(200, []), b"one", error=GpufaasError("it broke")),
    Pieces(AnswerHead(204, [])),
], ids=["chunked", "large", "length", "too-long", "too-short", "broken", "bodiless"])  # fmt: skip
async def test_an_answer_that_streams_has_them_too(gateway: Gateway, functions: Pieces, method: bytes) -> None:
    calls = await gateway.calls(functions)
    sent = method + b" /function/echo HTTP/1.1\r\n" + HOST

    assert (await compared(calls.run, sent + LAST)).startswith(b"HTTP/1.1 20")
    assert await compared(calls.run, sent + b"\r\n" + OTHER + LAST)


class Buffered(Functions):
    """Its exchange is a node's own."""

    def __init__(self) -> None:
        super().__init__()
        self.exchanges: list[NodeExchange] = []

    def call(self, grant: Grant, head: CallHead, body: bytes | memoryview) -> Any:
        exchange = NodeExchange(grant, None, asyncio.get_running_loop(), 0.0)
        exchange.arrive(head, body)
        self.exchanges.append(exchange)
        return exchange


@pytest.mark.parametrize("slow", [False, True])
async def test_a_whole_answer_is_sent_before_its_call_is_counted_if_its_reader_is_not_slow(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, slow: bool
) -> None:
    functions = Buffered()
    connection, wire, _ = connected((await gateway.calls(functions)).run)
    counted: list[bytes] = []
    monkeypatch.setattr(FunctionStats, "observe", lambda *_: counted.append(wire.written))

    connection.data_received(GET + b"\r\n")
    if slow:
        connection.pause_writing()
    functions.exchanges[0].on_answer(AnswerHead(200, []), b"hello")
    connection.resume_writing()
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    assert [bool(each) for each in counted] == [not slow]
    assert wire.written.count(b"HTTP/1.1 200 OK") == wire.written.count(b"hello") == 1
    connection.connection_lost(None)


async def test_a_piece_goes_on_as_it_comes_and_those_of_one_turn_together(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions, now = Buffered(), [0.0]
    calls = await gateway.calls(functions)
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "time", lambda: now[0])
    connection, wire, _ = connected(calls.run)

    def came() -> bytes:
        said, wire.written = wire.written, b""
        return said

    async def turns() -> bytes:
        for _ in range(5):
            await asyncio.sleep(0)
        return came()

    connection.data_received(GET + b"\r\n")
    (exchange,) = functions.exchanges
    exchange.on_head(AnswerHead(200, []))
    assert (await turns()).startswith(b"HTTP/1.1 200 OK\r\n")
    said = []
    for at, piece in enumerate((b"one", b"two")):
        now[0] = at + 1.0
        exchange.on_chunk(piece)
        said.append(came())
    exchange.on_chunk(b"three")
    exchange.on_chunk(b"four")
    said += [came(), await turns()]
    now[0] = 3.0
    connection.pause_writing()
    exchange.on_chunk(b"five")
    said.append(await turns())
    connection.resume_writing()
    said.append(await turns())
    large = b"x" * 100_000
    for piece in (b"six", large, large):
        now[0] = 4.0
        exchange.on_chunk(piece)
        said.append(came())
    exchange.on_end(EndHead(0.0))
    said.append(await turns())

    framed = b"186a0\r\n" + large + b"\r\n"
    assert said == [
        b"3\r\none\r\n", b"3\r\ntwo\r\n", b"", b"9\r\nthreefour\r\n", b"", b"4\r\nfive\r\n",
        b"3\r\nsix\r\n", framed, framed, b"0\r\n\r\n",
    ]  # fmt: skip
    connection.connection_lost(None)


async def test_a_worker_is_known_by_the_token_in_its_address(gateway: Gateway) -> None:
    origins, worker = Origins(), Outer(DEVICE.id, FunctionId("outer.openfaas-fn@1"))
    asked: list[Request] = []
    calls = await gateway.calls(Functions())

    def run(request: Request, *_: object) -> Any:
        asked.append(request)
        return calls.run(Request(request.name, body=b""))

    path = origins.address("", worker).encode()
    async with serving(run, origins=origins) as port:
        known = await said(port, b"GET " + path + b"/function/echo/a?b HTTP/1.1\r\n" + HOST + LAST)
        forged = await said(port, b"GET " + path + b"x/function/echo HTTP/1.1\r\n" + HOST + LAST)
        other = await said(port, b"GET " + path + b"/other HTTP/1.1\r\n" + HOST + LAST)

    assert known.startswith(b"HTTP/1.1 200 ")
    assert [(each.name, each.path, each.query, each.outer) for each in asked] == [("echo", "/a", b"b", worker)]
    assert forged.startswith(b"HTTP/1.1 418 ")
    assert other.startswith(b"HTTP/1.1 418 ")


class Holding(Functions):
    """A call whose body is ``wait`` runs until `end`."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Endless] = []
        self.cancelled = 0

    def call(self, grant: Grant, head: CallHead, body: bytes | memoryview) -> Exchange:
        if bytes(body) != b"wait":
            return super().call(grant, head, body)
        self.held.append(Endless(grant))
        return self.held[-1]

    def cancel(self, call: object) -> None:  # noqa: ARG002 - the port's
        self.cancelled += 1


@pytest.fixture
def holding() -> Holding:
    return Holding()


async def begun(functions: Holding, calls: int = 1) -> None:
    await eventually(lambda: len(functions.held) >= calls)


async def test_a_caller_who_hangs_up_ends_his_call(gateway: Gateway, holding: Holding) -> None:
    """Also if another request of his waits behind it."""
    async with serving((await gateway.calls(holding)).run) as port:
        for more in (b"", GET + b"\r\n"):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(POST + b"Content-Length: 4\r\n\r\nwait" + more)
            holding.held.clear()
            await begun(holding)
            before = holding.cancelled
            writer.close()
            await eventually(lambda before=before: holding.cancelled > before)

    assert gateway.found("echo.openfaas-fn").stats.by_code.keys() == {499}


async def test_a_websocket_behind_a_call_that_runs_is_refused(
    gateway: Gateway, holding: Holding, caplog: pytest.LogCaptureFixture
) -> None:
    calls = await gateway.calls(holding)
    config = config_of(HttpConnection, nothing_else)
    config.ws_protocol_class = BoundedWebSocket
    front, state = front_of(calls.run), uvicorn.server.ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: HttpConnection(config=config, server_state=state, app_state={}, front=front), "127.0.0.1", 0
    )
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(POST + b"Content-Length: 4\r\n\r\nwait")
        await begun(holding)
        writer.write(
            GET + b"Upgrade: websocket\r\nConnection: upgrade\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        await eventually(lambda: "a WebSocket was asked for behind" in caplog.text)
        holding.held[0].fail(GpufaasError("the call's own"))
        answer = await asyncio.wait_for(reader.read(-1), 10)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 500 "), "what is said to the WebSocket would be taken for the call's answer"
    assert answer.endswith(b"the call's own")
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("request_of", [GET, OTHER])
async def test_a_caller_who_sends_on_and_on_has_few_requests_read(request_of: bytes) -> None:
    """Each request that runs resumes reading, to notice its caller's end. What is read at once is parsed at once."""
    made: list[HttpConnection] = []
    most = answered = 0

    async def waited(caller: Any) -> None:
        nonlocal most, answered
        caller.on_gone(None)
        most = max(most, len(made[0].pipeline))
        await asyncio.sleep(0.002)
        answered += 1

    async def run(request: Request, *_: object) -> Answer:
        await waited(request.caller)
        return Answer(200, [(b"content-length", b"0")])

    async def app(scope: Any, receive: Any, send: Any) -> None:
        listens = asyncio.ensure_future(receive())
        await asyncio.sleep(0)
        await waited(AsgiCaller(receive))
        listens.cancel()
        await nothing_else(scope, receive, send)

    def http(**kwargs: Any) -> HttpConnection:
        made.append(HttpConnection(front=front_of(run), **kwargs))
        return made[-1]

    async with listening(http, app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write((request_of + b"A: " + b"a" * 8000 + b"\r\n\r\n") * 400 + request_of + LAST)
        assert (await asyncio.wait_for(reader.read(-1), 20)).count(b"HTTP/1.1 ") == 401
        writer.close()
    assert answered == 401
    assert most < MAX_PIPELINED + 2 * 256 * 1024 // 8000


async def test_a_server_that_stops_ends_calls_after_its_grace(gateway: Gateway, holding: Holding) -> None:
    """It cancels what is in its set of tasks; nobody gets an answer that looks like one of the function."""
    calls = await gateway.calls(holding)
    made: list[Any] = []

    def http(**kwargs: Any) -> HttpConnection:
        made.append(HttpConnection(front=front_of(calls.run), **kwargs))
        return made[-1]

    async with listening(http) as port:
        answer = asyncio.create_task(said(port, POST + b"Content-Length: 4\r\n\r\nwait"))
        await begun(holding)
        made[0].shutdown()
        (running,) = made[0].tasks
        running.cancel(msg="the grace is over")
        assert (await answer).startswith(b"HTTP/1.1 500 Internal Server Error\r\ncontent-type: text/plain")
        assert not made[0].tasks


async def test_an_idle_connection_is_closed_and_one_in_use_is_not(gateway: Gateway, holding: Holding) -> None:
    async with serving((await gateway.calls(holding)).run) as port:
        loop = asyncio.get_running_loop()
        timers = len(loop._scheduled)  # type: ignore[attr-defined]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(20):
            writer.write(GET + b"\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        assert len(loop._scheduled) - timers <= 4, "of the head, of the idle connection, of the sweep"  # type: ignore[attr-defined]
        writer.close()


async def test_a_thousand_answers_at_once_are_not_a_thousand_calls_deep(gateway: Gateway) -> None:
    calls = await gateway.calls(Functions())
    unknown = b"GET /function/nobody HTTP/1.1\r\n" + HOST

    async with serving(calls.run) as port:
        answer = await said(port, (unknown + b"\r\n") * 1000 + unknown + LAST)

    assert answer.count(b"HTTP/1.1 404 ") == 1001


@pytest.mark.parametrize("kind", ["whole", "in pieces", "unknown", "waits", "fails", "breaks off", "hangs up"])
async def test_calls_leave_no_task_and_nothing_for_the_garbage_collector(
    gateway: Gateway, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collection stops all calls: with a circle of references in each call there would be many."""

    class Placing(Buffered):
        grants: list[asyncio.Future[Grant]]

        def place(self, *args: Any, **kwargs: Any) -> Any:
            self.grants = [asyncio.get_running_loop().create_future()]
            granted = super().place(*args, **kwargs)
            asyncio.get_running_loop().call_soon(self.grants[0].set_result, granted)
            return self.grants[0] if kind == "waits" else granted

    functions = Placing()
    calls = await gateway.calls(functions)
    sent = POST.replace(b"echo", b"nobody" if kind == "unknown" else b"echo") + b"Content-Length: 4\r\n\r\nfour"

    monkeypatch.setattr("gpufaas_gateway.call.WATCH_AFTER_S", 0.0)
    connection, wire, state = connected(calls.run)

    async def call() -> None:
        connection.data_received(sent)
        while kind == "waits" and not functions.exchanges:
            await asyncio.sleep(0)
        exchange = functions.exchanges.pop() if functions.exchanges else None
        if kind in ("whole", "waits"):
            exchange.on_answer(AnswerHead(200, [(b"content-type", b"a")]), b"four")
        elif kind == "in pieces":
            exchange.on_head(AnswerHead(200, []))
            for piece in (b"a", b"b"):
                exchange.on_chunk(piece)
                await asyncio.sleep(0)
            exchange.on_end(EndHead(0.0))
        elif kind == "breaks off":
            exchange.on_head(AnswerHead(200, []))
            await asyncio.sleep(0)
            exchange.on_end(EndHead(0.0, error="it raised"))
        elif kind == "fails":
            exchange.fail(GpufaasError("it fails"))
        elif kind == "hangs up":
            while connection.cycle._tell is None:
                await asyncio.sleep(0)
            connection.cycle.gone()
        for _ in range(5):
            assert len(asyncio.all_tasks()) == 1, "the test's own"
            await asyncio.sleep(0)
        assert not state.tasks
        status = {"unknown": b" 404 ", "fails": b" 500 ", "hangs up": b""}.get(kind, b" 200 ")
        assert status in wire.written
        if kind in ("hangs up", "breaks off"):
            connection.cycle.response_complete = True  # so that the next call is not behind this one
        wire.written, wire.closed = b"", False

    await call()
    gc.collect()
    gc.disable()
    try:
        for _ in range(300):
            await call()
        assert gc.collect() < 300, "what other tests have left is among it, too: some dozens"
    finally:
        gc.enable()
        connection.connection_lost(None)


@pytest.mark.parametrize(
    "ends", ["idle", "before the answer", "within the body", "with another behind", "of the application"]
)
async def test_a_connection_that_ends_leaves_nothing_for_the_garbage_collector(ends: str) -> None:
    """What is left is collected hours later, and with it was its last call with its body."""

    async def run(request: Request, *_: object) -> Answer:
        while ends not in ("idle", "of the application"):
            assert request.caller is not None
            await request.caller.receive()
        return Answer(200, [], b"four")

    connection, wire, _ = connected(run)
    whole = POST + b"Content-Length: 4\r\n\r\nfour"
    sent = {"within the body": whole[:-2], "with another behind": whole + whole, "of the application": OTHER + b"\r\n"}
    gc.collect()
    gc.disable()
    try:
        connection.data_received(sent.get(ends, whole))
        for _ in range(5):
            await asyncio.sleep(0)
        wire.closed = True
        connection.connection_lost(None)
        for _ in range(5):
            await asyncio.sleep(0)
        left = weakref.ref(connection)
        del connection
        assert left() is None
    finally:
        gc.enable()


async def test_a_bug_is_a_500_and_in_the_log(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Functions):
        def place(self, *_: object, **__: object) -> Grant:
            raise AssertionError("a bug")

    async with serving((await gateway.calls(Broken())).run) as port:
        answer = await said(port, GET + b"\r\n")

    assert answer.startswith(b"HTTP/1.1 500 ")
    assert b"connection: close" in answer
    assert "a request failed in the platform itself: /function/echo" in caplog.text


async def test_a_header_with_a_line_break_is_not_sent(gateway: Gateway) -> None:
    async with serving((await gateway.calls(Functions(AnswerHead(200, [(b"x-split", b"a\r\nb: c")])))).run) as port:
        answer = await said(port, GET + LAST)

    assert answer.startswith(b"HTTP/1.1 500 ")
    assert b"b: c" not in answer


async def test_a_body_that_never_comes_whole_ends_with_its_caller(gateway: Gateway) -> None:
    functions = Waiting()
    async with serving((await gateway.calls(functions)).run) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(POST + b"Content-Length: 4\r\n\r\nfo")
        stats = gateway.found("echo.openfaas-fn").stats
        await eventually(lambda: stats.inflight)
        writer.close()
        await eventually(lambda: not stats.inflight)

    assert stats.by_code.keys() == {499}
    assert not functions.waiting
