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
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Final

import msgspec

from gpufaas_core.model import Seconds
from gpufaas_core.wire.bodies import FILE
from gpufaas_core.wire.heads import AreaHead, BatchHead, CallHead, CancelHead, DroppedHead, LimitHead
from gpufaas_core.wire.kinds import Kind
from gpufaas_core.wire.prefix import KIND, LANE, encode_frame
from gpufaas_functions.areas import Area
from gpufaas_functions.begun import Counts, is_taken
from gpufaas_functions.connection import Absent, Body, CallBody, Closed, Connection
from gpufaas_functions.exit_hooks import end_process
from gpufaas_functions.pace import QUICK_S, Pace
from gpufaas_functions.parking import Parking
from gpufaas_functions.slot_server import SlotServer, Work
from gpufaas_functions.thread_state import ThreadState

BROKEN: Final = 70
"""Exit status of a worker that cannot serve any more; the zygote has the same."""
LOOK_S: Final[Seconds] = 0.004
"""Of the watch: another thread leads after one or two looks at the same call."""
_LOOKS: Final = 5
"""The watch sleeps after so many looks at which no call ran."""
_LOOKS_S: Final[Seconds] = 0.02
"""An answer that streams from the only thread looks so often whether its caller has left."""
_decode_area: Final = msgspec.msgpack.Decoder(AreaHead).decode
_decode_call: Final = msgspec.msgpack.Decoder(CallHead).decode
_decode_batch: Final = msgspec.msgpack.Decoder(BatchHead).decode
_decode_limit: Final = msgspec.msgpack.Decoder(LimitHead).decode
_decode_cancel: Final = msgspec.msgpack.Decoder(CancelHead).decode


class _Lane:
    """The work of one slot: what its node sends before the slot is free, waits."""

    __slots__ = ("area", "busy", "last", "lock", "server", "waiting")

    def __init__(self, server: SlotServer) -> None:
        self.server = server
        self.lock = threading.Lock()
        self.area: Area | None = None
        """Of the call that comes next."""
        self.last = Work()
        """What has come last, and may not be complete; BODY and CANCEL are for this."""
        self.last.left = 0
        self.waiting: deque[Work] = deque()
        self.busy = False

    def use_area(self, work: Work, body: Body) -> CallBody:
        """The call that has come, of *work*, has the area: return its body."""
        area, self.area = self.area, None
        assert area is not None
        work.areas += (area,)
        try:
            return body if (laid := area.body) is None else laid
        except MemoryError:
            return Absent(len(area))

    def begin(self, work: Work) -> bool:
        """Return whether *work* can run now. If so the lane is busy."""
        if self.busy:
            with self.lock:
                if self.busy:
                    self.waiting.append(work)
                    return False
        self.busy = True
        return True

    def end(self) -> Work | None:
        """Its work has ended. Return what runs next; None: it is free."""
        with self.lock:
            if self.waiting:
                return self.waiting.popleft()
            self.busy = False
            return None


class Slots:
    """The frames of a worker's connection, for one thread at a time, and its slots."""

    def __init__(self, servers: Sequence[SlotServer], counts: Counts, parking: Parking | None = None) -> None:
        """:param counts: of what each slot begins (`begun`)"""
        self.connection: Connection = servers[0].out
        self._lanes = [_Lane(each) for each in servers]
        self._begun, self._taken = counts
        self._parking = parking
        self._memory = servers[0].memory

    def next_work(self) -> tuple[_Lane, Work] | None:
        """Read a frame. Return what can run now that it has come. :raises Closed: the connection is closed"""
        kind, header, body = frame = self.connection.next()
        lane = self._lanes[kind >> LANE]
        kind &= KIND
        if kind == Kind.CALL:
            work = lane.last
            if not work.left:
                lane.last = work = Work()
            head = _decode_call(header)
            there: CallBody = body if lane.area is None else lane.use_area(work, body)
            if head.body_mode == FILE:
                there = self.connection.file(head)
            work.calls.append((head, there))
            work.left -= 1
            return None if work.left or not lane.begin(work) else (lane, work)
        if kind == Kind.BATCH:
            lane.last = Work(_decode_batch(header).calls)
        elif kind == Kind.ROOM:
            lane.server.on_room(frame)
        elif kind == Kind.AREA:
            lane.area = self.connection.area(_decode_area(header))
        elif kind == Kind.LIMIT:
            self._memory.limit(_decode_limit(header).memory)
        elif kind == Kind.PING:
            self.connection.send(encode_frame(Kind.PONG))
        elif self._parking is None or (answer := self._parking.answer(kind, header)) is None:
            self._give(lane, kind, header, body)
        else:
            self.connection.send(answer)
        return None

    def _give(self, lane: _Lane, kind: int, header: bytes, body: Body) -> None:
        """A frame of the call came that came last; that may have ended."""
        lane.last.frames.put((kind, header, body))

    def run(self, lane: _Lane, work: Work) -> None:
        """Run *work*, and what came for the slot meanwhile. :raises Closed: the connection is closed"""
        server = lane.server
        following: Work | None = work
        while following is not None:
            if self._begin(server, following):
                server.run(following)
            following = lane.end()

    def _begin(self, server: SlotServer, work: Work) -> bool:
        """Count what begins. False: it was taken back, and is dropped."""
        slot = server.index
        self._begun[slot] = number = self._begun[slot] + 1
        mark = self._taken[slot]
        if not mark or not is_taken(number, mark):
            return True
        self.connection.send(encode_frame(Kind.DROPPED, DroppedHead(number), lane=slot))
        work.calls.clear()
        server.took = -1.0
        return False


class OneSlot(Slots):
    """
    The slot of a worker that has one: its calls run in the thread that reads them. It may get a call, or batch, ahead
    of the one that it runs, and its node may take that back (`begun`).
    """

    def __init__(self, server: SlotServer, counts: Counts, parking: Parking | None = None) -> None:
        super().__init__((server,), counts, parking)
        server.turns = self
        self._server = server
        self._look_at = 0.0

    def serve(self) -> None:
        """Answer calls until the manager closes the connection."""
        with contextlib.suppress(Closed):
            while True:
                if found := self.next_work():
                    self.run(*found)

    def run(self, lane: _Lane, work: Work) -> None:
        """
        As `Slots.run`, but for what was taken back. What runs next does not hold up the answer before it. Memory is
        measured after what has run: the node takes one figure for each.
        """
        server = self._server
        following: Work | None = work
        while following is not None:
            if self._begin(server, following):
                server.run(following)
                self.connection.flush()
                server.say_growth()
            following = lane.end()

    def _give(self, lane: _Lane, kind: int, header: bytes, body: Body) -> None:
        """A body that comes in pieces is of the call that came last: nothing comes behind it before it is whole."""
        frames = lane.last.frames
        if kind == Kind.CANCEL:
            behind = _decode_cancel(header).number - self._begun[0]
            if not 0 <= behind <= len(lane.waiting):
                return  # it has ended
            frames = lane.waiting[behind - 1].frames if behind else self._server.frames
        frames.put((kind, header, body))

    def long(self, slot: SlotServer) -> None:
        """Nobody else waits for this thread."""

    def await_frame(self, slot: SlotServer) -> None:
        while slot.frames.empty():
            self.next_work()  # what comes early waits in its lane

    def look(self, slot: SlotServer) -> None:  # noqa: ARG002 - there is one
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _LOOKS_S
            while self.connection.has_more():
                self.next_work()


class SlotThreads(Slots):
    """See module."""

    def __init__(self, servers: Sequence[SlotServer], counts: Counts, parking: Parking | None = None) -> None:
        """Make it in the thread that has loaded."""
        super().__init__(servers, counts, parking)
        for each in servers:
            each.turns = self
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
        self._vacant = False
        """No thread leads: the next one that has ended its call does."""
        self._lacks = False
        """So it is since there was no room for one more."""
        self._lead: SimpleQueue[None] = SimpleQueue()
        self._woken: SimpleQueue[None] = SimpleQueue()
        self._watches = self._asleep = False

    def serve(self) -> None:
        """Answer calls, in this thread and others, until the manager closes the connection."""
        try:
            while not self._ended:
                self._read()
                self._follow()
        except Closed:
            if self.connection.sock.fileno() < 0:
                end_process()  # the author's code has forked it
            with self._lock:
                self._ended = True
                for _ in range(self._idle):
                    self._lead.put(None)

    # --- the leader ---

    def _read(self) -> None:
        """Lead, until another thread does. :raises Closed: the connection is closed"""
        next_work = self.next_work
        while True:
            if (found := next_work()) and not self._run_one(*found):
                return

    def _run_one(self, lane: _Lane, work: Work) -> bool:
        """Run *work*. Return whether this thread leads yet."""
        server = lane.server
        server.token = work
        self._running.append(work)
        if self._pace.quick:
            self._turns += 1
            if self._asleep:
                self._asleep = False
                self._woken.put(None)
        else:
            self._step_aside(work)
        self.run(lane, work)
        if server.took >= 0.0:
            self._pace.took(server.took if server.took <= QUICK_S else server.took - _delayed())
            if self._pace.quick and not self._watches:
                self._begin_watch()
        try:
            self._running.remove(work)
        except ValueError:
            self.connection.flush()
            server.say_growth()
            return False
        if not self.connection.unread:
            self.connection.flush()
            server.say_growth()
        return True

    def long(self, slot: SlotServer) -> None:
        if slot.token is not None:
            self._step_aside(slot.token)

    def _step_aside(self, work: Work) -> None:
        """*work* takes long, or may: if it runs in the leader, another thread leads from now on."""
        try:
            self._running.remove(work)
        except ValueError:
            return
        with self._lock:
            if self._idle:
                self._idle -= 1
                self._lead.put(None)
                return
            if self._threads > len(self._lanes):
                self._vacant = True  # one of them has just ended a call, and follows
                return
            self._threads += 1
            name = f"slot-{self._threads - 1}"
        try:
            threading.Thread(target=self._serve_for_good, name=name, daemon=True).start()
        except (RuntimeError, MemoryError):  # there is no room for its stack
            with self._lock:
                self._threads -= 1
                self._vacant = self._lacks = True

    def await_frame(self, slot: SlotServer) -> None:
        """:raises MemoryError: nobody would read the frame: there was no room for a thread beside this one"""
        self.long(slot)
        if self._lacks:
            raise MemoryError("for a thread beside that of the call")

    def look(self, slot: SlotServer) -> None:
        """The leader gives it what comes."""

    # --- the others ---

    def _follow(self) -> None:
        """Wait until this thread leads."""
        with self._lock:
            if self._vacant or self._ended:
                self._vacant = self._lacks = False
                return
            self._idle += 1
        self._lead.get()

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
            self._pace = _Never()

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


class _Never(Pace):
    """Of a worker that has no room for a watch: its calls have threads."""

    def took(self, seconds: Seconds) -> None:
        """Nothing follows from it."""
