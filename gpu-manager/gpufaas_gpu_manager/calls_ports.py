"""What stands around the calls of a worker, as they use it: the worker, its device, its node."""

from collections.abc import Callable, Collection
from typing import Protocol

from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.messages import Event
from gpufaas_core.model import Bytes, DeviceId
from gpufaas_core.wire.heads import ReadyHead
from gpufaas_gpu_manager.devices import NodeDevice
from gpufaas_gpu_manager.enforcement import WorkerLimits
from gpufaas_gpu_manager.exchange import Exchange
from gpufaas_gpu_manager.ledger import MemoryLedger
from gpufaas_gpu_manager.output import Output
from gpufaas_gpu_manager.running import Running
from gpufaas_gpu_manager.settings import NodeSettings
from gpufaas_gpu_manager.timers import Timers


class DevicePort(Protocol):
    """The device of a worker."""

    source: NodeDevice
    id: DeviceId
    ledger: MemoryLedger

    @property
    def unled(self) -> Collection[object]:
        """The calls that `defer` keeps."""

    def defer(self, exchange: Exchange) -> bool:
        """Keep a call that no scheduler ordered until there is compute for it. False: there is, it can begin."""

    def call_over(self) -> None:
        """A call there is over. Needs to be told only when it has `unled`, or the call's worker was replaced."""

    def admit(self) -> None:
        """Let its workers that wait for memory go on, as far as there is some."""


class CallsHost(Protocol):
    """The node."""

    settings: NodeSettings
    report: Callable[[Event], None]
    """Sends a fact to the scheduler."""

    measured: dict[tuple[str, str], Bytes]
    """The peak memory of workers by what their costs are kept under, and by the kind of their device."""

    over: Callable[[Exchange], None]
    """Called with an exchange that has no worker any more."""


class CallsWorker(Protocol):
    """The worker, as its calls and the watch of its load use it."""

    spec: WorkerSpec
    copy: int
    memory: Bytes
    pid: int | None
    limits: WorkerLimits | None
    checks: bool
    outgrown: bool
    replaced: bool
    run: Running
    output: Output
    timers: Timers
    ready_head: ReadyHead | None

    @property
    def device(self) -> DevicePort: ...

    @property
    def serves(self) -> bool:
        """Whether it is ready, and is not told to end."""

    @property
    def takes_calls(self) -> bool: ...

    @property
    def stopped(self) -> bool: ...

    def kill(self, reason: str) -> None: ...

    def on_over_memory(self, reason: str) -> None: ...
