"""
Nested calls: a call whose handler calls a function of this platform waits for it, and holds its device meanwhile.

A waiting call is *stuck* when every place that it could have is held by a call that waits, perhaps through others, for
a stuck call. A fix-point finds them: a call is not stuck if it can be placed once all calls that are not stuck ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TypeAlias

from gpufaas_cache_manager.residency import ANSWERED
from gpufaas_core.messages import Outer
from gpufaas_core.model import Bytes, CallId, Seconds, copy_id
from gpufaas_core.units import format_bytes
from gpufaas_scheduler.fit import Reason
from gpufaas_scheduler.world.call import Call
from gpufaas_scheduler.world.call_state import ENDED, LOCAL, RUNNING
from gpufaas_scheduler.world.calls import runs_on
from gpufaas_scheduler.world.cluster import Cluster
from gpufaas_scheduler.world.device import DeviceState
from gpufaas_scheduler.world.function import Copy, FunctionState

_Held: TypeAlias = "Counter[Copy | None]"
"""By copy, the number of grants that cannot end before others."""


class Nests:
    """The calls that calls have made, and what their callers hold. It does not change the cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.inner: dict[CallId, Call] = {}
        """By arrival. Those that ended are dropped when the others are examined."""

    def outer_of(self, said: Outer) -> tuple[Call | None, Seconds | None]:
        """
        Return the call that runs on the worker in *said*, and the time by which it must end, if known.

        Of several calls: the one with the given id, else one that has made the fewest calls that are not over, so that
        the number of waiting ones is right; the time is then the latest of theirs. None: the worker runs no call, and
        the new call is not nested. O(running calls of the function).
        """
        device = self._cluster.devices.get(said.device)
        copy = None if device is None else device.residency.copies.get(copy_id(said.function, said.copy))
        if device is None or copy is None or not copy.running:
            return None, None
        running = runs_on(copy, device)
        if said.call and len(running) > 1:
            named = [each for each in running if each.id == said.call or each.id.startswith(f"{said.call}#")]
            running = named or running
        if not running:
            return None, None
        made = Counter(each.outer for each in self._alive())
        ends = [self._ends(each) for each in running]
        last = None if None in ends else max(each for each in ends if each is not None)
        return min(running, key=lambda each: made[each]), last

    def _ends(self, call: Call) -> Seconds | None:
        # A deadline in the past was for a handshake, or is not enforced.
        deadline = call.deadline
        return None if call.endless or deadline is None or deadline <= self._cluster.now else deadline

    def add(self, call: Call, outer: Call, ends: Seconds | None) -> None:
        """*outer* made *call*. :param ends: when *outer* ends, if that is before the deadline of *call*"""
        call.outer, call.ends = outer, ends
        call.avoid = outer.avoid
        if outer.owner.placed and outer.device is not None:
            call.avoid = outer.avoid | {outer.device.id}
        self.inner[call.id] = call

    def waiting(self) -> list[Call]:
        """Return the nested calls without a grant, by arrival."""
        return [each for each in self._alive() if each.state != RUNNING]

    def _alive(self) -> list[Call]:
        gone = [id_ for id_, each in self.inner.items() if each.state == ENDED]
        for each in gone:
            del self.inner[each]
        alive = list(self.inner.values())
        for call in alive:
            if call.outer is not None and call.outer.state == ENDED:
                self._guess_again(call, call.outer, alive)
        return alive

    def _guess_again(self, call: Call, ended: Call, alive: Iterable[Call]) -> None:
        """
        *ended* was taken for the call that made *call*, and has ended before it. So another one of its worker has made
        it: the one that has made the fewest.
        """
        device, copy = ended.device, ended.copy
        if device is None or copy is None or self._cluster.devices.get(device.id) is not device or not copy.running:
            return
        made = Counter(each.outer for each in alive)
        running = runs_on(copy, device)
        maker = min((each for each in running if call not in _chain(each)), key=lambda each: made[each], default=ended)
        others = [each for each in alive if each.outer is maker and each is not call]
        call.outer = maker
        for other in others[:1]:  # a handler mostly waits for one call: was that another one's?
            free = (each for each in running if not made[each] and other not in _chain(each))
            other.outer = next(free, maker)

    def has_made(self, outer: Call) -> bool:
        """Whether *outer* is taken for the one that made a call which is not over."""
        return any(each.outer is outer and each.state != ENDED for each in self.inner.values())

    # --- who is stuck ---

    def _held(self, waiting: Iterable[Call]) -> set[Call]:
        """Return the calls that cannot end before those of *waiting*: those that made them, and so on outwards."""
        held: set[Call] = set()
        for each in waiting:
            outer = each.outer
            while outer is not None and outer not in held and outer.state != ENDED:
                held.add(outer)
                outer = outer.outer
        return held

    def stuck(self) -> list[Call]:
        """Return the calls of `waiting` that can never start, by arrival."""
        left = self.waiting()
        while left:
            held = self._held(left)
            still = [each for each in left if not self._has_place(each, held)]
            if len(still) == len(left):
                return still
            left = still
        return []

    def holds(self, device: DeviceState) -> bool:
        """Whether the call on *device* waits for a call that has no place yet."""
        return _holder(device, self._held(self.waiting())) is not None

    def held_by(self, device: DeviceState, since: Seconds, apart: Call) -> bool:
        """Whether a call that runs on *device* waits for one, other than *apart*, that came before *since*."""
        if not self.inner:
            return False
        held = self._held(each for each in self.waiting() if each.arrived_at <= since and each is not apart)
        return any(call in held for call in device.runs())

    def may_wait(self, owner: FunctionState) -> bool:
        """Whether a holder of a placed function can take a call while calls that wait for calls keep what they hold."""
        held = self._held(self.waiting())
        copies = _copies_of(held)
        return any(not _lacks_compute(owner, each, held, copies) for each in owner.holders.values())

    def full_of_outers(self, owner: FunctionState) -> bool:
        """Whether calls that wait for calls hold all slots of a direct function."""
        return not _has_slot(owner, _copies_of(self._held(self.waiting())))

    def crowded(self) -> list[FunctionState]:
        """Return the direct functions that need one more copy: calls that wait for calls hold all of their slots."""
        wanted = {each.owner.id: each.owner for each in self.waiting() if not each.owner.placed and each.owner.active}
        return [each for each in wanted.values() if self.may_have_more(each) and self.full_of_outers(each)]

    def may_have_more(self, owner: FunctionState) -> bool:
        """Whether a direct function may have one more copy. Draining ones count while waiting calls hold them."""
        return not _is_at_most(owner, _copies_of(self._held(self.waiting())))

    def draining_slot(self, owner: FunctionState) -> Copy | None:
        """Return a draining copy of a direct function which waiting calls hold, and that has a free slot."""
        kept = _kept_up(owner, _copies_of(self._held(self.waiting())))
        return next((each for each in kept if each.running < owner.slots), None)

    def _has_place(self, call: Call, held: set[Call]) -> bool:
        """Whether *call* can have a place while *held* keep theirs, and all other calls end."""
        owner = call.owner
        copies = _copies_of(held)
        if not owner.placed:
            if _has_slot(owner, copies) or any(copies[each] < owner.slots for each in _kept_up(owner, copies)):
                return True
            if owner.active and _is_at_most(owner, copies):
                return False
        elif call.state == LOCAL:
            return call.device is not None and _holder(call.device, held) is None
        return any(
            self._room(owner, each, held, copies) is None
            for each in self._cluster.devices.values()
            if not _lacks_compute(owner, each, held, copies)
        )

    def _room(self, owner: FunctionState, device: DeviceState, held: set[Call], copies: _Held) -> Bytes | None:
        """
        Return None if *owner* fits on *device* once all that may leave has left; else the bytes that it would have
        there.
        """
        need = owner.need(device)
        if isinstance(need, Reason):
            return 0
        if owner.placed and device.id in owner.holders:
            return None
        room = device.device.memory
        waits = _holder(device, held) is not None
        for copy in device.residency:
            if copies[copy]:
                # What it was lent counts as free, unless it has answered that it uses it.
                room -= copy.limit if copy.asked == ANSWERED else copy.memory
            elif (waits and copy.queued) or _is_kept(copy):
                room -= copy.memory
        return None if need <= room else room

    def why_stuck(self, call: Call) -> str:
        """Return for people what holds the places that *call* could have."""
        owner = call.owner
        held = self._held(self.waiting())
        copies = _copies_of(held)
        reasons = []
        if not owner.placed and owner.active:
            reasons.append(f"all slots of {owner.id} are held by calls that wait for calls")
        for device in self._cluster.devices.values():
            if isinstance(owner.need(device), Reason):
                continue
            lacks = _lacks_compute(owner, device, held, copies)
            holder = _holder(device, held) if lacks else None
            room = self._room(owner, device, held, copies)
            if holder is not None:
                reasons.append(f"device {device.id} is held by call {holder.id} of {holder.function}")
            elif lacks:
                reasons.append(f"the compute of device {device.id} is held by copies that stay there")
            elif room is not None:
                reasons.append(f"device {device.id} has {format_bytes(max(0, room))} beside what stays there")
        outer = call.outer
        assert outer is not None
        return (
            f"call {call.id} of function {owner.id} was made by call {outer.id} of {outer.function}, which waits for "
            f"it, and nothing that it could have becomes free before: {'; '.join(reasons) or 'there is no device'}. "
            f"Give {owner.id} another device, make its model smaller, make one of the two a CPU function, or call it "
            "asynchronously (/async-function/)"
        )


def _chain(call: Call) -> list[Call]:
    """Return *call*, the call that made it, and so on outwards."""
    chain: list[Call] = []
    outer: Call | None = call
    while outer is not None and outer not in chain:
        chain.append(outer)
        outer = outer.outer
    return chain


def _copies_of(held: Iterable[Call]) -> _Held:
    grants = {each.granted or each: each.copy for each in held if each.state == RUNNING}
    return Counter(grants.values())


def _holder(device: DeviceState, held: set[Call]) -> Call | None:
    """Return a call of *held* that runs on *device* and keeps compute, alone or with others of its copy."""
    return next((call for each in device.grants() for call in each.calls if call in held), None)


def _lacks_compute(owner: FunctionState, device: DeviceState, held: set[Call], copies: _Held) -> bool:
    """Whether a copy of *owner* has no slot or compute on *device* while *held* keep theirs, and all else has left."""
    name = device.copies.get(owner.id) if owner.placed else None
    own = None if name is None else device.residency.copies[name]
    if own is not None and copies[own]:
        if own in owner.draining or copies[own] >= (own.slots or owner.slots):
            return True
        if owner.shared_hold:
            return False  # one hold is for all grants of a copy
    wanted = owner.takes(device)
    if not wanted:
        return False
    keep = [each for each in device.grants() if any(call in held for call in each.calls)]
    taken = sum(each.compute for each in keep if not each.copy.owner.shared_hold)
    taken += sum(each.owner.takes(device) for each in {each.copy for each in keep if each.copy.owner.shared_hold})
    stay = (each for each in device.residency if copies[each] or _is_kept(each))
    return taken + sum(each.share for each in stay) + wanted > device.compute


def _is_kept(copy: Copy) -> bool:
    """Whether a plan keeps it, or it is within the minimum of its function."""
    owner = copy.owner
    return (copy.kept is not None or owner.copies <= owner.min_copies) and copy not in owner.draining


def _has_slot(owner: FunctionState, held: _Held) -> bool:
    return any(held.get(copy, 0) < owner.slots for copy in owner.active)


def _kept_up(owner: FunctionState, held: _Held) -> list[Copy]:
    """Return the draining copies that stay as long as *held* do. Nested calls may have their free slots."""
    return [
        each for each, device in owner.draining.items() if held[each] and not (device.shut or each.split or each.silent)
    ]


def _is_at_most(owner: FunctionState, held: _Held) -> bool:
    """Whether it has all copies that it may have."""
    return 0 < owner.max_copies <= owner.copies + len(_kept_up(owner, held))
