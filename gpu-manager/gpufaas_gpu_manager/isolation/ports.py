"""To which TCP ports functions may connect, and whether an etcd without a login is among what they would reach."""

import contextlib
import http.client
import ssl
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from gpufaas_core.errors import InvalidSpec
from gpufaas_core.ports import ETCD, read_ports
from gpufaas_gpu_manager.isolation.levels import Walls

_PATIENCE_S: Final = 0.5
_READ: Final = b'{"key": "AA=="}'


def ports_of(connect: str, walls: Walls, gateway: str) -> tuple[int, ...] | None:
    """
    Return the ports to which a function may connect; None: all.

    :param connect: its gpufaas.connect; empty: it has none
    :param gateway: the gateway's URL, whose port is always among them; empty: there is none
    :raises InvalidSpec: *connect* reaches an etcd without a login
    """
    if walls.landlock < 4:
        return None
    named = read_ports(connect) if connect else () if walls.gateway_only or walls.etcd else None
    for port in walls.etcd:
        if named is None or port in named:
            raise InvalidSpec(
                f"annotation gpufaas.connect: {connect} reaches the etcd at port {port} of this node's machine, which "
                "asks for no login: name ports without it"
            )
    if named is None:
        return None
    url = urlsplit(gateway)
    return (*named, url.port or (443 if url.scheme == "https" else 80)) if gateway else named


def etcd_here(endpoints: Iterable[str] = ()) -> tuple[int, ...]:
    """
    Return the ports at which an etcd of this machine answers a client without a login. Blocks, up to a second for each.

    :param endpoints: URLs of the cluster's etcd, or HOST:PORT; those on other machines are left out
    """
    urls = (f"http://127.0.0.1:{ETCD[0]}", *(each if "://" in each else f"http://{each}" for each in endpoints))
    return tuple(sorted({port for url in urls if (port := urlsplit(url).port or ETCD[0]) and _is_open(url, port)}))


def _is_open(url: str, port: int) -> bool:
    """Whether an etcd on this machine lets anybody read a key. One that has no HTTP interface for that counts."""
    host = urlsplit(url).hostname or ""
    asked = http.client.HTTPConnection(host, port, timeout=_PATIENCE_S)
    if url.startswith("https"):
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        asked = http.client.HTTPSConnection(host, port, timeout=_PATIENCE_S, context=context)
    with contextlib.closing(asked), contextlib.suppress(OSError, http.client.HTTPException):
        asked.connect()
        if asked.sock.getsockname()[0] == asked.sock.getpeername()[0]:
            asked.request("POST", "/v3/kv/range", _READ)
            return asked.getresponse().status in (200, 404)
    return False
