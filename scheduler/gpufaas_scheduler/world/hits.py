"""
An index of the calls that could be hits: which functions wait, and which idle devices hold them.

Most functions with waiting calls have busy holders only, so a decision does not examine all of them. The index has the
idle holders of each function (`FunctionState.idle_holders`), and as candidates the functions of which a call began to
wait, or a holder became idle. `View.oldest_hit` examines these, and drops those that cannot hit.

A device that becomes idle nearly always gets a call at once. So the last one is not listed until another one is idle:
its models are looked up where they are.
"""

from collections.abc import Iterable

from gpufaas_core.model import FunctionId
from gpufaas_scheduler.contract import NEVER
from gpufaas_scheduler.world.call import Call
from gpufaas_scheduler.world.device import DeviceState, IdleKey
from gpufaas_scheduler.world.function import FunctionState
from gpufaas_scheduler.world.queue import GlobalQueue


class Hits:
    """The index is kept from the first question on, since not every policy asks."""

    __slots__ = ("_candidates", "asked", "last")

    def __init__(self) -> None:
        self.asked = False
        self._candidates: dict[FunctionId, FunctionState] = {}
        self.last: DeviceState | None = None
        """The idle device that is not listed yet."""

    def ask(self, functions: Iterable[FunctionState], idle: Iterable[IdleKey], queue: GlobalQueue[Call]) -> None:
        """A policy asks for the first time."""
        self.asked = True
        for owner in functions:
            owner.idle_holders.clear()
        for *_, device in idle:
            self._list(device)
        for call in queue.firsts():
            self.note(call.owner)

    def note(self, owner: FunctionState) -> None:
        """One of its calls began to wait, or it has a new holder."""
        if owner.idle_holders:
            self._candidates[owner.id] = owner

    def note_idle(self, device: DeviceState) -> None:
        self.list_all()
        self.last = device

    def note_busy(self, device: DeviceState) -> None:
        if device is self.last:
            self.last = None
        if device.listed:
            device.listed = False
            name = device.id
            for copy in device.residency.copies.values():
                copy.owner.idle_holders.pop(name, None)

    def list_all(self) -> None:
        """List the last one, too: a question needs complete lists."""
        if self.last is not None:
            self._list(self.last)
            self.last = None

    def candidates(self) -> list[FunctionState]:
        """Return all placed functions that wait in the global queue and that a listed device holds."""
        candidates = self._candidates
        found = []
        for owner in list(candidates.values()):
            if owner.idle_holders and owner.flow.head != NEVER:
                found.append(owner)
            else:
                del candidates[owner.id]
        return found

    def _list(self, device: DeviceState) -> None:
        name = device.id
        device.listed = True
        for copy in device.residency.copies.values():
            owner = copy.owner
            if name in owner.holders:
                owner.idle_holders[name] = device
                if owner.flow.head != NEVER:
                    self._candidates[owner.id] = owner
