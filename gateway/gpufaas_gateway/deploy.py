"""
`Deployer`: deploys, updates, removes and scales functions, and reads those of the store at start.

A deployment is checked, and installed on the nodes. `handover` stores it, tells the scheduler, and decides when calls
find the new revision.
"""

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from secrets import token_hex
from typing import Final
from weakref import WeakValueDictionary

from msgspec.structs import replace

from gpufaas_core.bundle import Kind, WorkerSpec
from gpufaas_core.environment import Environment
from gpufaas_core.errors import FunctionExists, GpufaasError, InvalidSpec, StorageAway, UnknownArtifact, UnknownFunction
from gpufaas_core.model import Function, Need
from gpufaas_core.owners import PLAN
from gpufaas_core.plans import PlanVersion
from gpufaas_core.taken import joined
from gpufaas_core.units import Bytes
from gpufaas_gateway.catalogue import Catalogue, ServedRevision
from gpufaas_gateway.errors import KeptByPlan, Overtaken, Unavailable
from gpufaas_gateway.handover import Handovers
from gpufaas_gateway.history import Revision, RolledBack, meant
from gpufaas_gateway.names import check_name
from gpufaas_gateway.namespaces import Namespaces
from gpufaas_gateway.owner import in_force, owner_of
from gpufaas_gateway.placement import check_needs
from gpufaas_gateway.ports import Artifacts, Scheduler, SecretStore, Store, Workers
from gpufaas_gateway.quotas import NamespaceQuotas
from gpufaas_gateway.revision import (
    MODEL_BASE,
    check_fits,
    deployed,
    first_reservation,
    image_sizes,
    need_of,
    unavailable,
    worker_spec,
)
from gpufaas_gateway.spec import DEFAULT_NAMESPACE, Defaults, FunctionRecord, FunctionSpec, placement_of, read_options

log = logging.getLogger(__name__)

_ARTIFACT: Final = re.compile(r"artifact ([0-9a-f]{64})\b")
_LOADS_AT_ONCE: Final = 4  # of bundles at start: more only compete for the disk


class Deployer:
    """Call `load` first. One event loop owns it."""

    def __init__(
        self,
        store: Store,
        artifacts: Artifacts,
        workers: Workers,
        scheduler: Scheduler,
        defaults: Defaults | None = None,
        *,
        secrets: SecretStore,
        clock: Callable[[], float] = time.time,
        new_revision: Callable[[], str] = lambda: token_hex(4),
    ) -> None:
        """
        :param clock: returns Unix seconds
        :param new_revision: returns a text that no earlier revision of the function had
        """
        self.catalogue = Catalogue()
        self._store = store
        self._artifacts = artifacts
        self._workers = workers
        self._scheduler = scheduler
        self._secrets = secrets
        self._defaults = defaults or Defaults()
        self._clock = clock
        self._new_revision = new_revision
        self.quotas = NamespaceQuotas(store, self._change_gate)
        self.namespaces = Namespaces(store, secrets, self.quotas, self.catalogue)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.plan: Callable[[], PlanVersion | None] = lambda: None
        """Returns the plan in force; set by who composes the gateway."""
        self._changing: dict[str, Callable[[], None]] = {}
        """By function that is being changed here: applies the last change that the store reported meanwhile."""
        self.handovers = Handovers(store, scheduler, workers, self.catalogue, self._define, self._show, self._change)

    async def load(self) -> None:
        """
        Read all functions from the store: install each bundle, and tell the scheduler.

        A function whose bundle is missing, damaged or no longer valid is listed as unavailable with the reason; it can
        be deployed again. All other functions are served.

        :raises StorageFailed: the store cannot be read
        """
        await self.namespaces.load()
        await self.quotas.load()
        at_once = asyncio.Semaphore(_LOADS_AT_ONCE)
        records = await asyncio.to_thread(self._store.all)
        async with asyncio.TaskGroup() as tasks:
            for record in records:
                tasks.create_task(self._take_up(record, at_once))
        self.catalogue.loaded = True
        log.info("catalogue.loaded functions=%d", len(records))

    def adopt(self, record: FunctionRecord, worker: WorkerSpec, function: Function) -> None:
        """
        Serve a revision that another gateway deployed, checked and stored. Does nothing if it is served already.

        Tells the scheduler, which may get a call of the revision from here before it hears of it from the store.
        """
        old = self.catalogue.find(record.full_name)
        if old is not None and old.record.state == record.state:
            return
        if record.full_name in self._changing:
            self._changing[record.full_name] = lambda: self.adopt(record, worker, function)
            return
        if old is not None and old.record.revision == record.revision:
            old.record = record
            self.handovers.watch(old)
            return
        try:
            options = read_options(record.spec, self._defaults)
        except GpufaasError as exc:  # a newer release deployed it
            log.warning("function.unavailable id=%s reason=%s", record.function_id, exc)
            self._show(unavailable(record, str(exc), self._defaults, self.catalogue.stats(record)))
            return
        new = ServedRevision(record, worker, options, function, self.catalogue.stats(record), {})
        self._scheduler.deploy(function, worker)
        self._show(new)
        self.handovers.watch(new)
        if old is not None:
            self.handovers.on_replaced(old.function_id)

    def dropped(self, full_name: str) -> None:
        """Stop serving a function that another gateway removed."""
        if full_name in self._changing:
            self._changing[full_name] = lambda: self.dropped(full_name)
            return
        if (old := self.catalogue.find(full_name)) is not None:
            self.catalogue.drop(old)

    async def deploy(self, spec: FunctionSpec, update: bool, by: str = "", tries: int = 3) -> ServedRevision:
        """
        Deploy *spec*; with *update*, let it take the calls of the deployed revision (`handover`). An error changes
        nothing. Return the new revision, which may not serve yet.

        :param by: who does it, for the history
        :param tries: how often it is done anew, on what is there then, if other gateways change the function meanwhile
        :raises Overtaken: they do so all the time
        :raises InvalidSpec: a value is malformed, or refers to something that does not exist; the message names it
        :raises NoDeviceFits: it needs more memory than any device has
        :raises QuotaExceeded: its namespace would exceed its quota of functions or memory
        :raises FunctionExists: it is deployed, and *update* is false
        :raises UnknownFunction: it is not deployed, and *update* is true
        :raises UnknownArtifact: the bundle names weights that were never uploaded
        :raises StorageAway: they were uploaded, and the nodes do not find them yet
        :raises StorageFailed: it could not be stored
        """
        check_name(spec.service)
        namespace = spec.namespace or DEFAULT_NAMESPACE
        full_name = f"{spec.service}.{namespace}"
        with self.namespaces.entered(namespace):
            try:
                async with self._change(full_name):
                    return await self._deploy(spec, namespace, update, by)
            except Overtaken:
                if not tries:
                    raise
        await self._read_again(full_name)
        return await self.deploy(spec, update, by, tries - 1)

    def unchanged(self, spec: FunctionSpec) -> str | None:
        """
        Return the last revision of its function, which serves or is about to, if that was deployed by the same *spec*.

        None where a new one may be another all the same: the name of an image may have come to mean another image,
        and a function may have read a secret before its value was changed.
        """
        old = self.catalogue.find(f"{spec.service}.{spec.namespace or DEFAULT_NAMESPACE}")
        if old is None or old.unavailable is not None or not old.options.bundle or spec.secrets:
            return None
        pending, failed = old.record.handover.pending, old.record.handover.failed
        last = old.record if pending is None else pending.record
        same = last.spec == spec and failed is None and old.function_id not in self._scheduler.status().failing
        return last.revision if same else None

    async def history(self, function: ServedRevision) -> list[Revision]:
        """Return the last revisions of *function*, newest first."""

        def read() -> list[Revision]:
            kept = self._store.history(function.full_name) or [_noted(function, function.record.created_at)]
            return [replace(each, gone=bool(each.digest) and not self._artifacts.has(each.digest)) for each in kept]

        return await asyncio.to_thread(read)

    async def rollback(self, function: ServedRevision, to: str | None, by: str = "") -> RolledBack:
        """
        Deploy anew what `history.meant` finds; if that serves, and another revision is pending, only withdraw that one.

        :raises GpufaasError: as of `history.meant` and `deploy`
        """
        found = meant(function.name, await self.history(function), to)
        with suppress(Overtaken):  # then there is another one to go back from
            async with self._change(function.full_name):
                if await self.handovers.withdraw(found.revision, self.catalogue.find(function.full_name)):
                    return RolledBack(found.revision, found.revision)
        new = await self.deploy(found.spec, update=True, by=by)
        return RolledBack(new.record.revision, found.revision)

    async def _deploy(self, spec: FunctionSpec, namespace: str, update: bool, by: str) -> ServedRevision:
        """Deploy while the caller holds the function's lock and its namespace."""
        full_name = f"{spec.service}.{namespace}"
        old = self.catalogue.find(full_name)
        if update and old is None:
            raise UnknownFunction(f"function {spec.service} in {namespace} is not deployed: create it with POST")
        if old is not None and not update:
            raise FunctionExists(
                f"function {spec.service} in {namespace} exists: update it with PUT, or remove it first"
            )
        self._claim(full_name, namespace, 0)
        options = read_options(spec, self._defaults)
        options.placement.check(spec.service, self._workers.devices())
        await _check_secrets(self._secrets, spec.secrets or (), namespace)
        if options.bundle and not await asyncio.to_thread(self._artifacts.has, options.bundle):
            raise InvalidSpec(
                f"annotation gpufaas.bundle: no bundle {options.bundle} was uploaded: "
                "PUT it to /system/artifacts/SHA256 first, as 'gpufaas deploy' does"
            )
        record = FunctionRecord(
            name=spec.service,
            namespace=namespace,
            spec=spec,
            revision=self._new_revision(),
            created_at=old.record.created_at if old else self._clock(),
        )
        try:
            new = await self._define(record)
            self._claim(full_name, namespace, new.reserved)
            check_fits(new, self._workers.devices())
            await self._workers.check(new.spec)
            noted = [_noted(new, self._clock(), by)]
            if old is not None:  # perhaps a release without histories deployed it
                noted.insert(0, _noted(old, old.record.created_at))
            await self.handovers.begin(new, old, noted)
        except BaseException as exc:
            if not self.handovers.has(record.function_id):
                await self._workers.forget(record.function_id)
            named = _ARTIFACT.search(str(exc)) if isinstance(exc, UnknownArtifact) else None
            if named is not None and await asyncio.to_thread(self._artifacts.has, named[1]):
                raise StorageAway(f"artifact {named[1]} was uploaded, but no node finds it yet: try again") from exc
            raise
        log.info("function.deployed id=%s memory=%d", new.function_id, new.spec.memory)
        return new

    async def remove(self, name: str, namespace: str) -> None:
        """
        Remove a function everywhere. Running calls end normally; those that wait or load are told that it was removed.

        :raises UnknownFunction: it is not deployed
        :raises StorageFailed: the store could not remove it; it stays deployed
        """
        full_name = f"{name}.{namespace}"
        async with self._change(full_name):
            old = self.catalogue.find(full_name)
            if old is None:
                raise UnknownFunction(f"function {name} in {namespace} is not deployed: there is nothing to remove")
            await asyncio.to_thread(self._store.remove, full_name)
            self.catalogue.drop(old)
            await self.handovers.end(old)
        log.info("function.removed id=%s", old.function_id)

    async def environments(self, spec: FunctionSpec | None = None) -> list[Environment]:
        """
        Return what nodes provide to functions: the nodes on which *spec* may run, or all nodes for None.

        :raises InvalidSpec: its constraints are malformed, or no device satisfies them
        """
        if spec is None:
            return await self._workers.environments()
        placement = placement_of(spec, self._defaults, image=False)
        placement.check(spec.service, self._workers.devices())
        return await self._workers.environments(placement.constraints)

    def scale(self, function: ServedRevision, replicas: int) -> None:
        """
        Set the desired copies of a function, within its bounds, until its next update or restart of the platform. If
        it has a scaling rule, the autoscaler decides again after a while.

        The scheduler's status shows the number at once; the copies follow.

        :raises Unavailable: the function cannot be called
        :raises KeptByPlan: the plan in force says how many it has
        """
        if function.unavailable is not None:
            raise Unavailable(f"{function.name} cannot be scaled: {function.unavailable}")
        owner, why = owner_of(function, in_force(self.plan(), self._scheduler.status().plan))
        if owner == PLAN:
            raise KeptByPlan(
                f"{function.full_name} cannot be scaled: {why}: take it out of the plan first (gpufaas plan unpin "
                f"{function.name}, apply or rollback)"
            )
        self._scheduler.scale(function.function_id, replicas)
        log.info("function.scaled id=%s replicas=%d", function.function_id, replicas)

    async def _take_up(self, record: FunctionRecord, at_once: asyncio.Semaphore) -> None:
        async with at_once, self._change(record.full_name):
            try:
                new = await self._define(record)
                self._scheduler.deploy(new.function, new.spec)
            except GpufaasError as exc:
                log.warning("function.unavailable id=%s reason=%s", record.function_id, exc)
                new = unavailable(record, str(exc), self._defaults, self.catalogue.stats(record))
            self._show(new)
            self.handovers.watch(new)
            if (pending := record.handover.pending) is not None:  # nothing is loaded: it takes the calls on trial
                try:
                    await self.handovers.begin(await self._define(pending.record), new)
                except GpufaasError as exc:
                    log.warning("function.unavailable id=%s reason=%s", pending.record.function_id, exc)

    async def _define(self, record: FunctionRecord) -> ServedRevision:
        """Install the revision and compute what it needs."""
        options = read_options(record.spec, self._defaults)
        # The kind is written in the bundle, so it is known only once the bundle is installed.
        kind: Kind = "model" if options.bundle else "server"
        asked = worker_spec(record, options, kind, Need(), memory=options.memory or MODEL_BASE)
        manifest = await self._workers.define(asked)
        if manifest.needs is not None:
            check_needs(record.name, manifest.needs, await self._workers.environments(asked.constraints))
        need = need_of(manifest.kind, options, self._defaults)
        memory = options.memory or first_reservation(manifest)
        sizes: dict[str, Bytes] | None = None
        if asked.image:
            sizes = image_sizes(options, memory, options.placement.among(self._workers.devices()))
            memory = max(sizes.values(), default=memory)
        spec = replace(worker_spec(record, options, manifest.kind, need, memory), weights=manifest.weights)
        if spec != asked:
            await self._workers.define(spec)
        learnt, taken = [await asyncio.to_thread(self._store.profiles, each) for each in (spec.profiled, spec.taken_as)]
        learnt = joined(learnt, taken)
        if sizes is not None:
            # The use of a container is not measured: the reservation is what it declares, or its limit.
            learnt = {kind: replace(each, occupation=sizes.get(kind, memory)) for kind, each in learnt.items()}
        return deployed(record, spec, options, manifest, learnt, sizes or {}, self.catalogue.stats(record))

    def _change_gate(self, namespace: str) -> None:
        gate = self.quotas.gate(namespace)
        for each in self.catalogue.all(namespace):
            each.gate = gate

    @asynccontextmanager
    async def _change(self, full_name: str) -> AsyncIterator[None]:
        """Let nobody else change the function: neither a task here, nor what the store tells of other gateways."""
        lock = self._locks.setdefault(full_name, asyncio.Lock())  # it lives as long as someone holds it or waits for it
        async with lock:
            self._changing[full_name] = lambda: None
            try:
                yield
            finally:
                self.quotas.release(full_name)
                self._changing.pop(full_name)()

    async def _read_again(self, full_name: str) -> None:
        """Serve what the store has of the function: another gateway has changed it."""
        for record in await asyncio.to_thread(self._store.all):
            if record.full_name == full_name:
                new = await self._define(record)
                return self.adopt(record, new.spec, new.function)
        return self.dropped(full_name)

    def _claim(self, full_name: str, namespace: str, memory: Bytes) -> None:
        """:raises QuotaExceeded: the namespace has less than *memory* left"""
        has = {each.full_name: each.reserved for each in self.catalogue.all(namespace)}
        self.quotas.claim(full_name, namespace, memory, has)

    def _show(self, new: ServedRevision) -> None:
        new.gate = self.quotas.gate(new.namespace)
        self.catalogue.show(new)


def _noted(deployed: ServedRevision, at: float, by: str = "") -> Revision:
    """Return the entry of a history for *deployed*, which serves, or is about to."""
    return Revision(deployed.record.revision, deployed.record.spec, at, by, deployed.options.bundle)


async def _check_secrets(secrets: SecretStore, names: Sequence[str], namespace: str) -> None:
    known = await asyncio.to_thread(secrets.names, namespace) if names else []
    for name in names:
        if name not in known:
            raise InvalidSpec(
                f"secrets: {name[:80]!r} does not exist in {namespace}: create it first, with POST /system/secrets "
                "or 'gpufaas secret create'"
            )
