"""
One worker is parked and woken: its process stays, stopped, and gives back what it holds of its device.

A model leaves the device by the worker itself (`gpufaas_functions.parking`), or, on a GPU where the program
``cuda-checkpoint`` is installed, by the driver, which gives the context back, too.
"""

import asyncio
import signal
import subprocess
import time
from typing import Final

from gpufaas_core.model import Bytes, Seconds
from gpufaas_core.units import MiB
from gpufaas_core.wire.heads import ParkedHead, WakeHead, WokenHead
from gpufaas_core.wire.kinds import Kind
from gpufaas_gpu_manager.launch.processes import ForkedProcess
from gpufaas_gpu_manager.worker import Worker
from gpufaas_gpu_manager.worker_state import BECOME_READY, LEAVE_DEVICE, PARK, WorkerState

_PARKS_S: Final[Seconds] = 30.0
"""One that is not parked within this is killed."""
_WAKES_S: Final[Seconds] = 60.0
"""One that has not woken within this is loaded anew."""
_CONTEXT: Final[Bytes] = 512 * MiB
"""What a process holds of a GPU without any tensor, if nobody can say: more than any that we have seen."""


class ProcessParking:
    """
    Of one worker.

    :param program: the one by which the driver of a GPU parks processes; empty: there is none
    """

    def __init__(self, worker: Worker, program: str) -> None:
        self._worker = worker
        self._program = program
        self._task: asyncio.Task[None] | None = None
        self.wakes = False
        """The worker was parked, and starts again."""

    def why_not(self) -> str:
        """Return why the worker cannot be parked; empty: it can."""
        worker = self._worker
        head, run = worker.ready_head, worker.run
        if worker.state is not WorkerState.READY or worker.calls.exchanges or worker.standby or worker.replaced:
            return "it is in use"
        if head is None or not isinstance(run, ForkedProcess) or worker.device.source.emulation is not None:
            return "only models of handlers can be parked"
        if not (head.parks or self._checkpoint):
            return "its model is no torch module, and its handler has no park and wake"
        return ""

    def park(self) -> None:
        worker = self._worker
        worker.state = PARK[worker.state]
        worker.timers.later("park", _PARKS_S, lambda: worker.kill(f"it was not parked within {_PARKS_S:g} s"))
        if self._checkpoint:
            self._task = asyncio.get_running_loop().create_task(self._park_by_driver())
        else:
            self._run.ask(Kind.PARK)

    def on_parked(self, head: ParkedHead) -> None:
        worker = self._worker
        if worker.state is not WorkerState.PARKING:
            return
        worker.timers.cancel("park")
        if head.failed:
            worker.device.not_parked(worker, head.failed)
            return
        worker.state = LEAVE_DEVICE[worker.state]
        self._run.signal(signal.SIGSTOP)
        worker.device.on_parked(worker, 0 if self._checkpoint else self._held(head.held))

    def wake(self) -> None:
        """Memory is reserved for it."""
        worker = self._worker
        self.wakes = True
        self._run.signal(signal.SIGCONT)
        worker.limit_to(worker.memory)
        worker.timers.later("wake", _WAKES_S, lambda: self._failed(f"it did not wake within {_WAKES_S:g} s"))
        if self._checkpoint:
            self._task = asyncio.get_running_loop().create_task(self._wake_by_driver())
        else:
            self._run.ask(Kind.WAKE, WakeHead())

    def on_woken(self, head: WokenHead) -> None:
        worker = self._worker
        if worker.state is not WorkerState.STARTING or not self.wakes:
            return
        if head.failed:
            self._failed(head.failed)
            return
        worker.timers.cancel("wake")
        self.wakes = False
        wake_s = time.monotonic() - worker.load.begun_at - sum(seconds for _, seconds in head.phases)
        worker.state = BECOME_READY[worker.state]
        phases = worker.load.woken([("wake", max(0.0, wake_s)), *head.phases])
        worker.on_loaded(phases, worker.ready_head.occupation if worker.ready_head is not None else 0)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _failed(self, reason: str) -> None:
        worker = self._worker
        if worker.host.load_instead(worker, reason):
            worker.kill(f"{reason}: it is loaded anew")
        else:
            worker.kill(reason)

    @property
    def _run(self) -> ForkedProcess:
        run = self._worker.run
        assert isinstance(run, ForkedProcess)  # `why_not` saw to it
        return run

    @property
    def _checkpoint(self) -> str:
        """The program that lets the driver do it; empty: there is none, or no driver."""
        return self._program if self._worker.device.source.torch_device.startswith("cuda") else ""

    def _held(self, held: Bytes) -> Bytes:
        """Return what it holds of its device, *held* by its own account."""
        worker = self._worker
        source = worker.device.source
        if source.enforced:
            return 0
        by_driver = source.used_bytes([worker.pid]) if worker.pid is not None else None
        return by_driver or (held + worker.calls.memory.uncounted) or min(_CONTEXT, worker.memory)

    async def _park_by_driver(self) -> None:
        self.on_parked(ParkedHead(0, await self._toggle()))

    async def _wake_by_driver(self) -> None:
        if failed := await self._toggle():
            self._failed(failed)
        else:
            self._run.ask(Kind.WAKE, WakeHead(moves=False))

    async def _toggle(self) -> str:
        """Let the driver take all memory of the process off the GPU, or bring it back; return why it did not."""
        try:
            done = await asyncio.create_subprocess_exec(
                self._checkpoint, "--toggle", "--pid", str(self._worker.pid),
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            )  # fmt: skip
            said = (await done.communicate())[1].decode(errors="replace")
        except OSError as exc:
            return f"cuda-checkpoint could not be run: {exc}"
        return f"cuda-checkpoint ended with status {done.returncode}: {said[:200].strip()}" if done.returncode else ""
