"""What is known of the memory that the calls of a worker need."""

from collections.abc import Callable
from typing import Final

from gpufaas_core.errors import OutOfMemory
from gpufaas_core.messages import Grant, Measured
from gpufaas_core.model import Bytes
from gpufaas_core.units import format_bytes
from gpufaas_gpu_manager.calls_ports import CallsHost, CallsWorker

_KNOWN_S: Final = 0.25
"""A victim that is just measuring its memory for the first time gets so long: else it might never be known."""
_SAID: Final[Bytes] = 2000
"""Bytes of an exception's text in an error."""


class MeasuredMemory:
    """See module."""

    def __init__(self, worker: CallsWorker, host: CallsHost) -> None:
        self.done = worker.spec.kind == "server" or bool(worker.spec.image)
        """The memory of the worker was measured, or never is by itself."""
        self.served = False
        """A call has ended."""
        self.uncounted: Bytes = 0
        """What the driver of its device counts for the worker beyond what that counts itself."""
        self._worker = worker
        self._host = host
        self._ran_out = 0
        """The number of the grant whose call ran out of memory last."""
        self._await: Callable[[], None] | None = None
        """Waits until the need is known."""
        self._kind = worker.spec.profiled, worker.device.source.device.kind

    @property
    def known(self) -> Bytes:
        """The peak memory that workers of its function have had here; 0: none was measured."""
        return self._host.measured.get(self._kind, 0)

    def when_known(self, go_on: Callable[[], None]) -> None:
        """Call *go_on*: now, unless the need of the function is just being measured for the first time."""
        if self.done or not self.served or self.known:
            go_on()
        else:
            self._await = go_on
            self._worker.timers.later("measured", _KNOWN_S, go_on)

    def on_measured(self, peak: Bytes, held: Bytes) -> None:
        """The worker has measured itself: it has needed *peak*, and holds *held* now."""
        self.ask_driver(held)
        self.tell(peak)
        if self._await is not None:
            self._worker.timers.cancel("measured")
            self._await()

    def ask_driver(self, held: Bytes, *, ran_out: bool = False) -> Bytes:
        """
        Return what the driver of its device counts for the worker, which by its own account holds *held* now; 0: it is
        not known.

        :param ran_out: a call ran out of memory at *held*. The worker will have more memory before it says what it
            holds now: what the driver counts beyond that must be known first
        """
        worker = self._worker
        by_driver = worker.device.source.used_bytes([worker.pid]) if worker.pid is not None else 0
        beyond = (by_driver or 0) - held
        if ran_out:
            self.uncounted = max(self.uncounted, beyond)
        elif by_driver and held and beyond != self.uncounted:
            self.uncounted = beyond
            worker.run.limit_to(worker.memory)
        return by_driver or 0

    def learn(self, grant: Grant, peak: Bytes, out_of_memory: bool) -> None:
        """A call has ended that ran out of memory at *peak*, or the memory of its worker was never measured."""
        if peak or (out_of_memory and grant.number != self._ran_out):  # of a batch, that is said once
            if out_of_memory and grant.number > 0:
                self._ran_out = grant.number
            if peak:
                self.ask_driver(peak, ran_out=True)
            self.tell(peak, out_of_memory)
        elif not self.done and self._worker.device.source.enforced and (known := self.known):
            self.tell(known)  # it measures itself only beyond that

    def tell(self, peak: Bytes, out_of_memory: bool = False) -> None:
        """Tell the scheduler that the worker has needed *peak*; 0: it ran out of memory, and the peak is unknown."""
        worker, host = self._worker, self._host
        self.done = True
        if peak:
            peak += self.uncounted
            host.measured[self._kind] = max(peak, self.known)
        host.report(Measured(worker.spec.function, worker.device.id, peak, worker.copy, out_of_memory))

    def ran_out(self, said: bytes) -> OutOfMemory:
        """Return the error of a call that hit the memory limit. :param said: the text of its exception"""
        worker, spec = self._worker, self._worker.spec
        ledger = worker.device.ledger
        several = spec.need.batch_max > 1
        less = "Its batches are smaller for a while: call again, send less" if several else "Send less at once"
        return OutOfMemory(
            f"{spec.name}.{spec.namespace} ran out of memory ({said[:_SAID].decode(errors='replace')}): it may use "
            f"{format_bytes(worker.memory)} on {worker.device.id}, which has {format_bytes(ledger.capacity)}, of that "
            f"{format_bytes(ledger.free)} free. {less}, or deploy it with a larger gpufaas.memory (it was deployed "
            f"with {format_bytes(spec.memory)})"
        )
