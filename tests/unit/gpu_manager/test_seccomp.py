"""What a filter of system calls refuses, and what goes on under it. Each test has a process of its own."""

import ctypes
import errno
import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gpufaas_gpu_manager.isolation import levels, seccomp

WORKS = next(each for each in levels.tried()[1] if each.name == "seccomp")
pytestmark = pytest.mark.skipif(not WORKS.works, reason=WORKS.why)
ALWAYS_DENIED = sorted(
    seccomp._NUMBERS.keys() - {name for name, *_ in seccomp._RULES} - seccomp._OF_OTHERS.keys() - {"vhangup"}
)

INSTALLED = """
import ctypes, os, socket, sys
from gpufaas_gpu_manager.isolation import seccomp
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def refused(number, *args):
    ctypes.set_errno(0)
    done = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, args))
    return ctypes.get_errno() if done < 0 else 0
def errno_of(function, *args):
    try:
        function(*args)
    except OSError as error:
        return error.errno
    return 0
seccomp.install(**OPTIONS)
"""


def run(code: str, options: str = "{}", before: str = "") -> str:
    program = before + INSTALLED.replace("OPTIONS", options) + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(("column", "header"), [(1, "x86_64-linux-gnu/asm/unistd_64.h"), (2, "asm-generic/unistd.h")])
def test_the_numbers_of_calls_are_those_of_the_kernels_headers(column: int, header: str) -> None:
    file = Path("/usr/include", header)
    if not file.exists():
        pytest.skip("needs the kernel's headers")
    kernels = {name: int(number) for name, number in re.findall(r"__NR_(?:3264_)?(\w+)\s+(\d+)\n", file.read_text())}
    numbers = {row[0]: int(row[column]) for row in map(str.split, seccomp._TABLE.split(","))}
    assert {name: number for name, number in numbers.items() if name in kernels} == {
        name: number for name, number in kernels.items() if name in numbers
    }
    assert numbers.keys() - kernels.keys() <= {"open_tree_attr", "mount_setattr", "quotactl_fd"}, (
        "newer than the headers"
    )


def test_what_is_denied_fails_with_eperm() -> None:
    # Arguments that no call takes, in a UTS namespace of its own where it may have one, and without vhangup, which has
    # none: were there no filter, these would do nothing to the machine.
    fails = run(
        f"print({{name: refused(seccomp._NUMBERS[name], *[-1] * 5) for name in {ALWAYS_DENIED}}})",
        before="import ctypes; ctypes.CDLL(None).unshare(0x04000000)",
    )
    assert set(eval(fails).values()) == {errno.EPERM}
    for name in (
        "ptrace",
        "process_vm_readv",
        "pidfd_getfd",
        "mount",
        "fsopen",
        "keyctl",
        "bpf",
        "io_uring_setup",
        "setns",
    ):
        assert name in eval(fails)


def test_namespaces_are_made_neither_by_clone_nor_by_unshare_nor_by_clone3() -> None:
    assert run("""
        new = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
        number = seccomp._NUMBERS
        print({refused(number["unshare"], each) for each in (*new, 0x80)})
        print({refused(number["clone"], each | 17) for each in new})
        print(refused(435, 0, 0), refused(number["unshare"], 0x400))
    """) == f"{{{errno.EPERM}}}\n{{{errno.EPERM}}}\n{errno.ENOSYS} 0"  # fmt: skip


SOCKETS = {
    "raw": (socket.AF_INET, socket.SOCK_RAW, 1),
    "raw of IPv6": (socket.AF_INET6, socket.SOCK_RAW, 58),
    "packet": (socket.AF_PACKET, socket.SOCK_DGRAM, 0),
    "MPTCP": (socket.AF_INET, socket.SOCK_STREAM, 262),
    "SMC": (socket.AF_INET, socket.SOCK_STREAM, 256),
    "SCTP": (socket.AF_INET, socket.SOCK_STREAM, 132),
    "algorithms": (socket.AF_ALG, socket.SOCK_SEQPACKET, 0),
    "virtual machines": (socket.AF_VSOCK, socket.SOCK_STREAM, 0),
    "keys": (15, socket.SOCK_RAW, 2),
    "sock_diag": (socket.AF_NETLINK, socket.SOCK_RAW, 4),
    "audit": (socket.AF_NETLINK, socket.SOCK_RAW, 9),
    "TIPC": (30, socket.SOCK_STREAM, 0),
}


def test_a_socket_that_is_not_of_tcp_udp_or_this_machine_is_refused() -> None:
    asked = {kind: tuple(map(int, numbers)) for kind, numbers in SOCKETS.items()}
    refused = run(f"print({{kind: errno_of(socket.socket, *numbers) for kind, numbers in {asked}.items()}})")
    assert eval(refused) == dict.fromkeys(SOCKETS, errno.EPERM)


def test_sockets_of_programs_are_made() -> None:
    assert run("""
        for family in (socket.AF_INET, socket.AF_INET6):
            for type_ in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_STREAM | socket.SOCK_NONBLOCK):
                code = errno_of(socket.socket, family, type_)
                assert code in (0, 97), code  # a machine without IPv6: EAFNOSUPPORT
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); socket.socketpair()
        socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
        assert socket.getaddrinfo("localhost", 80) and socket.if_nameindex()
    """) == ""  # fmt: skip


CONNECTS_BY_SENDING = """
    listener = socket.create_server(("127.0.0.1", 0))
    sending, setting = socket.socket(), socket.socket()
    print(errno_of(sending.sendto, b"x", 0x20000000, listener.getsockname()),
          errno_of(socket.socket().sendmsg, [b"x"], [], 0x20000000, listener.getsockname()),
          errno_of(setting.setsockopt, 6, 30, 1), errno_of(setting.setsockopt, 6, 1, 1))
"""


def test_tcp_does_not_connect_by_sending() -> None:
    assert run(CONNECTS_BY_SENDING) == "1 1 1 0"


def test_what_belongs_to_another_process_of_the_uid_is_not_set_where_that_is_denied() -> None:
    sets = """
        import resource, subprocess
        other = int(os.environ["OTHER"])
        number = seccomp._NUMBERS
        for pid in (other, 0, os.getpid()):
            print(errno_of(resource.prlimit, pid, resource.RLIMIT_CORE, (0, 0)),
                  errno_of(os.sched_setaffinity, pid, os.sched_getaffinity(0)),
                  errno_of(os.setpriority, os.PRIO_PROCESS, pid, 5), refused(number["ioprio_set"], 1, pid, 3 << 13))
        print(errno_of(os.setpriority, os.PRIO_USER, 0, 5), errno_of(os.setpriority, os.PRIO_PGRP, 0, 5))
    """
    with subprocess.Popen(["sleep", "60"]) as other:
        os.environ["OTHER"] = str(other.pid)
        try:
            assert run(sets, "dict(deny_others=os.getpid())").split("\n") == ["1 1 1 1", "0 0 0 0", "0 0 0 0", "1 1"]
            assert run(sets).split("\n")[0] == "0 0 0 0", "without that they are set"
        finally:
            other.kill()
            del os.environ["OTHER"]


def test_calls_newer_than_the_filter_and_those_of_other_architectures_are_not_there() -> None:
    assert run("print(refused(9999), refused(0x40000000 + 39))") == f"{errno.ENOSYS} {errno.ENOSYS}"


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the 32-bit calls of x86_64")
def test_a_32_bit_system_call_fails() -> None:
    # mov eax, 20 (getpid); int 0x80; ret
    assert run("""
        import mmap
        code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        code.write(bytes.fromhex("b814000000cd80c3"))
        print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))())
    """) in (str(-errno.EPERM), str(-errno.ENOSYS))  # fmt: skip


def test_the_filter_holds_threads_that_were_there_before_and_programs_that_are_executed() -> None:
    program = """
        import queue, subprocess, threading
        asked, told = queue.Queue(), queue.Queue()
        def thread():
            asked.get()
            told.put(refused(seccomp._NUMBERS["keyctl"], 0, 0, 0, 0, 0))
        threading.Thread(target=thread).start()
        seccomp.install()
        asked.put(None)
        code = "import socket\\ntry: socket.socket(socket.AF_PACKET)\\nexcept OSError as error: print(error.errno)"
        print(told.get(), subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip())
    """
    head, _, _ = INSTALLED.partition("seccomp.install")
    done = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["1", "1"], done.stderr


def test_processes_threads_shared_memory_and_event_loops_go_on() -> None:
    assert run("""
        import asyncio, concurrent.futures, multiprocessing, signal, subprocess, threading, time
        from multiprocessing import shared_memory
        def main():
            for way in ("fork", "spawn", "forkserver"):
                child = multiprocessing.get_context(way).Process(target=time.sleep, args=(0,))
                child.start(); child.join()
                assert child.exitcode == 0, way
            assert subprocess.run(["true"], close_fds=False).returncode == 0  # by vfork
            assert os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)[1] == 0
            sleeps = subprocess.Popen(["sleep", "60"])
            sleeps.send_signal(signal.SIGTERM)
            assert sleeps.wait() == -signal.SIGTERM
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                assert sum(pool.map(abs, range(10))) == 45
            memory = shared_memory.SharedMemory(create=True, size=100); memory.close(); memory.unlink()
            os.close(os.memfd_create("x"))
            async def runs():
                child = await asyncio.create_subprocess_exec("true")
                return await child.wait(), await asyncio.to_thread(time.sleep, 0)
            assert asyncio.run(runs()) == (0, None)
            signal.setitimer(signal.ITIMER_REAL, 100)
            os.sched_setaffinity(0, os.sched_getaffinity(0)); os.nice(1)
            print("all")
        if __name__ == "__main__":
            main()
    """, "dict(deny_others=os.getpid())") == "all"  # fmt: skip


@pytest.mark.slow
def test_torch_computes_with_its_threads() -> None:
    pytest.importorskip("torch")
    assert run("""
        import numpy, torch
        torch.set_num_threads(2)
        a = torch.ones(400, 400)
        print(float((a @ a).sum()), float(numpy.linalg.norm(numpy.eye(9) @ numpy.eye(9))))
    """, "dict(deny_others=os.getpid())") == "64000000.0 3.0"  # fmt: skip


def test_without_the_right_number_of_its_tables_a_machine_has_no_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seccomp, "_ARCHITECTURE", 0)
    with pytest.raises(OSError, match="x86_64 and aarch64 only"):
        seccomp.install()
    assert ctypes.sizeof(seccomp._Program) == 16
