"""
The supervisor of a node: opens leases, keeps workers within the ledger, carries calls to them, reports facts.

One owner, the event loop: nothing here locks. Commands come in as method calls (`open`, `load`, `evict`, `resize`,
`abort`), facts go out through `report`. What the engine planned is made true here: victims end and are reaped before
the memory that they held is promised to the next worker.
"""

import asyncio
import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from gpufaas_core.bundle import Manifest, WorkerSpec
from gpufaas_core.constraints import Constraint, satisfied
from gpufaas_core.environment import Environment, grouped, measure
from gpufaas_core.errors import CheckBroken, InvalidSpec, LeaseRefused, UnknownFunction, WorkerCrashed
from gpufaas_core.frames import STREAM, UPGRADE, CallHead
from gpufaas_core.messages import DeviceLeft, Event, Finished, Lease, Load, Refused, Resized
from gpufaas_core.messages import LoadFailed as LoadFailedFact
from gpufaas_core.model import Bytes, CallId, CopyId, Device, DeviceId, FunctionId, Seconds, copy_id
from gpufaas_core.snapshot import DeviceSnapshot, NodeSnapshot, ResidentSnapshot, RunningCall
from gpufaas_core.units import format_bytes
from gpufaas_gpu_manager import exchange_state as states
from gpufaas_gpu_manager.cpu_time import cpu_seconds
from gpufaas_gpu_manager.devices import NodeDevice
from gpufaas_gpu_manager.enforcement import Enforcement
from gpufaas_gpu_manager.exchange import Exchange
from gpufaas_gpu_manager.forks import Zygote
from gpufaas_gpu_manager.launch.processes import ForkedProcess, ServedProcess, describe_status
from gpufaas_gpu_manager.launch.recipes import Bundles, Recipes
from gpufaas_gpu_manager.launch.served import Ports
from gpufaas_gpu_manager.open_files import OpenFiles
from gpufaas_gpu_manager.output import Logs
from gpufaas_gpu_manager.settings import NodeSettings
from gpufaas_gpu_manager.usage import usage_of
from gpufaas_gpu_manager.worker import Running, Worker, WorkerDevice
from gpufaas_gpu_manager.worker_state import WorkerState

_SHIM: Final = Path(__file__).with_name("shim")
_FORGOTTEN_KEPT: Final = 1000
_SETTLE_S: Final = 2.0
"""How long a GPU driver may take to give the memory of a dead process back before the node goes on regardless."""


class Containers(Protocol):
    """What runs images: the Docker engine (containers.Containers), or Kubernetes (kubernetes.Pods)."""

    @property
    def makes(self) -> str:
        """``containers`` or ``pods``; empty while it is not connected: some are when they are needed first."""
        ...

    async def pull(self, spec: WorkerSpec) -> tuple[Manifest, WorkerSpec]: ...

    def running(self, worker: Worker, recipes: Recipes) -> Running: ...

    async def close(self) -> None: ...


class Node:
    """See module. `report` gets facts for the scheduler, on the event loop and in order."""

    def __init__(
        self,
        devices: Sequence[NodeDevice],
        bundles: Bundles,
        logs: Logs,
        report: Callable[[Event], None],
        on_said: Callable[[str], None] = lambda _: None,
        settings: NodeSettings | None = None,
        containers: Containers | None = None,
        fetch: Callable[[WorkerSpec], Awaitable[None]] | None = None,
        enforcement: Enforcement | None = None,
    ) -> None:
        """
        :param containers: started, and closed with the node; None: functions of images cannot run here
        :param fetch: has what a function's workers need brought to this node, and raises a `GpufaasError` when that
            cannot be; may be cancelled. None: all that is deployed is here
        :param enforcement: closed with the node; None: RLIMIT_DATA alone
        """
        self.settings = settings or NodeSettings()
        self._devices = {each.device.id: WorkerDevice(each) for each in devices}
        self._bundles = bundles
        self.logs = logs
        self.report = report
        self.containers = containers
        self.fetch = fetch
        self.enforcement = enforcement or Enforcement()
        self._specs: dict[FunctionId, WorkerSpec] = {}
        self._workers: dict[int, Worker] = {}
        self._leases: dict[CallId, Exchange] = {}
        self._revoked: dict[CallId, float] = {}
        """Calls that were reported as finished before they came, with the number of the last lease that is void."""
        self._forgotten: deque[FunctionId] = deque()
        self._next_worker = 1
        self._epoch = 0
        self.open_files = OpenFiles(on_said)
        self.zygote = Zygote(self._on_forked, self._on_exited, on_said)
        cpus = sum(each.device.kind == "cpu" for each in devices)
        threads = self.settings.threads or max(1, len(os.sched_getaffinity(0)) // max(1, cpus))
        self.recipes = Recipes(bundles, self.settings, self.enforcement, threads)
        self._ports = Ports()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    # --- life ---

    async def start(self) -> None:
        """Start the zygote in the background; workers can be asked for at once, and wait for it."""
        self.zygote.start()

    async def close(self) -> None:
        """End all workers and the zygote; returns when none is left."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await self.zygote.close()
        if self.containers is not None:
            await self.containers.close()
        for worker in list(self._workers.values()):
            worker.close()
        await asyncio.to_thread(self.enforcement.close)
        for exchange in list(self._leases.values()):
            exchange.fail(WorkerCrashed("the platform is stopping: call again when it is back"))
        self._leases.clear()

    async def watch_devices(self, on_lost: Callable[[str], None], every_s: Seconds = 2.0) -> None:
        """
        Give up devices that cannot be used any more, until cancelled: their workers are killed, and the scheduler is
        told that they left. *on_lost* gets a line for people. A device that comes back is found at the next start.
        """
        while True:
            await asyncio.sleep(every_s)
            for device in list(self._devices.values()):
                reason = await asyncio.to_thread(device.source.fault)
                if reason:
                    self._lose(device, reason)
                    on_lost(f"device {device.id} is gone: {reason}; restart the node when it is back")

    def _lose(self, device: WorkerDevice, reason: str) -> None:
        del self._devices[device.id]
        waiting = [each for each in device.waiting if each.state is WorkerState.WAITING]
        device.waiting.clear()
        for worker in list(device.workers.values()):
            why = f"its device {device.id} is gone: {reason}"
            if worker in waiting:
                worker.fail_unstarted(why)
            else:
                worker.kill(why)
        self.report(DeviceLeft(device.id, reason))

    @property
    def fork_server(self) -> int | None:
        return self.zygote.pid

    @property
    def fault(self) -> str:
        """Why it can start no worker now, for people; empty: it can, or starts itself. Those that run are not meant."""
        return self.zygote.fault

    @property
    def makes(self) -> str:
        """What it makes of images: see `Containers`."""
        return self.containers.makes if self.containers is not None else ""

    def devices(self) -> list[Device]:
        return [each.source.device for each in self._devices.values()]

    async def environments(self, constraints: Sequence[Constraint] = ()) -> list[Environment]:
        """As the gateway's `ports.Workers.environments`: what workers find here; none without a device for them."""
        nodes = [each.node for each in self.devices() if satisfied(constraints, each.labels)]
        return grouped({nodes[0]: await asyncio.to_thread(measure)}) if nodes else []

    def workers(self) -> list[Worker]:
        """Every worker that has a process or waits for one."""
        return list(self._workers.values())

    def reserved(self, device: DeviceId) -> Bytes:
        return self._devices[device].ledger.used

    def snapshot(self) -> NodeSnapshot:
        """What is in memory and what runs, for a scheduler that does not know, or may know it wrongly."""
        now = time.monotonic()
        return NodeSnapshot(tuple(_snapshot(each, now) for each in self._devices.values()), self._epoch)

    def obey(self, epoch: int) -> None:
        """A scheduler of *epoch* has spoken: what older ones have granted and not opened here is refused."""
        self._epoch = max(self._epoch, epoch)

    # --- functions ---

    async def define(self, spec: WorkerSpec) -> Manifest:
        """
        Install the bundle of *spec* so that its workers can start.

        :raises GpufaasError: it is not there, or corrupt
        """
        if spec.image:
            if self.containers is None:
                raise InvalidSpec(
                    f"function {spec.name} has only an image ({spec.image}), and this platform runs no containers "
                    "('gpufaas serve --functions process'): serve with --functions auto, or build and deploy it from "
                    "its template with 'gpufaas up'"
                )
            manifest, self._specs[spec.function] = await self.containers.pull(spec)
            return manifest
        if self.fetch is not None:
            await self.fetch(spec)
        await asyncio.to_thread(self._bundles.install, spec.digest)
        self._specs[spec.function] = spec
        return self._bundles.manifest(spec.digest)

    def expect(self, spec: WorkerSpec) -> None:
        """
        Know *spec*, which another node has defined and checked; what it needs is fetched when it first loads here.

        For functions with a bundle: an image is pulled by `define`.
        """
        self._specs[spec.function] = spec

    async def forget(self, function: FunctionId) -> None:
        """No new calls will come. The last few forgotten are kept: calls that drain may still start them."""
        self._forgotten.append(function)
        while len(self._forgotten) > _FORGOTTEN_KEPT:
            self._specs.pop(self._forgotten.popleft(), None)
        self._unmount_if_gone(function)

    def _unmount_if_gone(self, function: FunctionId) -> None:
        """Values stay on disk no longer than somebody may read them; a call that drains has them mounted again."""
        secrets = self.settings.secrets
        if secrets is not None and all(each.spec.function != function for each in self._workers.values()):
            secrets.unmount(function)

    async def check(self, spec: WorkerSpec) -> None:
        """
        Import the handler, or start the server, in a scratch process that ends; its output goes to the function's log.

        :raises InvalidSpec: it does not import, or start; carries the traceback's last line
        :raises CheckBroken: the process could not be started, or was killed from outside
        """
        if spec.image:
            return  # it was pulled; what it needs to start may be there only when it is called
        if self.fetch is not None:
            await self.fetch(spec)  # before the time of the check begins
        server = spec.kind == "server"
        sources = [each.source for each in self._devices.values()]
        allowed = (each for each in sources if satisfied(spec.constraints, each.device.labels))
        device = WorkerDevice(next(allowed, sources[0]))
        # Not promised to anybody, so not in the ledger; but an import that takes a whole device is held to that.
        worker = Worker(self, device, spec, device.ledger.capacity, self._number(), scratch=True)
        self._workers[worker.number] = worker
        worker.begin()
        try:
            async with asyncio.timeout(self.settings.check_timeout_s):
                failure = await worker.checked
        except TimeoutError:
            worker.end()
            if server:
                raise InvalidSpec(
                    f"{spec.name} has yet {worker.run.waits_for} after "
                    f"{self.settings.check_timeout_s:g} s (what it printed: gpufaas logs {spec.name})"
                ) from None
            raise InvalidSpec(
                f"the handler of {spec.name} did not import within {self.settings.check_timeout_s:g} s: "
                "move slow work from the module's top level into load()"
            ) from None
        if failure is not None and worker.broken_check:
            raise CheckBroken(
                f"the process that checks {spec.name} was not started, or was killed, and not by us ({failure}): "
                "nothing was deployed, try again; if it happens again, see whether the machine is short of memory"
            )
        if failure is not None and server:
            raise InvalidSpec(f"{spec.name} does not start: {failure}{worker.output.tail(True)}")
        if failure is not None:
            raise InvalidSpec(
                f"the handler of {spec.name} does not import: {failure} (all of it: gpufaas logs {spec.name})"
            )

    # --- commands ---

    def open(self, lease: Lease) -> Exchange | None:
        """
        Open *lease*: on a miss, evict its victims and start its worker. Idempotent: command or call, the first opens.

        None: it was refused, and `Refused` is reported.
        """
        exchange = self._leases.get(lease.call)
        if exchange is not None and not (exchange.finished and exchange.lease.number < lease.number):
            return exchange
        if lease.call in self._revoked and lease.number <= self._revoked[lease.call]:
            self.report(Refused(lease.call, lease.device, "the call was given up before its lease came"))
            return None
        device = self._devices.get(lease.device)
        spec = self._specs.get(lease.function)
        if lease.epoch < self._epoch or device is None or spec is None or self._closing:
            self.report(
                Refused(lease.call, lease.device, "unknown device or function, or a lease of an older scheduler")
            )
            return None
        self._epoch = lease.epoch
        worker = device.workers.get(copy_id(lease.function, lease.copy))
        if lease.number < 0 and (worker is None or worker.state is not WorkerState.READY):
            # Nobody leads, so nothing may be evicted or reserved for it.
            self.report(Refused(lease.call, lease.device, "its worker is not ready, and no scheduler leads"))
            return None
        if worker is None and lease.cold:
            worker = self._start(device, spec, lease)
        if worker is None:
            self.report(Refused(lease.call, lease.device, "its worker is not there any more"))
            return None
        worker.used_at = now = time.monotonic()
        exchange = Exchange(lease, worker, asyncio.get_running_loop(), now)
        self._leases[lease.call] = exchange
        worker.exchanges[lease.call] = exchange
        if lease.cold:
            asyncio.get_running_loop().call_later(self.settings.untaken_s, self._expire, exchange)
        return exchange

    def open_for_body(self, lease: Lease) -> bool:
        """Open *lease* while the body of its call comes, so that a miss loads meanwhile. False: it was refused."""
        exchange = self.open(lease)
        if exchange is not None:
            exchange.state = states.BEGIN_BODY[exchange.state]
        return exchange is not None

    def call(self, lease: Lease, head: CallHead, body: bytes | memoryview) -> Exchange:
        """
        Give the call to its worker and return the exchange.

        :raises LeaseRefused: nothing was taken; the scheduler has been told and places it again
        """
        exchange = self.open(lease)
        if exchange is None:
            raise LeaseRefused(f"{lease.device} refused call {lease.call}")
        worker = exchange.worker
        exchange.arrive(head, body)
        if exchange.finished:
            self._leases.pop(lease.call, None)
            return exchange  # its worker failed before the call came: the exchange has the reason
        if lease.number < 0 and worker.exclusive and _busy(worker.device):
            if head.body_mode not in (STREAM, UPGRADE):  # of those, pieces may come at once
                exchange.state = states.QUEUE[exchange.state]
            worker.device.unled.append(exchange)
        elif worker.takes_calls:
            worker.bind(exchange)
        else:
            worker.unbound.append(exchange)
            if worker.state is WorkerState.READY:
                self._admit(worker.device)
        return exchange

    def abort(self, call: CallId, device: DeviceId) -> None:
        """*call* is not to be answered: its caller is gone, or told. Its slot is free when its worker lets go."""
        exchange = self._leases.get(call)
        if exchange is None:
            # Its caller went between the grant of the lease and its arrival here: there is nothing to stop.
            self.settle(call, device)
            return
        if exchange.abandoned:
            return
        exchange.state = states.ABANDON[exchange.state]
        worker = exchange.worker
        exchange.fail(UnknownFunction(f"{worker.spec.name} was removed while the call ran"))
        if exchange.slot is not None:
            exchange.slot.cancel()
            worker.watch_abandoned()
            return
        # No slot has it yet: it is over at once, while its worker may go on loading for the next.
        with contextlib.suppress(ValueError):
            worker.unbound.remove(exchange)
        worker.exchanges.pop(call, None)
        self.over(exchange)
        self._revoke(call, exchange.lease.number)
        self.report(Finished(call, exchange.lease.device, 0.0, ok=False))

    def settle(self, call: CallId, device: DeviceId) -> None:
        """The scheduler thinks that *call* runs here: if it does not, it is over, and a lease that comes late void."""
        if call not in self._leases:
            self._revoke(call, math.inf)
            self.report(Finished(call, device, 0.0, ok=False))

    def load(self, command: Load) -> None:
        """Load without a call."""
        if command.epoch < self._epoch:
            return  # its scheduler has been replaced, and the one that did knows nothing of this
        device, spec = self._devices.get(command.device), self._specs.get(command.function)
        if device is None or spec is None or self._closing:
            reason = "unknown device or function"
            self.report(LoadFailedFact(command.function, command.device, reason, copy=command.copy))
        elif copy_id(command.function, command.copy) not in device.workers:
            self._start(device, spec, command)

    def evict(self, function: FunctionId, device: DeviceId, copy: int = 0) -> None:
        if device in self._devices:
            self._end(self._devices[device], copy_id(function, copy))

    def resize(self, function: FunctionId, device: DeviceId, memory: Bytes, copy: int = 0) -> None:
        """
        The engine knows a worker's need better now, lends it memory, or needs that for others: change its reservation,
        and the limit that holds it to it. What it is to give back it gives as far as it does not use it (`Resized`).
        """
        key = copy_id(function, copy)
        worker = self._devices[device].workers.get(key) if device in self._devices else None
        if worker is None:
            return
        ledger = worker.device.ledger
        # Also what it was to have and did not get yet is given back: who asks waits for an answer.
        less = memory < max(worker.memory, worker.wanted)
        worker.wanted = memory
        if memory < worker.memory and worker.number in ledger.reserved:
            worker.shrink_to(memory)
            ledger.resize(worker.number, worker.memory)
            if worker.exchanges:
                worker.wanted = worker.memory
        self._admit(worker.device)
        worker.on_told()
        if less:
            self.report(Resized(function, device, worker.memory, copy))

    def cpu_seconds(self) -> dict[FunctionId, Seconds]:
        """Return the CPU time of the living workers, by function."""
        used: dict[FunctionId, Seconds] = {}
        for worker in self._workers.values():
            if worker.pid is not None and not worker.scratch:
                used[worker.spec.function] = used.get(worker.spec.function, 0.0) + cpu_seconds(worker.pid)
        return used

    async def usage_of(self, function: FunctionId) -> tuple[float, Bytes] | None:
        """Return the millicores and bytes that its workers use now; None: it has none. Takes a quarter of a second."""
        pids = [each.pid for each in self._workers.values() if each.spec.function == function and not each.scratch]
        living = [pid for pid in pids if pid is not None]
        return await asyncio.to_thread(usage_of, living) if living else None

    # --- within ---

    def _number(self) -> int:
        self._next_worker += 1
        return self._next_worker

    def _end(self, device: WorkerDevice, key: CopyId) -> None:
        worker = device.workers.pop(key, None)
        if worker is not None:
            worker.end()

    def _start(self, device: WorkerDevice, spec: WorkerSpec, command: Lease | Load) -> Worker:
        for victim in command.victims:
            self._end(device, victim)
        worker = Worker(self, device, spec, command.memory, self._number(), command.copy)
        self._workers[worker.number] = worker
        device.workers[worker.key] = worker
        device.waiting.append(worker)
        self._admit(device)
        return worker

    def _admit(self, device: WorkerDevice) -> None:
        """Start those that wait, in order, as far as the memory goes: a later smaller one does not overtake."""
        for resident in device.workers.values():
            if resident.wanted > resident.memory and device.ledger.resize(resident.number, resident.wanted):
                resident.limit_to(resident.wanted)
            ready = resident.state is WorkerState.READY and resident.told
            if ready and resident.unbound and not self._is_to_grow(resident):
                resident.outgrown = False
                resident.bind_waiting()
        while device.waiting and not device.settling:
            worker = device.waiting[0]
            if worker.state is WorkerState.WAITING:
                if not device.ledger.reserve(worker.number, worker.memory):
                    if worker.memory > device.ledger.capacity or not device.ledger.reserved:
                        device.waiting.popleft()
                        worker.fail_unstarted(
                            f"it needs {format_bytes(worker.memory)} but {device.id} has "
                            f"{format_bytes(device.ledger.capacity)}"
                        )
                        continue
                    self._end_hoarders(device)
                    return
                worker.begin()
            device.waiting.popleft()

    def _is_to_grow(self, worker: Worker) -> bool:
        """Whether it gets the room that it waits for: some that have it are about to be gone."""
        if worker.takes_calls:
            return False
        device = worker.device
        self._end_hoarders(device)
        staying = {each.number for each in device.workers.values() if not each.ends}
        return bool(device.ledger.reserved.keys() - staying)

    def _end_hoarders(self, device: WorkerDevice) -> None:
        """Memory is waited for that idle workers should have given back, and use behind the scheduler's back."""
        for worker in device.workers.values():
            if worker.wanted < worker.memory and not worker.exchanges and worker.state is WorkerState.READY:
                worker.wanted = worker.memory
                worker.kill(
                    f"it uses {format_bytes(worker.memory)} without a call, more than is reserved for it, and others "
                    "need that"
                )

    def _on_forked(self, number: int, pid: int) -> None:
        worker = self._workers.get(number)
        if worker is not None:
            worker.on_started(pid)

    def _on_exited(self, number: int, status: int) -> None:
        worker = self._workers.get(number)
        if worker is not None:
            worker.on_reaped(f"it ended with {describe_status(status)}")

    def gone(self, worker: Worker) -> None:
        device = worker.device
        if device.workers.get(worker.key) is worker:
            del device.workers[worker.key]
        if worker.spec.secrets and worker.spec.function in self._forgotten:
            self._unmount_if_gone(worker.spec.function)
        if worker.pid is not None and not device.source.enforced and not worker.scratch:
            device.settling += 1
            task = asyncio.get_running_loop().create_task(self._settle(device, worker))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            device.ledger.release(worker.number)
            self._admit(device)

    async def _settle(self, device: WorkerDevice, worker: Worker) -> None:
        """A driver gives memory back a little after the process is gone: ask it, within a bound, first."""
        assert worker.pid is not None
        until = time.monotonic() + _SETTLE_S
        # NVML has no event for this; it is off the invocation path, and bounded.
        while time.monotonic() < until and device.source.used_bytes([worker.pid]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        device.settling -= 1
        device.ledger.release(worker.number)
        self._admit(device)

    def over(self, exchange: Exchange) -> None:
        exchange.state = states.END[exchange.state]
        if exchange.state != states.UNCLAIMED:
            self._leases.pop(exchange.lease.call, None)
        else:
            # It failed before its call came, which would otherwise open the lease, and load, once more.
            asyncio.get_running_loop().call_later(self.settings.untaken_s, self._forget_failed, exchange)
        device = exchange.worker.device
        while device.unled and not _busy(device):
            following = device.unled.popleft()
            if not following.finished and following.worker.state is WorkerState.READY:
                following.state = states.LEAVE[following.state]
                following.worker.bind(following)

    def _forget_failed(self, exchange: Exchange) -> None:
        if self._leases.get(exchange.lease.call) is exchange:
            del self._leases[exchange.lease.call]

    def _expire(self, exchange: Exchange) -> None:
        """A lease that was opened, and whose call does not come: its gateway died, or does not reach this node."""
        if exchange.state == states.OPENED:
            self.abort(exchange.lease.call, exchange.lease.device)

    def _revoke(self, call: CallId, number: float) -> None:
        """Leases of *call* up to that *number* are void: they may be on their way here."""
        self._revoked[call] = number
        asyncio.get_running_loop().call_later(self.settings.untaken_s, self._revoked.pop, call, None)

    def drop(self, worker: Worker) -> None:
        self._workers.pop(worker.number, None)

    def running(self, worker: Worker) -> Running:
        """Return how *worker* is to run: decided by what its function is."""
        if worker.spec.image:
            assert self.containers is not None  # `define` saw to it
            return self.containers.running(worker, self.recipes)
        if worker.spec.kind == "server":
            return ServedProcess(worker, self.recipes, self.zygote, self._ports)
        return ForkedProcess(worker, self.recipes, self.zygote)


def _snapshot(device: WorkerDevice, now: Seconds) -> DeviceSnapshot:
    living = (WorkerState.WAITING, WorkerState.STARTING, WorkerState.READY)
    workers = sorted((each for each in device.workers.values() if each.state in living), key=lambda each: each.used_at)
    running = sorted(
        (each for worker in workers for each in worker.exchanges.values() if not each.finished),
        key=lambda each: each.opened_at,
    )
    return DeviceSnapshot(
        device.source.device,
        tuple(
            ResidentSnapshot(
                function=each.spec.function,
                digest=each.spec.digest,
                memory=each.wanted,
                copy=each.copy,
                idle_s=now - each.used_at,
                loading=each.state is not WorkerState.READY,
                load_age_s=now - each.asked_at if each.state is not WorkerState.READY else 0.0,
            )
            for each in workers
        ),
        tuple(
            RunningCall(
                call=each.lease.call,
                function=each.lease.function,
                copy=each.lease.copy,
                age_s=now - (each.opened_at if each.slot is None else each.bound_at),
                begun=each.slot is not None,
                cold=each.lease.cold,
                abandoned=each.abandoned,
            )
            for each in running
        ),
    )


def _busy(device: WorkerDevice) -> bool:
    """Whether a call has the device to itself."""
    return any(
        each.slot is not None and not each.finished
        for worker in device.workers.values()
        if worker.exclusive
        for each in worker.exchanges.values()
    )
