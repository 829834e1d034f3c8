"""
What a worker runs on one slot, and what it has behind that. Pure.

A turn is one call, or a batch. Turns are numbered as they are sent, from 1. The worker begins them in this order, each
when all of the one before is answered, and counts them in memory that it shares with its node
(`gpufaas_functions.begun`). The node may mark numbers there. What is marked is dropped, unless the worker has begun it
before.
"""

from collections.abc import Sequence
from typing import Final, Generic, TypeVar

from gpufaas_core.steps import IllegalStep
from gpufaas_core.wire.order import BATCHED, CALLED, FREE
from gpufaas_core.wire.prefix import BrokenFrame
from gpufaas_gpu_manager.node_call import AHEAD, FOLLOW, HOLD, RUNNING, NodeCall

CallT = TypeVar("CallT", bound=NodeCall)
_BEHIND: Final = 2
"""The most turns that a worker has and has not begun. If there are two, one of them was taken back."""


class Turn(Generic[CallT]):
    """One call, or a batch. It is used again for later turns of its slot: a quick call makes no object."""

    __slots__ = ("batch", "call", "number", "place", "state", "streams")

    def __init__(self) -> None:
        self.batch: dict[int, CallT] = {}
        """The calls of a batch that are not answered, by their place."""
        self.clear()

    def clear(self) -> None:
        self.number = 0
        """0: the slot has no such turn."""
        self.state: int = FREE
        """Which frame may come of it next: see `wire.order`."""
        self.call: CallT | None = None
        """The call; of a batch, that whose answer streams now."""
        self.place = 0
        """The place of `call` in its batch."""
        self.streams = False
        """The body of its call comes in pieces."""

    @property
    def calls(self) -> list[CallT]:
        """Those that are not answered."""
        return [*self.batch.values()] if self.call is None else [self.call, *self.batch.values()]

    def take(self) -> list[CallT]:
        """Return its calls, and have none any more."""
        calls = self.calls
        self.batch.clear()
        self.clear()
        return calls


class Turns(Generic[CallT]):
    """See module. The turns of one slot."""

    __slots__ = ("_begun", "_index", "coming", "marked", "next", "now", "sent")

    def __init__(self, begun: Sequence[int], index: int = 0) -> None:
        """:param begun: at *index*, how many of its turns the worker has begun; negative: it is not known"""
        self.now: Turn[CallT] = Turn()
        """What the worker runs, or begins first."""
        self.next: Turn[CallT] = Turn()
        """What it begins after that."""
        self.sent = 0
        """The number of the turn that was sent last."""
        self.coming = 0
        """How many calls of the batch that was sent last are still to be added."""
        self.marked: range = range(0)
        """The numbers that were marked, and may be dropped yet: there must be no others. The worker can write what the
        shared memory says, so that is not read."""
        self._begun = begun
        self._index = index

    @property
    def busy(self) -> bool:
        """Whether the worker has something to run."""
        return self.now.number > 0

    # --- what is sent ---

    def add(self, call: CallT, *, streams: bool = False) -> None:
        """
        *call* is sent: a turn of its own, or the next call of a batch.

        :param streams: its body comes in pieces
        :raises IllegalStep: the slot has two turns
        """
        if self.coming:
            batch = (self.next if self.next.number else self.now).batch
            batch[len(batch)] = call
            self.coming -= 1
            return
        turn = self._behind() if self.now.number else self.now
        self.sent = turn.number = self.sent + 1
        turn.state, turn.call, turn.streams = CALLED, call, streams

    def add_batch(self, calls: int) -> None:
        """The so many calls that are added next are a batch. :raises IllegalStep: as `add`"""
        turn = self._behind() if self.now.number else self.now
        self.sent = turn.number = self.sent + 1
        turn.state, self.coming = BATCHED, calls

    def _behind(self) -> Turn[CallT]:
        if self.next.number:
            raise IllegalStep("a slot that has two turns cannot take a third")
        return self.next

    # --- what the worker says ---

    def stream(self) -> CallT:
        """The first call of the batch that is not answered is answered in pieces now."""
        now = self.now
        now.place = next(iter(now.batch))
        now.call = call = now.batch.pop(now.place)
        return call

    def end(self) -> bool:
        """What was answered is over. Return whether all of the turn is: then the worker begins the next one."""
        now = self.now
        if now.batch:
            now.call, now.place = None, 0
            return False
        if self.marked and now.number in self.marked:
            self.marked = range(now.number + 1, self.marked.stop)  # it was begun before
        now.number, now.state, now.call, now.place, now.streams = 0, FREE, None, 0, False  # as `clear`: each call ends
        if self.next.number:
            self.now, self.next = self.next, now
        return True

    def drop(self, number: int) -> list[CallT]:
        """
        The worker has dropped turn *number*. Return its calls; none, if they were taken back before.

        :raises BrokenFrame: nothing with that number was marked, or the worker has not come to it
        """
        now = self.now
        if number not in self.marked:
            raise BrokenFrame(f"number {number} was dropped, which was not marked")
        if self.next.number and number != now.number:
            raise BrokenFrame(f"number {number} was dropped, before what ran was answered")
        if number == now.number and now.state not in (BATCHED, CALLED):
            raise BrokenFrame(f"number {number} was dropped, and answered")
        self.marked = range(number + 1, self.marked.stop)
        if number != now.number:
            return []
        dropped = now.take()
        if self.next.number:
            self.now, self.next = self.next, now
        return dropped

    # --- what is taken back ---

    @property
    def has_room(self) -> bool:
        """Whether another turn can be sent behind what the worker runs. What was marked must be dropped before."""
        return self.busy and not self.next.number and not self.marked

    @property
    def can_follow(self) -> bool:
        """Whether another turn can be sent beside what the worker runs, and be taken back."""
        return self._begun[self._index] >= 0 and not self.now.streams

    @property
    def unbegun(self) -> bool:
        """Whether the worker has certainly not begun what it has to run, though all of that was sent."""
        now = self.now
        return now.state in (BATCHED, CALLED) and not now.streams and self._waits(now.number)

    def mark(self, *, all_of_it: bool = False) -> range:
        """
        Return the numbers that the worker is to drop, unless it has begun them; empty: there is nothing to drop.

        :param all_of_it: also what comes first, if the worker has not begun that
        """
        unbegun = self.unbegun
        first = self.now.number if all_of_it and unbegun else self.sent
        if not self.now.number or (first == self.now.number and not unbegun):
            return range(0)  # parts of a body that streams are with the worker alone
        if not self._waits(first) or (self.marked and self.marked[0] <= first):
            return range(0)
        self.marked = range(first, self.sent + 1)
        return self.marked

    def take_back(self) -> list[CallT]:
        """Return the calls that the worker will certainly drop, since they were marked a while ago: they are gone."""
        begun, back = self._begun[self._index], list[CallT]()
        for turn in (self.now, self.next):
            if turn.number in self.marked and begun < turn.number:
                back += turn.take()
        return back

    def died(self) -> None:
        """The worker is dead. What it had certainly not begun can be placed again (`NodeCall.untouched`)."""
        if not self._waits(self.next.number):
            for each in self.next.calls:
                if each.state == AHEAD:
                    each.step(FOLLOW)  # it has died before it could say so
        if self.unbegun:
            for each in self.now.calls:
                if each.state == RUNNING:
                    each.step(HOLD)

    def _waits(self, number: int) -> bool:
        """Whether the worker has certainly not begun *number*."""
        begun = self._begun[self._index]
        return begun >= 0 and 1 <= number - begun <= _BEHIND
