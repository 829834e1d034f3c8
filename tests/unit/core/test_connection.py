"""Links that are silent, and ends that stood still themselves."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gpufaas_core import connection, wire
from gpufaas_core.connection import Identity, Link, connect, listen

TOKEN = b"a token of sixteen bytes"


@pytest.fixture
async def ends(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Link, Link, list[str]]]:
    """Both ends of a link whose silence may last 0.4 s, and why they ended."""
    monkeypatch.setattr(wire, "SILENCE_S", 0.4)
    monkeypatch.setattr(wire, "BEAT_S", 0.1)
    monkeypatch.setattr(connection, "_LATE_S", 0.2)
    taken: list[Link] = []
    ended: list[str] = []

    def accept(link: Link, _: wire.Hello) -> int:
        link.on_message = lambda _: None
        link.on_lost = ended.append
        taken.append(link)
        return 1

    server = await listen("127.0.0.1:0", Identity("scheduler", "s", "b", TOKEN), accept)
    port = server.sockets[0].getsockname()[1]
    made = await connect(f"127.0.0.1:{port}", Identity("node", "n", "b", TOKEN))
    made.attend(lambda _: None, ended.append)
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


async def test_ends_that_stood_still_themselves_do_not_blame_the_other(ends: Any) -> None:
    """As when the machine was asleep: both have beats of the other in their sockets."""
    _, _, ended = ends

    for _ in range(3):
        time.sleep(0.6)
        await asyncio.sleep(0.15)

    assert ended == []
