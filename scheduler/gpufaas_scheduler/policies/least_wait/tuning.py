"""
The constants of least-wait, each with its origin.

Where no other origin is given, a value was found in simulations of the published set-up (docs/adr/0019, repeated by
`benchmarks/policy.py`). None is sharp: halving or doubling one at a time changes mean waits by a few per cent.
"""

from typing import Final

from gpufaas_core.model import Seconds

# --- what a copy is worth ---

HORIZON_S: Final[Seconds] = 30.0
"""How long the presence or absence of a copy is taken to matter."""
OWN_LOAD: Final = 0.25
"""Of a function's own demand, this share is felt by each of its holders beyond the cluster's mean: its calls are given
to the holder that is idle, and others avoid it."""
SATURATED: Final = 0.98
"""Share of time. A queue that is busier has no mean wait that an estimate could be made of."""
BUSIEST: Final = 0.95
"""The cluster's utilisation is not taken to be more, for the same reason."""
VARIABILITY: Final = 0.7
"""Squared coefficient of variation of how long a holder is away, for a call or for something else: 0 if it did nothing
but serve equal calls, 1 if the times were exponential. Found over 40 seeds of the trace (docs/adr/0019)."""
SPREAD: Final = (1.0 + VARIABILITY) / 2.0
"""What that does to a wait: Kingman's factor, with arrivals that are independent."""
LOAD_WEIGHT: Final = 3.0
"""A load occupies a device that others wait for: at full utilisation it counts so many times more."""
WAITING_WORTH: Final = 1e3
"""Of the last copy of a function that has calls waiting: above whatever a rate could make it."""

# --- a load against a hit ---

RELIEF_SHARE: Final = 0.7
"""A load must relieve 1/0.7 as much as a hit, since what arrives meanwhile may be another hit."""
REPLICA_SHARE: Final = 0.5
"""Of the waiting calls of a function that is held, this share over its copies, the new one included, is what one more
copy relieves: the others will have served the rest by then."""
FAR_BEHIND: Final = 2.5
"""Loads; a replica competes with hits only when its holders are so far behind."""

# --- a load against waiting for a holder ---

BEHIND: Final = 1.1
"""Loads; a call does not wait for holders that are further behind if a device is idle."""
REPLACE: Final = 1.5
"""A replica is loaded without a call if its worth exceeds its victims' by this factor."""
LOAD_PRICE: Final = 0.3
"""And a load's device time, times this; plus utilisation, plus calls that wait for each device."""
CROWDED: Final = 0.3
"""Loads; how much an otherwise equal device is avoided when its models are in full demand."""

# --- the bound ---

DEFAULT_WAIT_BOUND_S: Final[Seconds] = 30.0
"""See `policies.PolicyOptions`."""
NEAR: Final = 0.95
"""Of the bound: from here on a call's pull is without limit."""
LONG_LOAD: Final = 0.5
"""Of the bound: so much of a load's time is counted before it, at most. Chosen on seeds 0 to 2 (docs/adr/0028)."""
RESERVED: Final = 0.25
"""Loads for calls at the bound take no more than this share of all devices' time, lest they feed the overload that made
the calls wait: of few devices, one after the other would be all that they do (docs/adr/0028)."""

# --- how far a decision looks, which is what it costs ---

CANDIDATES: Final = 16
"""Idle devices that a load is compared on."""
RIVALS: Final = 8
"""Functions that no device holds, or whose holders are busy, that are looked at."""
HOLDERS: Final = 32
"""Of these many holders, the first idle ones are compared; of these many, the wait is estimated."""
