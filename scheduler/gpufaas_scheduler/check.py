"""
In what a node differs from what the scheduler thinks of it. Pure.

Facts and commands travel in order and none is lost while a link lives, so there should be no difference; a defect that
makes one would otherwise take a device out of use until its node is started again. So each node is asked every few
seconds (`CheckNode`), and what its answer lacks is made known to the engine as if the node had said so at the time.

What is on its way when somebody is asked is no difference. The answer comes after all that the node did because of
commands that went before the question, and after its facts of that; so only what was so before the question, and is
still so when the answer comes, counts. Calls come from gateways, on other connections: one that is not there may be on
its way, and only the node can say that it is not to come any more.
"""

from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

from gpufaas_core.model import CallId, CopyId, DeviceId, copy_id
from gpufaas_core.snapshot import DeviceSnapshot, ResidentSnapshot
from gpufaas_scheduler.world.state import Model


class Holding(NamedTuple):
    """What the engine thinks that a device has."""

    residents: Mapping[CopyId, Model]
    """Another object is another load."""
    calls: set[CallId]
    """Those that run."""


class Difference(NamedTuple):
    lost: list[Model]
    """Residents that the node does not have."""
    extra: list[ResidentSnapshot]
    """Idle workers that nobody knows of."""
    absent: set[CallId]
    """Calls that are not there, or not yet."""


def compare(asked: Holding, told: DeviceSnapshot, now: Holding) -> Difference:
    """
    Return in what a device differs.

    :param asked: what was thought when the question went out
    :param told: the answer
    :param now: what is thought when the answer comes
    """
    there = {copy_id(each.function, each.copy) for each in told.residents}
    serving = {copy_id(each.function, each.copy) for each in told.running}
    return Difference(
        [model for key, model in asked.residents.items() if key not in there and now.residents.get(key) is model],
        [
            each
            for each in told.residents
            if (key := copy_id(each.function, each.copy)) not in now.residents and key not in serving
        ],
        {call for call in asked.calls if call in now.calls} - {each.call for each in told.running},
    )


class NodeCheck:
    """The questions to one node about what it holds, and what its answers lacked."""

    def __init__(self) -> None:
        self.number = 0
        """Of the last question."""
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
