"""
The threads of a worker with several slots. One of them leads: it waits for calls on all slots.

A quick handler runs in the leader itself, call after call, so that no thread has to be woken for a call. A slow one
(`pace`) runs in the thread that has read its call, too, but another thread leads before it begins. If a handler was
believed to be quick and is not, a watch thread sees that within a few ms, and lets another thread lead.

Who leads is settled by a token, the slot whose call runs in the leader: who removes it from its list has the lead.
There are as many threads as slots at most, made when they are needed, and the watch. The watch sleeps while no call
runs, so that a quick call costs no system call for it.
"""

import contextlib
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Final, NoReturn

from gpufaas_core.model import Seconds
from gpufaas_functions.pace import QUICK_S, Pace
from gpufaas_functions.slot_server import Closed, SlotServer

BROKEN: Final = 70
"""Exit status of a worker that cannot serve any more; the zygote has the same."""
LOOK_S: Final[Seconds] = 0.002
"""Of the watch: another thread leads after one or two looks at the same call."""
_LOOKS: Final = 5
"""The watch sleeps after so many looks at which no call ran."""


def end_process() -> NoReturn:
    """The manager is gone, or wants no more calls to be served."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


class SlotThreads:
    """See module."""

    def __init__(self, servers: Sequence[SlotServer], on_end: Callable[[], None] = end_process) -> None:
        """:param on_end: called by one of the threads when the first slot is closed"""
        self._servers = {each.sock.fileno(): each for each in servers}
        self._first = servers[0]
        self._on_end = on_end
        self._ended = False
        self._pace = Pace()
        self._poll = select.epoll()
        for each in servers:
            each.long = partial(self._step_aside, each)
            self._poll.register(each.sock, select.EPOLLIN)
        self._running: list[SlotServer] = []
        """The token: the slot whose call runs in the leader. Empty: none runs there, or another thread leads."""
        self._begun = 0
        """Calls that began in the leader."""
        self._lock = threading.Lock()
        self._threads = 1
        self._idle = 0
        self._vacant = False
        """No thread leads: all of them run calls."""
        self._lead: SimpleQueue[None] = SimpleQueue()
        self._woken: SimpleQueue[None] = SimpleQueue()
        self._watches = self._asleep = False

    def serve(self) -> None:
        """Answer calls, in this thread and others, until the manager closes the first slot."""
        while not self._ended:
            self._wait_for_calls()
            self._follow()

    # --- the leader ---

    def _wait_for_calls(self) -> None:
        """Lead, until another thread does."""
        poll, servers, most = self._poll.poll, self._servers, len(self._servers)
        while not self._ended:
            for fd, _ in poll(-1, most):
                if not self._serve(servers[fd]):
                    return

    def _serve(self, server: SlotServer) -> bool:
        """Serve what has come on a slot. Return whether this thread leads yet."""
        self._running.append(server)
        if self._pace.quick:
            self._begun += 1
            if self._asleep:
                self._asleep = False
                self._woken.put(None)
        else:
            self._step_aside(server)
        open_ = self._answer(server)
        try:
            self._running.remove(server)
        except ValueError:
            if open_:
                self._poll.register(server.sock, select.EPOLLIN)
            return False
        if not open_:
            self._poll.unregister(server.sock)
        return not self._ended

    def _answer(self, server: SlotServer) -> bool:
        """Serve all that has come on a slot; False: it was closed."""
        try:
            server.serve_next()
            while server.more:
                server.serve_next()
        except (Closed, OSError):
            if server is self._first:
                self._ended = True
                self._on_end()
                return False
            # The node sees that, and ends the worker when the calls on other slots had their time.
            with contextlib.suppress(OSError):
                server.sock.shutdown(socket.SHUT_RDWR)
            return False
        if server.took >= 0.0:
            self._pace.took(server.took if server.took <= QUICK_S else server.took - _delayed())
            if self._pace.quick and not self._watches:
                self._begin_watch()
        return True

    def _step_aside(self, server: SlotServer) -> None:
        """The call of *server* takes long, or may: if it runs in the leader, another thread leads from now on."""
        try:
            self._running.remove(server)
        except ValueError:
            return
        self._poll.unregister(server.sock)
        with self._lock:
            if self._idle:
                self._idle -= 1
                self._lead.put(None)
                return
            if self._threads == len(self._servers):
                self._vacant = True
                return
            self._threads += 1
            name = f"slot-{self._threads - 1}"
        try:
            threading.Thread(target=self._run, name=name, daemon=True).start()
        except (RuntimeError, MemoryError):  # there is no room for its stack
            with self._lock:
                self._threads -= 1
                self._vacant = True

    # --- the others ---

    def _follow(self) -> None:
        """Wait until this thread leads."""
        with self._lock:
            if self._vacant:
                self._vacant = False
                return
            self._idle += 1
        self._lead.get()

    def _run(self) -> None:
        """What it raises ends the worker, as in the main thread: calls of this thread would wait in vain."""
        try:
            self.serve()
        except BaseException:
            with contextlib.suppress(Exception):
                traceback.print_exc()
            os._exit(BROKEN)

    # --- the watch ---

    def _begin_watch(self) -> None:
        self._watches = self._asleep = True
        try:
            threading.Thread(target=self._watch, name="watch", daemon=True).start()
        except (RuntimeError, MemoryError):
            self._pace = _Never()

    def _watch(self) -> None:
        """Let another thread lead when a call runs in the leader for longer than a quick one does."""
        self._woken.get()
        quiet = 0
        while not self._ended:
            begun = self._begun
            time.sleep(LOOK_S)
            if self._begun != begun:
                quiet = 0
                continue
            if running := self._running[:1]:
                self._step_aside(running[0])
                continue
            quiet += 1
            if quiet < _LOOKS:
                continue
            self._asleep = True
            if self._begun == begun:
                self._woken.get()
            self._asleep = False
            quiet = 0


class _Delay(threading.local):
    known: Seconds = 0.0


_delay: Final = _Delay()


def _delayed() -> Seconds:
    """
    Return how long this thread had to wait for a CPU since it last asked. So a call is not slow since other processes
    ran meanwhile. If it asks rarely, that is too long, and the next slow call shows it.
    """
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            now = int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
    before, _delay.known = _delay.known, now
    return now - before


class _Never(Pace):
    """Of a worker that has no room for a watch: its calls have threads."""

    def took(self, seconds: Seconds) -> None:
        """Nothing follows from it."""
