"""
A root of its own for a worker: it sees Python, the system, and what is its own, at their paths; all else is not there.

`begin` does what belongs to no function: in a mount namespace of its own it stacks a tmpfs upon the root, and binds
there what all workers see, read-only; the working directory is in it. `finish` adds what one worker has, and makes it
the root. Until then this process sees the machine. The kernel must be Linux 5.12 or later.
"""

import ctypes
import functools
import glob
import os
import re
import struct
import sys
from collections.abc import Iterator, Set
from typing import Final, NamedTuple

from gpufaas_core.errors import InvalidSpec
from gpufaas_core.units import GiB
from gpufaas_gpu_manager.confine import dumpable
from gpufaas_gpu_manager.isolation import kernel
from gpufaas_gpu_manager.isolation.levels import HOME, USER, Own, Walls

_MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT, _MOUNT_SETATTR = 429, 430, 431, 432, 442
_HERE: Final = -100  # AT_FDCWD
_RECURSIVE: Final = 0x8000
_EMPTY_PATH: Final = 4
_SET_STRING, _CREATE = 1, 6
_READ_ONLY, _NOSUID, _NODEV, _NOEXEC = 1, 2, 4, 8
_REMOUNT, _BIND, _REC, _SLAVE, _DETACH = 1 << 5, 1 << 12, 1 << 14, 1 << 19, 2
_NEWNS, _NEWIPC, _NEWUSER = 0x0002_0000, 0x0800_0000, 0x1000_0000
_libc: Final = ctypes.CDLL(None, use_errno=True)

_SYSTEM: Final = ("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin", "/nix/store", "/gnu/store")
_ETC: Final = """
    alternatives ca-certificates* crypto-policies fonts gai.conf glvnd host.conf hostname hosts java-* ld-musl-* ld.so.*
    localtime machine-id mime.types nsswitch.conf OpenCL os-release perl pki protocols resolv.conf services ssl timezone
    vulkan
"""
"""Of /etc, without what is said of users."""
_NAMED: Final = re.compile(r"LD_LIBRARY_PATH|LD_PRELOAD|.*_CA_BUNDLE|SSL_CERT_.*")
"""Variables whose paths the libraries of workers read."""
NODES: Final = tuple(f"/dev/{each}" for each in ("null", "zero", "full", "random", "urandom"))
SYS: Final = tuple(f"/sys/{each}" for each in ("bus", "class", "dev", "devices", "kernel/mm", "module"))
"""Without the mounts below it, such as control groups."""
_NEVER: Final = ("/", "/dev", "/etc", "/home", "/proc", "/root", "/run", "/sys", "/tmp", "/var")
_SECRETS: Final = "/var/openfaas/secrets"


class _Common(NamedTuple):
    """What all workers see: paths without links, none below another; and links, by their paths."""

    paths: frozenset[str]
    links: dict[str, str]


@functools.cache
def common() -> _Common:
    """Return what all workers see, as this process has it: Python with its modules, the system, parts of /etc."""
    links: dict[str, str] = {}
    paths = {real for each in _wanted() if os.path.exists(each) and (real := _reached(each, links)) not in _NEVER}
    return _Common(frozenset(each for each in paths if not _below(os.path.dirname(each), paths)), links)


def _python() -> Iterator[str]:
    """Yield where Python is, and its modules, without the directory of the script that was started."""
    yield from (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix, sys.executable)
    yield from map(os.path.abspath, filter(None, sys.path[0 if sys.flags.safe_path else 1 :]))


def _wanted() -> Iterator[str]:
    yield from (*_SYSTEM, *_python())
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


def _below(path: str, paths: Set[str]) -> bool:
    """Whether *path* or a directory above it is one of *paths*."""
    while path not in paths:
        if path in ("", "/"):
            return False
        path = os.path.dirname(path)
    return True


def check(data: str) -> None:
    """
    Check that what all workers see shows nothing of others.

    :param data: the platform's directory
    :raises InvalidSpec: it would
    """
    home, data = os.path.realpath(os.path.expanduser("~")), os.path.realpath(data)
    for path in map(os.path.realpath, filter(os.path.exists, _python())):
        if path in (home, *_NEVER) or data == path or data.startswith(f"{path.rstrip('/')}/"):
            why = f"the platform keeps its data in {data}" if path not in (home, *_NEVER) else "others have files there"
            raise InvalidSpec(
                f"an interpreter, or modules, below a directory that cannot be bound: Python uses {path} "
                f"(see PYTHONPATH), and {why}: move them, or start with --isolation none"
            )


def begin(walls: Walls) -> None:
    """
    Make a root that is nobody's yet. This process has one thread; what it opens by relative paths lies there.

    :raises OSError: the kernel refuses it
    """
    uid, gid, umask = os.getuid(), os.getgid(), os.umask(0o022)
    if walls.root == "user":
        dumpable(True)  # else the files in /proc/self are root's
        _done(_libc.unshare(_NEWNS | _NEWIPC | _NEWUSER), "unshare")
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    else:
        _done(_libc.unshare(_NEWNS | _NEWIPC), "unshare")
    _done(_libc.mount(None, b"/", None, _REC | _SLAVE, None), "mount")  # what is mounted here is not seen outside
    _stack()
    for name in ("tmp", "dev/shm"):
        os.makedirs(name)
        os.chmod(name, 0o1777)
    links = dict(common().links)
    binds = {_reached(each.removesuffix(":rw"), links): each.endswith(":rw") for each in walls.binds}
    for path in sorted(common().paths.union(path for path, writable in binds.items() if not writable)):
        _bind(path)  # one below another lies upon that
    if walls.root == "user":
        for path in ("/proc", *filter(os.path.exists, SYS)):  # one of its own would need a PID namespace
            _bind(path)
    else:
        _bind("/sys", flags=_BIND)
        os.mkdir("proc")
        _done(_libc.mount(b"proc", b"proc", b"proc", _NOEXEC, b"hidepid=invisible"), "mount proc")
    _set(".", _READ_ONLY | _NOSUID | _NODEV)
    _set(".", 0, cleared=_READ_ONLY, recursive=0)
    for path in [path for path, writable in binds.items() if writable]:
        _bind(path, _NOSUID | _NODEV)
        for each in sorted(each for each in common().paths if each.startswith(f"{path}/")):
            _bind(each, _READ_ONLY | _NOSUID | _NODEV)
    for path, target in links.items():
        _link(path, target)
    for path in filter(os.path.exists, NODES):
        _bind(path, _NOSUID)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"dev/{name}")
    os.umask(umask)


def finish(own: Own) -> None:
    """
    Add what is *own* to the root that was begun, and go into it: the machine's is gone.

    :raises OSError: the kernel refuses it, or a path is not there
    """
    uid, umask = own.uid or os.getuid(), os.umask(0o022)
    if own.room:
        _done(_libc.mount(None, b".", None, _REMOUNT | _NOSUID | _NODEV, b"size=%d" % own.room), "mount tmpfs")
    links: dict[str, str] = {}
    for paths, flags in (
        (own.read, _READ_ONLY | _NOSUID | _NODEV), (own.write, _NOSUID | _NODEV), (own.devices, _NOSUID),
    ):  # fmt: skip
        for path in paths:
            if not _below(real := _reached(path, links), common().paths):
                _bind(real, flags)
    for path, target in links.items():
        _link(path, target)
    if own.secrets:
        _bind(own.secrets, _READ_ONLY | _NOSUID | _NODEV, at=_SECRETS)
    for path in filter(None, (HOME, own.scratch)):
        os.makedirs(path[1:], exist_ok=True)
        os.chmod(path[1:], 0o700)
        os.chown(path[1:], own.uid or -1, own.uid or -1)
    os.makedirs("etc", exist_ok=True)
    users = {uid: (USER, HOME), 65534: ("nobody", "/"), 0: ("root", "/")}
    for name, line in (("passwd", "{0}:x:{1}:{1}::{2}:/bin/sh\n"), ("group", "{0}:x:{1}:\n")):
        with open(f"etc/{name}", "w") as file:
            file.writelines(line.format(user, number, home) for number, (user, home) in users.items())
    os.umask(umask)
    old = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    _done(_libc.pivot_root(b".", b"."), "pivot_root")
    os.fchdir(old)
    os.close(old)
    _done(_libc.umount2(b".", _DETACH), "umount")  # the old one lies upon the new one
    os.chdir("/")


def _stack() -> None:
    """Stack a tmpfs upon the root, and go there. Paths lead to the machine's as before."""
    made = kernel.call(_FSOPEN, b"tmpfs", 1)
    for name, value in ((b"size", b"%d" % GiB), (b"mode", b"0755")):
        kernel.call(_FSCONFIG, made, _SET_STRING, name, value, 0)
    kernel.call(_FSCONFIG, made, _CREATE, None, None, 0)
    mounted = kernel.call(_FSMOUNT, made, 1, _NOSUID | _NODEV)
    kernel.call(_MOVE_MOUNT, mounted, b"", _HERE, b"/", _EMPTY_PATH)
    os.fchdir(mounted)
    os.close(mounted)
    os.close(made)


def _link(path: str, target: str) -> None:
    if not os.path.lexists(path[1:]):
        os.makedirs(os.path.dirname(path[1:]) or ".", exist_ok=True)
        os.symlink(target, path[1:])


def _bind(path: str, attributes: int = 0, *, at: str = "", flags: int = _BIND | _REC) -> None:
    """Bind *path* of the machine to the new root, with what is mounted below it."""
    place = (at or path)[1:]
    if not os.path.lexists(place):
        if os.path.isdir(path):
            os.makedirs(place)
        else:
            os.makedirs(os.path.dirname(place), exist_ok=True)
            os.mknod(place)
    _done(_libc.mount(os.fsencode(path), os.fsencode(place), None, flags, None), f"bind {path}")
    if attributes:
        _set(place, attributes)


def _set(place: str, attributes: int, *, cleared: int = 0, recursive: int = _RECURSIVE) -> None:
    """Set the attributes of what is mounted at *place*, and if *recursive* of what is mounted below it."""
    kernel.call(_MOUNT_SETATTR, _HERE, os.fsencode(place), recursive, struct.pack("4Q", attributes, cleared, 0, 0), 32)


def _done(failed: int, what: str) -> None:
    """:raises OSError: *failed*, and *what* is what the kernel has refused"""
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
