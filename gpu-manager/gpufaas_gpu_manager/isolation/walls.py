"""What holds the workers of a node, and what each of them has."""

from typing import Final, Literal

import msgspec

from gpufaas_core.units import Bytes

Level = Literal["none", "best", "strict"]
"""Of ``--isolation``. best: what the kernel gives; strict: all of it, or the node does not start."""

HOME: Final = "/home/function"
"""The home directory of each worker with a root of its own."""
USER: Final = "function"
"""The name of its user there."""
PIDS: Final = 4096
"""Processes and threads of one worker: more than any honest one has, fewer than a machine (32,768 by default)."""
PORTS: Final = 4
"""The ABI of Landlock from which on it limits TCP ports."""


class Walls(msgspec.Struct, frozen=True):
    """What holds the workers of this node. The default: nothing."""

    root: Literal["", "mount", "user"] = ""
    """Each worker has a root of its own: by a mount namespace, or by one in a user namespace; empty: it has not."""
    uids: bool = False
    """Each function has a uid of its own."""
    landlock: int = 0
    """The ABI of Landlock in force; 0: none."""
    seccomp: bool = False
    """System calls are filtered."""
    binds: tuple[str, ...] = ()
    """Directories that the operator opens to all workers: ``PATH`` to read, ``PATH:rw`` to write, too."""
    strict: bool = False
    """The level is strict."""
    etcd: tuple[int, ...] = ()
    """Ports of etcds on this machine that ask for no login: no function connects to them."""

    @property
    def threads_ahead(self) -> bool:
        """
        Whether a standby may have threads, as a context on a GPU brings them. The change of the uid takes their rights,
        but Landlock holds them from its ABI 8 on only.
        """
        return self == Walls() or (self.uids and not self.strict)

    def __str__(self) -> str:
        parts = {
            "own root": self.root == "mount",
            "own root (user namespace)": self.root == "user",
            "uids": self.uids,
            f"Landlock {self.landlock}": self.landlock,
            "seccomp": self.seccomp,
            "connects to the gateway only": self.landlock >= PORTS and (self.strict or self.etcd),
            "as etcd has no login": self.landlock >= PORTS and self.etcd,
        }
        return ", ".join(part for part, holds in parts.items() if holds) or "nothing"


class Own(msgspec.Struct, frozen=True):
    """What one worker has beside what all workers of its node see."""

    uid: int = 0
    """Its uid and gid; 0: those of the platform."""
    read: tuple[str, ...] = ()
    """Paths that it reads: its bundle, weights, secrets."""
    write: tuple[str, ...] = ()
    """Directories that it writes to: what its function has compiled, that of its socket."""
    secrets: str = ""
    """The directory of its secrets, one of `read`; in its own root they are also at ``/var/openfaas/secrets``."""
    scratch: str = ""
    """The path of its scratch directory, which is made in its own root; empty: it has none."""
    room: Bytes = 0
    """The most that its /tmp, /dev/shm, home and scratch directory hold together, in bytes, as part of its memory."""
    devices: tuple[str, ...] = ()
    """Device nodes, of its GPU."""
    ports: tuple[int, ...] | None = None
    """The TCP ports that it may connect to; None: all."""
