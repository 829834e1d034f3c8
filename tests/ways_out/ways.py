"""
Ways out: what a hostile function tries. Each is a function that tries one thing with the facts that its attacker knows
(paths, process ids, ports; never a canary), and returns evidence of its success, which `Scene` proves from outside. One
that fails raises, or returns "".

The modules of this folder are joined to one file and run inside deployed functions: they use the standard library only.
None harms the machine: where success would, a way asks only whether the kernel would have allowed it.
"""

import contextlib
import ctypes
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Facts = dict[str, Any]


class Way(NamedTuple):
    """What a way out is in words, what tries it, and how its evidence is proven: see `Scene.proves`."""

    tells: str
    tries: Callable[[Facts], str]
    proof: str
    alone: bool
    """It is tried in a process of its own, with one thread: what it does to itself ends with that."""
    root_only: bool
    """An ordinary user's platform cannot tell it from what is allowed."""
    seen_by_user: bool
    """It stays open where the platform is an ordinary user's: the documentation says so."""
    in_cluster: bool
    """It is tried in a cluster, by functions of its nodes."""


WAYS: dict[str, Way] = {}


def way_out(
    tells: str, proof: str = "claimed", *, alone: bool = False, root_only: bool = False, seen_by_user: bool = False,
    in_cluster: bool = False,
) -> Callable[[Callable[[Facts], str]], Callable[[Facts], str]]:  # fmt: skip
    def register(tries: Callable[[Facts], str]) -> Callable[[Facts], str]:
        WAYS[tries.__name__] = Way(tells, tries, proof, alone, root_only, seen_by_user, in_cluster)
        return tries

    return register


def answer_of(text: str) -> str:
    """Try the way that *text* names, as JSON: ``{"way": NAME, "facts": {…}}``. This is what the functions answer."""
    asked = json.loads(text)
    try:
        way = WAYS[asked["way"]]
        if way.alone and not asked.get("alone"):
            return _alone(asked | {"alone": True})
        return json.dumps({"evidence": way.tries(asked["facts"])})
    except Exception as exc:
        return json.dumps({"evidence": "", "failed": f"{type(exc).__name__}: {exc}"})


_TRIES = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.ways_out.every import answer_of
print(answer_of(input()))
"""


def _alone(asked: Facts) -> str:
    command = [sys.executable, "-ISBc", _TRIES, os.path.join(os.path.dirname(__file__), "..", "..")]
    told = json.dumps(asked)
    done = subprocess.run(command, input=told, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout or json.dumps({"evidence": "", "failed": f"{done.returncode} {done.stderr}"})


# --- means ---

_NUMBERS = {
    "x86_64": {
        "clone": 56, "ptrace": 101, "personality": 135, "adjtimex": 159, "mount": 165, "swapon": 167, "reboot": 169,
        "add_key": 248, "ioprio_set": 251, "unshare": 272, "perf_event_open": 298, "fanotify_init": 300,
        "open_by_handle_at": 304, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "sendmmsg": 307,
        "finit_module": 313, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425,
        "open_tree": 428, "fsopen": 430, "pidfd_open": 434, "clone3": 435, "pidfd_getfd": 438,
    },
    "aarch64": {
        "clone": 220, "ptrace": 117, "personality": 92, "adjtimex": 171, "mount": 40, "swapon": 224, "reboot": 142,
        "add_key": 217, "ioprio_set": 30, "unshare": 97, "perf_event_open": 241, "fanotify_init": 262,
        "open_by_handle_at": 265, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "sendmmsg": 269,
        "finit_module": 273, "kexec_file_load": 294, "bpf": 280, "userfaultfd": 282, "io_uring_setup": 425,
        "open_tree": 428, "fsopen": 430, "pidfd_open": 434, "clone3": 435, "pidfd_getfd": 438,
    },
}  # fmt: skip
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def number_of(name: str) -> int:
    """Return the number of a system call on this machine."""
    return _NUMBERS[platform.machine()][name]


def call(name: str, *arguments: Any) -> int:
    """
    Make a system call.

    :raises OSError: as the kernel says
    """
    wide = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result: int = _libc.syscall(ctypes.c_long(number_of(name)), *wide)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def refused_with(number: int, name: str, *arguments: Any) -> str:
    """Return evidence if the kernel refuses a call for its arguments, with *number*, and so not for want of a right."""
    try:
        call(name, *arguments)
    except OSError as exc:
        if exc.errno == number:
            return f"{name} was allowed: {exc}"
        raise
    return f"{name} was allowed"


def descriptor_of(name: str, *arguments: Any) -> str:
    """Make a system call that gives a descriptor; close it, and return evidence."""
    os.close(call(name, *arguments))
    return f"{name} gave a descriptor"


def content(path: str, most: int = 1 << 20) -> str:
    with open(path, "rb") as file:
        return file.read(most).decode("latin-1")


def contents_below(folder: str) -> str:
    """
    Return what the files below *folder* hold.

    :raises OSError: it cannot be listed
    """
    os.listdir(folder)
    found = ""
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                found += content(os.path.join(root, name))
    return found


def opened(path: str, flags: int) -> str:
    """Return which file *path* is here, if it can be opened so; nothing is read or written."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    return f"{found.st_dev}:{found.st_ino}:{path}"


def planted(path: str) -> str:
    """Make a file, and return its path."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write("planted")
    return path


def memory_of(pid: int, pattern: bytes, mode: str = "rb") -> Iterator[tuple[Any, int, bytes]]:
    """Yield where *pattern* is in the private memory of a process: its open memory, an address, the bytes."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", mode, buffering=0) as memory:
        for line in maps.readlines():
            span, rights, *_ = line.split()
            if not rights.startswith("rw-p"):
                continue
            begin, end = (int(each, 16) for each in span.split("-"))
            for at in range(begin, end, 1 << 24):
                with contextlib.suppress(OSError):
                    memory.seek(at)
                    for match in re.finditer(pattern, memory.read(min(end - at, 1 << 24))):
                        yield memory, at + match.start(), match.group()
