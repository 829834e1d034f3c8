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

from collections.abc import Mapping, Set
from typing import NamedTuple, TypeAlias

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


Absent: TypeAlias = Mapping[DeviceId, Set[CallId]]


def lasting(before: Absent, after: Absent) -> list[tuple[CallId, DeviceId]]:
    """Return the calls that two answers in a row lacked."""
    return [(call, device) for device, calls in after.items() for call in calls & before.get(device, frozenset())]
