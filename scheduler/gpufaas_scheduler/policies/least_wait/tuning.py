"""
The constants of least-wait, each with its origin.

Values without another origin come from simulations of the published set-up (docs/adr/0019, repeated by
`benchmarks/policy.py`). No value is critical: halving or doubling one changes mean waits by a few per cent.
"""

from typing import Final

from gpufaas_core.model import Seconds

# --- what a copy is worth ---

HORIZON_S: Final[Seconds] = 30.0
"""How long the presence or absence of a copy matters."""
OWN_LOAD: Final = 0.25
"""The share of a function's own demand that adds to the cluster's mean at each of its holders: its calls go to an idle
holder, and other calls avoid that one."""
SATURATED: Final = 0.98
"""A share of time. A busier queue has no mean wait that could be estimated."""
BUSIEST: Final = 0.95
"""The estimate of the cluster's utilisation is at most this, for the same reason."""
VARIABILITY: Final = 0.7
"""Squared coefficient of variation of how long a holder is busy with anything: 0 if it served only equal calls, 1 if
the times were exponential. Found with 40 seeds of the trace (docs/adr/0019)."""
SPREAD: Final = (1.0 + VARIABILITY) / 2.0
"""Kingman's factor for the wait, with independent arrivals."""
LOAD_WEIGHT: Final = 3.0
"""A load occupies a device that others wait for. At full utilisation it counts this many times more."""
WAITING_WORTH: Final = 1e3
"""The worth of the last copy of a function with waiting calls: above the worth that any rate gives."""

# --- a load against a hit ---

RELIEF_SHARE: Final = 0.7
"""A load must relieve 1/0.7 times as much as a hit, since the next arrival may be another hit."""
REPLICA_SHARE: Final = 0.5
"""One more copy of a function relieves this share of its waiting calls, divided by the copies with the new one: the
others will have served the rest by then."""
FAR_BEHIND: Final = 2.5
"""In loads: a replica competes with hits only when the holders are further behind than this."""

# --- a load against waiting for a holder ---

BEHIND: Final = 1.1
"""In loads: beside an idle device, a call does not wait for holders that are further behind."""
FEW: Final = 4
"""The most calls that wait for each first copy that loads, while nobody knows how long they take."""
REPLACE: Final = 1.5
"""A replica is loaded without a call if it is worth more than this many times its victims,"""
LOAD_PRICE: Final = 0.3
"""and more than the load's device time times the sum of this, the utilisation and the waiting calls per device."""
CROWDED: Final = 0.3
"""In loads: how much a device is avoided whose models are in full demand."""

# --- the bound ---

DEFAULT_WAIT_BOUND_S: Final[Seconds] = 30.0
"""See `ReliefOptions`."""
NEAR: Final = 0.95
"""From this share of its bound on, a call goes before all others."""
LONG_LOAD: Final = 0.5
"""Of a load's time, at most this share of the bound counts. Chosen on seeds 0 to 2 (docs/adr/0028)."""
RESERVED: Final = 0.25
"""Loads for calls at the bound take at most this share of all devices' time. Otherwise they would feed the overload
that made the calls wait: a few devices would do nothing but load (docs/adr/0028)."""

# --- how far a decision looks, which is what it costs ---

CANDIDATES: Final = 16
"""The number of idle devices that are compared for a load."""
RIVALS: Final = 8
"""The number of functions without a holder, or with busy holders only, that are examined."""
HOLDERS: Final = 32
"""The number of idle holders that are compared for a hit, and of holders for the estimate of a wait."""
