"""
The events that the engine is told, and the commands that it returns.

Events say what happened (past tense), commands say what to do (imperative). Both go into the journal as JSON lines and,
between services, over the wire; their tags are the names there. They are msgspec structs: making one costs a tenth of
making a frozen dataclass, and msgspec encodes them (docs/adr/0002).

Function and `copy` name a copy in the whole cluster: `copy` is its number among all copies of the function that ever
were. Its device tells the node.
"""

from typing import Any

from msgspec import Struct, field

from gpufaas_core._types import Bytes, Seconds
from gpufaas_core.grant import Grant as Grant
from gpufaas_core.grant import Outer as Outer
from gpufaas_core.model import (
    NO_ORDER,
    Asked,
    CallId,
    CopyId,
    Device,
    DeviceId,
    Function,
    FunctionId,
    NodeId,
    Offer,
    OrderId,
    Part,
    PlacementPlan,
    Taken,
)
from gpufaas_core.snapshot import DeviceDoc, DeviceSnapshot, EngineDoc, FunctionDoc, StagedWeights

# --- events -----------------------------------------------------------------------------------------------------------


class DeviceJoined(Struct, frozen=True, tag=True):
    """
    A device joined, for the first time or again. With a snapshot it keeps its models, and the engine takes its running
    calls over; copies of functions that are not deployed are evicted. Without a snapshot it is empty.
    """

    device: Device
    snapshot: DeviceSnapshot | None = None
    staged: tuple[StagedWeights, ...] | None = None
    """All that its node has in its host tier, or brings there; None: nothing new is known of it."""
    order: OrderId = NO_ORDER
    """The order for which its node was started; empty: it was not ordered."""


class DeviceLeft(Struct, frozen=True, tag=True):
    """The device is gone with all that was on it. Others have answered the calls that ran there."""

    device: DeviceId
    reason: str


class DeviceDrained(Struct, frozen=True, tag=True):
    """
    The device takes no new calls and loads nothing more; the calls in its local queue go elsewhere. `drain` false: it
    is taken back.
    """

    device: DeviceId
    drain: bool = True


class FunctionDeployed(Struct, frozen=True, tag=True):
    """A revision may be called from now on. The same id again replaces its limits and profiles."""

    function: Function
    succeeds: FunctionId | None = None
    """The revision whose calls `function` takes over. Before, it gets as many copies as that one, beside them."""


class FunctionRemoved(Struct, frozen=True, tag=True):
    """
    No new calls will come. Calls that wait are served (`drain`), else rejected, and those that load or have no end
    aborted. Calls that run may end; then the function is evicted.
    """

    function: FunctionId
    drain: bool = True


class Scaled(Struct, frozen=True, tag=True):
    """
    A function should have this number of copies, within its bounds. Missing copies are loaded; surplus copies finish
    their calls and go. 0: none until the next call comes; it has no effect while calls wait.
    """

    function: FunctionId
    copies: int
    hold_s: Seconds = 0.0
    """For so long the autoscaler takes none of them away."""


class Arrived(Struct, frozen=True, tag=True):
    call: CallId
    function: FunctionId
    deadline: Seconds | None = None
    """On the engine's clock; None: no deadline."""
    age_s: Seconds = 0.0
    """How long it has waited already, under an older engine or while its gateway was cut off, without a grant that
    reached its gateway. It gets the place in the queue that this age gives it."""
    size: float = 0.0
    """The size of the request, in one unit for all calls of the function; 0.0: not known."""
    outer: Outer | None = None
    """Set if a function made the call."""
    endless: bool = False
    """The deadline is for its start only: once it runs, it may go on (a WebSocket)."""
    asked: Asked | None = None
    """What its caller asks for beside the function; None: nothing."""
    goal_s: Seconds | None = None
    """`Asked.goal_s`, in journals that are older than `asked`."""


class CallerLeft(Struct, frozen=True, tag="Cancelled"):
    """The caller is gone. A waiting call leaves its queue; a running one is aborted, and `Finished` still comes."""

    call: CallId


class Loaded(Struct, frozen=True, tag=True):
    """The worker is ready. `load_s` counts from when the grant was opened and includes the eviction of victims."""

    function: FunctionId
    device: DeviceId
    load_s: Seconds
    occupation: Bytes
    """In bytes, roughly, after the load; `Measured` says more after the first call."""
    copy: int = 0
    tier: str = "disk"
    """Where its weights came from: ``parked``, ``host``, ``peer``, ``disk`` (also if it has none) or ``store``."""
    read_s: Seconds = 0.0
    """The part of `load_s` that a load from the host tier saves: reading or fetching weights; 0.0: not known."""


class CopyFailed(Struct, frozen=True, tag="LoadFailed"):
    """
    The load of a copy failed: its worker has ended, and its memory is free. The node answered its calls; if it ran out
    of memory, or is `blameless`, the node refuses them and they are placed again.
    """

    function: FunctionId
    device: DeviceId
    reason: str
    out_of_memory: bool = False
    """It hit its reservation: a larger one may suffice."""
    copy: int = 0
    blameless: bool = False
    """The node could not start it, for lack of file descriptors: the function is not the cause."""


class Finished(Struct, frozen=True, tag=True):
    """A call no longer uses its worker: the handler has ended; the caller may still be reading."""

    call: CallId
    device: DeviceId
    service_s: Seconds
    """Time that the handler took; 0.0: aborted before it began."""
    ok: bool = True
    """False: it was aborted, or the handler failed. Its time is not learnt then."""
    further: int = 0
    """How many calls ran by its grant beside it, one after another: a gateway kept the grant. All of them ended well,
    but for the last if `ok` is false; if a gateway says it, `service_s` is their mean."""


class Measured(Struct, frozen=True, tag=True):
    """The peak memory of a worker was measured: its charge and the function's profile follow."""

    function: FunctionId
    device: DeviceId
    occupation: Bytes
    """0: not known, since it ran out of memory."""
    copy: int = 0
    out_of_memory: bool = False
    """A call hit the worker's limit: it needed more."""


class Resized(Struct, frozen=True, tag=True):
    """The answer to a `Resize` that takes memory back: the worker may use *memory* now, never less than it uses."""

    function: FunctionId
    device: DeviceId
    memory: Bytes
    copy: int = 0
    asked: Bytes = 0
    """`Resize.memory`. 0: a node of an older release does not say it."""


class ShareKept(Struct, frozen=True, tag=True):
    """A `SetLimit` failed, since the worker with the new share did not load. The old worker goes on with *share*."""

    function: FunctionId
    device: DeviceId
    copy: int
    share: int
    """As in `SetLimit`; 0: no cap."""
    reason: str


class WorkerExited(Struct, frozen=True, tag=True):
    """A worker ended without being evicted; its memory is free. The node answered the calls that ran on it."""

    function: FunctionId
    device: DeviceId
    reason: str
    copy: int = 0


class CopySilent(Struct, frozen=True, tag=True):
    """
    The worker of a copy owes a sign of life: its process is stopped, or its code keeps the thread that would answer. It
    gets no new calls. The node refuses the calls that the worker has not begun. `silent` false: it was heard again.
    """

    function: FunctionId
    device: DeviceId
    copy: int = 0
    silent: bool = True


class NodeRefused(Struct, frozen=True, tag="Refused"):
    """The node took nothing of the call. It is placed again, with its arrival number."""

    call: CallId
    device: DeviceId
    reason: str
    opened: bool = False
    """The node has opened the grant, but the gateway did not reach it: what it loads for the call stays."""
    epoch: int = 0
    number: int = 0
    """The number of the grant; 0: not known. A refusal of an older grant than its call has now says nothing."""
    blameless: bool = False
    """The node would have run it: the call was taken back, or its worker died of other calls, which have failed.
    However often that happens, the call is placed again."""

    @staticmethod
    def of(grant: "Grant", reason: str, opened: bool = False, *, blameless: bool = False) -> "NodeRefused":
        return NodeRefused(grant.call, grant.device, reason, opened, grant.epoch, grant.number, blameless)


class Staged(Struct, frozen=True, tag=True):
    """
    The weights of a function are in the host tier of a node now, because of a `Stage` or of the node's own accord. A
    node that has them says so, too, when the function is deployed or deployed again.
    """

    node: NodeId
    function: FunctionId
    size: Bytes = 0
    """The size of the weights; functions with the same weights share them."""


class Unstaged(Struct, frozen=True, tag=True):
    """
    The weights of a function are not in the host tier of a node any more; or a `Stage` failed, or the node has no room
    for them.
    """

    node: NodeId
    function: FunctionId
    reason: str = ""
    """Why a `Stage` has not done it; empty: they gave way to others."""


class Parked(Struct, frozen=True, tag=True):
    """An evicted copy is parked: its process stays, and holds nothing of its device but *memory*."""

    function: FunctionId
    device: DeviceId
    copy: int
    memory: Bytes = 0
    """What it holds of its device all the same: on a GPU, mostly the context of its process."""


class Unparked(Struct, frozen=True, tag=True):
    """An evicted copy was not parked, or a parked one is gone: its worker has ended, or ends."""

    function: FunctionId
    device: DeviceId
    copy: int
    reason: str = ""


class Woken(Struct, frozen=True, tag=True):
    """`Engine.wake_at` has come."""


class Planned(Struct, frozen=True, tag=True):
    """A solver has made a plan: the policy has it from now on."""

    plan: PlacementPlan


class Profiled(Struct, frozen=True, tag=True):
    """A profile of the function was taken on a device of this kind."""

    function: FunctionId
    kind: str
    taken: Taken


class Offered(Struct, frozen=True, tag=True):
    """These kinds of nodes can be procured from now on, in place of those that were offered before."""

    offers: tuple[Offer, ...]
    ordered: tuple[tuple[OrderId, str], ...] | None = None
    """At the start of a term, the open orders and their kinds, as the ledger has them; None: nothing new of orders."""


class OrderFailed(Struct, frozen=True, tag=True):
    """No node comes of the order. The policy runs, and may order another kind."""

    order: OrderId
    reason: str


class Restored(Struct, frozen=True, tag=True):
    """
    What an older engine left. A new engine is told it after the deployed functions, and before all else. Until
    `Serving` it only listens: devices join with their snapshots, and calls arrive again.
    """

    engine: EngineDoc | None = None
    """None: it left nothing."""
    functions: tuple[FunctionDoc, ...] = ()
    devices: tuple[DeviceDoc, ...] = ()
    elapsed_s: Seconds = 0.0
    """Since the newest of these was written, as far as it is known."""
    queued: bool = False
    """The calls that waited wait again at once. False: each waits once its gateway says so (`Arrived` with its age),
    and has its old place then."""


class Serving(Struct, frozen=True, tag=True):
    """The new engine decides from now on. Devices that have not joined by then have left."""


Event = (
    DeviceJoined | DeviceLeft | DeviceDrained | FunctionDeployed | FunctionRemoved | Scaled | Arrived | CallerLeft
    | Loaded | CopyFailed | Finished | Measured | Resized | ShareKept | WorkerExited | CopySilent | NodeRefused | Staged
    | Unstaged | Parked | Unparked | Woken | Planned | Profiled | Offered | OrderFailed | Restored | Serving
)  # fmt: skip


# --- commands ---------------------------------------------------------------------------------------------------------


class StartCall(Struct, frozen=True, tag="Start", gc=False):
    """Give the grant to the node, which opens it, and to the gateway, which waits for it."""

    grant: Grant


class RejectCall(Struct, frozen=True, tag="Reject"):
    """The call gets no grant."""

    call: CallId
    code: str
    """``overloaded``, ``deadline``, ``removed``, ``no_device``, ``no_room``, ``refused``, ``unknown_function``,
    ``load_failed``, ``out_of_memory``, ``nested``, ``policy``."""
    message: str
    retry_after_s: Seconds = 0.0
    status: int = 0
    """The HTTP status of a call that a policy refuses (`contract.Reject`); 0: as the code says."""
    details: dict[str, Any] | None = None
    """What the caller is told in JSON beside the message."""


class Abort(Struct, frozen=True, tag=True):
    """
    Stop a running call: its caller is gone, or the policy has stopped it. The node answers with `Finished`; or with
    `Refused` if the call is to run once more, and can.
    """

    call: CallId
    device: DeviceId
    take_back: bool = field(default=False, name="requeue")
    """The call is taken back from its worker: it waits for another grant."""
    reason: str = ""
    """What the caller is told; empty: the caller is gone, or its function."""
    number: int = 0
    """The number of the grant that ends."""
    unbegun: bool = False
    """The call went ahead: it is taken back only if its worker has not begun it. Else it goes on."""


class LoadCopy(Struct, frozen=True, tag="Load"):
    """Load without a call (a minimum or a desired number of copies, a prefetch)."""

    epoch: int
    number: int
    function: FunctionId
    digest: str
    parts: tuple[Part, ...]
    victims: tuple[CopyId, ...] = ()
    copy: int = 0
    beside: bool = False
    """Other calls of the device go on meanwhile, and new ones start."""
    parked: tuple[CopyId, ...] = ()
    """As in `Grant`."""

    @property
    def device(self) -> DeviceId:
        """The device of the first part, whose node is told."""
        return self.parts[0].device

    @property
    def memory(self) -> Bytes:
        """The reservation of the first part, in bytes."""
        return self.parts[0].memory


class EvictCopy(Struct, frozen=True, tag="Evict"):
    """End the worker: its function was removed, or has a copy too many. A grant names its victims itself."""

    function: FunctionId
    device: DeviceId
    copy: int = 0
    to: str = "none"
    """``host``: its weights stay in the memory of its node, and it is parked, as far as the node can. ``none``: it
    ends, also if it is parked."""


class Resize(Struct, frozen=True, tag=True):
    """
    A worker may use this much memory from now on: it was measured, is lent free memory, or has to give that back. The
    node sets the limit, and answers `Resized` if it became smaller.
    """

    function: FunctionId
    device: DeviceId
    memory: Bytes
    copy: int = 0


class SetLimit(Struct, frozen=True, tag=True):
    """What a copy may do from now on."""

    function: FunctionId
    device: DeviceId
    copy: int = 0
    share: int = 0
    """The most of the device's compute that it may use, in per cent; 0: no cap."""
    slots: int = 1
    """Grants that it runs at once."""
    batch: int = 1
    """Calls of one grant at most."""


class FetchBundle(Struct, frozen=True, tag="Fetch"):
    """Bring what the workers of a function need to a node, ahead of its first load there."""

    function: FunctionId
    node: NodeId
    source: str = ""
    """The node that has it; empty: wherever it is."""
    ranges: tuple[tuple[int, int], ...] = ()
    """The parts of the weights that are wanted, as (first, end) in bytes; none: all of them."""


class Stage(Struct, frozen=True, tag=True):
    """
    Bring the weights of a function into the host tier of a node, ahead of a load there. The node answers with `Staged`
    or `Unstaged`, and decides itself what gives way to them.
    """

    function: FunctionId
    node: NodeId


class ProcureNodes(Struct, frozen=True, tag="Procure"):
    """Order a node of an offered kind. Its devices join later, and name the order; or `OrderFailed` follows."""

    kind: str
    order: OrderId


class ReleaseNode(Struct, frozen=True, tag="Release"):
    """Give a node back: none of its devices holds or runs anything."""

    node: NodeId


Command = (
    StartCall
    | RejectCall
    | Abort
    | LoadCopy
    | EvictCopy
    | Resize
    | SetLimit
    | FetchBundle
    | Stage
    | ProcureNodes
    | ReleaseNode
)
