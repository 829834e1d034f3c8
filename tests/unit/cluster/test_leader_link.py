"""A service that the leading scheduler refuses tries again, or ends."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.waiting import LIMIT_S

from gpufaas_cluster import control, leader_link
from gpufaas_cluster.connection import Identity, Link, TurnedAway, listen
from gpufaas_cluster.leader_link import LeaderLink

TOKEN = b"a token of sixteen bytes"


class Nobody:
    def begin(self, link: Link) -> None: ...

    def heard(self, message: object) -> None: ...

    def end(self) -> None: ...


async def test_one_whose_id_another_one_has_for_long_ends_with_a_line_that_says_who(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leader_link, "TWIN_S", 0.3)
    tries = 0

    def turn(_: Link, hello: control.ClientHello) -> control.Turned:
        nonlocal tries
        tries += 1
        return control.Turned("duplicate", f"a node {hello.id!r} is there already (at 10.0.0.4:7080)")

    server = await listen("127.0.0.1:0", Identity("scheduler", "s", "b", TOKEN), turn)
    here = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    link = LeaderLink(Identity("node", "n1", "b", TOKEN), Nobody())

    async def leaders() -> AsyncIterator[str]:
        yield here

    await link.follow(leaders())
    with pytest.raises(TurnedAway, match=r"a node 'n1' is there already \(at 10\.0\.0\.4:7080\)"):
        await asyncio.wait_for(link.run(), LIMIT_S)

    assert tries > 1  # its own predecessor may be what is there
    server.close()
