"""A server in a worker may send any bytes: its call fails with a reason, in bounded memory and time."""

import asyncio
import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, cast

import pytest
from tests.unit.gpu_manager.world import exchange_of
from tests.waiting import LIMIT_S

from gpufaas_core.errors import BadAnswer
from gpufaas_core.wire.heads import CallHead
from gpufaas_gpu_manager import http_messages, http_slots
from gpufaas_gpu_manager.exchange import Exchange
from gpufaas_gpu_manager.http_messages import AnswerParser, BadHttp
from gpufaas_gpu_manager.http_slots import HERE, HttpSlot


class Owner:
    def __init__(self, pid: int | None = None) -> None:
        self.pid = pid
        self.calls = self.last_words = self
        self.loop = asyncio.get_running_loop()
        self.done: list[bool] = []
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def on_done(self, _: Any, __: Any, run_s: float, peak: int, out_of_memory: bool, ok: bool) -> None:  # noqa: ARG002
        self.done.append(ok)

    def on_lost(self) -> None: ...

    def on_call_lost(self, _: Any, __: Any, reason: str) -> None:
        self.lost.set_result(reason)


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner is told at once that a call is lost."""
    monkeypatch.setattr(http_slots, "lose", lambda owner, *lost: owner.on_call_lost(*lost))


async def answered(
    said: bytes, *, again: bytes = b"", pid: int | None = None, host: str = HERE
) -> tuple[Owner, Exchange]:
    """Call a server that answers *said*, then *again* without end; return what became of the call."""

    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(said)
            while again:
                writer.write(again)
                await writer.drain()
            await reader.read()
        writer.transport.abort()
        over.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    owner = Owner(pid)
    slot = HttpSlot(cast(Any, owner), host, server.sockets[0].getsockname()[1])
    exchange = exchange_of("c", owner)
    exchange.arrive(CallHead("c", "GET", "/", b"", []), b"")
    exchange.bind(slot, 0.0, False)
    async with asyncio.timeout(LIMIT_S):
        answer = asyncio.ensure_future(exchange.answer())
        await asyncio.wait([answer, owner.lost], return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            answer.exception()
        else:
            answer.cancel()
        slot.close()
        await over.wait()
    server.close()
    return owner, exchange


def head(status: str, *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *headers, "content-length: 2", "", "ok"]).encode("latin-1")


async def test_an_honest_answer_goes_through() -> None:
    owner, exchange = await answered(head("200 OK", "x-a: b"), pid=os.getpid())

    assert (owner.done, exchange.error) == ([True], None)


@pytest.mark.parametrize(("idle_s", "connections"), [(LIMIT_S, 1), (0.0, 2)])
async def test_a_connection_that_was_idle_for_too_long_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch, idle_s: float, connections: int
) -> None:
    """Its server may close it at any moment, and then a call that may not be sent twice would be lost."""
    made: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.append(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(head("200 OK"))
        writer.transport.abort()

    monkeypatch.setattr(http_slots, "_IDLE_S", idle_s)
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    owner = Owner()
    slot = HttpSlot(cast(Any, owner), "127.0.0.1", server.sockets[0].getsockname()[1])
    for call in ("first", "second"):
        exchange = exchange_of(call, owner)
        exchange.arrive(CallHead(call, "POST", "/", b"", []), b"")
        exchange.bind(slot, 0.0, False)
        await asyncio.wait_for(exchange.answer(), LIMIT_S)
    slot.close()
    for each in made:
        await asyncio.wait_for(each.wait_closed(), LIMIT_S)
    server.close()

    assert (owner.done, len(made)) == ([True, True], connections)


@pytest.fixture
def ended() -> Iterator[int]:
    """A process that has ended, and was not reaped yet."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield process.pid
    process.wait()


async def test_a_call_is_not_sent_to_a_process_that_ends_and_listens_yet(ended: int) -> None:
    owner, exchange = await answered(head("200 OK"), pid=ended)

    assert owner.lost.result() == "it was about to end"
    assert exchange.untouched, "it can be placed again"


async def test_a_process_of_another_machine_is_not_looked_for_here(ended: int) -> None:
    owner, exchange = await answered(head("200 OK"), pid=ended, host="localhost")

    assert (owner.done, exchange.error) == ([True], None)


@pytest.mark.parametrize("said", [head("600 X"), head("999 X"), head("200 OK", *["x: " + "y" * 1000] * 66)])
async def test_an_answer_that_no_client_can_be_given_is_a_bad_one(said: bytes) -> None:
    owner, exchange = await answered(said)

    assert owner.done == [False]
    assert isinstance(exchange.error, BadAnswer)


@pytest.mark.parametrize("status", ["99 X", "1000 X", "abc X", "-1 X"])
async def test_a_status_line_that_is_none_is_told(status: str) -> None:
    owner, exchange = await answered(head(status))

    assert owner.lost.done() or isinstance(exchange.error, BadAnswer)


@pytest.mark.parametrize(
    ("said", "again"),
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
        (b"", b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n" * 100),
        (b"HTTP/1.1 200 OK\r\n", b"x-more: and more\r\n" * 100),
        (b"HTTP/1.1 200 OK\r\nx: ", b"y" * 4096),
    ],
)
async def test_a_head_without_end_is_given_up(said: bytes, again: bytes) -> None:
    owner, _ = await answered(said, again=again)

    assert "head is over 64 KiB" in owner.lost.result()


OK = b"HTTP/1.1 200 OK\r\n"
ANSWERS = (
    OK + b"Content-Type: a\r\nContent-Length: 2\r\n\r\nok", OK + b"Content-Type: a\r\nContent-Length: 2\r\n\r\nno",
    OK + b"Content-Type: a\r\nContent-Length: 3\r\n\r\nyes", OK + b"Content-Length: 0\r\n\r\n",
    OK + b"Content-Length: 2\r\nConnection: close\r\n\r\nok", b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
    b"HTTP/1.1 204 No Content\r\n\r\n", b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 500 Oh\r\nContent-Length: 2\r\n\r\nok", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 2\r\n\r\n",
    OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", OK + b"\r\nuntil it closes",
    b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"Content-Length: 2\r\n\r\nok", OK + b"Content-Length: 2\r\n\r\nok\r\n",
    b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n" + OK + b"Content-Length: 2\r\n\r\nok",
    OK + b"Content-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\n", OK + b"X: \xe4\r\nContent-Length: 4\r\n\r\n\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: a\r\nConnection: upgrade\r\n\r\nok",
    OK.replace(b"\r\n", b"\n") + b"Content-Length: 2\n\nok", b"no answer", OK + b"Content-Length: x\r\n\r\n",
)  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_a_head_that_comes_again_means_what_it_meant(seed: int) -> None:
    """A parser that has read other answers before says what a new one says."""
    rng, met = random.Random(seed), 0
    for _ in range(300):
        parser, answers = AnswerParser(), rng.choices(rng.sample(ANSWERS, 3), k=6)
        for answer in answers:
            asked = rng.choice(["GET"] * 8 + ["HEAD"]), rng.random() < 0.1
            cuts = sorted(rng.sample(range(len(answer)), rng.choice([0, 0, 0, 1, 2])))
            pieces = [answer[a:b] for a, b in pairwise([0, *cuts, len(answer)])]
            said, reference = read(parser, pieces, *asked), read(AnswerParser(), pieces, *asked)
            assert said == reference, (answers, answer, pieces)
            met += 1
            if said["error"] or not said["keep"]:
                break  # as its connection would
    assert met > 600


def read(parser: AnswerParser, pieces: list[bytes], method: str, may_switch: bool) -> dict[str, Any]:
    parser.expect(method, may_switch)
    error, body = "", b""
    try:
        for piece in pieces:
            parser.feed(piece)
            body += parser.take()
    except BadHttp as exc:
        error = str(exc)
    said = {each: getattr(parser, each) for each in ("status", "headers", "length", "complete", "keep")}
    if not said["status"]:
        del said["headers"], said["length"]
    return {**said, "keep": said["complete"] and said["keep"], "error": error, "body": body}


def test_a_head_that_comes_again_is_not_parsed_again() -> None:
    parser, heads = AnswerParser(), []
    for body in (b"ok", b"no", b"on"):
        parser.expect("GET", False)
        parser.feed(OK + b"Content-Type: a\r\nContent-Length: 2\r\n\r\n" + body)
        assert (parser.complete, parser.keep, parser.take()) == (True, True, body)
        heads.append(parser.headers)

    assert heads[0] is heads[1] is heads[2]
    parser.expect("GET", False)
    parser.feed(OK + b"Content-Type: b\r\nContent-Length: 2\r\n\r\nok")
    assert parser.headers == [(b"content-type", b"b")]


LARGE = random.Random(1).randbytes(200_000)
LENGTH = b"Content-Length: %d\r\n\r\n" % len(LARGE)
CLOSING = OK + b"Connection: close\r\n" + LENGTH + LARGE
LARGE_ANSWERS = (
    OK + LENGTH + LARGE, CLOSING, b"HTTP/1.0 200 OK\r\n" + LENGTH + LARGE,
    b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n" + LENGTH + LARGE, b"HTTP/1.1 500 Oh\r\n" + LENGTH + LARGE,
    b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n" + OK + LENGTH + LARGE, b"HTTP/1.1 204 No Content\r\n" + LENGTH,
    OK + LENGTH + LARGE + b"\r\n", OK + LENGTH + LARGE + b"more", CLOSING + b"more", OK + LENGTH + LARGE + OK + LENGTH,
    OK + LENGTH + LARGE[:-1], OK + b"Transfer-Encoding: chunked\r\n\r\n30d40\r\n" + LARGE + b"\r\n0\r\n\r\n",
    OK + b"\r\n" + LARGE, OK + b"Transfer-Encoding: chunked\r\n" + LENGTH + LARGE,
)  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_a_large_body_that_is_not_parsed_is_what_it_would_be_parsed(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, past = random.Random(seed), 0
    for _ in range(100):
        parser, reference = AnswerParser(), AnswerParser()
        for answer in rng.choices(LARGE_ANSWERS + ANSWERS[:6], weights=[4] + [1] * 14 + [1] * 6, k=4):
            asked = rng.choice(["GET"] * 8 + ["HEAD"]), rng.random() < 0.1
            cuts = sorted(rng.sample(range(len(answer)), rng.choice([0, 1, 2, 5])))
            if rng.random() < 0.5:
                cuts = sorted({*cuts, answer.find(LARGE[:9]) + rng.randrange(3), len(answer) - rng.randrange(3)} - {-1})
            pieces = [answer[a:b] for a, b in pairwise([0, *cuts, len(answer)]) if b > a]
            said = {**read(parser, pieces, *asked), "end": parser.feed_end()}
            past += len(said["body"]) == len(LARGE)
            with monkeypatch.context() as patched:
                patched.setattr(http_messages, "_LARGE", 10**9)
                wanted = {**read(reference, pieces, *asked), "end": reference.feed_end()}
            assert said == wanted, (answer[:100], [len(each) for each in pieces])
            if said["error"] or not said["keep"]:
                break  # as its connection would
    assert past > 50


def test_a_large_body_is_passed_on_without_a_copy_and_its_connection_is_kept() -> None:
    parser = AnswerParser()
    for _ in range(2):
        parser.expect("GET", False)
        parser.feed(OK + LENGTH + LARGE[:10])
        assert parser.take() == LARGE[:10]
        piece, last = LARGE[10:100_000], LARGE[100_000:]
        parser.feed(piece)
        assert parser.take() is piece
        assert not parser.complete
        parser.feed(last)
        assert parser.take() is last
        assert (parser.complete, parser.keep) == (True, True)
