"""
A node as its scheduler, its gateways and its operator see it: commands in, facts out, devices, start and stop.

The event loop owns all state, so nothing here or below locks. The node carries out what the engine planned: victims end
and are reaped before their memory is promised to the next worker. `Grants` has the calls, `Functions` what is deployed,
the `Supervisor` the workers, and each `WorkerDevice` its memory.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence

from msgspec.structs import replace

from gpufaas_core import messages as m
from gpufaas_core.bundle import WorkerSpec
from gpufaas_core.constraints import COMPUTE, FIXED_AT_START
from gpufaas_core.model import Bytes, Device, DeviceId, FunctionId, NodeId, Seconds, copy_id
from gpufaas_core.snapshot import NodeSnapshot
from gpufaas_gpu_manager.defined import Functions
from gpufaas_gpu_manager.device_snapshot import snapshot_of
from gpufaas_gpu_manager.devices import NodeDevice
from gpufaas_gpu_manager.enforcement import Enforcement
from gpufaas_gpu_manager.grants import Grants
from gpufaas_gpu_manager.host_cache import HostCache
from gpufaas_gpu_manager.launch.recipes import Recipes
from gpufaas_gpu_manager.open_calls import OpenCalls
from gpufaas_gpu_manager.output import LogSink
from gpufaas_gpu_manager.room import WorkerDevice
from gpufaas_gpu_manager.settings import NodeSettings
from gpufaas_gpu_manager.staging import Bundles, Staging
from gpufaas_gpu_manager.supervisor import ContainerEngine, Supervisor
from gpufaas_gpu_manager.worker import Worker
from gpufaas_gpu_manager.worker_state import WorkerState


class Node:
    """See module. `report` gets the facts for the scheduler, on the event loop and in order."""

    def __init__(
        self,
        devices: Sequence[NodeDevice],
        bundles: Bundles,
        logs: LogSink,
        report: Callable[[m.Event], None],
        on_said: Callable[[str], None] = lambda _: None,
        settings: NodeSettings | None = None,
        containers: ContainerEngine | None = None,
        fetch: Callable[[WorkerSpec], Awaitable[str]] | None = None,
        enforcement: Enforcement | None = None,
        *,
        host_cache: HostCache,
    ) -> None:
        """
        :param containers: closed with the node; None: functions of images cannot run here
        :param fetch: brings what a function's workers need to this node, and returns where it came from (see
            `WorkerHost.fetch`), or raises `GpufaasError`; may be cancelled. None: everything that is deployed is here
        :param enforcement: closed with the node; None: RLIMIT_DATA alone
        :param host_cache: closed with the node
        """
        settings = settings or NodeSettings()
        self.report = report
        self.on_said = on_said
        self.enforcement = enforcement or Enforcement()
        cpus = sum(each.torch_device == "cpu" for each in devices)
        threads = settings.threads or max(1, len(os.sched_getaffinity(0)) // max(1, cpus))
        self.host_cache = host_cache
        node = devices[0].device.node if devices else NodeId("")
        self.staging = Staging(node, self.host_cache, bundles, report, fetch)
        recipes = Recipes(bundles, settings, self.enforcement, threads, self.host_cache)
        self._calls = OpenCalls(settings.untaken_s)
        self.host = Supervisor(
            recipes, logs, report, on_said, containers, fetch, self._calls.over, self.staging.loaded,
            lambda worker: self.functions.unmount_if_gone(worker.spec.function),
        )  # fmt: skip
        for each in devices:
            each.device = replace(
                each.device,
                host_memory=self.host_cache.status().budget,
                parks=self.host.parks.enabled and settings.parks(each.torch_device),
                ahead=True,
                fetches=fetch is not None,
                fetches_from=False,
                fetches_ranges=False,
            )
        self._devices = {each.device.id: WorkerDevice(each, self.host.parks) for each in devices}
        self.functions = Functions(self._devices, bundles, self.host, self.staging)
        self.grants = Grants(self._devices, self.functions.specs, self.host, self._calls)

    # --- life ---

    async def start(self) -> None:
        """Start the fork server in the background; workers can be asked for at once, and wait for it."""
        for device in self._devices.values():
            if device.source.note:
                self.on_said(device.source.note)
        self.host.fork_server.start()
        self.host.standbys.begin([self.host.recipes.home_of(each.source) for each in self._devices.values()])

    async def close(self) -> None:
        """End all workers and the fork server; returns when none is left."""
        self.grants.closing = True
        self.functions.close()
        self.staging.close()
        for device in self._devices.values():
            device.close()
        await self.host.close()
        await self.host_cache.close()
        for device in self._devices.values():
            await asyncio.to_thread(device.source.close)
        await asyncio.to_thread(self.enforcement.close)
        self._calls.close()

    async def watch_devices(self, on_lost: Callable[[str], None], every_s: Seconds = 2.0) -> None:
        """
        Look for devices that cannot be used any more, until cancelled. Their workers are killed, and the scheduler is
        told; *on_lost* gets a line for people. A device that comes back is found at the next start.
        """
        while True:
            await asyncio.sleep(every_s)
            for device in list(self._devices.values()):
                reason = await asyncio.to_thread(device.source.fault)
                if reason:
                    del self._devices[device.id]
                    device.lose(reason)
                    await asyncio.to_thread(device.source.close)
                    self.report(m.DeviceLeft(device.id, reason))
                    on_lost(f"device {device.id} is gone: {reason}; restart the node when it is back")

    @property
    def fault(self) -> str:
        """Why no worker can be started now, for people; empty: they can, or the node still starts."""
        return self.host.fork_server.fault

    @property
    def makes(self) -> str:
        """What functions of images run as: see `ContainerEngine`."""
        containers = self.host.containers
        return containers.makes if containers is not None else ""

    def devices(self) -> list[Device]:
        return [each.source.device for each in self._devices.values()]

    def workers(self) -> list[Worker]:
        """Every worker that has a process or waits for one."""
        return self.host.living()

    def reserved(self, device: DeviceId) -> Bytes:
        return self._devices[device].ledger.used

    def snapshot(self) -> NodeSnapshot:
        """Return what is in memory and what runs, for a scheduler that takes over or has lost track."""
        now = time.monotonic()
        return NodeSnapshot(
            tuple(snapshot_of(each, now) for each in self._devices.values()), self.grants.epoch, self.staging.snapshot()
        )

    def obey(self, epoch: int) -> None:
        """A scheduler of *epoch* leads: grants of older ones that were not opened here are refused."""
        self.grants.epoch = max(self.grants.epoch, epoch)

    # --- commands ---

    def execute(self, command: m.Command) -> None:
        """Carry out a command of the scheduler."""
        match command:
            case m.StartCall(grant):
                for each in grant.calls:
                    self.grants.open(grant.of(each))  # the first opens it; a refusal is said of each
            case m.Abort(call, _, True, reason, number, unbegun):
                self.grants.take_back(call, number, reason, unbegun=unbegun)
            case m.Abort(call, device, False, reason):
                self.grants.abort(call, device, reason)
            case m.EvictCopy(function, device, copy, to):
                self.evict(function, device, copy, park=to == "host")
            case m.Resize(function, device, memory, copy):
                self.resize(function, device, memory, copy)
            case m.LoadCopy():
                self.load(command)
            case m.SetLimit(function, device, copy, share):
                self.limit(function, device, copy, share)
            case m.Stage(function):
                self.staging.stage(function)
            case m.FetchBundle(function):
                self.functions.prefetch(function)

    def load(self, command: m.LoadCopy) -> None:
        """Start a worker without a call."""
        if command.epoch < self.grants.epoch:
            return  # its scheduler was replaced, and its successor does not know of this load
        device, spec = self._devices.get(command.device), self.functions.specs.get(command.function)
        if device is None or spec is None or self.grants.closing:
            reason = "unknown device or function"
            gone = (copy_id(command.function, command.copy), *command.victims) if device is not None else ()
            for each in gone:  # for the scheduler: what was parked and should wake, and what should make room
                self._devices[command.device].end(each, park=each in command.parked)
            self.report(m.CopyFailed(command.function, command.device, reason, copy=command.copy))
        elif copy_id(command.function, command.copy) not in device.workers:
            self.host.start(device, spec, command)

    def evict(self, function: FunctionId, device: DeviceId, copy: int = 0, *, park: bool = False) -> None:
        if device in self._devices:
            self._devices[device].end(copy_id(function, copy), park=park)

    def resize(self, function: FunctionId, device: DeviceId, memory: Bytes, copy: int = 0) -> None:
        """
        Change a worker's reservation, and its limit: the engine has measured its need, lends it memory, or needs memory
        for others. It gives back only what it does not use (`Resized`).
        """
        owner = self._devices.get(device)
        worker = owner.workers.get(copy_id(function, copy)) if owner is not None else None
        if owner is not None and worker is not None and owner.resize(worker, memory):
            self.report(m.Resized(function, device, worker.memory, copy, memory))

    def limit(self, function: FunctionId, device: DeviceId, copy: int, share: int) -> None:
        """Cap a copy at *share* per cent of its device's compute; 0: as its function says."""
        owner = self._devices.get(device)
        worker = owner.workers.get(copy_id(function, copy)) if owner is not None else None
        if owner is None or worker is None:
            return
        source, share = owner.source, share or worker.spec.need.held
        if source.emulation is not None:
            source.emulation.limit(function, copy, share)
        elif share == worker.share:
            return
        elif worker.state is not WorkerState.WAITING and source.device.labels.get(COMPUTE) in FIXED_AT_START:
            self.host.change_share(owner, worker, share)
        else:
            worker.share = share
            if worker.limits is not None:
                worker.limits.hold_to_share(share)
