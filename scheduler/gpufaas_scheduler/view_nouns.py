"""Functions and devices as a policy sees them; `view_contract` has the rest of its view."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from gpufaas_core.model import Bytes, CopyId, Device, DeviceId, Function, FunctionId, NodeId, Part, Replica, Seconds


class FiguresView(Protocol):
    """What a function costs on devices of one kind, now: the object stays the same until the next deployment."""

    @property
    def load_s(self) -> Seconds:
        """The time of the shortest load now: on a node whose host tier has the weights, if there is one."""

    @property
    def disk_s(self) -> Seconds:
        """The time of a load on a node whose host tier does not have the weights."""

    @property
    def host_s(self) -> Seconds:
        """The time of a load on a node whose host tier has them."""

    @property
    def service_s(self) -> Seconds: ...
    @property
    def occupation(self) -> Bytes:
        """The memory that a copy needs."""


class FunctionCosts(Protocol):
    """
    What loads and calls of a function cost, as its profile says: learnt in a service, given in a simulation. Times are
    infinite on devices where it cannot run.
    """

    @property
    def costs(self) -> Mapping[str, FiguresView | None]:
        """The costs by kind of device, for any kind; None where the function cannot run."""

    @property
    def staged(self) -> Collection[NodeId]:
        """The nodes that have its weights in their host tiers."""

    @property
    def parked(self) -> Collection[DeviceId]:
        """The devices that have a parked copy."""

    @property
    def near(self) -> bool:
        """Whether it is staged or parked somewhere, so that its loads do not take the same time everywhere."""

    @property
    def staging(self) -> Collection[NodeId]:
        """The nodes that bring its weights to their host tiers now, because of a `Load`."""

    def load_s(self, kind: str) -> Seconds:
        """Return the time of the shortest load on such a device now."""

    def load_on(self, device: DeviceView) -> Seconds:
        """Return the time of a load on that device."""

    def service_s(self, kind: str) -> Seconds:
        """Return the mean service time."""

    def grant_s(self, kind: str, batch: int = 1, share: int = 0, neighbours: int = 0) -> Seconds:
        """
        Return the service time of a grant of *batch* calls on a copy that holds *share* per cent (0: no cap) while
        *neighbours* run: as it was seen, else as in the most similar way that was seen.
        """

    def serve_s(self, kind: str, calls: float) -> Seconds:
        """Return the time in which one copy serves that many calls, in batches if they form any."""

    def service_cv(self, kind: str) -> float:
        """
        Return the coefficient of variation (standard deviation over mean) of the service times about their estimates: 1
        before the first call, 0 where it cannot run.
        """

    def service_quantile_s(self, kind: str, share: float) -> Seconds:
        """Return the time that *share* (0 to 1) of its calls do not exceed. O(buckets)."""


class FunctionView(FunctionCosts, Protocol):
    """A function."""

    @property
    def id(self) -> FunctionId: ...
    @property
    def declared(self) -> Function:
        """What was deployed: its need, constraints and bounds, and its tenant, weight, priority, task and accuracy."""

    @property
    def owned_by(self) -> str:
        """Who decides about its copies: one of `gpufaas_core.owners`."""

    @property
    def plan(self) -> Mapping[DeviceId, Replica]:
        """What the plan in force has of it, by devices that are there and not drained. Empty: no plan owns it."""

    @property
    def placed(self) -> bool:
        """Its calls reserve compute while they run, and the policy places them. False: the function is direct."""

    @property
    def slots(self) -> int:
        """The most calls that one copy runs at once."""

    @property
    def copies(self) -> int:
        """The number of its copies, with those that load. A placed function has as many as devices hold it."""

    @property
    def waiting(self) -> int:
        """The number of its calls that wait, in the global and in local queues."""

    @property
    def before(self) -> FunctionView | None:
        """The revision that it succeeds, until that one is removed and a copy of this one is loaded."""

    @property
    def loading(self) -> int:
        """The number of its copies that load."""

    @property
    def loadable(self) -> bool:
        """Whether it may get one more copy by a `Load`: it is deployed, and its last load did not fail."""

    @property
    def retry_at(self) -> Seconds:
        """When it may be loaded again for the plan that names it, as its last load failed; 0.0: at once."""

    @property
    def batch_max(self) -> int:
        """The most of its calls that may start together."""

    @property
    def batch_wait_s(self) -> Seconds:
        """The longest that its calls may wait for others of their batch while a device is idle."""

    def batch_size(self, kind: str) -> int:
        """Return how many of its calls should start together there: `batch_max`, or what keeps its goal and fits."""

    @property
    def compute(self) -> int:
        """The compute that it asks for, in per cent of a device."""

    @property
    def goal_s(self) -> Seconds | None:
        """The latency goal of its calls; None: it has none."""

    @property
    def called(self) -> float:
        """The number of its arrivals, weighted as in its rate, as of `called_at`. Each arrival changes one of them."""

    @property
    def called_at(self) -> Seconds: ...


class DeviceView(Protocol):
    @property
    def id(self) -> DeviceId: ...
    @property
    def device(self) -> Device:
        """What its node says of it: memory, labels and price, and what the node can do."""

    @property
    def closed(self) -> bool:
        """Whether it is drained, and takes no new calls."""

    @property
    def kind(self) -> str: ...
    @property
    def node(self) -> NodeId: ...
    @property
    def busy(self) -> bool:
        """It runs a call of a placed function, or loads for a `Load`."""

    @property
    def spare(self) -> int:
        """The compute that no running grant and no resident share holds, in per cent."""

    @property
    def part(self) -> tuple[Part, ...]:
        """The parts of a new copy that is on this device alone, with the memory of its function's profile."""

    @property
    def copies(self) -> Mapping[FunctionId, CopyId]:
        """The copies of placed functions that it holds."""

    @property
    def order(self) -> int:
        """The number of devices that joined before it."""

    @property
    def starts(self) -> int:
        """The number of calls of placed functions that were started on it."""
