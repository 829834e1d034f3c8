"""Workers that listen on a port, as processes, containers or pods: waiting for the port, slots, health checks."""

import asyncio
import os
import re
import socket
import time
from collections.abc import Callable, Sequence
from typing import Final

from gpufaas_core.descriptors import is_lack
from gpufaas_core.model import Seconds
from gpufaas_core.wire.heads import ReadyHead
from gpufaas_gpu_manager.http_slots import HttpSlot, connected
from gpufaas_gpu_manager.launch.upstream import listeners
from gpufaas_gpu_manager.running import Running
from gpufaas_gpu_manager.worker import Worker

_FIRST_LOOK_S: Final[Seconds] = 0.005
_LOOK_EVERY_S: Final[Seconds] = 0.1
_BODY_S: Final[Seconds] = 0.1
"""For so long the body of a bad answer is awaited: it says why, and a server may keep the connection open."""
_GOOD: Final = re.compile(rb"HTTP/1\.[01] [23]")
_HEAD_END: Final = b"\r\n\r\n"
_ENOUGH: Final = 4096
_SAID: Final = 200
"""The characters of an answer that are said."""
PORTS: Final = range(20_000, 32_768)
"""Below those that the kernel gives to outgoing connections, which could take a port before its server does."""


class Served(Running):
    """`Running` of a worker that listens on a port; `serve` by it when the address is known."""

    worker: Worker
    _slots: Sequence[HttpSlot] = ()
    _looking: asyncio.Task[None] | None = None

    def serve(self, host: str, port: int, behind: Callable[[], bool] = lambda: True, *, unix: str = "") -> None:
        """
        :param behind: returns whether the server to which it passes its calls listens, too
        :param unix: a path on which it may listen in place of the port
        """
        worker = self.worker
        self._slots = [HttpSlot(worker, host, port) for _ in range(worker.spec.need.slots)]
        worker.calls.on_slots(self._slots)
        self._looking = worker.loop.create_task(self._look_after(host, port, behind, unix))

    def said_all(self) -> bool:
        return not any(slot.expects for slot in self._slots)

    def hear_out(self) -> bool:
        return sum(slot.hear_out() for slot in self._slots) > 0  # `any` would not ask all of them

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        for slot in self._slots:
            slot.close()
        super().close()

    async def _look_after(self, host: str, port: int, behind: Callable[[], bool], unix: str) -> None:
        """Wait until it answers; then do its health checks until the worker ends."""
        worker, spec = self.worker, self.worker.spec
        began, pause, good = time.monotonic(), _FIRST_LOOK_S, 0
        ready_path, listens = spec.ready_path or spec.health_path, self.waits_for
        await asyncio.sleep(spec.ready_delay_s)
        while True:
            reason = await probe(host, port, ready_path, there := _there(unix), spec.ready_timeout_s)
            good = 0 if reason or not behind() else good + 1
            if good >= spec.ready_successes:
                break
            asked = reason.startswith("GET ")
            self.waits_for = f"to be ready: {reason}" if asked else listens
            # The kernel does not report when a port begins to accept: this is the one place that has to poll.
            await asyncio.sleep((spec.ready_period_s if asked or good else 0.0) or pause)
            pause = min(pause * 1.5, _LOOK_EVERY_S)
        if not there and (uid := worker.own.uid) and (others := {*listeners(port)} - {uid}):
            worker.kill(f"its port {port} was taken by uid {min(others)}, which is not its function's")
            return
        for slot in self._slots:
            slot.unix = there
        # It counts as occupying its reservation: it grows with its calls, and only the kernel measures that.
        worker.on_ready(ReadyHead(worker.memory, [("ready", time.monotonic() - began)]))
        failures = 0
        await asyncio.sleep(began + spec.health_delay_s - time.monotonic())
        while spec.health_path:
            await asyncio.sleep(spec.health_period_s)
            reason = await probe(host, port, spec.health_path, there, spec.health_timeout_s)
            failures = failures + 1 if reason else 0
            if failures >= spec.health_failures:
                worker.kill(f"its health check failed {failures} times: {reason}")
                return


def _there(unix: str) -> str:
    """Return *unix* if something has bound it."""
    return unix if unix and os.path.exists(unix) else ""


async def probe(host: str, port: int, path: str, unix: str = "", timeout_s: Seconds = 5.0) -> str:
    """
    Return what is wrong with ``host:port``, or with its answer to a GET of *path*, which begins with ``GET``; empty:
    nothing.

    :param unix: the unix socket on which it listens in place of the port
    """
    writer, got = None, b""
    try:
        async with asyncio.timeout(timeout_s) as limit:
            own = await connected(unix) if unix else None
            opened = asyncio.open_connection(sock=own) if own else asyncio.open_connection(host, port)
            reader, writer = await opened
            if not path:
                return ""
            writer.write(f"GET {path} HTTP/1.1\r\nhost: {host}:{port}\r\nconnection: close\r\n\r\n".encode("latin-1"))
            while not _GOOD.match(got) and len(got) < _ENOUGH and (more := await reader.read(_ENOUGH)):
                got += more
                if got.partition(_HEAD_END)[2]:
                    break
                if _HEAD_END in got:
                    limit.reschedule(asyncio.get_running_loop().time() + _BODY_S)
    except OSError as exc:
        if not got:
            why = exc.strerror or str(exc) or f"no answer within {timeout_s:g} s"
            return f"GET {path}: {why}" if writer else why
    finally:
        if writer is not None:
            writer.transport.abort()
    if _GOOD.match(got):
        return ""
    head, _, body = got.partition(_HEAD_END)
    line, said = (each.decode("utf-8", "replace").strip()[:_SAID] for each in (head.partition(b"\r\n")[0], body))
    return f"GET {path} was answered {line.removeprefix('HTTP/1.1 ')!r}{f' with {said!r}' if said else ''}"


class Ports:
    """
    Ports of this machine for the servers of workers, in turn. One that is taken is not given again until it is closed.

    About a second passes between finding a port free and its server's listening. Another platform here could find the
    same port meanwhile, and its server would be taken for ours. So a port is claimed by a name in the abstract
    namespace of unix sockets, which like ports belongs to one network namespace.
    """

    def __init__(self) -> None:
        self._next = 0

    def take(self) -> tuple[int, socket.socket]:
        """Return a port, and the socket that claims it until it is closed."""
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
