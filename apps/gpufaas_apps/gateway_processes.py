"""
``gpufaas gateway --gateway-workers N``: so many gateways on one port, as processes that this one starts, watches and
stops. The kernel gives each connection to one of them (SO_REUSEPORT).

Each is a gateway of the cluster, ``ID-1``, ``ID-2``, ..., with a directory and a status port of its own. What is apart
here is apart between gateways anyway: a process that dies takes its own calls along, no others.
"""

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gpufaas_apps import gateway
from gpufaas_apps.cluster import identity
from gpufaas_apps.data_directory import auth_dir_of, credentials_of, login_offered, owned
from gpufaas_apps.metrics_view import asked, joined, with_label
from gpufaas_apps.options import GatewayOptions
from gpufaas_apps.process import asked_to_stop, listen, prepare_process, run_loop
from gpufaas_apps.server import GRACE_S
from gpufaas_apps.status import Status, status_served
from gpufaas_apps.watchdog import OVERDUE_S, notify
from gpufaas_core.errors import GpufaasError
from gpufaas_core.model import Seconds
from gpufaas_gpu_manager.confine import end_with_parent

log = logging.getLogger("gateway")

_FIRST_PAUSE_S: Final[Seconds] = 0.2
_LONGEST_PAUSE_S: Final[Seconds] = 30.0
_SETTLED_S: Final[Seconds] = 20.0
"""A process that has run for so long was well: what ends it later is no matter of its options."""
_LAST_PORT: Final = 65_535
_NOT_PASSED_ON: Final = frozenset(("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"))
"""systemd talks to this process."""


def run(options: GatewayOptions) -> None:
    """Serve by several processes until this one is asked to stop."""
    front = options.front
    prepare_process()
    identity(options.cluster, "gateway")  # what is wrong is said once, and before anything is started
    with owned(front.data), _reserved(front.host, front.port) as port:
        # What processes would make for themselves, and must be the same in all:
        credentials = credentials_of(front)
        front = replace(front, port=port, auth_dir=auth_dir_of(front))
        gateway.key_of_secrets(options.secrets_key)
        processes = GatewayProcesses(replace(options, front=front))
        with login_offered(front, credentials):
            run_loop(processes.run(), GRACE_S + OVERDUE_S)


@contextlib.contextmanager
def _reserved(host: str, port: int) -> Iterator[int]:
    """
    Keep a port for sockets that are bound with SO_REUSEPORT, without listening to it; yield its number.

    :raises GpufaasError: it is taken, also by one that would share it
    """
    with listen(host, port, "--port") as alone:
        address = alone.getsockname()
    with socket.socket(alone.family, socket.SOCK_STREAM) as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(address)
        yield int(address[1])


@dataclass
class _Process:
    """One of them, over all its starts."""

    name: str
    options: GatewayOptions
    starts: int = 0
    child: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """The URL of its status port."""
        return _status_url(self.options.front.host, self.options.cluster.status_port)

    async def start(self) -> None:
        """Start it; its options are read from its standard input."""
        given = os.memfd_create("gateway-options")
        try:
            os.write(given, pickle.dumps((self.options, os.getpid())))
            os.lseek(given, 0, os.SEEK_SET)
            env = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
            command = (sys.executable, "-P", "-m", "gpufaas_apps.gateway_processes")
            # A session of its own: Ctrl-C reaches this process alone, which passes it on. A second one would end calls.
            self.child = await asyncio.create_subprocess_exec(*command, stdin=given, env=env, start_new_session=True)
        finally:
            os.close(given)
        self.starts += 1

    def signal(self, number: signal.Signals) -> None:
        if self.child is not None and self.child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.child.send_signal(number)


class GatewayProcesses:
    """See module."""

    def __init__(self, options: GatewayOptions) -> None:
        self._options = options
        self._stop: asyncio.Event
        """Since `run`."""
        self._failed = ""
        self._processes: Sequence[_Process] = ()

    async def run(self) -> None:
        """
        Keep all processes running until this one is asked to stop; then stop them, and wait until their calls have
        ended.

        :raises GpufaasError: one cannot be started
        """
        self._stop = asked_to_stop()
        cluster, front = self._options.cluster, self._options.front
        status = Status(self._why_not_ready, self._metrics)
        async with status_served(status, front.host, cluster.status_port) as port:
            if (last := port + self._options.workers) > _LAST_PORT:
                raise GpufaasError(
                    f"there is no port {last} for the status of process {self._options.workers}, which has the port so "
                    f"far after this one's ({port}): choose a lower --status-port"
                )
            self._processes = [self._described(number, port) for number in range(1, self._options.workers + 1)]
            told = f"{cluster.id}: {len(self._processes)} processes on port {front.port}, status at port {port}"
            print(f"✓ gateway    {told}", flush=True)
            notify("READY=1")
            async with asyncio.TaskGroup() as tasks:
                for each in self._processes:
                    tasks.create_task(self._keep(each))
                await self._stop.wait()
                for each in self._processes:
                    each.signal(signal.SIGTERM)
        if self._failed:
            raise GpufaasError(self._failed)

    def _described(self, number: int, status_port: int) -> _Process:
        """Return the process *number*: a gateway with an id, a directory and a status port of its own."""
        options, name = self._options, f"{self._options.cluster.id}-{number}"
        cluster = replace(options.cluster, id=name, status_port=status_port + number)
        front = replace(options.front, data=options.front.data / "processes" / str(number))
        url = f"{_status_url(front.host, status_port)}/metrics"
        return _Process(name, replace(options, cluster=cluster, front=front, workers=1, metrics_of_all=url))

    async def _keep(self, process: _Process) -> None:
        """Run *process*, again and again, until the stop; the pause before a start grows while starts fail."""
        loop, pause = asyncio.get_running_loop(), _FIRST_PAUSE_S
        while not self._stop.is_set():
            began = loop.time()
            await process.start()
            assert process.child is not None
            if self._stop.is_set():
                process.signal(signal.SIGTERM)
            status = await process.child.wait()
            if self._stop.is_set():
                if status:
                    log.error("gateway.process_ended id=%s %s, while it was stopped", process.name, _told(status))
                return
            settled = loop.time() - began >= _SETTLED_S
            if status > 0 and process.starts == 1 and not settled:
                self._failed = (
                    f"gateway process {process.name} cannot be started ({_told(status)}): its reason is above"
                )
                self._stop.set()
                return
            pause = _FIRST_PAUSE_S if settled else min(2 * pause, _LONGEST_PAUSE_S)
            log.error(
                "gateway.process_ended id=%s pid=%d %s: its calls are lost, others go on; it starts again in %.1f s",
                process.name, process.child.pid, _told(status), pause,
            )  # fmt: skip
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), pause)

    # --- what the status port says ---

    async def _why_not_ready(self) -> str:
        """Return what the best of them says: see `Status`."""
        said = await asyncio.gather(*(asked(f"{each.url}/readyz") for each in self._processes))
        told = sorted(filter(None, said), key=lambda text: (not text.startswith("ready"), text))
        return (told or ["no process answers"])[0].strip()

    async def _metrics(self) -> bytes:
        """Return the metrics of all processes, each series with the label of its process."""
        texts = await asyncio.gather(*(asked(f"{each.url}/metrics") for each in self._processes))
        labelled = [with_label(text, "process", each.name) for each, text in zip(self._processes, texts, strict=True)]
        name = "gpufaas_gateway_process_starts_total"
        own = [f"# HELP {name} Starts of this gateway process", f"# TYPE {name} counter"]
        own += [f'{name}{{process="{each.name}"}} {each.starts}' for each in self._processes]
        return joined([*labelled, "\n".join(own)]).encode()


def _status_url(host: str, port: int) -> str:
    """Return how a process of this machine reaches the status port of another that listens at *host*."""
    named = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{named}:{port}"


def _told(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"


def main() -> int:
    """Be one of the processes: `_Process.start` sends its options."""
    options, parent = pickle.load(sys.stdin.buffer)
    end_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        return 1  # it ended before it would have been noticed
    try:
        gateway.run(options)
    except GpufaasError as exc:
        print(f"gpufaas: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
