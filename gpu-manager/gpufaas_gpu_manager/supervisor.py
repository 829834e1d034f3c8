"""The workers of a node that have a process or wait for one: how each runs, which ended, what they use."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from gpufaas_core.bundle import Manifest, WorkerSpec
from gpufaas_core.messages import Event, Grant, LoadCopy
from gpufaas_core.model import Bytes, FunctionId, Seconds, copy_id
from gpufaas_core.wire.heads import Imported
from gpufaas_gpu_manager.exchange import Exchange
from gpufaas_gpu_manager.forks import ForkServer
from gpufaas_gpu_manager.launch.processes import ForkedProcess, ServedProcess, describe_status
from gpufaas_gpu_manager.launch.recipes import Recipes
from gpufaas_gpu_manager.launch.served import Ports
from gpufaas_gpu_manager.layers import Layers
from gpufaas_gpu_manager.open_files import OpenFiles
from gpufaas_gpu_manager.output import LogSink
from gpufaas_gpu_manager.parked import ParkedWorkers
from gpufaas_gpu_manager.parking import ProcessParking
from gpufaas_gpu_manager.proc import cpu_seconds, usage_of
from gpufaas_gpu_manager.room import WorkerDevice
from gpufaas_gpu_manager.running import Running
from gpufaas_gpu_manager.standbys import Standbys
from gpufaas_gpu_manager.worker import Worker, WorkerDevicePort
from gpufaas_gpu_manager.worker_state import WorkerState


class ContainerEngine(Protocol):
    """Runs functions of images: the Docker engine (containers.Containers), or Kubernetes (kubernetes.Pods)."""

    @property
    def makes(self) -> str:
        """``containers`` or ``pods``; empty while it is not connected."""
        ...

    async def start(self) -> None:
        """
        Connect, and remove what an earlier run left behind; cheap once that is done. `pull` does it, too, if need be.

        :raises InvalidSpec: it cannot be used; says what is missing
        """
        ...

    async def pull(self, spec: WorkerSpec) -> tuple[Manifest, WorkerSpec]: ...

    def running(self, worker: Worker, recipes: Recipes) -> Running: ...

    async def close(self) -> None: ...


class Supervisor:
    """See module. `WorkerHost` of all of them."""

    def __init__(
        self,
        recipes: Recipes,
        logs: LogSink,
        report: Callable[[Event], None],
        on_said: Callable[[str], None],
        containers: ContainerEngine | None,
        fetch: Callable[[WorkerSpec], Awaitable[str]] | None,
        over: Callable[[Exchange], None],
        on_loaded: Callable[[WorkerSpec], None],
        on_gone: Callable[[Worker], None],
    ) -> None:
        """
        :param over: called with a call that has no worker any more
        :param on_loaded: called with what a worker runs that is ready
        :param on_gone: called with a worker that has no process, and will have none
        """
        self.over, self.on_loaded, self.on_gone = over, on_loaded, on_gone
        self.settings = recipes.settings
        self.recipes = recipes
        self.logs = logs
        self.report = report
        self.containers = containers
        self.fetch = fetch
        self.open_files = OpenFiles(on_said)
        self.parks = ParkedWorkers(recipes.host_cache, recipes.settings.park != "off")
        self.fork_server = ForkServer(self.on_exited, on_said)
        self.measured: dict[tuple[str, str], Bytes] = {}
        self.standbys = Standbys(
            self.fork_server, recipes.enforcement, self.settings.standby, self.next_number, self._loads,
            self.settings.isolation,
        )  # fmt: skip
        self.layers = Layers(self.fork_server, recipes, self.make, on_said)
        self._ports = Ports()
        self._workers: dict[int, Worker] = {}
        self._last_number = 1

    async def close(self) -> None:
        """End all workers and the fork server; returns when none is left."""
        idle = [each for each in self.living() if each.ready_head and not each.calls.exchanges and not each.spec.image]
        idle = [each for each in idle if not each.checks]  # workers end with their layer, without doing what was left
        for each in idle:
            each.end()
        await asyncio.gather(*(asyncio.wait([each.checked], timeout=self.settings.term_grace_s) for each in idle))
        self.standbys.close()
        self.parks.close()
        await self.layers.close()
        await self.fork_server.close()
        if self.containers is not None:
            await self.containers.close()
        for worker in self.living():
            worker.close()

    def living(self) -> list[Worker]:
        """Every worker that has a process or waits for one."""
        return list(self._workers.values())

    def make(
        self, device: WorkerDevicePort, spec: WorkerSpec, memory: Bytes, copy: int = 0, share: int = 0,
        *, checks: bool = False,
    ) -> Worker:  # fmt: skip
        worker = Worker(self, device, spec, memory, self.next_number(), copy, share, checks=checks)
        self._workers[worker.number] = worker
        return worker

    def next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def blank(self) -> dict[str, int]:
        """Return what there is for workers to come, for people: standbys, layers, parked workers, and their memory."""
        return {
            **self.standbys.status(), "layers": len(self.layers.all()), "layerMemory": self.layers.memory(),
            "parkedMemory": self.recipes.host_cache.status().parked_bytes, "woken": self.parks.woken,
            "wakesFailed": self.parks.failed,
        }  # fmt: skip

    def _loads(self) -> bool:
        return any(each.state is WorkerState.STARTING and not each.ready_head for each in self._workers.values())

    def start(self, device: WorkerDevice, spec: WorkerSpec, command: Grant | LoadCopy) -> Worker:
        """Start a worker on *device* when the victims that *command* names have freed their memory."""
        for victim in command.victims:
            device.end(victim, park=victim in command.parked)
        worker = device.wake(copy_id(command.function, command.copy), command.memory)
        if worker is None:
            worker = self.make(device, spec, command.memory, command.copy, command.parts[0].share)
            worker.load.warms = isinstance(command, LoadCopy) and not command.beside
        device.add(worker)
        if worker.state is WorkerState.WAITING and isinstance(worker.run, ForkedProcess):
            worker.run.prepare()
        return worker

    def load_instead(self, worker: Worker, reason: str) -> bool:
        """Start another worker in the place of *worker*, which was to wake, for the same start."""
        device = worker.device
        assert isinstance(device, WorkerDevice)  # one that only checks is never parked
        if device.lost or not device.wakes(worker):
            return False
        new = self.make(device, worker.spec, worker.memory, worker.copy, worker.share)
        device.load_instead(worker, new)
        self.parks.has_failed(worker)
        worker.output.say(f"gpufaas: it was parked and could not be woken, so it is loaded anew: {reason}")
        return True

    def change_share(self, device: WorkerDevice, worker: Worker, share: int) -> None:
        """Start a worker with *share* per cent of *device* in the place of *worker*, whose share cannot be changed."""
        new = self.make(device, worker.spec, worker.memory, worker.copy, share)
        new.load.warms = True
        device.successions.replace(worker, new)

    def running(self, worker: Worker) -> Running:
        """Return how *worker* runs, by the kind of its function."""
        if worker.spec.image:
            assert self.containers is not None  # `define` saw to it
            return self.containers.running(worker, self.recipes)
        if worker.spec.kind == "server":
            return ServedProcess(worker, self.recipes, self.fork_server, self._ports)
        return ForkedProcess(worker, self.recipes, self.fork_server, self.standbys, self.layers)

    def parking(self, worker: Worker) -> ProcessParking:
        return ProcessParking(worker, self.parks.checkpoint)

    def drop(self, worker: Worker) -> None:
        self._workers.pop(worker.number, None)
        self.recipes.host_cache.release(worker.number)
        self.on_gone(worker)

    def loaded(self, worker: Worker) -> None:
        self.parks.woken += worker.load.tier == "parked"
        self.on_loaded(worker.spec)

    def imported(self, worker: Worker, imported: Imported) -> None:
        self.layers.learn(worker, imported)

    def cpu_seconds(self) -> dict[FunctionId, Seconds]:
        """Return the CPU time of the living workers, by function."""
        used: dict[FunctionId, Seconds] = {}
        for worker in self._workers.values():
            if worker.pid is not None and not worker.checks:
                used[worker.spec.function] = used.get(worker.spec.function, 0.0) + cpu_seconds(worker.pid)
        return used

    async def usage_of(self, function: FunctionId) -> tuple[float, Bytes] | None:
        """Return the millicores and bytes that its workers use; None: it has none. Takes a quarter of a second."""
        pids = [each.pid for each in self._workers.values() if each.spec.function == function and not each.checks]
        living = [pid for pid in pids if pid is not None]
        return await asyncio.to_thread(usage_of, living) if living else None

    def on_exited(self, number: int, status: int) -> None:
        worker = self._workers.get(number)
        if worker is not None:
            worker.on_reaped(f"it ended with {describe_status(status)}")
        else:
            self.standbys.on_exited(number)
        self.layers.sweep()
