"""Which part of a gateway answers a request: the plain ASGI app that its server runs."""

import logging
from typing import Any

from gpufaas_async_calls.api import METHOD as ASYNC_METHOD
from gpufaas_async_calls.api import PREFIX as ASYNC_PREFIX
from gpufaas_async_calls.api import AsyncInvocations
from gpufaas_gateway.auth import App
from gpufaas_gateway.invoke import PREFIX, Invocations, Receive, Send
from gpufaas_gateway.request import BrokenAnswer
from gpufaas_gateway.websocket_calls import WebSocketCalls, refuse_elsewhere


class Routes:
    """
    Calls of functions, which are public and on the hot path, go straight to their shells.

    :param management: answers all other requests
    """

    def __init__(
        self, invocations: Invocations, async_invocations: AsyncInvocations, websocket_calls: WebSocketCalls,
        management: App,
    ) -> None:  # fmt: skip
        self._invocations = invocations
        self._async_invocations = async_invocations
        self._websocket_calls = websocket_calls
        self._management = management

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http" and scope["raw_path"].startswith(PREFIX):
                await self._invocations(scope, receive, send)
            elif (
                scope["type"] == "http"
                and scope["raw_path"].startswith(ASYNC_PREFIX)
                and scope["method"] == ASYNC_METHOD
            ):
                await self._async_invocations(scope, receive, send)
            elif scope["type"] == "websocket":
                to_function = scope["raw_path"].startswith(PREFIX)
                await (self._websocket_calls if to_function else refuse_elsewhere)(scope, receive, send)
            else:
                await self._management(scope, receive, send)
        except BrokenAnswer:
            raise  # the server closes the connection, which is the message
        except Exception:
            logging.getLogger("gateway").exception("a request failed in the platform itself: %s", scope.get("path"))
            raise
