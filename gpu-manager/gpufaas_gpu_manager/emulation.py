"""
The time of an emulated device: how long its workers load, and how long calls take beside each other.

Workers of such a device are processes as on any other one, but compute nothing (gpufaas_functions.emulated): they are
told how long to load, and ask here when a call is over. The cost model and its processor sharing are those of the
simulator (`gpufaas_core.processor_sharing`). All of it runs on the event loop.
"""

import asyncio
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from msgspec import Struct

from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.cost import ANY, Cost, Truth, truth
from gpufaas_core.model import ALL_COMPUTE, Bytes, DeviceId, FunctionId, Seconds, copy_id
from gpufaas_core.processor_sharing import begin, demand_of, paced, recap
from gpufaas_functions.emulated import ASK, Emulated

Costs = Mapping[str, Mapping[str, Cost]]
"""By function, then by kind of device; `ANY` for kinds without an entry."""


class _EmulatedGrant(Struct, eq=False):
    """What one slot of a worker serves now."""

    function: FunctionId
    copy: int
    truth: Truth
    cap: int
    devices: "tuple[Emulation, ...]"
    clock: socket.socket
    end: Seconds = 0.0
    since: Seconds = 0.0
    left_s: Seconds = 0.0
    slow: float = 1.0

    @property
    def uses(self) -> int:
        return min(self.truth.uses, self.cap)


class Emulation:
    """
    See module.

    :param kind: of device, in the cost model
    :param source: of the cost model, for people
    """

    compute = ALL_COMPUTE

    def __init__(self, device: DeviceId, kind: str, costs: Costs, source: str) -> None:
        self.running: dict[_EmulatedGrant, None] = {}
        self.demand = 0
        self.source = source
        self._device = device
        self._kind = kind
        self._costs = costs
        self._caps: dict[str, int] = {}
        """By copy, as the policy has set them."""
        self._now: Seconds = 0.0
        """When a grant last began or ended."""
        self._timer: asyncio.TimerHandle | None = None

    def reason_against(self, spec: WorkerSpec) -> str:
        """Return why workers of *spec* cannot be emulated; empty: they can."""
        if spec.image or spec.kind == "server":
            return f"{spec.name} is a program of its own: emulated devices run handlers only"
        if self._named(spec) is None:
            return (
                f"{self.source} has no costs of {spec.name} on devices of kind {self._kind}: add occupation_mb, load_s "
                "and infer_s"
            )
        return ""

    def start_of(self, spec: WorkerSpec, memory: Bytes) -> Emulated:
        """Return what a worker of *spec* with so much reserved memory is told, whose load begins now."""
        cost = self._truth(spec).cost
        return Emulated(self._device, self._kind, cost.load_s, time.monotonic(), cost.occupation, memory)

    def clock(self, spec: WorkerSpec, copy: int, share: int) -> socket.socket:
        """
        Return the worker's end of a socket for the calls of one slot. It is watched until that end closes.

        :param share: that the copy was loaded with; 0: none
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        asyncio.get_running_loop().add_reader(ours, partial(self._asked, ours, spec, copy, share))
        return theirs

    def limit(self, function: FunctionId, copy: int, share: int) -> None:
        """The copy may use *share* per cent of the compute from now on; 0: what its function says."""
        self._caps[copy_id(function, copy)] = share
        now = max(self._now, time.monotonic())
        for each in self.running:
            if (each.function, each.copy) == (function, copy):
                recap(self, function, copy, share or each.truth.cap, now)
                break
        self._pace(now)

    def forget(self, function: FunctionId, copy: int) -> None:
        """The copy is gone."""
        self._caps.pop(copy_id(function, copy), None)

    # --- calls ---

    def _asked(self, clock: socket.socket, spec: WorkerSpec, copy: int, share: int) -> None:
        """A slot says that a call began; or its worker has ended."""
        try:
            data = clock.recv(ASK.size)
        except OSError:
            data = b""
        if len(data) < ASK.size:
            self._closed(clock)
            return
        began, calls = ASK.unpack(data)
        known = self._truth(spec).of(max(1, calls))
        start = partial(self._begin, clock, spec, copy, share, known, max(1, calls))
        if known.cost.start_s:
            at = began + known.cost.start_s
            asyncio.get_running_loop().call_at(at, start, at)
        else:
            start(began)

    def _begin(
        self, clock: socket.socket, spec: WorkerSpec, copy: int, share: int, known: Truth, calls: int, began: Seconds
    ) -> None:
        """The service of *calls* calls begins, unless their worker has ended since they came."""
        if clock.fileno() < 0:
            return
        cap = self._caps.get(copy_id(spec.function, copy), share) or known.cap
        grant = _EmulatedGrant(spec.function, copy, known, cap, (self,), clock)
        now = max(self._now, min(began, time.monotonic()))
        begin(grant, known.service_s(calls, cap), now)
        self.running[grant] = None
        self._pace(now)

    def _closed(self, clock: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(clock)
        clock.close()
        for each in [each for each in self.running if each.clock is clock]:
            del self.running[each]
            self._pace(max(self._now, time.monotonic()))

    def _pace(self, now: Seconds) -> None:
        """A grant began or ended at *now*: compute the others' ends anew."""
        self._now = now
        self.demand = demand_of(self.running)
        for _ in paced(self, now):
            pass
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.running:
            first = min(each.end for each in self.running)
            self._timer = asyncio.get_running_loop().call_at(first, self._end)

    def _end(self) -> None:
        """Answer the calls whose time is over."""
        now = time.monotonic()
        while self.running and (first := min(self.running, key=lambda each: each.end)).end <= now:
            del self.running[first]
            with suppress(OSError):  # its worker has just ended
                first.clock.send(bytes((min(first.uses, ALL_COMPUTE),)))
            self._pace(max(self._now, first.end))
        if self.running:
            self._pace(self._now)

    # --- costs ---

    def _named(self, spec: WorkerSpec) -> tuple[str, Cost] | None:
        for name in (f"{spec.name}.{spec.namespace}", spec.name):
            found = self._costs.get(name, {})
            cost = found.get(self._kind) or found.get(ANY)
            if cost is not None:
                return name, cost
        return None

    def _truth(self, spec: WorkerSpec) -> Truth:
        found = self._named(spec)
        assert found is not None  # the worker has asked `reason_against`
        return truth(found[0], spec.need, found[1])
