"""
The executor of plans: a scaling that brings what is there to the plan in force (`PlacementPlan`). Without a plan it
does nothing, and does not run.

In each run it first lets copies give compute up, then loads those that are missing, then lets copies have more compute,
and last drains copies that the plan does not have, of functions that are loaded where it has them. Copies of planned
functions that are in the way of a load are drained before that. Limits that a plan has set end with it.

What the engine refuses is tried again after each call that ends, before the calls that wait get a device. A busy device
that a load waits for takes no more calls. Otherwise calls of other functions could keep it busy for ever.
"""

from __future__ import annotations

from collections.abc import Generator
from math import inf
from typing import Final, TypeAlias

import msgspec

from gpufaas_core.model import DeviceId, FunctionId, Part, PlacementPlan, Replica, name_of
from gpufaas_scheduler.contract import Action, Assign, Evict, Limit, Load, Plan, Refusal, Start, Wake, Why
from gpufaas_scheduler.policy_contract import FINISH, FLEET, LOADED, PLAN, WAKE
from gpufaas_scheduler.view_contract import ResidentView, View
from gpufaas_scheduler.view_nouns import DeviceView, FunctionView

MOST: Final = 64
"""The most loads that are refused in one run, and the most limits: the others come first in the next one."""
_LATER: Final = "other copies of the plan were tried first"

_Key: TypeAlias = tuple[FunctionId, DeviceId]
_Try: TypeAlias = Generator[Action, Refusal | None, str | None]
"""It returns why the copy is not yet as the plan has it."""


class Planned:
    """The plan in force: its copies are loaded and limited, and other copies of its functions drained."""

    def __init__(self) -> None:
        self.watches = 0
        self.reasons: dict[_Key, str] = {}
        """Why copies are not there, or not as the plan has them."""
        self.held: set[DeviceId] = set()
        """Busy devices that loads wait for."""
        self._names: set[str] = set()
        """The functions whose copies may have limits of a plan."""
        self._functions: list[FunctionView] = []
        """Those that are deployed, without revisions that others succeed."""
        self._turn = 0
        """The place in the list of tries where the next run begins."""
        self._retry_at = inf
        """When the first load may be tried again of those that failed."""
        self._in_vain: set[_Key] = set()
        """Loads that were refused on an idle device: none is held for them."""

    def take(self, plan: PlacementPlan) -> None:
        """*plan* is in force from now on."""
        self._names.update(each.function for each in plan.replicas)
        self.watches = PLAN | FLEET if self._names else 0

    def save(self) -> bytes:
        return msgspec.msgpack.encode(sorted(self._names))

    def load(self, state: bytes) -> None:
        self._names.update(msgspec.msgpack.decode(state, type=list[str]))
        self.watches = PLAN | FLEET if self._names else 0

    @property
    def urgent(self) -> bool:
        """Whether something was refused that may be done when a call has ended."""
        return bool(self.watches & FINISH)

    def objection(self, view: View, action: Action) -> str | None:
        """Return why the order may not do *action*, which uses a device that a load waits for; None: it may."""
        named = {each.device for each in action.parts} if isinstance(action, Start | Load) else set()
        copy = action.copy if isinstance(action, Start | Assign) else None
        if copy is not None and (device := view.device_of(copy)) is not None:
            named.add(device.id)
        held = named & self.held
        return f"device {min(held)} is kept free for a load of the plan" if held else None

    # --- a run --------------------------------------------------------------------------------------------------------

    def plan(self, view: View) -> Plan:
        plan = view.placement
        if view.causes & (PLAN | FLEET):
            named = [each for each in view.functions() if name_of(each.id) in self._names]
            before = {each.before.id for each in named if each.before is not None}
            self._functions = [each for each in named if each.id not in before]
            self._in_vain.clear()
        self.reasons.clear()
        self.held.clear()
        self._retry_at = inf
        refused = 0
        for tries in self._lacking(view):
            refused += yield from self._try(tries)
        for function in self._functions:
            if any(device.id in function.plan and not copy.loading for copy, device in view.copies_of(function)):
                for copy, _ in _strays(view, function):
                    yield Evict(copy.id, drain=True)
        if self._retry_at < inf:
            yield Wake(self._retry_at, "plan")
        if not refused:
            self._names &= set() if plan is None else {each.function for each in plan.replicas}
        self.watches = (PLAN | FLEET | LOADED | WAKE if self._names else 0) | (FINISH if refused else 0)

    def _lacking(self, view: View) -> tuple[dict[_Key, _Try], dict[_Key, _Try], dict[_Key, _Try]]:
        """Return what there is to do: the limits that give compute up, the loads, and the other limits."""
        shrinks: dict[_Key, _Try] = {}
        loads: dict[_Key, _Try] = {}
        grows: dict[_Key, _Try] = {}
        plan = view.placement
        why = Why(f"plan {0 if plan is None else plan.version} has a copy here")
        for function in self._functions:
            there = set()
            for copy, device in view.copies_of(function):
                there.add(device.id)
                limit = _limit(function, copy, device)
                if limit is not None:
                    most = function.compute
                    gives = (limit.share or limit.reserve or most) <= (copy.share or copy.reserve or most)
                    (shrinks if gives else grows)[function.id, device.id] = _propose(view, limit)
            for name, replica in function.plan.items():
                key, found = (function.id, name), view.device(name)
                if name in there or found is None:
                    continue
                if function.retry_at <= view.now:
                    loads[key] = self._load(view, function, replica, found, why)
                else:
                    in_s = f"{function.retry_at - view.now:.0f} s"
                    self.reasons[key] = f"the last load of {function.id} failed: the next is in {in_s}"
                    self._retry_at = min(self._retry_at, function.retry_at)
        return shrinks, loads, grows

    def _try(self, tries: dict[_Key, _Try]) -> Generator[Action, Refusal | None, int]:
        """Do *tries*, in turns from run to run. Return how many are refused."""
        refused, keys = 0, list(tries)
        first = self._turn % max(1, len(keys))
        for key in (*keys[first:], *keys[:first]):
            reason = (yield from tries[key]) if refused < MOST else _LATER
            if reason is not None:
                self.reasons[key] = reason
                refused += reason is not _LATER
        self._turn += refused
        return refused

    def _load(self, view: View, function: FunctionView, replica: Replica, device: DeviceView, why: Why) -> _Try:
        """Load the copy of *replica*. If it is refused, drain copies of planned functions that are in its way."""
        # A revision that succeeds another one gets its room from that one by and by (`FunctionView.before`).
        victims = None if function.before is None else ()
        load = Load(function.id, (Part(device.id, 0, replica.share),), victims=victims, why=why)
        reason, strays = "", _strays(view, function)  # it may have as many copies as it has
        if not 0 < function.declared.max_copies <= function.copies:
            refusal = yield load
            if refusal is None:
                return None
            reason, need = refusal.reason, view.occupation(device, function)
            lacks = need is not None and (need > view.free(device) or view.lacks(device, function) > 0)
            strays = [each for other in self._functions if lacks for each in _strays(view, other) if each[1] is device]
        for copy, _ in strays:
            refusal = yield Evict(copy.id, drain=True)
            if refusal is None:
                refusal = yield load
                if refusal is None:
                    return None
                reason = refusal.reason
            reason = reason or refusal.reason
        key, busy = (function.id, device.id), device.busy
        loads = any(each.loading and (device.id in each.owner.plan or not busy) for each in view.residents(device))
        if not (loads or busy):
            self._in_vain.add(key)
        elif not (loads or key in self._in_vain or any(each.endless for each in view.running(device))):
            self.held.add(device.id)
        return reason or f"{function.id} has {function.copies} copies, and may have no more"


def _propose(view: View, limit: Limit) -> _Try:
    if view.find(limit.copy) is None:
        return None  # it made room for a load of this run
    refusal = yield limit
    return None if refusal is None else refusal.reason


def _limit(function: FunctionView, copy: ResidentView, device: DeviceView) -> Limit | None:
    """Return the limit that *copy* lacks; None: it is as the plan has it, or the plan does not have it."""
    need, plan = function.declared.need, function.plan
    slots, batch = max(1, need.slots), max(1, need.batch_max)
    has = Limit(copy.id, copy.share, copy.slots or slots, copy.batch or batch, copy.reserve)
    wanted = Limit(copy.id, need.held, slots, batch)
    if plan:
        replica = plan.get(device.id)
        if replica is None:
            return None
        wanted = Limit(copy.id, replica.share, replica.slots or slots, replica.batch or batch, replica.reserve)
    return None if has == wanted else wanted


def _strays(view: View, function: FunctionView) -> list[tuple[ResidentView, DeviceView]]:
    """Return the copies of *function* that the plan does not have, with their devices."""
    if not function.plan:
        return []
    return [each for each in view.copies_of(function) if each[1].id not in function.plan]
