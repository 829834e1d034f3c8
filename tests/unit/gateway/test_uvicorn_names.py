"""Connections stand on names of uvicorn that are not its public interface (docs/adr/0069): all of them are there."""

import ast
import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from tests.unit.gateway.conftest import config_of, nothing_else
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from gpufaas_gateway.http.bounded_websocket import BoundedWebSocket
from gpufaas_gateway.http.bounds import BoundedHttp, Cycle
from gpufaas_gateway.http.connection import HttpConnection


def names_of_uvicorn(*ours: type) -> set[str]:
    """
    Return the names of themselves, and of `super()`, that these classes use and do not bring themselves. A name that
    does not begin with ``_`` is uvicorn's also if it is set here. Each class may be a base of the next one.
    """
    used, brought = set[str](), set[str]()
    for cls in ours:
        nodes = list(ast.walk(ast.parse(inspect.getsource(cls))))
        of_others = {each.attr for each in nodes if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Call)
                     and getattr(each.value.func, "id", "") == "super"}  # fmt: skip
        used |= of_others - brought
        of_self = [
            each for each in nodes if isinstance(each, ast.Attribute) and getattr(each.value, "id", "") == "self"
        ]
        brought |= {each for each in vars(cls) if each[:2] != "__"} | set(vars(cls).get("__annotations__", ()))
        brought |= {each.attr for each in of_self if isinstance(each.ctx, ast.Store) and each.attr[0] == "_"}
        used |= {each.attr for each in of_self} - brought
    return used


@pytest.fixture
async def made() -> Any:
    """What uvicorn makes for a connection, by its class."""
    config, state = config_of(HttpToolsProtocol, nothing_else), uvicorn.server.ServerState()
    cycle = dict.fromkeys(list(inspect.signature(RequestResponseCycle).parameters))
    connection = HttpToolsProtocol(config, state, {})
    connection.on_message_begin()
    return {
        HttpToolsProtocol: connection,
        WebSocketsSansIOProtocol: WebSocketsSansIOProtocol(config, state, {}),
        RequestResponseCycle: RequestResponseCycle(**cycle),  # type: ignore[arg-type]
        FlowControl: FlowControl(asyncio.Transport()),
    }


def uses() -> Iterator[tuple[type, set[str]]]:
    others = {"_get_upgrade", "send_400_response", "tasks"}  # replaced here, and called by uvicorn; used by an exchange
    yield HttpToolsProtocol, names_of_uvicorn(BoundedHttp, HttpConnection) | others
    yield WebSocketsSansIOProtocol, names_of_uvicorn(BoundedWebSocket)
    yield RequestResponseCycle, {*Cycle.__annotations__, "body", "message_event", "transport"}
    yield FlowControl, {"drain", "pause_reading", "read_paused", "resume_reading", "write_paused"}


@pytest.mark.parametrize(
    ("cls", "names"), list(uses()), ids=lambda each: each.__name__ if isinstance(each, type) else ""
)
async def test_uvicorn_has_the_names_that_connections_use(cls: type, names: set[str], made: dict[type, Any]) -> None:
    gone = sorted(each for each in names if not hasattr(made[cls], each))

    assert len(names) >= 5
    assert not gone, f"{cls.__name__} of uvicorn {uvicorn.__version__} has no {', '.join(gone)}: see docs/adr/0069"
