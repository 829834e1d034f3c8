"""
The policies, by name. A policy of your own imports its contract from here (docs/writing-a-policy.md).

Each of ours is a module of this package that imports `contract` and core only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct

from gpufaas_core.errors import InvalidSpec
from gpufaas_core.model import Seconds
from gpufaas_scheduler.contract import (
    Action,
    Assign,
    CountPass,
    DeviceView,
    Explaining,
    FunctionView,
    Load,
    Option,
    Plan,
    Promise,
    QueueView,
    Refusal,
    ResidentView,
    SchedulingPolicy,
    Start,
    View,
    WaitingCall,
    Why,
    start_on,
)  # fmt: skip
from gpufaas_scheduler.policies.least_wait import LeastWait
from gpufaas_scheduler.policies.least_wait.tuning import DEFAULT_WAIT_BOUND_S
from gpufaas_scheduler.policies.load_balance import LoadBalance
from gpufaas_scheduler.policies.locality import DEFAULT_O3_LIMIT, Locality

__all__ = [
    "DEFAULT_O3_LIMIT", "DEFAULT_POLICY", "DEFAULT_WAIT_BOUND_S", "ENTRY_POINTS", "POLICIES", "Action", "Assign",
    "CountPass", "DeviceView", "Explaining", "FunctionView", "Load", "Option", "Plan", "PolicyOptions", "Promise",
    "QueueView", "Refusal", "ResidentView", "SchedulingPolicy", "Start", "View", "WaitingCall", "Why", "make_policy",
    "start_on",
]  # fmt: skip

ENTRY_POINTS: Final = "gpufaas.policies"

DEFAULT_POLICY: Final = "least-wait"
"""The default of `serve`, of the simulator, and of journals that name no policy."""


class PolicyOptions(Struct, frozen=True):
    """The settings of the policies; each uses its own."""

    o3_limit: int = DEFAULT_O3_LIMIT
    """lalb-o3: how often a waiting call may be overtaken."""
    wait_bound_s: Seconds = DEFAULT_WAIT_BOUND_S
    """least-wait: a device is reserved for a call that would wait for longer, for one call at a time."""


POLICIES: Final[Mapping[str, Callable[[PolicyOptions], SchedulingPolicy]]] = {
    "lb": lambda _: LoadBalance(),
    "lalb": lambda _: Locality("lalb", limit=0),
    "lalb-o3": lambda settings: Locality("lalb-o3", limit=settings.o3_limit),
    "least-wait": lambda settings: LeastWait(settings.wait_bound_s),
}
"""Name to factory."""


def make_policy(
    name: str, *, o3_limit: int = DEFAULT_O3_LIMIT, wait_bound_s: Seconds = DEFAULT_WAIT_BOUND_S
) -> SchedulingPolicy:
    """
    Return the policy called *name*: one of `POLICIES`, or of the entry points ``gpufaas.policies`` (called without
    arguments).

    :raises InvalidSpec: no policy has this name, says which there are; or an installed one cannot be loaded
    """
    if o3_limit < 0:
        raise InvalidSpec(f"the O3 limit is a number of calls, 0 or more, not {o3_limit}")
    if not 0 <= wait_bound_s < float("inf"):
        raise InvalidSpec(f"the wait bound is a number of seconds, 0 or more, not {wait_bound_s}")
    if name in POLICIES:
        return POLICIES[name](PolicyOptions(o3_limit, wait_bound_s))
    from importlib.metadata import entry_points  # takes 15 ms, only needed for a foreign policy

    plugins = {each.name: each for each in entry_points(group=ENTRY_POINTS)}
    if name not in plugins:
        raise InvalidSpec(f"no policy is called {name!r}: choose one of {', '.join([*POLICIES, *sorted(plugins)])}")
    try:
        policy: SchedulingPolicy = plugins[name].load()()
        missing = [each for each in ("name", "pass_limit", "plan") if not hasattr(policy, each)]
    except Exception as exc:
        # Foreign code may raise anything; the message names its origin.
        value = plugins[name].value
        raise InvalidSpec(f"policy {name!r} ({value}) cannot be made: {type(exc).__name__}: {exc}") from exc
    if missing:
        raise InvalidSpec(f"policy {name!r} ({plugins[name].value}) has no {', '.join(missing)}: see SchedulingPolicy")
    return policy
