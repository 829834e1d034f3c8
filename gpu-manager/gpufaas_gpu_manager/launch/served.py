"""What programs and containers that listen on a port have in common: waiting for the port, its slots, its health."""

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Final

from gpufaas_core.descriptors import is_lack
from gpufaas_core.frames import ReadyHead
from gpufaas_core.model import Seconds
from gpufaas_gpu_manager.http_slots import HttpSlot
from gpufaas_gpu_manager.worker import Worker

_FIRST_LOOK_S: Final[Seconds] = 0.005
_LOOK_EVERY_S: Final[Seconds] = 0.1
_ANSWER_S: Final[Seconds] = 5.0
"""For one look: a probe that takes longer is a failed one."""
_STATUS_LINE: Final = 1024
PORTS: Final = range(20_000, 32_768)
"""Below those that the kernel gives to outgoing connections: none of these takes a port before its server does."""


class Face:
    """A worker as it is reached: made with it, opened once its address is known."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._slots: list[HttpSlot] = []
        self._task: asyncio.Task[None] | None = None

    def open(self, host: str, port: int, behind: Callable[[], bool] = lambda: True) -> None:
        """:param behind: whether what it passes its calls to is there, too"""
        loop = asyncio.get_running_loop()
        worker = self._worker
        self._slots = [HttpSlot(worker, host, port, loop) for _ in range(worker.spec.slots)]
        worker.on_slots(self._slots)
        self._task = loop.create_task(self._look_after(host, port, behind))

    def said_all(self) -> bool:
        return not any(slot.expects for slot in self._slots)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        for slot in self._slots:
            slot.close()

    async def _look_after(self, host: str, port: int, behind: Callable[[], bool]) -> None:
        """Wait until it answers; then look every so often whether it still does. Ends with the worker."""
        spec = self._worker.spec
        began, pause = time.monotonic(), _FIRST_LOOK_S
        while await probe(host, port, spec.ready_path or spec.health_path) or not behind():
            # Nothing tells when a port begins to accept: this is the one place that has to look again and again.
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, _LOOK_EVERY_S)
        # What it occupies is what is reserved for it: it grows with its calls, and nobody but the kernel measures it.
        self._worker.on_ready(ReadyHead(self._worker.memory, [("ready", time.monotonic() - began)]))
        failures = 0
        while spec.health_path:
            await asyncio.sleep(spec.health_period_s)
            reason = await probe(host, port, spec.health_path)
            failures = failures + 1 if reason else 0
            if failures >= spec.health_failures:
                self._worker.kill(f"its health check {spec.health_path} failed {failures} times: {reason}")
                return


async def probe(host: str, port: int, path: str) -> str:
    """Return what is wrong with ``host:port``, or with its answer to a GET of *path*; empty: it is well."""
    writer = None
    try:
        async with asyncio.timeout(_ANSWER_S):
            reader, writer = await asyncio.open_connection(host, port)
            if not path:
                return ""
            writer.write(f"GET {path} HTTP/1.1\r\nhost: {host}:{port}\r\nconnection: close\r\n\r\n".encode("latin-1"))
            line = (await reader.read(_STATUS_LINE)).split(b"\r\n", 1)[0].decode("latin-1")
    except TimeoutError:
        return f"no answer within {_ANSWER_S:g} s"
    except OSError as exc:
        return exc.strerror or str(exc)
    finally:
        if writer is not None:
            writer.transport.abort()
    status = line.split(" ")[1:2]
    return "" if status and status[0][:1] in ("2", "3") else f"it answered {line!r}"


class Ports:
    """
    Ports of this machine for servers of ours, in turn. One that is taken is nobody else's until it is closed.

    Between finding a port free and its server's listening there lies a second, in which another platform here may find
    the same: then its server would be taken for ours. So a port is claimed by a name in the abstract namespace of unix
    sockets, which has the extent of the ports': one network namespace.
    """

    def __init__(self) -> None:
        self._next = 0

    def take(self) -> tuple[int, socket.socket]:
        """Return a port, and what holds it until it is closed."""
        for _ in PORTS:
            port = PORTS[self._next % len(PORTS)]
            self._next += 1
            claim = socket.socket(socket.AF_UNIX)
            try:
                claim.bind(f"\0gpufaas-port-{port}")
                with socket.socket() as tried:
                    tried.bind(("", port))
            except OSError as exc:
                claim.close()
                if is_lack(exc):
                    raise
            else:
                return port, claim
        raise OSError(f"every port from {PORTS.start} to {PORTS.stop - 1} is taken")
