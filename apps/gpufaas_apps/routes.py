"""The ASGI app of a gateway's server: passes each request to the part that answers it."""

from starlette.types import ASGIApp, Receive, Scope, Send

from gpufaas_async_calls.api import METHOD as ASYNC_METHOD
from gpufaas_async_calls.api import PREFIX as ASYNC_PREFIX
from gpufaas_async_calls.api import AsyncInvocations
from gpufaas_gateway.asgi import log_failure
from gpufaas_gateway.invoke import PREFIX
from gpufaas_gateway.request import BrokenAnswer
from gpufaas_gateway.websocket_calls import WebSocketCalls, refuse_elsewhere


class Routes:
    """
    WebSockets and asynchronous calls of functions go straight to their handlers: they are public. Plain calls do not
    come here (`FunctionHttp`).

    :param management: answers all other requests
    """

    def __init__(
        self, async_invocations: AsyncInvocations, websocket_calls: WebSocketCalls, management: ASGIApp
    ) -> None:
        self._async_invocations = async_invocations
        self._websocket_calls = websocket_calls
        self._management = management

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "websocket":
                to_function = scope["raw_path"].startswith(PREFIX)
                await (self._websocket_calls if to_function else refuse_elsewhere)(scope, receive, send)
            elif scope["raw_path"].startswith(ASYNC_PREFIX) and scope["method"] == ASYNC_METHOD:
                await self._async_invocations(scope, receive, send)
            else:
                await self._management(scope, receive, send)
        except BrokenAnswer:
            raise  # the server closes the connection, which is the message
        except Exception:
            log_failure(scope)
            raise
