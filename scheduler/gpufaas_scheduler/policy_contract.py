"""
What a policy is: `SchedulingPolicy`, and what it may be beside that. The engine looks for these members once, at its
start. `contract` has the actions that a policy proposes, `view_contract` what it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol, runtime_checkable

from gpufaas_core.messages import Event
from gpufaas_core.model import DeviceId, FunctionId, PlacementPlan, Seconds
from gpufaas_scheduler.contract import Plan, Why
from gpufaas_scheduler.view_contract import View, WaitingCall

# --- the causes of a run ----------------------------------------------------------------------------------------------

ARRIVAL: Final = 1
"""A call began to wait."""
FINISH: Final = 2
"""A call ended, was refused by its node, or its caller left."""
LOADED: Final = 4
"""A load ended, a worker did, or its memory changed; or the host tier of a node did."""
FLEET: Final = 8
"""Devices, functions or offers came, went or changed."""
WAKE: Final = 16
"""`View.woken` has the keys."""
PLAN: Final = 32
"""There is a new plan."""

# --- policies --------------------------------------------------------------------------------------------------------


class SchedulingPolicy(Protocol):
    @property
    def name(self) -> str: ...
    def plan(self, view: View) -> Plan:
        """One scheduling run. It ends when the generator returns."""


@runtime_checkable
class Watching(Protocol):
    """A policy that runs also when no call waits, or no device is idle."""

    @property
    def watches(self) -> int:
        """The mask of causes for which it does."""


@runtime_checkable
class Executing(Protocol):
    """
    A policy that carries plans out. What it has as `watches` and `follows` depends on the plan: the engine reads both
    again after `take`, and after each run for a cause that the policy watches.
    """

    reasons: Mapping[tuple[FunctionId, DeviceId], str]
    """Why copies are not there, or not as the plan has them, where the engine refused something."""

    def take(self, plan: PlacementPlan) -> None:
        """*plan* is in force from now on. A run follows if the policy watches `PLAN` then."""


@runtime_checkable
class Observing(Protocol):
    """A policy that is told each event before the engine handles it."""

    def observe(self, event: Event, now: Seconds) -> None: ...


@runtime_checkable
class Noting(Protocol):
    """A policy that notes something with each call that leaves the queue, by whatever action."""

    def leaving(self, call: WaitingCall) -> int:
        """What becomes its `WaitingCall.note`."""


@runtime_checkable
class Following(Protocol):
    """
    A policy that, when all calls that wait are of one function, and the only idle device holds its model, starts the
    first of them there, whatever the view says. The engine does not ask it then.
    """

    @property
    def follows(self) -> Why:
        """Why such a call starts there."""


@runtime_checkable
class Stateful(Protocol):
    """A policy with state of its own, which a later engine goes on with if its policy has the same name."""

    def save(self) -> bytes: ...
    def load(self, state: bytes) -> None:
        """Take the state that `save` of an equal policy returned. Called before the first run."""


@runtime_checkable
class Explaining(Protocol):
    """A policy that can explain why a call still waits."""

    def weigh(self, view: View, call: WaitingCall) -> Why:
        """The options for *call* now, and why it waits. Asked for people, never while a call is placed."""
