"""
Whether the server behind OpenFaaS's of-watchdog listens yet, by the kernel's table of the container's sockets.

In mode ``http`` the watchdog listens at once, starts the function's own server, and passes calls to ``upstream_url``
inside the container. Until that server listens, calls get an empty 500
(https://github.com/openfaas/of-watchdog#1-http-modehttp).
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

_LISTENS: Final = "0A"
_LOCAL: Final = ("127.0.0.1", "localhost", "::1", "0.0.0.0")
_HTTP: Final = 80


def upstream_port(env: Iterable[str]) -> int:
    """Return the port of a watchdog's upstream from its container's environment (``NAME=VALUE``); 0: there is none."""
    given = dict(each.split("=", 1) for each in env if "=" in each)
    url = given.get("upstream_url") or given.get("http_upstream_url") or ""
    if given.get("mode") != "http" or not url:
        return 0
    try:
        parts = urlsplit(url)
        return (parts.port or _HTTP) if parts.hostname in _LOCAL else 0
    except ValueError:
        return 0


def listens(pid: int, address: str, port: int, proc: Path = Path("/proc")) -> bool:
    """
    Return whether something listens on *port* in the container of process *pid*, whose address is *address*.

    True also where that cannot be seen: the engine is on another machine, or the process has ended.
    """
    net = proc / str(pid) / "net"
    try:
        # else it is some other process of that number
        return address not in (net / "fib_trie").read_text() or bool(list(listeners(port, net)))
    except OSError:
        return True


def listeners(port: int, net: Path = Path("/proc/net")) -> Iterator[int]:
    """Yield the uids of those that listen on *port* in the network of *net*. :raises OSError: it cannot be seen"""
    for table in filter(Path.exists, (net / "tcp", net / "tcp6")):
        for _, address, _, state, _, _, _, uid, *_ in map(str.split, table.read_text().splitlines()):
            if state == _LISTENS and address.endswith(f":{port:04X}"):
                yield int(uid)
