"""
Delivers answers to callback URLs, without opening the network behind the gateway to callers.

A caller of a function chooses the address that the platform posts to. So each address that a host resolves to is
checked, and the connection is made to the checked addresses only: a name that resolves differently a moment later (DNS
rebinding) changes nothing. Redirects are not followed, and proxies of the environment are not used. A URL of a function
here, as functions of OpenFaaS call each other, goes to this gateway itself.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import urlsplit

from gpufaas_async_calls.call import Body, Header
from gpufaas_core.errors import GpufaasError, InvalidSpec
from gpufaas_core.origin import GATEWAY_NAMES, without_origin
from gpufaas_core.units import Seconds

if TYPE_CHECKING:
    from aiohttp import ClientSession

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolved: TypeAlias = tuple[int, str]
"""Address family, and the address as text."""

_MAX_URL: Final = 4096
_TO_FUNCTIONS: Final = ("/function/", "/async-function/")
_LOOKUP_S: Final[Seconds] = 0.25
"""The first caller who names a host waits so long at most to hear that it is not known; two wait at a time."""
_LOOKUPS: Final = 256
"""The most hosts of which it is known for a minute; callers who name others hear nothing."""
_TIMEOUT_S: Final[Seconds] = 60.0
"""Without any progress; a large answer may take longer in all."""
_CONNECT_S: Final[Seconds] = 10.0
_METADATA: Final = frozenset(map(ipaddress.ip_address, ("fd00:ec2::254", "100.100.100.200", "168.63.129.16")))
"""Where clouds tell a machine its credentials, beyond the link-local 169.254.169.254."""
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")


class CallbackRefused(GpufaasError):
    """This callback is not allowed, or its receiver refuses it: do not try again."""


class CallbackFailed(GpufaasError):
    """The receiver could not be reached, or is in trouble: try again."""


def check_address(host: str, address: Address, allow_local: bool) -> None:
    """:raises InvalidSpec: callbacks must not go to *address*"""
    if not allow_local and (why := why_not(address)):
        raise _not_allowed(host, why)


def why_not(address: Address) -> str | None:
    """
    Return what about *address* forbids callbacks there; None if nothing does. Private networks are allowed: that is
    where receivers are.
    """
    if isinstance(address, ipaddress.IPv6Address):
        # An IPv4 address in disguise is what it is underneath.
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is None and int(address) >> 32 == 0 and int(address) > 1:
            inner = ipaddress.IPv4Address(int(address))  # ::127.0.0.1, the old IPv4-compatible form
        if inner is not None:
            return why_not(inner)
    claims = {
        "loopback": address.is_loopback,
        "link-local": address.is_link_local,
        "not an address of a host": address.is_unspecified or int(address) >> 24 == 0,
        "multicast": address.is_multicast,
        "reserved": address.version == 4 and address.is_reserved,
        "a cloud's metadata service": address in _METADATA,
    }
    return next((why for why, holds in claims.items() if holds), None)


def _not_allowed(host: str, why: str) -> InvalidSpec:
    return InvalidSpec(
        f"X-Callback-Url: {host} is {why}, where callbacks must not go: "
        "name another receiver, or start the gateway with --allow-local-callbacks"
    )


async def resolve(host: str, port: int, family: int = socket.AF_UNSPEC) -> list[Resolved]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
    return [(each[0], str(each[4][0])) for each in found]


class HttpCallbacks:
    """Delivers them over aiohttp, with connections kept alive. Used in one event loop; `close` when done."""

    def __init__(self, product: str, *, allow_local: bool = False, resolver: Any = resolve, gateway: str = "") -> None:
        """
        :param product: the User-Agent, ``NAME/VERSION``
        :param resolver: like `resolve`, which asks the system
        :param gateway: the URL at which this process reaches its gateway
        """
        self._gateway = urlsplit(gateway)
        self._lookups: dict[str, asyncio.Future[Any]] = {}
        self._product = product
        self._allow_local = allow_local
        self._resolve = resolver
        self._session: ClientSession | None = None

    def check(self, url: str) -> str:
        """
        Return where this process reaches *url* if it is of a function here, else nothing. DNS is not asked.

        :raises InvalidSpec: it is no http or https URL with a host; or its host is an address that is not allowed
        """
        shown = url[:200]
        if len(url) > _MAX_URL or not url.isascii() or any(ord(char) <= 0x20 or ord(char) == 0x7F for char in url):
            raise InvalidSpec(f"X-Callback-Url: {shown!r} is not a URL: encode what is not plain ASCII; keep it short")
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port or 80
        except ValueError as exc:
            raise InvalidSpec(f"X-Callback-Url: {shown!r} is not a URL: {exc}") from exc
        if parts.scheme not in ("http", "https") or not host:
            raise InvalidSpec(f"X-Callback-Url: {shown!r} is no http:// or https:// URL with a host")
        here, path = self._gateway, without_origin(parts.path)[1]
        named = host in GATEWAY_NAMES and port in (8080, here.port)
        ours = named or (host in ("localhost", here.hostname) and port == here.port)
        if ours and parts.scheme == "http" and path.startswith(_TO_FUNCTIONS):
            return parts._replace(netloc=here.netloc, path=path, fragment="").geturl()
        if host.rstrip(".") == "localhost" and not self._allow_local:
            raise _not_allowed(host, "loopback")
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return ""  # a name: it is looked at when it is resolved
        check_address(host, address, self._allow_local)
        return ""

    async def doubt(self, url: str, find: Callable[[str], object | None]) -> str:
        """Return why a callback to *url*, which was checked, would not arrive now; empty: no reason is known."""
        if own := self.check(url):
            name = own.split("/")[4].partition("?")[0]
            return "" if find(name) else f"there is no function {name}"
        host, known = urlsplit(url).hostname or "", self._lookups
        if host not in known and len(known) < _LOOKUPS and sum(not each.done() for each in known.values()) < 2:
            known[host] = lookup = asyncio.gather(self._checked(host, 0), return_exceptions=True)
            lookup.add_done_callback(lambda _: asyncio.get_running_loop().call_later(60.0, known.pop, host))
            await asyncio.wait([lookup], timeout=_LOOKUP_S)
        found = known[host].result() if host in known and known[host].done() else ()
        return "".join(f"{host}: {each}" for each in found if isinstance(each, Exception))

    async def _checked(self, host: str, port: int, family: int = socket.AF_UNSPEC) -> list[Resolved]:
        """:raises InvalidSpec: *host* has an address that is not allowed; one is enough: it is meant to get there"""
        found: list[Resolved] = await self._resolve(host, port, family)
        for _, text in found:
            check_address(host, ipaddress.ip_address(text.partition("%")[0]), self._allow_local)
        return found

    async def deliver(self, url: str, headers: Sequence[Header], body: Body) -> None:
        """
        POST *body*; return once the receiver has answered 2xx.

        :raises CallbackRefused: to try again would not help
        :raises CallbackFailed: to try again may help
        """
        # Imported late: a gateway whose calls ask for no callback does not pay for it.
        import aiohttp
        import yarl

        try:
            own = self.check(url)
        except InvalidSpec as exc:  # the setting may have changed since it was accepted
            raise CallbackRefused(str(exc)) from exc
        text = [(name.decode("latin-1"), value.decode("utf-8", "replace")) for name, value in headers]
        text.append(("User-Agent", self._product))
        session = self._session = self._session or self._open()
        file = await asyncio.to_thread(body.open, "rb") if isinstance(body, Path) else None
        # A function here has its own time limit, and its path is sent as it is.
        limit = aiohttp.ClientTimeout(total=None) if own else session.timeout
        try:
            target = yarl.URL(own or url, encoded=bool(own))
            sent = session.post(target, headers=text, data=file or body, allow_redirects=False, timeout=limit)
            async with sent as answer:
                status = answer.status
                await answer.content.read(65_536)  # so that the connection can be used again, if it was a short one
        except InvalidSpec as exc:  # of the resolver below
            raise CallbackRefused(str(exc)) from exc
        except (aiohttp.InvalidURL, ValueError) as exc:
            raise CallbackRefused(f"callback to {_shown(url)}: {exc}") from exc
        except (aiohttp.ClientError, OSError, TimeoutError) as exc:
            raise CallbackFailed(f"callback to {_shown(url)}: {exc or type(exc).__name__}") from exc
        finally:
            if file is not None:
                file.close()
        if 200 <= status < 300:
            return
        text_of = f"callback to {_shown(url)}: the receiver answered {status}"
        if status >= 500 or status in (408, 425, 429):
            raise CallbackFailed(text_of)
        raise CallbackRefused(text_of + (", and redirects are not followed" if 300 <= status < 400 else ""))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _open(self) -> "ClientSession":
        import aiohttp
        from aiohttp.abc import AbstractResolver, ResolveResult

        checked = self._checked

        class Checked(AbstractResolver):
            """aiohttp connects to what this returns, and to nothing else."""

            async def resolve(
                self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
            ) -> list[ResolveResult]:
                return [
                    ResolveResult(
                        hostname=host, host=text, port=port, family=af, proto=0,
                        flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
                    )
                    for af, text in await checked(host, port, family)
                ]  # fmt: skip

            async def close(self) -> None:
                pass

        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(resolver=Checked(), use_dns_cache=False, limit=0, limit_per_host=0),
            timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=_CONNECT_S, sock_read=_TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Content-Type", "Accept-Encoding"),
            auto_decompress=False,
            trust_env=False,
        )


def _shown(url: str) -> str:
    """Return scheme and host of *url*: passwords, paths and queries may be secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
