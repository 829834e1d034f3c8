"""The TCP ports that a function may connect to, as its deployment says."""

import re
from typing import Final

from gpufaas_core.errors import InvalidSpec

ANY: Final = "any"
ETCD: Final = (2379, 2380)
"""The usual ports of etcd. No function names them: who reaches an etcd without a login changes all of a cluster."""
_MOST: Final = 1000  # each is a rule that a new process adds


def read_ports(text: str) -> tuple[int, ...] | None:
    """
    Return the ports of *text*, such as ``5432,8000-8010``, in ascending order; None: any.

    :raises InvalidSpec: it is neither that nor ``any``, or names too many, or etcd's
    """
    if text.strip() == ANY:
        return None
    found: set[int] = set()
    for each in text.split(","):
        named = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", each.strip())
        first, last = (int(named[1]), int(named[2] or named[1])) if named else (0, 0)
        if not 1 <= first <= last <= 65_535:
            raise InvalidSpec(f"{each.strip()[:80]!r} is no port or range in 1-65535: write 5432,8000-8010, or {ANY}")
        found.update(range(first, last + 1))
    if not found.isdisjoint(ETCD):
        raise InvalidSpec(f"{text[:80]!r} has port {ETCD[0]} or {ETCD[1]}, which are etcd's: leave them out")
    if len(found) > _MOST:
        raise InvalidSpec(f"{len(found)} ports are over the limit of {_MOST}: name fewer, or write {ANY}")
    return tuple(sorted(found))
