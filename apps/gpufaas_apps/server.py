"""The HTTP server of a gateway: uvicorn with our bounds, and callbacks at its start and stop."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, Final, cast

import uvicorn

from gpufaas_apps.process import settle
from gpufaas_gateway.fronts.websocket import MAX_MESSAGE
from gpufaas_gateway.http.bounded_websocket import BoundedWebSocket
from gpufaas_gateway.http.connection import HttpConnection
from gpufaas_gateway.http.exchange import HttpFront

GRACE_S: Final = 10
"""How long open calls may take to end when the process is asked to stop."""
_TICKS_PER_S: Final = 10
"""As uvicorn counts them."""


class GatewayServer(uvicorn.Server):
    """
    Stops at SIGTERM and SIGINT.

    :param on_open: called when the port is open
    :param on_stop: called before the port is closed: ends what would hold connections open for the whole grace
    """

    def __init__(
        self, config: uvicorn.Config, on_open: Callable[[], Awaitable[None]], on_stop: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(config)
        self._on_open = on_open
        self._on_stop = on_stop
        self._start_ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._asked_to_exit = asyncio.Event()

    async def opened(self) -> bool:
        """Return when the port is open; False: the start failed, or a stop was asked for."""
        await self._start_ended.wait()
        return self.started and not self.should_exit

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """
        Handle signals as uvicorn does, but do not raise them again after serving: the watchdog would take that for a
        second signal. After serving, only the watchdog sees signals, so that the process ends in order.
        """
        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            signal.signal(number, self.handle_exit)
        try:
            yield
        finally:
            for number in numbers:
                signal.signal(number, lambda *_: None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
            await self._on_open()
            settle()
        finally:
            self._start_ended.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._loop.call_soon_threadsafe(self._asked_to_exit.set)

    def stop(self) -> None:
        """Stop serving, as if a signal had asked for it."""
        self.should_exit = True
        self._asked_to_exit.set()

    async def main_loop(self) -> None:
        """Serve until it is asked to exit. uvicorn would look ten times a second, which costs a busy process 1 ms."""
        ticks = 0
        while not await self.on_tick(ticks):
            ticks += _TICKS_PER_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked_to_exit.wait(), 1.0)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._on_stop()
        await super().shutdown(sockets)


def configured(app: Any, front: HttpFront) -> uvicorn.Config:
    """Return the settings of a server of calls, and of *app* for all that is no call."""
    return uvicorn.Config(
        app,
        interface="asgi3",
        http=cast(Any, partial(HttpConnection, front=front)),
        ws=BoundedWebSocket,
        ws_max_size=MAX_MESSAGE,
        ws_per_message_deflate=False,  # costs memory for each connection; functions may compress their messages
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,  # X-Forwarded-* are passed on unchanged
        timeout_keep_alive=75,
        timeout_graceful_shutdown=GRACE_S,
        backlog=2048,
    )
