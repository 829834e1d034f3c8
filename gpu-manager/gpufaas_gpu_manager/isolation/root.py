"""
A root of its own for a worker: it sees Python, the system, and what is its own, at their paths; all else is not there.

`begin` does what belongs to no function: in a mount namespace of its own it stacks a tmpfs upon the root, and binds
there what all workers see, read-only; the working directory is in it. `finish` adds what one worker has, and makes it
the root. Until then this process sees the machine. The kernel must be Linux 5.12 or later.
"""

import functools
import glob
import os
import re
import struct
import sys
from collections.abc import Collection, Iterator
from pathlib import PurePath
from typing import Final, NamedTuple

from gpufaas_core.errors import InvalidSpec
from gpufaas_core.units import GiB
from gpufaas_gpu_manager.confine import dumpable, stay_with_parent
from gpufaas_gpu_manager.isolation import kernel
from gpufaas_gpu_manager.isolation.walls import HOME, USER, Own, Walls

_MOUNT_SETATTR: Final = 442
_HERE: Final = -100  # AT_FDCWD
_RECURSIVE: Final = 0x8000
_READ_ONLY, _NOSUID, _NODEV, _NOEXEC = 1, 2, 4, 8
_REMOUNT, _BIND, _REC, _SLAVE, _DETACH = 1 << 5, 1 << 12, 1 << 14, 1 << 19, 2
_NEWNS, _NEWIPC, _NEWUSER = 0x0002_0000, 0x0800_0000, 0x1000_0000

_SYSTEM: Final = ("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin", "/nix/store", "/gnu/store")
_ETC: Final = """
    alternatives ca-certificates* crypto-policies fonts gai.conf glvnd host.conf hostname hosts java-* ld-musl-* ld.so.*
    localtime machine-id mime.types nsswitch.conf OpenCL os-release perl pki protocols resolv.conf services ssl timezone
    vulkan
"""
"""Of /etc, without what is said of users."""
_NAMED: Final = re.compile(r"LD_LIBRARY_PATH|LD_PRELOAD|.*_CA_BUNDLE|SSL_CERT_.*")
"""Variables whose paths the libraries of workers read."""
NODES: Final = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
SYS: Final = tuple(f"/sys/{each}" for each in ("bus", "class", "dev", "devices", "kernel/mm", "module"))
"""Without the mounts below it, such as control groups."""
_NEVER: Final = ("/", "/dev", "/etc", "/home", "/proc", "/root", "/run", "/sys", "/tmp", "/var")
_SECRETS: Final = "/var/openfaas/secrets"
_FOLDERS: Final = ("/dev/shm", "/etc", "/proc", "/sys", "/tmp", HOME, _SECRETS)


class Seen(NamedTuple):
    """What all workers see, as this process has it: Python with its modules, parts of the system, what is opened."""

    paths: tuple[str, ...]
    """To read, without links in them; one below another comes later."""
    opened: tuple[str, ...]
    """To write to."""
    links: dict[str, str]
    folders: tuple[str, ...]
    """What paths are mounted upon, or lie in."""
    files: tuple[str, ...]


@functools.cache
def seen(walls: Walls) -> Seen:
    """Return what all workers see. The first time takes some ms."""
    links: dict[str, str] = {}
    python = {real for each in _wanted() if os.path.exists(each) and (real := _reached(each, links)) not in _NEVER}
    binds = {_reached(each.removesuffix(":rw"), links): each.endswith(":rw") for each in walls.binds}
    opened = tuple(path for path, writable in binds.items() if writable)
    paths = {each for each in python if not _below(os.path.dirname(each), python)}.union(binds.keys() - opened)
    if walls.root == "user":  # a /proc of its own would need a PID namespace; /sys has mounts that cannot be left out
        paths |= {"/proc", *filter(os.path.exists, SYS)}
    links = {link: target for link, target in links.items() if not _below(link, paths.union(opened))}
    places = [*paths, *opened, *links, *NODES, *(f"{each}/in it" for each in _FOLDERS)]
    folders = {str(each) for place in places for each in PurePath(place[1:]).parents}
    folders |= {path[1:] for path in (*paths, *opened) if os.path.isdir(path)}
    files = tuple(path[1:] for path in (*paths, *NODES) if not os.path.isdir(path))
    return Seen(tuple(sorted(paths)), opened, links, tuple(sorted(folders - {"."})), files)


def _wanted() -> Iterator[str]:
    """Yield the system, and where Python and its modules are, without the directory of the script that was started."""
    yield from (*_SYSTEM, sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix, sys.executable)
    yield from map(os.path.abspath, filter(None, sys.path[0 if sys.flags.safe_path else 1 :]))
    for each in _ETC.split():
        yield from glob.glob(f"/etc/{each}")
    for name, value in os.environ.items():
        if _NAMED.fullmatch(name):
            yield from filter(os.path.isabs, re.split("[: ]", value))


def _reached(path: str, links: dict[str, str]) -> str:
    """Return *path* without links; add those on its way to *links*, so that it leads there in another root, too."""
    path = os.path.normpath(path)
    if path == os.path.realpath(path):
        return path
    link = next(link for each in re.finditer("(?<!^)(?=/|$)", path) if os.path.islink(link := path[: each.start()]))
    links[link] = os.readlink(link)
    return _reached(os.path.join(os.path.dirname(link), links[link], path[len(link) + 1 :]), links)


def _below(path: str, paths: Collection[str]) -> bool:
    """Whether *path* is one of *paths*, or below one."""
    return any(f"{path}/".startswith(f"{each}/") for each in paths)


def check(data: str) -> None:
    """
    Check that what all workers see shows nothing of others.

    :param data: the platform's directory
    :raises InvalidSpec: it would
    """
    never = {os.path.realpath(os.path.expanduser("~")), *_NEVER}
    for path in map(os.path.realpath, filter(os.path.exists, _wanted())):
        if path in never or _below(os.path.realpath(data), [path]):
            raise InvalidSpec(
                f"an interpreter below a directory that cannot be bound: Python, PYTHONPATH or LD_LIBRARY_PATH needs "
                f"{path}, where others or the platform (--data) have files: move them, or start with --isolation none"
            )


def begin(walls: Walls) -> None:
    """
    Make a root that is nobody's yet, where *walls* have one. This process has one thread; its relative paths lie there.

    :raises OSError: the kernel refuses it
    """
    if not walls.root:
        return
    uid, gid, umask = os.getuid(), os.getgid(), os.umask(0o022)
    if walls.root == "user":
        parent = os.getppid()
        dumpable(True)  # else the files in /proc/self are root's
        kernel.call("unshare", _NEWNS | _NEWIPC | _NEWUSER)
        stay_with_parent(parent)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    else:
        kernel.call("unshare", _NEWNS | _NEWIPC)
    kernel.call("mount", None, b"/", None, _REC | _SLAVE, None)  # what is mounted here is not seen outside
    size = b"size=%d,mode=0755" % GiB
    kernel.call("mount", b"gpufaas", b"/", b"tmpfs", _NOSUID | _NODEV, size, about="tmpfs")
    os.chdir("/..")  # on top of the root; other paths lead to the machine's as before
    paths, opened, links, folders, files = seen(walls)
    for each in folders:
        os.mkdir(each)
    for each in files:
        os.mknod(each)
    for link, target in links.items():
        os.symlink(target, link[1:])
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"dev/{name}")
    for each in ("tmp", "dev/shm"):
        os.chmod(each, 0o1777)
    for path in paths:
        _bind(path)
    if walls.root == "mount":
        _bind("/sys", flags=_BIND)
        kernel.call("mount", b"proc", b"proc", b"proc", _NOEXEC, b"hidepid=invisible", about="proc")
    _set(".", _READ_ONLY | _NOSUID | _NODEV)
    _set(".", 0, cleared=_READ_ONLY, recursive=0)
    for path in opened:
        _bind(path, _NOSUID | _NODEV)
        for each in (each for each in paths if _below(each, [path])):
            _bind(each, _READ_ONLY | _NOSUID | _NODEV)
    _add(walls, Own(devices=NODES))  # the way of what one worker has: a standby has its pages of memory from then on
    os.umask(umask)


def finish(walls: Walls, own: Own) -> None:
    """
    Add what is *own* to the root that was begun, and go into it: the machine's is gone.

    :raises OSError: the kernel refuses it, or a path is not there
    """
    umask = os.umask(0o022)
    _add(walls, own)
    os.umask(umask)
    old = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    kernel.call("pivot_root", b".", b".")
    os.fchdir(old)
    os.close(old)
    kernel.call("umount2", b".", _DETACH)  # the old one lies upon the new one
    os.chdir("/")


def _add(walls: Walls, own: Own) -> None:
    """Add what is *own* to the root in which this process works."""
    links: dict[str, str] = {}
    if own.room:
        size = b"size=%d" % own.room
        kernel.call("mount", None, b".", None, _REMOUNT | _NOSUID | _NODEV, size, about="size")
    for paths, attributes in (
        (own.read, _READ_ONLY | _NOSUID | _NODEV), (own.write, _NOSUID | _NODEV), (own.devices, _NOSUID),
    ):  # fmt: skip
        for path in paths:
            if not _below(real := _reached(path, links), seen(walls).paths):
                _bind(real, attributes)
    for link, target in links.items():
        if not os.path.lexists(link[1:]):
            os.makedirs(os.path.dirname(link)[1:], exist_ok=True)
            os.symlink(target, link[1:])
    if own.secrets:
        _bind(own.secrets, _READ_ONLY | _NOSUID | _NODEV, at=_SECRETS)
    for path in filter(None, (HOME, own.scratch)):
        os.makedirs(path[1:], exist_ok=True)
        os.chmod(path[1:], 0o700)
        os.chown(path[1:], own.uid or -1, own.uid or -1)
    users = {0: ("root", "/"), 65534: ("nobody", "/"), own.uid or os.getuid(): (USER, HOME)}
    for name, line in (("passwd", "{0}:x:{1}:{1}::{2}:/bin/sh\n"), ("group", "{0}:x:{1}:\n")):
        with open(f"etc/{name}", "w") as file:
            file.writelines(line.format(user, number, home) for number, (user, home) in users.items())


def _bind(path: str, attributes: int = 0, *, at: str = "", flags: int = _BIND | _REC) -> None:
    """Bind *path* of the machine to the new root, with what is mounted below it."""
    place = (at or path)[1:]
    if attributes and not os.path.lexists(place):
        os.makedirs(place if os.path.isdir(path) else os.path.dirname(place), exist_ok=True)
        if not os.path.isdir(path):
            os.mknod(place)
    kernel.call("mount", os.fsencode(path), os.fsencode(place), None, flags, None, about=path)
    if attributes:
        _set(place, attributes)


def _set(place: str, attributes: int, *, cleared: int = 0, recursive: int = _RECURSIVE) -> None:
    """Set the attributes of what is mounted at *place*, and if *recursive* of what is mounted below it."""
    kernel.call(_MOUNT_SETATTR, _HERE, os.fsencode(place), recursive, struct.pack("4Q", attributes, cleared, 0, 0), 32)
