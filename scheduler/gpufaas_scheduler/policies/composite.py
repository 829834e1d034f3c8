"""A policy that is composed of roles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from gpufaas_cache_manager.replacement import Replacement
from gpufaas_scheduler.contract import Explaining, Plan, SchedulingPolicy, View, WaitingCall, Why
from gpufaas_scheduler.roles import Order, Placement


class Composite:
    """
    See `roles`. *name* is the text of its spec.

    Members that the engine asks a policy for by their presence (`Explaining`) are those of the order, if it has them.
    """

    plan: Final[Callable[[View], Plan]]
    """One scheduling run. It is the order's own: a generator around it would cost each action a step."""
    weigh: Callable[[View, WaitingCall], Why]

    def __init__(
        self, name: str, order: Order | SchedulingPolicy, placement: Placement | None, replacement: Replacement
    ) -> None:
        self.name = name
        self.replacement = replacement
        self.pass_limit: int = getattr(order, "pass_limit", 0)
        # A whole policy is an order that places its calls itself.
        self.plan = order.plan if placement is None else partial(order.plan, placement=placement)  # type: ignore
        if isinstance(order, Explaining):
            self.weigh = order.weigh
