"""
Whether the server behind OpenFaaS's of-watchdog listens yet, by the kernel's table of the container's sockets.

In mode ``http`` the watchdog listens at once, starts the function's own server, and passes calls to ``upstream_url``
inside the container. Until that server listens, calls get an empty 500
(https://github.com/openfaas/of-watchdog#1-http-modehttp).
"""

from collections.abc import Iterable
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
        if address not in (net / "fib_trie").read_text():
            return True  # some other process of that number
        lines = [line for name in ("tcp", "tcp6") if (net / name).exists() for line in _lines(net / name)]
    except OSError:
        return True
    ending = f":{port:04X}"
    return any(len(each) > 3 and each[1].endswith(ending) and each[3] == _LISTENS for each in lines)


def _lines(table: Path) -> list[list[str]]:
    return [line.split() for line in table.read_text().splitlines()[1:]]
