"""
What a new scheduler starts from: the snapshots of the nodes, and the docs that the last scheduler wrote.

A `NodeSnapshot` says what is in a node's memory and what runs there. The docs hold the engine's own state: which calls
wait, what was learnt, in which order things happened. Where the two differ, the node is right.

The clocks of two machines cannot be compared. So times are ages and durations, as of the moment at which the value was
made; `at_s` tells how far apart these moments were for docs of one epoch.
"""

from typing import TypeAlias

from msgspec import Struct

from gpufaas_core._types import Bytes, Seconds
from gpufaas_core.model import (
    Asked,
    CallId,
    CopyId,
    Device,
    DeviceId,
    Function,
    FunctionId,
    NodeId,
    OrderId,
    Part,
    PlacementPlan,
    RatioDoc,
    TimesDoc,
)

# --- what a node knows ------------------------------------------------------------------------------------------------


class ResidentSnapshot(Struct, frozen=True):
    """One worker that loads or is ready. Workers that are ending are left out, since their memory becomes free."""

    function: FunctionId
    digest: str
    memory: Bytes
    """Its reservation, as the scheduler last asked for it."""
    copy: int = 0
    idle_s: Seconds = 0.0
    """Since it last began to serve; since the start of its load if it never served."""
    loading: bool = False
    load_age_s: Seconds = 0.0
    """Since the start of its load; 0.0: the load is over."""
    tier: str = ""
    """The tier that its weights came from; empty: it loads."""
    silent: bool = False
    """It owes a sign of life (`messages.CopySilent`)."""


class ParkedSnapshot(Struct, frozen=True):
    """A worker that is parked."""

    function: FunctionId
    digest: str
    copy: int
    memory: Bytes = 0
    """What it holds of its device all the same."""


class RunningCall(Struct, frozen=True):
    """A call that has a grant of one of the node's workers and has not ended."""

    call: CallId
    function: FunctionId
    copy: int = 0
    age_s: Seconds = 0.0
    """Since it began; if it has not begun, since its grant was opened."""
    begun: bool = False
    """The worker has it. False: the worker still loads, or the body has not come yet."""
    cold: bool = False
    """The worker was started for its grant."""
    abandoned: bool = False
    """Its caller is gone, and the worker was told."""
    grant: int = 0
    """The number of its grant; the calls of one number run together. 0: it runs alone."""
    batch: int = 1
    """The number of calls of its grant, with those that have ended."""


class DeviceSnapshot(Struct, frozen=True):
    """What is in one device's memory, and what runs there."""

    device: Device
    residents: tuple[ResidentSnapshot, ...] = ()
    """Least recently used first."""
    running: tuple[RunningCall, ...] = ()
    """In the order in which their grants were opened. They may reserve more compute than there is: without a scheduler,
    each gateway sends calls to models that it knows to be ready."""
    parked: tuple[ParkedSnapshot, ...] = ()
    """In the order in which they were parked."""


class StagedWeights(Struct, frozen=True):
    """Weights in the host tier of a node: in its memory, apart from all workers."""

    function: FunctionId
    size: Bytes = 0
    """Functions with the same weights share them."""
    staging: bool = False
    """They are on their way there."""


class NodeSnapshot(Struct, frozen=True):
    """What a node reports when it joins or comes back."""

    devices: tuple[DeviceSnapshot, ...]
    epoch: int = 0
    """The highest that it has obeyed. A scheduler of a lower epoch has been replaced."""
    staged: tuple[StagedWeights, ...] = ()
    """All that is in its host tier, least recently used first."""


# --- what the scheduler keeps -----------------------------------------------------------------------------------------


Holder: TypeAlias = tuple[DeviceId, int]
"""Where a copy of a function is: device, and its number."""


class CallDoc(Struct, frozen=True, omit_defaults=True):
    """A call that waits or runs, and its place in the order."""

    call: CallId
    function: FunctionId
    number: int
    """Arrival number: the order of the queue."""
    age_s: Seconds
    """The seconds since it arrived."""
    deadline_in_s: Seconds | None = None
    left: bool = False
    """It left its queue; if it waits, it came back."""
    note: int = 0
    """What the policy keeps with the call."""
    refusals: int = 0
    aborted: bool = False
    preempted: bool = False
    """The policy has stopped it, and it waits again once its node has ended it."""
    estimate_s: Seconds = 0.0
    """Its service time, as estimated when it was put into a local queue or started."""
    promised_in_s: Seconds | None = None
    """Until its wait should be over, as the policy estimated."""
    patience_s: Seconds | None = None
    """How late the device may be while this call is the first of its local queue; None: no limit."""
    copy: int = 0
    cold: bool = False
    victims: tuple[tuple[FunctionId, int], ...] = ()
    """The copies that were evicted for it."""
    size: float = 0.0
    grant: int = 0
    """The number of its grant; the calls of one number run together. 0: it waits."""
    compute: int = 0
    """What the grant holds of the device's compute."""
    free_in_s: Seconds = 0.0
    """Until the grant should end."""
    neighbours: int = 0
    """The most grants that ran beside it."""
    goal_s: Seconds | None = None
    """`asked.goal_s`, in docs that are older than `asked`."""
    asked: Asked | None = None
    ahead: bool = False
    """The call begins when the grant ends that runs on its copy."""


class BackoffDoc(Struct, frozen=True):
    """The pause of a function whose loads fail: see `gpufaas_scheduler.world.backoff`."""

    failures: int
    """Failed loads in a row."""
    reason: str | None = None
    """Why the last load failed; None: a copy serves, or has loaded since."""
    for_s: Seconds = 0.0
    """Since the first of `failures`."""
    retry_in_s: Seconds = 0.0
    """Until it may be loaded again; below zero: it may be now."""
    loaded_for_s: Seconds | None = None
    """Since a load succeeded; None: the last one failed."""


class ResidentDoc(Struct, frozen=True, omit_defaults=True):
    """An entry of a device's LRU list."""

    function: FunctionId
    memory: Bytes
    """The memory that it is charged."""
    idle_s: Seconds
    """Since it last began to serve, or since the start of its load."""
    copy: int = 0
    loading: bool = False
    ready_in_s: Seconds = 0.0
    """Until the estimated end of its load; below zero: it is late, or has been ready for this long."""
    running: int = 0
    draining: bool = False
    limit: Bytes = 0
    """What its worker may use; 0: what it is charged."""
    asked: bool = False
    """It runs a call, and was asked to give back what it was lent."""
    share: int = 0
    """The policy's limit, as `reserve`, `slots` and `batch` are; 0: the policy has set none."""
    reserve: int = 0
    slots: int = 0
    batch: int = 0
    parts: tuple[Part, ...] = ()
    """The parts of a copy on several devices: on the first device all of them, on the others the one there. Other
    copies have none."""


class DeviceDoc(Struct, frozen=True):
    """A device as the scheduler sees it: ``state/devices/NODE/DEV``."""

    device: Device
    status: str
    """``idle``, ``busy`` (with a placed function's call) or ``loading`` (without a call)."""
    finish_s: Seconds
    """Estimated time until it has nothing to do."""
    residents: tuple[ResidentDoc, ...]
    """Least recently used first."""
    order: int
    """How many joined before it."""
    running: tuple[CallDoc, ...] = ()
    """The calls of placed functions; the first has the device."""
    local: tuple[CallDoc, ...] = ()
    """The local queue."""
    local_s: Seconds = 0.0
    preload: CopyId | None = None
    """The copy that the policy loads without a call."""
    free_in_s: Seconds = 0.0
    """Estimated time until the call or load that has the device ends; below zero: it is late."""
    busy_for_s: Seconds = 0.0
    """Since it became busy; 0.0 when it is idle."""
    busy_s: Seconds = 0.0
    """How long it was busy before that."""
    starts: int = 0
    served: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    closed: bool = False
    """The device is being drained: it takes no new calls."""
    at_s: Seconds = 0.0
    """On the writer's clock: comparable with docs of the same epoch only."""
    epoch: int = 0
    seq: int = 0
    """Grows with each write of an epoch, over all keys."""


class CostsDoc(Struct, frozen=True):
    """A function's costs on devices of one kind, and which of the figures were measured."""

    load_s: Seconds
    service_s: Seconds
    occupation: Bytes
    loaded: bool
    served: bool
    sized: bool
    measured: bool
    least: Bytes = 0
    """See `world.costs.Costs`."""
    times: TimesDoc | None = None
    """How service times vary."""
    ratios: tuple[RatioDoc, ...] = ()
    """How they depend on batches, shares and neighbours."""
    batch: float = 1.0
    """How many calls start together of a function whose batches adapt, see `world.batch_size`."""
    loads: dict[str, Seconds] = {}
    """Load times from other tiers than ``disk``, by tier."""
    read_s: Seconds = 0.0
    """The part of a load from disk in which weights are read."""
    room: tuple[int, int, int] | None = None
    """`world.batch_size.Room`: of a function whose batch ran out of memory."""
    parked_bytes: Bytes = 0
    """What a parked copy holds of its device."""


class FunctionDoc(Struct, frozen=True):
    """A revision as the scheduler sees it: ``state/functions/FUNCTION``."""

    function: Function
    """The function as it was deployed."""
    holders: tuple[Holder, ...]
    """Its copies that take calls, loading ones included, oldest first."""
    next_copy: int = 0
    """The number of its next copy."""
    draining: tuple[Holder, ...] = ()
    """Its copies that take no new calls."""
    ready: tuple[Holder, ...] = ()
    """The loaded copies of a direct function with several, in the order in which they take calls."""
    called: float = 0.0
    """Its arrivals, weighted by age, as of `called_age_s` ago."""
    called_age_s: Seconds = 0.0
    desired: int | None = None
    """The copies that it should have since it was scaled; None: its calls decide."""
    held_s: Seconds = 0.0
    """Until the autoscaler may take some of them away."""
    eager: bool = False
    excess: int = 0
    costs: dict[str, CostsDoc] = {}
    """The costs of the function, by kind of device."""
    starved: str | None = None
    """Why no device has enough memory for its load; set when a load runs out of memory."""
    backoff: BackoffDoc | None = None
    """None: none of its loads failed recently."""
    removed: bool = False
    """It takes no new calls."""
    waiting: int = 0
    running: int = 0
    at_s: Seconds = 0.0
    epoch: int = 0
    seq: int = 0


class EngineDoc(Struct, frozen=True):
    """The engine's state that belongs to no device and no function: ``state/engine``."""

    policy: str
    grant: int
    """The number of the last grant."""
    next_number: int
    """The next call's arrival number."""
    joined: int = 0
    """Devices that have joined so far."""
    waiting: tuple[CallDoc, ...] = ()
    """The first calls of the queues, by arrival; up to a limit. Those of local queues are in the docs of devices."""
    waiting_count: int = 0
    """How many calls wait, those in local queues included."""
    reserved_in_s: Seconds | None = None
    """For this long no further device is reserved for a call that has waited too long."""
    cleared: tuple[DeviceId, CallId] | None = None
    """The device that takes no calls until it has room for this one."""
    pauses_for_s: Seconds = 0.0
    """For this long no other device is cleared."""
    wakes: tuple[tuple[str, Seconds], ...] = ()
    """Until the policy wants to run again, by key."""
    plan: PlacementPlan | None = None
    """The plan in force."""
    planned: bool = False
    """The policy set it, and has not run for it yet."""
    ordered: tuple[tuple[OrderId, str], ...] = ()
    """The open orders and their kinds."""
    orders: int = 0
    """The number of the last order."""
    unmet: tuple[tuple[str, str], ...] = ()
    """Kinds whose last order failed, and why."""
    releasing: tuple[tuple[NodeId, bool], ...] = ()
    """Nodes that are given back, and whether the provider was told."""
    declined: tuple[tuple[NodeId, FunctionId, Seconds], ...] = ()
    """Weights that a node did not bring into its host tier when it was asked, and how long ago that was."""
    policy_state: bytes | None = None
    """What the policy keeps for its successor; None: nothing."""
    first_call_age_s: Seconds | None = None
    offered_s: Seconds = 0.0
    """Offered load: service times of the arrivals, weighted by age, as of `offered_age_s` ago."""
    offered_age_s: Seconds = 0.0
    homeless: tuple[FunctionId, ...] = ()
    """Direct functions with calls and without a copy. The engine serves this list and the next three in their order."""
    short: tuple[FunctionId, ...] = ()
    """Functions with fewer copies than they should have."""
    surplus: tuple[FunctionId, ...] = ()
    """Functions with copies to give up."""
    orphaned: tuple[FunctionId, ...] = ()
    """Placed functions with waiting calls that no device held when they began to wait."""
    at_s: Seconds = 0.0
    epoch: int = 0
    seq: int = 0
