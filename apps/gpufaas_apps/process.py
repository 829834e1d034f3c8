"""What every process that serves does: event loop, log, signals, limits, port and directory."""

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Awaitable, Coroutine
from pathlib import Path
from typing import Any, Final

from gpufaas_apps.watchdog import watched
from gpufaas_core.errors import GpufaasError, InvalidSpec
from gpufaas_core.model import Seconds
from gpufaas_gpu_manager.confine import dumpable
from gpufaas_gpu_manager.huge_pages import collapse_own

log = logging.getLogger("resources")

_ENOUGH: Final = 65_536
"""Open files, for some thousand functions and connections. Not more: old programs close every possible descriptor."""
_FEW: Final = 4096


def prepare_process(level: int = logging.INFO, *, isolated: bool = True) -> None:
    """Log to stderr, and raise the limit of open files. *isolated*: keep functions of this user out of its memory."""
    if isolated:
        dumpable(False)
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    # uvicorn logs half answers and lost connections as errors; the gateway reports them itself.
    for noisy in ("httpx", "uvicorn"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    raise_descriptors()


def raise_descriptors() -> None:
    """
    Raise this process's limit of open files as far as the system allows, up to `_ENOUGH`; child processes inherit it.

    The usual limit of 1,024 is for programs that use select(2); the 111th CPU function reached it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < _FEW:
        log.warning("descriptors.few limit=%d: raise the hard limit of open files (ulimit -Hn, LimitNOFILE=)", most)


def settle() -> None:
    """
    What the process has now stays. Keep it out of garbage collections, and make these rare: one stops all calls, and
    calls and connections leave nothing for it. Workers that have ended do, and those that lived for long should not be
    there for days. Put it into huge pages: a call that finds the process asleep touches many small ones.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 5, 5)
    for _ in collapse_own():
        pass


def run_loop(main: Coroutine[Any, Any, None], grace_s: Seconds = 0.0) -> None:
    """Run *main* on uvloop. *grace_s*: how long calls may run on when the process is asked to stop."""
    import uvloop

    uvloop.run(watched(main, grace_s))


def asked_to_stop() -> asyncio.Event:
    """Return an event that is set when the process is asked to stop."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def first_of(*tasks: Awaitable[Any]) -> None:
    """Run *tasks* until one of them ends. Cancel the others and wait for them; raise what the first one raised."""
    running = [asyncio.ensure_future(each) for each in tasks]
    try:
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()
    finally:
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def listen(host: str, port: int, option: str, *, shared: bool = False) -> socket.socket:
    """
    Return a socket that listens at *host* and *port*; 0 is any port that is free.

    :param option: the option that sets the port, for the message
    :param shared: other processes of ours are there, too; it does not listen yet, so that no connection waits for it
    :raises GpufaasError: the port is taken, or the address is not one of this machine
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, proto)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listening.bind(address)
            if not shared:
                listening.listen(2048)
        except OSError:
            listening.close()
            raise
    except OSError as exc:
        raise GpufaasError(
            f"cannot listen on {host}:{port} ({exc.strerror or exc}): stop what is there, or choose another {option}"
        ) from exc
    return listening


def own_directory(path: Path, option: str) -> None:
    """
    Make the directory *path* if it is not there, and keep other users out of it.

    :raises InvalidSpec: it cannot be written; the message names *option*
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        keep_private(path)
    except OSError as exc:
        raise InvalidSpec(f"{option} {path}: {exc.strerror}: make it writable, or name another") from exc
    if not os.access(path, os.W_OK):
        raise InvalidSpec(f"{option} {path}: it is not writable: make it so, or name another")


def keep_private(directory: Path) -> None:
    """Close the existing *directory* to other users: it has bundles, logs, secrets and bodies of calls."""
    mode = directory.stat().st_mode
    if mode & 0o077:
        try:
            directory.chmod(mode & 0o700)
        except PermissionError:
            log.warning("data.shared directory=%s: others may look into it, and it is not ours to close", directory)


def age_s() -> float:
    """Return the seconds since this process was started, the interpreter's own start included."""
    with open("/proc/self/stat", "rb") as stat:
        ticks = int(stat.read().rpartition(b")")[2].split()[19])  # field 22, starttime
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
