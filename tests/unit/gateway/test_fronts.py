"""The table of fronts: which part of a gateway serves a request, by the prefix of its path."""

import logging
from typing import Any

import httpx
import pytest
from starlette.responses import Response
from tests.unit.gateway.conftest import DEVICE, listening, raw, scope_of

from gpufaas_core.messages import Outer
from gpufaas_core.model import FunctionId
from gpufaas_core.origin import Origins
from gpufaas_gateway.answering import Answer
from gpufaas_gateway.fronts.openfaas import PREFIX, OpenFaasFront
from gpufaas_gateway.fronts.table import Fronts
from gpufaas_gateway.fronts.target import Target
from gpufaas_gateway.fronts.websocket import OUTER
from gpufaas_gateway.http.connection import HttpConnection
from gpufaas_gateway.http.exchange import HttpFront
from gpufaas_gateway.request import Request

WORKER = Outer(DEVICE.id, FunctionId("outer.openfaas-fn@1"))


class App:
    """Answers with its name; `scope` is that of the last request."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scope = scope
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "reason": self._name})
        else:
            await Response(self._name)(scope, receive, send)


async def run_of(name: str, request: Request) -> Answer:
    said = f"{name} {request.name} {request.path}".encode()
    return Answer(200, [(b"content-length", b"%d" % len(said))], said)


class Table:
    def __init__(self) -> None:
        self.origins, self.rest, self.sockets = Origins(), App("management"), App("a websocket")
        self.fronts = Fronts(
            self.origins,
            {
                PREFIX: OpenFaasFront(lambda request, _: run_of("function", request)),
                b"/v1/": lambda below, query, outer: Target(self._of_v1, "model", "/" + below.decode(), query, outer),
            },
            {PREFIX: self.sockets},
            {b"/async-function/": App("accepted")},
            self.rest,
        )

    def _of_v1(self, request: Request, _: object) -> Any:
        return run_of("v1", request)

    async def websocket(self, target: str) -> Any:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "websocket.connect"}

        await self.fronts({**scope_of("GET", target), "type": "websocket"}, receive, send)
        return sent[0]


async def test_a_plain_call_goes_to_the_front_of_its_prefix_past_the_application() -> None:
    table = Table()
    async with listening(HttpConnection, table.fronts, front=HttpFront(table.fronts.target)) as port:
        for path, said in (
            ("/function/f/a", "function f /a"),
            ("/v1/chat", "v1 model /chat"),
            ("/system/info", "management"),
            ("/", "management"),
        ):
            assert await _asked(port, path) == said


async def _asked(port: int, path: str) -> str:
    async with httpx.AsyncClient() as client:
        return (await client.get(f"http://127.0.0.1:{port}{path}")).text


@pytest.mark.parametrize(
    ("method", "target", "said"),
    [
        ("POST", "/async-function/f", "accepted"),
        ("GET", "/async-function/f", "management"),
        ("POST", "/system/functions", "management"),
    ],
)
async def test_other_requests_go_to_an_application(method: str, target: str, said: str) -> None:
    assert (await raw(Table().fronts, method, target)).text == said


async def test_websockets_are_for_functions_only() -> None:
    assert (await Table().websocket("/function/f"))["reason"] == "a websocket"
    assert (await Table().websocket("/async-function/f"))["status"] == 400


async def test_the_token_in_the_address_of_a_worker_says_who_calls_and_the_path_is_meant_without_it() -> None:
    table = Table()
    address = table.origins.address("", WORKER)

    await raw(table.fronts, "GET", address + "/system/%66unctions")
    await table.websocket(address + "/function/f")
    target = table.fronts.target(f"{address}/function/f/x".encode(), b"")

    assert table.rest.scope[OUTER] == table.sockets.scope[OUTER] == WORKER
    assert (table.rest.scope["path"], table.rest.scope["raw_path"]) == ("/system/functions", b"/system/%66unctions")
    assert target is not None
    assert (target.name, target.path, target.outer) == ("f", "/x", WORKER)


async def test_a_forged_token_is_refused() -> None:
    table = Table()
    address = table.origins.address("", WORKER) + "x"

    assert table.fronts.target(f"{address}/function/f".encode(), b"") is None, "the application refuses it"
    assert (await raw(table.fronts, "GET", address + "/function/f")).status_code == 403
    assert (await table.websocket(address + "/function/f"))["status"] == 403


async def test_a_bug_of_an_application_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(*_: Any) -> None:
        raise AssertionError("a bug")

    with caplog.at_level(logging.ERROR), pytest.raises(AssertionError):
        await raw(Fronts(Origins(), {}, {}, {}, broken), "GET", "/x")

    assert "a request failed in the platform itself: /x" in caplog.text
