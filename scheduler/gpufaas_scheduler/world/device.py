"""A device: the copies in its memory, and the calls that run there or wait for it."""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TYPE_CHECKING, Final, TypeAlias

from gpufaas_cache_manager.residency import Residency
from gpufaas_core.model import CallId, CopyId, Device, FunctionId, Part, Seconds
from gpufaas_scheduler.world.changes import Changes, Marked, device_key
from gpufaas_scheduler.world.function import Copy, FunctionState
from gpufaas_scheduler.world.hosts import Host
from gpufaas_scheduler.world.queue import Flow

if TYPE_CHECKING:
    from gpufaas_scheduler.world.call import Call, GrantState


class DeviceState(Marked):
    """One device: the copies in its memory, and the calls that run there or wait for it."""

    __slots__ = (
        "ahead", "beside", "busy_s", "busy_since", "closed", "compute", "copies", "device", "direct", "evictions",
        "flows", "free_at", "gone", "hits", "holding", "host", "id", "idle_key", "kind", "listed", "local", "local_s",
        "misses", "node", "noted_at", "order", "others", "part", "preload", "reserved", "residency",
        "served", "shut", "silent", "starts",
    )  # fmt: skip

    def __init__(self, device: Device, order: int, changes: Changes, host: Host) -> None:
        super().__init__(device_key(device.id), changes)
        self.device = device
        self.host = host
        """The host tier of its node."""
        host.devices.add(device.id)
        self.id = device.id
        self.kind = device.kind
        self.node = host.node
        self.order = order
        """The number of devices that joined before it."""
        self.ahead = device.ahead
        """Its node takes calls ahead, and can give them back."""
        self.part = (Part(device.id, 0),)
        self.copies: dict[FunctionId, CopyId] = {}
        """See `view_nouns.DeviceView`."""
        self.flows: dict[FunctionId, Flow[Call]] = {}
        """The waiting calls of the functions in `copies`."""
        self.residency: Residency[FunctionState] = Residency(device.memory, device.kind, device.compute)
        """The copies in its memory, and the ledger of it."""
        self.compute = device.compute
        self.reserved = 0
        """The compute that `holding` and `preload` hold."""
        self.holding: list[GrantState] = []
        """The running grants that hold compute."""
        self.beside: dict[GrantState, None] = {}
        """The running grants that hold none."""
        self.direct: dict[CallId, Call] = {}
        """The running calls of direct functions, which need no grant of their own here."""
        self.others: list[GrantState] = []
        """Grants that wait on the node for compute: gateways sent their calls while there was no scheduler."""
        self.preload: Copy | None = None
        """The copy that a policy loads without a call. It holds compute until it is loaded."""
        self.busy_since = 0.0
        """Since when some compute is held."""
        self.busy_s = 0.0
        """How long it was busy before that."""
        self.free_at = 0.0
        """When the last of `holding` and `preload` should end."""
        self.local: deque[Call] = deque()
        self.local_s = 0.0
        """The sum of the estimates of the calls in `local`."""
        self.noted_at = inf
        """See `overdue.Overdue`."""
        self.starts = 0
        """The number of calls of placed functions started here: the paper's frequency of use."""
        self.idle_key: IdleKey | None = None
        self.listed = False
        """Whether it is idle, and among the `idle_holders` of its functions."""
        self.closed = False
        """Whether it is drained: it takes no new calls, and does not count as idle."""
        self.shut = False
        """It takes no new calls: it is drained, or cleared for one call (`clearing`)."""
        self.silent = 0
        """The number of silent copies of placed functions in its memory."""
        self.gone = False
        """Whether it has left."""
        self.served = self.hits = self.misses = self.evictions = 0

    @property
    def busy(self) -> bool:
        return self.reserved > 0

    @property
    def spare(self) -> int:
        """The compute that nobody holds."""
        return self.compute - self.reserved - self.residency.shares

    @property
    def left(self) -> int:
        """The compute that the shares of copies leave which a plan keeps."""
        return self.compute - sum(each.share for each in self.residency if each.kept is not None)

    def grants(self) -> list[GrantState]:
        """Return the running grants, those that hold compute first."""
        return [*self.holding, *self.others, *self.beside]

    def can_join(self, owner: FunctionState) -> bool:
        """Whether a call of *owner* can run beside others on a copy here, which holds the compute for all of them."""
        if not owner.shared_hold or self.shut or self.id not in owner.holders:
            return False
        copy = self.residency.copies[self.copies[owner.id]]
        return 0 < copy.running < (copy.slots or owner.slots)

    @property
    def open(self) -> bool:
        """Whether one of the grants that hold its compute takes further ones beside it: see `can_join`."""
        return any(self.can_join(each.copy.owner) for each in self.holding)

    def runs(self) -> list[Call]:
        """
        Return the calls that run here, also on copies that were removed already because the call that they were loaded
        for was refused.
        """
        return [*(call for each in self.grants() for call in each.calls if call.granted is each), *self.direct.values()]

    def has_compute(self, owner: FunctionState) -> bool:
        """Whether grants leave the compute that *owner* takes; what copies hold of it may be evicted (`lacks`)."""
        return self.reserved + owner.takes(self) <= self.compute

    def lacks(self, owner: FunctionState) -> int:
        """Return how much of the compute that a call or copy of *owner* takes is not spare; at most 0: nothing."""
        wanted = owner.takes(self)
        return wanted - self.spare if wanted else 0

    def hold(self, compute: int, now: Seconds, free_at: Seconds) -> None:
        """A grant or load takes *compute*, and should end at *free_at*."""
        if not self.reserved:
            self.busy_since = now
            self.free_at = free_at
        elif free_at > self.free_at:
            self.free_at = free_at
        self.reserved += compute

    def let_go(self, compute: int, now: Seconds) -> None:
        """A grant or load that is not in `holding` or `preload` any more gives *compute* back."""
        self.reserved -= compute
        if not self.reserved:
            self.busy_s += now - self.busy_since
        else:
            self.judge()

    def judge(self) -> None:
        """One of `holding` has changed, or the time when it should end."""
        if self.holding:
            self.free_at = max([each.free_at for each in self.holding])

    def parts_of(self, copy: Copy) -> tuple[Part, ...]:
        """Return what *copy*, whose first device this is, has of devices."""
        if copy.split:
            first = Part(self.id, copy.memory, copy.share)
            return first, *(Part(name, each.memory, each.share) for name, each in copy.rest)
        if not copy.parts:
            copy.parts = (Part(self.id, copy.memory, copy.share),)
        return copy.parts


IdleKey: TypeAlias = "tuple[int, int, DeviceState]"
"""(-starts, order, device): sorts idle devices as the scheduler considers them; those that calls only join are last."""
JOINED: Final = 1
"""The first number of these."""
