"""The levels of isolation, and which mechanisms work on this machine: each is tried."""

import functools
import os
import select
import signal
from collections.abc import Callable
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from gpufaas_core.errors import InvalidSpec
from gpufaas_gpu_manager.cgroups import find
from gpufaas_gpu_manager.isolation import entry, landlock, root, seccomp
from gpufaas_gpu_manager.isolation.walls import Level, Own, Walls


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
_PATIENCE_S: Final = 10
_SOMEBODY: Final = 65534
"""A uid that can be tried."""


@functools.cache
def tried() -> tuple[Walls, tuple[Mechanism, ...]]:
    """
    Try each mechanism, once, in a process that ends: some 20 ms. Return what holds workers here, and what there is to
    say of it.
    """
    as_root, abi = os.geteuid() == 0, landlock.abi()
    mount = _attempt(lambda: _go_into("mount")) if as_root else "needs root"
    user = _attempt(lambda: _go_into("user")) if mount else ""
    uids = (mount and "needs an own root that root made") or _attempt(lambda: _go_into("mount", _SOMEBODY))
    domain = _attempt(lambda: landlock.restrict(["/"], [], None, abi)) if abi else "the kernel has it not"
    filter_ = _attempt(seccomp.install)
    groups = _attempt(lambda: find().close())
    found = Walls("user" if mount else "mount", not uids, 0 if domain else abi, not filter_)
    found = replace(found, root="") if user else found
    how = f"by a mount namespace: {mount}; by one in a user namespace: {user or 'it works'}" if mount else ""
    enough = f"ABI {abi}{f', strict needs {_ENOUGH}' * (abi < _ENOUGH)}"
    return found, (
        Mechanism("own root", bool(found.root), how),
        Mechanism("uid of each function", found.uids, uids, needed=as_root),
        Mechanism("Landlock", found.landlock >= _ENOUGH, domain or enough),
        Mechanism("seccomp", found.seccomp, filter_),
        Mechanism("control groups", not groups, groups, needed=False),
    )


def walls(level: Level, binds: tuple[str, ...] = (), data: str = "") -> Walls:
    """
    Return what holds workers on this machine under *level*.

    :param data: the platform's directory, which no worker sees
    :raises InvalidSpec: *level* is strict, and this machine lacks a mechanism; or Python lies where it cannot be bound
    """
    if level == "none":
        return Walls()
    found, mechanisms = tried()
    missing = [f"{each.name} ({each.why})" for each in mechanisms if each.needed > each.works]
    if level == "strict" and missing:
        raise InvalidSpec(
            f"--isolation strict: this machine lacks {', '.join(missing)}: give it that (see gpufaas isolation check), "
            "or start with --isolation best"
        )
    if found.root:
        root.check(data)
    return replace(found, binds=binds, strict=level == "strict")


def _go_into(own: Literal["mount", "user"], uid: int = 0) -> None:
    """Become a worker in a root of its own. :raises OSError: the kernel refuses it, or its user cannot read Python"""
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
        if not select.select([said], [], [], _PATIENCE_S)[0]:
            os.kill(pid, signal.SIGKILL)
        why = said.read().decode("utf-8", "replace")
    os.waitpid(pid, 0)
    return (
        "" if why == "works" else why or f"the process that tried it was killed, or did not answer in {_PATIENCE_S} s"
    )
