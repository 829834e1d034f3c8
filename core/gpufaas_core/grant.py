"""`Grant`, the right to run calls, and `Outer`, which tells calls that functions make."""

from msgspec import Struct
from msgspec.structs import replace

from gpufaas_core._types import Bytes, Seconds
from gpufaas_core.model import CallId, CopyId, DeviceId, FunctionId, Part


class Grant(Struct, frozen=True, gc=False):
    """
    The right to run one or several calls on one copy. It holds all that the node needs, so the first of grant and
    command that reaches the node opens it: the node evicts the victims, reserves the memory and starts the worker.
    """

    epoch: int
    """The epoch of the engine that made it. A node refuses grants of epochs below the highest that it has seen."""
    number: int
    """Grows by one with each grant of an epoch."""
    calls: tuple[CallId, ...]
    """The calls that run together; nearly always one. Each gets the grant with itself as the first (`of`)."""
    function: FunctionId
    digest: str
    parts: tuple[Part, ...]
    """Where the copy is, and what it has there."""
    cold: bool
    """A miss: evict `victims`, reserve memory, and load, or wake the copy. False: a hit; its worker may still load."""
    victims: tuple[CopyId, ...] = ()
    """The copies to evict from these devices first, in this order. Empty on a hit."""
    local: bool = False
    """It waited for this copy in the device's local queue."""
    copy: int = 0
    within_s: Seconds | None = None
    """The calls end within this time of the grant, as the call that made them does. None: no such limit."""
    held_s: Seconds = 0.0
    """Its first call could have started so long ago, and was held back for others of the batch."""
    parked: tuple[CopyId, ...] = ()
    """Those of `victims` that are parked, as far as the node can. The others end."""
    ahead_s: Seconds = 0.0
    """Its calls begin once those have ended that run on the copy. If that takes longer than this, the node refuses
    them. 0.0: they do not go ahead."""
    load_s: Seconds = 0.0
    """On a hit: its first call came so long before the copy was loaded, and waited for that; -1.0: it still loads."""

    @property
    def call(self) -> CallId:
        """The first of its calls."""
        return self.calls[0]

    def of(self, call: CallId) -> "Grant":
        """Return the grant as *call* gets it: with that call first."""
        if call == self.calls[0]:
            return self
        return replace(self, calls=(call, *(each for each in self.calls if each != call)))

    @property
    def device(self) -> DeviceId:
        """The device of the first part, whose node is told."""
        return self.parts[0].device

    @property
    def memory(self) -> Bytes:
        """The reservation of the first part, in bytes."""
        return self.parts[0].memory


class Outer(Struct, frozen=True):
    """The worker on which the call runs that made this call. The address that the worker calls tells it."""

    device: DeviceId
    function: FunctionId
    copy: int = 0
    call: str = ""
    """The ``X-Call-Id`` of the request. If it is that of the outer call, it tells which one of the worker's calls."""
