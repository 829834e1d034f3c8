"""The manager's end of the zygote: start it, have workers forked, hear of those that ended."""

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from gpufaas_functions.runner import WorkerStart
from gpufaas_gpu_manager.zygote import MAX_MESSAGE, Exec, Exited, Forked, Hello, Said, Spawn, SpawnFailed

_RESTART_BACKOFF_S: Final = (0.1, 0.5, 2.0, 5.0)
_INHERITED: Final = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_.*|TZ|TMPDIR|HOSTNAME|VIRTUAL_ENV|PYTHON.*|LD_LIBRARY_PATH|LD_PRELOAD"
    r"|CUDA.*|NVIDIA.*|TORCH.*|PYTORCH.*|MALLOC.*|.*_CA_BUNDLE|SSL_CERT_.*|(?i:https?_proxy|no_proxy|all_proxy)"
)
"""What of the platform's environment functions see. The rest may be the operator's secrets."""
_decode: Final = msgspec.msgpack.Decoder(Said).decode
_encode: Final = msgspec.msgpack.Encoder().encode


class Zygote:
    """
    One fork server, restarted when it dies (its workers die with it, and are reported as killed).

    `on_forked(worker, pid)` and `on_exited(worker, status)` are called on the event loop.
    """

    def __init__(
        self,
        on_forked: Callable[[int, int], None],
        on_exited: Callable[[int, int], None],
        on_said: Callable[[str], None],
    ) -> None:
        self._on_forked = on_forked
        self._on_exited = on_exited
        self._on_said = on_said
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ready: asyncio.Future[Hello] | None = None
        self._alive: set[int] = set()
        self._deaths = 0
        self._closing = False
        self._restarts: set[asyncio.TimerHandle] = set()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start it in the background; `ready` says when it can fork."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Threads of math libraries would not survive a fork: the zygote must not start any. Workers set their own.
        env = {**inherited(os.environ), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gpufaas_gpu_manager.zygote", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=env,
                start_new_session=True,
            )
        self._control = ours
        if self._ready is None or self._ready.done():
            self._ready = loop.create_future()
        loop.add_reader(ours, self._read)

    async def ready(self) -> Hello:
        """Wait until it can fork. No deadline of its own: importing torch from a cold disk may take a minute."""
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()  # asked for before start()
        return await asyncio.shield(self._ready)

    async def spawn(self, worker: int, start: WorkerStart, fds: Sequence[int]) -> None:
        """Have *worker* forked with *fds* (its slots, then its stderr); `on_forked` or `on_exited` will tell."""
        await self._ask(Spawn(worker, start), fds)

    async def run(self, program: Exec, output: int) -> None:
        """Have a worker forked that becomes *program*, and prints into *output*; `on_forked` or `on_exited` tells."""
        await self._ask(program, [output])

    async def _ask(self, message: Spawn | Exec, fds: Sequence[int]) -> None:
        await self.ready()
        assert self._control is not None
        self._alive.add(message.worker)
        try:
            socket.send_fds(self._control, [_encode(message)], list(fds))
        except OSError:
            # It has just died: `_read` finds that out and reports every worker of it, this one included.
            pass

    def _read(self) -> None:
        assert self._control is not None
        while True:
            try:
                data = self._control.recv(MAX_MESSAGE, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._died()
                return
            said = _decode(data)
            if isinstance(said, Hello):
                self._deaths = 0
                if said.missing:
                    self._on_said(f"workers start without {', '.join(said.missing)}: not installed here")
                assert self._ready is not None
                if not self._ready.done():
                    self._ready.set_result(said)
            elif isinstance(said, Forked):
                self._on_forked(said.worker, said.pid)
            elif isinstance(said, Exited):
                self._alive.discard(said.worker)
                self._on_exited(said.worker, said.status)
            elif isinstance(said, SpawnFailed):
                self._on_said(f"a worker could not be forked: {said.reason}")
                self._alive.discard(said.worker)
                self._on_exited(said.worker, -9)

    def _died(self) -> None:
        loop = asyncio.get_running_loop()
        self._detach()
        if self._closing:
            return
        assert self._process is not None
        status = self._process.wait()  # its socket is closed, so it is gone or about to be
        self._on_said(f"the fork server ended with status {status}: it is started again, its workers are gone")
        if self._ready is None or self._ready.done():
            self._ready = loop.create_future()
        delay = _RESTART_BACKOFF_S[min(self._deaths, len(_RESTART_BACKOFF_S) - 1)]
        self._deaths += 1
        self._restarts = {loop.call_later(delay, self.start)}
        lost, self._alive = self._alive, set()
        for worker in lost:
            self._on_exited(worker, -9)

    def _detach(self) -> None:
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None

    async def close(self) -> None:
        """End it and, with it, every worker. Returns when it is reaped."""
        self._closing = True
        for handle in self._restarts:
            handle.cancel()
        self._detach()
        if self._process is not None:
            process = self._process
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, 5.0)
            if process.poll() is None:
                process.kill()
                await asyncio.to_thread(process.wait)


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what of the platform's environment functions see."""
    return {name: value for name, value in environ.items() if _INHERITED.fullmatch(name)}
