"""Silent links, and ends that were stopped themselves."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gpufaas_cluster import connection, control
from gpufaas_cluster.connection import Identity, Link, TurnedAway, connect, listen

TOKEN = b"a token of sixteen bytes"


@pytest.fixture
async def ends(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Link, Link, list[str]]]:
    """Both ends of a link whose silence may last 0.4 s, and why they ended."""
    monkeypatch.setattr(control, "SILENCE_S", 0.4)
    monkeypatch.setattr(control, "BEAT_S", 0.1)
    monkeypatch.setattr(connection, "_LATE_S", 0.2)
    taken: list[Link] = []
    ended: list[str] = []

    def accept(link: Link, _: control.ClientHello) -> int:
        link.on_message = lambda _: None
        link.on_lost = ended.append
        taken.append(link)
        return 1

    server = await listen("127.0.0.1:0", Identity("scheduler", "s", "b", TOKEN), accept)
    port = server.sockets[0].getsockname()[1]
    made = await connect(f"127.0.0.1:{port}", Identity("node", "n", "b", TOKEN))
    made.attend(lambda _: None).add_done_callback(lambda lost: ended.append(lost.result()))
    yield made, taken[0], ended
    made.close()
    server.close()
    await asyncio.sleep(0)


async def test_an_end_that_says_nothing_is_given_up(ends: Any) -> None:
    made, _, ended = ends
    assert made._beat is not None
    made._beat.cancel()

    async with asyncio.timeout(10):
        while not ended:
            await asyncio.sleep(0.01)

    assert ended[0].startswith("nothing was heard for")


@pytest.mark.slow
async def test_ends_that_stood_still_themselves_do_not_blame_the_other(ends: Any) -> None:
    """As when the machine was asleep: both have beats of the other in their sockets."""
    _, _, ended = ends

    for _ in range(3):
        time.sleep(0.6)
        await asyncio.sleep(0.15)

    assert ended == []


@pytest.fixture
async def address(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[str, int]]:
    """An address where 16 strangers, 4 from one address, may keep a handshake open."""
    monkeypatch.setattr(connection, "MAX_UNPROVEN", 16)
    caplog.set_level("WARNING")
    server = await listen("127.0.0.1:0", Identity("scheduler", "s", "b", TOKEN), lambda _, __: 1)
    yield server.sockets[0].getsockname()[:2]
    server.close()


def hello(**given: Any) -> bytes:
    known: dict[str, Any] = {"id": "n", "boot": "b", "nonce": b"", "proof": b"", "version": "1"}
    return control.encode(control.ClientHello(control.PROTOCOL, "node", **known | given))


@pytest.mark.parametrize("said", [
    (64 << 20).to_bytes(4, "little") + b"a" * 8192,
    b"\x02\0\0\0\x91\x7f" * 1000,
    hello(version="1" * 5000), hello(id="n\n2026-01-01 WARNING all is well"), hello(id="n" * 65), hello(id=""),
    hello(boot="b " * 20),
], ids=["large", "unknown", "long", "line", "name", "nameless", "boot"])  # fmt: skip
async def test_who_has_not_shown_the_token_is_listened_to_for_one_short_message(
    address: tuple[str, int], said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await asyncio.open_connection(*address)
    await reader.read(1024)  # the challenge
    writer.write(said)

    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    assert "all is well" not in caplog.text


async def test_connections_that_do_not_introduce_themselves_push_out_each_other_and_nobody_else(
    address: tuple[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    held = [await asyncio.open_connection(*address) for _ in range(20)]
    for reader, _ in held[-4:]:
        await reader.read(1024)

    made = await connect(f"{address[0]}:{address[1]}", Identity("node", "n", "b", TOKEN))

    assert not made.closed
    made.close()
    for reader, _ in held[:16]:
        with contextlib.suppress(ConnectionError):
            assert len(await asyncio.wait_for(reader.read(), 5)) < 200, "they are closed"
    assert caplog.text.count("listener.crowded") == 1
    for _, writer in held:
        writer.close()


# --- releases that speak otherwise ---


async def test_a_gateway_of_another_release_is_told_which_both_are_and_the_node_logs_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = await listen("127.0.0.1:0", Identity("node", "n", "b", TOKEN, "1.0"), lambda _, __: 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
    await reader.read(1024)  # the challenge
    writer.write(control.encode(control.ClientHello(control.PROTOCOL + 1, "gateway", "g", "b", b"", b"", "2.0", 1)))

    (turned,) = control.MessageReader().feed(await asyncio.wait_for(reader.read(), 5))

    assert turned.code == "protocol"
    assert turned.message == (
        f"gateway g speaks protocol {control.PROTOCOL + 1} (release '2.0'), this node speaks {control.PROTOCOL} "
        "(release 1.0): run the same release on both"
    )
    assert turned.message in caplog.text
    writer.close()
    server.close()


@pytest.mark.parametrize("answers", [True, False])
async def test_a_gateway_says_which_release_a_node_speaks_that_turns_it_away_or_does_not_understand_it(
    answers: bool,
) -> None:
    async def other_release(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(control.encode(control.Challenge("gpufaas node 0.9", control.PROTOCOL - 1, b"n" * 16)))
        heard.extend(control.MessageReader().feed(await reader.read(4096)))
        if answers:
            writer.write(control.encode(control.Turned("protocol", "as the node logs it")))
        writer.close()

    heard: list[control.ClientHello] = []
    server = await asyncio.start_server(other_release, "127.0.0.1", 0)
    address = "127.0.0.1:{1}".format(*server.sockets[0].getsockname())

    with pytest.raises(TurnedAway) as turned:
        await connect(address, Identity("gateway", "g", "b", TOKEN, "1.0"))

    assert (heard[0].id, heard[0].version, heard[0].protocol) == ("g", "1.0", control.PROTOCOL)
    assert heard[0].window is False, "protocol 3 has no number there"
    assert turned.value.code == "protocol"
    assert str(turned.value) == (
        "as the node logs it"
        if answers
        else f"{address} speaks protocol {control.PROTOCOL - 1} (gpufaas node 0.9), this release (1.0) speaks "
        f"{control.PROTOCOL}: run the same release on both"
    )
    server.close()


def test_a_large_message_costs_little_more_than_its_bytes() -> None:
    """It was copied for every piece that came of it: 64 MiB took a minute of everybody's time."""
    size = 16 << 20
    whole = control.encode(control.QueryReply(1, b"x" * size))
    pieces = [whole[at : at + 4096] for at in range(0, len(whole), 4096)]
    began, joined = time.thread_time(), bytearray()
    for piece in pieces:
        joined += piece
    least_s = time.thread_time() - began

    began, reader = time.thread_time(), control.MessageReader()
    found = [each for piece in pieces for each in reader.feed(piece)]

    assert [len(each.value) for each in found] == [size]
    assert time.thread_time() - began < 50 * max(least_s, 0.005)
