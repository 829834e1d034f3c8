"""
How a node differs from the scheduler's state of it.

Events and commands travel in order, and none is lost while a connection lives, so there should be no difference. A
defect that makes one would take a device out of use until its node restarts. So each node is asked every few seconds
(`CheckNode`), and the engine is told what the answer lacks, as if the node had reported it.

Messages on their way are no difference. The answer comes after the node has obeyed the commands before the question,
and after its events about them. So only what was so before the question, and is still so when the answer comes, counts.
Calls come from gateways, on other connections: a missing call may be on its way, and only the node can end that.
"""

from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

from gpufaas_core.model import CallId, CopyId, DeviceId, copy_id
from gpufaas_core.snapshot import DeviceSnapshot, ParkedSnapshot, ResidentSnapshot
from gpufaas_scheduler.world.function import Copy


class Holding(NamedTuple):
    """What a device holds by the engine's state."""

    residents: Mapping[CopyId, Copy]
    """By identity: another object is another load."""
    calls: set[CallId]
    """The running calls."""
    parked: Set[CopyId] = frozenset()


class Difference(NamedTuple):
    lost: list[Copy]
    """Copies that the node does not have."""
    extra: list[ResidentSnapshot | ParkedSnapshot]
    """Idle workers that the engine does not know, and parked ones."""
    absent: set[CallId]
    """Calls that are not there, or not yet there."""


def compare(asked: Holding, told: DeviceSnapshot, now: Holding) -> Difference:
    """
    Return how a device differs.

    :param asked: the engine's state when the question was sent
    :param told: the answer
    :param now: the engine's state when the answer came
    """
    there = {copy_id(each.function, each.copy) for each in told.residents}
    serving = {copy_id(each.function, each.copy) for each in told.running}
    # One that was evicted, parked or woken since the question is told as it was before: its command is on its way.
    workers: list[ResidentSnapshot | ParkedSnapshot] = [*told.residents, *told.parked]
    known = asked.residents.keys() | asked.parked | now.residents.keys() | now.parked | serving
    return Difference(
        [copy for key, copy in asked.residents.items() if key not in there and now.residents.get(key) is copy],
        [each for each in workers if copy_id(each.function, each.copy) not in known],
        {call for call in asked.calls if call in now.calls} - {each.call for each in told.running},
    )


class NodeCheck:
    """The questions to one node about what it holds, and what its answers lacked."""

    def __init__(self) -> None:
        self.number = 0
        """The number of the last question."""
        self.asked: Mapping[DeviceId, Holding] = {}
        """What the node should have had then; empty once it has answered."""
        self.doubted: list[tuple[CallId, DeviceId]] = []
        """Calls that two answers in a row lacked."""
        self._absent: Mapping[DeviceId, Set[CallId]] = {}
        """Calls that the last answer lacked."""

    def ask(self, held: Mapping[DeviceId, Holding]) -> None:
        """The next question goes out, while the engine thinks that the node's devices have *held*."""
        self.number += 1
        self.asked = held

    def calls(self) -> set[CallId]:
        """Return the calls that should have run when the question went out."""
        return {call for each in self.asked.values() for call in each.calls}

    def answer(self, told: Iterable[DeviceSnapshot], held: Mapping[DeviceId, Holding]) -> dict[DeviceId, Difference]:
        """Take the answer, while the engine thinks that the devices have *held*; return how devices differ."""
        asked, self.asked = self.asked, {}
        differences = {
            each.device.id: compare(asked[each.device.id], each, held[each.device.id])
            for each in told
            if each.device.id in asked and each.device.id in held
        }
        before, self._absent = self._absent, {id_: each.absent for id_, each in differences.items()}
        self.doubted = [
            (call, id_) for id_, calls in self._absent.items() for call in calls & before.get(id_, frozenset())
        ]
        return differences
