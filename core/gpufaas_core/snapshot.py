"""
What outlives a scheduler: what a node knows of itself, and what the scheduler writes behind for whoever comes after it.

A `NodeSnapshot` is the truth about what is in a node's memory and what runs there. The docs are the engine's own state:
what no node knows (who waits, what was learnt, in which order things happened). Where they differ, the node is right.

No clock of one machine means anything on another: times are ages and durations, as of the moment at which the value was
made. Docs of one epoch say by `at_s` how far apart these moments were.
"""

from typing import TypeAlias

from msgspec import Struct

from gpufaas_core._types import Bytes, Seconds
from gpufaas_core.model import CallId, CopyId, Device, DeviceId, Function, FunctionId, TimesDoc

# --- what a node knows ------------------------------------------------------------------------------------------------


class ResidentSnapshot(Struct, frozen=True):
    """One worker that loads or is ready. Workers that are ending are not told: their memory is on its way back."""

    function: FunctionId
    digest: str
    memory: Bytes
    """Its reservation in bytes, as the scheduler asked for it last."""
    copy: int = 0
    idle_s: Seconds = 0.0
    """Since its last start of service; since the start of its load if it never served."""
    loading: bool = False
    load_age_s: Seconds = 0.0
    """Since the start of its load; 0.0 if that is over."""


class RunningCall(Struct, frozen=True):
    """A call that holds a lease of one of the node's workers and is not over."""

    call: CallId
    function: FunctionId
    copy: int = 0
    age_s: Seconds = 0.0
    """Since it began; before that, since its lease was opened."""
    begun: bool = False
    """The worker has it. False: it waits for the end of the load, or its body has not come yet."""
    cold: bool = False
    """Its lease was the one that had the worker started."""
    abandoned: bool = False
    """Its caller is gone, and the worker was told so."""


class DeviceSnapshot(Struct, frozen=True):
    """What is in one device's memory, and what runs there."""

    device: Device
    residents: tuple[ResidentSnapshot, ...] = ()
    """Least recently used first."""
    running: tuple[RunningCall, ...] = ()
    """In the order in which their leases were opened. More than one exclusive call may be among them: without a
    scheduler, gateways send calls to models that they know to be ready, and agree with nobody."""


class NodeSnapshot(Struct, frozen=True):
    """What a node reports when it joins, or comes back."""

    devices: tuple[DeviceSnapshot, ...]
    epoch: int = 0
    """The highest that it has obeyed: a scheduler of a lower one has been replaced."""


# --- what the scheduler keeps -----------------------------------------------------------------------------------------


Holder: TypeAlias = tuple[DeviceId, int]
"""Where a copy of a function is: device, and its number there."""


class CallDoc(Struct, frozen=True, omit_defaults=True):
    """A call that waits or runs, and its place in the order."""

    call: CallId
    function: FunctionId
    number: int
    """Arrival number: the order of the queue."""
    age_s: Seconds
    """Since it arrived."""
    deadline_in_s: Seconds | None = None
    passes: int | None = None
    """None: as many as the queue's scans say, see `EngineDoc.ends`; a number once it has come back from a device."""
    refusals: int = 0
    aborted: bool = False
    estimate_s: Seconds = 0.0
    """Its service time, as estimated when it was put into a local queue or started."""
    promised_in_s: Seconds | None = None
    """Until its wait should be over, by what the policy estimated."""
    patience_s: Seconds | None = None
    """How late the device may be while this call is the first of its local queue; None: however late."""
    copy: int = 0
    cold: bool = False
    victims: tuple[tuple[FunctionId, int], ...] = ()
    """Which copies left for it."""
    size: float = 0.0


class BackoffDoc(Struct, frozen=True):
    """Of a function whose loads fail, see `gpufaas_scheduler.world.backoff`."""

    failures: int
    """In a row."""
    reason: str | None = None
    """Why its calls are refused; None: they are not."""
    for_s: Seconds = 0.0
    """Since the first of `failures`."""
    retry_in_s: Seconds = 0.0
    """Until it is loaded again; below zero: it may be."""
    loaded_for_s: Seconds | None = None
    """Since a load succeeded; None: the last one failed."""


class ResidentDoc(Struct, frozen=True, omit_defaults=True):
    """An entry of a device's LRU list."""

    function: FunctionId
    memory: Bytes
    """What it is charged."""
    idle_s: Seconds
    """Since its last start of service, or the start of its load."""
    copy: int = 0
    loading: bool = False
    ready_in_s: Seconds = 0.0
    """Until the end of its load, by estimate; below zero: it is late, or was ready so long ago."""
    running: int = 0
    draining: bool = False
    limit: Bytes = 0
    """What its worker may use; 0: what it is charged."""
    asked: bool = False
    """It runs, and was asked to give back what it was lent."""


class DeviceDoc(Struct, frozen=True):
    """A device as the scheduler sees it: ``state/devices/NODE/DEV``."""

    device: Device
    status: str
    """``idle``, ``busy`` (with a model function's call) or ``loading`` (without a call)."""
    finish_s: Seconds
    """Until it has nothing to do, by estimate."""
    residents: tuple[ResidentDoc, ...]
    """Least recently used first."""
    order: int
    """How many joined before it."""
    running: tuple[CallDoc, ...] = ()
    """Of all functions. Of model functions' calls the first has the device."""
    local: tuple[CallDoc, ...] = ()
    """The local queue."""
    local_s: Seconds = 0.0
    preload: CopyId | None = None
    """What the policy loads without a call."""
    free_in_s: Seconds = 0.0
    """Until what has the device is over, by estimate; below zero: it is late."""
    busy_for_s: Seconds = 0.0
    """Since it became busy; 0.0 when it is idle."""
    busy_s: Seconds = 0.0
    """How long it was busy before."""
    starts: int = 0
    served: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    closed: bool = False
    """It is being drained: it takes no new calls."""
    at_s: Seconds = 0.0
    """On the writer's clock: compares with docs of the same epoch only."""
    epoch: int = 0
    seq: int = 0
    """Grows with each write of an epoch, over all keys."""


class CostsDoc(Struct, frozen=True):
    """What is known of a function's costs on devices of one kind, and of each figure whether it was measured."""

    load_s: Seconds
    service_s: Seconds
    occupation: Bytes
    loaded: bool
    served: bool
    sized: bool
    measured: bool
    least: Bytes = 0
    """See `state.Costs`."""
    times: TimesDoc | None = None
    """How service times vary."""


class FunctionDoc(Struct, frozen=True):
    """A revision as the scheduler sees it: ``state/functions/FUNCTION``."""

    function: Function
    """As it was deployed."""
    holders: tuple[Holder, ...]
    """Its copies that take calls, loading ones included, in the order in which they came to be."""
    draining: tuple[Holder, ...] = ()
    """Those that take no new calls."""
    ready: tuple[Holder, ...] = ()
    """Of a CPU function with several copies: the order in which those that are loaded take calls, by calls running."""
    called: float = 0.0
    """Demand: its arrivals, weighted by age, as of `called_age_s` ago."""
    called_age_s: Seconds = 0.0
    desired: int | None = None
    """Copies that it should have since it was scaled; None: as calls ask for them."""
    eager: bool = False
    excess: int = 0
    costs: dict[str, CostsDoc] = {}
    """By device kind."""
    starved: str | None = None
    """Why no device has enough memory for its load, since the last load that ran out."""
    backoff: BackoffDoc | None = None
    """None: no load of it failed of late."""
    removed: bool = False
    """It only serves what it has."""
    waiting: int = 0
    running: int = 0
    at_s: Seconds = 0.0
    epoch: int = 0
    seq: int = 0


class EngineDoc(Struct, frozen=True):
    """What belongs to no device and no function: ``state/engine``."""

    policy: str
    lease: int
    """The number of the last lease."""
    next_number: int
    """The next call's arrival number."""
    joined: int = 0
    """Devices that have joined so far."""
    waiting: tuple[CallDoc, ...] = ()
    """The first calls of the queues by arrival, as many as are kept. Those of local queues are in the devices' docs."""
    waiting_count: int = 0
    """How many wait, those of local queues included."""
    ends: tuple[int, ...] = ()
    """Where the last scans of the queue ended: a call was passed over by each scan that ended behind it."""
    reserved_in_s: Seconds | None = None
    """For so long no other device is reserved for a call that has waited too long."""
    look_in_s: Seconds | None = None
    """Until the policy wants to plan again, should nothing happen before."""
    first_call_age_s: Seconds | None = None
    offered_s: Seconds = 0.0
    """Offered load: service times of the arrivals, weighted by age, as of `offered_age_s` ago."""
    offered_age_s: Seconds = 0.0
    homeless: tuple[FunctionId, ...] = ()
    """CPU functions with calls and without a copy; this and the following in the order in which they are looked at."""
    short: tuple[FunctionId, ...] = ()
    """Functions with fewer copies than they should have."""
    surplus: tuple[FunctionId, ...] = ()
    """Functions with copies to give up."""
    orphaned: tuple[FunctionId, ...] = ()
    """Model functions that wait and that no device held when they began to."""
    at_s: Seconds = 0.0
    epoch: int = 0
    seq: int = 0
