"""The manager's end of the fork server: it starts it, asks it for workers, and hears of those that ended."""

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from gpufaas_gpu_manager.confine import inherit_orphans
from gpufaas_gpu_manager.devices import with_allocator
from gpufaas_gpu_manager.forked import MAX_MESSAGE, Fork, Prepare
from gpufaas_gpu_manager.orphans import end_orphans, is_fork_server
from gpufaas_gpu_manager.proc import progress_of, state_of
from gpufaas_gpu_manager.stuck import LOOK_S, Replaced, Silence
from gpufaas_gpu_manager.timers import Timers
from gpufaas_gpu_manager.zygote import Exited, Forked, FromForkServer, KillWithManager, Ping, ServerReady, ToForkServer

_RESTART_BACKOFF_S: Final = (0.1, 0.5, 2.0, 5.0)
_ASKED_AT_MOST: Final = 2
"""Fork servers that are asked for one worker: if two died of it, a third would die, too."""
_READ_AT_ONCE: Final = 64
_INHERITED: Final = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_.*|TZ|TMPDIR|HOSTNAME|VIRTUAL_ENV|PYTHON.*|LD_LIBRARY_PATH|LD_PRELOAD"
    r"|CUDA.*|NVIDIA.*|TORCH.*|PYTORCH.*|MALLOC.*|.*_CA_BUNDLE|SSL_CERT_.*|(?i:https?_proxy|no_proxy|all_proxy)"
)
"""Variables of the platform that functions see. The others may be the operator's secrets."""
_decode: Final = msgspec.msgpack.Decoder(FromForkServer).decode
_encode: Final = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class _ForkRequest:
    """A worker that was asked for and is not forked yet. Who asked waits, and keeps `fds` open meanwhile."""

    message: Fork
    fds: Sequence[int]
    pid: asyncio.Future[int]
    """Its process; cancelled: it will have none."""
    sent: int = 0
    """To so many fork servers."""
    unsent: bool = True
    """The present one has not been asked."""


class _ForkRequests(dict[int, _ForkRequest]):
    """What was asked for and is not forked yet, by worker."""

    def send(self, server: "_Server") -> None:
        """Send what *server* was not asked for yet, as far as it takes that; the rest follows when it has answered."""
        for each in self.values():
            if each.unsent:
                if not server.send(each.message, each.fds):
                    return
                each.unsent = False
                each.sent += 1

    def begin_again(self) -> list[int]:
        """Another fork server is asked for all of them, but for workers that too many were asked for: return those."""
        for each in self.values():
            each.unsent = True
        return self.give_up([worker for worker, each in self.items() if each.sent >= _ASKED_AT_MOST])

    def give_up(self, workers: Collection[int]) -> list[int]:
        """They will have no process. Return those of them that were asked for."""
        found = [worker for worker in workers if worker in self]
        for worker in found:
            self.pop(worker).pid.cancel()
        return found


class _Server:
    """One process of a fork server, and our end of its socket."""

    def __init__(self, process: "subprocess.Popen[bytes]", control: socket.socket, on_readable: Callable[[], None]):
        """:param on_readable: called on the event loop when `receive` has something to return"""
        self.process = process
        self._control: socket.socket | None = control
        control.setblocking(False)  # a fork server that does not read must not hold the loop up
        asyncio.get_running_loop().add_reader(control, on_readable)

    def send(self, message: ToForkServer, fds: Sequence[int] = ()) -> bool:
        """Return whether it took *message*: not while its buffer is full, nor when it has just died."""
        if self._control is None:
            return False
        try:
            socket.send_fds(self._control, [_encode(message)], list(fds))
        except OSError:
            return False
        return True

    def receive(self) -> bytes | None:
        """Return its next message, an empty one when it is dead; None: there is none yet, or it was detached."""
        if self._control is None:
            return None
        try:
            return self._control.recv(MAX_MESSAGE)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def detach(self) -> None:
        """Close the socket, by which a fork server that runs ends itself and its workers."""
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None


class ForkServer:
    """
    One fork server. When it dies its workers die with it, are reported as killed, and another one is started. When it
    is stuck it is replaced, and its workers live on. The next one is asked for what the last one did not fork.

    `on_exited(worker, status)` is called on the event loop when one has ended, or will never be forked.
    """

    def __init__(self, on_exited: Callable[[int, int], None], on_said: Callable[[str], None]) -> None:
        self.on_exited = on_exited
        self._on_said = on_said
        self._server: _Server | None = None
        self._ready: asyncio.Future[ServerReady] | None = None
        self._alive: dict[int, int] = {}
        """Workers that this fork server has forked, and their process ids."""
        self._standbys: dict[int, int] = {}
        """As `_alive`, of standbys that are no workers yet."""
        self._adopted: dict[int, int] = {}
        """The workers that standbys have become, by the standby's number, which the fork server knows."""
        self._requests = _ForkRequests()
        self._replaced: list[Replaced] = []
        self._silence = Silence()
        self._owes = False
        """The fork server has not answered since its start, or since the last ping."""
        self._fault = ""
        self._deaths = 0
        self._closing = False
        self._timers = Timers()

    @property
    def pid(self) -> int | None:
        return self._server.process.pid if self._server else None

    @property
    def fault(self) -> str:
        """Why no worker can be started now, for people; empty: they can."""
        if self._fault:
            return self._fault
        if self._starting:
            return "the fork server starts: it imports what workers need, and no function can be loaded yet"
        looks = self._silence.looks
        return "" if looks < 2 else f"the fork server has not answered for {looks * LOOK_S:g} s"

    @property
    def busy(self) -> bool:
        """Whether a worker of it lives, or is asked for."""
        return bool(self._alive or self._requests)

    @property
    def _starting(self) -> bool:
        return self._ready is None or not self._ready.done()

    def start(self) -> None:
        """Start it in the background; `ready` says when it can fork."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        inherit_orphans()  # of a fork server that is killed: `end_orphans` ends them
        with theirs:
            process = launch(theirs, environment())
        is_fork_server(process.pid)
        self._begin(process, ours)

    def _begin(self, process: "subprocess.Popen[bytes]", control: socket.socket) -> None:
        self._server = _Server(process, control, self._read)
        if self._ready is None or self._ready.done():
            self._ready = asyncio.get_running_loop().create_future()
        self._silence, self._owes = Silence(), True
        self._timers.later("look", LOOK_S, self._look)

    async def ready(self) -> ServerReady:
        """Wait until it can fork. Without a deadline: importing torch from a cold disk may take a minute."""
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()  # asked for before start()
        return await asyncio.shield(self._ready)

    async def fork(self, worker: Fork, fds: Sequence[int]) -> int | None:
        """
        Have *worker* forked with *fds* (its slots if it is a `Spawn`, then stdout and stderr; a standby's socket).

        :return: its process, of which `on_exited` may have told already; None: it will have none
        """
        await self.ready()
        request = self._requests[worker.worker] = _ForkRequest(worker, fds, asyncio.get_running_loop().create_future())
        self._send_requests()
        await asyncio.wait([request.pid])
        return None if request.pid.cancelled() else request.pid.result()

    def adopt(self, standby: int, worker: int) -> bool:
        """Standby number *standby* is *worker* from now on. False: it has ended."""
        pid = self._standbys.pop(standby, None)
        if pid is None:
            return False
        self._alive[worker] = pid
        self._adopted[standby] = worker
        return True

    def _send_requests(self) -> None:
        if self._server is not None and not self._starting:
            self._requests.send(self._server)

    def _read(self) -> None:
        """Read so few messages at once that the loop turns: there is one for each worker that comes or goes."""
        server = self._server
        assert server is not None
        for _ in range(_READ_AT_ONCE):
            data = server.receive()
            if data is None:
                break
            if not data:
                self._died()
                return
            self._on_message(_decode(data))
        self._send_requests()

    def _on_message(self, said: FromForkServer) -> None:
        self._owes = False
        self._silence.broken()
        if isinstance(said, ServerReady):
            self._deaths = 0
            self._fault = ""
            if said.missing:
                self._on_said(f"workers start without {'; '.join(said.missing)}")
            assert self._ready is not None
            if not self._ready.done():
                self._ready.set_result(said)
            self._tell_replaced()
        elif isinstance(said, Forked):
            request = self._requests.pop(said.worker)
            living = self._standbys if isinstance(request.message, Prepare) else self._alive
            living[said.worker] = said.pid
            request.pid.set_result(said.pid)
        elif isinstance(said, Exited):
            if said.fault:
                self._on_said(f"a worker could not be forked: {said.fault}")
            self._requests.give_up([said.worker])
            self._standbys.pop(said.worker, None)
            number = self._adopted.pop(said.worker, said.worker)
            self._alive.pop(number, None)
            self.on_exited(number, said.status)

    # --- when it is stuck, or dead ---

    def _look(self) -> None:
        """Ping it every second, so that a stopped one is noticed although no worker is asked for."""
        self._timers.later("look", LOOK_S, self._look)
        assert self._server is not None
        if not self._owes:
            self._owes = True
            self._server.send(Ping())
            self._send_requests()
            return
        pid = self._server.process.pid
        stuck = self._silence.look(state_of(pid), progress_of(pid), self._starting)
        if stuck:
            self._replace(stuck)

    def _replace(self, reason: str) -> None:
        server, workers, self._alive = self._server, self._alive, {}
        standbys, self._standbys = self._standbys, {}
        self._adopted.clear()
        assert server is not None
        lived = f"; its {len(workers)} workers go on" if workers else ""
        self._on_said(f"the fork server is stuck: {reason}: another one is started{lived}")
        self._detach()
        self._replaced.append(Replaced(server.process, workers, self.on_exited, self._tell_replaced))
        for each in standbys:  # they are killed: it could not reap them
            self.on_exited(each, -9)
        self._start_again(f"the fork server was stuck: {reason}")

    def _tell_replaced(self, over: Replaced | None = None) -> None:
        """Tell the fork server which processes die with us: those of the replaced ones, but for what is *over*."""
        if over is not None:
            self._replaced.remove(over)
        if self._server is not None:
            self._server.send(KillWithManager([pid for each in self._replaced for pid in each.pids]))

    def _died(self) -> None:
        self._detach()
        if self._closing:
            return
        assert self._server is not None
        process = self._server.process
        status = process.wait()  # its socket is closed, so it is gone or about to be
        self._on_said(f"the fork server ended with status {status}: it is started again, its workers are gone")
        end_orphans(process.pid)
        lost, self._alive, self._standbys = {**self._alive, **self._standbys}, {}, {}
        self._adopted.clear()
        self._start_again(f"the fork server ended with status {status}")
        for worker in lost:
            self.on_exited(worker, -9)

    def _start_again(self, fault: str) -> None:
        self._fault = f"{fault}; another one starts"
        if self._ready is None or self._ready.done():
            self._ready = asyncio.get_running_loop().create_future()
        delay = _RESTART_BACKOFF_S[min(self._deaths, len(_RESTART_BACKOFF_S) - 1)]
        self._deaths += 1
        self._timers.later("start", delay, self.start)
        for worker in self._requests.begin_again():
            self.on_exited(worker, -9)

    def _detach(self) -> None:
        if self._server is not None:
            self._server.detach()
        self._timers.cancel("look")

    async def close(self) -> None:
        """End it and, with it, every worker. Returns when it is reaped."""
        self._closing = True
        self._detach()
        self._timers.close()
        self._requests.give_up(list(self._requests))
        for replaced in self._replaced:
            replaced.close()
        if self._server is not None:
            process = self._server.process
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, 5.0)
            if process.poll() is None:
                process.kill()
                await asyncio.to_thread(process.wait)
            await asyncio.to_thread(end_orphans, process.pid)


def environment() -> dict[str, str]:
    """Return the environment of a fork server."""
    # Threads of math libraries do not survive a fork: the fork server must start none. Workers set their own number.
    env = {**inherited(os.environ), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    env.setdefault("OMP_STACKSIZE", "2M")  # read when the library is loaded: as `use_small_stacks` has it
    env = with_allocator(env)  # read when a torch with CUDA is imported
    if "PYTHONPATH" in env:  # Python takes an empty part of it (a trailing colon) for the current directory
        parts = filter(None, env["PYTHONPATH"].split(os.pathsep))
        env["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, parts))
    return env


def launch(control: socket.socket, env: dict[str, str]) -> "subprocess.Popen[bytes]":
    """Start a fork server with *control* as its socket. Tests replace this by a fork of one that is ready."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "gpufaas_gpu_manager.zygote", str(control.fileno())],
        pass_fds=[control.fileno()],
        stdin=subprocess.DEVNULL,
        env=env,
        start_new_session=True,
    )


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of *environ* that functions see."""
    return {name: value for name, value in environ.items() if _INHERITED.fullmatch(name)}
