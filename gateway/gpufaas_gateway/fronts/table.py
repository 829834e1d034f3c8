"""
Which front serves a request, by the prefix of its path.

A plain call goes straight from its connection to its front, past ASGI (`gpufaas_gateway.http`). WebSockets and
asynchronous calls have ASGI applications of their own, which are public. All else is management.

A call that a worker makes has a token before its path, which says who makes it (`gpufaas_core.origin`).
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gpufaas_core.messages import Outer
from gpufaas_core.origin import PREFIX, Origins, without_origin
from gpufaas_gateway.answer_stream import BrokenAnswer
from gpufaas_gateway.errors import headers_of
from gpufaas_gateway.fronts.target import ReadTarget, Target
from gpufaas_gateway.fronts.websocket import OUTER

log = logging.getLogger("gateway")

_FROM_WORKER: Final = PREFIX.encode()
_FORGED: Final = Response(
    b"the address has a token that is of no worker of this platform: functions call OPENFAAS_URL as it stands in their "
    b"environment, everybody else the gateway's own address\n",
    403,
    headers_of(),
)
_NO_WEBSOCKETS: Final = Response(b"WebSockets are for functions: /function/NAME\n", 400, headers_of())


@dataclass(frozen=True, eq=False)
class Fronts:
    """The table, and the ASGI application of all that is no plain call. A forged token is answered 403."""

    origins: Origins
    calls: Mapping[bytes, ReadTarget]
    """What reads the URLs of plain calls, by the prefix of their paths."""
    websockets: Mapping[bytes, ASGIApp]
    """What serves WebSockets; on other paths they are refused."""
    posted: Mapping[bytes, ASGIApp]
    """What serves POST requests."""
    rest: ASGIApp
    """What serves all other requests."""

    def target(self, path: bytes, query: bytes) -> Target | None:
        """Return what the URL of a plain call says; None: it is of none, and for the application."""
        outer = None
        if path.startswith(_FROM_WORKER):
            path, outer = self._caller(path)
            if outer is None:
                return None
        for prefix, read in self.calls.items():
            if path.startswith(prefix):
                return read(path[len(prefix) :], query, outer)
        return None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["raw_path"].startswith(_FROM_WORKER):
                path, outer = self._caller(scope["raw_path"])
                if outer is None:
                    return await _FORGED(scope, receive, send)
                scope = {**scope, "path": without_origin(scope["path"])[1], "raw_path": path, OUTER: outer}
            await self._app_of(scope)(scope, receive, send)
        except BrokenAnswer:
            raise  # the server closes the connection, which is the message
        except Exception:
            log.exception("a request failed in the platform itself: %s", scope.get("path"))
            raise

    def _caller(self, path: bytes) -> tuple[bytes, Outer | None]:
        """Return the path that is meant by one with a token, and the worker that the token is of, if it is ours."""
        token, _, meant = path[len(_FROM_WORKER) :].partition(b"/")
        return b"/" + meant, self.origins.read(unquote(token.decode("latin-1")))

    def _app_of(self, scope: Scope) -> ASGIApp:
        if scope["type"] == "websocket":
            return _found(self.websockets, scope["raw_path"]) or _NO_WEBSOCKETS
        posted = _found(self.posted, scope["raw_path"]) if scope["method"] == "POST" else None
        return posted or self.rest


def _found(table: Mapping[bytes, ASGIApp], path: bytes) -> ASGIApp | None:
    return next((app for prefix, app in table.items() if path.startswith(prefix)), None)
