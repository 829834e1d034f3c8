"""
The gateway for functions in containers: it also listens on this machine's address in each of their Docker networks, so
that they reach ``gateway.openfaas`` while others reach loopback only.

A peer must be in one of those networks. Without a password it reaches public routes only (`auth.PUBLIC`), even if the
platform asks for no password on loopback.
"""

import asyncio
import ipaddress
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gpufaas_core.origin import without_origin
from gpufaas_gateway.auth import is_public
from gpufaas_gateway.errors import headers_of

if TYPE_CHECKING:
    from uvicorn import Config, Server

log = logging.getLogger("gateway")

_REFUSED: Final = (
    b"containers reach what is public here, and this platform asks for no password: start it with --auth on\n"
)
_STRANGER: Final = b"this address is for functions in containers\n"


class ContainerListener:
    """
    :param host: where the platform listens already; if that is all interfaces, nothing is left to do
    :param guarded: the app asks for a password itself
    """

    def __init__(self, host: str, port: int, guarded: bool) -> None:
        self._needed = host not in ("0.0.0.0", "::")
        self._port = port
        self._guarded = guarded
        self._subnets: dict[str, ipaddress.IPv4Network | ipaddress.IPv6Network] = {}
        """By the address of this machine in them."""
        self._listening: dict[str, asyncio.Server | None] = {}
        """By address; None: we cannot listen there."""
        self._app: ASGIApp
        self._server: Server | None = None
        self._configured: Callable[[ASGIApp, Callable[[str], bool]], Config]

    def serve(
        self, app: ASGIApp, server: "Server", configured: "Callable[[ASGIApp, Callable[[str], bool]], Config]"
    ) -> None:
        """
        :param configured: returns the server settings of an app, as *server* has them, and of calls from addresses
            that are admitted
        """
        self._app, self._server, self._configured = app, server, configured

    async def found(self, networks: Mapping[str, str]) -> None:
        """These are there: the subnet of each by this machine's address in it."""
        self._subnets = {address: ipaddress.ip_network(subnet) for address, subnet in networks.items()}
        for address in self._listening.keys() - networks.keys():
            gone = self._listening.pop(address)
            if gone is not None and self._server is not None:
                self._server.servers.remove(gone)
                gone.close()
        await self.open()

    async def open(self) -> None:
        """Listen in the networks that are found, once the server has started. If that fails, log it and go on."""
        server = self._server
        if not self._needed or server is None or not server.started:
            return
        for address in self._subnets.keys() - self._listening.keys():
            self._listening[address] = None
            config = self._configured(self, self._admits)
            config.load()
            made = partial(
                cast(Any, config.http_protocol_class), config=config, server_state=server.server_state, app_state={}
            )
            try:
                opened = await asyncio.get_running_loop().create_server(made, address, self._port)
            except OSError as exc:
                log.warning(
                    "containers do not reach gateway.openfaas: cannot listen on %s:%d (%s)", address, self._port,
                    exc.strerror or exc,
                )  # fmt: skip
            else:
                server.servers.append(opened)
                self._listening[address] = opened

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        peer = scope.get("client")
        if peer is None or not self._admits(peer[0]):
            await Response(_STRANGER, 403, headers_of())(scope, receive, send)
        elif (
            scope["type"] == "http"
            and not self._guarded
            and not is_public(scope["method"], without_origin(scope["path"])[1])
        ):
            await Response(_REFUSED, 403, headers_of())(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _admits(self, address: str) -> bool:
        return bool(address) and any(ipaddress.ip_address(address) in each for each in self._subnets.values())
