"""Calls made by workers: the token in their address says which worker made them (`gpufaas_core.origin`)."""

from collections.abc import Awaitable

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gpufaas_core.origin import PREFIX, Origins, without_origin
from gpufaas_gateway.errors import headers_of

SCOPE_KEY = "gpufaas.outer"
"""Key in an ASGI scope: the worker that made the call (`Outer`)."""
_RAW_PREFIX = PREFIX.encode()
_REFUSED = (
    b"the address has a token that is of no worker of this platform: functions call OPENFAAS_URL as it stands in their "
    b"environment, everybody else the gateway's own address\n"
)


class FromWorkers:
    """Removes the token from the path of a worker's call and passes the call to *app*. A forged token is 403."""

    def __init__(self, app: ASGIApp, origins: Origins) -> None:
        self._app = app
        self._origins = origins

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        # Not a coroutine function itself: a call from elsewhere need not go through one more.
        if scope["type"] == "lifespan" or not scope["raw_path"].startswith(_RAW_PREFIX):
            return self._app(scope, receive, send)
        return self._from_worker(scope, receive, send)

    async def _from_worker(self, scope: Scope, receive: Receive, send: Send) -> None:
        token, path = without_origin(scope["path"])
        outer = self._origins.read(token)
        if outer is None:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": "of no worker of this platform"})
            else:
                await Response(_REFUSED, 403, headers_of())(scope, receive, send)
            return
        raw = b"/" + scope["raw_path"][len(_RAW_PREFIX) :].partition(b"/")[2]
        await self._app({**scope, "path": path, "raw_path": raw, SCOPE_KEY: outer}, receive, send)
