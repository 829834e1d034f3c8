"""
The policies, by name. A policy of your own imports its contract from here (docs/writing-a-policy.md).

Each of ours is a module of this package that imports `contract` and core only.
"""

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
from gpufaas_scheduler.policies.registry import (
    DEFAULT_POLICY,
    ENTRY_POINTS,
    POLICIES,
    make_policy,
    policy_spec,
    replacement_of,
)
from gpufaas_scheduler.policies.spec import PolicySpec

__all__ = [
    "DEFAULT_POLICY", "ENTRY_POINTS", "POLICIES", "Action", "Assign", "CountPass", "DeviceView", "Explaining",
    "FunctionView", "Load", "Option", "Plan", "PolicySpec", "Promise", "QueueView", "Refusal", "ResidentView",
    "SchedulingPolicy", "Start", "View", "WaitingCall", "Why", "make_policy", "policy_spec", "replacement_of",
    "start_on",
]  # fmt: skip
