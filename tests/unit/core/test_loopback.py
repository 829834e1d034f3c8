"""Connections within the machine: they are not paced, and what waits in them is counted."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from gpufaas_core.loopback import count_unread, count_unsent, unpace


class Transport(asyncio.BaseTransport):
    def __init__(self, peer: Any) -> None:
        super().__init__({"peername": peer, "socket": self})
        self.options: list[Any] = []

    def setsockopt(self, *option: Any) -> None:
        self.options.append(option)


@pytest.mark.parametrize(
    ("peer", "here"),
    [
        (("127.0.0.1", 1), True), (("127.9.9.9", 1), True), (("::1", 1, 0, 0), True),
        (("::ffff:127.0.0.1", 1, 0, 0), True),
        (("10.127.0.1", 1), False), (("2001::1", 1, 0, 0), False), ("", False), (None, False),
    ],
)  # fmt: skip
def test_only_what_goes_to_this_machine(peer: Any, here: bool) -> None:
    transport = Transport(peer)

    unpace(transport)

    assert transport.options == ([(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")] if here else [])


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(1 << 20):
        writer.write(piece)
        await writer.drain()
    writer.close()


async def echoed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> bool:
    writer.write(body)
    writer.write_eof()
    found = await reader.read(-1)
    writer.close()
    await writer.wait_closed()
    return found == body


async def test_the_kernel_takes_it_and_bytes_go_through() -> None:
    async with await asyncio.start_server(copy, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())

        unpace(writer.transport)

        found = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        assert found.rstrip(b"\0") == b"reno"
        assert await echoed(reader, writer, b"x" * 3_000_000)


async def test_a_unix_socket_stays_as_it_is(tmp_path: Path) -> None:
    async with await asyncio.start_unix_server(copy, tmp_path / "socket"):
        reader, writer = await asyncio.open_unix_connection(tmp_path / "socket")

        unpace(writer.transport)

        assert await echoed(reader, writer, b"one")


async def test_what_waits_in_the_kernel_is_counted() -> None:
    loop, (here, there) = asyncio.get_running_loop(), socket.socketpair()
    transport, _ = await loop.create_connection(asyncio.Protocol, sock=here)
    transport.pause_reading()
    there.send(b"12345")
    transport.write(b"1234567")

    assert count_unread(transport) == 5
    assert count_unsent(transport) > 0
    assert there.recv(100) == b"1234567"
    assert count_unsent(transport) == 0

    transport.abort()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert transport.get_extra_info("socket").fileno() == -1
    assert (count_unread(transport), count_unsent(transport)) == (0, 0)
    there.close()
