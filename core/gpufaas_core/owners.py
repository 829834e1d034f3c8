"""
Who owns the copies of a function: decides how many there are, and where. Each function has one owner.

The first of these that applies owns it (docs/placing.md). Roles act on the functions that they own; calls of all others
are placed by the policy, which loads and evicts copies as calls need them.
"""

from typing import Final

PLAN: Final = "plan"
"""The plan in force names it."""
APPLICATION: Final = "application"
"""The function is a variant of an application."""
KINDS: Final = "kinds"
"""The function has a latency goal, and names kinds of devices to choose from."""
SCALE_BY: Final = "scale-by"
"""The annotation ``gpufaas.scale-by`` names a policy of replicas."""
LABELS: Final = "labels"
"""Its OpenFaaS labels have a rule: the autoscaler acts on it."""
CALLS: Final = "calls"
"""Nothing is said: copies follow its calls."""

OWNERS: Final = (PLAN, APPLICATION, KINDS, SCALE_BY, LABELS, CALLS)
"""In the order in which they are asked."""
