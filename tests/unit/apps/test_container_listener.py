"""The gateway in the networks of functions, with addresses of loopback in place of theirs."""

from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.responses import PlainTextResponse
from tests.etcd_process import free_port
from uvicorn.server import ServerState
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from gpufaas_apps.container_listener import ContainerListener
from gpufaas_apps.server import configured
from gpufaas_gateway.http.exchange import HttpFront


async def ask(address: str, port: int, peer: str, path: str = "/healthz") -> str:
    transport = httpx.AsyncHTTPTransport(local_address=peer)
    async with httpx.AsyncClient(transport=transport, trust_env=False) as http:
        return (await http.get(f"http://{address}:{port}{path}")).text


async def test_it_listens_in_each_network_that_is_there_for_peers_of_one_and_no_longer_once_that_is_gone() -> None:
    port = free_port()
    listener = ContainerListener("127.0.0.1", port, guarded=False)
    server: Any = SimpleNamespace(started=False, servers=[], server_state=ServerState())
    listener.serve(PlainTextResponse("ok"), server, lambda app, _: configured(app, HttpFront(lambda *_: None)))

    await listener.found({"127.0.0.2": "127.0.0.2/32", "127.0.0.3": "127.0.0.3/32"})
    assert not server.servers, "the gateway has not started"
    server.started = True
    await listener.open()

    assert await ask("127.0.0.2", port, peer="127.0.0.3") == "ok"
    assert await ask("127.0.0.3", port, peer="127.0.0.3") == "ok"
    assert "for functions in containers" in await ask("127.0.0.3", port, peer="127.0.0.9")
    assert "start it with --auth on" in await ask("127.0.0.3", port, peer="127.0.0.3", path="/system/functions")

    with pytest.raises(InvalidStatus) as refused:
        await connect(f"ws://127.0.0.3:{port}/function/f", local_addr=("127.0.0.9", 0))
    assert refused.value.response.status_code == 403
    assert b"for functions in containers" in refused.value.response.body

    await listener.found({"127.0.0.3": "127.0.0.3/32"})

    assert await ask("127.0.0.3", port, peer="127.0.0.3") == "ok"
    assert "for functions in containers" in await ask("127.0.0.3", port, peer="127.0.0.2")
    with pytest.raises(httpx.ConnectError):
        await ask("127.0.0.2", port, peer="127.0.0.3")
    for each in server.servers:
        each.close()


async def test_an_address_that_is_not_to_be_had_is_told_and_the_others_are_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    port = free_port()
    listener = ContainerListener("127.0.0.1", port, guarded=False)
    server: Any = SimpleNamespace(started=True, servers=[], server_state=ServerState())
    listener.serve(PlainTextResponse("ok"), server, lambda app, _: uvicorn.Config(app, log_config=None))

    await listener.found({"192.0.2.1": "192.0.2.0/24", "127.0.0.2": "127.0.0.2/32"})

    assert f"containers do not reach gateway.openfaas: cannot listen on 192.0.2.1:{port}" in caplog.text
    assert await ask("127.0.0.2", port, peer="127.0.0.2") == "ok"
    for each in server.servers:
        each.close()
