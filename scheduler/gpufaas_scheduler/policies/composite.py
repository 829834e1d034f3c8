"""A policy that is composed of roles, and what it refuses where they disagree."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final

import msgspec

from gpufaas_cache_manager.replacement import Replacement
from gpufaas_core.messages import Event
from gpufaas_core.model import CopyId, PlacementPlan, Seconds
from gpufaas_core.owners import CALLS, PLAN
from gpufaas_scheduler import roles
from gpufaas_scheduler.contract import Action, Choose, Evict, Limit, Load, Plan, Refusal, Reject, Release, Start, Why
from gpufaas_scheduler.policies.planned import Planned
from gpufaas_scheduler.policy_contract import Explaining, Following, Noting, Observing, SchedulingPolicy, Stateful
from gpufaas_scheduler.view_contract import View, WaitingCall
from gpufaas_scheduler.view_nouns import FunctionView


class Composite:
    """
    See `roles`. *name* is the text of its spec; None is the default of a role.

    The policy has the members that the engine looks for (`Explaining`, `Following`, `Noting`, `Observing`) if a
    role has them. Beside *scaling*, each policy has what carries out plans: `planned`.
    """

    plan: Callable[[View], Plan]
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
        self.planned, self._scaling = scaling if isinstance(scaling, Planned) else Planned(), scaling
        if scaling is self.planned:
            self._scaling = scaling = None
        self.reasons = self.planned.reasons
        self.admission = admission
        """The engine asks it: only few functions have calls that may be refused when they come."""
        self.batching = batching
        """The engine asks it: only few functions have calls that may start together."""
        self.prefetch = prefetch
        """The engine asks it: only few calls wait for a function that no device holds."""
        self._decide: Callable[[View], Plan] = (
            order.plan if placement is None else partial(order.plan, placement=placement)  # type: ignore
        )
        self.plan = self._decide if scaling is None else self._run
        owners = {CALLS, *(scaling.owners if isinstance(scaling, roles.Owning) else ())}
        self._objection = partial(objection, owners=owners)
        self._follows = order.follows if isinstance(order, Following) else None
        if isinstance(order, Explaining):
            self.weigh = order.weigh
        if isinstance(order, Noting):
            self.leaving = order.leaving
        filled: dict[str, object] = {
            roles.ADMISSION: admission, roles.ORDER: order, roles.PLACEMENT: placement, roles.BATCHING: batching,
            roles.SCALING: scaling, roles.PREFETCH: prefetch,
        }  # fmt: skip
        self._stateful = {role: each for role, each in filled.items() if isinstance(each, Stateful)}
        self._observing = [each for each in filled.values() if isinstance(each, Observing)]
        if self._observing:
            self.observe = self._observe

    @property
    def watches(self) -> int:
        return self.planned.watches | (self._scaling.watches if self._scaling is not None else 0)

    @property
    def follows(self) -> Why | None:
        """None also while a load of the plan waits: it goes first when a call has ended."""
        return None if self.planned.urgent else self._follows

    def take(self, plan: PlacementPlan) -> None:
        self.planned.take(plan)
        if self.planned.watches:
            self.plan = self._run

    # --- state --------------------------------------------------------------------------------------------------------

    def save(self) -> bytes:
        """Return the state of all roles that have some."""
        saved = {role: each.save() for role, each in self._stateful.items()}
        if self.planned.watches:
            saved[_PLANNED] = self.planned.save()
        return msgspec.msgpack.encode(saved)

    def load(self, state: bytes) -> None:
        saved: dict[str, bytes] = msgspec.msgpack.decode(state, type=dict[str, bytes])
        for role, each in self._stateful.items():
            if role in saved:
                each.load(saved[role])
        if _PLANNED in saved:
            self.planned.load(saved[_PLANNED])
            self.plan = self._run

    def _observe(self, event: Event, now: Seconds) -> None:
        for each in self._observing:
            each.observe(event, now)

    # --- a run --------------------------------------------------------------------------------------------------------

    def _run(self, view: View) -> Plan:
        queue, planned, scaling = view.queue, self.planned, self._scaling
        if planned.watches & view.causes:
            yield from planned.plan(view)
            if scaling is None and not planned.watches:
                self.plan = self._decide
        if queue.count and view.idle_count:
            decided = self._decide(view)
            yield from _restrained(view, decided, planned.objection) if planned.held else decided
            queue.rewind()
        if scaling is not None and view.causes & scaling.watches:
            yield from _restrained(view, scaling.plan(view), self._objection)


_PLANNED: Final = "planned"


def _restrained(view: View, plan: Plan, objects: Callable[[View, Action], str | None]) -> Plan:
    """Yield the actions of *plan*, without those that another role, or what was asked for, does not allow."""
    verdict: Refusal | None = None
    while True:
        try:
            action = plan.send(verdict)
        except StopIteration:
            return
        reason = objects(view, action)
        verdict = (yield action) if reason is None else Refusal(action, reason)


def objection(view: View, action: Action, owners: Collection[str]) -> str | None:
    """Return why a scaling for *owners* may not do *action*, by the precedence of `roles`; None: it may."""
    leaving: tuple[CopyId, ...] = ()
    functions: Sequence[FunctionView | None] = ()
    match action:
        case Start() | Choose() | Reject():
            return f"{type(action).__name__} is for calls, which are not scaling's"
        case Evict(copy):
            leaving = (copy,)
            functions = _owners_of(view, leaving)
        case Load(name, tier="device", victims=victims):
            leaving = victims or ()
            functions = [view.function(name), *_owners_of(view, leaving)]
        case Release(node):
            leaving = tuple(each.id for device in view.devices_of(node) for each in view.residents(device))
            functions = [each for each in _owners_of(view, leaving) if each.owned_by == PLAN]
        case Limit(copy, share):
            functions = owned = _owners_of(view, (copy,))
            for each in owned:
                if each.owned_by == CALLS and each.goal_s is not None and 0 < share < each.compute:
                    return f"{each.id} has a latency goal of {each.goal_s:g} s, for which it needs {each.compute} %"
    for function in functions:
        if function is not None and function.owned_by not in owners:
            plan = view.placement
            owner = f"plan {plan.version}" if function.owned_by == PLAN and plan else function.owned_by
            return f"the owner of the copies of {function.id} is {owner}"
    return _last_of_waiting(view, leaving)


def _owners_of(view: View, copies: tuple[CopyId, ...]) -> list[FunctionView]:
    return [found.owner for name in copies if (found := view.find(name)) is not None]


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
