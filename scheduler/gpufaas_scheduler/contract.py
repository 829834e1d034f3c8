"""
The contract of a scheduling policy: the actions that it proposes. `view_contract` has what it decides from,
`policy_contract` what it is.

The engine runs a policy when a call of a placed function waits and a device is idle. The policy reads a `View` and
proposes one `Action` at a time; the engine answers at once::

    refusal = yield start_on(device, call)      # None: done, and the view shows it already

The engine checks every action against memory, pins and busy devices: a wrong policy is slow, never unsafe. A policy has
no clock but `view.now`, does no IO, and is deterministic: the same view gives the same actions. To add a policy, write
a class with the members of `SchedulingPolicy` and register its factory as an entry point of the group
``gpufaas.policies`` (docs/writing-a-policy.md).

A policy decides about placed functions only. Calls of direct ones start without it, see ``engine``.
"""

from __future__ import annotations

from collections.abc import Generator
from math import inf
from typing import Any, Final, TypeAlias

from msgspec import Struct

from gpufaas_core.model import CallId, CopyId, FunctionId, NodeId, Part, PlacementPlan, Seconds
from gpufaas_scheduler.view_contract import WaitingCall
from gpufaas_scheduler.view_nouns import DeviceView

NEVER: Final = 1 << 62
"""An arrival number above all others."""

DEVICE: Final = "device"
HOST: Final = "host"
NONE: Final = "none"
"""The tiers: a copy is in the memory of a device, or its weights are in that of a node, or it is nowhere."""

# --- actions ----------------------------------------------------------------------------------------------------------
# Later versions may add actions.


class Why(Struct, frozen=True):
    """The explanation of an action, for people."""

    rule: str
    """The condition that held, in words."""
    options: tuple[Option, ...] = ()
    """The options that were weighed, with the chosen one."""


Option: TypeAlias = tuple[str, str, float]
"""(``hit`` | ``load`` | ``wait`` | ..., device or function, estimated seconds). Comparable within one `Why` only."""


class Start(Struct, frozen=True, gc=False):
    """
    Start waiting calls of one function together: a hit on `copy`, or a miss on a new copy with `parts`.

    `victims` are the copies to evict for a miss; None: as many as needed, in the engine's replacement order.
    """

    calls: tuple[CallId, ...]
    """More than one are a batch: at most the `batch_max` of the function's need."""
    copy: CopyId | None = None
    """The copy that runs them; None: a new one."""
    parts: tuple[Part, ...] = ()
    """
    The new copy is there; `DeviceView.part` is ready-made. A single part says no memory, which is as in the
    function's profile. With a share (of an ``auto`` function), the copy needs and holds that share of the compute, and
    no more, from now on; where a plan names the copy, it has what the plan says.

    Several, where nodes say that they can load them (`Device.loads_parts`): the copy is one, a grant on it holds
    compute on each of its devices, and it goes when one of them goes. Each part says its memory then. It has no local
    queue (`Assign`).
    """
    victims: tuple[CopyId, ...] | None = None
    why: Why | None = None
    reserved_s: Seconds = 0.0
    """`View.reserved` is true for this long from now on: a policy uses it to limit how often it does this."""


class Assign(Struct, frozen=True, gc=False):
    """
    Put a waiting call into the local queue of a busy device, for a copy there.

    When this call is the first of the local queue, and the device is later than its estimate by `patience_s`, the whole
    local queue goes back to the global queue, and a scheduling run follows.
    """

    call: CallId
    copy: CopyId
    why: Why | None = None
    patience_s: Seconds = inf


class Load(Struct, frozen=True):
    """
    Load a placed function on an idle device without a call: a replica or a prefetch. The device is busy until the load
    ends, as with a miss; but with a share, and for a copy that a plan names, it takes calls meanwhile, and one such
    load at a time. The engine refuses it after a failed load, until a call has loaded the function.

    With `tier` `HOST`, only its weights are brought, into the host tier of the node of the first part. No device is
    busy for it, and the node decides what gives way there.
    """

    function: FunctionId
    parts: tuple[Part, ...]
    """As for `Start`."""
    tier: str = DEVICE
    victims: tuple[CopyId, ...] | None = None
    why: Why | None = None
    beside: bool = False
    """
    Load beside what the device computes: it holds no compute, has no victims, and there is one such load of a device at
    a time. Calls of the function wait for it as hits.
    """


class Evict(Struct, frozen=True):
    """Evict an idle copy; with `to` `HOST`, its weights stay in the memory of its node."""

    copy: CopyId
    to: str = NONE
    drain: bool = False
    """The copy may be in use: it takes no new calls, and is evicted once its calls have ended."""


class Limit(Struct, frozen=True):
    """What a copy may do from now on, within the need of its function."""

    copy: CopyId
    share: int = 0
    """The share of the device's compute, in per cent; 0: no cap. The shares of a device's copies fit its compute
    together."""
    slots: int = 1
    batch: int = 1
    reserve: int = 0
    """Without a share: what a grant counts for while it runs, in per cent of the compute; 0: as its function says."""


class Choose(Struct, frozen=True):
    """Let a waiting call be one of another function of the same task. It keeps its number and its deadline."""

    call: CallId
    function: FunctionId


REJECTIONS: Final = (422, 429, 503)
"""The statuses of `Reject`."""


class Reject(Struct, frozen=True):
    """Refuse a waiting call, also one of a direct function. Its caller reads `why`."""

    call: CallId
    why: str
    status: int = 429
    """The HTTP status: 422, it asks for what there is not; 429, it is over a quota; 503, it would be too late."""
    details: dict[str, Any] | None = None
    """What its caller is told beside that, in JSON."""
    retry_after_s: Seconds = 0.0
    """When the caller may try again; 0.0: it is not said."""


class Preempt(Struct, frozen=True):
    """Stop the calls of a running grant: they are taken back (`requeue`), or end with an error for their callers."""

    grant: int
    """`RunningCall.grant`."""
    requeue: bool = True
    """Only for idempotent functions."""


class Fetch(Struct, frozen=True):
    """
    Bring what a function needs to nodes ahead of its loads there; each node has it from the one before. Refused if one
    of them says that it fetches nothing, or not like that (`Device.fetches` and the fields beside it).
    """

    function: FunctionId
    nodes: tuple[NodeId, ...]
    source: str = ""
    """A node that has it; empty: wherever it is."""
    ranges: tuple[tuple[int, int], ...] = ()
    """As (first, end) in bytes of the weights; none: all of them."""


class Wake(Struct, frozen=True):
    """
    Run the policy at that time, if it would run then: see `Watching`. The key says what for, and a later wake with the
    same key takes the place of this one. At infinity: not at all.
    """

    at: Seconds
    key: str = ""


class Procure(Struct, frozen=True):
    """
    Order *n* nodes of a kind that the platform offers (`View.offers`). Each gets an order id, the last of
    `View.ordered`.
    """

    kind: str
    n: int = 1


class Release(Struct, frozen=True):
    """Give a node of an offered kind back: its devices are drained, and it goes once they are empty."""

    node: NodeId


class SetPlan(Struct, frozen=True):
    """Put a plan in force: `View.placement` shows it, also to a policy that takes over. See `policies.planned`."""

    plan: PlacementPlan


class Promise(Struct, frozen=True):
    """Note when the wait of a call should be over, as `WaitingCall.promised_at`. It has no other effect."""

    call: CallId
    at: Seconds


Action = (
    Start | Assign | Load | Evict | Limit | Choose | Reject | Preempt | Fetch | Wake | Procure | Release | SetPlan
    | Promise
)  # fmt: skip


def start_on(device: DeviceView, call: WaitingCall, why: Why | None = None) -> Start:
    """Return the start of *call* on *device*: a hit if the device holds its function, else a miss."""
    copy = device.copies.get(call.function)
    return Start((call.id,), copy, () if copy else device.part, None, why)


class Refusal(Struct, frozen=True):
    """The engine did not do the action; nothing changed."""

    action: Action
    reason: str


Plan = Generator[Action, Refusal | None, None]
"""The next run follows the next event, unless the policy asks for one (`Wake`)."""
