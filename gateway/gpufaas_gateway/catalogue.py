"""
The functions that are deployed: what the store keeps, checked, installed on the nodes and known to the scheduler.

The invocation path reads (`Catalogue.find`, one dict lookup); the management routes write. A deployment becomes visible
in one step, after all that can fail has not: until then the previous revision answers, afterwards it drains.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Final
from weakref import WeakValueDictionary

from msgspec.structs import replace

from gpufaas_core.bundle import Kind, Manifest, WorkerSpec
from gpufaas_core.constraints import GPU
from gpufaas_core.environment import Environment
from gpufaas_core.errors import (
    FunctionExists,
    GpufaasError,
    InvalidSpec,
    NoDeviceFits,
    StorageAway,
    StorageFailed,
    UnknownArtifact,
    UnknownFunction,
)
from gpufaas_core.messages import Learnt
from gpufaas_core.model import Device, EngineStatus, Function, FunctionId, Profile
from gpufaas_core.scaling import ScalingRule
from gpufaas_core.units import Bytes, MiB, Seconds, format_bytes
from gpufaas_gateway.cors import Cors
from gpufaas_gateway.errors import QuotaExceeded, Unavailable
from gpufaas_gateway.metrics import FunctionStats, Metrics
from gpufaas_gateway.namespaces import Namespaces
from gpufaas_gateway.placement import NOTHING_ASKED, Placement, check_needs
from gpufaas_gateway.ports import Artifacts, Scheduler, Secrets, Store, Workers
from gpufaas_gateway.quotas import Gate, NamespaceQuotas
from gpufaas_gateway.spec import (
    DEFAULT_NAMESPACE,
    DEFAULT_QUEUE,
    Defaults,
    FunctionRecord,
    FunctionSpec,
    Options,
    check_name,
    placement_of,
    read_options,
)

log = logging.getLogger(__name__)

# The first reservation of a model that nobody has measured. Weights are held once (mapped); a quarter more is for
# activations and for loaders that hold a layer twice. The examples need 17 to 93 MiB beyond their weights, which does
# not grow with the weights: 192 MiB is twice that. Both are corrected after the first call.
MODEL_HEADROOM: Final = 1.25
MODEL_BASE: Final[Bytes] = 192 * MiB
HTTP_BASE: Final[Bytes] = 96 * MiB
"""A CPU function without a model: the handler's imports and its requests."""
SERVER_BASE: Final[Bytes] = 192 * MiB
"""A program with an interpreter of its own. Nothing measures it later: what is reserved is what it may take."""

_FIRST: Final[Mapping[Kind, tuple[Bytes, float]]] = {
    "http": (HTTP_BASE, 1.0),
    "server": (SERVER_BASE, 1.0),
    "model": (MODEL_BASE, MODEL_HEADROOM),
}
"""What is reserved first: the one, and so many times the files that are no code, which a handler may read."""

# A guess for kinds of device that the function never ran on, good enough to prefer a hit; the first call corrects it.
_LOAD_BASE_S: Final[Seconds] = 0.5
_LOAD_BYTES_PER_S: Final = 1e9
_SERVICE_S: Final[Seconds] = 0.1

_ARTIFACT: Final = re.compile(r"artifact ([0-9a-f]{64})\b")

_LOADS_AT_ONCE: Final = 4  # of bundles at start: more only compete for the disk


@dataclass(slots=True, eq=False)
class Deployed:
    """One function as it is served now. The invocation path reads it and holds it for the length of a call."""

    name: str
    namespace: str
    full_name: str
    """``NAME.NAMESPACE``."""
    function_id: FunctionId
    spec: WorkerSpec
    record: FunctionRecord
    function: Function
    """As the scheduler knows it; its profiles are those of the moment of deployment."""
    timeout_s: Seconds
    max_body: Bytes
    body_patience_s: Seconds
    async_queue: str
    """Through which its asynchronous calls go."""
    exclusive: bool
    stats: FunctionStats
    """Shared by the revisions of a function, so that an update loses no count."""
    profiles: dict[str, Profile]
    """What it costs by device kind, as learnt so far."""
    scaling: ScalingRule | None = None
    """What its labels say about copies; None: nothing."""
    placement: Placement = NOTHING_ASKED
    """On which devices it may run, and by whose wish."""
    unavailable: str | None = None
    """Why it cannot be called; None: it can."""
    idempotent: bool = False
    """A call of it may be run twice."""
    cors: Cors | None = None
    """Which pages of other origins may call it; None: it says so itself."""
    why_memory: str = ""
    """How its first reservation came about."""
    gate: Gate | None = None
    """What its calls have to pass; None: its namespace has no limit on calls."""

    @property
    def reserved(self) -> Bytes:
        """What it has of its namespace's quota: its first reservation, as often as copies of it are kept."""
        return self.spec.memory * max(1, self.function.min_copies)

    @property
    def invocations(self) -> int:
        return self.stats.invocations


class Catalogue:
    """
    All deployed functions. One event loop owns it.

    `load` first; `keep` runs beside the server and saves counts and profiles.
    """

    def __init__(
        self,
        store: Store,
        artifacts: Artifacts,
        workers: Workers,
        scheduler: Scheduler,
        metrics: Metrics,
        defaults: Defaults | None = None,
        *,
        secrets: Secrets | None = None,
        clock: Callable[[], float] = time.time,
        new_revision: Callable[[], str] = lambda: token_hex(4),
    ) -> None:
        """
        :param secrets: those that functions may ask for; None: there are none
        :param clock: Unix seconds
        :param new_revision: a text that no earlier revision of the same name has
        """
        self._store = store
        self._artifacts = artifacts
        self._workers = workers
        self._scheduler = scheduler
        self._metrics = metrics
        self._secrets = secrets
        self._defaults = defaults or Defaults()
        self._clock = clock
        self._new_revision = new_revision
        self.on_replaced: Callable[[FunctionId], None] = lambda _: None
        """Told of a revision that was updated, after which it takes no more calls and those that it has run on."""
        self.quotas = NamespaceQuotas(store, self._change_gate)
        self.namespaces = Namespaces(
            store, lambda name: bool(self.all(name)), self._drop_contents, lambda name: self.quotas.adopt(name, None)
        )
        self._functions: dict[str, Deployed] = {}
        """By ``NAME.NAMESPACE``."""
        self._called: dict[str, Deployed] = {}
        """By every form that a URL may use: those of the default namespace by ``NAME`` too."""
        self._by_id: dict[FunctionId, Deployed] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._unsaved: dict[tuple[str, str], Profile] = {}
        self._deploying: dict[str, Callable[[], None]] = {}
        """Functions that are being deployed here, with what the store said of them last meanwhile, to be done after."""
        self._claims: dict[str, tuple[str, Bytes]] = {}
        """Namespace, and what they will reserve, of functions that are being deployed here, by `Deployed.full_name`."""
        self._loaded = False

    @property
    def loaded(self) -> bool:
        """Whether `load` is done: before, a function that is not found may still come."""
        return self._loaded

    async def load(self) -> None:
        """
        Take up what the store has: install each bundle, and tell the scheduler.

        A function whose bundle is gone, damaged or no longer valid is listed as not available, with the reason, and
        can be deployed again; the others are served.

        :raises StorageFailed: the store cannot be read
        """
        await self.namespaces.load()
        await self.quotas.load()
        at_once = asyncio.Semaphore(_LOADS_AT_ONCE)
        records = await asyncio.to_thread(self._store.all)
        async with asyncio.TaskGroup() as tasks:
            for record in records:
                tasks.create_task(self._take_up(record, at_once))
        self._loaded = True
        log.info("catalogue.loaded functions=%d", len(self._functions))

    def adopt(self, record: FunctionRecord, worker: WorkerSpec, function: Function) -> None:
        """
        Serve a revision that another gateway deployed, in place of what is there. One that is there already stays.

        It was checked and stored by the one that deployed it; the scheduler is told as well, since calls of it may be
        placed from here before it has heard of it otherwise.
        """
        if record.full_name in self._deploying:
            self._deploying[record.full_name] = lambda: self.adopt(record, worker, function)
            return
        old = self._functions.get(record.full_name)
        if old is not None and old.record.revision == record.revision:
            return
        try:
            options = read_options(record.spec, self._defaults)
        except GpufaasError as exc:  # a newer release deployed it
            log.warning("function.unavailable id=%s reason=%s", record.function_id, exc)
            self._show(self._unavailable(record, str(exc)))
            return
        new = self._served(record, worker, options, function, {})
        self._scheduler.deploy(function, worker)
        self._show(new)
        if old is not None:
            del self._by_id[old.function_id]
            self.on_replaced(old.function_id)

    def dropped(self, full_name: str) -> None:
        """Another gateway removed the function, if it is still here."""
        if full_name in self._deploying:
            self._deploying[full_name] = lambda: self.dropped(full_name)
            return
        old = self._functions.get(full_name)
        if old is None:
            return
        self._drop(old)
        del self._by_id[old.function_id]

    def complete(self) -> None:
        """All that others had deployed when this gateway started is adopted."""
        self._loaded = True

    def find(self, name: str) -> Deployed | None:
        """Return the function that a URL means by ``NAME`` or ``NAME.NAMESPACE``. O(1)."""
        return self._called.get(name)

    def all(self, namespace: str) -> list[Deployed]:
        """Return the functions of *namespace* by name; none when there is no such namespace."""
        return sorted((each for each in self._functions.values() if each.namespace == namespace), key=lambda d: d.name)

    def used(self, namespace: str) -> dict[str, int]:
        """Return what *namespace* has of what a quota bounds, by the fields of the wire; calls only while they are."""
        functions, gate = self.all(namespace), self.quotas.gate(namespace)
        calls = {} if gate is None else {"inFlight": gate.in_flight, "waiting": gate.waiting}
        return {"functions": len(functions), "memory": sum(each.reserved for each in functions), **calls}

    def everywhere(self) -> list[Deployed]:
        """Return the functions of all namespaces, ordered by namespace and name."""
        return sorted(self._functions.values(), key=lambda each: (each.namespace, each.name))

    async def deploy(self, spec: FunctionSpec, update: bool) -> Deployed:
        """
        Deploy *spec*; with *update*, in place of what is there, which then drains. On any error nothing has changed.

        :raises InvalidSpec: what is asked for cannot be; the message says where
        :raises NoDeviceFits: it needs more memory than any device has
        :raises QuotaExceeded: its namespace would have more functions, or more memory, than it may
        :raises FunctionExists: not an update, and the name is taken
        :raises UnknownFunction: an update of what is not there
        :raises UnknownArtifact: weights that the bundle names were never uploaded
        :raises StorageFailed: it could not be kept
        """
        check_name(spec.service)
        namespace = spec.namespace or DEFAULT_NAMESPACE
        full_name = f"{spec.service}.{namespace}"
        with self.namespaces.entered(namespace):
            async with self._lock(full_name):
                self._deploying[full_name] = lambda: None
                try:
                    return await self._deploy(spec, namespace, update)
                finally:
                    self._deploying.pop(full_name)()
                    self._claims.pop(full_name, None)

    async def _deploy(self, spec: FunctionSpec, namespace: str, update: bool) -> Deployed:
        """`deploy`, with the name and its namespace held."""
        full_name = f"{spec.service}.{namespace}"
        old = self._functions.get(full_name)
        if update and old is None:
            raise UnknownFunction(f"function {spec.service} in {namespace} is not deployed: create it with POST")
        if old is not None and not update:
            raise FunctionExists(
                f"function {spec.service} in {namespace} exists: update it with PUT, or remove it first"
            )
        self._claim(full_name, namespace, 0)
        options = read_options(spec, self._defaults)
        options.placement.check(spec.service, self._workers.devices())
        await self._check_secrets(spec.secrets or (), namespace)
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
            new = await self._define(record, options)
            self._claim(full_name, namespace, new.reserved)
            self._check_fits(new)
            await self._workers.check(new.spec)
            await self._commit(new, old)
        except BaseException as exc:
            await self._workers.forget(record.function_id)
            if isinstance(exc, UnknownArtifact):
                await self._check_unknown(exc)
            raise
        self._show(new)
        if old is not None:
            await self._retire(old, drain=True)
        log.info("function.deployed id=%s memory=%d", new.function_id, new.spec.memory)
        return new

    async def remove(self, name: str, namespace: str) -> None:
        """
        Remove a function everywhere. Calls that run end; those that wait are answered that it was removed.

        :raises UnknownFunction: it is not there
        :raises StorageFailed: it could not be taken out of the store, and is still there
        """
        full_name = f"{name}.{namespace}"
        async with self._lock(full_name):
            old = self._functions.get(full_name)
            if old is None:
                raise UnknownFunction(f"function {name} in {namespace} is not deployed: there is nothing to remove")
            await asyncio.to_thread(self._store.remove, full_name)
            if self._functions.get(full_name) is not old:
                return  # the store told us first
            self._drop(old)
            await self._retire(old, drain=False)
        log.info("function.removed id=%s", old.function_id)

    async def environments(self, spec: FunctionSpec | None = None) -> list[Environment]:
        """
        Return what nodes provide to functions, those nodes on which *spec* may run; None: all.

        :raises InvalidSpec: what it asks of its devices is malformed, or none has it
        """
        if spec is None:
            return await self._workers.environments()
        placement = placement_of(spec, self._defaults, image=False)
        placement.check(spec.service, self._workers.devices())
        return await self._workers.environments(placement.constraints)

    def scale(self, deployed: Deployed, replicas: int) -> None:
        """
        Want so many copies of a function, within its bounds. The scheduler's status says so at once, and the copies
        follow as they can. An update, or a restart of the platform, begins anew.

        :raises Unavailable: it cannot run
        """
        if deployed.unavailable is not None:
            raise Unavailable(f"{deployed.name} cannot be scaled: {deployed.unavailable}")
        self._scheduler.scale(deployed.function_id, replicas)
        log.info("function.scaled id=%s replicas=%d", deployed.function_id, replicas)

    def learn(self, learnt: Learnt) -> None:
        """Take note of a profile that the engine learnt; `save` keeps it. Cheap: it is told after every call."""
        deployed = self._by_id.get(learnt.function)
        if deployed is not None:
            deployed.profiles[learnt.kind] = learnt.profile
            self._unsaved[deployed.spec.digest, learnt.kind] = learnt.profile

    async def save(self) -> None:
        """
        Write what calls have changed since the last time: counts and profiles.

        :raises StorageFailed: some of it is not written, and stays to be
        """
        counts = {each.full_name: each.stats.finished - each.stats.saved for each in self._functions.values()}
        counts = {name: count for name, count in counts.items() if count}
        if counts:
            await asyncio.to_thread(self._store.add_invocations, counts)
            for name, count in counts.items():
                if name in self._functions:
                    self._functions[name].stats.saved += count
        for key, profile in list(self._unsaved.items()):
            await asyncio.to_thread(self._store.save_profile, *key, profile)
            if self._unsaved.get(key) is profile:
                del self._unsaved[key]

    async def keep(self, every_s: Seconds = 5.0) -> None:
        """
        `save` every so often until cancelled, and once more then. A kill loses at most the counts of that time.

        A disk that is full is logged, and tried again: it must not end the platform.
        """
        try:
            while True:
                await asyncio.sleep(every_s)
                await self._save_or_log()
        finally:
            await self._save_or_log()

    async def _check_secrets(self, names: Sequence[str], namespace: str) -> None:
        known = await asyncio.to_thread(self._secrets.names, namespace) if names and self._secrets else []
        for name in names:
            if name not in known:
                raise InvalidSpec(
                    f"secrets: {name[:80]!r} does not exist in {namespace}: create it first, with POST /system/secrets "
                    "or 'gpufaas secret create'"
                )

    async def _check_unknown(self, error: UnknownArtifact) -> None:
        """
        A node may not have heard of an upload yet, or cannot hear of it now: that is not the author's fault.

        :raises StorageAway: it is so
        """
        named = _ARTIFACT.search(str(error))
        if named is not None and await asyncio.to_thread(self._artifacts.has, named[1]):
            raise StorageAway(f"artifact {named[1]} was uploaded, but no node finds it yet: try again") from error

    async def _save_or_log(self) -> None:
        try:
            await self.save()
        except StorageFailed as exc:
            log.warning("catalogue.save_failed error=%s", exc)

    async def _take_up(self, record: FunctionRecord, at_once: asyncio.Semaphore) -> None:
        async with at_once, self._lock(record.full_name):
            try:
                deployed = await self._define(record, read_options(record.spec, self._defaults))
                self._scheduler.deploy(deployed.function, deployed.spec)
            except GpufaasError as exc:
                log.warning("function.unavailable id=%s reason=%s", record.function_id, exc)
                deployed = self._unavailable(record, str(exc))
            self._show(deployed)

    async def _define(self, record: FunctionRecord, options: Options) -> Deployed:
        """Install the revision and work out what it needs."""
        # The kind is written in the bundle, so it is known only once the bundle is installed.
        kind: Kind = "model" if options.bundle else "server"
        asked = _worker_spec(record, options, kind, slots=1, memory=options.memory or MODEL_BASE)
        manifest = await self._workers.define(asked)
        if manifest.needs is not None:
            check_needs(record.name, manifest.needs, await self._workers.environments(asked.constraints))
        slots = _slots(manifest.kind, options, self._defaults)
        memory = options.memory or first_reservation(manifest)
        sizes: dict[str, Bytes] | None = None
        if asked.image:
            sizes = _image_sizes(options, memory, options.placement.among(self._workers.devices()))
            memory = max(sizes.values(), default=memory)
        spec = _worker_spec(record, options, manifest.kind, slots, memory)
        if spec != asked:
            await self._workers.define(spec)
        learnt = await asyncio.to_thread(self._store.profiles, spec.digest)
        if sizes is not None:
            # Nobody measures a container: what it was declared to take, or may take, is what is reserved for it.
            learnt = {kind: replace(each, occupation=sizes.get(kind, memory)) for kind, each in learnt.items()}
        return self._deployed(record, spec, options, manifest, learnt, sizes or {})

    def _deployed(
        self,
        record: FunctionRecord,
        spec: WorkerSpec,
        options: Options,
        manifest: Manifest,
        learnt: dict[str, Profile],
        sizes: dict[str, Bytes],
    ) -> Deployed:
        exclusive = manifest.kind == "model" or spec.exclusive
        guess = Profile(
            load_s=_LOAD_BASE_S + manifest.weight_bytes / _LOAD_BYTES_PER_S,
            service_s=_SERVICE_S,
            occupation=spec.memory,
        )
        function = Function(
            id=record.function_id,
            digest=spec.digest,
            exclusive=exclusive,
            slots=spec.slots,
            profiles={"*": guess, **{kind: replace(guess, occupation=size) for kind, size in sizes.items()}, **learnt},
            min_copies=0 if options.scaling is None else options.scaling.pinned,
            max_copies=0 if options.scaling is None else options.scaling.max,
            max_queue=options.max_queue,
            constraints=options.placement.constraints,
            # Nobody measures a server: what is reserved for it is what it may take.
            floor=spec.memory if options.memory or manifest.kind == "server" else 0,
            elastic=spec.elastic,
        )
        served = self._served(record, spec, options, function, learnt)
        served.why_memory = _why_memory(manifest, options, function)
        return served

    def _served(
        self,
        record: FunctionRecord,
        spec: WorkerSpec,
        options: Options,
        function: Function,
        learnt: dict[str, Profile],
    ) -> Deployed:
        return Deployed(
            name=record.name,
            namespace=record.namespace,
            full_name=record.full_name,
            function_id=record.function_id,
            spec=spec,
            record=record,
            function=function,
            timeout_s=options.timeout_s,
            max_body=options.max_body,
            body_patience_s=options.body_patience_s,
            async_queue=options.async_queue,
            exclusive=function.exclusive,
            stats=self._stats(record),
            profiles=dict(learnt),
            scaling=options.scaling,
            placement=options.placement,
            idempotent=options.idempotent,
            cors=options.cors,
        )

    def _unavailable(self, record: FunctionRecord, reason: str) -> Deployed:
        digest = (record.spec.annotations or {}).get("gpufaas.bundle", "")
        return Deployed(
            name=record.name,
            namespace=record.namespace,
            full_name=record.full_name,
            function_id=record.function_id,
            spec=WorkerSpec(record.function_id, record.name, record.namespace, digest, "http"),
            record=record,
            function=Function(record.function_id, digest),
            timeout_s=self._defaults.timeout_s,
            max_body=self._defaults.max_body,
            body_patience_s=self._defaults.body_patience_s,
            async_queue=DEFAULT_QUEUE,
            exclusive=False,
            stats=self._stats(record),
            profiles={},
            unavailable=reason,
        )

    def _stats(self, record: FunctionRecord) -> FunctionStats:
        # A first deployment that fails must leave nothing in the metrics: its stats are registered by `_show`.
        known = self._metrics.functions.get(record.full_name)
        return known if known is not None else FunctionStats(record.full_name, record.invocations)

    def _claim(self, full_name: str, namespace: str, memory: Bytes) -> None:
        """
        Take what a deployment needs of its namespace's quota; `deploy` gives it back, once the function itself counts.

        What asks for no more than the function has is let in, also where the quota is below what is in use.

        :raises QuotaExceeded: it is not there to be taken
        """
        has = {each.full_name: each.reserved for each in self._functions.values() if each.namespace == namespace}
        before = has.pop(full_name, None)
        for other, (where, claimed) in self._claims.items():
            if where == namespace and other != full_name:
                has[other] = max(claimed, has.get(other, 0))
        quota, command = self.quotas.get(namespace), f"'gpufaas namespace quota {namespace}"
        if before is None and quota.max_functions is not None and len(has) >= quota.max_functions:
            raise QuotaExceeded(
                f"namespace {namespace} is at its quota of functions ({len(has)} of {quota.max_functions}), and "
                f"{full_name} would be one more: remove a function, or raise the quota with {command} --functions N'"
            )
        if quota.max_memory is not None and memory > (before or 0) and sum(has.values()) + memory > quota.max_memory:
            raise QuotaExceeded(
                f"{full_name} reserves {format_bytes(memory)}, and the other functions of namespace {namespace} have "
                f"{format_bytes(sum(has.values()))} of the {format_bytes(quota.max_memory)} that its quota allows: "
                "remove a function, declare less (annotation gpufaas.memory) or keep fewer copies, or raise the quota "
                f"with {command} --memory SIZE'"
            )
        self._claims[full_name] = namespace, memory

    def _change_gate(self, namespace: str) -> None:
        gate = self.quotas.gate(namespace)
        for each in self._functions.values():
            if each.namespace == namespace:
                each.gate = gate

    def _drop_contents(self, namespace: str) -> None:
        """Remove what the stores have of a namespace that goes. Blocks."""
        if self._secrets is not None:
            self._secrets.drop(namespace)
        self._store.remove_quota(namespace)

    def _check_fits(self, new: Deployed) -> None:
        devices = self._workers.devices()
        devices = new.placement.among(devices) or devices
        floor = new.function.floor
        if any(max(floor, new.function.profile(each.kind).occupation) <= each.memory for each in devices):
            return
        if not devices:
            raise NoDeviceFits(
                f"function {new.name} needs {format_bytes(new.spec.memory)}, and no device has joined yet"
            )
        largest = max(devices, key=lambda device: device.memory)
        need = new.function.profile(largest.kind)
        allowed = "that it may run on " if new.placement.asked else ""
        size = max(floor, need.occupation)
        how = (
            "measured"
            if need.measured and "memory" not in need.estimated and size > floor
            else ("declared" if _declares_memory(new.record.spec) else "estimated")
        )
        raise NoDeviceFits(
            f"function {new.name} needs {format_bytes(size)} ({how}) but the largest device "
            f"{allowed}({largest.id}) has {format_bytes(largest.memory)}: deploy a smaller or quantised model, add a "
            "larger device" + ("" if need.measured else ", or set the annotation gpufaas.memory if it needs less")
        )

    async def _commit(self, new: Deployed, old: Deployed | None) -> None:
        """Store, then schedule: neither without the other."""
        await asyncio.to_thread(self._store.put, new.record, new.spec, new.function)
        try:
            self._scheduler.deploy(new.function, new.spec)
        except BaseException:
            if old is not None:
                await asyncio.to_thread(self._store.put, old.record, old.spec, old.function)
            else:
                await asyncio.to_thread(self._store.remove, new.full_name)
            raise

    def _show(self, new: Deployed) -> None:
        """Make *new* the revision that is found, in place of any other."""
        new.stats = self._metrics.adopt(new.stats)
        new.stats.replicas = max(1, new.function.min_copies)
        new.stats.scaling = new.scaling
        new.gate = self.quotas.gate(new.namespace)
        self._functions[new.full_name] = new
        self._called[new.full_name] = new
        if new.namespace == DEFAULT_NAMESPACE:
            self._called[new.name] = new
        self._by_id[new.function_id] = new

    async def _retire(self, old: Deployed, drain: bool) -> None:
        """Let a revision that is no longer found go. One that was never available is unknown to the scheduler."""
        del self._by_id[old.function_id]
        if old.unavailable is None:
            self._scheduler.remove(old.function_id, drain)
        if drain:
            self.on_replaced(old.function_id)
        await self._workers.forget(old.function_id)

    def _drop(self, old: Deployed) -> None:
        """It is not found any more."""
        del self._functions[old.full_name]
        for key in [key for key in (old.name, old.full_name) if self._called.get(key) is old]:
            del self._called[key]
        self._metrics.forget(old.full_name)

    def _lock(self, full_name: str) -> asyncio.Lock:
        # Held weakly: a lock lives as long as someone holds it or waits for it.
        lock = self._locks.get(full_name)
        if lock is None:
            lock = self._locks[full_name] = asyncio.Lock()
        return lock


def replicas_of(deployed: Deployed, status: EngineStatus) -> int:
    """Return how many copies *deployed* should have: as it was scaled, else 1 or its minimum."""
    return status.desired.get(deployed.function_id, deployed.stats.replicas)


def first_reservation(manifest: Manifest) -> Bytes:
    """Return the memory to reserve for a worker that was never measured and does not declare it, in bytes."""
    base, factor = _FIRST[manifest.kind]
    return base + int((manifest.weight_bytes + manifest.data_bytes) * factor)


def _why_memory(manifest: Manifest, options: Options, function: Function) -> str:
    """Say how the first reservation came about, and how to change it."""
    if options.memory:
        return "declared"
    files, (base, factor) = manifest.weight_bytes + manifest.data_bytes, _FIRST[manifest.kind]
    why = f"{format_bytes(files)} of files x {factor:g} + {format_bytes(base)}"
    measured = [
        each.occupation for each in function.profiles.values() if each.measured and "memory" not in each.estimated
    ]
    if measured:
        why += f"; {format_bytes(max(measured))} since it was measured"
    return f"{why}; {'more while there is room; ' if function.elastic else ''}set gpufaas.memory to change it"


def _worker_spec(record: FunctionRecord, options: Options, kind: Kind, slots: int, memory: Bytes) -> WorkerSpec:
    env = dict(record.spec.env_vars or {})
    if record.spec.env_process:
        env["fprocess"] = record.spec.env_process
    env["OPENFAAS_NAME"] = record.name
    env["OPENFAAS_NAMESPACE"] = record.namespace
    return WorkerSpec(
        function=record.function_id,
        name=record.name,
        namespace=record.namespace,
        # An image's profiles are kept under its name: there is nothing else to tell it by before it is pulled.
        digest=options.bundle or f"image:{record.spec.image}",
        kind=kind,
        slots=slots,
        memory=memory,
        env=env,
        secrets=record.spec.secrets or (),
        stall_s=options.stall_s,
        image="" if options.bundle else record.spec.image,
        ready_path=options.ready_path,
        health_path=options.health_path,
        health_period_s=options.health_period_s,
        health_failures=options.health_failures,
        read_only=bool(record.spec.read_only_root_filesystem),
        cpus=options.cpus,
        memory_limit=0 if options.bundle else options.memory_limit,
        exclusive=not options.bundle and _is_exclusive_image(options),
        constraints=options.placement.constraints,
        elastic=not options.memory and kind != "server",
        labels={**(record.spec.labels or {}), "faas_function": record.name},
    )


def _is_exclusive_image(options: Options) -> bool:
    """An image on a GPU has it to itself during a call, as a model has, unless it says how many it takes at once."""
    return options.placement.gpu and options.slots in (None, 1)


def _image_sizes(options: Options, memory: Bytes, devices: Sequence[Device]) -> dict[str, Bytes]:
    """
    Return what to reserve for an image on each kind of *devices*.

    On a CPU device, what the kernel holds it to. On a GPU nobody holds it to anything, so unless gpufaas.memory says
    what it needs it gets all of it, which is what ``nvidia.com/gpu: 1`` means elsewhere; of several sizes of a kind,
    the largest.
    """
    sizes: dict[str, Bytes] = {}
    for each in devices:
        if each.labels.get(GPU) == "true":
            sizes[each.kind] = options.device_memory or max(each.memory, sizes.get(each.kind, 0))
        else:
            sizes[each.kind] = options.memory_limit or memory
    return sizes


def _slots(kind: Kind, options: Options, defaults: Defaults) -> int:
    if kind == "http":
        return options.slots or defaults.slots
    if kind == "server":
        one = not options.bundle and _is_exclusive_image(options)
        return options.slots or (1 if one else defaults.server_slots)
    if options.slots not in (None, 1):
        raise InvalidSpec(
            f"annotation gpufaas.slots: {options.slots} calls at once is for functions without a model; "
            "a model function has its device to itself while it runs: remove the annotation"
        )
    return 1


def _declares_memory(spec: FunctionSpec) -> bool:
    return "gpufaas.memory" in (spec.annotations or {}) or bool((spec.limits or {}).get("memory"))
