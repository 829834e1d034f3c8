"""The functions that a node knows, and the check whether their code starts, for gateways that deploy one."""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from gpufaas_core.bundle import Manifest, WorkerSpec
from gpufaas_core.constraints import Constraint, satisfied
from gpufaas_core.environment import Environment, grouped, measure
from gpufaas_core.errors import CheckBroken, InvalidSpec
from gpufaas_core.model import Device, DeviceId, FunctionId
from gpufaas_gpu_manager.room import WorkerDevice
from gpufaas_gpu_manager.staging import Bundles, Staging
from gpufaas_gpu_manager.supervisor import Supervisor

_FORGOTTEN_KEPT: Final = 1000


class Functions:
    """See module. The gateway's `ports.Workers`, when both are in one process."""

    def __init__(
        self, devices: Mapping[DeviceId, WorkerDevice], bundles: Bundles, host: Supervisor, staging: Staging
    ) -> None:
        self.specs = staging.specs
        self._staging = staging
        self._devices = devices
        self._bundles = bundles
        self._host = host
        self._forgotten: deque[FunctionId] = deque()
        self._fetches: dict[FunctionId, asyncio.Future[str]] = {}

    async def define(self, spec: WorkerSpec) -> Manifest:
        """
        Install the bundle of *spec* so that its workers can start.

        :raises GpufaasError: it is not there, or corrupt; or it cannot be emulated
        """
        self._check_emulated(spec)
        if spec.image:
            if self._host.containers is None:
                raise InvalidSpec(
                    f"function {spec.name} has only an image ({spec.image}), and this platform runs no containers "
                    "('gpufaas serve --functions process'): serve with --functions auto, or build and deploy it from "
                    "its template with 'gpufaas up'"
                )
            manifest, self.specs[spec.function] = await self._host.containers.pull(spec)
            return manifest
        if self._host.fetch is not None:
            await self._host.fetch(spec)
        await asyncio.to_thread(self._bundles.install, spec.digest)
        self._know(spec)
        manifest = self._bundles.manifest(spec.digest)
        self._staging.know(spec, manifest.weights)
        return manifest

    def _check_emulated(self, spec: WorkerSpec) -> None:
        """:raises InvalidSpec: all devices that it may run on are emulated, and none of them can emulate it"""
        allowed = [
            each.source for each in self._devices.values() if satisfied(spec.constraints, each.source.device.labels)
        ]
        reasons = [each.emulation.reason_against(spec) if each.emulation else "" for each in allowed]
        if reasons and all(reasons):
            raise InvalidSpec(f"function {spec.name} can run on no device: {reasons[0]}")

    def expect(self, spec: WorkerSpec) -> None:
        """
        Add *spec*, which another node has defined and checked; its bundle is fetched when it first loads here.

        For functions with a bundle only: `define` pulls images.
        """
        self._know(spec)
        self._staging.know(spec, spec.weights)

    def _know(self, spec: WorkerSpec) -> None:
        self.specs[spec.function] = spec
        if spec.function in self._forgotten:
            self._forgotten.remove(spec.function)

    def prefetch(self, function: FunctionId) -> None:
        """Bring what the workers of *function* need to this node, in the background. A failure is left to its load."""
        spec = self.specs.get(function)
        if spec is None or spec.image or self._host.fetch is None or function in self._fetches:
            return
        self._fetches[function] = fetch = asyncio.ensure_future(self._host.fetch(spec))

        def done(ended: asyncio.Future[str]) -> None:
            del self._fetches[function]
            if not ended.cancelled():
                ended.exception()  # it was looked at: the load tries again, and says why it fails

        fetch.add_done_callback(done)

    def close(self) -> None:
        for fetch in self._fetches.values():
            fetch.cancel()

    async def forget(self, function: FunctionId) -> None:
        """No new calls will come. The newest `_FORGOTTEN_KEPT` stay known: calls that drain may still start them."""
        self._forgotten.append(function)
        self._staging.forget(function)
        self._host.parks.forget(function)
        self._host.layers.keep(self.specs.keys() - set(self._forgotten))
        while len(self._forgotten) > _FORGOTTEN_KEPT:
            self.specs.pop(self._forgotten.popleft(), None)
        self.unmount_if_gone(function)

    def unmount_if_gone(self, function: FunctionId) -> None:
        """Remove the secrets of a forgotten function without workers; a call that drains has them mounted again."""
        secrets = self._host.settings.secrets
        if secrets is None or function not in self._forgotten:
            return
        if all(each.spec.function != function for each in self._host.living()):
            secrets.unmount(function)

    def devices(self) -> list[Device]:
        return [each.source.device for each in self._devices.values()]

    async def environments(self, constraints: Sequence[Constraint] = ()) -> list[Environment]:
        """Return what workers find here, as the gateway's `ports.Workers.environments`; empty: no device fits."""
        nodes = [each.node for each in self.devices() if satisfied(constraints, each.labels)]
        return grouped({nodes[0]: await asyncio.to_thread(measure)}) if nodes else []

    async def check(self, spec: WorkerSpec) -> None:
        """
        Import the handler, or start the server, in a worker that does no more; its output goes to the function's log.

        :raises InvalidSpec: it does not import, or start; carries the traceback's last line
        :raises CheckBroken: the process could not be started, or was killed from outside
        """
        if spec.image:
            return  # it was pulled; what it needs to start may exist only when it is called
        if self._host.fetch is not None:
            await self._host.fetch(spec)  # before the time of the check begins
        sources = [each.source for each in self._devices.values()]
        allowed = (each for each in sources if satisfied(spec.constraints, each.device.labels))
        device = WorkerDevice(next(allowed, sources[0]), self._host.parks)
        # Not in the ledger: its memory is promised to no call. An import is held to the whole of the device.
        worker = self._host.make(device, replace(spec, ready_delay_s=0.0), device.ledger.capacity, checks=True)
        worker.begin()
        try:
            async with asyncio.timeout(self._host.settings.check_timeout_s):
                end = await worker.checked
        except TimeoutError:
            worker.end()
            if spec.kind == "server":
                raise InvalidSpec(
                    f"{spec.name} has yet {worker.run.waits_for} after "
                    f"{self._host.settings.check_timeout_s:g} s (what it printed: gpufaas logs {spec.name})"
                ) from None
            raise InvalidSpec(
                f"the handler of {spec.name} did not import within {self._host.settings.check_timeout_s:g} s: "
                "move slow work from the module's top level into load()"
            ) from None
        if end is None:
            return
        if end.blameless:
            raise CheckBroken(
                f"the process that checks {spec.name} was not started, or was killed, and not by us ({end.summary}): "
                "nothing was deployed, try again; if it happens again, see whether the machine is short of memory"
            )
        if spec.kind == "server":
            raise InvalidSpec(f"{spec.name} does not start: {end.summary}{worker.output.tail()}")
        raise InvalidSpec(
            f"the handler of {spec.name} does not import: {end.summary} (all of it: gpufaas logs {spec.name})"
        )
