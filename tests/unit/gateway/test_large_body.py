"""Large bodies go past the parser: what is read is the body, all of it, and nothing behind it. On both event loops."""

import asyncio
import gc
import hashlib
import random
import re
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.unit.gateway.conftest import OnLoop, serving
from tests.waiting import eventually

from gpufaas_core.errors import CallCancelled
from gpufaas_core.units import MiB
from gpufaas_core.wire.bodies import FILE, INLINE, STREAM
from gpufaas_gateway import body_memory, call_body
from gpufaas_gateway.answering import Answer
from gpufaas_gateway.body_memory import LEAST, BodyMemory
from gpufaas_gateway.call_body import read_rest
from gpufaas_gateway.call_headers import read_head
from gpufaas_gateway.request import Request

BODY = bytes(range(256)) * 8192
"""2 MiB."""
MODES = {INLINE: b"whole", FILE: b"file", STREAM: b"stream"}


def request_of(body: bytes, path: str = "", more: str = "") -> bytes:
    return b"POST /function/f%b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%b\r\n%b" % (
        path.encode(), len(body), more.encode(), body,
    )  # fmt: skip


def said_of(body: bytes, how: bytes) -> bytes:
    return b"%b %b" % (how, hashlib.sha256(body).hexdigest().encode())


class Front:
    """Runs calls: what is said of a body is how it was read, and its digest."""

    def __init__(self, spool: Path, *, compute: int = 0, bound: int = 64 * MiB) -> None:
        self.memory = BodyMemory(bound)
        self.read: list[int] = []
        """The modes of bodies."""
        self.began = asyncio.Event()
        self.ended: list[str] = []
        self.calls: list[Request] = []
        self._spool = spool
        self._deployed = cast(Any, SimpleNamespace(compute=compute, max_body=100 * MiB, name="f"))

    async def run(self, request: Request, *_: object) -> Answer:
        self.calls.append(request)
        self.began.set()
        try:
            body, how = await self._body_of(request)
        except (CallCancelled, asyncio.CancelledError) as exc:
            self.ended.append(type(exc).__name__)
            if request.path == "/refused":
                return Answer(504, [(b"content-length", b"0")])
            raise
        self.ended.append("answered")
        said = said_of(body, how)
        return Answer(200, [(b"content-length", b"%d" % len(said))], said)

    async def _body_of(self, request: Request) -> tuple[bytes, bytes]:
        caller = request.caller
        assert caller is not None
        if request.body is not None:
            return request.body, b"small"
        piece, more = await caller.receive()
        if not more:
            return piece, b"small"
        length = read_head(request.headers, None)[2]
        body, mode, file, _ = await read_rest(piece, caller, self._deployed, length, self._spool, self.memory)
        if mode == STREAM:
            pieces = [bytes(body)]
            while more:
                piece, more = await caller.receive()
                pieces.append(piece)
            body = b"".join(pieces)
        elif mode == FILE:
            body = Path(file).read_bytes()
            Path(file).unlink()
        return bytes(body), MODES[mode]


@asynccontextmanager
async def connected(front: Front) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with serving(front.run) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=8 * MiB)
        try:
            yield reader, writer
        finally:
            writer.close()


async def answer_of(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(20):
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        assert length is not None, head
        return await reader.readexactly(int(length[1]))


@pytest.mark.parametrize("compute", [0, 100])
def test_what_comes_in_any_pieces_is_the_body_and_the_next_request_comes_behind(
    on_loop: OnLoop, tmp_path: Path, compute: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_body, "QUICK_S", 60.0)
    rng = random.Random(compute)

    async def test() -> None:
        front = Front(tmp_path, compute=compute)
        bodies = [BODY, b"small", BODY[:300_000], BODY[7:], b""]
        async with connected(front) as (reader, writer):
            sent = b"".join(map(request_of, bodies))
            while sent:
                size = rng.choice((1, 100, 70_000, 400_000, len(sent)))
                writer.write(sent[:size])
                sent = sent[size:]
                await asyncio.sleep(0)
            for body in bodies:
                how = b"whole" if len(body) > body_memory.LEAST else b"small"
                said = await answer_of(reader)
                # What is there with its head, or comes behind a call that runs, need not go past the parser.
                assert said in (said_of(body, how), said_of(body, b"small"))
        assert list(tmp_path.iterdir()) == []

    on_loop(test())


def test_a_body_that_follows_its_head_is_received_whole(on_loop: OnLoop, tmp_path: Path) -> None:
    async def test() -> None:
        front = Front(tmp_path, compute=100)
        async with connected(front) as (reader, writer):
            held = set()
            for _ in range(20):
                sent = request_of(BODY)
                front.began.clear()
                writer.write(sent[: -len(BODY) + 10])
                await front.began.wait()
                writer.write(sent[-len(BODY) + 10 :] + request_of(b"behind"))
                assert await answer_of(reader) == said_of(BODY, b"whole")
                assert await answer_of(reader) == said_of(b"behind", b"small")
                held.add(front.memory.held)
        assert held == {2 * MiB}, "the same memory was used again"

    on_loop(test())


def test_a_slow_body_streams_if_it_may_and_is_waited_for_if_not(
    on_loop: OnLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_body, "QUICK_S", 0.0)

    async def test() -> None:
        for compute, how in ((0, b"stream"), (100, b"whole")):
            front = Front(tmp_path, compute=compute)
            async with connected(front) as (reader, writer):
                sent = request_of(BODY)
                for at in range(0, len(sent), 500_000):
                    writer.write(sent[at : at + 500_000])
                    await writer.drain()
                    await asyncio.sleep(0.02)
                writer.write(request_of(b"behind"))
                assert await answer_of(reader) == said_of(BODY, how)
                assert await answer_of(reader) == said_of(b"behind", b"small")

    on_loop(test())


def test_bodies_of_any_size_leave_nothing_for_the_garbage_collector(on_loop: OnLoop) -> None:
    async def test() -> None:
        memory = BodyMemory()
        gc.collect()
        gc.disable()
        try:
            for size in range(LEAST, LEAST + 300):
                assert memory.take(size) is not None
            assert gc.collect() < 300, "a type for each size would be thousands of objects"
        finally:
            gc.enable()

    on_loop(test())


def test_a_caller_who_leaves_meanwhile_gives_the_memory_back(on_loop: OnLoop, tmp_path: Path) -> None:
    async def test() -> None:
        front = Front(tmp_path, compute=100)
        async with connected(front) as (_, writer):
            writer.write(request_of(BODY)[: 1 * MiB])
            await front.began.wait()
            await eventually(lambda: front.memory.held)
        await eventually(lambda: front.ended)
        gc.collect()
        assert front.ended == ["CallCancelled"]
        assert [len(each) for _, each in front.memory._free] == [2 * MiB]

    on_loop(test())


def test_a_connection_that_stays_open_keeps_no_memory(on_loop: OnLoop, tmp_path: Path) -> None:
    async def test() -> None:
        front = Front(tmp_path, compute=100)
        async with connected(front) as (reader, writer):
            sent = request_of(BODY)
            writer.write(sent[:-10])
            await front.began.wait()
            writer.write(sent[-10:])
            assert await answer_of(reader) == said_of(BODY, b"whole")
            gc.collect()
            (memory,) = (weakref.ref(each) for _, each in front.memory._free)
            front.memory._free.clear()
            assert memory() is None

    on_loop(test())


def test_a_call_that_ends_meanwhile_is_answered_and_the_rest_is_no_request(on_loop: OnLoop, tmp_path: Path) -> None:
    async def test() -> None:
        front = Front(tmp_path, compute=100)
        async with connected(front) as (reader, writer):
            sent = request_of(BODY, "/refused")
            writer.write(sent[: 1 * MiB])
            await eventually(lambda: front.memory.held)
            driven = front.calls[0].driven
            assert driven is not None
            driven.cancel()
            assert await answer_of(reader) == b""
            writer.write(sent[1 * MiB :] + request_of(b"behind"))
            assert await answer_of(reader) == said_of(b"behind", b"small")

    on_loop(test())


def test_memory_is_bounded_and_bodies_beyond_it_wait_on_disk(on_loop: OnLoop, tmp_path: Path) -> None:
    async def test() -> None:
        front = Front(tmp_path, compute=100, bound=2 * MiB)
        kept = front.memory.take(1 * MiB)
        async with connected(front) as (reader, writer):
            for how in (b"file", b"whole"):
                front.began.clear()
                writer.write(request_of(BODY)[:-1])
                await front.began.wait()
                writer.write(BODY[-1:])
                assert await answer_of(reader) == said_of(BODY, how)
                kept = None
        assert kept is None

    on_loop(test())


async def test_memory_that_is_not_used_goes_back_and_a_larger_body_takes_the_place_of_a_smaller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = BodyMemory(4 * MiB)
    memory.take(1 * MiB)
    assert memory.held == 2 * MiB
    lent = memory.take(3 * MiB)
    assert lent is not None
    assert (memory.held, memory.take(1)) == (4 * MiB, None)
    part = lent[0][5:10]
    del lent
    assert memory.take(1) is None, "a part of it is in use"
    del part
    monkeypatch.setattr(body_memory, "_IDLE_S", -1.0)
    memory._sweep()
    assert memory.held == 0
