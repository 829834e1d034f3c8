"""Why a call was started where it was, or waits, for people."""

from msgspec import Struct

from gpufaas_core._types import Seconds
from gpufaas_core.model import CallId, CopyId, DeviceId, FunctionId


class Considered(Struct, frozen=True):
    """An option for a call, as a policy weighed it."""

    option: str
    """``hit``, ``load``, ``wait``, or another word of the policy's."""
    where: str
    """A device, or the function whose copies the call would wait for."""
    estimate_s: Seconds
    """The estimated cost, in the policy's own measure: it compares with the other options only."""


class ServiceEstimate(Struct, frozen=True):
    """How long one call should take on devices of a kind, without load and waiting."""

    kind: str
    estimate_s: Seconds
    """The mean of the function's calls, or of those of this call's size."""
    p50_s: Seconds
    """Half of such calls take at most this."""
    p90_s: Seconds
    calls: int
    """The number of calls seen. Below ten, a spread of 100 % is assumed in part."""
    size: float = 0.0
    """The size of the call, if the estimate depends on it."""


class Explanation(Struct, frozen=True):
    """Why a call was started on that device at that time, or why it still waits."""

    call: CallId
    function: FunctionId
    policy: str
    state: str
    """``waiting``, ``local`` (in a device's local queue), ``running`` or ``ended``."""
    at: Seconds
    """When it was started, else the time of the question; on the engine's clock."""
    waited_s: Seconds
    """From its arrival until `at`."""
    device: DeviceId | None = None
    hit: bool | None = None
    via: str | None = None
    """The queue that it came from: ``global`` or ``local``."""
    victims: tuple[CopyId, ...] = ()
    """The copies that were evicted for it, and not parked."""
    rule: str = ""
    """The condition that held, in words; empty: the policy gives none."""
    options: tuple[Considered, ...] = ()
    passed_over: tuple[CallId, ...] = ()
    """The first of the calls that had arrived earlier and still waited when it was started."""
    passed_over_count: int = 0
    overtaken_by: tuple[CallId, ...] = ()
    """The first of the calls that arrived later and were started before it, as far as they are remembered."""
    overtaken_by_count: int = 0
    batch: tuple[CallId, ...] = ()
    """The other calls of its grant, as far as they are remembered."""
    tier: str = ""
    """Of a miss whose load is over: where its weights came from, as `ResidentStatus.tier`."""
    service: ServiceEstimate | None = None
    """On the kind of device where it was started; of a waiting call, on the kind that joined first."""
    parked: tuple[CopyId, ...] = ()
    """The copies that were parked for it, as far as their node could."""
