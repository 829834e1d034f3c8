"""
A filter of system calls: what no function needs, and what would lead around the other walls.

The kernel runs it once for each call that it answers whatever the arguments are, and keeps the answer. So reads, writes
and futexes cost nothing; calls whose arguments are tested come first in it.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Iterable
from typing import Final

from gpufaas_gpu_manager.isolation import kernel

_ARCHITECTURE, _COLUMN = {"x86_64": (0xC000_003E, 1), "aarch64": (0xC000_00B7, 2)}.get(os.uname().machine, (0, 1))
"""The kernel's number of it, 0 where this table does not hold, and its column."""
_TABLE: Final = """
    sendmsg 46 211, sendto 44 206, sendmmsg 307 269, setsockopt 54 208, socket 41 198, socketpair 53 199,
    clone 56 220, clone3 435 435, unshare 272 97, personality 135 92, prlimit64 302 261, setpriority 141 140,
    ioprio_set 251 30,
    sched_setaffinity 203 122, sched_setscheduler 144 119, sched_setparam 142 118, sched_setattr 314 274,
    ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272, pidfd_getfd 438 438,
    process_madvise 440 440, mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, setns 308 268,
    open_tree 428 428, move_mount 429 429, fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433,
    mount_setattr 442 442, open_tree_attr 467 467, open_by_handle_at 304 265, name_to_handle_at 303 264,
    keyctl 250 219, add_key 248 217, request_key 249 218, bpf 321 280, perf_event_open 298 241, userfaultfd 323 282,
    io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427, fanotify_init 300 262,
    kexec_load 246 104, kexec_file_load 320 294, init_module 175 105, finit_module 313 273, delete_module 176 106,
    acct 163 89, swapon 167 224, swapoff 168 225, reboot 169 142, syslog 103 116, vhangup 153 58, quotactl 179 60,
    quotactl_fd 443 443, settimeofday 164 170, clock_settime 227 112, clock_adjtime 305 266, adjtimex 159 171,
    sethostname 170 161, setdomainname 171 162
"""
"""Calls that are denied, but for what a rule allows, with their numbers on x86_64 and on aarch64."""
_NUMBERS: Final = {row[0]: int(row[_COLUMN]) for row in map(str.split, _TABLE.split(","))}
_SECCOMP: Final = 317 if _COLUMN == 1 else 277
_NEWEST: Final = 469
"""The last call that is known here. Newer ones "are not there", nor are those of x32 (2**30 and more)."""

_SET_MODE_FILTER: Final = 1
_FLAGS: Final = 1 | 4
"""TSYNC: for all threads; SPEC_ALLOW: without slowing them down, as kernels before 5.16 did."""
_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_ALLOW, _REFUSE, _MISSING = 0x7FFF_0000, 0x5_0000 | errno.EPERM, 0x5_0000 | errno.ENOSYS
_ALL: Final = 0xFFFF_FFFF
_NAMESPACES: Final = 0x7E02_0000
_NEWTIME: Final = 0x80  # a flag of unshare; in those of clone it is part of a signal's number
_FAST_OPEN: Final = 0x2000_0000

_Test = tuple[int, int, tuple[int, ...]]
"""That an argument, by its number, under a mask is one of these values."""
_Rule = tuple[str, int, tuple[_Test, ...]]
"""A call, and what becomes of it if all of the tests hold; else the next rule is asked."""

_RULES: Final[tuple[_Rule, ...]] = (
    # TCP fast open makes connections past Landlock's ports. These are called most, so they come first.
    ("sendmsg", _ALLOW, ((2, _FAST_OPEN, (0,)),)),
    ("sendto", _ALLOW, ((3, _FAST_OPEN, (0,)),)),
    ("sendmmsg", _ALLOW, ((3, _FAST_OPEN, (0,)),)),
    ("setsockopt", _REFUSE, ((1, _ALL, (6,)), (2, _ALL, (30,)))),  # TCP_FASTOPEN_CONNECT
    ("setsockopt", _ALLOW, ()),
    # AF_INET and AF_INET6 with streams and datagrams of TCP, UDP, ICMP; AF_UNIX; AF_NETLINK's routes, for getaddrinfo.
    # So neither raw sockets nor MPTCP, SMC and SCTP, which Landlock's ports do not hold.
    ("socket", _ALLOW, ((0, _ALL, (2, 10)), (1, 0xF, (1, 2)), (2, _ALL, (0, 1, 6, 17, 58)))),
    ("socket", _ALLOW, ((0, _ALL, (1,)),)),
    ("socket", _ALLOW, ((0, _ALL, (16,)), (2, _ALL, (0,)))),
    ("socketpair", _ALLOW, ((0, _ALL, (1,)),)),
    ("clone", _ALLOW, ((0, _NAMESPACES, (0,)),)),
    ("clone3", _MISSING, ()),  # its arguments are in memory, where they cannot be tested
    ("unshare", _ALLOW, ((0, _NAMESPACES | _NEWTIME, (0,)),)),
    ("personality", _ALLOW, ((0, _ALL, (0, 0x4_0000, _ALL)),)),  # Linux, ADDR_NO_RANDOMIZE, what reads it
)
_PID: Final = 0xA110_0F1D  # no pid is that large; install puts the process's own in its place
_OF_OTHERS: Final[dict[str, tuple[_Test, ...]]] = {
    **dict.fromkeys(("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr"), ()),
    "setpriority": ((0, _ALL, (0,)),),  # PRIO_PROCESS
    "ioprio_set": ((0, _ALL, (1,)),),  # IOPRIO_WHO_PROCESS
}
"""Calls that set what belongs to a process: the argument after these tests is its pid."""


class _Program(ctypes.Structure):
    """A filter, for the kernel: the number of its instructions, their address."""

    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def install(*, deny_others: int = 0) -> None:
    """
    Filter the system calls of this process, all its threads, and all that it will start, for good: what is denied fails
    with EPERM; clone3, and what is not known here, with ENOSYS.

    :param deny_others: the pid of this process, where processes of others have its uid: limits, priorities and CPUs are
        set by the number 0 and this one only
    :raises OSError: the kernel refuses it, or this is neither x86_64 nor aarch64
    """
    if not _ARCHITECTURE:
        raise OSError(errno.ENOSYS, "there is a filter for x86_64 and aarch64 only")
    code = _OWN_ONLY.replace(struct.pack("I", _PID), struct.pack("I", deny_others)) if deny_others else _ANYBODYS
    program = _Program(len(code) // 8, code)
    kernel.no_new_privs()
    if thread := kernel.call(_SECCOMP, _SET_MODE_FILTER, _FLAGS, bytes(program)):
        raise OSError(errno.EBUSY, f"thread {thread} has a filter of its own")


def _line(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    """An instruction of classic BPF, which if it compares skips *yes* or *no* further ones."""
    return struct.pack("HBBI", code, yes, no, value)


def _assembled(rules: Iterable[_Rule]) -> bytes:
    """Return the filter that allows what is not listed; of a listed call the first of *rules* that holds decides."""
    code: list[bytes] = []
    for name, verdict, tests in rules:
        block = [_line(_RETURN, verdict)]
        for argument, mask, values in reversed(tests):
            *others, last = values
            found = [_line(_EQUAL, value, yes=len(others) - at) for at, value in enumerate(others)]
            found.append(_line(_EQUAL, last, no=len(block)))
            block = [_line(_LOAD, 16 + 8 * argument), _line(_AND, mask), *found, *block]
        code += [_line(_LOAD, 0), _line(_EQUAL, _NUMBERS[name], no=len(block)), *block]
    # The kernel goes through it for each number when it is installed: it skips eight listed ones with one comparison.
    listed, sought = sorted(_NUMBERS.values()), [_line(_RETURN, _ALLOW)]
    for first in reversed(range(0, len(listed), 8)):
        part = listed[first : first + 8]
        equal = [_line(_EQUAL, each, yes=len(part) - at + len(sought)) for at, each in enumerate(part)]
        sought = [_line(_AT_LEAST, part[-1] + 1, yes=len(part) + 1), *equal, _line(_RETURN, _ALLOW), *sought]
    start = [_line(_LOAD, 4), _line(_EQUAL, _ARCHITECTURE, yes=1), _line(_RETURN, _REFUSE), _line(_LOAD, 0)]
    start += [_line(_AT_LEAST, _NEWEST + 1, no=1), _line(_RETURN, _MISSING)]
    return b"".join((*start, *sought, *code, _line(_RETURN, _REFUSE)))


_ANYBODYS: Final = _assembled((*_RULES, *((name, _ALLOW, ()) for name in _OF_OTHERS)))
_OWN_ONLY: Final = _assembled(
    (*_RULES, *((name, _ALLOW, (*tests, (len(tests), _ALL, (0, _PID)))) for name, tests in _OF_OTHERS.items()))
)
