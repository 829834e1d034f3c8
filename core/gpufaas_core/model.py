"""The nouns of the engine: devices, functions as the scheduler sees them, profiles, and status for people."""

from typing import Annotated, Final, NewType, TypeAlias

from msgspec import Meta, Struct, field

from gpufaas_core._types import Bytes as Bytes
from gpufaas_core._types import Seconds as Seconds
from gpufaas_core.constraints import Constraint
from gpufaas_core.owners import CALLS

CallId = NewType("CallId", str)
"""In a cluster an id ends in ``@GATEWAY``: it is unique without asking anybody, and says whom to answer."""
FunctionId = NewType("FunctionId", str)
"""A revision of a deployed function, ``NAME.NAMESPACE@REVISION``. Opaque to the engine."""
CopyId: TypeAlias = str
"""The name of one copy of a function; see `copy_id`."""
NodeId = NewType("NodeId", str)
OrderId = NewType("OrderId", str)
"""``EPOCH-NUMBER``: of an order of one node."""
NO_ORDER: Final = OrderId("")
DeviceId = NewType("DeviceId", str)
"""``NODE/cuda:0``, ``NODE/cpu:1``."""


def copy_id(function: FunctionId, copy: int) -> CopyId:
    """Return the id of copy number *copy* of *function*."""
    return f"{function}#{copy}"


def copy_of(id_: CopyId) -> tuple[FunctionId, int]:
    """Return function and number of the copy *id_*: the inverse of `copy_id`."""
    function, _, copy = id_.rpartition("#")
    return FunctionId(function), int(copy)


def name_of(function: FunctionId) -> str:
    """Return the ``NAME.NAMESPACE`` of a revision: what plans call it."""
    return function.partition("@")[0]


def node_of(device: DeviceId) -> NodeId:
    """Return the node of *device*: what precedes the last ``/`` of its id."""
    return NodeId(device.rpartition("/")[0])


def gateway_of(call: CallId) -> str:
    """Return the gateway that *call* was made at: what follows the last ``@`` of its id."""
    return call.rpartition("@")[2]


ALL_COMPUTE: Final = 100
"""The whole compute of a device, in per cent."""


class Device(Struct, frozen=True):
    """
    A GPU, or a share of a machine's CPU memory.

    Its *capacity* is `memory`, what workers may have of it in bytes, and `compute`, in per cent.
    """

    id: DeviceId
    kind: str
    """Devices of one kind share profiles: ``cpu``, or the GPU's product name."""
    memory: Bytes
    labels: dict[str, str] = field(default_factory=dict)
    """Constraints compare with these (`gpufaas_core.constraints`)."""
    compute: int = ALL_COMPUTE
    host_memory: Bytes = 0
    """The memory of its node for weights, which the devices of the node share."""
    parks: bool = False
    """Its node can park copies."""
    ahead: bool = False
    """Its node takes calls ahead, and can give them back (`Grant.ahead_s`)."""
    loads_parts: bool = False
    """Its node can load a copy with parts on several devices, this one among them."""
    # Journals of before do not have the following: the engine took it then that each node fetches as it is told.
    fetches: bool = True
    """Its node carries out `messages.FetchBundle`."""
    fetches_from: bool = True
    """Its node fetches from the node that a `Fetch` names."""
    fetches_ranges: bool = True
    """Its node fetches only the ranges that a `Fetch` names."""
    price_per_h: float = 0.0
    """The price of its node, as `Offer.price_per_h`; 0.0: not known."""

    @property
    def node(self) -> NodeId:
        return node_of(self.id)


class SizesDoc(Struct, frozen=True):
    """
    How service times depend on the size of requests: the sums of a weighted least-squares line. The newest call has
    weight `unit`.
    """

    unit: float
    weight: float
    x: float
    y: float
    xx: float
    xy: float
    yy: float
    least_s: Seconds
    """The shortest time seen."""
    most_s: Seconds
    """The longest time seen."""


class TimesDoc(Struct, frozen=True):
    """
    How service times vary: a histogram in logarithmic buckets, and sums, of the ratio of actual to estimated time. The
    newest call has weight `unit` (`gpufaas_scheduler.world.times.ServiceTimes`, docs/adr/0027).
    """

    calls: int
    unit: float
    sums: tuple[float, float, float]
    """Sums of the weights, of the weighted ratios, and of the weighted squares of ratios."""
    first: int
    """The bucket of the first weight. Bucket 40 holds ratios near 1; each bucket's ratios are 1.25 times the last's."""
    weights: tuple[float, ...]
    sizes: SizesDoc | None = None
    centred: bool = False
    """The estimates followed the times seen."""


class RatioDoc(Struct, frozen=True):
    """How long grants take that run in another way than alone, in units of the time alone."""

    batch: int
    """Calls of a grant."""
    share: int
    """The share of the compute that the copy holds, in per cent; 0: it is not capped."""
    neighbours: int
    """Grants that ran beside it."""
    ratio: float
    grants: int
    """The number of grants seen."""


_Measured = Annotated[Seconds, Meta(ge=0.0, le=1e6)]
_Size = Annotated[int, Meta(ge=1, le=1_000_000)]


class TakenBatch(Struct, frozen=True, omit_defaults=True):
    """What was measured of batches of one size, with all of the compute of the device."""

    p50_s: _Measured
    p95_s: _Measured
    timed: _Size
    """The number of batches that were timed."""
    uses: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    """How much of the compute of the device a batch uses, in per cent; None: not measured."""


class Taken(Struct, frozen=True, omit_defaults=True):
    """A profile that was taken: measured on purpose, and not learnt from calls (docs/adr/0072)."""

    revision: str
    """The revision of the function that was measured."""
    at: Seconds
    """When it was, as Unix time."""
    load_s: _Measured
    memory: Annotated[Bytes, Meta(ge=0, lt=1 << 60)]
    """The reservation that follows from the measured peak."""
    batches: dict[_Size, TakenBatch]
    """Alone, by the calls of a batch."""
    together: dict[_Size, TakenBatch] = {}
    """The same where `at_once` of them ran beside each other on one copy."""
    at_once: _Size = 1
    torch: str = ""
    """The version of torch that the device says; empty: none. `driver` likewise."""
    driver: str = ""


class Profile(Struct, frozen=True):
    """What a function costs on one kind of device: typical times to load and to serve, and peak memory."""

    load_s: Seconds
    """The time of a load from disk."""
    service_s: Seconds
    occupation: Bytes
    measured: bool = False
    """True: learnt from calls. False: declared, or derived from the weights."""
    times: TimesDoc | None = None
    """How service times vary about `service_s`; None: not known."""
    estimated: tuple[str, ...] = ()
    """Which of ``load``, ``call`` and ``memory`` a measured profile only estimates, since they are not measured yet."""
    ratios: tuple[RatioDoc, ...] = ()
    """How service times depend on batches, shares and neighbours."""
    loads: dict[str, Seconds] = {}
    """Load times from other tiers than ``disk``, by tier (`messages.Loaded.tier`)."""
    read_s: Seconds = 0.0
    """The part of `load_s` in which weights are read; 0.0: not known."""
    taken: Taken | None = None
    """What was measured on purpose; None: nothing was."""


class Learnt(Struct, frozen=True):
    """A profile as it is now, to be stored."""

    function: FunctionId
    kind: str
    profile: Profile


SHARINGS: Final = ("exclusive", "time", "spatial", "share", "auto")
"""The ways in which a function shares the compute of a device; see `Need.sharing`."""


class Need(Struct, frozen=True):
    """
    What a copy asks of its device beside memory, and how calls run on it.

    Memory is not here: profiles have it by kind of device.
    """

    compute: int = ALL_COMPUTE
    """In per cent of a device. 100: it has the device to itself while it runs. 0: it needs none (a CPU function)."""
    sharing: str = "exclusive"
    """
    ``exclusive``: 100 while it runs. ``time``: the same, and one grant at a time. ``spatial``: `compute` while it runs,
    without a cap. ``share``: each copy holds `compute` as long as it is on the device, and is capped at it. ``auto``:
    the policy decides, by `contract.Limit`.
    """
    slots: int = 1
    """Grants that one copy runs at once."""
    batch_max: int = 1
    """Calls of one grant at most."""
    batch_wait_s: Seconds = 0.0
    """How long a call may wait for others of its batch; 0: only calls that wait already join."""
    latency_goal_s: Seconds | None = None
    """Nearly all calls should be answered within this time of their arrival."""
    batch_adaptive: bool = False
    """Its batches grow and shrink with their measured times, within `batch_max` and `latency_goal_s`."""

    @property
    def held(self) -> int:
        """What a copy holds of its device's compute as long as it is there."""
        return self.compute if self.sharing == "share" else 0

    @property
    def reserved(self) -> int:
        """What a grant holds of the device's compute while it runs."""
        return 0 if self.sharing == "share" else self.compute


class Part(Struct, frozen=True):
    """What a copy has of one device. Nearly all copies have one part; a partitioned model has several."""

    device: DeviceId
    memory: Bytes
    """Its reservation there."""
    share: int = 0
    """The compute that it holds there for good, in per cent; 0: each grant reserves what it needs."""


class Replica(Struct, frozen=True, omit_defaults=True):
    """A copy that a plan asks for."""

    function: str
    """``NAME.NAMESPACE``: whatever revision of it there is (`name_of`)."""
    device: DeviceId
    share: int = 0
    """The compute of the device that the copy holds, and is capped at, in per cent; 0: no cap."""
    reserve: int = 0
    """Without a share: what a grant counts for while it runs, in per cent; 0: as the function says."""
    slots: int = 0
    """The most grants that it runs at once; 0: as the function says. `batch` likewise: the most calls of a grant."""
    batch: int = 0
    wait_s: Seconds | None = None
    """The longest that a call waits for others of its batch; None: as the function says. It is the same for all
    replicas of a function."""
    pinned: bool = False
    """A person has set it: solvers leave it as it is."""


class PlacementPlan(Struct, frozen=True):
    """
    Which copies there should be, of the functions that it names. It owns their copies (`gpufaas_core.owners`): they
    are on the devices that it says, as long as one of these is there.
    """

    version: int
    """Grows with each plan."""
    replicas: tuple[Replica, ...] = ()
    notes: tuple[str, ...] = ()
    """What people should know of it."""


class PlannedCopy(Replica, frozen=True, omit_defaults=False):
    """A replica of the plan in force, and what became of it."""

    state: str = "unknown"
    """``resident``, ``loading``, ``absent`` (it should be there and is not), ``away`` (its device is), or ``unknown``
    (the engine has not said yet)."""
    reason: str = ""
    """Why an absent one is not there yet."""


class PlanStatus(Struct, frozen=True):
    """The plan in force, and what became of it."""

    version: int
    copies: tuple[PlannedCopy, ...] = ()


class Asked(Struct, frozen=True, omit_defaults=True):
    """What a request asks for beside its function. Headers say it for one call; annotations are the defaults."""

    goal_s: Seconds | None = None
    """It should be answered within this time of its arrival. None: within its function's `Need.latency_goal_s`."""
    min_accuracy: float | None = None
    """The least accuracy of the variant that answers, in the measure of its task."""
    max_cost: float | None = None
    """The most that a device may cost per hour on which it runs, as `Offer.price_per_h`."""
    prefer: str = ""
    """One of `PREFERENCES`; empty: as the platform sees fit."""
    model: str = ""
    """Only variants of this model."""
    variant: str = ""
    """This variant only."""


PREFERENCES: Final = ("cheapest", "fastest", "accurate")


class Offer(Struct, frozen=True):
    """A kind of node that can be procured."""

    kind: str
    """The kind of its devices."""
    memory: Bytes
    """The memory of each device."""
    devices: int = 1
    """The devices of one node."""
    price_per_h: float = 0.0
    """The price of one node, in the provider's currency."""
    delay_s: Seconds = 0.0
    """From the order until its devices join."""
    limit: int = 0
    """Nodes that can be procured from now on."""


class Function(Struct, frozen=True):
    """What the scheduler knows of a deployed revision."""

    id: FunctionId
    digest: str
    """sha256 of its bundle. It is in the grant and tells the node which code and weights to use."""
    need: Need = Need()
    profiles: dict[str, Profile] = field(default_factory=dict)
    """By device kind; ``"*"`` is for all other kinds."""
    min_copies: int = 0
    """This many copies are loaded without a call and never evicted for other functions."""
    max_queue: int = 1000
    max_copies: int = 0
    """A cap on what `Scaled` asks for; 0: none. Replicas that a policy makes for waiting calls do not count."""
    constraints: tuple[Constraint, ...] = ()
    """It runs only on devices whose labels satisfy all of them. A revision keeps those of its first deployment."""
    floor: Bytes = 0
    """The memory that it declares: no reservation is smaller, whatever is measured. 0: it declares none."""
    elastic: bool = False
    """On a CPU device, its workers may use free memory until it is needed for a reservation."""
    idempotent: bool = False
    """A call that was interrupted may run once more."""
    tenant: str = ""
    """Its namespace: whose share of the cluster its calls count for."""
    weight: float = 1.0
    """The weight of its tenant, where a policy divides the cluster."""
    priority: int = 0
    """Higher goes first, where a policy knows priorities."""
    task: str = ""
    """Functions of one task are variants of each other: a policy may choose between them. Empty: none."""
    accuracy: float = 0.0
    """The accuracy of this variant, in the measure of its task."""
    model: str = ""
    """The model that it is a variant of; empty: not said."""
    owner: str = CALLS
    """Who decides about its copies while no plan names it: one of `owners.OWNERS`."""
    sheds: bool = False
    """A call that cannot be answered in time is refused when it comes."""

    def profile(self, kind: str) -> Profile:
        """:raises KeyError: neither this kind nor ``"*"`` has a profile"""
        return self.profiles.get(kind) or self.profiles["*"]


class ResidentStatus(Struct, frozen=True):
    """One copy of a function in a device's memory."""

    function: FunctionId
    memory: Bytes
    running: int
    """Calls; those of a batch count one by one."""
    loading: bool
    pinned: bool
    last_used: Seconds
    draining: bool = False
    """It takes no new calls, and is evicted once its calls have ended."""
    copy: int = 0
    """Its number: of a function, no two copies have the same, on whatever devices."""
    limit: Bytes = 0
    """What it may use now: `memory`, and the free memory that is lent to it."""
    share: int = 0
    """Per cent of the device's compute that it holds while it is there; 0: its calls take what they need."""
    tier: str = ""
    """Where its weights came from: ``parked``, ``host``, ``peer``, ``disk`` or ``store``. Empty: not known (yet)."""
    silent: bool = False
    """Its worker gives no sign of life: it counts as `draining` until it does, and is not evicted for that."""


class ParkedStatus(Struct, frozen=True):
    """A copy that is parked: its process and its weights are in the memory of its node."""

    function: FunctionId
    copy: int
    memory: Bytes = 0
    """What it holds of its device all the same."""


class DeviceStatus(Struct, frozen=True):
    """A device as the engine sees it. `resident` is in LRU order, least recently used first."""

    device: Device
    used: Bytes
    busy: bool
    resident: tuple[ResidentStatus, ...]
    local_queue: int
    served: int
    hits: int
    misses: int
    evictions: int
    estimated_finish_s: Seconds
    """Estimated seconds until it has nothing to do; 0.0 when it is idle."""
    busy_s: Seconds = 0.0
    """How long it has been `busy` in all since it joined."""
    reserved: int = 0
    """Per cent of its compute that shares of copies hold, and running calls reserve."""
    parked: tuple[ParkedStatus, ...] = ()
    """In the order in which they were parked."""


class Failing(Struct, frozen=True):
    """
    The last load of a function failed. Calls try again at once; after three failures, one call at a time does, after a
    pause, and others are refused.
    """

    reason: str
    failures: int
    """Loads that failed in a row."""
    for_s: Seconds
    """The seconds since the first of them."""
    retry_in_s: Seconds
    """Until a call, or its minimum of copies, may try again; 0: the next call does."""


class EngineStatus(Struct, frozen=True):
    """The whole cluster as the engine sees it."""

    policy: str
    devices: tuple[DeviceStatus, ...]
    queued: dict[FunctionId, int]
    """Calls in the global and local queues, by function; functions without any are left out."""
    running: dict[FunctionId, int]
    desired: dict[FunctionId, int] = field(default_factory=dict)
    """The copies that scaled functions should have, within their bounds. Other functions are left out."""
    failing: dict[FunctionId, Failing] = field(default_factory=dict)
    """Functions without a copy that serves, whose last load failed."""
    lacking: dict[FunctionId, str] = field(default_factory=dict)
    """Functions with fewer copies than they should have, for which no device has room; and why."""
    kept_out: dict[FunctionId, str] = field(default_factory=dict)
    """Functions whose calls are refused since copies that are never evicted hold what they need; and why."""
    rolling: tuple[FunctionId, ...] = ()
    """Revisions whose next copy waits until a draining copy of the one that they succeed has made room."""
    held: tuple[FunctionId, ...] = ()
    """Those of `desired` whose number was set so lately that the autoscaler takes no copies away."""
    age_s: Seconds = 0.0
    """How long ago a gateway lost the scheduler that said this; 0: it is of now."""
    plan: PlanStatus | None = None
    """None: no plan is in force."""
    ordered: dict[OrderId, str] = field(default_factory=dict)
    """The kinds of the nodes that were ordered and have not joined."""
    unmet: dict[str, str] = field(default_factory=dict)
    """Kinds whose last order failed, and why."""
    offers: tuple[Offer, ...] = ()
    """The kinds of nodes that can be ordered."""


class NodeView(Struct, frozen=True, array_like=True):
    """What gateways know of a node."""

    id: NodeId
    address: str
    """Where gateways reach it."""
    devices: list[Device] = field(default_factory=list)
    draining: bool = False
    note: str = ""
    """What is wrong with it, for people: a clock that is off, a device that is gone."""
    version: str = ""
    joined_s: Seconds = 0.0
    """How long ago."""
    makes: str = ""
    """How it runs images: in ``containers`` or ``pods``; empty: it runs none yet."""
