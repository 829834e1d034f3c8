"""A policy that is composed of roles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from gpufaas_cache_manager.replacement import Replacement
from gpufaas_scheduler.contract import Explaining, Noting, Plan, SchedulingPolicy, Stateful, View, WaitingCall, Why
from gpufaas_scheduler.roles import ORDER, PLACEMENT, Order, Placement


class Composite:
    """
    See `roles`. *name* is the text of its spec.

    It has the members that the engine looks for in a policy (`Explaining`, `Noting`) if the order has them.
    """

    plan: Final[Callable[[View], Plan]]
    """One scheduling run. It is the order's own: a generator around it would cost each action a step."""
    weigh: Callable[[View, WaitingCall], Why]
    leaving: Callable[[WaitingCall], int]

    def __init__(
        self, name: str, order: Order | SchedulingPolicy, placement: Placement | None, replacement: Replacement
    ) -> None:
        self.name = name
        self.replacement = replacement
        # A whole policy is an order that places its calls itself.
        self.plan = order.plan if placement is None else partial(order.plan, placement=placement)  # type: ignore
        if isinstance(order, Explaining):
            self.weigh = order.weigh
        if isinstance(order, Noting):
            self.leaving = order.leaving
        roles: dict[str, object] = {ORDER: order, PLACEMENT: placement}
        self._stateful = {role: each for role, each in roles.items() if isinstance(each, Stateful)}

    def save(self) -> bytes:
        """Return the state of all roles that have some."""
        return msgspec.msgpack.encode({role: each.save() for role, each in self._stateful.items()})

    def load(self, state: bytes) -> None:
        saved: dict[str, bytes] = msgspec.msgpack.decode(state, type=dict[str, bytes])
        for role, each in self._stateful.items():
            if role in saved:
                each.load(saved[role])
