"""To which TCP ports functions may connect, and whether an etcd without a login is among what they would reach."""

import contextlib
import http.client
import ssl
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from gpufaas_core.errors import InvalidSpec
from gpufaas_core.peers import is_own
from gpufaas_core.ports import ETCD, read_ports
from gpufaas_gpu_manager.isolation.walls import PORTS, Walls

_PATIENCE_S: Final = 0.5


def ports_of(connect: str, walls: Walls, gateway: str) -> tuple[int, ...] | None:
    """
    Return the ports to which a function may connect; None: all.

    :param connect: its gpufaas.connect; empty: it has none
    :param gateway: the gateway's URL, whose port is always among them; empty: there is none
    :raises InvalidSpec: *connect* reaches an etcd without a login
    """
    if walls.landlock < PORTS:
        return None
    named = read_ports(connect) if connect else () if walls.strict or walls.etcd else None
    for port in walls.etcd:
        if named is None or port in named:
            raise InvalidSpec(
                f"annotation gpufaas.connect: {connect} reaches an etcd without a login, at port {port}: name others"
            )
    if named is None or not gateway:
        return named
    url = urlsplit(gateway)
    return (*named, url.port or (443 if url.scheme == "https" else 80))


def etcd_here(endpoints: Iterable[str] = ()) -> tuple[int, ...]:
    """
    Return the ports at which an etcd of this machine answers a client without a login. Blocks, up to a second for each.

    :param endpoints: HOST:PORT, or URLs, of the cluster's etcd; those on other machines are left out
    """
    named = {urlsplit(each if "//" in each else f"//{each}") for each in (f"127.0.0.1:{ETCD[0]}", *endpoints)}
    addresses = {(url.hostname or "", url.port or ETCD[0]) for url in named}
    return tuple(sorted({port for host, port in addresses if _is_open(host, port)}))


def _is_open(host: str, port: int) -> bool:
    """Whether an etcd on this machine lets anybody read a key. One that has no HTTP interface for that counts."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for asked in (
        http.client.HTTPConnection(host, port, timeout=_PATIENCE_S),
        http.client.HTTPSConnection(host, port, timeout=_PATIENCE_S, context=context),
    ):
        with contextlib.closing(asked), contextlib.suppress(OSError, http.client.HTTPException):
            asked.connect()
            if is_own(asked.sock.getpeername()[0]):
                asked.request("POST", "/v3/kv/range", b'{"key": "AA=="}')
                if asked.getresponse().status in (200, 404):
                    return True
    return False
