"""
A worker that is a process of its own, since its function's environment is read when a process starts (`start_env`).

It is forked and confined as any worker; then it executes Python with that environment, imports what the fork server has
imported, and goes on as a fork does. All of its private memory counts as its own, that of torch, too.

Run as ``python -P -m gpufaas_gpu_manager.own_process GIVEN FD...``: GIVEN is a memory file with the `Spawn`, with which
each FD came.
"""

import os
import signal
import sys
from typing import Final, NoReturn

from gpufaas_core.log_marks import MARK_VARIABLE
from gpufaas_functions.runner import WorkerStart
from gpufaas_functions.start_env import with_threads

_LATER: Final = ("PYTHONPATH", MARK_VARIABLE)
"""The worker sets them itself: the platform's modules are the operator's, and the mark is not for its children."""


def execute(spawn: bytes, start: WorkerStart, fds: list[int]) -> NoReturn:
    """Become the process. *spawn* is the encoded `Spawn` with *start*, *fds* what came with it."""
    given = os.memfd_create("start", 0)
    os.write(given, spawn)
    os.lseek(given, 0, os.SEEK_SET)
    for each in fds:
        os.set_inheritable(each, True)
    asked = with_threads(start.env, start.threads)
    env = {**os.environ, **{name: value for name, value in asked.items() if name not in _LATER}}
    argv = [sys.executable, "-P", "-m", "gpufaas_gpu_manager.own_process", *map(str, (given, *fds))]
    os.execve(sys.executable, argv, env)


def main() -> None:
    from gpufaas_gpu_manager import zygote  # which has no need of this part

    given, *fds = map(int, sys.argv[1:])
    with open(given, "rb") as file:
        spawn = zygote.spawn_of(file.read())
    for each in fds:
        os.set_inheritable(each, False)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    zygote.end_with(lambda: zygote.work_alone(spawn, fds))


if __name__ == "__main__":
    main()
