"""How bodies of management requests are read."""

import asyncio
import hashlib
from collections.abc import AsyncIterator

import pytest
from tests.unit.gateway.conftest import Gateway, is_platform_error

from gpufaas_gateway import typed_routes


async def stopping(*pieces: bytes) -> AsyncIterator[bytes]:
    """Then nothing more comes, and no end either."""
    for piece in pieces:
        yield piece
    await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("path", ["/system/functions", f"/system/artifacts/{hashlib.sha256(b'half').hexdigest()}"])
async def test_a_body_that_stops_half_way_is_given_up(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(typed_routes, "_PATIENCE_S", 0.05)

    answer = await gateway.client.put(path, content=stopping(b"ha"))

    assert answer.status_code == 408
    assert "nothing of the body arrived for 0.05 s" in answer.text
    assert is_platform_error(answer)


async def test_a_body_that_dawdles_is_given_up(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typed_routes, "_MAX_JSON_S", -1.0)

    answer = await gateway.client.put("/system/functions", content=stopping(b"{"))

    assert (answer.status_code, "did not arrive within" in answer.text) == (408, True)
