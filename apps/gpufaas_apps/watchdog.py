"""
A thread that watches the event loop. It logs where the loop stands when it does not turn, and ends the process when
that was asked to stop and does not. It also has the heap give back what it does not need (`Heap`).

Signals reach the thread whatever the loop does: the interpreter writes their numbers to a descriptor that this thread
reads, and it passes them on to the loop. It cannot run while other code holds the interpreter's lock without end; for
that there is systemd's watchdog (``WatchdogSec=``), which is pinged only while the loop turns.

The process ends by `os._exit`: the fork server and all workers die with it (PR_SET_PDEATHSIG), and the next start
removes containers.
"""

import asyncio
import ctypes
import logging
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Coroutine
from typing import Any, Final

from gpufaas_core.model import Seconds

log = logging.getLogger("watchdog")

STALL_S: Final[Seconds] = 10.0
"""If the loop does not turn for so long, the stacks of all threads are logged, once."""
OVERDUE_S: Final[Seconds] = 10.0
"""A process that was asked to stop is ended so long after the grace of its running calls."""
_TICK_S: Final[Seconds] = 1.0
_ONE_S: Final[Seconds] = 0.2
"""Signals within this count as one: a terminal's, and the same one passed on by our parent process."""
_LATE_S: Final[Seconds] = 2.0
_SAYING_S: Final[Seconds] = 1.0
_ASKS: Final = frozenset((signal.SIGTERM, signal.SIGINT))
QUIET: Final = 0.1
"""The share of a second. A process that uses less processor time has no storm."""
BUSY_S: Final[Seconds] = 0.05
"""Processor time after which there may be something to give back. To look for it takes 0.3 ms, and 0.2 ms per MiB."""
_trim: Final[Any] = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)  # musl has none, and keeps less


async def watched(main: Coroutine[Any, Any, None], grace_s: Seconds) -> None:
    """Run *main* under a watchdog, on the main thread. *grace_s*: how long calls may run after a stop was asked for."""
    watchdog = Watchdog(asyncio.get_running_loop(), grace_s)
    watchdog.start()
    try:
        await main
    finally:
        watchdog.stop()


def notify(state: str) -> None:
    """Send *state* (``READY=1``, ``STOPPING=1``) to systemd, if it started us (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
            sock.sendto(state.encode(), "\0" + address[1:] if address[0] == "@" else address)
    except OSError as exc:
        log.warning("notify.failed %s: %s", state, exc)


class Watchdog:
    """See module. Start and stop it on the main thread, in *loop*."""

    def __init__(self, loop: asyncio.AbstractEventLoop, grace_s: Seconds) -> None:
        self._loop = loop
        self._stop_s = grace_s + OVERDUE_S
        self._pings = _pings()
        self._tick_s = min(_TICK_S, STALL_S / 4, self._pings / 4 if self._pings else _TICK_S)
        self._signals, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        self._signals.setblocking(False)
        self._lock = threading.Lock()
        self._loops_fd = -1
        self._over = False
        self._asked_at: Seconds | None = None
        """When `_turn` was scheduled on the loop; None: it has run."""
        self._standing = False
        self._signalled_at: Seconds | None = None
        self._heap = Heap()
        self._says: queue.SimpleQueue[str | threading.Event] = queue.SimpleQueue()

    def start(self) -> None:
        self._loops_fd = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._say, name="watchdog-log", daemon=True).start()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        """The loop is about to end. If the process was asked to stop, its end is still watched."""
        with self._lock:
            self._over = True
            signal.set_wakeup_fd(self._loops_fd)
            self._loops_fd = -1

    # --- the thread ---

    def _watch(self) -> None:
        looked_at = time.monotonic()
        while True:
            heard, _, _ = select.select([self._signals], [], [], self._tick_s)
            now = time.monotonic()
            if heard:
                self._hear(now)
            if self._signalled_at is not None and now - self._signalled_at >= self._stop_s:
                self._end(f"it was asked to stop {self._stop_s:g} s ago", 1)
            if self._over:
                if self._signalled_at is None:
                    return
                continue
            if now - looked_at > self._tick_s + _LATE_S and self._asked_at is not None:
                self._asked_at = now  # this thread could not run either: the whole process was stopped
            if now - looked_at >= self._tick_s:
                self._heap.look()
            looked_at = now
            self._look(now)

    def _look(self, now: Seconds) -> None:
        asked_at = self._asked_at
        if asked_at is None:
            if self._pings:
                notify("WATCHDOG=1")
            self._asked_at = now
            try:
                self._loop.call_soon_threadsafe(self._turn)
            except RuntimeError:  # it is closed
                self._over = True
        elif not self._standing and now - asked_at >= STALL_S:
            self._standing = True
            self._says.put(f"loop.stands for {now - asked_at:.1f} s; all threads:\n{_stacks()}")

    def _turn(self) -> None:
        """Runs on the loop, so the loop turns."""
        asked_at, self._asked_at = self._asked_at, None
        if self._standing and asked_at is not None:
            self._standing = False
            self._says.put(f"loop.turns again after {time.monotonic() - asked_at:.1f} s")

    def _hear(self, now: Seconds) -> None:
        try:
            numbers = self._signals.recv(4096)
        except BlockingIOError:
            return
        with self._lock:
            if self._loops_fd >= 0:
                try:
                    os.write(self._loops_fd, numbers)
                except OSError:
                    pass  # it is full: the loop has enough to wake up for
        for number in numbers:
            if number not in _ASKS:
                continue
            if self._signalled_at is None:
                self._signalled_at = now
                notify("STOPPING=1")
            elif now - self._signalled_at > _ONE_S:
                self._end(f"a second {signal.Signals(number).name}", 128 + number)

    def _end(self, why: str, status: int) -> None:
        said = threading.Event()
        self._says.put(f"process.ended at once: {why}; all threads:\n{_stacks()}")
        self._says.put(said)
        said.wait(_SAYING_S)  # a log that is not read must not stop us
        os._exit(status)

    def _say(self) -> None:
        """Write the log in a thread of its own: the log itself may be what blocks."""
        while True:
            line = self._says.get()
            if isinstance(line, threading.Event):
                line.set()
            else:
                log.critical("%s", line)


class Heap:
    """
    Gives to the kernel what the heap keeps of a storm of calls that is over. A thread calls `look` about once a second.

    Large pieces of bodies and answers lie in it between small things that live on. They are free when their calls have
    ended, but glibc gives back the end of a heap only, unless it is asked for all of it.
    """

    def __init__(self) -> None:
        self._seen = self._trimmed = time.process_time()

    def look(self) -> None:
        now = time.process_time()
        quiet, self._seen = now - self._seen < QUIET, now
        if quiet and now - self._trimmed > BUSY_S:
            self._trimmed = now
            _trim(0)


def _pings() -> Seconds:
    """Return the interval within which systemd wants a ping; 0.0: it wants none."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0
    try:
        return max(0.0, int(os.environ.get("WATCHDOG_USEC", "0")) / 1e6)
    except ValueError:
        return 0.0


def _stacks() -> str:
    """Return the stacks of all threads, outermost call first. Reads no file: the disk may be what blocks."""
    names = {each.ident: each.name for each in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():
        name = names.get(ident, str(ident))
        if name.startswith("watchdog"):
            continue
        calls = []
        at: Any = frame
        while at is not None:
            calls.append(f"  {at.f_code.co_filename}:{at.f_lineno} {at.f_code.co_qualname}")
            at = at.f_back
        lines += [f"{name}:", *reversed(calls)]
    return "\n".join(lines)
