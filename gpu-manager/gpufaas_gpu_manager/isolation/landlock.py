"""
Landlock: what this process and its children may open, connect to and send signals to, by a list of what is allowed.

A domain cannot be left, and forbids mounts: it comes after the own root.
"""

import os
import stat
import struct
from collections.abc import Collection, Sequence
from typing import Final

from gpufaas_gpu_manager.isolation import kernel

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION: Final = 1
_PATH_BENEATH, _NET_PORT = 1, 2
_TSYNC: Final = 1 << 3
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE, _IOCTL_DEV, _RESOLVE_UNIX = 1 << 14, 1 << 15, 1 << 16
_READ: Final = _EXECUTE | _READ_FILE | _READ_DIR
_OF_FILES: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV | _RESOLVE_UNIX
"""The rights that a rule of what is no directory may have."""
_RIGHTS: Final = ((9, 17), (5, 16), (3, 15), (2, 14), (1, 13))
"""From which ABI on how many rights of files are known: the bits from 0 on."""
_CONNECT_TCP: Final = 1 << 1
_ABSTRACT_SOCKETS_AND_SIGNALS: Final = 3


def abi() -> int:
    """The version of Landlock that this kernel has in force; 0: none."""
    try:
        return kernel.call(_CREATE_RULESET, None, 0, _VERSION)
    except OSError:
        return 0


def restrict(
    read: Sequence[str], write: Sequence[str], ports: Collection[int] | None, abi: int, devices: Sequence[str] = ()
) -> None:
    """
    Restrict this process, for good, as far as version *abi* can: to files, from 4 on to ports, from 6 on to signals and
    abstract sockets of itself and its children. From 8 on this holds its other threads, too.

    Paths that do not exist are left out.

    :param read: paths that may be read and executed, with all below them
    :param write: paths below which all may be done
    :param ports: the TCP ports to which it may connect; None: all
    :param devices: device nodes
    :raises OSError: the kernel refuses it, or a path cannot be reached
    """
    known = next(1 << bits for version, bits in _RIGHTS if abi >= version) - 1
    limited = _CONNECT_TCP if ports is not None and abi >= 4 else 0
    scoped = _ABSTRACT_SOCKETS_AND_SIGNALS if abi >= 6 else 0
    rules = kernel.call(_CREATE_RULESET, struct.pack("QQQ", known, limited, scoped), 24, 0)
    try:
        for paths, rights in ((read, _READ), (write, known), (devices, _OF_FILES)):
            for path in paths:
                _allow(rules, path, rights & known)
        for port in (ports or ()) if limited else ():
            kernel.call(_ADD_RULE, rules, _NET_PORT, struct.pack("QQ", _CONNECT_TCP, port), 0)
        kernel.no_new_privs()
        kernel.call(_RESTRICT_SELF, rules, _TSYNC if abi >= 8 else 0)
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    """Add to *rules* that *path*, and what is below it, may be used with *rights*."""
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= _OF_FILES
        kernel.call(_ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", rights, fd), 0)
    finally:
        os.close(fd)
