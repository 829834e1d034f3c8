"""
A filter of system calls: what no function needs, and what would lead around the other walls.

The kernel runs it once for each call that it answers whatever the arguments are, and keeps the answer. So reads, writes
and futexes cost nothing; calls whose arguments are tested come first in it.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from gpufaas_gpu_manager.isolation import kernel

_ARCHITECTURE, _COLUMN = {"x86_64": (0xC000_003E, 1), "aarch64": (0xC000_00B7, 2)}.get(os.uname().machine, (0, 1))
"""The kernel's number of it, 0 where these tables do not hold, and their column."""


def _numbers(table: str) -> dict[str, int]:
    """Calls of *table*, and their numbers on this machine."""
    rows = [each.split() for each in table.split(",")]
    return {row[0]: int(row[_COLUMN]) for row in rows if row[_COLUMN] != "-"}


# Each with its number on x86_64 and on aarch64; -: it is not there. From 424 on they are the same.
_TESTED_TABLE: Final = """
    socket 41 198, socketpair 53 199, sendto 44 206, sendmsg 46 211, sendmmsg 307 269, setsockopt 54 208,
    clone 56 220, unshare 272 97, personality 135 92, prlimit64 302 261, setpriority 141 140, ioprio_set 251 30,
    sched_setaffinity 203 122, sched_setscheduler 144 119, sched_setparam 142 118, sched_setattr 314 274
"""
_DENIED_TABLE: Final = """
    ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272, pidfd_getfd 438 438,
    process_madvise 440 440, mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, setns 308 268,
    open_tree 428 428, move_mount 429 429, fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433,
    mount_setattr 442 442, open_tree_attr 467 467, open_by_handle_at 304 265, name_to_handle_at 303 264,
    keyctl 250 219, add_key 248 217, request_key 249 218, bpf 321 280, perf_event_open 298 241, userfaultfd 323 282,
    io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427, fanotify_init 300 262,
    kexec_load 246 104, kexec_file_load 320 294, init_module 175 105, finit_module 313 273, delete_module 176 106,
    acct 163 89, swapon 167 224, swapoff 168 225, reboot 169 142, syslog 103 116, vhangup 153 58, quotactl 179 60,
    quotactl_fd 443 443, lookup_dcookie 212 18, nfsservctl 180 42, settimeofday 164 170, clock_settime 227 112,
    clock_adjtime 305 266, adjtimex 159 171, sethostname 170 161, setdomainname 171 162, iopl 172 -, ioperm 173 -,
    uselib 134 -, _sysctl 156 -, create_module 174 -, query_module 178 -
"""
_TESTED, _DENIED = _numbers(_TESTED_TABLE), _numbers(_DENIED_TABLE)
_SECCOMP: Final = 317 if _COLUMN == 1 else 277
_CLONE3: Final = 435
_NEWEST: Final = 469
"""The last call that these tables know. Newer ones "are not there", nor are those of x32 (2**30 and more)."""

_SET_MODE_FILTER: Final = 1
_FLAGS: Final = 1 | 4
"""TSYNC: for all threads; SPEC_ALLOW: without slowing them down, as kernels before 5.16 did."""
_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_ALLOW, _REFUSE, _MISSING = 0x7FFF_0000, 0x5_0000 | errno.EPERM, 0x5_0000 | errno.ENOSYS
_ALL: Final = 0xFFFF_FFFF
_NAMESPACES: Final = 0x7E02_0000
_NEWTIME: Final = 0x80  # a flag of unshare; in those of clone it is part of a signal's number
_FAST_OPEN: Final = 0x2000_0000


class _Program(ctypes.Structure):
    """A filter, for the kernel: the number of its instructions, their address."""

    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


class _Test(NamedTuple):
    """That an argument is among *values*, or with ``among=False`` is none of them."""

    arg: int
    values: Sequence[int]
    mask: int = _ALL
    among: bool = True


_Rules = Mapping[str, Sequence[Sequence[_Test]]]
"""A call is allowed where all of its tests in one of the sequences hold."""

_RULES: Final[_Rules] = {
    # TCP fast open makes connections past Landlock's ports. These are called most, so they come first.
    "sendmsg": ((_Test(2, (0,), mask=_FAST_OPEN),),),
    "sendto": ((_Test(3, (0,), mask=_FAST_OPEN),),),
    "sendmmsg": ((_Test(3, (0,), mask=_FAST_OPEN),),),
    "setsockopt": ((_Test(1, (6,), among=False),), (_Test(2, (30,), among=False),)),  # TCP_FASTOPEN_CONNECT
    # AF_INET and AF_INET6 with streams and datagrams of TCP, UDP, ICMP; AF_UNIX; AF_NETLINK's routes, for getaddrinfo.
    # So neither raw sockets nor MPTCP, SMC and SCTP, which Landlock's ports do not hold.
    "socket": (
        (_Test(0, (2, 10)), _Test(1, (1, 2), mask=0xF), _Test(2, (0, 1, 6, 17, 58))),
        (_Test(0, (1,)),),
        (_Test(0, (16,)), _Test(2, (0,))),
    ),
    "socketpair": ((_Test(0, (1,)),),),
    "clone": ((_Test(0, (0,), mask=_NAMESPACES),),),
    "unshare": ((_Test(0, (0,), mask=_NAMESPACES | _NEWTIME),),),
    "personality": ((_Test(0, (0, 0x4_0000, _ALL)),),),  # Linux, ADDR_NO_RANDOMIZE, what reads it
}
_PID: Final = 0xA110_0F1D  # no pid is that large; install puts the process's own in its place
_OWN: Final = ((_Test(0, (0, _PID)),),)
_RULES_OF_OTHERS: Final[_Rules] = {
    **dict.fromkeys(("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr"), _OWN),
    "setpriority": ((_Test(0, (0,)), _Test(1, (0, _PID))),),  # PRIO_PROCESS
    "ioprio_set": ((_Test(0, (1,)), _Test(1, (0, _PID))),),  # IOPRIO_WHO_PROCESS
}


def works() -> bool:
    """Whether this process could install a filter. These tables hold on x86_64 and aarch64."""
    try:
        kernel.call(_SECCOMP, _SET_MODE_FILTER, _FLAGS, None)
    except OSError as error:
        return bool(_ARCHITECTURE) and error.errno == errno.EFAULT  # it would take one, and finds none at this address
    return False


def install(*, deny_others: int = 0) -> None:
    """
    Filter the system calls of this process, all its threads, and all that it will start, for good: what is denied fails
    with EPERM; clone3, and what these tables do not know, with ENOSYS.

    :param deny_others: the pid of this process, where processes of others have its uid: limits, priorities and CPUs are
        set by the number 0 and this one only
    :raises OSError: the kernel refuses it
    """
    others = _CHECKED_OTHERS.replace(struct.pack("I", _PID), struct.pack("I", deny_others)) if deny_others else b""
    code = _HEAD + others + _REST
    program = _Program(len(code) // 8, code)
    kernel.no_new_privs()
    thread = kernel.call(_SECCOMP, _SET_MODE_FILTER, _FLAGS, bytes(program))
    if thread:
        raise OSError(errno.EBUSY, f"thread {thread} has a filter of its own")


def _line(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    """An instruction of classic BPF, which if it compares skips *yes* or *no* further ones."""
    return struct.pack("HBBI", code, yes, no, value)


def _checked(rules: _Rules) -> bytes:
    """The part of the filter for the calls of *rules*."""
    lines = []
    for name, alternatives in rules.items():
        tests = []
        for each in alternatives:
            passed = [_line(_RETURN, _ALLOW)]
            for test in reversed(each):
                passed = [*_compared(test, len(passed)), *passed]
            tests += passed
        tests.append(_line(_RETURN, _REFUSE))
        lines += [_line(_EQUAL, _TESTED[name], no=len(tests)), *tests]
    return b"".join(lines)


def _compared(test: _Test, rest: int) -> list[bytes]:
    """The part for one test, which if it does not hold skips the *rest* of its sequence."""
    lines = [_line(_LOAD, 16 + 8 * test.arg), _line(_AND, test.mask)]
    for left, value in zip(reversed(range(len(test.values))), test.values, strict=True):
        missed = 0 if left or not test.among else rest
        lines.append(_line(_EQUAL, value, yes=left + (0 if test.among else rest), no=missed))
    return lines


_HEAD: Final = b"".join(
    (
        _line(_LOAD, 4),
        _line(_EQUAL, _ARCHITECTURE, yes=1),
        _line(_RETURN, _REFUSE),
        _line(_LOAD, 0),
        _line(_AT_LEAST, _NEWEST + 1, no=1),
        _line(_RETURN, _MISSING),
    )
)
_CHECKED_OTHERS: Final = _checked(_RULES_OF_OTHERS)
_REST: Final = b"".join(
    (
        _checked(_RULES),
        _line(_EQUAL, _CLONE3, no=1),
        _line(_RETURN, _MISSING),
        *(_line(_EQUAL, number, yes=len(_DENIED) - at) for at, number in enumerate(_DENIED.values())),
        _line(_RETURN, _ALLOW),
        _line(_RETURN, _REFUSE),
    )
)
