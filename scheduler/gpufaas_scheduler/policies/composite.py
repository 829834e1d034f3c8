"""A policy that is composed of roles, and what it refuses where they disagree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from gpufaas_cache_manager.replacement import Replacement
from gpufaas_core.messages import Arrived, Event
from gpufaas_core.model import CallId, CopyId, Seconds
from gpufaas_scheduler import roles
from gpufaas_scheduler.contract import Action, Choose, Evict, Limit, Load, Plan, Refusal, Reject, Release, Start, Why
from gpufaas_scheduler.policy_contract import (
    ARRIVAL,
    Explaining,
    Following,
    Noting,
    Observing,
    SchedulingPolicy,
    Stateful,
)
from gpufaas_scheduler.view_contract import View, WaitingCall


class Composite:
    """
    See `roles`. *name* is the text of its spec; None is the default of a role.

    The policy has the members that the engine looks for (`Explaining`, `Following`, `Noting`, `Observing`) if a
    role has them.
    """

    plan: Final[Callable[[View], Plan]]
    """One scheduling run. It is the order's own where it can be: a generator around it costs each action a step."""
    weigh: Callable[[View, WaitingCall], Why]
    leaving: Callable[[WaitingCall], int]
    observe: Callable[[Event, Seconds], None]

    def __init__(
        self,
        name: str,
        order: roles.Order | SchedulingPolicy,
        placement: roles.Placement | None,
        replacement: Replacement,
        *,
        admission: roles.Admission | None = None,
        batching: roles.Batching | None = None,
        scaling: roles.Scaling | None = None,
        prefetch: roles.Prefetch | None = None,
    ) -> None:
        """:param placement: None: *order* is a whole policy, which places its calls itself"""
        self.name = name
        self.replacement = replacement
        self._admission, self._scaling = admission, scaling
        self.batching = batching
        """The engine asks it: only few functions have calls that may start together."""
        self.prefetch = prefetch
        """The engine asks it: only few calls wait for a function that no device holds."""
        self._decide: Callable[[View], Plan] = (
            order.plan if placement is None else lambda view: order.plan(view, placement)  # type: ignore
        )
        self.plan = self._run if admission or scaling else self._decide
        self.watches = (ARRIVAL if admission else 0) | (scaling.watches if scaling else 0)
        if isinstance(order, Explaining):
            self.weigh = order.weigh
        if isinstance(order, Following) and not (admission or scaling):
            self.follows = order.follows
        if isinstance(order, Noting):
            self.leaving = order.leaving
        filled: dict[str, object] = {
            roles.ADMISSION: admission, roles.ORDER: order, roles.PLACEMENT: placement, roles.BATCHING: batching,
            roles.SCALING: scaling, roles.PREFETCH: prefetch,
        }  # fmt: skip
        self._stateful = {role: each for role, each in filled.items() if isinstance(each, Stateful)}
        self._observing = [each for each in filled.values() if isinstance(each, Observing)]
        if self._observing or admission is not None:
            self.observe = self._observe
        self._came: list[CallId] = []
        """The calls that came since the last run."""

    # --- state --------------------------------------------------------------------------------------------------------

    def save(self) -> bytes:
        """Return the state of all roles that have some."""
        return msgspec.msgpack.encode({role: each.save() for role, each in self._stateful.items()})

    def load(self, state: bytes) -> None:
        saved: dict[str, bytes] = msgspec.msgpack.decode(state, type=dict[str, bytes])
        for role, each in self._stateful.items():
            if role in saved:
                each.load(saved[role])

    def _observe(self, event: Event, now: Seconds) -> None:
        if type(event) is Arrived and self._admission is not None:
            self._came.append(event.call)
        for each in self._observing:
            each.observe(event, now)

    # --- a run --------------------------------------------------------------------------------------------------------

    def _run(self, view: View) -> Plan:
        queue, admission, scaling = view.queue, self._admission, self._scaling
        if admission is not None:
            came, self._came = self._came, []
            for name in came:
                call = view.call(name)
                action = None if call is None else admission.admit(view, call)
                if action is not None:
                    yield action
        if queue and view.idle_count:
            yield from self._decide(view)
            queue.rewind()
        if scaling is not None and view.causes & scaling.watches:
            yield from _restrained(view, scaling.plan(view))


def _restrained(view: View, plan: Plan) -> Plan:
    """Yield the actions of a scaling, without those that another role, or what was asked for, does not allow."""
    verdict: Refusal | None = None
    while True:
        try:
            action = plan.send(verdict)
        except StopIteration:
            return
        reason = objection(view, action)
        verdict = (yield action) if reason is None else Refusal(action, reason)


def objection(view: View, action: Action) -> str | None:
    """Return why a scaling may not do *action*, by the precedence of `roles`; None: it may."""
    match action:
        case Start() | Choose() | Reject():
            return f"{type(action).__name__} is for calls, which are not scaling's"
        case Evict(copy):
            return _last_of_waiting(view, (copy,))
        case Load(victims=victims):
            return _last_of_waiting(view, victims or ())
        case Release(node):
            devices = view.devices_of(node)
            copies = tuple(each.id for device in devices for each in view.residents(device))
            return _last_of_waiting(view, copies)
        case Limit(copy, share):
            found = view.find(copy)
            if found is not None and found.owner.goal_s is not None and 0 < share < found.owner.compute:
                owner = found.owner
                return f"{owner.id} has a latency goal of {owner.goal_s:g} s, for which it needs {owner.compute} %"
    return None


def _last_of_waiting(view: View, copies: tuple[CopyId, ...]) -> str | None:
    """Return what waits for a function of which *copies* are all that there are; None: nothing does."""
    leaving: dict[str, int] = {}
    for name in copies:
        found = view.find(name)
        if found is not None and found.owner.waiting:
            owner = found.owner
            leaving[owner.id] = leaving.get(owner.id, 0) + 1
            if leaving[owner.id] >= owner.copies:
                return f"{owner.waiting} calls wait for {owner.id}, which would have no copy left"
    return None
