"""
MPS, NVIDIA's server that runs kernels of several processes side by side on one GPU: a daemon for each GPU of a node.

Each daemon has directories of its own, so that it is nobody else's, and workers reach it by their environment.
Functions that share a GPU (`spatial`, `share`, `auto`) are its clients; the others are not, so that a fault of a
client, which may end all clients of a GPU, is none of theirs. A daemon serves one uid at a time, and its clients and
servers meet in one /dev/shm: so there is none where workers are isolated. Written by NVIDIA's manual and tested with a
stand-in; not run on a real GPU.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Final

from gpufaas_core.model import Bytes, Need, Seconds
from gpufaas_core.units import MiB
from gpufaas_gpu_manager.confine import end_with_parent

PROGRAM: Final = "nvidia-cuda-mps-control"
_UP_WITHIN_S: Final[Seconds] = 10.0
_ANSWER_WITHIN_S: Final[Seconds] = 5.0
_LOOK_EVERY_S: Final[Seconds] = 0.05


class Mps:
    """The daemon of one GPU. Its methods block: they are called in threads, or when the node is composed."""

    def __init__(self, uuid: str) -> None:
        """
        Start it.

        :raises OSError: it cannot be started here; says why
        """
        program = shutil.which(PROGRAM)
        if program is None:
            raise OSError(f"{PROGRAM} is not installed")
        self._program = program
        self._home = Path(tempfile.mkdtemp(prefix="gpufaas-mps-"))  # short: sockets are made in it
        self._directories = {
            "CUDA_MPS_PIPE_DIRECTORY": str(self._home / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(self._home / "log"),
        }
        for each in self._directories.values():
            Path(each).mkdir()
        self._env = {**os.environ, **self._directories, "CUDA_VISIBLE_DEVICES": uuid}
        self._daemon: subprocess.Popen[bytes] | None = None
        try:
            self._start()
        except OSError:
            self.close()
            raise

    def env(self, need: Need, share: int, memory: Bytes) -> dict[str, str]:
        """
        Return what makes a worker a client, with *share* per cent of the GPU and *memory* bytes, if it has a share; a
        daemon that has ended is started again.

        :raises OSError: it cannot be
        """
        if need.sharing not in ("spatial", "share", "auto") and not share:
            return {}
        if self._daemon is None or self._daemon.poll() is not None:
            self._start()
        if not share:
            return dict(self._directories)
        # A client sees one GPU, as number 0.
        return {
            **self._directories,
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share),
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={max(1, memory // MiB)}M",
        }

    def close(self) -> None:
        """End it, and its server."""
        daemon, self._daemon = self._daemon, None
        if daemon is not None and daemon.poll() is None:
            self._ask("quit")
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(_ANSWER_WITHIN_S)
            if daemon.poll() is None:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(self._home, ignore_errors=True)

    def _start(self) -> None:
        with (self._home / "log" / "output").open("ab") as output:
            self._daemon = subprocess.Popen(
                [self._program, "-f"], env=self._env, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True, preexec_fn=lambda: end_with_parent(signal.SIGTERM),
            )  # fmt: skip
        until = time.monotonic() + _UP_WITHIN_S
        while not self._ask("get_server_list"):
            status = self._daemon.poll()
            if status is not None or time.monotonic() > until:
                said = (self._home / "log" / "output").read_text(errors="replace").strip().splitlines()
                how = f"ended with status {status}" if status is not None else "does not answer"
                raise OSError(f"{PROGRAM} {how}" + (f": {said[-1]}" if said else ""))
            time.sleep(_LOOK_EVERY_S)

    def _ask(self, command: str) -> bool:
        """Give the daemon a command; return whether it took it."""
        try:
            done = subprocess.run(
                [self._program], env=self._env, input=f"{command}\n".encode(), capture_output=True, check=False,
                timeout=_ANSWER_WITHIN_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0
