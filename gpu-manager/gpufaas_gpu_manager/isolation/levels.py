"""How workers are kept from one another, from the platform, and from what is not theirs."""

from typing import Final, Literal

import msgspec

from gpufaas_core.units import Bytes

Level = Literal["none", "best", "strict"]
"""Of ``--isolation``. best: what the kernel gives; strict: all of it, or the node does not start."""

HOME: Final = "/home/function"
"""The home directory of each worker with a root of its own."""
USER: Final = "function"
"""The name of its user there."""


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
    gateway_only: bool = False
    """Functions without gpufaas.connect may connect to the gateway's TCP port only."""
    etcd: tuple[int, ...] = ()
    """Ports of etcds on this machine that ask for no login: as `gateway_only`, and no function reaches them."""
    binds: tuple[str, ...] = ()
    """Directories that the operator opens to all workers: ``PATH`` to read, ``PATH:rw`` to write, too."""

    def __str__(self) -> str:
        named = {"mount": "own root", "user": "own root (user namespace)"}.get(self.root, "")
        connects = f"connects to the gateway only{', as etcd has no login' * bool(self.etcd)}"
        parts = (
            named, "uids" * self.uids, f"Landlock {self.landlock}" * bool(self.landlock), "seccomp" * self.seccomp,
            connects * (self.landlock >= 4 and (self.gateway_only or bool(self.etcd))),
        )  # fmt: skip
        return ", ".join(filter(None, parts)) or "nothing"


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
    """The most that its /tmp, /dev/shm, home and scratch directory hold together, in bytes."""
    devices: tuple[str, ...] = ()
    """Device nodes, of its GPU."""
    ports: tuple[int, ...] | None = None
    """The TCP ports that it may connect to; None: all."""


class Mechanism(msgspec.Struct, frozen=True):
    """What may hold workers, tried on this machine."""

    name: str
    works: bool
    why: str = ""
    """Why it does not work, or what it does not do; for people."""
    needed: bool = True
    """Whether strict refuses to start without it."""


def tried() -> tuple[Mechanism, ...]:
    """Try each mechanism, in a process that ends."""
    return ()


def walls(level: Level, binds: tuple[str, ...] = ()) -> Walls:
    """
    Return what holds workers on this machine under *level*.

    :raises InvalidSpec: *level* is strict, and this machine lacks a mechanism; names it
    """
    return Walls()
