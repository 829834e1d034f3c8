"""
A process that has imported torch once, and of which tests have their fork servers forked: some ms in place of seconds.

What comes out is `gpufaas_gpu_manager.zygote` as it is, a child of the test's process and alone in it; only that its
imports were done before. As a program, ``nursery.py FD PARENT``, it is that process.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

from gpufaas_gpu_manager import forked, zygote
from gpufaas_gpu_manager.confine import inherit_orphans
from gpufaas_gpu_manager.forks import environment
from gpufaas_gpu_manager.huge_pages import collapse_own

_MAX = 1 << 20


class Forked:
    """A child that `subprocess` did not start, with as much of Popen as who starts fork servers uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self._reap(0 if end is None else os.WNOHANG)) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("a fork server", timeout or 0.0)
            time.sleep(0.002)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class Nursery:
    """The tester's end."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.settimeout(60)
        inherit_orphans()  # the fork servers are grandchildren of the nursery, whose parents end at once
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment(),
            )  # fmt: skip

    def launch(self, control: socket.socket, env: dict[str, str]) -> Forked:
        """In place of `gpufaas_gpu_manager.forks.launch`."""
        asked = b"\0".join(f"{name}={value}".encode() for name, value in env.items())
        socket.send_fds(self._requests, [asked], [control.fileno(), 1, 2])
        return Forked(int(self._requests.recv(_MAX)))

    def close(self) -> None:
        self._requests.close()
        self._process.wait(10)


def main(requests: socket.socket, tester: int) -> None:
    forked.preload()
    zygote._settle()
    for _ in collapse_own():  # once for all of them: those of a fork server would be copies
        pass
    while True:
        asked, fds, _, _ = socket.recv_fds(requests, _MAX, 3)
        if not asked:
            return
        read, write = os.pipe()
        child = os.fork()
        if not child:
            if pid := os.fork():
                os.write(write, str(pid).encode())
                os._exit(0)
            for each in (read, write, requests.detach()):
                os.close(each)
            _become_fork_server(asked, fds, tester)
        os.waitpid(child, 0)  # from now on the tester is its parent
        requests.send(os.read(read, _MAX))
        for each in (read, write, *fds):
            os.close(each)


def _become_fork_server(asked: bytes, fds: list[int], tester: int) -> None:
    while os.getppid() != tester:
        time.sleep(0.0005)
    os.setsid()
    os.dup2(fds[1], 1)
    os.dup2(fds[2], 2)
    os.close(fds[1])
    os.close(fds[2])
    os.environ.clear()
    os.environ.update(each.split("=", 1) for each in os.fsdecode(asked).split("\0"))
    sys.argv = ["zygote", str(fds[0])]
    with contextlib.suppress(KeyboardInterrupt):
        zygote.main()
    os._exit(0)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
