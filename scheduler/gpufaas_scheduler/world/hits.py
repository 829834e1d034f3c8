"""
An index of the functions with waiting calls that an idle device may hold: their calls could be hits.

Most functions with waiting calls have busy holders only, so a decision does not examine all of them. The index has the
candidates: functions of which a call began to wait, a holder became idle, or a copy came to a device. `View.oldest_hit`
examines these, and drops those that no idle device holds.
"""

from gpufaas_core.model import DeviceId, FunctionId
from gpufaas_scheduler.contract import NEVER
from gpufaas_scheduler.world.queue import GlobalQueue
from gpufaas_scheduler.world.state import Call, DeviceState, FunctionState


class Hits:
    """It is kept from the first question on, since not every policy asks."""

    __slots__ = ("_candidates", "_idle", "asked")

    def __init__(self) -> None:
        self.asked = False
        self._candidates: dict[FunctionId, FunctionState] = {}
        self._idle: dict[DeviceId, DeviceState] = {}
        """Devices that became idle since candidates were asked for."""

    def note(self, owner: FunctionState) -> None:
        """One of its calls began to wait, or it has a new holder."""
        if owner.exclusive:
            self._candidates[owner.id] = owner

    def note_idle(self, device: DeviceState) -> None:
        self._idle[device.id] = device

    def candidates(self, queue: GlobalQueue[Call]) -> dict[FunctionId, FunctionState]:
        """Return all model functions that wait in *queue* and that an idle device holds, and some others."""
        candidates = self._candidates
        if not self.asked:
            self.asked = True
            for _, waiting in queue.heads():
                if waiting.calls:
                    owner = waiting.calls[0].owner
                    candidates[owner.id] = owner
            return candidates
        for device in self._idle.values():
            if device.idle_key is not None:
                for copy in device.residency.copies.values():
                    owner = copy.owner
                    if owner.flow.head != NEVER and owner.exclusive:
                        candidates[owner.id] = owner
        self._idle.clear()
        return candidates
