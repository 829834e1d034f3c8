"""
The policies, by name. A policy of your own imports its contract from here (docs/writing-a-policy.md).

Each of ours is a module of this package that imports `contract` and core only.
"""

from gpufaas_scheduler.contract import (
    DEVICE,
    HOST,
    NONE,
    Action,
    Assign,
    Choose,
    Evict,
    Fetch,
    Limit,
    Load,
    Option,
    Plan,
    Preempt,
    Procure,
    Promise,
    Refusal,
    Reject,
    Release,
    SetPlan,
    Start,
    Wake,
    Why,
    start_on,
)
from gpufaas_scheduler.policies.registry import DEFAULT_POLICY, ENTRY_POINTS, POLICIES, make_policy, policy_spec
from gpufaas_scheduler.policies.spec import PolicySpec
from gpufaas_scheduler.policy_contract import (
    ARRIVAL,
    FINISH,
    FLEET,
    LOADED,
    PLAN,
    WAKE,
    Executing,
    Explaining,
    Following,
    Noting,
    Observing,
    SchedulingPolicy,
    Stateful,
    Watching,
)
from gpufaas_scheduler.view_contract import QueueView, ResidentView, RunningCall, View, WaitingCall
from gpufaas_scheduler.view_nouns import DeviceView, FunctionView

__all__ = [
    "ARRIVAL", "DEFAULT_POLICY", "DEVICE", "ENTRY_POINTS", "FINISH", "FLEET", "HOST", "LOADED", "NONE", "PLAN",
    "POLICIES", "WAKE", "Action", "Assign", "Choose", "DeviceView", "Evict", "Executing", "Explaining", "Fetch",
    "Following", "FunctionView", "Limit", "Load", "Noting", "Observing", "Option", "Plan", "PolicySpec", "Preempt",
    "Procure", "Promise", "QueueView", "Refusal", "Reject", "Release", "ResidentView", "RunningCall",
    "SchedulingPolicy", "SetPlan", "Start", "Stateful", "View", "WaitingCall", "Wake", "Watching", "Why", "make_policy",
    "policy_spec", "start_on",
]  # fmt: skip
