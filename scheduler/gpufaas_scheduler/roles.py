"""
The roles that a policy is composed of. It is the second half of the contract of policies (`contract`).

=============== ============================================================================= ===============
role            what it decides                                                               default
=============== ============================================================================= ===============
*order*         whose call is next for an idle device: it drives a scheduling run             of the policy
*placement*     where a call goes, when the order asks about it                               of the policy
*replacement*   which copies make room, where a placement names no victims                    `lru`
=============== ============================================================================= ===============

A named policy fills *order* and *placement*; a spec may fill any role anew (`policies.spec`). What fills a role knows
the others by these protocols only. A class of your own is registered as an entry point of the group
``gpufaas.policies.ROLE`` (docs/writing-a-policy.md).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Protocol, TypeAlias, runtime_checkable

from gpufaas_scheduler.contract import Assign, DeviceView, Load, Plan, Start, View, WaitingCall

ORDER: Final = "order"
PLACEMENT: Final = "placement"
REPLACEMENT: Final = "replacement"

Placed: TypeAlias = Start | Assign | Load | None
"""Where a call goes; None: it goes on waiting."""


class Placement(Protocol):
    def place(self, view: View, call: WaitingCall, device: DeviceView) -> Placed:
        """
        Return where *call* goes when the idle *device* is considered for it. Another device may be better: a holder
        that is idle, or that is free sooner than a load would take.
        """


class Order(Protocol):
    def plan(self, view: View, placement: Placement) -> Plan:
        """
        One scheduling run over the idle devices, as `SchedulingPolicy.plan`. The order picks the next call for a
        device, and proposes what *placement* returns for it. A call whose function the device holds may be started
        there without asking.
        """


@runtime_checkable
class Particular(Protocol):
    """An order that asks more of a placement than `Placement` has."""

    @property
    def placements(self) -> Collection[str]:
        """The placements that it goes with, by name."""
