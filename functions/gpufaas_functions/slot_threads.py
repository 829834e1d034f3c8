"""
The slots of a worker: what comes over its connection is given to them, and they get threads to run their calls.

One slot has the main thread, which reads what comes while it waits for it (`OneSlot`). Of several slots one thread
leads: it waits for the calls of all of them (`SlotThreads`).

A quick handler runs in the leader itself, call after call, so that no thread has to be woken for a call. A slow one
(`pace`) runs in the thread that has read its call, too, but another thread leads before it begins. If a handler was
believed to be quick and is not, a watch thread sees that within a few ms, and lets another thread lead.

Who leads is settled by a token, the call that runs in the leader: who removes it from its list has the lead.
There is one thread more than slots at most, made when it is needed, and the watch. The watch sleeps while no call runs,
so that a quick call costs no system call for it.
"""

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Final

from gpufaas_core.model import Seconds
from gpufaas_functions.call_runner import CallRunner, Served
from gpufaas_functions.connection import Closed, NodeConnection
from gpufaas_functions.exit_hooks import end_process
from gpufaas_functions.inbox import Inbox, Shared, Slot, Work
from gpufaas_functions.pace import QUICK_S, Pace
from gpufaas_functions.reply import Reply, growth_frame
from gpufaas_functions.thread_state import ThreadState

BROKEN: Final = 70
"""Exit status of a worker that cannot serve any more; the fork server has the same."""
LOOK_S: Final[Seconds] = 0.004
"""The time between two looks of the watch. After one or two at the same call, another thread leads."""
_LOOKS: Final = 5
"""The watch sleeps after this many looks at which no call ran."""
_LOOKS_S: Final[Seconds] = 0.02
"""The time between two looks of an answer that streams from the only thread whether its caller has left."""


class Slots(CallRunner):
    """The slots of a worker, and its connection, which is for one thread at a time."""

    def __init__(
        self, served: Served, connection: NodeConnection, shared: Shared, tell: Sequence[Callable[[], None]]
    ) -> None:
        """:param tell: as `Slot` has it, for each"""
        super().__init__(served, alone=len(tell) == 1)
        self.connection = connection
        self.slots = [
            Slot(index, Reply(index, connection, served.memory), shared.counts, each) for index, each in enumerate(tell)
        ]
        self._inbox = Inbox(self.slots, connection, served.memory, shared, served.parking)
        self._memory = served.memory

    def next_work(self) -> Work | None:
        """Read a frame. Return what can run now that it has come. :raises Closed: the connection is closed"""
        return self._inbox.on_frame(*self.connection.next())

    def say(self) -> None:
        """Send the answers that wait. Then measure memory, and say a new peak. :raises Closed: as `next_work`"""
        self.connection.flush()
        if frame := growth_frame(self._memory):
            self.connection.send(frame)


class OneSlot(Slots):
    """
    The slot of a worker that has one: its calls run in the thread that reads them. It may get a call, or batch, ahead
    of the one that it runs, and its node may take that back (`begun`).
    """

    def __init__(self, served: Served, connection: NodeConnection, shared: Shared) -> None:
        super().__init__(served, connection, shared, [lambda: None])  # who waits has read it
        self._look_at = 0.0

    def serve(self) -> None:
        """Answer calls until the manager closes the connection."""
        with contextlib.suppress(Closed):
            while True:
                work = self.next_work()
                while work is not None:
                    if work.slot.begin(work):
                        self.run(work)
                        self.say()  # what runs next does not hold up the answer; the node takes one figure for each
                    work = work.slot.end()

    def wait(self, work: Work) -> None:  # noqa: ARG002 - what comes for others waits in the slot
        self.next_work()

    def look(self) -> None:
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _LOOKS_S
            while self.connection.has_more():
                self.next_work()


class SlotThreads(Slots):
    """See module."""

    def __init__(self, served: Served, connection: NodeConnection, shared: Shared) -> None:
        """Make it in the thread that has loaded."""
        self._news = [threading.Event() for _ in shared.counts.begun]
        super().__init__(served, connection, shared, [each.set for each in self._news])
        self._state = ThreadState()
        self._ended = False
        self._pace = Pace()
        self._running: list[Work] = []
        """The token: what runs in the leader. Empty: nothing runs there, or another thread leads. No slot would do: the
        next call of that may run before a thread has seen that it does not lead."""
        self._turns = 0
        """Calls that began in the leader."""
        self._lock = threading.Lock()
        self._threads = 1
        self._idle = 0
        """Threads that wait for the lead."""
        self._lead: SimpleQueue[None] = SimpleQueue()
        """Holds the lead while no thread has it."""
        self._lead.put(None)
        self._lacks = False
        """No thread takes the lead before a call has ended: there was no room for one more."""
        self._woken: SimpleQueue[None] = SimpleQueue()
        self._watches = self._asleep = False

    def serve(self) -> None:
        """Answer calls, in this thread and others, until the manager closes the connection."""
        try:
            while True:
                self._follow()
                self._read()
        except Closed:
            if self.connection.sock.fileno() < 0:
                end_process()  # the author's code has forked it
            self._ended = True
            self._lead.put(None)  # who waits, for it or for a frame, ends, too
            for each in self._news:
                each.set()

    # --- the leader ---

    def _read(self) -> None:
        """Lead, until another thread does. :raises Closed: the connection is closed"""
        next_work = self.next_work
        while True:
            if (work := next_work()) and not self._run_one(work):
                return

    def _run_one(self, work: Work) -> bool:
        """Run *work*, and what came for its slot meanwhile. Return whether this thread leads yet."""
        self._running.append(work)
        if self._pace.quick:
            self._turns += 1
            if self._asleep:
                self._asleep = False
                self._woken.put(None)
        else:
            self._step_aside(work)
        took = self.run(work)
        while (following := work.slot.end()) is not None:  # another thread leads, and has read it
            took = self.run(following)
        if took >= 0.0:
            self._pace.took(took if took <= QUICK_S else took - _delayed())
            if self._pace.quick and not self._watches:
                self._begin_watch()
        try:
            self._running.remove(work)
        except ValueError:
            self.say()
            return False
        if not self.connection.unread:
            self.say()
        return True

    def run(self, work: Work) -> Seconds:
        """Run *work*, unless it was taken back. See `CallRunner.run`."""
        return CallRunner.run(self, work) if work.slot.begin(work) else -1.0

    def _step_aside(self, work: Work) -> None:
        """*work* takes long, or may: if it runs in the leader, another thread leads from now on."""
        try:
            self._running.remove(work)
        except ValueError:
            return
        self._lacks = not self._has_another()
        self._lead.put(None)

    def _has_another(self) -> bool:
        """Whether a thread takes the lead now. One is started if none waits for it."""
        with self._lock:
            if self._idle or self._threads > len(self.slots):  # or one of them has just ended a call
                return True
            self._threads += 1
            name = f"slot-{self._threads - 1}"
        try:
            threading.Thread(target=self._serve_for_good, name=name, daemon=True).start()
        except (RuntimeError, MemoryError):  # there is no room for its stack
            with self._lock:
                self._threads -= 1
            return False
        return True

    def wait(self, work: Work) -> None:
        """:raises MemoryError: nobody would read the frame: there was no room for a thread beside this one"""
        self._step_aside(work)
        if self._lacks:
            raise MemoryError("for a thread beside that of the call")
        news = self._news[work.slot.index]
        news.wait()
        news.clear()  # who waits looks again after that
        if self._ended:
            raise Closed

    def look(self) -> None:
        """The leader gives calls what comes."""

    # --- the others ---

    def _follow(self) -> None:
        """Wait until this thread leads. :raises Closed: the connection is closed"""
        with self._lock:
            self._idle += 1
        self._lead.get()
        with self._lock:
            self._idle -= 1
        self._lacks = False
        if self._ended:
            raise Closed

    def _serve_for_good(self) -> None:
        """Serve. What that raises ends the worker, as in the main thread: calls of this thread would wait in vain."""
        try:
            self._state.run(self.serve)
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
            self._watches = self._asleep = False
            self._pace = Pace()  # calls have threads until there is room for the watch

    def _watch(self) -> None:
        """Let another thread lead when a call runs in the leader for longer than a quick one does."""
        self._woken.get()
        quiet = 0
        while not self._ended:
            turns = self._turns
            time.sleep(LOOK_S)
            if self._turns != turns:
                quiet = 0
                continue
            if running := self._running[:1]:
                self._step_aside(running[0])
                continue
            quiet += 1
            if quiet < _LOOKS:
                continue
            self._asleep = True
            if self._turns == turns:
                self._woken.get()
            self._asleep = False
            quiet = 0


_delay: Final = threading.local()


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
    before: Seconds = getattr(_delay, "known", 0.0)
    _delay.known = now
    return now - before
