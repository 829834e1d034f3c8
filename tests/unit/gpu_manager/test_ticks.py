"""Connections on which small pieces come often are read together, each by what comes for it."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from tests.waiting import eventually

from gpufaas_core.errors import GpufaasError
from gpufaas_core.frames import CallHead
from gpufaas_core.messages import Grant
from gpufaas_core.model import CallId, DeviceId, FunctionId, Part
from gpufaas_gpu_manager.exchange import STREAM_BUFFER, Exchange
from gpufaas_gpu_manager.http_slots import HttpSlot
from gpufaas_gpu_manager.ticks import PIECE, TICK_S, Ticks


class Loop:
    """An event loop whose time the test has."""

    def __init__(self) -> None:
        self.now = 0.0
        self.woken: Callable[[], None] | None = None
        """Called when the descriptor that is listened to can be read."""
        self.due: list[Callable[[], None]] = []

    def time(self) -> float:
        return self.now

    def add_reader(self, _: int, woken: Callable[[], None]) -> None:
        assert self.woken is None
        self.woken = woken

    def remove_reader(self, _: int) -> None:
        assert self.woken is not None
        self.woken = None

    def call_later(self, delay: float, action: Callable[[], None]) -> Any:
        assert delay == TICK_S
        self.due.append(action)
        loop = self

        class Handle:
            def cancel(self) -> None:
                with contextlib.suppress(ValueError):
                    loop.due.remove(action)

        return Handle()

    def tick(self) -> None:
        self.now += TICK_S
        self.due.pop(0)()


class Sink:
    """A connection that is read, and where what is read comes from."""

    def __init__(self, ticks: Ticks) -> None:
        self.there, self.here = socket.socketpair()
        self.here.setblocking(False)
        self.read: list[bytes] = []
        self.left = False
        self.fails = False
        self._ticks = ticks
        ticks.add(self.here.fileno(), self)

    def data_received(self, data: bytes) -> None:
        self.read.append(data)
        if self.fails:
            raise RuntimeError("a bug")

    def leave_ticks(self) -> None:
        self.left = True
        self._ticks.remove(self.here.fileno(), self)

    def close(self) -> None:
        self.there.close()
        self.here.close()


class Rig:
    def __init__(self) -> None:
        self.loop = Loop()
        self.ticks = Ticks(self.loop)  # type: ignore[arg-type]
        self.sinks = [Sink(self.ticks) for _ in range(3)]

    def wake(self, *said: bytes) -> None:
        """Say something on the first connections, for which the loop wakes."""
        for sink, each in zip(self.sinks, said, strict=False):
            if each:
                sink.there.send(each)
        assert self.loop.woken is not None
        self.loop.woken()

    def make_busy(self) -> None:
        while self.loop.woken is not None:
            self.wake(b"a", b"b", b"c")


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.ticks.close()
    assert not rig.loop.due
    assert rig.loop.woken is None
    for sink in rig.sinks:
        sink.close()


def test_few_pieces_are_read_as_they_come(rig: Rig) -> None:
    for _ in range(100):
        rig.loop.now += TICK_S
        rig.wake(b"one")

    assert rig.sinks[0].read == [b"one"] * 100
    assert not rig.loop.due


def test_many_pieces_are_read_by_ticks_until_they_are_few(rig: Rig) -> None:
    rig.make_busy()
    for sink in rig.sinks:
        sink.read.clear()
        sink.there.send(b"one")
        sink.there.send(b"two")

    rig.loop.tick()
    assert [sink.read for sink in rig.sinks] == [[b"onetwo"]] * 3
    assert rig.loop.woken is None

    ticks = 0
    while rig.loop.due:
        rig.sinks[1].there.send(b"three")
        rig.loop.tick()
        ticks += 1
    assert rig.sinks[1].read == [b"onetwo"] + [b"three"] * ticks
    assert rig.loop.woken is not None
    assert ticks > 2, "a server may pause"


def test_one_that_was_removed_is_not_read(rig: Rig) -> None:
    first, second, _ = rig.sinks
    rig.ticks.remove(first.here.fileno(), first)

    rig.wake(b"to none", b"to the second")

    assert (first.read, second.read) == ([], [b"to the second"])


def test_one_whose_descriptor_is_anothers_by_now_does_not_remove_that(rig: Rig) -> None:
    closed, other, _ = rig.sinks
    number = closed.here.fileno()
    closed.here.close()
    rig.ticks.remove(other.here.fileno(), other)
    os.dup2(other.here.fileno(), number)
    rig.ticks.add(number, other)

    rig.ticks.remove(number, closed)
    rig.wake(b"", b"to the other")

    assert other.read == [b"to the other"]
    os.close(number)


def test_the_end_and_large_pieces_are_for_the_transport(rig: Rig) -> None:
    ended, large, small = rig.sinks
    ended.there.close()
    rig.wake()
    rig.wake()

    large.there.send(b"x" * (PIECE + 1))
    small.there.send(b"y")
    rig.wake()

    assert (ended.read, ended.left) == ([], True)
    assert (large.read, large.left) == ([b"x" * PIECE], True)
    assert (small.read, small.left) == ([b"y"], False)


def test_one_that_fails_does_not_end_the_ticks_of_the_others(rig: Rig) -> None:
    rig.make_busy()
    rig.sinks[0].fails = True
    for sink in rig.sinks:
        sink.read.clear()
        sink.there.send(b"d")

    with pytest.raises(RuntimeError, match="a bug"):
        rig.loop.tick()
    rig.loop.tick()

    assert [sink.read for sink in rig.sinks] == [[b"d"]] * 3


# --- as slots use them ---


class Owner:
    def on_done(self, *_: Any) -> None: ...

    def on_slot_lost(self) -> None: ...

    def on_call_lost(self, *_: Any) -> None: ...


class Counted(Ticks):
    added = removed = 0

    def add(self, fd: int, reader: Any) -> None:
        super().add(fd, reader)
        self.added += 1

    def remove(self, fd: int, reader: Any) -> None:
        super().remove(fd, reader)
        self.removed += 1


class Server:
    """Answers in chunks that the test says."""

    def __init__(self) -> None:
        self.connections = 0
        self.writer: asyncio.StreamWriter
        self.asked = asyncio.Event()
        self.over = asyncio.Event()
        self.ticks = Counted(asyncio.get_running_loop())
        self.slot: HttpSlot

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writer = writer
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                self.asked.set()
        self.over.set()
        writer.transport.abort()

    async def call(self) -> Exchange:
        """Call it; return when its answer has come in so many pieces that the ticks read it."""
        loop = asyncio.get_running_loop()
        grant = Grant(1, 1, (CallId("c"),), FunctionId("f"), "d", (Part(DeviceId("n/cpu:0"), 1),), False)
        exchange = Exchange(grant, Owner(), loop, 0.0)
        exchange.arrive(CallHead("c", "GET", "/", b"", []), b"")
        self.asked.clear()
        exchange.bind(self.slot, 0.0, STREAM_BUFFER)
        await self.asked.wait()
        before = self.ticks.added
        self.writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        await exchange.answer()
        while self.ticks.added == before:
            self.say(b"?")
            assert await exchange.chunk()
        return exchange

    def say(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    server.slot = HttpSlot(Owner(), "127.0.0.1", port, asyncio.get_running_loop(), server.ticks)
    async with asyncio.timeout(60):
        yield server
        server.slot.close()
        assert server.ticks.added == server.ticks.removed
        server.ticks.close()
        await server.over.wait()
    listening.close()


async def rest(exchange: Exchange) -> bytes:
    found = b""
    while (piece := await exchange.chunk()) is not None:
        found += piece
    return found


async def test_an_answer_in_many_pieces_is_whole_and_its_connection_is_kept(server: Server) -> None:
    for _ in range(2):
        exchange = await server.call()
        pieces = [b"%d," % number for number in range(500)]
        for piece in pieces:
            server.say(piece)
            await asyncio.sleep(0)
        server.say(b"x" * 300_000)
        server.writer.write(b"0\r\n\r\n")

        assert (await rest(exchange)).lstrip(b"?") == b"".join(pieces) + b"x" * 300_000

    assert server.connections == 1


@pytest.mark.parametrize(("said", "why"), [(b"", "in the middle of its answer"), (b"nonsense\r\n", "no HTTP answer")])
async def test_an_answer_that_breaks_off_is_an_error(server: Server, said: bytes, why: str) -> None:
    exchange = await server.call()
    server.say(b"one")
    server.writer.write(said)
    server.writer.close()

    with pytest.raises(GpufaasError, match=why):
        await rest(exchange)


async def test_a_slow_reader_holds_the_server_up(server: Server) -> None:
    exchange = await server.call()
    said = 0
    while server.writer.transport.get_write_buffer_size() < 1_000_000:  # type: ignore[attr-defined]
        server.say(b"x" * 1000)
        said += 1000
        await asyncio.sleep(0)
        assert exchange.unread < 4 * STREAM_BUFFER
    server.say(b"the end")
    server.writer.write(b"0\r\n\r\n")

    assert (await rest(exchange)).lstrip(b"?") == b"x" * said + b"the end"


async def test_a_caller_who_leaves_closes_the_connection(server: Server) -> None:
    exchange = await server.call()

    server.slot.cancel(exchange)

    await server.over.wait()
    await eventually(lambda: server.ticks.removed == 1)
