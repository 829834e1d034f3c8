"""
Facts in, commands out: the verbs of the whole system.

A worker is named by function, device and `copy`, the number among the function's copies on that device. Model functions
have one, number 0; a number is free again once the engine has taken its copy away.

Events tell the engine what happened (past tense), commands say what is to be done (imperative). Both are plain
values: they go into the journal as JSON lines and, between services, over the wire. Structs of msgspec, because making
one costs a tenth of a frozen dataclass and they encode themselves (docs/adr/0002).
"""

from msgspec import Struct

from gpufaas_core._types import Bytes, Seconds
from gpufaas_core.model import CallId, CopyId, Device, DeviceId, Function, FunctionId, Profile
from gpufaas_core.snapshot import DeviceDoc, DeviceSnapshot, EngineDoc, FunctionDoc


class Lease(Struct, frozen=True):
    """
    The right to use one worker for one call, complete in itself: whichever of lease and command reaches the node first
    opens it (evicts the victims, reserves the memory, starts the worker).
    """

    epoch: int
    """Of the engine that granted it; a node refuses leases of an older engine than it has seen."""
    number: int
    """Grows by one with each lease of an epoch."""
    call: CallId
    function: FunctionId
    digest: str
    device: DeviceId
    cold: bool
    """The worker is not there: evict `victims`, reserve `memory`, load. False: a hit (perhaps on a loading worker)."""
    memory: Bytes
    """Reservation of the worker in bytes."""
    victims: tuple[CopyId, ...] = ()
    """To be evicted from the device first, in this order. Empty on a hit."""
    local: bool = False
    """It waited in the device's local queue."""
    copy: int = 0
    within_s: Seconds | None = None
    """The call was made by a call that ends in so many seconds, before its own time is over. Counts from the grant."""


class Outer(Struct, frozen=True):
    """Where a call was made: by a call that runs on this worker. Told by the address that the worker calls."""

    device: DeviceId
    function: FunctionId
    copy: int = 0
    call: str = ""
    """The ``X-Call-Id`` that came with it, perhaps that of the outer call: of use where the worker runs several."""


# --- events -----------------------------------------------------------------------------------------------------------


class DeviceJoined(Struct, frozen=True, tag=True):
    """
    A device is there, for the first time or again. With its snapshot it keeps its models, and its running calls are
    taken over; what is of no function that is deployed is evicted. Without one it is empty.
    """

    device: Device
    snapshot: DeviceSnapshot | None = None


class DeviceLeft(Struct, frozen=True, tag=True):
    """The device is gone with all that was on it; calls that ran there were answered by others."""

    device: DeviceId
    reason: str


class DeviceDrained(Struct, frozen=True, tag=True):
    """The device takes no new calls and loads nothing more, and what waits in its local queue goes elsewhere; or it is
    taken back."""

    device: DeviceId
    drain: bool = True


class FunctionDeployed(Struct, frozen=True, tag=True):
    """A revision may be called from now on. Same id again: its limits and profiles are replaced."""

    function: Function


class FunctionRemoved(Struct, frozen=True, tag=True):
    """No new calls will come. Those that wait or run are still served (`drain`) or rejected; then it is evicted."""

    function: FunctionId
    drain: bool = True


class Scaled(Struct, frozen=True, tag=True):
    """
    A function should have so many copies, within its bounds: missing ones are loaded, surplus ones serve what they
    have and go. 0: none, until the next call comes; a call that waits already makes it void.
    """

    function: FunctionId
    copies: int


class Arrived(Struct, frozen=True, tag=True):
    call: CallId
    function: FunctionId
    deadline: Seconds | None = None
    """On the engine's clock; None: it waits for as long as it takes."""
    age_s: Seconds = 0.0
    """How long it has waited already, without a lease that reached its gateway: under an older engine, or because its
    gateway was cut off. It stands where it would stand if it had never left."""
    size: float = 0.0
    """Of the request, in any unit that is the same for all calls of the function; 0.0 if it is not known."""
    outer: Outer | None = None
    """A function made it."""
    endless: bool = False
    """Its deadline is that of its start: once it runs, it may go on (a WebSocket)."""


class CallerLeft(Struct, frozen=True, tag="Cancelled"):
    """The caller is gone. A waiting call gives its place up; a running one is aborted, and `Finished` still comes."""

    call: CallId


class Loaded(Struct, frozen=True, tag=True):
    """The worker is ready. `load_s` counts from the opened lease, eviction of victims included."""

    function: FunctionId
    device: DeviceId
    load_s: Seconds
    occupation: Bytes
    """Measured after the load, in bytes."""
    copy: int = 0


class CopyFailed(Struct, frozen=True, tag="LoadFailed"):
    """
    The worker did not get ready; it has ended and its memory is free. Its calls were answered by the node, unless it
    ran out of memory, or is `blameless`: then they are refused, and placed again.
    """

    function: FunctionId
    device: DeviceId
    reason: str
    out_of_memory: bool = False
    """It hit its reservation: a larger one may do."""
    copy: int = 0
    blameless: bool = False
    """The node could not start it, for want of open files: that says nothing about the function."""


class Finished(Struct, frozen=True, tag=True):
    """A call no longer uses its worker: the model is done, the caller may still be reading."""

    call: CallId
    device: DeviceId
    service_s: Seconds
    """Time that the handler took, in seconds; 0.0 when it was aborted before it began."""
    ok: bool = True
    """False: aborted, or the handler failed; its time is not learnt."""


class Measured(Struct, frozen=True, tag=True):
    """The peak memory of a worker is known better now: its charge and the function's profile follow."""

    function: FunctionId
    device: DeviceId
    occupation: Bytes
    """0: not known, of one that ran out."""
    copy: int = 0
    out_of_memory: bool = False
    """A call hit the worker's limit: it needed more than that."""


class Resized(Struct, frozen=True, tag=True):
    """A worker was told to give memory back (`Resize`), and may use *memory* from now on: not less than it uses."""

    function: FunctionId
    device: DeviceId
    memory: Bytes
    copy: int = 0


class WorkerExited(Struct, frozen=True, tag=True):
    """A worker ended that nobody evicted; its memory is free. The calls that ran on it were answered by the node."""

    function: FunctionId
    device: DeviceId
    reason: str
    copy: int = 0


class NodeRefused(Struct, frozen=True, tag="Refused"):
    """The node took nothing of the call: it is placed again, with its arrival number and its passes."""

    call: CallId
    device: DeviceId
    reason: str
    opened: bool = False
    """Its gateway did not reach the node, which has opened the lease all the same: what it loads for it stays."""


class Woken(Struct, frozen=True, tag=True):
    """`Engine.wake_at` has come."""


class Restored(Struct, frozen=True, tag=True):
    """
    What an older engine left, told to a new one that has been told which functions are deployed and nothing else.
    Until `Serving` it only listens: devices join with their snapshots, and calls arrive again.
    """

    engine: EngineDoc | None = None
    """None: nothing was left."""
    functions: tuple[FunctionDoc, ...] = ()
    devices: tuple[DeviceDoc, ...] = ()
    elapsed_s: Seconds = 0.0
    """Since the newest of these was written, as far as that is known."""
    queued: bool = False
    """The calls that waited wait from the start. False: each from when its gateway says that it still does (`Arrived`
    with its age); then it has the place that it had."""


class Serving(Struct, frozen=True, tag=True):
    """Whoever comes in time has come. The new engine decides from now on; devices that are not there have left."""


Event = (
    DeviceJoined | DeviceLeft | DeviceDrained | FunctionDeployed | FunctionRemoved | Scaled | Arrived | CallerLeft
    | Loaded | CopyFailed | Finished | Measured | Resized | WorkerExited | NodeRefused | Woken | Restored | Serving
)  # fmt: skip


# --- commands ---------------------------------------------------------------------------------------------------------


class StartCall(Struct, frozen=True, tag="Start"):
    """Grant the lease: to the node that opens it, and to the gateway that waits for it."""

    lease: Lease


class Reject(Struct, frozen=True, tag=True):
    """The call gets no lease."""

    call: CallId
    code: str
    """``overloaded``, ``deadline``, ``removed``, ``no_device``, ``no_room``, ``refused``, ``unknown_function``,
    ``load_failed``, ``out_of_memory``, ``nested``."""
    message: str
    retry_after_s: Seconds = 0.0


class Abort(Struct, frozen=True, tag=True):
    """Stop the running call, whose caller is gone; the node answers with `Finished`."""

    call: CallId
    device: DeviceId


class LoadCopy(Struct, frozen=True, tag="Load"):
    """Load without a call (a minimum or a desired number of copies, a prefetch)."""

    epoch: int
    number: int
    function: FunctionId
    digest: str
    device: DeviceId
    memory: Bytes
    victims: tuple[CopyId, ...] = ()
    copy: int = 0


class Evict(Struct, frozen=True, tag=True):
    """End the worker: its function was removed, or a copy is too many. Victims of a lease are named in the lease."""

    function: FunctionId
    device: DeviceId
    copy: int = 0


class Resize(Struct, frozen=True, tag=True):
    """
    The reservation of a resident worker changed: it was measured, is lent memory that is free, or has to give that
    back. The node follows with its limit, and answers `Resized` where it became smaller.
    """

    function: FunctionId
    device: DeviceId
    memory: Bytes
    copy: int = 0


Command = StartCall | Reject | Abort | LoadCopy | Evict | Resize


class Learnt(Struct, frozen=True):
    """A profile as it is now, for whoever keeps it."""

    function: FunctionId
    kind: str
    profile: Profile
