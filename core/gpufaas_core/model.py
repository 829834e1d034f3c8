"""The nouns of the engine: devices, functions as the scheduler sees them, profiles, and status for people."""

from typing import NewType, TypeAlias

from msgspec import Struct, field

from gpufaas_core._types import Bytes, Seconds
from gpufaas_core.constraints import Constraint

__all__ = [
    "Bytes",
    "CallId",
    "CopyId",
    "Device",
    "DeviceId",
    "DeviceStatus",
    "EngineStatus",
    "Failing",
    "Function",
    "FunctionId",
    "NodeId",
    "NodeView",
    "Profile",
    "ResidentStatus",
    "Seconds",
    "copy_id",
    "gateway_of",
]  # fmt: skip

CallId = NewType("CallId", str)
"""In a cluster an id ends in ``@GATEWAY``: it is unique without asking anybody, and says whom to answer."""
FunctionId = NewType("FunctionId", str)
"""A revision of a deployed function, ``NAME.NAMESPACE@REVISION``. Opaque to the engine."""
CopyId: TypeAlias = str
"""One of a function's copies on a device, the item of the cache: see `copy_id`. The first has the function's own id."""
NodeId = NewType("NodeId", str)
DeviceId = NewType("DeviceId", str)
"""``NODE/cuda:0``, ``NODE/cpu:1``."""


def copy_id(function: FunctionId, copy: int) -> CopyId:
    """Return the id of copy number *copy* of *function* on whichever device; number 0 is called like the function."""
    return f"{function}#{copy}" if copy else function


def gateway_of(call: CallId) -> str:
    """Return the gateway that *call* was made at: what follows the last ``@`` of its id."""
    return call.rpartition("@")[2]


class Device(Struct, frozen=True):
    """A place where models live. `memory` is what may be promised to workers, in bytes."""

    id: DeviceId
    kind: str
    """Devices of one kind share profiles: ``cpu``, or the GPU's product name."""
    memory: Bytes
    labels: dict[str, str] = field(default_factory=dict)
    """What constraints speak of (`gpufaas_core.constraints`)."""

    @property
    def node(self) -> NodeId:
        return NodeId(self.id.rpartition("/")[0])


class SizesDoc(Struct, frozen=True):
    """
    How service times depend on the size of requests: sums of a weighted least-squares line, the newest call's weight
    being `unit`.
    """

    unit: float
    weight: float
    x: float
    y: float
    xx: float
    xy: float
    yy: float
    least_s: Seconds
    """The shortest that was seen."""
    most_s: Seconds


class TimesDoc(Struct, frozen=True):
    """
    How service times vary: of the ratios of what calls took to what was estimated, a histogram in logarithmic buckets
    and sums. The newest call weighs `unit` (`gpufaas_scheduler.world.times.ServiceTimes`, docs/adr/0027).
    """

    calls: int
    unit: float
    sums: tuple[float, float, float]
    """Of the weights, of weights times ratios, of weights times squares of ratios."""
    first: int
    """The bucket that `weights` begins with; bucket 40 is about a ratio of 1, each is 1.25 times as far as the last."""
    weights: tuple[float, ...]
    sizes: SizesDoc | None = None
    centred: bool = False
    """The estimates followed what was seen."""


class Profile(Struct, frozen=True):
    """What a function costs on one kind of device. Load and service are typical times, occupation is a peak."""

    load_s: Seconds
    service_s: Seconds
    occupation: Bytes
    measured: bool = False
    """False: declared or derived from the weights; True: learnt from real calls."""
    times: TimesDoc | None = None
    """How service times vary about `service_s`; None: nothing is known."""
    estimated: tuple[str, ...] = ()
    """Of a measured one: what of ``load``, ``call`` and ``memory`` was not measured yet."""


class Function(Struct, frozen=True):
    """A revision as the scheduler needs to know it."""

    id: FunctionId
    digest: str
    """sha256 of its bundle: travels in the lease, so that a node can tell which code and weights are meant."""
    exclusive: bool = True
    """Has its device to itself while it runs (model functions). Otherwise `slots` calls at once per worker."""
    slots: int = 1
    profiles: dict[str, Profile] = field(default_factory=dict)
    """By device kind. The key ``"*"`` is used for kinds that have none."""
    min_copies: int = 0
    """This many copies are loaded without a call, and are not evicted for others."""
    max_queue: int = 1000
    max_copies: int = 0
    """`Scaled` asks for no more than these; 0: no cap. Replicas that a policy makes for waiting calls do not count."""
    constraints: tuple[Constraint, ...] = ()
    """It runs only on devices whose labels satisfy all of them. Of the revision: those of its first deployment hold."""
    floor: Bytes = 0
    """What it declares to need: no reservation of it is smaller, whatever is measured. 0: it declares nothing."""
    elastic: bool = False
    """Its workers may use what is free on a CPU device, until somebody needs it."""

    def profile(self, kind: str) -> Profile:
        """:raises KeyError: neither this kind nor ``"*"`` has a profile"""
        return self.profiles.get(kind) or self.profiles["*"]


class ResidentStatus(Struct, frozen=True):
    """One copy of a function in a device's memory."""

    function: FunctionId
    memory: Bytes
    running: int
    loading: bool
    pinned: bool
    last_used: Seconds
    draining: bool = False
    """It takes no new call, and is evicted when those that it has are done."""
    copy: int = 0
    """Which of the function's copies on this device: the least number that was free."""
    limit: Bytes = 0
    """What it may use now: `memory`, and what is lent to it as long as nobody needs it."""


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
    """Seconds from now until it has nothing to do, by estimate; 0.0 when it is idle."""
    busy_s: Seconds = 0.0
    """How long it was `busy` since it joined."""


class Considered(Struct, frozen=True):
    """One thing that could be done with a call."""

    option: str
    """``hit``, ``load``, ``wait``, or another word of the policy's."""
    where: str
    """A device, or the function whose holders are waited for."""
    estimate_s: Seconds
    """What it was taken to cost, in the policy's terms; to be compared with the others only."""


class ServiceEstimate(Struct, frozen=True):
    """How long one call should take on devices of a kind, load and waiting aside."""

    kind: str
    estimate_s: Seconds
    """The mean: of the function's calls, or of those of this call's size."""
    p50_s: Seconds
    """Half of such calls take no longer."""
    p90_s: Seconds
    calls: int
    """So many were seen; with fewer than ten, a spread of 100 % is assumed in part."""
    size: float = 0.0
    """The call's, where the estimate depends on it."""


class Explanation(Struct, frozen=True):
    """Why a call of a model function was started where and when it was, or why it still waits."""

    call: CallId
    function: FunctionId
    policy: str
    state: str
    """``waiting``, ``local`` (in a device's local queue), ``running`` or ``ended``."""
    at: Seconds
    """When it was started, or when this was asked; by the engine's clock."""
    waited_s: Seconds
    """From its arrival until then."""
    device: DeviceId | None = None
    hit: bool | None = None
    via: str | None = None
    """The queue that it came from: ``global`` or ``local``."""
    victims: tuple[CopyId, ...] = ()
    rule: str = ""
    """The condition that held, in words; empty if the policy does not say."""
    options: tuple[Considered, ...] = ()
    passed_over: tuple[CallId, ...] = ()
    """The first calls, by arrival, that arrived earlier and were still waiting when it was started."""
    passed_over_count: int = 0
    overtaken_by: tuple[CallId, ...] = ()
    """The first calls that arrived later and were started before it; as far as they are remembered."""
    overtaken_by_count: int = 0
    service: ServiceEstimate | None = None
    """Where it was started; of one that waits, on the kind of device that joined first."""


class Failing(Struct, frozen=True):
    """A function does not load: its calls are refused, but for one at a time that tries it."""

    reason: str
    failures: int
    """Loads that failed in a row."""
    for_s: Seconds
    """Since the first of them."""
    retry_in_s: Seconds
    """Until a call, or its minimum of copies, tries it again; 0: the next call does."""


class EngineStatus(Struct, frozen=True):
    """The whole cluster as the engine sees it."""

    policy: str
    devices: tuple[DeviceStatus, ...]
    queued: dict[FunctionId, int]
    """Calls in the global and local queues, by function; functions without any are left out."""
    running: dict[FunctionId, int]
    desired: dict[FunctionId, int] = field(default_factory=dict)
    """Copies that a function should have since it was `Scaled`, within its bounds; left out: as calls ask for them."""
    failing: dict[FunctionId, Failing] = field(default_factory=dict)
    """Functions whose calls are refused since their loads fail."""


class NodeView(Struct, frozen=True, array_like=True):
    """A node as gateways need to know it."""

    id: NodeId
    address: str
    """Where gateways reach it."""
    devices: list[Device] = field(default_factory=list)
    draining: bool = False
    note: str = ""
    """What is wrong with it, for people: a clock that is off, a device that went."""
    version: str = ""
    joined_s: Seconds = 0.0
    """How long ago."""
    makes: str = ""
    """Of images: ``containers`` or ``pods``; empty: nothing, so far."""
