"""The status port of a service: ``/healthz``, ``/readyz``, ``/metrics``, and other paths of its own."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import uvicorn

from gpufaas_apps.process import listen
from gpufaas_core.peers import may_be_worker

_T = TypeVar("_T")
App = Callable[[Any, Any, Any], Awaitable[None]]


@dataclass
class Status:
    """What the status port answers. `ready` returns why the service is not ready; empty, or "ready …": it is."""

    ready: Callable[[], str | Awaitable[str]] = lambda: ""
    metrics: Callable[[], bytes | Awaitable[bytes]] = lambda: b""
    more: App | None = None
    """Serves all other paths."""

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path == "/healthz":
            await _answer(send, 200, b"OK\n")
        elif path == "/readyz":
            why = await _value(self.ready()) or "ready"
            await _answer(send, 200 if why.startswith("ready") else 503, f"{why}\n".encode())
        elif may_be_worker(scope["client"], scope["server"]):
            await _answer(send, 403, b"functions get /healthz and /readyz here\n")
        elif path == "/metrics":
            await _answer(send, 200, await _value(self.metrics()), b"text/plain; version=0.0.4; charset=utf-8")
        elif self.more is not None:
            await self.more(scope, receive, send)
        else:
            await _answer(send, 404, b"here are /healthz, /readyz and /metrics\n")


async def _value(made: _T | Awaitable[_T]) -> _T:
    return await made if isinstance(made, Awaitable) else made


async def _answer(send: Any, status: int, body: bytes, kind: bytes = b"text/plain; charset=utf-8") -> None:
    headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
    if status == 503:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class _StatusServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield  # signals are for the service


@contextlib.asynccontextmanager
async def status_served(status: Status, host: str, port: int) -> AsyncGenerator[int]:
    """
    Serve *status* within the context; yield the port.

    :raises GpufaasError: the port is taken
    """
    listening = listen(host, port, "--status-port")
    config = uvicorn.Config(
        status.app,
        interface="asgi3",
        http="h11",  # it bounds heads: no password is asked for here
        ws="none",
        proxy_headers=False,  # else a function says who asks
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    server = _StatusServer(config)
    task = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield int(listening.getsockname()[1])
    finally:
        server.should_exit = True
        await task
