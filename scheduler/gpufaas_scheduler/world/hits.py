"""
Which waiting calls could be hits: an index of the functions that wait and that an idle device holds.

Most functions that wait have busy holders only, or else their calls would have been started. So they are not all asked
at each decision: kept are those for which something happened by which it may have become so. A call began to wait, a
device became idle, or a copy came to a device. `View.oldest_hit` finds out, and drops those for which it is not so.
"""

from gpufaas_core.model import DeviceId, FunctionId
from gpufaas_scheduler.contract import NEVER
from gpufaas_scheduler.world.queue import GlobalQueue
from gpufaas_scheduler.world.state import Call, DeviceState, FunctionState


class Hits:
    """Is told nothing until it is asked for the first time: not every policy asks."""

    __slots__ = ("_candidates", "_idle", "asked")

    def __init__(self) -> None:
        self.asked = False
        self._candidates: dict[FunctionId, FunctionState] = {}
        self._idle: dict[DeviceId, DeviceState] = {}
        """Devices that became idle since candidates were asked for."""

    def note(self, owner: FunctionState) -> None:
        """One of its calls began to wait, or it has a holder that it had not."""
        if owner.exclusive:
            self._candidates[owner.id] = owner

    def note_idle(self, device: DeviceState) -> None:
        self._idle[device.id] = device

    def candidates(self, queue: GlobalQueue[Call]) -> dict[FunctionId, FunctionState]:
        """Return every model function that waits in *queue* and that an idle device holds, and some others."""
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
                for model in device.models.models.values():
                    owner = model.owner
                    if owner.queue.head != NEVER and owner.exclusive:
                        candidates[owner.id] = owner
        self._idle.clear()
        return candidates
