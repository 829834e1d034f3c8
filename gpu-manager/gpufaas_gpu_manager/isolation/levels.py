"""How workers are kept from one another, from the platform, and from what is not theirs."""

import functools
import os
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from gpufaas_core.errors import InvalidSpec
from gpufaas_core.units import Bytes

Level = Literal["none", "best", "strict"]
"""Of ``--isolation``. best: what the kernel gives; strict: all of it, or the node does not start."""

HOME: Final = "/home/function"
"""The home directory of each worker with a root of its own."""
USER: Final = "function"
"""The name of its user there."""
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
        Whether a standby may have threads, as a context on a GPU brings them: those keep what rights they have, unless
        the uid changes, and Landlock holds them from its ABI 8 on.
        """
        return self == Walls() or (self.uids and (self.landlock >= 8 or not self.strict))

    def __str__(self) -> str:
        named = {"mount": "own root", "user": "own root (user namespace)"}.get(self.root, "")
        connects = f"connects to the gateway only{', as etcd has no login' * bool(self.etcd)}"
        parts = (
            named, "uids" * self.uids, f"Landlock {self.landlock}" * bool(self.landlock), "seccomp" * self.seccomp,
            connects * (self.landlock >= PORTS and (self.strict or bool(self.etcd))),
        )  # fmt: skip
        return ", ".join(filter(None, parts)) or "nothing"


NOTHING: Final = Walls()


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


class Mechanism(msgspec.Struct, frozen=True):
    """What may hold workers, tried on this machine."""

    name: str
    works: bool
    why: str = ""
    """Why it does not work, or what it does not do; for people."""
    needed: bool = True
    """Whether strict refuses to start without it."""


_ENOUGH: Final = 6
"""The ABI of Landlock that holds files, ports, signals and abstract sockets."""
_SOMEBODY: Final = 65534
"""A uid that can be tried."""


@functools.cache
def tried() -> tuple[Mechanism, ...]:
    """Try each mechanism, once, in a process that ends. Takes some 20 ms."""
    from gpufaas_gpu_manager.cgroups import find
    from gpufaas_gpu_manager.isolation import landlock, seccomp

    as_root = os.geteuid() == 0
    mount, uids = "needs root", "needs root: all functions have the uid of the platform"
    if as_root:
        mount = _attempt(lambda: _go_into("mount"))
        uids = (mount and "needs the own root") or _attempt(lambda: _go_into("mount", _SOMEBODY))
    user = _attempt(lambda: _go_into("user")) if mount else ""
    abi = landlock.abi()
    domain = "" if not abi else _attempt(lambda: landlock.restrict(["/"], [], None, abi))
    said = f"ABI {abi}" if abi >= _ENOUGH else f"ABI {abi}, strict needs {_ENOUGH}" if abi else "the kernel has it not"
    filter_ = _attempt(seccomp.install)
    groups = _attempt(lambda: find().close())
    return (
        Mechanism("own root", not mount, mount, needed=bool(mount and user) or not mount),
        Mechanism("own root in a user namespace", not user and bool(mount), user, needed=False),
        Mechanism("uid of each function", not uids, uids, needed=as_root),
        Mechanism("Landlock", abi >= _ENOUGH and not domain, domain or said),
        Mechanism("seccomp", not filter_, filter_),
        Mechanism("control groups", not groups, groups, needed=False),
    )


def walls(level: Level, binds: tuple[str, ...] = (), data: str = "") -> Walls:
    """
    Return what holds workers on this machine under *level*.

    :param data: the platform's directory, which no worker sees
    :raises InvalidSpec: *level* is strict, and this machine lacks a mechanism; or Python lies where it cannot be bound
    """
    from gpufaas_gpu_manager.isolation import landlock, root

    if level == "none":
        return Walls()
    found = tried()
    own, user, uids, lock, filter_, _ = (each.works for each in found)
    if level == "strict" and (missing := [f"{each.name} ({each.why})" for each in found if each.needed > each.works]):
        raise InvalidSpec(
            f"--isolation strict: this machine lacks {', '.join(missing)}: give it that (see gpufaas isolation check), "
            "or start with --isolation best"
        )
    if own or user:
        root.check(data)
    return Walls(
        root="mount" if own else "user" if user else "", uids=uids,
        landlock=landlock.abi() if lock or "ABI" in found[3].why else 0,
        seccomp=filter_, binds=binds, strict=level == "strict",
    )  # fmt: skip


def _go_into(own: Literal["mount", "user"], uid: int = 0) -> None:
    """Become a worker in a root of its own. :raises OSError: the kernel refuses it, or its user cannot read Python"""
    from gpufaas_gpu_manager.isolation import entry, root

    root.begin(Walls(root=own))
    entry.enter(Walls(root=own), Own(uid=uid))
    os.close(os.open(os.__file__, os.O_RDONLY))


def _attempt(work: Callable[[], None]) -> str:
    """Return why *work* fails, in a process that ends; empty: it does not."""
    read, write = os.pipe()
    if not (pid := os.fork()):
        try:
            work()
            os.write(write, b"works")
        except BaseException as exc:
            os.write(write, str(exc).encode()[:500])
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as said:
        why = said.read().decode("utf-8", "replace")
    os.waitpid(pid, 0)
    return "" if why == "works" else why or "the process that tried it was killed"
